//! `libcublas.so.13` and `libcublas.so.12` of the simulated device: matrix products, computed by
//! the stream's thread.
//!
//! Like the real library it takes the driver through `cuGetProcAddress_v2`, and one call launches
//! one kernel. It knows the precisions that training uses; the others are refused.

#![deny(unsafe_code)]

mod api;
mod product;
