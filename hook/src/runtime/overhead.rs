//! Measures the time that the hook adds to a call. Every dump contains the result.
//!
//! The measured time is spent before and after the real function, minus the clock readings of the
//! measurement. It does not include the few instructions between the caller and the first reading.

use std::sync::atomic::{AtomicU64, Ordering};

use xpu_timer_proto::ring::lane;

use crate::runtime::{
    lock_free::handoff::add,
    os::{
        clock,
        thread_state::{IN_COLLECTIVES, IN_DRIVER, IN_RUNTIME, ThreadState},
    },
    recorder::Recorder,
};

/// Period, and the index in it, of the launches of a thread that are measured. A measurement costs
/// four clock readings. The first launches are skipped, because they do more than later ones.
const LAUNCHES: (u32, u32) = (256, 16);

/// Period and index of the measured calls of the collective library.
const COLLECTIVES: (u32, u32) = (32, 4);

/// Duration of one clock reading in nanoseconds. 0 until the recorder starts.
static CLOCK_NS: AtomicU64 = AtomicU64::new(0);

/// Measures the duration of a clock reading.
pub(crate) fn calibrate() {
    let reading = || {
        let first = clock::now_ns();
        clock::now_ns().saturating_sub(first)
    };
    let least = (0..32).map(|_| reading()).min().unwrap_or(0);
    CLOCK_NS.store(least, Ordering::Relaxed);
}

/// Measures one hooked call. Most calls are not measured.
pub(crate) struct OverheadTimer {
    since_ns: u64,
    spent_ns: u64,
}

impl OverheadTimer {
    /// Begins at the entry of the hook. `layer` is the mark of the layer.
    #[inline(always)]
    pub(crate) fn begin(thread: &ThreadState, layer: u8) -> Self {
        let (calls, (period, which)) = match layer {
            IN_COLLECTIVES => (&thread.collectives, COLLECTIVES),
            IN_DRIVER | IN_RUNTIME => (&thread.launches, LAUNCHES),
            _ => return OverheadTimer { since_ns: 0, spent_ns: 0 },
        };
        let due = calls.get() % period == which;
        calls.set(calls.get().wrapping_add(1));
        OverheadTimer { since_ns: if due { clock::now_ns() } else { 0 }, spent_ns: 0 }
    }

    /// Whether this call is measured.
    #[inline]
    pub(crate) fn is_measured(&self) -> bool {
        self.since_ns != 0
    }

    /// Stops before the real function is called.
    #[inline(always)]
    pub(crate) fn pause(&mut self) {
        if self.is_measured() {
            self.spent_ns += clock::now_ns().saturating_sub(self.since_ns + CLOCK_NS.load(Ordering::Relaxed));
        }
    }

    /// Continues after the real function has returned.
    #[inline(always)]
    pub(crate) fn resume(&mut self) {
        if self.is_measured() {
            self.since_ns = clock::now_ns();
        }
    }

    /// Ends when the call leaves the hook.
    pub(crate) fn end(&mut self, thread: &ThreadState, recorder: &Recorder, layer: u8) {
        if self.is_measured() {
            self.pause();
            self.keep(thread, recorder, layer);
        }
    }

    #[cold]
    fn keep(&self, thread: &ThreadState, recorder: &Recorder, layer: u8) {
        let Some(lane) = recorder.lane_of(thread) else { return };
        let samples = match layer {
            _ if self.spent_ns > lane::LONG_NS => lane::LONG_SAMPLES,
            IN_COLLECTIVES => lane::COLLECTIVE_SAMPLES,
            _ => lane::LAUNCH_SAMPLES,
        };
        let words = recorder.lane_words(lane);
        add(&words[samples], 1);
        // The sum of nanoseconds is the word after the number of samples.
        add(&words[samples + 1], self.spent_ns);
    }
}
