//! Keeps the hook's state correct in children of fork and vfork.

use std::{
    ffi::c_long,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::runtime::{
    os::{
        process::{CONNECTION, FINAL_TURN_UNWANTED, IDLE, PROCESS, RING, SET_UP_IN, pid},
        ptracer, seccomp, sections, thread_state,
    },
    recorder::{Recorder, running},
};

static FORK_HANDLER: AtomicBool = AtomicBool::new(false);

/// The recorder, except in a child of vfork, which shares the parent's memory, and where a filter
/// forbids the check. Async-signal-safe.
pub(crate) fn running_in_own_process() -> Option<&'static Recorder> {
    running().filter(|_| seccomp::may_call() && !is_vfork_child())
}

/// Whether this is a child of vfork of a process that has set the hook up. Async-signal-safe.
pub(crate) fn is_vfork_child() -> bool {
    let own = PROCESS.pid.load(Ordering::Relaxed);
    own != 0 && seccomp::may_call() && own != pid()
}

/// Registers the fork handlers once.
pub(crate) fn watch_forks() {
    if !FORK_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of the right type, in a library that is never unloaded. If the
        // registration fails, the handlers do not run.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    }
}

/// Makes a system call that forks. It runs no fork handlers, so the child gets no recorder: see
/// [`sections::is_bare_child`].
pub(crate) fn around_system_call(fork: impl FnOnce() -> c_long) -> c_long {
    let errno = thread_state::errno();
    let saved = errno.get();
    before_fork();
    errno.set(saved);
    let child = fork();
    if child == 0 {
        sections::forget_parent()
    } else {
        after_fork()
    }
    child
}

extern "C" fn before_fork() {
    seccomp::remember_for_child();
    sections::begin_fork();
}

extern "C" fn after_fork() {
    sections::end_fork();
}

/// Runs on the only thread of a forked child, where only async-signal-safe functions are allowed.
extern "C" fn after_fork_in_child() {
    sections::forget_parent();
    let errno = thread_state::errno();
    let saved = errno.get();
    // Dumps contain the child's stacks.
    ptracer::allow_in_child();
    errno.set(saved);
    forget_parent();
    errno.set(saved);
}

/// Discards the parent's state in a forked child. Async-signal-safe.
pub(crate) fn forget_parent() {
    if SET_UP_IN.swap(0, Ordering::Relaxed) == 0 {
        return;
    }
    // For kernels that do not clear the page.
    PROCESS.forget_recorder();
    PROCESS.retry_at_ns.store(0, Ordering::Relaxed);
    PROCESS.final_turn.store(FINAL_TURN_UNWANTED, Ordering::Relaxed);
    PROCESS.is_watched.store(false, Ordering::Relaxed);
    PROCESS.is_ending.store(false, Ordering::Relaxed);
    PROCESS.stage.store(IDLE, Ordering::Release);
    thread_state::with(thread_state::ThreadState::after_fork);
    if seccomp::may_call() {
        CONNECTION.close();
        RING.close();
    }
}
