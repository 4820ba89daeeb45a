//! The common parts of the simulated device's shared objects: declarations of the public ABI of the
//! driver and NCCL, the faults, and small tools for code that is called from C.
//!
//! This crate contains no state of the device; each shared object has its own copy of the crate.

#![deny(unsafe_code)]

pub mod cuda;
pub mod driver;
pub mod fault;
pub mod ffi;
pub mod handles;
pub mod nccl;
pub mod trace;
