//! Who may look into this process where Yama restricts that (`/proc/sys/kernel/yama/ptrace_scope` is 1): the node collector,
//! which is no ancestor of a rank, reads memory and stacks only of processes that have named it.
//!
//! One process is named, never all of them (`PR_SET_PTRACER_ANY`): then no other program of the same user gains anything.
//! A process that makes no device call does not connect and so does not learn who the collector is, but its stacks
//! may be what matters - a spawned data loader worker is such a process. The launcher tells it by an environment variable, and
//! the one system call that it takes is made when the library is loaded. A collector that was started anew since then is
//! known only to processes that are connected. Where Yama is not at work nothing of this has any effect.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::start;

/// Process id of the node collector; 0 while unknown.
static COLLECTOR_PID: AtomicI32 = AtomicI32::new(0);

/// Lets the node collector look into this process, and into the children that it forks.
pub fn allow(collector: i32) {
    if collector > 0 {
        COLLECTOR_PID.store(collector, Ordering::Relaxed);
        set(collector);
    }
}

/// In a forked child, which does not inherit the permission. Async-signal-safe.
pub fn allow_in_child() {
    let collector = COLLECTOR_PID.load(Ordering::Relaxed);
    if collector > 0 {
        set(collector);
    }
}

/// When the library is loaded: what the launcher knows.
pub fn allow_from_environment() {
    // SAFETY: a C string; while libraries are loaded no thread changes the environment.
    let value = unsafe { libc::getenv(c"XPU_TIMER_COLLECTOR_PID".as_ptr()) };
    if value.is_null() {
        return;
    }
    // SAFETY: getenv's string is terminated.
    let text = unsafe { std::ffi::CStr::from_ptr(value) }.to_str().unwrap_or_default();
    let collector = text.parse().unwrap_or(0);
    if collector > 0 && !start::disabled() {
        allow(collector);
        start::watch_forks();
    }
}

fn set(collector: i32) {
    // SAFETY: PR_SET_PTRACER takes an integer and changes nothing but the permission. Without Yama, or for a process that is
    // gone, it fails and nothing happens.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, collector as libc::c_ulong, 0, 0, 0) };
}
