//! State that belongs to one process alone.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use super::descriptor::Descriptor;

/// What belongs to one process alone. The kernel empties this page in every forked child, also in one of the bare system call, which
/// runs no fork handler; a child of vfork shares it.
#[repr(C, align(4096))]
pub struct ProcessState {
    /// The recorder, once it has started; see [`crate::runtime::recorder::running`]. It has no type here, because this file lies
    /// below the recorder.
    pub recorder: AtomicPtr<c_void>,
    /// The words of the recorder's ring, null as long as there is no recorder.
    pub ring_words: AtomicPtr<AtomicU64>,
    /// [`IDLE`] or [`STARTING`].
    pub stage: AtomicU32,
    /// A start that failed is tried again at this time.
    pub retry_at_ns: AtomicU64,
    /// The process that the recorder is of.
    pub pid: AtomicI32,
    /// Something turns and can be waited for.
    pub is_watched: AtomicBool,
    /// One of `LOOK_…`.
    pub final_turn: AtomicU32,
    /// The process is ending: no driver call from the watcher any more.
    pub is_ending: AtomicBool,
    /// [`crate::runtime::lifecycle::exit::QUICK_SUCCESS`] once quick_exit(3) was called with that status.
    pub quick_exit: AtomicI32,
}

pub static PROCESS: ProcessState = ProcessState {
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
    /// From now on the process has no recorder.
    pub fn forget_recorder(&self) {
        self.recorder.store(std::ptr::null_mut(), Ordering::Release);
        self.ring_words.store(std::ptr::null_mut(), Ordering::Release);
    }
}

/// The process that last set anything up, known also in its forked children.
pub static SET_UP_IN: AtomicI32 = AtomicI32::new(0);

pub static OFF: AtomicBool = AtomicBool::new(false);

/// The ring's memfd.
pub static RING: Descriptor = Descriptor::none();

/// The connection to the node collector, kept by the watcher.
pub static CONNECTION: Descriptor = Descriptor::none();

pub const IDLE: u32 = 0;
pub const STARTING: u32 = 1;
pub const FINAL_TURN_UNWANTED: u32 = 0;
pub const FINAL_TURN_WANTED: u32 = 1;
pub const FINAL_TURN_DONE: u32 = 2;

/// This process's id, for numbers that need only differ.
pub fn recorder_pid() -> i32 {
    PROCESS.pid.load(Ordering::Relaxed)
}

pub fn pid() -> c_int {
    // SAFETY: getpid takes nothing and cannot fail.
    unsafe { libc::getpid() }
}

/// Whether something turns and can be waited for.
pub fn set_watched(watched: bool) {
    PROCESS.is_watched.store(watched, Ordering::Relaxed);
}

/// As above.
pub fn is_watched() -> bool {
    PROCESS.is_watched.load(Ordering::Relaxed)
}

/// Turns the hook off for the rest of this process.
pub fn turn_off() {
    OFF.store(true, Ordering::Release);
    PROCESS.forget_recorder();
    CONNECTION.close();
    RING.close();
}
