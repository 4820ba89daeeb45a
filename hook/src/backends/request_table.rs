//! The operations behind handles that a thread may wait for later: MPI requests, and gloo's sends
//! and receives.
//!
//! Starting such an operation cannot hang, and it may legitimately stay incomplete for as long as
//! the job runs, for example a receive that waits for a stop message. So it becomes a recorded
//! operation only when a thread waits for it. The table is a cache: an entry replaces another one
//! in the same place.

use std::sync::atomic::{AtomicU64, Ordering};

use xpu_timer_proto::v1::{DataType, Op, OpKind};

use crate::runtime::{lock_free::atomic::home_slot, recorder::NewOperation};

/// Number of entries, a power of two.
const PLACES: usize = 4096;

/// Key of an entry that is being written.
const BUSY: u64 = u64::MAX;

/// An entry: the handle, and the words of its [`RequestOperation`].
struct Entry {
    key: AtomicU64,
    words: [AtomicU64; 7],
}

static TABLE: [Entry; PLACES] =
    [const { Entry { key: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; 7] } }; PLACES];

fn entry_of(handle: u64) -> &'static Entry {
    &TABLE[home_slot::<PLACES>(handle)]
}

/// The operation behind a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestOperation {
    op: Op,
    dtype: DataType,
    comm: usize,
    communicator: u64,
    seq: u64,
    count: u64,
    peer: i32,
    tag: Option<i32>,
    function: u64,
    /// The request is persistent.
    pub persistent: bool,
    /// The request is not started, so that a wait for it returns at once.
    pub is_inactive: bool,
    /// It is the first of two operations; the other one has the key with [`SECOND`].
    paired: bool,
}

/// Added to the key of the second of two operations. No address and no handle number has this bit.
const SECOND: u64 = 1 << 63;

impl RequestOperation {
    /// An operation that has a communicator.
    pub(crate) fn of(what: &NewOperation, persistent: bool) -> Option<Self> {
        Some(RequestOperation {
            op: what.op,
            dtype: what.dtype,
            comm: what.comm?,
            communicator: what.communicator,
            seq: what.seq,
            count: what.count,
            peer: what.peer,
            tag: what.tag,
            function: what.function,
            persistent,
            is_inactive: persistent,
            paired: false,
        })
    }

    /// The request, started again. A collective gets the next sequence number of its communicator;
    /// `None` when the communicator is unknown.
    pub(crate) fn restarted(&self, next: impl FnOnce(usize, u64) -> Option<u64>) -> Option<Self> {
        let is_collective = !matches!(self.op, Op::Send | Op::Recv);
        let seq = if is_collective { next(self.comm, self.communicator)? } else { self.seq };
        Some(RequestOperation { seq, is_inactive: false, ..*self })
    }

    /// The request, until it is started again.
    pub(crate) fn inactive(&self) -> Self {
        RequestOperation { is_inactive: true, ..*self }
    }

    /// The operation as it begins.
    pub(crate) fn begin(&self) -> NewOperation {
        NewOperation {
            dtype: self.dtype,
            comm: Some(self.comm),
            communicator: self.communicator,
            seq: self.seq,
            count: self.count,
            peer: self.peer,
            tag: self.tag,
            function: self.function,
            ..NewOperation::new(OpKind::Collective, self.op)
        }
    }
}

/// Records the operation behind a handle.
pub(crate) fn remember(handle: u64, operation: &RequestOperation) {
    entry_of(handle).write(handle, operation);
}

/// Records two operations behind a handle. The first one is the leader.
pub(crate) fn remember_both(handle: u64, first: &RequestOperation, second: &RequestOperation) {
    remember(handle, &RequestOperation { paired: true, ..*first });
    remember(handle | SECOND, second);
}

/// The operations behind a handle, given the result of [`recall`].
pub(crate) fn operations(handle: u64, operation: &RequestOperation) -> impl Iterator<Item = NewOperation> + use<> {
    let second = operation.paired.then(|| recall(handle | SECOND)).flatten();
    std::iter::once(*operation).chain(second).map(|operation| operation.begin())
}

/// The operation behind a handle, if it is known.
pub(crate) fn recall(handle: u64) -> Option<RequestOperation> {
    entry_of(handle).read(handle)
}

/// Removes a handle.
pub(crate) fn forget(handle: u64) {
    entry_of(handle).forget(handle);
}

impl Entry {
    /// Stores the operation of a handle. Does nothing while another thread writes this entry.
    fn write(&self, handle: u64, operation: &RequestOperation) {
        let old = self.key.load(Ordering::Relaxed);
        if old == BUSY || self.key.compare_exchange(old, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return;
        }
        let small = operation.op as u64
            | (operation.dtype as u64) << 8
            | u64::from(operation.persistent) << 16
            | u64::from(operation.tag.is_some()) << 17
            | u64::from(operation.is_inactive) << 18
            | u64::from(operation.paired) << 19
            | u64::from(operation.peer as u32) << 32;
        let tag = operation.tag.unwrap_or(0) as u32;
        let words = [
            small,
            operation.comm as u64,
            operation.communicator,
            operation.seq,
            operation.count,
            u64::from(tag),
            operation.function,
        ];
        for (place, word) in self.words.iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
        self.key.store(handle, Ordering::Release);
    }

    fn read(&self, handle: u64) -> Option<RequestOperation> {
        if self.key.load(Ordering::Acquire) != handle {
            return None;
        }
        let [small, comm, communicator, seq, count, tag, function] =
            self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        std::sync::atomic::fence(Ordering::Acquire);
        (self.key.load(Ordering::Relaxed) == handle).then(|| RequestOperation {
            op: Op::try_from(i32::from(small as u8)).unwrap_or_default(),
            dtype: DataType::try_from(i32::from((small >> 8) as u8)).unwrap_or_default(),
            comm: comm as usize,
            communicator,
            seq,
            count,
            peer: (small >> 32) as i32,
            tag: (small & 1 << 17 != 0).then_some(tag as i32),
            function,
            persistent: small & 1 << 16 != 0,
            is_inactive: small & 1 << 18 != 0,
            paired: small & 1 << 19 != 0,
        })
    }

    fn forget(&self, handle: u64) {
        let _ = self.key.compare_exchange(handle, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_known_until_it_is_forgotten_or_replaced() {
        let operation = RequestOperation {
            op: Op::Recv,
            dtype: DataType::Float64,
            comm: 3,
            communicator: 0xfeed,
            seq: 1 << 40,
            count: 12,
            peer: -1,
            tag: Some(-1),
            function: 9,
            persistent: true,
            is_inactive: true,
            paired: true,
        };
        let entry = entry_of(0x7000);
        entry.write(0x7000, &operation);
        assert_eq!(entry.read(0x7000), Some(operation));
        assert_eq!(entry.read(0x7001), None);
        entry.write(0x8000, &RequestOperation { persistent: false, ..operation });
        assert_eq!(entry.read(0x7000), None);
        entry.forget(0x7000);
        assert!(entry.read(0x8000).is_some());
        entry.forget(0x8000);
        assert_eq!(entry.read(0x8000), None);
    }

    #[test]
    fn a_handle_may_have_two_operations() {
        let of = |op: Op, peer: i32| {
            RequestOperation::of(
                &NewOperation { comm: Some(1), communicator: 5, peer, ..NewOperation::new(OpKind::Collective, op) },
                false,
            )
        };
        let (receive, send) = (of(Op::Recv, 2).unwrap(), of(Op::Send, 3).unwrap());
        let shown = |handle: u64| -> Vec<(Op, i32)> {
            let operation = recall(handle).expect("it was remembered");
            operations(handle, &operation).map(|what| (what.op, what.peer)).collect()
        };
        remember_both(0x9000, &receive, &send);
        assert_eq!(shown(0x9000), [(Op::Recv, 2), (Op::Send, 3)]);
        // The next request with this handle has one operation.
        remember(0x9000, &send);
        assert_eq!(shown(0x9000), [(Op::Send, 3)]);
        forget(0x9000);
        assert_eq!(recall(0x9000), None);
    }
}
