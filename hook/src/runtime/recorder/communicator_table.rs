//! The private side of the communicator table, and identities of communicators that are equal on
//! all ranks.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use xpu_timer_proto::ring::comm;

use crate::runtime::{
    lock_free::atomic::home_slot,
    os::{clock, process, thread_state},
};

/// Private side of an entry.
#[derive(Default)]
pub(crate) struct Entry {
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
pub(crate) const DEAD: u32 = 2;

/// All communicators of the process.
pub(crate) struct CommunicatorTable {
    pub entries: Box<[Entry]>,
    /// Entries from here on were never used.
    used: AtomicUsize,
}

impl CommunicatorTable {
    /// An empty table.
    pub(crate) fn new() -> Self {
        CommunicatorTable { entries: (0..comm::SLOTS).map(|_| Entry::default()).collect(), used: AtomicUsize::new(0) }
    }

    /// Number of entries that were ever used.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Acquire).min(comm::SLOTS)
    }

    /// The communicator with this handle. Each thread caches the indices that it uses. A job with
    /// tensor, pipeline and data parallelism has dozens of communicators, some programs have
    /// hundreds.
    #[inline]
    pub(crate) fn find(&self, handle: usize) -> Option<usize> {
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

    pub(crate) fn take(&self) -> Option<usize> {
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

/// The identity of a communicator: a 64-bit hash that is the same on every machine and never 0:
/// FNV-1a with the finalizer of MurmurHash3, because the high bits of FNV are weak for short input.
pub(crate) fn hash(parts: &[&[u8]]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in parts.iter().flat_map(|part| part.iter()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    (hash ^ (hash >> 33)).max(1)
}

/// An identity that no other process has.
pub(crate) fn local_id() -> u64 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    hash(&[b"local", &clock::now_ns().to_le_bytes(), &process::recorder_pid().to_le_bytes(), &count.to_le_bytes()])
}
