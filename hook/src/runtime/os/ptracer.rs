//! Permits the node collector to read this process where Yama restricts ptrace
//! (`/proc/sys/kernel/yama/ptrace_scope` is 1). The collector is not an ancestor of a rank, so it
//! can read the memory and stacks only of processes that name it.
//!
//! The hook names one process, not all of them (`PR_SET_PTRACER_ANY`), so no other program of the
//! same user gains access. A process without device calls does not connect to the collector, but
//! its stacks may matter, for example those of a spawned data loader worker. So the launcher passes
//! the collector's pid in an environment variable, and the hook makes the system call when the
//! library is loaded. Only connected processes learn of a collector that was restarted since then.
//! Without Yama, all of this has no effect.
//!
//! A process has only one such permission. The hook does not replace the host's: the transports of
//! Open MPI and UCX permit all processes and then read each other's memory.

use std::{
    ffi::{c_int, c_ulong, c_void},
    sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering},
};

use crate::runtime::{
    lifecycle::config,
    linker::dynamic::look_up,
    os::{environment, seccomp, thread_state},
};

/// Pid of the node collector, 0 while unknown.
static COLLECTOR_PID: AtomicI32 = AtomicI32::new(0);

/// The host has set its own permission.
static NAMED_BY_HOST: AtomicBool = AtomicBool::new(false);

/// The first prctl of the process, which may belong to another preloaded library.
static FIRST: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Prctl = unsafe extern "C" fn(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int;

/// Called when the library is loaded.
pub(crate) fn find_first() {
    FIRST.store(look_up(libc::RTLD_DEFAULT, c"prctl"), Ordering::Relaxed);
}

/// Records that the host sets its own permission.
pub(crate) fn named_by_host() {
    NAMED_BY_HOST.store(true, Ordering::Relaxed);
}

/// Permits the node collector to read this process and the children that it forks.
pub(crate) fn allow(collector: i32) {
    if collector > 0 {
        COLLECTOR_PID.store(collector, Ordering::Relaxed);
        set(collector);
    }
}

/// Renews the permission in a forked child, which does not inherit it. Async-signal-safe.
pub(crate) fn allow_in_child() {
    NAMED_BY_HOST.store(false, Ordering::Relaxed);
    let collector = COLLECTOR_PID.load(Ordering::Relaxed);
    if collector > 0 {
        set(collector);
    }
}

/// Called when the library is loaded. Returns whether the launcher has named a collector.
pub(crate) fn allow_from_environment() -> bool {
    let Some(value) = environment::at_start(c"XPU_TIMER_COLLECTOR_PID") else { return false };
    let collector = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
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
    // `PR_SET_PTRACER` takes an integer and changes only the permission. It fails without effect
    // when there is no Yama or the collector has ended.
    thread_state::in_hook(|| call(&FIRST, [libc::PR_SET_PTRACER as c_ulong, collector as c_ulong, 0, 0, 0]));
}

/// Calls prctl through `function`, or by the bare system call. Async-signal-safe.
pub(crate) fn call(function: &AtomicPtr<c_void>, [option, second, third, fourth, fifth]: [c_ulong; 5]) -> c_int {
    let function = function.load(Ordering::Relaxed);
    if function.is_null() {
        // SAFETY: the arguments come from a caller of prctl, or name a tracer, which is a number.
        return unsafe { libc::syscall(libc::SYS_prctl, option, second, third, fourth, fifth) } as c_int;
    }
    // SAFETY: the function accepts as many of these arguments as its option uses.
    unsafe { std::mem::transmute::<*mut c_void, Prctl>(function)(option as c_int, second, third, fourth, fifth) }
}
