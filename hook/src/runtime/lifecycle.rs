//! The life of the hook in a process: configuration, lazy start, fork and exit.

#[allow(unsafe_code)]
pub(crate) mod config;
#[allow(unsafe_code)]
pub(crate) mod exit;
#[allow(unsafe_code)]
pub(crate) mod fork;
pub(crate) mod guard;
#[allow(unsafe_code)]
pub(crate) mod host_process;
pub(crate) mod panic_injection;
#[allow(unsafe_code)]
pub(crate) mod start;
