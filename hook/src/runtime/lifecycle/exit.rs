//! The end of the process: a final turn of the watcher, and the farewell to the collector.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use xpu_timer_proto::ring::header;

use crate::runtime::{
    lifecycle::fork::running_in_own_process,
    os::{
        clock,
        process::{CONNECTION, FINAL_TURN_DONE, FINAL_TURN_WANTED, PROCESS},
        seccomp, wakeup,
    },
    recorder::{Recorder, running},
};

/// The encoding of `HookMessage { goodbye }`, for the exit handler, which must not allocate.
pub(crate) const GOODBYE: [u8; 2] = [0x2a, 0x00];

static EXIT_HANDLER: AtomicBool = AtomicBool::new(false);

/// How long an ending process waits for the watcher, which normally needs a fraction of a
/// millisecond.
const FINAL_TURN_TIMEOUT: Duration = Duration::from_millis(50);

/// Registers the exit handlers once.
pub(crate) fn watch_exits() {
    unsafe extern "C" {
        fn __cxa_at_quick_exit(handler: extern "C" fn(*mut c_void), library: *mut c_void) -> c_int;
    }
    if !EXIT_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of the right type, in a library that is never unloaded. If the
        // registration fails, the handlers do not run.
        unsafe {
            libc::atexit(at_exit);
            __cxa_at_quick_exit(at_quick_exit, std::ptr::null_mut());
        }
    }
}

/// Whether the process is ending.
pub(crate) fn is_ending() -> bool {
    PROCESS.is_ending.load(Ordering::SeqCst)
}

/// Whether the ending process waits for the watcher's final turn.
pub(crate) fn wants_final_turn() -> bool {
    PROCESS.final_turn.load(Ordering::Acquire) == FINAL_TURN_WANTED
}

/// Called by the watcher after the final turn.
pub(crate) fn final_turn_done() {
    PROCESS.final_turn.store(FINAL_TURN_DONE, Ordering::Release);
    wakeup::futex_wake(&PROCESS.final_turn);
}

/// Lets the watcher record what is complete by now, and then keeps it out of the driver, which is
/// about to be torn down. Exit handlers run in reverse order, so the driver's handler runs after
/// this one. The connection stays open, because a later handler may hang.
extern "C" fn at_exit() {
    if seccomp::may_call() {
        if let Some(recorder) = running_in_own_process() {
            finish_watching(recorder);
        }
    } else {
        // A child of vfork runs no exit handlers, so this is the process itself. Nothing can be
        // waited for.
        PROCESS.is_ending.store(true, Ordering::SeqCst);
    }
}

/// Async-signal-safe.
pub(crate) fn finish_watching(recorder: &Recorder) {
    if PROCESS.is_ending.load(Ordering::Relaxed) {
        return;
    }
    let deadline = clock::now_ns() + FINAL_TURN_TIMEOUT.as_nanos() as u64;
    let left = || Duration::from_nanos(deadline.saturating_sub(clock::now_ns()));
    if PROCESS.is_watched.load(Ordering::Relaxed) {
        PROCESS.final_turn.store(FINAL_TURN_WANTED, Ordering::Release);
        wakeup::wake_watcher();
        while wants_final_turn() && !left().is_zero() {
            wakeup::futex_wait(&PROCESS.final_turn, FINAL_TURN_WANTED, left());
        }
    }
    PROCESS.is_ending.store(true, Ordering::SeqCst);
    // The watcher is usually asleep, or inside an event query for microseconds.
    while recorder.ring.header(header::WATCHER_CALL).load(Ordering::SeqCst) != 0 && !left().is_zero() {
        std::thread::yield_now();
    }
}

/// Handler for quick_exit(3), which runs no other handlers and does not pass its status on.
extern "C" fn at_quick_exit(_: *mut c_void) {
    at_exit();
    if running().is_some() && PROCESS.quick_exit.load(Ordering::Relaxed) == QUICK_SUCCESS {
        say_goodbye();
    }
}

/// Value of [`ProcessState::quick_exit`](crate::runtime::os::process::ProcessState::quick_exit) for
/// status 0.
pub(crate) const QUICK_SUCCESS: c_int = 1;

/// Tells the collector that the process ends on purpose: in the ring, and by a message if the
/// thread may send one.
pub(crate) fn say_goodbye() {
    if let Some(recorder) = running() {
        recorder.ring.header(header::GOODBYE).store(1, Ordering::Release);
    }
    if seccomp::may_call()
        && let Some(fd) = CONNECTION.get()
    {
        let goodbye = GOODBYE;
        // SAFETY: the descriptor is a socket of the hook that was just checked. The call does not
        // block and raises no signal.
        unsafe {
            libc::send(fd, goodbye.as_ptr().cast(), goodbye.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        }
    }
}
