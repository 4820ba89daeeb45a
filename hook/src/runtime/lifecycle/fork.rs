//! Keeps the hook's state correct in children of fork and vfork.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::runtime::{
    os::{
        process::{CONNECTION, FINAL_TURN_UNWANTED, IDLE, PROCESS, RING, SET_UP_IN, pid},
        ptracer, seccomp, sys, thread_state,
    },
    recorder::{Recorder, running},
};

static FORK_HANDLER: AtomicBool = AtomicBool::new(false);

/// Number of threads that are forking, and whether the watcher is opening a descriptor.
static FORKING: AtomicU32 = AtomicU32::new(0);

static OPENING: AtomicBool = AtomicBool::new(false);

/// The recorder, except in a child of vfork, which shares the parent's memory, and where a filter
/// forbids the check. Async-signal-safe.
pub fn running_in_own_process() -> Option<&'static Recorder> {
    running().filter(|_| seccomp::may_call() && !is_vfork_child())
}

/// Whether this is a child of vfork of a process that has set the hook up. Async-signal-safe.
pub fn is_vfork_child() -> bool {
    let own = PROCESS.pid.load(Ordering::Relaxed);
    own != 0 && seccomp::may_call() && own != pid()
}

/// Registers the fork handlers once.
pub fn watch_forks() {
    if !FORK_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of the right type, in a library that is never unloaded. If the
        // registration fails, the handlers do not run.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    }
}

/// Opens a descriptor, unless a thread is forking. Otherwise a child could inherit a descriptor
/// that its state does not contain.
pub fn open_outside_fork<R>(open: impl FnOnce() -> R) -> Option<R> {
    // The forking thread sets its mark and then reads this one; the watcher does the reverse. At
    // least one of them sees the other's mark.
    OPENING.store(true, Ordering::SeqCst);
    let opened = (FORKING.load(Ordering::SeqCst) == 0).then(open);
    OPENING.store(false, Ordering::SeqCst);
    opened
}

extern "C" fn before_fork() {
    seccomp::remember_for_child();
    FORKING.fetch_add(1, Ordering::SeqCst);
    // The watcher makes two system calls at most. A stray descriptor in the child is better than a
    // host that waits.
    for _ in 0..100 {
        if !OPENING.load(Ordering::SeqCst) {
            break;
        }
        sys::relax();
    }
}

extern "C" fn after_fork() {
    FORKING.fetch_sub(1, Ordering::SeqCst);
}

/// Runs on the only thread of a forked child, where only async-signal-safe functions are allowed.
extern "C" fn after_fork_in_child() {
    FORKING.store(0, Ordering::SeqCst);
    OPENING.store(false, Ordering::SeqCst);
    let errno = thread_state::errno();
    let saved = errno.get();
    // Dumps contain the child's stacks.
    ptracer::allow_in_child();
    errno.set(saved);
    forget_parent();
    errno.set(saved);
}

/// Discards the parent's state in a forked child. Async-signal-safe.
pub fn forget_parent() {
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
