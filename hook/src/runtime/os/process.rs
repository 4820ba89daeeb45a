//! State that belongs to one process alone.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use super::descriptor::Descriptor;

/// State that belongs to one process alone. The kernel clears this page in every forked child, even
/// in a child of the bare system call, which runs no fork handler. A child of vfork shares it.
#[repr(C, align(4096))]
pub(crate) struct ProcessState {
    /// The recorder, once it has started; see `recorder::running`. It is untyped, because this file
    /// is below the recorder.
    pub recorder: AtomicPtr<c_void>,
    /// The words of the recorder's ring, null without a recorder.
    pub ring_words: AtomicPtr<AtomicU64>,
    /// [`IDLE`] or [`STARTING`].
    pub stage: AtomicU32,
    /// Time at which a start that failed is tried again.
    pub retry_at_ns: AtomicU64,
    /// The process to which the recorder belongs.
    pub pid: AtomicI32,
    /// The watcher runs, so other threads can wait for it.
    pub is_watched: AtomicBool,
    /// One of `FINAL_TURN_…`.
    pub final_turn: AtomicU32,
    /// The process is ending. The watcher must not call the driver any more.
    pub is_ending: AtomicBool,
    /// `exit::QUICK_SUCCESS` once quick_exit(3) was called with status 0.
    pub quick_exit: AtomicI32,
}

pub(crate) static PROCESS: ProcessState = ProcessState {
    recorder: AtomicPtr::new(std::ptr::null_mut()),
    ring_words: AtomicPtr::new(std::ptr::null_mut()),
    stage: AtomicU32::new(IDLE),
    retry_at_ns: AtomicU64::new(0),
    pid: AtomicI32::new(0),
    is_watched: AtomicBool::new(false),
    final_turn: AtomicU32::new(FINAL_TURN_UNWANTED),
    is_ending: AtomicBool::new(false),
    quick_exit: AtomicI32::new(0),
};

impl ProcessState {
    /// The process has no recorder from now on.
    pub(crate) fn forget_recorder(&self) {
        self.recorder.store(std::ptr::null_mut(), Ordering::Release);
        self.ring_words.store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// The process that set the hook up last. A forked child inherits the value.
pub(crate) static SET_UP_IN: AtomicI32 = AtomicI32::new(0);

pub(crate) static OFF: AtomicBool = AtomicBool::new(false);

/// The ring's memfd.
pub(crate) static RING: Descriptor = Descriptor::none();

/// The connection to the node collector, kept by the watcher.
pub(crate) static CONNECTION: Descriptor = Descriptor::none();

pub(crate) const IDLE: u32 = 0;
pub(crate) const STARTING: u32 = 1;
pub(crate) const FINAL_TURN_UNWANTED: u32 = 0;
pub(crate) const FINAL_TURN_WANTED: u32 = 1;
pub(crate) const FINAL_TURN_DONE: u32 = 2;

/// The pid of the process with the recorder, as a number that differs between processes.
pub(crate) fn recorder_pid() -> i32 {
    PROCESS.pid.load(Ordering::Relaxed)
}

pub(crate) fn pid() -> c_int {
    // SAFETY: getpid takes nothing and cannot fail.
    unsafe { libc::getpid() }
}

/// Sets whether the watcher runs, so that other threads can wait for it.
pub(crate) fn set_watched(watched: bool) {
    PROCESS.is_watched.store(watched, Ordering::Relaxed);
}

/// Whether the watcher runs.
pub(crate) fn is_watched() -> bool {
    PROCESS.is_watched.load(Ordering::Relaxed)
}

/// Turns the hook off for the rest of this process.
pub(crate) fn turn_off() {
    OFF.store(true, Ordering::Release);
    PROCESS.forget_recorder();
    CONNECTION.close();
    RING.close();
}
