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
            polled_operations::{OPEN, STOPPED_NS, address, publish},
        },
    },
};

/// Between two questions of a thread that does nothing else. An interpreter's step is several times shorter.
const AT_ONCE_NS: u64 = 50_000;

/// From then on asking is waiting.
const WAITS_NS: u64 = 100_000_000;

/// A thread that does something else for at most this part of the time since its first question waits.
const ASIDE_PART: u64 = 8;

/// The same as [`AT_ONCE_NS`] in steps of the processor's counter, of which every processor makes at least one in a nanosecond: certainly no longer.
const AT_ONCE_STEPS: u64 = 50_000;

/// After so many steps the clock is read: some milliseconds at most.
const LOOK_STEPS: u64 = 1 << 22;

/// A thread's questions without an answer.
#[derive(Clone, Copy)]
struct Asking {
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
    aside_ns: u64,
    /// Its place in [`OPEN`] and its slot, once it counts as an operation.
    open: Option<(usize, usize)>,
}

const NOTHING: Asking =
    Asking { recorder: 0, since_ns: 0, last: 0, looked: 0, looked_ns: 0, looked_cpu_ns: 0, aside_ns: 0, open: None };

thread_local! {
    static ASKING: Cell<Asking> = const { Cell::new(NOTHING) };
}

impl Asking {
    fn new(recorder: &'static Recorder, now: u64, counter: u64) -> Self {
        Asking { recorder: address(recorder), since_ns: now, last: counter, looked: counter, looked_ns: now, ..NOTHING }
    }

    /// Whether this question follows the one before at once, by the counter alone, and the clock was read lately.
    #[inline]
    fn goes_on(&self, counter: u64) -> bool {
        counter.wrapping_sub(self.last) <= AT_ONCE_STEPS && counter.wrapping_sub(self.looked) <= LOOK_STEPS
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
    /// `None` when it does not wait. From the last look to that gap it asked at once, for `asked_ns`, and was on a processor.
    fn aside_ns(&self, gap: u64, asked_ns: u64, cpu_ns: u64, now: u64) -> Option<u64> {
        if gap <= AT_ONCE_NS {
            return Some(0);
        }
        let busy = cpu_ns.saturating_sub(self.looked_cpu_ns).saturating_sub(asked_ns).min(gap);
        // Waking up and asking takes some time, too.
        let aside = if busy <= (gap / 4).max(AT_ONCE_NS) { 0 } else { busy };
        let is_little = self.aside_ns + aside <= now.saturating_sub(self.since_ns) / ASIDE_PART;
        (self.looked_cpu_ns != 0 && gap < STOPPED_NS && is_little).then_some(aside)
    }
}

/// A question without an answer; `what` is what the thread asks for.
#[inline]
pub fn unanswered(recorder: &'static Recorder, what: impl FnOnce() -> Running) {
    let counter = tsc_clock::steps();
    ASKING.with(|cell| {
        let asking = cell.get();
        if asking.recorder == address(recorder) && asking.goes_on(counter) {
            cell.set(Asking { last: counter, ..asking });
        } else {
            look(recorder, counter, what);
        }
    });
}

/// The same with a look at the clock.
#[cold]
fn look(recorder: &'static Recorder, counter: u64, what: impl FnOnce() -> Running) {
    let now = clock::now_ns();
    let mut asking = ASKING.get();
    if asking.recorder != address(recorder) {
        ASKING.set(Asking::new(recorder, now, counter));
        return;
    }
    let gap = asking.gap_ns(counter, now);
    let asked_ns = now.saturating_sub(asking.looked_ns).saturating_sub(gap);
    let cpu_ns = clock::thread_cpu_ns().max(1);
    match asking.aside_ns(gap, asked_ns, cpu_ns, now) {
        Some(aside_ns) => asking.aside_ns += aside_ns,
        None => {
            interrupt(recorder);
            asking = Asking::new(recorder, now, counter);
        }
    }
    asking = Asking { last: counter, looked: counter, looked_ns: now, looked_cpu_ns: cpu_ns, ..asking };
    if let Some((place, slot)) = asking.open {
        OPEN[place].asked_ns.store(now, Ordering::Relaxed);
        if OPEN[place].link.load(Ordering::Relaxed) != slot as u32 + 1 {
            asking.open = None;
        }
    } else if now.saturating_sub(asking.since_ns) >= WAITS_NS {
        asking.open = what().keep().and_then(|slot| publish(recorder, slot, now));
    }
    ASKING.set(asking);
}

/// The thread has its answer.
pub fn answered(recorder: &'static Recorder, to_all: bool) {
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
    let asking = ASKING.get();
    if asking.recorder == 0 {
        return;
    }
    ASKING.set(NOTHING);
    if let Some((place, slot)) = asking.open
        && asking.recorder == address(recorder)
        && OPEN[place].take(slot)
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
        recorder::{host_operations::named, polled_operations::expire},
    };

    fn recorder() -> &'static Recorder {
        let descriptor: &'static Descriptor = Box::leak(Box::new(Descriptor::none()));
        Box::leak(Box::new(Recorder::create(descriptor).unwrap()))
    }

    /// Whether a thread waits that asks at once for `asked_ns`, then not for `gap` nanoseconds, `busy` of which it is on a processor, and so on.
    fn waits(gap: u64, busy: u64, asked_ns: u64) -> bool {
        let mut asking = Asking::new(recorder(), 0, 0);
        let unknown = asking.aside_ns(gap, asked_ns, 1, asked_ns + gap);
        assert!(gap <= AT_ONCE_NS || unknown.is_none(), "nobody knows what it did before");
        (1..100).all(|turn| {
            asking.looked_cpu_ns = 1 + (turn - 1) * (busy + asked_ns);
            let aside = asking.aside_ns(gap, asked_ns, 1 + turn * (busy + asked_ns), turn * (asked_ns + gap));
            asking.aside_ns += aside.unwrap_or(0);
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
        let asking = Asking { last: 30_000, ..Asking::new(recorder(), 1_000, 3_000) };
        assert!(asking.goes_on(80_000) && !asking.goes_on(80_001), "at once or not");
        assert_eq!(asking.gap_ns(33_000, 11_000), 1_000);
        assert_eq!(asking.gap_ns(300_030_000, 100_010_000), 100_000_000);
        assert!(!Asking { last: LOOK_STEPS + 4_000, ..asking }.goes_on(LOOK_STEPS + 4_001), "the clock is due");
        // A processor whose counter is behind that of another one.
        assert!(!asking.goes_on(29_999));
        assert_eq!(asking.gap_ns(2_000, 5_000), 4_000);
    }

    #[test]
    fn what_nobody_asks_for_any_more_ends() {
        let recorder = recorder();
        let what = || Running::new(recorder).with(&named(recorder, "MPI_Test"));
        unanswered(recorder, what);
        let asked = |before_ns: u64| {
            let mut asking = ASKING.get();
            asking.since_ns = clock::now_ns() - before_ns;
            ASKING.set(asking);
            look(recorder, tsc::counter(), what);
            recorder.open_calls.slots().count()
        };
        assert_eq!(asked(WAITS_NS / 2), 0);
        assert_eq!(asked(WAITS_NS), 1);
        assert_eq!(asked(WAITS_NS), 1, "one operation however often it is asked for");
        expire(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 1);
        let (place, _) = ASKING.get().open.unwrap();
        OPEN[place].asked_ns.store(0, Ordering::Relaxed);
        expire(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(asked(WAITS_NS), 0, "its place is lost");
        assert_eq!(asked(WAITS_NS), 1, "and it waits again");
        interrupt(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(ASKING.get().recorder, 0);
    }
}
