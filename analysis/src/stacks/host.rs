//! What a dump tells of a process and its main thread.

use xpu_timer_proto::server::Awaited;

use crate::verdict::{Activity, Location};

/// A process counts as moving when it used at least this share of a processor between its samples.
pub(super) const BUSY_SHARE: f64 = 0.2;

/// What one thread does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ObservedActivity {
    /// What it is.
    pub activity: Activity,
    /// The frame or fact that tells it.
    pub witness: String,
}

/// What changed between the two samples of a process.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Movement {
    /// Processors used, on the average.
    pub cpu_share: f64,
    /// Bytes read and written.
    pub io_bytes: u64,
    /// Reading and writing makes progress.
    pub io: bool,
    /// The user's own innermost Python frame of the main thread is another one.
    pub own_frame: bool,
    /// The main thread ran.
    pub main_ran: bool,
    /// A thread or child process that the main thread may wait for used a processor.
    pub helper_busy: bool,
    /// One of those went on: bytes flowed, or it reached another line.
    pub helper_went_on: bool,
    /// The main thread is busy, and went on within a library that the user's own line calls: `trainer.evaluate()`.
    pub library_went_on: bool,
}

impl Movement {
    /// Something makes progress: the process computes, or bytes flow, or the program went on.
    pub fn is_progress(self) -> bool {
        self.cpu_share >= BUSY_SHARE || self.io || self.own_frame
    }
}

/// A thread in uninterruptible sleep, at the same place in both samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DSleep {
    /// It is the main thread, or the process has but one.
    pub main: bool,
    /// Its name.
    pub thread: String,
    /// Kernel function.
    pub wchan: String,
}

/// One process, as far as its dump tells.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host {
    /// There is at least one stack of the main thread.
    pub stack: bool,
    /// State in the last sample.
    pub state: String,
    /// What the main thread does in the last sample.
    pub observed: ObservedActivity,
    /// It did the same in the first sample; true when there is no first sample.
    pub same_in_both: bool,
    /// Where the main thread stands.
    pub location: Location,
    /// What moved; absent without two samples.
    pub moved: Option<Movement>,
    /// A thread in uninterruptible sleep.
    pub d_sleep: Option<DSleep>,
    /// What the system call of the main thread waits for.
    pub awaited: Option<Awaited>,
}

impl Host {
    /// Stopped by a signal (`T`), by a tracer (`t`), or with its control group (`F`).
    pub fn stopped(&self) -> bool {
        self.state.starts_with(['T', 't', 'F'])
    }

    /// A zombie, or gone.
    pub fn gone(&self) -> bool {
        self.state.starts_with(['Z', 'X', 'x'])
    }

    /// Nothing proves that it makes progress.
    pub fn frozen(&self) -> bool {
        !self.moved.is_some_and(Movement::is_progress)
    }
}
