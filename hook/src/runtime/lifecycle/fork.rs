//! Fork and vfork.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::runtime::{
    os::{
        errno,
        process::{CONNECTION, FINAL_TURN_UNWANTED, IDLE, PROCESS, RING, SET_UP_IN, pid},
        ptracer, seccomp, sys, thread_state,
    },
    recorder::{Recorder, running},
};

static FORK_HANDLER: AtomicBool = AtomicBool::new(false);

/// Threads that are forking, and whether the watcher is just opening a descriptor.
static FORKING: AtomicU32 = AtomicU32::new(0);

static OPENING: AtomicBool = AtomicBool::new(false);

/// The same, unless this is a child of vfork, which has borrowed the memory, or nobody can tell under a filter. Async-signal-safe.
pub fn running_in_own_process() -> Option<&'static Recorder> {
    running().filter(|_| seccomp::may_call() && !is_vfork_child())
}

/// Whether this is a child of vfork of a process that has set something up. Async-signal-safe.
pub fn is_vfork_child() -> bool {
    let own = PROCESS.pid.load(Ordering::Relaxed);
    own != 0 && seccomp::may_call() && own != pid()
}

/// Has forked children told of, once.
pub fn watch_forks() {
    if !FORK_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of the right type, in a library that is never unloaded. A failure costs what they do.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    }
}

/// Opens a descriptor so that no forked child ends up with one that its books do not know; `None` while somebody forks.
pub fn open_outside_fork<R>(open: impl FnOnce() -> R) -> Option<R> {
    // The forking thread sets its mark and then looks at this one; here it is the other way round. One sees the other.
    OPENING.store(true, Ordering::SeqCst);
    let opened = (FORKING.load(Ordering::SeqCst) == 0).then(open);
    OPENING.store(false, Ordering::SeqCst);
    opened
}

extern "C" fn before_fork() {
    seccomp::remember_for_child();
    FORKING.fetch_add(1, Ordering::SeqCst);
    // Two system calls of the watcher, if at all; a child with a stray descriptor is better than a host that waits.
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

/// Runs in the only thread of a forked child, where only async-signal-safe functions are allowed.
extern "C" fn after_fork_in_child() {
    FORKING.store(0, Ordering::SeqCst);
    OPENING.store(false, Ordering::SeqCst);
    let errno = errno::errno();
    let saved = errno.get();
    // The child's stacks are part of a dump.
    ptracer::allow_in_child();
    errno.set(saved);
    forget_parent();
    errno.set(saved);
}

/// In a forked child: what was set up is the parent's. Async-signal-safe.
pub fn forget_parent() {
    if SET_UP_IN.swap(0, Ordering::Relaxed) == 0 {
        return;
    }
    // WaitFor kernels that do not empty the page.
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
