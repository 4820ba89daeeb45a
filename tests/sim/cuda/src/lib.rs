//! `libcuda.so.1` of the simulated device: the driver API on host memory and worker threads.
//!
//! The exported functions are in `api`, one file per area, in terms of the safe modules beside it. It answers the
//! documented API only, knows nothing of NCCL and nothing of xpu_timer.

#![deny(unsafe_code)]

mod api;
mod capture;
mod context;
mod event;
mod graph;
mod memory;
mod module;
mod process;
mod queue;
mod stream;
mod work;
