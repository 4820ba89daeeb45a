//! The states of an operation slot. A launching thread claims a slot, publishes the operation, and
//! hands the slot to the watcher, which frees it.

use xpu_timer_proto::ring::op;

use super::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// Values of [`Slot::state`].
pub mod state {
    /// Free.
    pub const FREE: u8 = 0;
    /// Claimed, in a group that is still open: not launched yet.
    pub const QUEUED: u8 = 1;
    /// The host is inside the call, or a nonblocking call is in progress.
    pub const OPEN: u8 = 2;
    /// Both events are in the stream: the device determines when it completes.
    pub const ARMED: u8 = 3;
    /// The host determined the end. The status is in the ring.
    pub const CLOSED: u8 = 4;
}

/// The private side of an operation slot: one cache line.
#[derive(Default)]
#[repr(align(64))]
pub struct Slot {
    /// A value of [`state`].
    pub state: AtomicU8,
    /// Lane of the thread that launched it; [`xpu_timer_proto::ring::lane::SLOTS`] if that has
    /// none.
    pub lane: AtomicU8,
    /// Index of its communicator plus one, 0 for none.
    pub comm: AtomicU16,
    /// Next slot on the way to the watcher; see `handoff`.
    pub begun: AtomicU32,
    /// Start of the pending time. For a queued operation it is the end of its group.
    pub since_ns: AtomicU64,
    /// Context, stream and events as addresses; 0 for none.
    pub context: AtomicUsize,
    /// As above.
    pub stream: AtomicUsize,
    /// As above.
    pub start: AtomicUsize,
    /// As above.
    pub end: AtomicUsize,
    /// Where a grouped or nonblocking call writes its communicator.
    pub output: AtomicUsize,
    /// Next slot of the group, or of the operations that wait for a nonblocking communicator; slot
    /// plus one.
    pub next: AtomicU32,
    /// Next slot that the same pair of events brackets; slot plus one.
    pub follower: AtomicU32,
}

impl Slot {
    /// Claims the slot. False when its previous operation is still pending.
    #[inline]
    pub fn claim(&self) -> bool {
        self.state.compare_exchange(state::FREE, state::QUEUED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Changes the state. A thread that reads the new state also reads everything that was written
    /// before.
    #[inline]
    pub fn become_state(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }

    /// The state. Everything that was written before it is visible.
    #[inline]
    pub fn state(&self) -> u8 {
        self.state.load(Ordering::Acquire)
    }
}

/// Writes the words of a claimed slot. A reader that finds the same ticket before and after the
/// other words has read a single operation.
#[inline(always)]
pub fn publish<const COUNT: usize>(words: &[AtomicU64; op::WORDS], ticket: u64, values: [(usize, u64); COUNT]) {
    words[op::TICKET].store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    for (word, value) in values {
        words[word].store(value, Ordering::Relaxed);
    }
    words[op::TICKET].store(ticket + 1, Ordering::Release);
}
