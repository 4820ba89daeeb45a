//! Operations that host threads run: begun and ended by the host, watched by the watcher, freed by whoever ends them.
//!
//! An MPI program makes many more calls than the watcher has turns, so a slot does not travel to the watcher and back: while it
//! is open, one cell of a small table points to it, and when it ends it is free at once. Neither waits for the other.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU32, Ordering},
};

use xpu_timer_proto::{
    ring::{comm, header, op},
    v1::{OpKind, OpStatus},
};

use crate::{
    abi::SUCCESS,
    bracket::members,
    hooked::After,
    recorder::{Begin, Recorder},
    slot::state,
    start, sys, thread_state,
};

/// So many operations can be open at once and watched; further ones are only recorded.
const CELLS: usize = 256;

/// The open operations of a process. A cell holds a slot plus one, 0 for none.
pub struct OpenCalls {
    cells: [AtomicU32; CELLS],
}

impl OpenCalls {
    /// None.
    pub fn new() -> Self {
        OpenCalls { cells: [const { AtomicU32::new(0) }; CELLS] }
    }

    /// The slots of all open operations.
    pub fn slots(&self) -> impl Iterator<Item = usize> {
        let held = self.cells.iter().map(|cell| cell.load(Ordering::Acquire));
        held.filter_map(|link| Some(link.checked_sub(1)? as usize))
    }

    /// Takes a cell for a slot; its number plus one, 0 when there is none. Each thread begins at a place of its own.
    fn put(&self, slot: usize, tid: u32) -> usize {
        let link = slot as u32 + 1;
        let order = (0..CELLS).map(|step| (tid as usize + step) % CELLS);
        let free = |cell: &usize| {
            let cell = &self.cells[*cell];
            cell.load(Ordering::Relaxed) == 0
                && cell.compare_exchange(0, link, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        order.into_iter().find(free).map_or(0, |cell| cell + 1)
    }
}

/// Begins an operation that a host thread runs. Its age counts from now.
pub fn open(recorder: &'static Recorder, what: &Begin) -> Option<usize> {
    let slot = queue(recorder, what)?;
    begun(recorder, slot);
    Some(slot)
}

/// Ranks of one job do not start at once: each has to load its libraries first, on a machine where the others do so too. So the patience
/// with those who have not come to the first meeting of all begins so much later.
const STARTING_NS: u64 = 10_000_000_000;

/// The age of an operation that meets the others for the first time counts later.
pub fn be_patient(recorder: &'static Recorder, slot: usize) {
    recorder.slots[slot].since_ns.store(sys::now_ns() + STARTING_NS, Ordering::Relaxed);
}

/// Begins an operation that another host thread will run. Its age counts from now.
pub fn queue(recorder: &'static Recorder, what: &Begin) -> Option<usize> {
    let slot = recorder.begin_unwatched(what)?;
    let cell = recorder.open_calls.put(slot, thread_state::with(|thread| thread.tid()));
    if cell == 0 {
        recorder.count(header::OVERFLOWS);
    }
    recorder.slots[slot].output.store(cell, Ordering::Relaxed);
    Some(slot)
}

/// Begins an operation that the same call runs, and that ends with `leader`.
fn follow(recorder: &'static Recorder, leader: usize, what: &Begin) {
    let Some(slot) = recorder.begin_unwatched(what) else { return };
    begun(recorder, slot);
    let link = &recorder.slots[leader].follower;
    recorder.slots[slot].follower.store(link.load(Ordering::Relaxed), Ordering::Relaxed);
    link.store(slot as u32 + 1, Ordering::Relaxed);
}

/// A host thread runs it now.
pub fn begun(recorder: &'static Recorder, slot: usize) {
    recorder.ring.op(slot)[op::STARTED_NS].store(sys::now_ns(), Ordering::Relaxed);
    recorder.raise(slot, comm::STARTED);
}

/// Ends an operation and those that follow it.
pub fn close(recorder: &'static Recorder, leader: usize, status: OpStatus, error: u32) {
    if status == OpStatus::Completed {
        for slot in members(recorder, leader) {
            recorder.raise(slot, comm::COMPLETED);
        }
    }
    free(recorder, leader, status, error);
}

/// The host waits no longer for an operation and those that follow it, which says nothing of them.
pub fn leave(recorder: &'static Recorder, leader: usize) {
    free(recorder, leader, OpStatus::Completed, 0);
}

fn free(recorder: &'static Recorder, leader: usize, status: OpStatus, error: u32) {
    let now = sys::now_ns();
    for slot in members(recorder, leader) {
        recorder.returned(slot, now);
        recorder.settle(slot, status, error, now);
    }
    let cell = recorder.slots[leader].output.swap(0, Ordering::Relaxed);
    if let Some(cell) = cell.checked_sub(1).and_then(|cell| recorder.open_calls.cells.get(cell)) {
        cell.store(0, Ordering::Release);
    }
    for slot in members(recorder, leader) {
        recorder.slots[slot].become_state(state::FREE);
    }
}

/// A blocking call of this thread: its operations end when it returns, or when the thread is unwound out of it.
pub struct Running {
    recorder: &'static Recorder,
    leader: Option<usize>,
}

impl Running {
    /// A call without operations yet.
    pub fn new(recorder: &'static Recorder) -> Self {
        Running { recorder, leader: None }
    }

    /// Adds an operation that the call runs.
    pub fn with(mut self, what: &Begin) -> Self {
        match self.leader {
            None => self.leader = open(self.recorder, what),
            Some(leader) => follow(self.recorder, leader, what),
        }
        self
    }

    /// The patience with what the call waits for begins [`STARTING_NS`] later, when `starting`.
    pub fn patient(self, recorder: &'static Recorder, starting: bool) -> Self {
        if let Some(leader) = self.leader.filter(|_| starting) {
            be_patient(recorder, leader);
        }
        self
    }

    /// Ends the operations.
    pub fn end(mut self, status: OpStatus, error: u32) {
        if let Some(leader) = self.leader.take() {
            close(self.recorder, leader, status, error);
        }
    }

    /// The host is out of the call, whose operations may go on without it.
    pub fn leave(mut self) {
        if let Some(leader) = self.leader.take() {
            leave(self.recorder, leader);
        }
    }

    /// The operations stay open when the call returns: whoever gets the slot of the first one ends them.
    pub fn keep(mut self) -> Option<usize> {
        self.leader.take()
    }
}

impl After for Running {
    fn after(self, _: &'static Recorder, result: c_int) {
        match result {
            SUCCESS => self.end(OpStatus::Completed, 0),
            error => self.end(OpStatus::Failed, error as u32),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // In a forked child the ring is the parent's.
        let ours = || start::running().is_some_and(|now| std::ptr::eq(now, self.recorder));
        if let Some(leader) = self.leader.take().filter(|_| ours()) {
            close(self.recorder, leader, OpStatus::Failed, 0);
        }
    }
}

/// A call whose meaning is not known; only that it may block, and its name.
pub fn named(recorder: &'static Recorder, name: &'static str) -> Begin {
    Begin {
        seq: recorder.next_host_call(),
        function: recorder.name_key(name),
        ..Begin::new(OpKind::HostCall, xpu_timer_proto::v1::Op::Unspecified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Descriptor;
    use xpu_timer_proto::v1::Op;

    fn recorder() -> &'static Recorder {
        let descriptor: &'static Descriptor = Box::leak(Box::new(Descriptor::none()));
        Box::leak(Box::new(Recorder::create(descriptor).unwrap()))
    }

    fn what(seq: u64) -> Begin {
        Begin { seq, communicator: 5, ..Begin::new(OpKind::Collective, Op::Barrier) }
    }

    #[test]
    fn a_hundred_thousand_calls_need_no_watcher_and_lose_nothing() {
        let recorder = recorder();
        for seq in 0..100_000 {
            let slot = open(recorder, &what(seq)).expect("the slots are free again");
            assert_eq!(recorder.open_calls.slots().collect::<Vec<_>>(), [slot]);
            close(recorder, slot, OpStatus::Completed, 0);
        }
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(recorder.ring.header(header::DROPPED).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_one_call_runs_ends_together() {
        let recorder = recorder();
        let running = Running::new(recorder).with(&what(1)).with(&what(2)).with(&what(3));
        assert_eq!(recorder.open_calls.slots().count(), 1, "one age for one call");
        running.end(OpStatus::Failed, 15);
        for slot in 0..3 {
            let operation = recorder.operation(slot);
            assert_eq!((operation.status(), operation.error), (OpStatus::Failed, 15), "{operation:?}");
            assert!(operation.started_ns >= operation.entered_ns && operation.completed_ns >= operation.entered_ns);
            assert_eq!(recorder.slots[slot].state.load(Ordering::Relaxed), state::FREE);
        }
    }

    #[test]
    fn more_open_calls_than_cells_are_recorded_and_counted() {
        let recorder = recorder();
        let slots: Vec<usize> = (0..CELLS as u64 + 3).map(|seq| open(recorder, &what(seq)).unwrap()).collect();
        assert_eq!(recorder.open_calls.slots().count(), CELLS);
        assert_eq!(recorder.ring.header(header::OVERFLOWS).load(Ordering::Relaxed), 3);
        for slot in slots {
            close(recorder, slot, OpStatus::Completed, 0);
        }
        assert_eq!(recorder.open_calls.slots().count(), 0);
    }
}
