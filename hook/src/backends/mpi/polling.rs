//! A thread that polls with `MPI_Test` or `MPI_Iprobe` waits like a thread in `MPI_Wait`.
//!
//! The operation that it polls for is recorded when nothing has completed for 0.1 s, in which the
//! thread made no other MPI call and did nothing else: its polls follow each other immediately, or
//! it slept in between. A thread that computes between its polls does not wait, nor does a thread
//! that has stopped polling; the watcher ends operations that were not polled for lately. So a
//! receive that waits for a stop message never counts. A thread that has polled for long may do
//! something else now and then, because interrupts and a hypervisor that takes the processor away
//! look the same.
//!
//! A poll that follows the previous one immediately costs a reading of the processor's counter.
//! Otherwise, and every few milliseconds, the clocks are read.

use std::{cell::Cell, sync::atomic::Ordering};

use xpu_timer_proto::v1::OpStatus;

use crate::{
    backends::host_call::Running,
    runtime::{
        os::{clock, tsc_clock},
        recorder::{
            Recorder,
            host_operations::{close, leave},
            polled_operations::{POLLED, STOPPED_NS, publish, recorder_address},
        },
    },
};

/// Maximum time between two polls of a thread that does nothing else. A step of a Python
/// interpreter takes a fraction of it.
const MAX_POLL_GAP_NS: u64 = 50_000;

/// After this time, polling counts as waiting.
const POLLING_IS_WAITING_NS: u64 = 100_000_000;

/// A thread still waits if it spends at most this fraction (one over the value) of its polling time
/// on other work.
const OTHER_WORK_FRACTION: u64 = 8;

/// [`MAX_POLL_GAP_NS`] in ticks. Every processor's counter advances by at least one tick per
/// nanosecond, so this is never longer.
const MAX_POLL_GAP_TICKS: u64 = 50_000;

/// Maximum number of ticks between two clock readings: a few milliseconds.
const CLOCK_CHECK_TICKS: u64 = 1 << 22;

/// The unsuccessful polls of a thread.
#[derive(Clone, Copy)]
struct PollState {
    /// Address of the recorder, because a forked child has another one. 0 when the thread does not
    /// poll.
    recorder: usize,
    since_ns: u64,
    /// The processor's counter at the last poll.
    last: u64,
    /// The counter and the clock at the last clock reading.
    looked: u64,
    looked_ns: u64,
    /// The thread's CPU time then. 0 at the first poll, which reads only the clock.
    looked_cpu_ns: u64,
    /// Time spent on other work since the first poll.
    other_work_ns: u64,
    /// Index in [`POLLED`] and slot, once it is recorded as an operation.
    open: Option<(usize, usize)>,
}

const NOT_POLLING: PollState = PollState {
    recorder: 0,
    since_ns: 0,
    last: 0,
    looked: 0,
    looked_ns: 0,
    looked_cpu_ns: 0,
    other_work_ns: 0,
    open: None,
};

thread_local! {
    static POLL_STATE: Cell<PollState> = const { Cell::new(NOT_POLLING) };
}

impl PollState {
    fn new(recorder: &'static Recorder, now: u64, counter: u64) -> Self {
        PollState {
            recorder: recorder_address(recorder),
            since_ns: now,
            last: counter,
            looked: counter,
            looked_ns: now,
            ..NOT_POLLING
        }
    }

    /// Whether this poll follows the previous one immediately, judged by the counter, and the clock
    /// was read recently.
    #[inline]
    fn continues(&self, counter: u64) -> bool {
        counter.wrapping_sub(self.last) <= MAX_POLL_GAP_TICKS && counter.wrapping_sub(self.looked) <= CLOCK_CHECK_TICKS
    }

    /// Nanoseconds since the last poll. `counter` and `now` were read at the same time, and the
    /// counter has a constant rate.
    fn gap_ns(&self, counter: u64, now: u64) -> u64 {
        let (steps, gap) = (counter.wrapping_sub(self.looked), counter.wrapping_sub(self.last));
        let since = now.saturating_sub(self.looked_ns);
        if counter <= self.looked || gap > steps {
            return since;
        }
        (u128::from(since) * u128::from(gap) / u128::from(steps)) as u64
    }

    /// Time spent on other work in the `gap` before this poll. `None` when the thread does not
    /// wait. `cpu_ns` is the thread's CPU time now. Between the last clock reading and the gap, the
    /// thread polled for `polled_ns` without a pause, using the CPU.
    fn other_work_ns(&self, gap: u64, polled_ns: u64, cpu_ns: u64, now: u64) -> Option<u64> {
        if gap <= MAX_POLL_GAP_NS {
            return Some(0);
        }
        let busy = cpu_ns.saturating_sub(self.looked_cpu_ns).saturating_sub(polled_ns).min(gap);
        // Waking up and polling take some time too.
        let aside = if busy <= (gap / 4).max(MAX_POLL_GAP_NS) { 0 } else { busy };
        let is_little = self.other_work_ns + aside <= now.saturating_sub(self.since_ns) / OTHER_WORK_FRACTION;
        (self.looked_cpu_ns != 0 && gap < STOPPED_NS && is_little).then_some(aside)
    }
}

/// Called after an unsuccessful poll. `what` is the operation that the thread polls for.
#[inline]
pub fn poll_unsuccessful(recorder: &'static Recorder, what: impl FnOnce() -> Running) {
    let counter = tsc_clock::ticks();
    POLL_STATE.with(|cell| {
        let state = cell.get();
        if state.recorder == recorder_address(recorder) && state.continues(counter) {
            cell.set(PollState { last: counter, ..state });
        } else {
            poll_with_clock(recorder, counter, what);
        }
    });
}

/// The same with a clock reading.
#[cold]
fn poll_with_clock(recorder: &'static Recorder, counter: u64, what: impl FnOnce() -> Running) {
    let now = clock::now_ns();
    let mut state = POLL_STATE.get();
    if state.recorder != recorder_address(recorder) {
        POLL_STATE.set(PollState::new(recorder, now, counter));
        return;
    }
    let gap = state.gap_ns(counter, now);
    let polled_ns = now.saturating_sub(state.looked_ns).saturating_sub(gap);
    let cpu_ns = clock::thread_cpu_ns().max(1);
    match state.other_work_ns(gap, polled_ns, cpu_ns, now) {
        Some(other_work_ns) => state.other_work_ns += other_work_ns,
        None => {
            interrupt(recorder);
            state = PollState::new(recorder, now, counter);
        }
    }
    state = PollState { last: counter, looked: counter, looked_ns: now, looked_cpu_ns: cpu_ns, ..state };
    if let Some((place, slot)) = state.open {
        POLLED[place].polled_ns.store(now, Ordering::Relaxed);
        if POLLED[place].link.load(Ordering::Relaxed) != slot as u32 + 1 {
            state.open = None;
        }
    } else if now.saturating_sub(state.since_ns) >= POLLING_IS_WAITING_NS {
        state.open = what().keep().and_then(|slot| publish(recorder, slot, now));
    }
    POLL_STATE.set(state);
}

/// Called after a successful poll.
pub fn poll_successful(recorder: &'static Recorder, to_all: bool) {
    end(recorder, |slot| match to_all {
        true => close(recorder, slot, OpStatus::Completed, 0),
        // Some of the requests may still be incomplete.
        false => leave(recorder, slot),
    });
}

/// Called when the thread makes another call: it no longer polls.
pub fn interrupt(recorder: &'static Recorder) {
    end(recorder, |slot| leave(recorder, slot));
}

#[inline]
fn end(recorder: &'static Recorder, close: impl FnOnce(usize)) {
    let state = POLL_STATE.get();
    if state.recorder == 0 {
        return;
    }
    POLL_STATE.set(NOT_POLLING);
    if let Some((place, slot)) = state.open
        && state.recorder == recorder_address(recorder)
        && POLLED[place].take(slot)
    {
        close(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{
        os::tsc,
        recorder::{host_operations::named_host_call, polled_operations::expire},
    };

    /// Whether a thread waits that repeatedly polls for `polled_ns`, then pauses for `gap`
    /// nanoseconds, `busy` of them on the CPU.
    fn waits(gap: u64, busy: u64, polled_ns: u64) -> bool {
        let mut state = PollState::new(Recorder::for_test(), 0, 0);
        let unknown = state.other_work_ns(gap, polled_ns, 1, polled_ns + gap);
        assert!(gap <= MAX_POLL_GAP_NS || unknown.is_none(), "nobody knows what it did before");
        (1..100).all(|turn| {
            state.looked_cpu_ns = 1 + (turn - 1) * (busy + polled_ns);
            let aside = state.other_work_ns(gap, polled_ns, 1 + turn * (busy + polled_ns), turn * (polled_ns + gap));
            state.other_work_ns += aside.unwrap_or(0);
            aside.is_some()
        })
    }

    #[test]
    fn a_thread_that_polls_or_sleeps_waits_and_one_that_computes_does_not() {
        assert!(waits(2_000, 2_000, 0));
        assert!(waits(10_000_000, 20_000, 0), "sleeps, and works for a moment in each turn");
        assert!(waits(10_000_000, 0, 3_000_000), "asks at once, and its processor is taken away again and again");
        assert!(waits(200_000, 200_000, 10_000_000), "an interrupt now and then");
        assert!(!waits(2_000_000, 2_000_000, 10_000_000));
        assert!(!waits(10_000_000, 9_900_000, 0));
        assert!(!waits(10_000_000, 9_900_000, 3_000_000), "computes, then asks many times");
        assert!(!waits(STOPPED_NS + 1, 0, 0));
    }

    #[test]
    fn the_counter_measures_the_time_since_the_last_poll() {
        // Three ticks per nanosecond. The clock was read at tick 3,000, and the last poll was at
        // tick 30,000.
        let state = PollState { last: 30_000, ..PollState::new(Recorder::for_test(), 1_000, 3_000) };
        assert!(state.continues(80_000) && !state.continues(80_001), "at once or not");
        assert_eq!(state.gap_ns(33_000, 11_000), 1_000);
        assert_eq!(state.gap_ns(300_030_000, 100_010_000), 100_000_000);
        assert!(
            !PollState { last: CLOCK_CHECK_TICKS + 4_000, ..state }.continues(CLOCK_CHECK_TICKS + 4_001),
            "the clock is due"
        );
        // The counter of this processor is behind that of another one.
        assert!(!state.continues(29_999));
        assert_eq!(state.gap_ns(2_000, 5_000), 4_000);
    }

    #[test]
    fn an_operation_that_is_no_longer_polled_ends() {
        let recorder = Recorder::for_test();
        let what = || Running::new(recorder).with(&named_host_call(recorder, "MPI_Test"));
        poll_unsuccessful(recorder, what);
        let asked = |before_ns: u64| {
            let mut state = POLL_STATE.get();
            state.since_ns = clock::now_ns() - before_ns;
            POLL_STATE.set(state);
            poll_with_clock(recorder, tsc::counter(), what);
            recorder.open_calls.slots().count()
        };
        assert_eq!(asked(POLLING_IS_WAITING_NS / 2), 0);
        assert_eq!(asked(POLLING_IS_WAITING_NS), 1);
        assert_eq!(asked(POLLING_IS_WAITING_NS), 1, "one operation however often it is asked for");
        expire(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 1);
        let (place, _) = POLL_STATE.get().open.unwrap();
        POLLED[place].polled_ns.store(0, Ordering::Relaxed);
        expire(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(asked(POLLING_IS_WAITING_NS), 0, "its place is lost");
        assert_eq!(asked(POLLING_IS_WAITING_NS), 1, "and it waits again");
        interrupt(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(POLL_STATE.get().recorder, 0);
    }
}
