//! `libcudart.so.13` and `libcudart.so.12` of the simulated device: the runtime API, implemented
//! with the driver.
//!
//! Like the real runtime, it is not linked with the driver. It loads `libcuda.so.1` at the first
//! call, and gets all functions, in legacy and per-thread form, from `cuGetProcAddress_v2`. It
//! contains no state of the device.

#![deny(unsafe_code)]

mod api;
mod driver;
mod state;
