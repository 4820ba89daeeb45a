//! The life of an operation slot: a launching thread claims it, publishes the operation, and hands it to the watcher, which frees it.

use xpu_timer_proto::ring::op;

use super::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// Life of a slot, in [`Slot::state`].
pub mod state {
    /// Nobody's.
    pub const FREE: u8 = 0;
    /// Begun, in a group that is still open: not launched yet.
    pub const QUEUED: u8 = 1;
    /// The host is inside the call, or a nonblocking call is in progress.
    pub const OPEN: u8 = 2;
    /// Both events are in the stream: the device decides.
    pub const ARMED: u8 = 3;
    /// The host decided; the status is in the ring.
    pub const CLOSED: u8 = 4;
}

/// What the process keeps to itself about an operation slot: one cache line.
#[derive(Default)]
#[repr(align(64))]
pub struct Slot {
    /// One of [`state`].
    pub state: AtomicU8,
    /// The lane of the thread that launched it; [`xpu_timer_proto::ring::lane::SLOTS`] when that has none.
    pub lane: AtomicU8,
    /// Index of its communicator plus one, 0 for none.
    pub comm: AtomicU16,
    /// Next on its way to the watcher; see [`crate::runtime::lock_free::handoff::Handoff`].
    pub begun: AtomicU32,
    /// Since when it counts as pending; a queued one from the end of its group.
    pub since_ns: AtomicU64,
    /// Context, stream and events as addresses; 0 for none.
    pub context: AtomicUsize,
    /// As above.
    pub stream: AtomicUsize,
    /// As above.
    pub start: AtomicUsize,
    /// As above.
    pub end: AtomicUsize,
    /// Where a call that is grouped, or still in progress, leaves its communicator.
    pub output: AtomicUsize,
    /// Next of its group, or of the operations that wait for a nonblocking communicator; slot plus one.
    pub next: AtomicU32,
    /// Next of the operations that the same pair of events brackets; slot plus one.
    pub follower: AtomicU32,
}

impl Slot {
    /// Takes the slot; false when its operation of the lap before is still pending.
    #[inline]
    pub fn claim(&self) -> bool {
        self.state.compare_exchange(state::FREE, state::QUEUED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Moves the slot on. Whoever finds the new state finds what was written before.
    #[inline]
    pub fn become_state(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }

    /// The state, with what was written before it.
    #[inline]
    pub fn state(&self) -> u8 {
        self.state.load(Ordering::Acquire)
    }
}

/// Writes the words of a claimed slot. A reader that finds the same ticket before and after reading the other words has one operation,
/// not parts of two.
#[inline(always)]
pub fn publish<const COUNT: usize>(words: &[AtomicU64; op::WORDS], ticket: u64, values: [(usize, u64); COUNT]) {
    words[op::TICKET].store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    for (word, value) in values {
        words[word].store(value, Ordering::Relaxed);
    }
    words[op::TICKET].store(ticket + 1, Ordering::Release);
}
