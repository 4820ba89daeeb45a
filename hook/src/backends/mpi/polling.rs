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
//! Other processes may take the processor away for any time, so the time between two polls says
//! little: its part on the CPU is other work, and the rest is waiting only if the thread slept,
//! which the kernel counts as a voluntary context switch.
//!
//! A poll that follows the previous one immediately costs a reading of the processor's counter.
//! Otherwise, and every few milliseconds, the clocks are read.

use std::{cell::Cell, sync::atomic::Ordering};

use xpu_timer_proto::v1::OpStatus;

use crate::{
    backends::host_call::Running,
    runtime::{
        os::clock,
        recorder::{
            Recorder,
            host_operations::{POLLED, POLLING_STOPPED_NS, close, leave, publish_polled, recorder_address},
        },
    },
};

/// Maximum time between two polls of a thread that does nothing else. A step of a Python
/// interpreter takes a fraction of it.
const MAX_POLL_GAP_NS: u64 = 50_000;

/// After this time, polling counts as waiting.
const POLLING_IS_WAITING_NS: u64 = 100_000_000;

/// A thread still waits if other work takes at most this fraction (one over the value) of the time
/// in which it polls, sleeps or works.
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
    /// How often the thread had slept then.
    looked_sleeps: u64,
    /// CPU time spent on other work since the first poll.
    other_work_ns: u64,
    /// Time spent on polling and sleeping since the first poll.
    waited_ns: u64,
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
    looked_sleeps: 0,
    other_work_ns: 0,
    waited_ns: 0,
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

    /// This state after a poll at which the clocks were read; `None` when the thread does not wait.
    /// It had polled without a pause for `polled_ns` since the last clock reading, and the last
    /// poll was `gap` nanoseconds ago.
    fn after(self, gap: u64, polled_ns: u64, looked: &Looked) -> Option<PollState> {
        let mut state = self;
        state.waited_ns += polled_ns;
        if gap <= MAX_POLL_GAP_NS {
            state.waited_ns += gap;
        } else if self.looked_cpu_ns == 0 || gap >= POLLING_STOPPED_NS {
            return None;
        } else {
            let busy = looked.cpu_ns.saturating_sub(self.looked_cpu_ns).saturating_sub(polled_ns).min(gap);
            // Waking up and polling take some time too.
            if busy > MAX_POLL_GAP_NS {
                state.other_work_ns += busy;
            }
            if looked.sleeps != self.looked_sleeps {
                state.waited_ns += gap - busy;
            }
            let all = state.other_work_ns + state.waited_ns;
            if state.other_work_ns > all / OTHER_WORK_FRACTION {
                return None;
            }
        }
        Some(state)
    }
}

/// What the clocks and the kernel's counters said at a poll.
struct Looked {
    now: u64,
    counter: u64,
    cpu_ns: u64,
    sleeps: u64,
}

/// Called after an unsuccessful poll. `what` is the operation that the thread polls for.
#[inline]
pub fn poll_unsuccessful(recorder: &'static Recorder, what: impl FnOnce() -> Running) {
    let counter = clock::ticks();
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
    let looked = Looked { now, counter, cpu_ns: clock::thread_cpu_ns().max(1), sleeps: clock::thread_sleeps() };
    state = state.after(gap, polled_ns, &looked).unwrap_or_else(|| {
        interrupt(recorder);
        PollState::new(recorder, now, counter)
    });
    state = PollState {
        last: counter,
        looked: looked.counter,
        looked_ns: looked.now,
        looked_cpu_ns: looked.cpu_ns,
        looked_sleeps: looked.sleeps,
        ..state
    };
    if let Some((place, slot)) = state.open {
        POLLED[place].polled_ns.store(now, Ordering::Relaxed);
        if POLLED[place].link.load(Ordering::Relaxed) != slot as u32 + 1 {
            state.open = None;
        }
    } else if now.saturating_sub(state.since_ns) >= POLLING_IS_WAITING_NS {
        state.open = what().keep().and_then(|slot| publish_polled(recorder, slot, now));
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
        recorder::host_operations::{expire_polled, named_host_call},
    };

    /// Whether a thread waits that repeatedly polls for `polled_ns`, then pauses for `gap`
    /// nanoseconds, `busy` of them on the CPU. `sleeps` says whether it pauses by its own will.
    fn waits(gap: u64, busy: u64, polled_ns: u64, sleeps: bool) -> bool {
        let looked = |turn: u64| Looked {
            now: turn * (polled_ns + gap),
            counter: 0,
            cpu_ns: 1 + turn * (busy + polled_ns),
            sleeps: turn * u64::from(sleeps),
        };
        let state = PollState::new(Recorder::for_test(), 0, 0);
        let unknown = state.after(gap, polled_ns, &looked(1));
        assert!(gap <= MAX_POLL_GAP_NS || unknown.is_none(), "nobody knows what it did before");
        (1..100)
            .try_fold(state, |state, turn| {
                let before = looked(turn - 1);
                let state = PollState { looked_cpu_ns: before.cpu_ns, looked_sleeps: before.sleeps, ..state };
                state.after(gap, polled_ns, &looked(turn))
            })
            .is_some()
    }

    #[test]
    fn a_thread_that_polls_or_sleeps_waits_and_one_that_computes_does_not() {
        assert!(waits(2_000, 2_000, 0, false));
        assert!(waits(10_000_000, 20_000, 0, true), "sleeps, and works for a moment in each turn");
        assert!(
            waits(10_000_000, 0, 3_000_000, false),
            "asks at once, and its processor is taken away again and again"
        );
        assert!(waits(200_000, 200_000, 10_000_000, false), "an interrupt now and then");
        assert!(!waits(2_000_000, 2_000_000, 10_000_000, false));
        assert!(!waits(10_000_000, 9_900_000, 0, false));
        assert!(!waits(10_000_000, 9_900_000, 3_000_000, false), "computes, then asks many times");
        assert!(!waits(POLLING_STOPPED_NS + 1, 0, 0, true));
    }

    #[test]
    fn a_thread_that_computes_on_a_busy_machine_does_not_wait() {
        // It gets a twentieth of a processor.
        assert!(!waits(40_000_000, 2_000_000, 0, false));
        assert!(!waits(40_000_000, 2_000_000, 100_000, false), "and polls several times in between");
        assert!(!waits(10_000_000, 2_000_000, 0, true), "and sleeps in between");
        assert!(waits(40_000_000, 40_000, 0, false), "no sleep is known, but it does nothing");
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
        expire_polled(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 1);
        let (place, _) = POLL_STATE.get().open.unwrap();
        POLLED[place].polled_ns.store(0, Ordering::Relaxed);
        expire_polled(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(asked(POLLING_IS_WAITING_NS), 0, "its place is lost");
        assert_eq!(asked(POLLING_IS_WAITING_NS), 1, "and it waits again");
        interrupt(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(POLL_STATE.get().recorder, 0);
    }
}
