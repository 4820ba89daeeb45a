//! Spare events, by context, for threads that have none of their own in [`super::handoff`].

use super::atomic::{AtomicUsize, CONTEXTS, Ordering, POOL_EVENTS, Word};

/// The watcher keeps at least this many per context.
pub const LOW: usize = 32;

/// Spare events, by context.
pub struct EventPools {
    contexts: [AtomicUsize; CONTEXTS],
    events: [Queue<POOL_EVENTS>; CONTEXTS],
}

impl EventPools {
    /// Empty pools.
    pub fn new() -> Self {
        EventPools {
            contexts: std::array::from_fn(|_| AtomicUsize::new(0)),
            events: std::array::from_fn(|_| Queue::new()),
        }
    }

    /// The spare events of a context. A new context gets a pool, if one is left.
    pub fn of(&self, context: usize) -> Option<&Queue<POOL_EVENTS>> {
        for (known, events) in self.contexts.iter().zip(&self.events) {
            let found = known.load(Ordering::Relaxed);
            let ours = found == context
                || found == 0
                    && match known.compare_exchange(0, context, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => true,
                        Err(other) => other == context,
                    };
            if ours {
                return Some(events);
            }
        }
        None
    }

    /// Contexts that have a pool.
    pub fn contexts(&self) -> impl Iterator<Item = (usize, &Queue<POOL_EVENTS>)> {
        let known = self.contexts.iter().map(|context| context.load(Ordering::Relaxed));
        known.zip(&self.events).take_while(|(context, _)| *context != 0)
    }
}

struct Cell {
    turn: AtomicUsize,
    word: Word,
}

/// A bounded lock-free queue with several readers and writers. `SLOTS` is a power of two.
///
/// Each cell has a lap counter that tells whose turn it is. A full queue refuses an element and an
/// empty one returns none; neither waits.
pub struct Queue<const SLOTS: usize> {
    cells: Box<[Cell]>,
    head: AtomicUsize,
    tail: AtomicUsize,
}

impl<const SLOTS: usize> Queue<SLOTS> {
    /// An empty queue. This is the only allocation.
    pub fn new() -> Self {
        const { assert!(SLOTS.is_power_of_two()) };
        let cells = (0..SLOTS).map(|turn| Cell { turn: AtomicUsize::new(turn), word: Word::new() }).collect();
        Queue { cells, head: AtomicUsize::new(0), tail: AtomicUsize::new(0) }
    }

    /// Appends a word.
    ///
    /// # Errors
    /// Returns the word when the queue is full.
    pub fn push(&self, word: usize) -> Result<(), usize> {
        let mut position = self.tail.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[position % SLOTS];
            let turn = cell.turn.load(Ordering::Acquire);
            if turn == position {
                match self.tail.compare_exchange_weak(
                    position,
                    position.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        // SAFETY: the exchange reserved this position for the thread until `turn`
                        // is stored.
                        unsafe { cell.word.set(word) };
                        cell.turn.store(position.wrapping_add(1), Ordering::Release);
                        return Ok(());
                    }
                    Err(now) => position = now,
                }
            } else if (turn.wrapping_sub(position) as isize) < 0 {
                return Err(word);
            } else {
                position = self.tail.load(Ordering::Relaxed);
            }
        }
    }

    /// Takes the oldest word.
    pub fn pop(&self) -> Option<usize> {
        let mut position = self.head.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[position % SLOTS];
            let turn = cell.turn.load(Ordering::Acquire);
            let due = position.wrapping_add(1);
            if turn == due {
                match self.head.compare_exchange_weak(position, due, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        // SAFETY: the exchange reserved this position for the thread until `turn`
                        // is stored.
                        let word = unsafe { cell.word.get() };
                        cell.turn.store(position.wrapping_add(SLOTS), Ordering::Release);
                        return Some(word);
                    }
                    Err(now) => position = now,
                }
            } else if (turn.wrapping_sub(due) as isize) < 0 {
                return None;
            } else {
                position = self.head.load(Ordering::Relaxed);
            }
        }
    }

    /// The number of words, approximate while other threads push and pop.
    pub fn len(&self) -> usize {
        self.tail.load(Ordering::Relaxed).wrapping_sub(self.head.load(Ordering::Relaxed)).min(SLOTS)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_context_keeps_its_pool_and_the_seventeenth_gets_none() {
        let pools = EventPools::new();
        pools.of(0x10).unwrap().push(7).unwrap();
        for context in 2..=CONTEXTS {
            assert_eq!(pools.of(context * 0x10).unwrap().len(), 0);
        }
        assert!(pools.of(0xfff0).is_none());
        assert_eq!(pools.of(0x10).unwrap().pop(), Some(7));
        assert_eq!(pools.contexts().count(), CONTEXTS);
    }

    #[test]
    fn events_leave_in_order_and_a_full_queue_refuses() {
        let queue = Queue::<4>::new();
        for lap in 0..3 {
            for word in 0..4 {
                assert_eq!(queue.push(lap * 10 + word), Ok(()));
            }
            assert_eq!(queue.push(99), Err(99));
            assert_eq!(queue.len(), 4);
            for word in 0..4 {
                assert_eq!(queue.pop(), Some(lap * 10 + word));
            }
            assert_eq!(queue.pop(), None);
        }
    }

    #[test]
    fn four_threads_neither_lose_nor_duplicate_events() {
        const EACH: usize = 20_000;
        let queue = Queue::<64>::new();
        let sum = AtomicUsize::new(0);
        let taken = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let queue = &queue;
                scope.spawn(move || {
                    for word in 0..EACH {
                        let mut word = thread * EACH + word;
                        while let Err(back) = queue.push(word) {
                            word = back;
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    while taken.load(Ordering::Relaxed) < 2 * EACH {
                        match queue.pop() {
                            Some(word) => {
                                sum.fetch_add(word, Ordering::Relaxed);
                                taken.fetch_add(1, Ordering::Relaxed);
                            }
                            None => std::thread::yield_now(),
                        }
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), (0..2 * EACH).sum::<usize>());
    }
}
