//! Records operations in the ring and watches them, whatever library is called.
//!
//! Architecture Invariant: nothing here imports `interpose` or `backends`.

pub(crate) mod abi;
#[allow(unsafe_code)]
pub(crate) mod device;
pub(crate) mod lifecycle;
pub(crate) mod linker;
pub(crate) mod lock_free;
pub(crate) mod os;
pub(crate) mod overhead;
#[allow(unsafe_code)]
pub(crate) mod recorder;
pub(crate) mod watcher;
