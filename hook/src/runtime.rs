//! What the hook does inside the process whatever library is called: it records operations in the ring, and watches them.
//!
//! Nothing here imports [`crate::interpose`] or [`crate::backends`].

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
