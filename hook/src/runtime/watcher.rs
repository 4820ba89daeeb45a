//! The watcher thread: it detects hangs, and keeps the ring and the collector up to date.

#[allow(unsafe_code)]
pub(crate) mod connection;
pub(crate) mod coverage;
#[allow(unsafe_code)]
pub(crate) mod log;
pub(crate) mod running_time;
#[allow(unsafe_code)]
pub(crate) mod thread;
pub(crate) mod tracker;
pub(crate) mod watch;
