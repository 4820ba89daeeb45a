//! A thread that asks again and again whether something has come (`MPI_Test`, `MPI_Iprobe`) waits as one in `MPI_Wait` does.
//!
//! What it asks for becomes an operation when nothing has come for a tenth of a second, in which the thread made no other call of MPI
//! and did nothing else: its questions follow each other at once, or it slept in between. A thread that computes between
//! its questions does not wait, nor does one that has stopped asking; the watcher ends what was not asked for lately. So a receive
//! that is only there to be told to stop never counts. Who has asked for long may do something else now and then: an interrupt, or a
//! hypervisor that takes the processor away, looks like that.
//!
//! A question that follows the one before at once costs a reading of the processor's counter; the clocks are read when that is not so, and
//! every few milliseconds.

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

/// Between two questions of a thread that does nothing else. An interpreter's step is several times shorter.
const MAX_POLL_GAP_NS: u64 = 50_000;

/// From then on asking is waiting.
const POLLING_IS_WAITING_NS: u64 = 100_000_000;

/// A thread that does something else for at most this part of the time since its first question waits.
const OTHER_WORK_FRACTION: u64 = 8;

/// The same as [`MAX_POLL_GAP_NS`] in steps of the processor's counter, of which every processor makes at least one in a nanosecond: certainly no longer.
const MAX_POLL_GAP_TICKS: u64 = 50_000;

/// After so many steps the clock is read: some milliseconds at most.
const CLOCK_CHECK_TICKS: u64 = 1 << 22;

/// A thread's questions without an answer.
#[derive(Clone, Copy)]
struct PollState {
    /// Address of the recorder, because a forked child has another one; 0 when nothing is asked for.
    recorder: usize,
    since_ns: u64,
    /// The processor's counter at the last question.
    last: u64,
    /// The counter and the clock when the clock was read last.
    looked: u64,
    looked_ns: u64,
    /// The thread's time on a processor then; 0 at the first question, which reads the clock only.
    looked_cpu_ns: u64,
    /// What it did besides since the first question.
    other_work_ns: u64,
    /// Its place in [`POLLED`] and its slot, once it counts as an operation.
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

    /// Whether this question follows the one before at once, by the counter alone, and the clock was read lately.
    #[inline]
    fn continues(&self, counter: u64) -> bool {
        counter.wrapping_sub(self.last) <= MAX_POLL_GAP_TICKS && counter.wrapping_sub(self.looked) <= CLOCK_CHECK_TICKS
    }

    /// Nanoseconds since the last question. The counter was at `counter` when the clock said `now`, and goes at an even pace.
    fn gap_ns(&self, counter: u64, now: u64) -> u64 {
        let (steps, gap) = (counter.wrapping_sub(self.looked), counter.wrapping_sub(self.last));
        let since = now.saturating_sub(self.looked_ns);
        if counter <= self.looked || gap > steps {
            return since;
        }
        (u128::from(since) * u128::from(gap) / u128::from(steps)) as u64
    }

    /// Time that the thread spent on something else in the `gap` before this question, at which its time on a processor is `cpu_ns`;
    /// `None` when it does not wait. From the last look to that gap it asked at once, for `polled_ns`, and was on a processor.
    fn other_work_ns(&self, gap: u64, polled_ns: u64, cpu_ns: u64, now: u64) -> Option<u64> {
        if gap <= MAX_POLL_GAP_NS {
            return Some(0);
        }
        let busy = cpu_ns.saturating_sub(self.looked_cpu_ns).saturating_sub(polled_ns).min(gap);
        // Waking up and asking takes some time, too.
        let aside = if busy <= (gap / 4).max(MAX_POLL_GAP_NS) { 0 } else { busy };
        let is_little = self.other_work_ns + aside <= now.saturating_sub(self.since_ns) / OTHER_WORK_FRACTION;
        (self.looked_cpu_ns != 0 && gap < STOPPED_NS && is_little).then_some(aside)
    }
}

/// A question without an answer; `what` is what the thread asks for.
#[inline]
pub fn poll_unsuccessful(recorder: &'static Recorder, what: impl FnOnce() -> Running) {
    let counter = tsc_clock::ticks();
    POLL_STATE.with(|cell| {
        let asking = cell.get();
        if asking.recorder == recorder_address(recorder) && asking.continues(counter) {
            cell.set(PollState { last: counter, ..asking });
        } else {
            poll_with_clock(recorder, counter, what);
        }
    });
}

/// The same with a look at the clock.
#[cold]
fn poll_with_clock(recorder: &'static Recorder, counter: u64, what: impl FnOnce() -> Running) {
    let now = clock::now_ns();
    let mut asking = POLL_STATE.get();
    if asking.recorder != recorder_address(recorder) {
        POLL_STATE.set(PollState::new(recorder, now, counter));
        return;
    }
    let gap = asking.gap_ns(counter, now);
    let polled_ns = now.saturating_sub(asking.looked_ns).saturating_sub(gap);
    let cpu_ns = clock::thread_cpu_ns().max(1);
    match asking.other_work_ns(gap, polled_ns, cpu_ns, now) {
        Some(other_work_ns) => asking.other_work_ns += other_work_ns,
        None => {
            interrupt(recorder);
            asking = PollState::new(recorder, now, counter);
        }
    }
    asking = PollState { last: counter, looked: counter, looked_ns: now, looked_cpu_ns: cpu_ns, ..asking };
    if let Some((place, slot)) = asking.open {
        POLLED[place].polled_ns.store(now, Ordering::Relaxed);
        if POLLED[place].link.load(Ordering::Relaxed) != slot as u32 + 1 {
            asking.open = None;
        }
    } else if now.saturating_sub(asking.since_ns) >= POLLING_IS_WAITING_NS {
        asking.open = what().keep().and_then(|slot| publish(recorder, slot, now));
    }
    POLL_STATE.set(asking);
}

/// The thread has its answer.
pub fn poll_successful(recorder: &'static Recorder, to_all: bool) {
    end(recorder, |slot| match to_all {
        true => close(recorder, slot, OpStatus::Completed, 0),
        // Some of what it asked for may still be on its way.
        false => leave(recorder, slot),
    });
}

/// The thread makes another call: it does not wait any more.
pub fn interrupt(recorder: &'static Recorder) {
    end(recorder, |slot| leave(recorder, slot));
}

#[inline]
fn end(recorder: &'static Recorder, close: impl FnOnce(usize)) {
    let asking = POLL_STATE.get();
    if asking.recorder == 0 {
        return;
    }
    POLL_STATE.set(NOT_POLLING);
    if let Some((place, slot)) = asking.open
        && asking.recorder == recorder_address(recorder)
        && POLLED[place].take(slot)
    {
        close(slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::os::descriptor::Descriptor;
    use crate::runtime::{
        os::tsc,
        recorder::{host_operations::named_host_call, polled_operations::expire},
    };

    fn recorder() -> &'static Recorder {
        let descriptor: &'static Descriptor = Box::leak(Box::new(Descriptor::none()));
        Box::leak(Box::new(Recorder::create(descriptor).unwrap()))
    }

    /// Whether a thread waits that asks at once for `polled_ns`, then not for `gap` nanoseconds, `busy` of which it is on a processor, and so on.
    fn waits(gap: u64, busy: u64, polled_ns: u64) -> bool {
        let mut asking = PollState::new(recorder(), 0, 0);
        let unknown = asking.other_work_ns(gap, polled_ns, 1, polled_ns + gap);
        assert!(gap <= MAX_POLL_GAP_NS || unknown.is_none(), "nobody knows what it did before");
        (1..100).all(|turn| {
            asking.looked_cpu_ns = 1 + (turn - 1) * (busy + polled_ns);
            let aside = asking.other_work_ns(gap, polled_ns, 1 + turn * (busy + polled_ns), turn * (polled_ns + gap));
            asking.other_work_ns += aside.unwrap_or(0);
            aside.is_some()
        })
    }

    #[test]
    fn who_asks_at_once_or_sleeps_in_between_waits_and_who_computes_does_not() {
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
    fn the_counter_tells_how_long_ago_the_last_question_was() {
        // Three steps a nanosecond; the clock was read at step 3,000, and the last question was at step 30,000.
        let asking = PollState { last: 30_000, ..PollState::new(recorder(), 1_000, 3_000) };
        assert!(asking.continues(80_000) && !asking.continues(80_001), "at once or not");
        assert_eq!(asking.gap_ns(33_000, 11_000), 1_000);
        assert_eq!(asking.gap_ns(300_030_000, 100_010_000), 100_000_000);
        assert!(
            !PollState { last: CLOCK_CHECK_TICKS + 4_000, ..asking }.continues(CLOCK_CHECK_TICKS + 4_001),
            "the clock is due"
        );
        // A processor whose counter is behind that of another one.
        assert!(!asking.continues(29_999));
        assert_eq!(asking.gap_ns(2_000, 5_000), 4_000);
    }

    #[test]
    fn what_nobody_asks_for_any_more_ends() {
        let recorder = recorder();
        let what = || Running::new(recorder).with(&named_host_call(recorder, "MPI_Test"));
        poll_unsuccessful(recorder, what);
        let asked = |before_ns: u64| {
            let mut asking = POLL_STATE.get();
            asking.since_ns = clock::now_ns() - before_ns;
            POLL_STATE.set(asking);
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
