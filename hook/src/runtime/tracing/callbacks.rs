//! The callbacks that the interpreter runs at each event of a traced function, in the thread of the
//! program. They call no function of the interpreter, take no lock and allocate nothing.
//!
//! A call that ends by an exception has no event of its function alone before CPython 3.15. So the
//! hook listens to `PY_UNWIND` of all functions there, which happens only when an exception leaves
//! a frame: functions that return cost nothing more. [`ended`] returns at once if the thread has no
//! open traced call. The same holds for `PY_THROW`, when an exception enters a generator.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use xpu_timer_proto::ring::{header, offset, pack_halves, span};

use crate::runtime::{
    lifecycle::panics::guarded,
    lock_free::atomic::home_slot,
    os::{
        clock,
        thread_state::{self, OpenCall, ThreadState},
    },
    recorder::{self, Recorder},
    tracing::interpreter::Reference,
};

/// Places of the table of code objects: twice the number of functions, so that a search ends soon.
const PLACES: usize = span::function::SLOTS * 2;

/// The traced code objects and the indexes of their functions. An entry is never removed: the hook
/// holds a reference to the code object, so its address stays its own.
pub(crate) struct Codes {
    codes: [AtomicUsize; PLACES],
    functions: [AtomicUsize; PLACES],
    used: AtomicUsize,
}

/// The codes of this process.
pub(crate) static CODES: Codes = Codes::new();

impl Codes {
    const fn new() -> Self {
        Codes {
            codes: [const { AtomicUsize::new(0) }; PLACES],
            functions: [const { AtomicUsize::new(0) }; PLACES],
            used: AtomicUsize::new(0),
        }
    }

    /// Adds a code object. Returns false if it is there or the table is full.
    pub(crate) fn add(&self, code: usize, function: usize) -> bool {
        if self.find(code).is_some() || self.used.fetch_add(1, Ordering::Relaxed) >= span::function::SLOTS {
            return false;
        }
        let mut place = home_slot::<PLACES>(code as u64);
        while self.codes[place].load(Ordering::Relaxed) != 0 {
            place = (place + 1) % PLACES;
        }
        self.functions[place].store(function, Ordering::Relaxed);
        self.codes[place].store(code, Ordering::Release);
        true
    }

    /// The function of a code object.
    #[inline]
    fn find(&self, code: usize) -> Option<usize> {
        let home = home_slot::<PLACES>(code as u64);
        for step in 0..PLACES {
            let place = (home + step) % PLACES;
            match self.codes[place].load(Ordering::Acquire) {
                0 => return None,
                found if found == code => return Some(self.functions[place].load(Ordering::Relaxed)),
                _ => {}
            }
        }
        None
    }
}

/// A traced function begins, or continues: a generator has a span for each item.
#[inline]
pub(crate) fn began(code: Reference) {
    let thread = thread_state::current();
    let depth = thread.open_call_count.get();
    if let Some(place) = thread.open_calls.get(depth as usize) {
        place.set(OpenCall { code: code as usize, began_ns: clock::burst_now_ns(thread) });
    }
    thread.open_call_count.set(depth.saturating_add(1));
}

/// A generator continues with an exception. It may be one that is not traced.
#[inline]
pub(crate) fn thrown_into(code: Reference) {
    if CODES.find(code as usize).is_some() {
        began(code);
    }
}

/// A function returns or yields, or an exception leaves it. It may be one that is not traced.
#[inline]
pub(crate) fn ended(code: Reference) {
    let thread = thread_state::current();
    if thread.open_call_count.get() != 0
        && let Some(function) = CODES.find(code as usize)
        && let Some(began_ns) = take(thread, code as usize)
    {
        record(thread, function, began_ns, [0; 2]);
    }
}

/// Removes the newest open call of this code and returns when it began. The newest call of all is
/// that one, unless the thread has switched to another stack meanwhile, as greenlets do.
#[inline]
fn take(thread: &ThreadState, code: usize) -> Option<u64> {
    let depth = thread.open_call_count.get() as usize;
    let kept = thread.open_calls.len();
    if depth > kept {
        thread.open_call_count.set(depth as u32 - 1);
        return None;
    }
    let found = (0..depth).rev().find(|index| thread.open_calls[*index].get().code == code)?;
    let began_ns = thread.open_calls[found].get().began_ns;
    for index in found + 1..depth {
        thread.open_calls[index - 1].set(thread.open_calls[index].get());
    }
    thread.open_call_count.set(depth as u32 - 1);
    Some(began_ns)
}

/// Writes a span into the ring. `collection` has the words of a garbage collection.
#[inline]
fn record(thread: &ThreadState, function: usize, began_ns: u64, collection: [u64; 2]) {
    if let Some(recorder) = recorder::running() {
        recorder.add_span(thread, function, (began_ns, clock::burst_now_ns(thread)), collection);
    }
}

/// When the collection that is running began; 0 for none. Only one can run at a time.
static COLLECTING_SINCE_NS: AtomicU64 = AtomicU64::new(0);

/// A garbage collection begins.
pub(crate) fn collection_began() {
    COLLECTING_SINCE_NS.store(clock::burst_now_ns(thread_state::current()), Ordering::Relaxed);
}

/// A garbage collection ends.
pub(crate) fn collection_ended(function: usize, generation: u64, collected: u32, uncollectable: u32) {
    let began_ns = COLLECTING_SINCE_NS.swap(0, Ordering::Relaxed);
    if began_ns != 0 {
        let collection = [generation + 1, pack_halves(collected, uncollectable)];
        record(thread_state::current(), function, began_ns, collection);
    }
}

impl Recorder {
    /// Writes a span of a traced function: when it began and ended, and the words of a garbage
    /// collection.
    #[inline]
    fn add_span(&self, thread: &ThreadState, function: usize, (began_ns, ended_ns): (u64, u64), collection: [u64; 2]) {
        let ticket = self.ring.header(header::SPANS).fetch_add(1, Ordering::Relaxed);
        let words = self.ring.entry(offset::SPANS, ticket as usize % span::SLOTS, span::WORDS);
        words[span::TICKET].store(0, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::Release);
        words[span::WHAT].store(pack_halves(function as u32, thread.tid()), Ordering::Relaxed);
        words[span::BEGAN_NS].store(began_ns, Ordering::Relaxed);
        words[span::ENDED_NS].store(ended_ns, Ordering::Relaxed);
        words[span::GENERATION].store(collection[0], Ordering::Relaxed);
        words[span::OBJECTS].store(collection[1], Ordering::Relaxed);
        words[span::TICKET].store(ticket + 1, Ordering::Release);
        let entry = self.ring.entry(offset::TRACED, function % span::function::SLOTS, span::function::WORDS);
        entry[span::function::CALLS].fetch_add(1, Ordering::Relaxed);
        entry[span::function::TOTAL_NS].fetch_add(ended_ns.saturating_sub(began_ns), Ordering::Relaxed);
    }

    /// Writes the names of the traced functions, in the order of their indexes.
    pub(crate) fn name_traced_functions<'a>(&self, names: impl Iterator<Item = &'a str>) {
        for (index, name) in names.take(span::function::SLOTS).enumerate() {
            let entry = self.ring.entry(offset::TRACED, index, span::function::WORDS);
            let room = (span::function::WORDS - span::function::NAME) * 8;
            let name = &name[..name.floor_char_boundary(room)];
            recorder::store_text(&entry[span::function::NAME..], name.as_bytes());
            entry[span::function::NAME_BYTES].store(name.len() as u64, Ordering::Release);
        }
    }
}

/// Runs a part of the hook that the interpreter calls. The program's errno stays.
#[inline]
pub(crate) fn in_callback(part: impl FnOnce()) {
    let errno = thread_state::current().errno();
    let saved = errno.get();
    guarded(part);
    errno.set(saved);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(number: usize) -> Reference {
        (0x10_0000 + 64 * number) as Reference
    }

    /// Runs on a thread of its own, because each thread has its own open calls.
    fn alone(test: impl FnOnce() + Send) {
        std::thread::scope(|scope| scope.spawn(test).join().expect("it passes"));
    }

    fn open() -> Vec<usize> {
        let thread = thread_state::current();
        let depth = thread.open_call_count.get() as usize;
        thread.open_calls.iter().take(depth).map(|call| call.get().code).collect()
    }

    #[test]
    fn calls_end_in_any_order_and_other_frames_do_not_count() {
        alone(|| {
            assert!(CODES.add(code(1) as usize, 1) && CODES.add(code(2) as usize, 2));
            assert!(!CODES.add(code(1) as usize, 3), "it is there");
            ended(code(1));
            began(code(1));
            began(code(2));
            began(code(1));
            ended(code(7));
            assert_eq!(open(), [1, 2, 1].map(|number| code(number) as usize));
            // As a greenlet does that was switched to.
            ended(code(2));
            assert_eq!(open(), [1, 1].map(|number| code(number) as usize));
            ended(code(1));
            ended(code(1));
            ended(code(1));
            assert_eq!(open(), [0; 0]);
        });
    }

    #[test]
    fn a_deep_recursion_keeps_its_outer_calls() {
        alone(|| {
            assert!(CODES.add(code(9) as usize, 9));
            (0..100).for_each(|_| began(code(9)));
            (0..95).for_each(|_| ended(code(9)));
            assert_eq!(open().len(), 5);
            (0..7).for_each(|_| ended(code(9)));
            assert_eq!(open().len(), 0);
        });
    }
}
