//! `libcublas.so.13` and `libcublas.so.12` of the simulated device: matrix products, computed on
//! the stream's thread.
//!
//! Like the real library, it gets the driver through `cuGetProcAddress_v2`, and each call launches
//! one kernel. It supports the precisions that training uses and rejects others.

#![deny(unsafe_code)]

mod api;
mod product;
