//! The private side of the communicator table.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use xpu_timer_proto::ring::comm;

use crate::runtime::{lock_free::hash_slot::home_slot, os::thread_state};

/// Private side of an entry.
#[derive(Default)]
pub struct Entry {
    /// Library handle while the communicator lives, else 0.
    pub handle: AtomicU64,
    /// 0 free, 1 taken, 2 dead and reusable.
    pub life: AtomicU32,
    /// Splits so far: the number that makes the children's identities differ.
    pub splits: AtomicU32,
    /// Operations that wait for a nonblocking call to finish; slot plus one.
    pub waiting: AtomicU32,
    pub state: AtomicU32,
    /// Index of the one that it is made of plus one: that tells when this one is there.
    pub parent: AtomicU32,
}

const FREE: u32 = 0;
const TAKEN: u32 = 1;
pub const DEAD: u32 = 2;

/// All communicators of the process.
pub struct CommunicatorTable {
    pub entries: Box<[Entry]>,
    /// Entries from here on have never been used.
    used: AtomicUsize,
}

impl CommunicatorTable {
    /// An empty table.
    pub fn new() -> Self {
        CommunicatorTable { entries: (0..comm::SLOTS).map(|_| Entry::default()).collect(), used: AtomicUsize::new(0) }
    }

    /// How many entries have ever been used.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Acquire).min(comm::SLOTS)
    }

    /// The live communicator of a handle. Each thread remembers where it found those that it uses; a job of tensor, pipeline
    /// and data parallelism has dozens, and some programs hundreds.
    #[inline]
    pub fn find(&self, handle: usize) -> Option<usize> {
        if handle == 0 {
            return None;
        }
        let known = &thread_state::current().comms[home_slot::<{ thread_state::COMMS }>(handle as u64)];
        let index = usize::from(known.get());
        if self.is_at(index, handle) {
            return Some(index);
        }
        let index = (0..self.used()).rev().find(|index| self.is_at(*index, handle))?;
        known.set(index as u16);
        Some(index)
    }

    fn is_at(&self, index: usize, handle: usize) -> bool {
        self.entries[index].handle.load(Ordering::Acquire) == handle as u64
    }

    pub fn take(&self) -> Option<usize> {
        let claim = |index: usize, from: u32| {
            let life = &self.entries[index].life;
            life.compare_exchange(from, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok().then_some(index)
        };
        let fresh = self.used.fetch_add(1, Ordering::AcqRel);
        if fresh < comm::SLOTS {
            return claim(fresh, FREE);
        }
        self.used.store(comm::SLOTS, Ordering::Release);
        (0..comm::SLOTS).find_map(|index| claim(index, DEAD))
    }
}
