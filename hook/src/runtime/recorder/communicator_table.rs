//! The private side of the communicator table.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use xpu_timer_proto::ring::comm;

use crate::runtime::{lock_free::hash_slot::home_slot, os::thread_state};

/// Private side of an entry.
#[derive(Default)]
pub struct Entry {
    /// The library's handle while the communicator exists, else 0.
    pub handle: AtomicU64,
    /// [`FREE`], [`TAKEN`] or [`DEAD`].
    pub life: AtomicU32,
    /// Number of splits, which distinguishes the identities of the children.
    pub splits: AtomicU32,
    /// Operations that wait for a nonblocking call; slot plus one.
    pub waiting: AtomicU32,
    pub state: AtomicU32,
    /// Index of the parent plus one. The parent tells when this communicator is ready.
    pub parent: AtomicU32,
}

const FREE: u32 = 0;
const TAKEN: u32 = 1;
pub const DEAD: u32 = 2;

/// All communicators of the process.
pub struct CommunicatorTable {
    pub entries: Box<[Entry]>,
    /// Entries from here on were never used.
    used: AtomicUsize,
}

impl CommunicatorTable {
    /// An empty table.
    pub fn new() -> Self {
        CommunicatorTable { entries: (0..comm::SLOTS).map(|_| Entry::default()).collect(), used: AtomicUsize::new(0) }
    }

    /// Number of entries that were ever used.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Acquire).min(comm::SLOTS)
    }

    /// The communicator with this handle. Each thread caches the indices that it uses. A job with
    /// tensor, pipeline and data parallelism has dozens of communicators, some programs have
    /// hundreds.
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
