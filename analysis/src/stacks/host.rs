//! What is known of a process and its main thread.

use xpu_timer_proto::server::Awaited;

use crate::verdict::{Activity, Location};

/// A process moves if it used at least this share of a processor between its samples.
pub(super) const BUSY_SHARE: f64 = 0.2;

/// The activity of one thread, and what shows it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ObservedActivity {
    /// Kind of activity.
    pub activity: Activity,
    /// The frame or fact that shows the activity.
    pub witness: String,
}

/// What changed between the two samples of a process.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Movement {
    /// Processors used, on average.
    pub cpu_share: f64,
    /// Bytes read and written.
    pub io_bytes: u64,
    /// I/O makes progress.
    pub io: bool,
    /// The innermost frame of the user's own Python code on the main thread has changed.
    pub own_frame: bool,
    /// The main thread ran.
    pub main_ran: bool,
    /// A thread or child process that the main thread may wait for used a processor.
    pub helper_busy: bool,
    /// One of these made progress: bytes flowed, or it reached another line.
    pub helper_went_on: bool,
    /// The main thread is busy and made progress inside a library that the user's own line calls:
    /// `trainer.evaluate()`.
    pub library_went_on: bool,
}

impl Movement {
    /// Whether anything makes progress: the process computes, bytes flow, or the program reached
    /// another line.
    pub fn is_progress(self) -> bool {
        self.cpu_share >= BUSY_SHARE || self.io || self.own_frame
    }
}

/// A thread in uninterruptible sleep, at the same place in both samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DSleep {
    /// It is the main thread, or the only thread of the process.
    pub main: bool,
    /// Name of the thread.
    pub thread: String,
    /// Kernel function in which it sleeps.
    pub wchan: String,
}

/// One process, by its dump.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host {
    /// There is at least one stack of the main thread.
    pub stack: bool,
    /// State in the last sample.
    pub state: String,
    /// Activity of the main thread in the last sample.
    pub observed: ObservedActivity,
    /// The activity in the first sample was the same. True without a first sample.
    pub same_in_both: bool,
    /// Location of the main thread.
    pub location: Location,
    /// What moved. `None` without two samples.
    pub moved: Option<Movement>,
    /// A thread in uninterruptible sleep.
    pub d_sleep: Option<DSleep>,
    /// The object that the system call of the main thread waits for.
    pub awaited: Option<Awaited>,
}

impl Host {
    /// Stopped by a signal (`T`) or a tracer (`t`), or frozen with its control group (`F`).
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
