//! The communicator table. Identities are equal on all ranks, without reading a library's internal
//! state.
//!
//! An entry belongs to the thread that created the communicator until its handle is published. The
//! counters are shared.

use std::sync::atomic::{AtomicU64, Ordering};

use xpu_timer_proto::{
    ring::{comm, header, offset, op, pack_halves},
    v1::{CommunicatorState, Op, OpKind},
};

use crate::runtime::recorder::{Recorder, communicator_table::DEAD, operations::comm_of};

/// A communicator as it is created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewCommunicator {
    /// Identity, equal on all ranks.
    pub id: u64,
    /// Number of ranks, 0 while unknown.
    pub size: u32,
    /// This process's rank, -1 while unknown.
    pub rank: i32,
    /// Device, -1 while unknown.
    pub device: i32,
    /// Identity of the parent, 0 for none.
    pub parent: u64,
    /// Time at which the call began.
    pub created_ns: u64,
}

impl Recorder {
    fn comm_entry(&self, index: usize) -> &'static [AtomicU64] {
        self.ring.entry(offset::COMMS, index, comm::WORDS)
    }

    /// A word of a communicator entry.
    pub(crate) fn comm_word(&self, index: usize, word: usize) -> &'static AtomicU64 {
        &self.comm_entry(index)[word]
    }

    /// Publishes a communicator that is being created. `None` when the table is full, which is
    /// counted.
    pub(crate) fn create_comm(&self, new: &NewCommunicator) -> Option<usize> {
        let Some(index) = self.comms.take() else {
            self.count(header::OVERFLOWS);
            return None;
        };
        let private = &self.comms.entries[index];
        private.handle.store(0, Ordering::Relaxed);
        private.splits.store(0, Ordering::Relaxed);
        private.waiting.store(0, Ordering::Relaxed);
        private.parent.store(0, Ordering::Relaxed);
        private.state.store(CommunicatorState::Initializing as u32, Ordering::Relaxed);
        let words = self.comm_entry(index);
        words[comm::ID].store(0, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::Release);
        for word in &words[1..] {
            word.store(0, Ordering::Relaxed);
        }
        words[comm::SIZE_RANK].store(pack_halves(new.size, new.rank as u32), Ordering::Relaxed);
        let state = CommunicatorState::Initializing as u32;
        words[comm::STATE_DEVICE].store(pack_halves(state, new.device as u32), Ordering::Relaxed);
        words[comm::PARENT].store(new.parent, Ordering::Relaxed);
        words[comm::CREATED_NS].store(new.created_ns, Ordering::Relaxed);
        words[comm::ID].store(new.id, Ordering::Release);
        Some(index)
    }

    /// Sets the handle that the library returned. Another communicator with this handle must have
    /// ended unseen.
    pub(crate) fn set_comm_handle(&self, index: usize, handle: usize) {
        if let Some(gone) = self.comms.find(handle).filter(|found| *found != index) {
            self.retire_comm(gone);
        }
        self.comm_word(index, comm::HANDLE).store(handle as u64, Ordering::Relaxed);
        self.comms.entries[index].handle.store(handle as u64, Ordering::Release);
    }

    /// Whether the library has given a communicator its handle.
    pub(crate) fn has_handle(&self, index: usize) -> bool {
        self.comms.entries[index].handle.load(Ordering::Acquire) != 0
    }

    /// Sets the communicator of this process from which this one is created.
    pub(crate) fn set_comm_parent(&self, index: usize, parent: usize) {
        self.comms.entries[index].parent.store(parent as u32 + 1, Ordering::Relaxed);
    }

    /// The communicator set by [`Recorder::set_comm_parent`].
    pub(crate) fn comm_parent(&self, index: usize) -> Option<usize> {
        self.comms.entries[index].parent.load(Ordering::Relaxed).checked_sub(1).map(|parent| parent as usize)
    }

    /// Sets size and rank once they are known.
    pub(crate) fn set_comm_size_rank(&self, index: usize, size: u32, rank: i32) {
        self.comm_word(index, comm::SIZE_RANK).store(pack_halves(size, rank as u32), Ordering::Relaxed);
    }

    /// Changes the state.
    pub(crate) fn set_comm_state(&self, index: usize, state: CommunicatorState) {
        self.comms.entries[index].state.store(state as u32, Ordering::Release);
        let word = self.comm_word(index, comm::STATE_DEVICE);
        let device = word.load(Ordering::Relaxed) >> 32;
        word.store(u64::from(state as u32) | device << 32, Ordering::Release);
    }

    /// Raises a counter of an operation's communicator to the operation's sequence number. Sends
    /// and receives have separate numbers.
    pub(crate) fn raise_counter(&self, slot: usize, counter: usize) {
        let words = self.ring.op(slot);
        let code = (words[op::WHAT].load(Ordering::Relaxed) >> 8) as u8;
        let counts = self.kind(slot) == OpKind::Collective
            && ![Op::Send, Op::Recv].iter().any(|op| *op as i32 == i32::from(code));
        if let Some(index) = comm_of(self, slot).filter(|_| counts) {
            let seq = words[op::SEQ].load(Ordering::Relaxed);
            // Entries are reused, so the entry must still belong to this communicator.
            if self.comm_id(index) == words[op::COMMUNICATOR].load(Ordering::Relaxed) {
                self.comm_word(index, counter).fetch_max(seq, Ordering::Relaxed);
            }
        }
    }

    /// The state of a communicator.
    pub(crate) fn comm_state(&self, index: usize) -> CommunicatorState {
        let state = self.comms.entries[index].state.load(Ordering::Acquire);
        CommunicatorState::try_from(state as i32).unwrap_or_default()
    }

    /// The handle is no longer valid. The entry stays readable until it is reused.
    pub(crate) fn retire_comm(&self, index: usize) {
        let entry = &self.comms.entries[index];
        entry.handle.store(0, Ordering::Release);
        entry.life.store(DEAD, Ordering::Release);
    }

    /// This process's rank in a communicator, -1 while unknown.
    pub(crate) fn comm_rank(&self, index: usize) -> i32 {
        (self.comm_word(index, comm::SIZE_RANK).load(Ordering::Relaxed) >> 32) as i32
    }

    /// Identity of a communicator.
    pub(crate) fn comm_id(&self, index: usize) -> u64 {
        self.comm_word(index, comm::ID).load(Ordering::Relaxed)
    }

    /// Number of the communicator's next split, from 0. Every rank splits it in the same order.
    pub(crate) fn next_split(&self, index: usize) -> u32 {
        self.comms.entries[index].splits.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds an operation to those that wait for a nonblocking call of this communicator.
    pub(crate) fn wait_for_comm(&self, index: usize, slot: usize) {
        let head = &self.comms.entries[index].waiting;
        let mut first = head.load(Ordering::Acquire);
        loop {
            self.slots[slot].next.store(first, Ordering::Relaxed);
            match head.compare_exchange_weak(first, slot as u32 + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }

    /// Takes the list of waiting operations.
    pub(crate) fn take_waiting(&self, index: usize) -> u32 {
        let head = &self.comms.entries[index].waiting;
        if head.load(Ordering::Relaxed) == 0 { 0 } else { head.swap(0, Ordering::AcqRel) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::os::descriptor::Descriptor;
    use crate::runtime::recorder::communicator_table::hash;

    fn recorder() -> Recorder {
        Recorder::create(Box::leak(Box::new(Descriptor::none()))).unwrap()
    }

    fn new(id: u64) -> NewCommunicator {
        NewCommunicator { id, size: 4, rank: 2, device: 0, parent: 0, created_ns: 1 }
    }

    #[test]
    fn the_hash_is_pinned_because_all_ranks_must_agree() {
        assert_eq!(hash(&[b"abc"]), hash(&[b"a", b"bc"]));
        assert_ne!(hash(&[&[0; 128]]), hash(&[&[0; 127]]));
        assert_eq!(hash(&[b"xpu_timer"]), 0x321d_1fe7_222b_e266);
    }

    #[test]
    fn a_reused_handle_is_the_new_communicator() {
        let recorder = recorder();
        let first = recorder.create_comm(&new(10)).unwrap();
        assert_eq!(recorder.comms.find(0x50), None);
        recorder.set_comm_handle(first, 0x50);
        assert_eq!(recorder.comms.find(0x50), Some(first));
        recorder.retire_comm(first);
        assert_eq!(recorder.comms.find(0x50), None);
        let second = recorder.create_comm(&new(11)).unwrap();
        recorder.set_comm_handle(second, 0x50);
        assert_eq!(recorder.comms.find(0x50).map(|index| recorder.comm_id(index)), Some(11));
        // A communicator that ended unseen does not hide its successor.
        let third = recorder.create_comm(&new(12)).unwrap();
        recorder.set_comm_handle(third, 0x50);
        assert_eq!(recorder.comms.find(0x50), Some(third));
        recorder.retire_comm(third);
        assert_eq!(recorder.comms.find(0x50), None);
    }

    #[test]
    fn every_one_of_a_thousand_communicators_is_found_in_any_order() {
        let recorder = recorder();
        let handles: Vec<usize> = (1..=comm::SLOTS).map(|number| number * 0x1240).collect();
        let indices: Vec<usize> = (1..=comm::SLOTS).map(|id| recorder.create_comm(&new(id as u64)).unwrap()).collect();
        handles.iter().zip(&indices).for_each(|(handle, index)| recorder.set_comm_handle(*index, *handle));
        for round in 0..3 {
            for number in (0..comm::SLOTS).map(|number| number * (2 * round + 1) % comm::SLOTS) {
                assert_eq!(recorder.comms.find(handles[number]), Some(indices[number]));
                assert_eq!(recorder.comms.find(handles[number]), Some(indices[number]), "the second time");
            }
        }
    }

    #[test]
    fn a_full_table_reuses_dead_entries_and_counts_overflows() {
        let recorder = recorder();
        let all: Vec<usize> = (0..comm::SLOTS).map(|id| recorder.create_comm(&new(id as u64 + 1)).unwrap()).collect();
        assert!(recorder.create_comm(&new(5)).is_none());
        assert_eq!(recorder.ring.header(header::OVERFLOWS).load(Ordering::Relaxed), 1);
        recorder.retire_comm(all[7]);
        assert_eq!(recorder.create_comm(&new(5)), Some(7));
    }

    #[test]
    fn waiting_operations_are_taken_once() {
        let recorder = recorder();
        let comm = recorder.create_comm(&new(1)).unwrap();
        assert_eq!(recorder.take_waiting(comm), 0);
        recorder.wait_for_comm(comm, 3);
        recorder.wait_for_comm(comm, 9);
        let first = recorder.take_waiting(comm);
        assert_eq!(first, 10);
        assert_eq!(recorder.slots[9].next.load(Ordering::Relaxed), 4);
        assert_eq!(recorder.take_waiting(comm), 0);
    }
}
