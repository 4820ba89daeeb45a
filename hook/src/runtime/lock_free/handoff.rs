//! The exchange between a launching thread and the watcher: slots of new operations go to the
//! watcher, spare events come back.
//!
//! Each lane has a [`Handoff`] of its own, so that two threads that launch at the same time write
//! to different cache lines. Both directions are lock-free, and neither side waits.

use super::{
    atomic::{self, AtomicU32, AtomicU64, AtomicUsize, LANE_EVENTS as SPARE, Ordering},
    slot::Slot,
};

/// Cells per cache line.
const CELLS_A_LINE: usize = 8;

/// The exchange of one lane. It is aligned to two cache lines, because processors fetch them in
/// pairs.
#[repr(align(128))]
pub struct Handoff {
    /// The newest slot plus one, 0 for none. The earlier ones are linked by [`Slot::begun`].
    begun: AtomicU32,
    /// The context of the events: the first context in which the lane's thread launched, 0 before
    /// that.
    context: AtomicUsize,
    /// Where the thread takes the next event.
    taken: AtomicUsize,
    returned: Returned,
}

/// The watcher's side.
#[repr(align(128))]
struct Returned {
    /// Where the watcher puts the next event.
    next: AtomicUsize,
    /// Events, 0 for an empty cell. On the heap, because the thread of the first device call may
    /// have a very small stack.
    cells: Box<[AtomicUsize]>,
}

impl Handoff {
    /// An empty exchange.
    pub fn new() -> Self {
        Handoff {
            begun: AtomicU32::new(0),
            context: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            returned: Returned { next: AtomicUsize::new(0), cells: (0..SPARE).map(|_| AtomicUsize::new(0)).collect() },
        }
    }

    /// Hands a slot, which is in no list, to the watcher. Threads without a lane share one list, so
    /// they may compete.
    pub fn push(&self, slots: &[Slot], index: usize) {
        let mut newest = self.begun.load(Ordering::Relaxed);
        loop {
            slots[index].begun.store(newest, Ordering::Relaxed);
            match self.begun.compare_exchange_weak(newest, index as u32 + 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => newest = now,
            }
        }
    }

    /// Takes all slots of the list, newest first. Called by the watcher only.
    pub fn take(&self, slots: &[Slot], mut each: impl FnMut(usize)) {
        if self.begun.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut link = self.begun.swap(0, Ordering::Acquire);
        while let Some(index) = link.checked_sub(1) {
            let index = index as usize;
            link = slots[index].begun.load(Ordering::Relaxed);
            each(index);
        }
    }

    /// Takes a spare event of a context. Called by the lane's thread only.
    #[inline]
    pub fn take_event(&self, context: usize) -> Option<usize> {
        if self.context.load(Ordering::Relaxed) != context {
            self.adopt(context)?;
        }
        let place = self.taken.load(Ordering::Relaxed);
        let cell = &self.returned.cells[place % SPARE];
        let event = cell.load(Ordering::Acquire);
        if event == 0 {
            return None;
        }
        cell.store(0, Ordering::Release);
        self.taken.store(place.wrapping_add(1), Ordering::Relaxed);
        // The watcher wrote the next cache line on another core, and this thread reaches it a few
        // operations later.
        atomic::prefetch(&self.returned.cells[place.wrapping_add(CELLS_A_LINE) % SPARE]);
        Some(event)
    }

    /// Binds the lane to the first context. A thread that launches in several contexts takes the
    /// events of the others from their pools.
    #[cold]
    fn adopt(&self, context: usize) -> Option<()> {
        self.context.compare_exchange(0, context, Ordering::Relaxed, Ordering::Relaxed).ok().map(|_| ())
    }

    /// Gives an event back. False when there is no room. Called by the watcher only.
    pub fn give_event(&self, context: usize, event: usize) -> bool {
        let place = self.returned.next.load(Ordering::Relaxed);
        let cell = &self.returned.cells[place % SPARE];
        if self.context.load(Ordering::Relaxed) != context || cell.load(Ordering::Acquire) != 0 {
            return false;
        }
        cell.store(event, Ordering::Release);
        self.returned.next.store(place.wrapping_add(1), Ordering::Relaxed);
        true
    }

    /// The number of spare events, approximate while they are exchanged.
    pub fn events(&self) -> usize {
        let returned = self.returned.next.load(Ordering::Relaxed);
        returned.wrapping_sub(self.taken.load(Ordering::Relaxed)).min(SPARE)
    }
}

/// Adds to a counter of a lane. Only the calling thread writes it, so it needs no atomic
/// read-modify-write.
#[inline(always)]
pub fn add(word: &AtomicU64, by: u64) {
    word.store(word.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// Replaces `from` by `me` as the owner of a lane. False when another thread was faster.
pub fn claim(owner: &AtomicU64, from: u64, me: u64) -> bool {
    owner.compare_exchange(from, me, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use super::*;

    fn slots(count: usize) -> Vec<Slot> {
        (0..count).map(|_| Slot::default()).collect()
    }

    fn taken(handoff: &Handoff, slots: &[Slot]) -> Vec<usize> {
        let mut taken = Vec::new();
        handoff.take(slots, |index| taken.push(index));
        taken
    }

    #[test]
    fn slots_are_taken_once_and_newest_first() {
        let (handoff, slots) = (Handoff::new(), slots(8));
        assert_eq!(taken(&handoff, &slots), [0; 0]);
        for index in [5, 0, 7] {
            handoff.push(&slots, index);
        }
        assert_eq!(taken(&handoff, &slots), [7, 0, 5]);
        handoff.push(&slots, 5);
        assert_eq!(taken(&handoff, &slots), [5]);
    }

    #[test]
    fn four_threads_of_one_list_lose_no_slot() {
        const EACH: usize = 5_000;
        let (handoff, slots) = (Handoff::new(), slots(4 * EACH));
        let seen: Vec<AtomicBool> = (0..4 * EACH).map(|_| AtomicBool::new(false)).collect();
        let ended = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (handoff, slots, ended) = (&handoff, &slots, &ended);
                scope.spawn(move || {
                    (0..EACH).for_each(|index| handoff.push(slots, thread * EACH + index));
                    ended.fetch_add(1, Ordering::Release);
                });
            }
            loop {
                let all = ended.load(Ordering::Acquire) == 4;
                handoff.take(&slots, |index| assert!(!seen[index].swap(true, Ordering::Relaxed), "{index} twice"));
                if all {
                    break;
                }
                std::thread::yield_now();
            }
        });
        assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed)));
    }

    #[test]
    fn events_return_to_their_context_up_to_the_capacity() {
        let handoff = Handoff::new();
        assert!(!handoff.give_event(0x10, 1), "the lane has no context yet");
        assert_eq!(handoff.take_event(0x10), None);
        assert!(!handoff.give_event(0x20, 2), "another context's");
        for lap in 0..3 {
            for event in 1..=SPARE {
                assert!(handoff.give_event(0x10, event + lap));
            }
            assert!(!handoff.give_event(0x10, 9));
            assert_eq!((handoff.events(), handoff.take_event(0x20)), (SPARE, None));
            for event in 1..=SPARE {
                assert_eq!(handoff.take_event(0x10), Some(event + lap));
            }
            assert_eq!((handoff.take_event(0x10), handoff.events()), (None, 0));
        }
    }
}
