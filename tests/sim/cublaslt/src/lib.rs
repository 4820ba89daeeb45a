//! `libcublasLt.so.13` and `libcublasLt.so.12` of the simulated device: matrix products with shapes
//! in descriptors.

#![deny(unsafe_code)]

mod api;
#[path = "../../cublas/src/product.rs"]
mod product;
