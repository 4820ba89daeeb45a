//! Who may look into this process where Yama restricts that (`/proc/sys/kernel/yama/ptrace_scope` is 1): the node collector,
//! which is no ancestor of a rank, reads memory and stacks only of processes that have named it.
//!
//! One process is named, never all of them (`PR_SET_PTRACER_ANY`): then no other program of the same user gains anything.
//! A process that makes no device call does not connect and so does not learn who the collector is, but its stacks
//! may be what matters - a spawned data loader worker is such a process. The launcher tells it by an environment variable, and
//! the one system call that it takes is made when the library is loaded. A collector that was started anew since then is
//! known only to processes that are connected. Where Yama is not at work nothing of this has any effect.
//!
//! A process has room for one name. What the host names by itself stays: the transports of Open MPI and UCX let everybody in and then
//! read each other's memory, which would fail.

use std::{
    ffi::{c_int, c_ulong, c_void},
    sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering},
};

use crate::runtime::{
    lifecycle::config,
    linker::dynamic::look_up,
    os::{seccomp, thread_state},
};

/// Process id of the node collector; 0 while unknown.
static COLLECTOR_PID: AtomicI32 = AtomicI32::new(0);

/// The host has named somebody.
static NAMED_BY_HOST: AtomicBool = AtomicBool::new(false);

/// The first prctl of the process, which may be another preloaded library's.
static FIRST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Prctl = unsafe extern "C" fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int;

/// When the library is loaded.
pub fn find_first() {
    FIRST.store(look_up(libc::RTLD_DEFAULT, c"prctl"), Ordering::Relaxed);
}

/// The host has named somebody.
pub fn named_by_host() {
    NAMED_BY_HOST.store(true, Ordering::Relaxed);
}

/// Lets the node collector look into this process, and into the children that it forks.
pub fn allow(collector: i32) {
    if collector > 0 {
        COLLECTOR_PID.store(collector, Ordering::Relaxed);
        set(collector);
    }
}

/// In a forked child, which does not inherit the permission. Async-signal-safe.
pub fn allow_in_child() {
    NAMED_BY_HOST.store(false, Ordering::Relaxed);
    let collector = COLLECTOR_PID.load(Ordering::Relaxed);
    if collector > 0 {
        set(collector);
    }
}

/// When the library is loaded: what the launcher knows.
pub fn allow_from_environment() -> bool {
    // SAFETY: a C string; while libraries are loaded no thread changes the environment.
    let value = unsafe { libc::getenv(c"XPU_TIMER_COLLECTOR_PID".as_ptr()) };
    if value.is_null() {
        return false;
    }
    // SAFETY: getenv's string is terminated.
    let text = unsafe { std::ffi::CStr::from_ptr(value) }.to_str().unwrap_or_default();
    let collector = text.parse().unwrap_or(0);
    let is_known = collector > 0 && !config::disabled();
    if is_known {
        allow(collector);
    }
    is_known
}

fn set(collector: i32) {
    if NAMED_BY_HOST.load(Ordering::Relaxed) || !seccomp::may_call() {
        return;
    }
    // PR_SET_PTRACER takes an integer and changes nothing but the permission. Without Yama, or for a process that is gone, it fails and
    // nothing happens.
    thread_state::in_hook(|| call(&FIRST, [libc::PR_SET_PTRACER as c_ulong, collector as c_ulong, 0, 0, 0]));
}

/// Calls a prctl that was found, or the system itself. Async-signal-safe.
pub fn call(function: &AtomicPtr<c_void>, [option, second, third, fourth, fifth]: [c_ulong; 5]) -> c_int {
    let function = function.load(Ordering::Relaxed);
    if function.is_null() {
        // SAFETY: the arguments of the caller, which are those of prctl(2).
        return unsafe { libc::syscall(libc::SYS_prctl, option, second, third, fourth, fifth) } as c_int;
    }
    // SAFETY: a function of this type, as far as a caller can see it: it takes as many of these as the option has.
    unsafe { std::mem::transmute::<*mut c_void, Prctl>(function)(option as c_int, second, third, fourth, fifth) }
}
