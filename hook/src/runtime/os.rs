//! The process, its threads, clocks and descriptors, and which system calls the hook may make.

#[allow(unsafe_code)]
pub(crate) mod cancellation;
#[allow(unsafe_code)]
pub(crate) mod clock;
#[allow(unsafe_code)]
pub(crate) mod descriptor;
#[allow(unsafe_code)]
pub(crate) mod errno;
#[allow(unsafe_code)]
pub(crate) mod leaked_once;
#[allow(unsafe_code)]
pub(crate) mod process;
#[allow(unsafe_code)]
pub(crate) mod ptracer;
#[allow(unsafe_code)]
pub(crate) mod seccomp;
#[allow(unsafe_code)]
pub(crate) mod sys;
#[allow(unsafe_code)]
pub(crate) mod thread_id;
#[allow(unsafe_code)]
pub(crate) mod thread_state;
#[allow(unsafe_code)]
pub(crate) mod tsc;
pub(crate) mod tsc_clock;
#[allow(unsafe_code)]
pub(crate) mod wakeup;
