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
//! On a busy machine, other processes take the processor away between two polls, so the wall time
//! of a gap proves nothing. The CPU time of the gap is other work. The rest is waiting only if the
//! thread slept and was not preempted. The kernel counts both, as voluntary and involuntary context
//! switches.
//!
//! A poll that follows the previous one immediately costs a reading of the processor's counter.
//! Otherwise, and every few milliseconds, the clocks are read.

use std::{cell::Cell, sync::atomic::Ordering};

use xpu_timer_proto::v1::OpStatus;

use crate::{
    backends::host_call::BlockingCall,
    runtime::{
        os::clock::{self, Switches},
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

/// The clocks and the kernel's counters at a poll.
#[derive(Clone, Copy)]
struct PollSample {
    now: u64,
    /// The processor's counter.
    counter: u64,
    /// The thread's CPU time. 0 at the first poll, which reads only the clock.
    cpu_ns: u64,
    switches: Switches,
}

/// The unsuccessful polls of a thread.
#[derive(Clone, Copy)]
struct PollState {
    /// Address of the recorder, because a forked child has another one. 0 when the thread does not
    /// poll.
    recorder: usize,
    since_ns: u64,
    /// The processor's counter at the last poll.
    last: u64,
    /// The last reading of the clocks.
    look: PollSample,
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
    look: PollSample { now: 0, counter: 0, cpu_ns: 0, switches: Switches { sleeps: 0, preemptions: 0 } },
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
            look: PollSample { now, counter, ..NOT_POLLING.look },
            ..NOT_POLLING
        }
    }

    /// Whether this poll follows the previous one immediately, judged by the counter, and the clock
    /// was read recently.
    #[inline]
    fn continues(&self, counter: u64) -> bool {
        counter.wrapping_sub(self.last) <= MAX_POLL_GAP_TICKS
            && counter.wrapping_sub(self.look.counter) <= CLOCK_CHECK_TICKS
    }

    /// Nanoseconds since the last poll. `counter` and `now` were read at the same time, and the
    /// counter has a constant rate.
    fn gap_ns(&self, counter: u64, now: u64) -> u64 {
        let (steps, gap) = (counter.wrapping_sub(self.look.counter), counter.wrapping_sub(self.last));
        let since = now.saturating_sub(self.look.now);
        if counter <= self.look.counter || gap > steps {
            return since;
        }
        (u128::from(since) * u128::from(gap) / u128::from(steps)) as u64
    }

    /// This state after a poll at which the clocks were read; `None` when the thread does not wait.
    /// It had polled without a pause for `polled_ns` since the last clock reading; the last poll
    /// was `gap` nanoseconds ago.
    fn after(mut self, gap: u64, polled_ns: u64, look: &PollSample) -> Option<PollState> {
        self.waited_ns += polled_ns;
        if gap <= MAX_POLL_GAP_NS {
            self.waited_ns += gap;
            return Some(self);
        }
        if self.look.cpu_ns == 0 || gap >= POLLING_STOPPED_NS {
            return None;
        }
        let busy = look.cpu_ns.saturating_sub(self.look.cpu_ns).saturating_sub(polled_ns).min(gap);
        // The rest of the gap is a sleep only if nobody took the processor away.
        let (switches, before) = (look.switches, self.look.switches);
        let slept = switches.sleeps != before.sleeps && switches.preemptions == before.preemptions;
        if slept {
            self.waited_ns += gap - busy;
        }
        // Waking up and polling take some time too.
        let allowance = if slept { gap / 4 } else { (gap / 20).min(2 * MAX_POLL_GAP_NS) };
        if busy > allowance.max(MAX_POLL_GAP_NS) {
            self.other_work_ns += busy;
        }
        let all = self.other_work_ns + self.waited_ns;
        (self.other_work_ns <= all / OTHER_WORK_FRACTION).then_some(self)
    }
}

/// Called after an unsuccessful poll. `what` is the operation that the thread polls for.
#[inline]
pub(crate) fn poll_unsuccessful(recorder: &'static Recorder, what: impl FnOnce() -> BlockingCall) {
    let counter = clock::ticks();
    POLL_STATE.with(|cell| {
        let state = cell.get();
        if state.recorder == recorder_address(recorder) && state.continues(counter) {
            cell.set(PollState { last: counter, ..state });
        } else {
            poll_at(recorder, clock::now_ns(), counter, what);
        }
    });
}

/// Handles an unsuccessful poll that needs a clock reading.
#[cold]
fn poll_at(recorder: &'static Recorder, now: u64, counter: u64, what: impl FnOnce() -> BlockingCall) {
    let mut state = POLL_STATE.get();
    if state.recorder != recorder_address(recorder) {
        POLL_STATE.set(PollState::new(recorder, now, counter));
        return;
    }
    let gap = state.gap_ns(counter, now);
    let polled_ns = now.saturating_sub(state.look.now).saturating_sub(gap);
    let look = PollSample { now, counter, cpu_ns: clock::thread_cpu_ns().max(1), switches: clock::thread_switches() };
    state = state.after(gap, polled_ns, &look).unwrap_or_else(|| {
        interrupt(recorder);
        PollState::new(recorder, now, counter)
    });
    state = PollState { last: counter, look, ..state };
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
pub(crate) fn poll_successful(recorder: &'static Recorder, to_all: bool) {
    end(recorder, |slot| match to_all {
        true => close(recorder, slot, OpStatus::Completed, 0),
        // Some of the requests may still be incomplete.
        false => leave(recorder, slot),
    });
}

/// Called when the thread makes another call: it no longer polls.
pub(crate) fn interrupt(recorder: &'static Recorder) {
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
        os::seccomp::tsc,
        recorder::host_operations::{expire_polled, named_host_call},
    };

    /// How a thread pauses between two polls.
    #[derive(Clone, Copy)]
    enum Pause {
        Sleeps,
        IsPreempted,
        SleepsAndIsPreempted,
    }
    use Pause::{IsPreempted, Sleeps, SleepsAndIsPreempted};

    /// Whether a thread waits that repeatedly polls for `polled_ns`, then pauses for `gap`
    /// nanoseconds, `busy` of them on the CPU.
    fn waits(gap: u64, busy: u64, polled_ns: u64, pause: Pause) -> bool {
        let look = |turn: u64| PollSample {
            now: turn * (polled_ns + gap),
            counter: 0,
            cpu_ns: 1 + turn * (busy + polled_ns),
            switches: Switches {
                sleeps: turn * u64::from(!matches!(pause, IsPreempted)),
                preemptions: turn * u64::from(!matches!(pause, Sleeps)),
            },
        };
        let state = PollState::new(Recorder::for_test(), 0, 0);
        let unknown = state.after(gap, polled_ns, &look(1));
        assert!(gap <= MAX_POLL_GAP_NS || unknown.is_none(), "its earlier work is unknown");
        (1..100)
            .try_fold(state, |state, turn| {
                PollState { look: look(turn - 1), ..state }.after(gap, polled_ns, &look(turn))
            })
            .is_some()
    }

    #[test]
    fn a_thread_that_polls_or_sleeps_waits_and_one_that_computes_does_not() {
        assert!(waits(2_000, 2_000, 0, IsPreempted));
        assert!(waits(10_000_000, 20_000, 0, Sleeps), "sleeps, and works for a moment in each turn");
        assert!(waits(480_000, 80_000, 0, Sleeps), "polls for many messages after each sleep");
        assert!(
            waits(10_000_000, 0, 3_000_000, IsPreempted),
            "asks at once, and its processor is taken away again and again"
        );
        assert!(waits(200_000, 200_000, 10_000_000, IsPreempted), "an interrupt now and then");
        assert!(!waits(2_000_000, 2_000_000, 10_000_000, IsPreempted));
        assert!(!waits(10_000_000, 9_900_000, 0, IsPreempted));
        assert!(!waits(10_000_000, 9_900_000, 3_000_000, IsPreempted), "computes, then asks many times");
        assert!(!waits(100_000, 100_000, 0, IsPreempted), "computes for a moment");
        assert!(!waits(POLLING_STOPPED_NS + 1, 0, 0, Sleeps));
    }

    #[test]
    fn a_thread_that_computes_on_a_busy_machine_does_not_wait() {
        // It gets a twentieth of a processor.
        assert!(!waits(40_000_000, 2_000_000, 0, IsPreempted));
        assert!(!waits(40_000_000, 2_000_000, 100_000, IsPreempted), "and polls several times in between");
        assert!(!waits(40_000_000, 2_000_000, 0, SleepsAndIsPreempted), "and waits for a lock in between");
        assert!(waits(40_000_000, 80_000, 0, IsPreempted), "it yields, and each turn of the others is long");
        assert!(waits(40_000_000, 80_000, 0, SleepsAndIsPreempted));
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
        let what = || BlockingCall::new(recorder).with(&named_host_call(recorder, "MPI_Test"));
        poll_unsuccessful(recorder, what);
        let asked = |before_ns: u64| {
            let (now, counter) = (clock::now_ns(), tsc::counter());
            let state = POLL_STATE.get();
            // However long the machine has kept this thread from running.
            let look = PollSample { now, counter, ..state.look };
            POLL_STATE.set(PollState { since_ns: now - before_ns, last: counter, look, ..state });
            poll_at(recorder, now, counter, what);
            recorder.open_calls.slots().count()
        };
        assert_eq!(asked(POLLING_IS_WAITING_NS / 2), 0);
        assert_eq!(asked(POLLING_IS_WAITING_NS), 1);
        assert_eq!(asked(POLLING_IS_WAITING_NS), 1, "one operation however often it is asked for");
        let (place, _) = POLL_STATE.get().open.unwrap();
        POLLED[place].polled_ns.store(u64::MAX, Ordering::Relaxed);
        expire_polled(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 1);
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
