//! The memory of other processes, copied.

pub(crate) mod region;
pub(crate) mod remote;
pub(crate) mod snapshot;
