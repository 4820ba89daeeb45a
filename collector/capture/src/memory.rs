//! Copies of the memory of other processes.

pub(crate) mod region;
pub(crate) mod remote;
pub(crate) mod snapshot;
