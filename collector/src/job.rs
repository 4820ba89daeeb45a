//! What identifies a job and its processes.

pub(crate) mod key;
pub(crate) mod partition;
pub(crate) mod rendezvous;
