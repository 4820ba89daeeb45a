//! The timeline of the ranks: their last completed operations, kept in memory, and the files that
//! are made of them. Used by both roles.

pub(crate) mod files;
pub(crate) mod folder;
pub(crate) mod host;
pub(crate) mod kernel_trace;
pub(crate) mod stacks;
pub(crate) mod store;

use std::time::Duration;

use xpu_timer_proto::env::Source;

/// Time beyond a recording of every kernel: hooks begin it within a third of a second, and the last
/// operations complete after its end.
pub(crate) const DETAIL_MARGIN: Duration = Duration::from_millis(700);

/// More light samples a second would not be light.
const MOST_SAMPLES_PER_SECOND: u32 = 50;

/// The limits of the recorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelineSettings {
    /// The window; zero turns the recorder off.
    pub window: Duration,
    /// Memory for all ranks together.
    pub bytes: usize,
    /// Operations that the original tool's request records of each rank, if it does not say.
    pub trace_count: usize,
    /// Whether every rank that such a request records writes the names; otherwise only rank 0.
    pub all_write_names: bool,
    /// Stacks of each rank's main thread that are sampled a second; 0 for none.
    pub samples_per_second: u32,
}

impl TimelineSettings {
    /// Reads any source.
    #[must_use]
    pub fn new(source: &Source) -> Self {
        let megabytes: usize = source.number("XPU_TIMER_TIMELINE_MB").unwrap_or(0);
        TimelineSettings {
            window: source.seconds("XPU_TIMER_TIMELINE_SECONDS").unwrap_or_default(),
            bytes: megabytes.saturating_mul(1 << 20),
            trace_count: source.number("XPU_TIMER_TIMELINE_TRACE_COUNT").unwrap_or(0),
            all_write_names: source.flag("XPU_TIMER_ALL_DUMP_TIMELINE"),
            samples_per_second: source.number("XPU_TIMER_SAMPLE_RATE").unwrap_or(0).min(MOST_SAMPLES_PER_SECOND),
        }
    }
}
