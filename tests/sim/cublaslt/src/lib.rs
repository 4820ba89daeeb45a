//! `libcublasLt.so.13` and `libcublasLt.so.12` of the simulated device: matrix products whose
//! shapes lie in descriptors.

#![deny(unsafe_code)]

mod api;
#[path = "../../cublas/src/product.rs"]
mod product;
