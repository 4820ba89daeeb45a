//! `libcuda.so.1` of the simulated device: the driver API on host memory and worker threads.
//!
//! The exported functions are in `api`, one file per area. They use the safe modules beside it. The
//! library implements only the documented API, and contains nothing specific to NCCL or xpu_timer.

#![deny(unsafe_code)]

mod api;
mod capture;
mod context;
mod memory;
mod module;
mod process;
mod queue;
mod stream;
