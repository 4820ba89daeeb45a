//! A thread that asks again and again whether something has come (`MPI_Test`, `MPI_Iprobe`) waits as one in `MPI_Wait` does.
//!
//! What it asks for becomes an operation when nothing has come for a tenth of a second, in which the thread made no other call of MPI
//! and did nothing else: its questions follow each other at once, or it slept in between. A thread that computes between
//! its questions does not wait, nor does one that has stopped asking; the watcher ends what was not asked for lately. So a receive
//! that is only there to be told to stop never counts.

use std::{
    cell::Cell,
    ffi::c_int,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use xpu_timer_proto::v1::{Op, OpStatus};

use super::{
    VARIES, Word,
    request::{For, Handles},
    transfer,
};
use crate::{
    abi::SUCCESS,
    hooked::After,
    host::open::{Running, close, leave},
    recorder::Recorder,
    sys,
};

/// Between two questions of a thread that does nothing else. An interpreter's step is several times shorter.
const AT_ONCE_NS: u64 = 50_000;
/// From then on asking is waiting.
const WAITS_NS: u64 = 100_000_000;
/// Who has not asked for so long has stopped asking.
const STOPPED_NS: u64 = 3_000_000_000;

/// A thread's questions without an answer.
#[derive(Clone, Copy)]
struct Asking {
    /// Address of the recorder: a forked child has another one.
    recorder: usize,
    since_ns: u64,
    last_ns: u64,
    /// The thread's time on a processor at its last question; 0 when it was not looked at.
    last_cpu_ns: u64,
    /// Its place in [`OPEN`] and its slot, once it counts as an operation.
    open: Option<(usize, usize)>,
}

thread_local! {
    static ASKING: Cell<Option<Asking>> = const { Cell::new(None) };
}

/// An operation that a thread asks for. Whoever takes the slot out of it, its thread or the watcher, ends the operation.
struct Open {
    recorder: AtomicUsize,
    /// Slot plus one; 0 for a free place.
    link: AtomicU32,
    asked_ns: AtomicU64,
}

/// So many threads can be seen waiting in this way at once.
static OPEN: [Open; 64] =
    [const { Open { recorder: AtomicUsize::new(0), link: AtomicU32::new(0), asked_ns: AtomicU64::new(0) } }; 64];

impl Open {
    /// Takes the slot out, when it is still this one.
    fn take(&self, slot: usize) -> bool {
        self.link.compare_exchange(slot as u32 + 1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

impl Asking {
    fn new(recorder: &'static Recorder, now: u64) -> Self {
        Asking { recorder: address(recorder), since_ns: now, last_ns: now, last_cpu_ns: 0, open: None }
    }

    /// Another question at `now`: whether the thread did nothing else since the last one. `cpu_ns` is its time on a processor.
    fn again(&mut self, now: u64, cpu_ns: impl FnOnce() -> u64) -> bool {
        let gap = now.saturating_sub(self.last_ns);
        self.last_ns = now;
        let before = std::mem::take(&mut self.last_cpu_ns);
        if gap <= AT_ONCE_NS {
            return true;
        }
        self.last_cpu_ns = cpu_ns().max(1);
        // Waking up and asking takes some time, too.
        let busy = self.last_cpu_ns.saturating_sub(before);
        before != 0 && gap < STOPPED_NS && busy <= (gap / 4).max(AT_ONCE_NS)
    }
}

/// What tells this process's recorder from the one of the process that it was forked from.
fn address(recorder: &'static Recorder) -> usize {
    std::ptr::from_ref(recorder) as usize
}

/// A question without an answer; `what` is what the thread asks for.
fn unanswered(recorder: &'static Recorder, what: impl FnOnce() -> Running) {
    let now = sys::now_ns();
    let own = |asking: &Asking| asking.recorder == address(recorder);
    let Some(mut asking) = ASKING.get().filter(own) else {
        ASKING.set(Some(Asking::new(recorder, now)));
        return;
    };
    if !asking.again(now, sys::thread_cpu_ns) {
        interrupt(recorder);
        asking = Asking { last_cpu_ns: asking.last_cpu_ns, ..Asking::new(recorder, now) };
    }
    if let Some((place, slot)) = asking.open {
        OPEN[place].asked_ns.store(now, Ordering::Relaxed);
        if OPEN[place].link.load(Ordering::Relaxed) != slot as u32 + 1 {
            asking.open = None;
        }
    } else if now.saturating_sub(asking.since_ns) >= WAITS_NS {
        asking.open = what().keep().and_then(|slot| publish(recorder, slot, now));
    }
    ASKING.set(Some(asking));
}

fn publish(recorder: &'static Recorder, slot: usize, now: u64) -> Option<(usize, usize)> {
    for (place, open) in OPEN.iter().enumerate() {
        // A place that is being filled belongs to nobody's recorder.
        if open.link.compare_exchange(0, slot as u32 + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            open.asked_ns.store(now, Ordering::Relaxed);
            open.recorder.store(address(recorder), Ordering::Release);
            return Some((place, slot));
        }
    }
    leave(recorder, slot);
    None
}

/// The thread has its answer.
fn answered(recorder: &'static Recorder, to_all: bool) {
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
    let Some(asking) = ASKING.take() else { return };
    if let Some((place, slot)) = asking.open
        && asking.recorder == address(recorder)
        && OPEN[place].take(slot)
    {
        close(slot);
    }
}

/// Ends what no thread has asked for lately; for the watcher.
pub fn expire(recorder: &'static Recorder) {
    let now = sys::now_ns();
    for open in &OPEN {
        let Some(slot) = open.link.load(Ordering::Acquire).checked_sub(1).map(|slot| slot as usize) else { continue };
        if open.recorder.load(Ordering::Acquire) != address(recorder) {
            // Of the process that this one was forked from, unless it is just being filled.
            if now.saturating_sub(open.asked_ns.load(Ordering::Relaxed)) > STOPPED_NS {
                open.take(slot);
            }
            continue;
        }
        if now.saturating_sub(open.asked_ns.load(Ordering::Relaxed)) > STOPPED_NS && open.take(slot) {
            leave(recorder, slot);
        }
    }
}

/// Where a call says whether something has come.
#[derive(Clone, Copy)]
pub enum Done {
    /// A flag.
    Flag(Word),
    /// How many.
    Count(Word),
}

impl Done {
    fn is_done(self) -> bool {
        let (Done::Flag(place) | Done::Count(place)) = self;
        // SAFETY: null, or the caller's place for an int, which the library has just written.
        unsafe { (place as *const c_int).as_ref() }.is_none_or(|answer| *answer != 0)
    }
}

/// A call that asks for requests.
pub struct Testing {
    handles: Handles,
    which: For,
    done: Done,
}

/// Before a call that asks for `count` requests.
pub fn testing(requests: Word, count: i32, which: For, done: Done) -> Testing {
    Testing { handles: Handles::of(requests, count), which, done }
}

impl After for Testing {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result != SUCCESS || self.done.is_done() {
            if result == SUCCESS {
                self.handles.forget(self.which);
            }
            answered(recorder, result == SUCCESS && self.which == For::All);
        } else {
            unanswered(recorder, || self.handles.running(recorder, "MPI_Test"));
        }
    }
}

/// A call that asks for a message.
pub struct Probing {
    comm: Word,
    peer: Word,
    tag: Word,
    flag: Word,
}

/// Before `MPI_Iprobe` and `MPI_Improbe`.
pub fn probing(comm: Word, peer: Word, tag: Word, flag: Word) -> Probing {
    Probing { comm, peer, tag, flag }
}

impl After for Probing {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if result != SUCCESS || Done::Flag(self.flag).is_done() {
            answered(recorder, result == SUCCESS);
        } else {
            unanswered(recorder, || {
                let what = transfer(recorder, Op::Recv, self.comm, (self.peer, self.tag), VARIES);
                what.iter().fold(Running::new(recorder), |running, what| running.with(what))
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Descriptor;

    fn recorder() -> &'static Recorder {
        let descriptor: &'static Descriptor = Box::leak(Box::new(Descriptor::none()));
        Box::leak(Box::new(Recorder::create(descriptor).unwrap()))
    }

    #[test]
    fn who_asks_at_once_or_sleeps_in_between_waits_and_who_computes_does_not() {
        let mut spinning = Asking::new(recorder(), 0);
        assert!((1..100).all(|turn| spinning.again(turn * 2_000, || panic!("its time need not be known"))));

        // Ten milliseconds of sleep and 20 microseconds of work in each turn.
        let mut sleeping = Asking::new(recorder(), 0);
        assert!(!sleeping.again(10_000_000, || 20_000), "nobody knows what it did before");
        assert!((2..100).all(|turn| sleeping.again(turn * 10_000_000, || turn * 20_000)));

        let mut computing = Asking::new(recorder(), 0);
        assert!((1..100).all(|turn| !computing.again(turn * 10_000_000, || turn * 9_900_000)));
        let mut seldom = Asking::new(recorder(), 0);
        assert!((1..5).all(|turn| !seldom.again(turn * (STOPPED_NS + 1), || turn)));
    }

    #[test]
    fn what_nobody_asks_for_any_more_ends() {
        let recorder = recorder();
        let what = || Running::new(recorder).with(&super::super::super::open::named(recorder, "MPI_Test"));
        unanswered(recorder, what);
        let asked = |before_ns: u64| {
            let mut asking = ASKING.get().unwrap();
            asking.since_ns = sys::now_ns() - before_ns;
            ASKING.set(Some(asking));
            unanswered(recorder, what);
            recorder.open_calls.slots().count()
        };
        assert_eq!(asked(WAITS_NS / 2), 0);
        assert_eq!(asked(WAITS_NS), 1);
        assert_eq!(asked(WAITS_NS), 1, "one operation however often it is asked for");
        expire(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 1);
        let (place, _) = ASKING.get().unwrap().open.unwrap();
        OPEN[place].asked_ns.store(0, Ordering::Relaxed);
        expire(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(asked(WAITS_NS), 0, "its place is lost");
        assert_eq!(asked(WAITS_NS), 1, "and it waits again");
        interrupt(recorder);
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert!(ASKING.get().is_none());
    }
}
