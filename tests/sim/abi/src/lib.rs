//! What the shared objects of the simulated device have in common: the public ABI of the driver and of NCCL in own
//! declarations, the faults, and small tools for code that is called from C.
//!
//! Nothing here holds state of the device; each shared object has a copy of this crate of its own.

#![deny(unsafe_code)]

pub mod cuda;
pub mod driver;
pub mod fault;
pub mod ffi;
pub mod handles;
pub mod launch;
pub mod nccl;
pub mod trace;
