//! `libcudart.so.13` and `libcudart.so.12` of the simulated device: the runtime API in terms of the driver.
//!
//! Like the real runtime it is not linked with the driver: it loads `libcuda.so.1` at the first call and takes every
//! function, in its legacy and its per-thread form, from `cuGetProcAddress_v2`. It holds no state of the device.

#![deny(unsafe_code)]

mod api;
mod driver;
mod fatbin;
mod state;
