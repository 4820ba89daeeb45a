//! Operations that host threads run: begun and ended by the host, watched by the watcher, freed by whoever ends them.
//!
//! An MPI program makes many more calls than the watcher has turns, so a slot does not travel to the watcher and back: while it
//! is open, one cell of a small table points to it, and when it ends it is free at once. Neither waits for the other.

use std::ffi::c_int;

use xpu_timer_proto::v1::OpStatus;

use crate::{
    interpose::hooked::After,
    runtime::{
        abi::SUCCESS,
        recorder::{
            self, NewOperation, Recorder,
            host_operations::{close, follow, grant_startup_grace, leave, open},
        },
    },
};

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
    pub fn with(mut self, what: &NewOperation) -> Self {
        match self.leader {
            None => self.leader = open(self.recorder, what),
            Some(leader) => follow(self.recorder, leader, what),
        }
        self
    }

    /// The patience with what the call waits for begins [`STARTUP_GRACE_NS`] later, when `starting`.
    pub fn with_startup_grace(self, recorder: &'static Recorder, starting: bool) -> Self {
        if let Some(leader) = self.leader.filter(|_| starting) {
            grant_startup_grace(recorder, leader);
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
        let ours = || recorder::running().is_some_and(|now| std::ptr::eq(now, self.recorder));
        if let Some(leader) = self.leader.take().filter(|_| ours()) {
            close(self.recorder, leader, OpStatus::Failed, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::lock_free::slot::state;
    use crate::runtime::os::descriptor::Descriptor;
    use std::sync::atomic::Ordering;
    use xpu_timer_proto::v1::Op;
    use xpu_timer_proto::v1::OpKind;

    fn recorder() -> &'static Recorder {
        let descriptor: &'static Descriptor = Box::leak(Box::new(Descriptor::none()));
        Box::leak(Box::new(Recorder::create(descriptor).unwrap()))
    }

    fn what(seq: u64) -> NewOperation {
        NewOperation { seq, communicator: 5, ..NewOperation::new(OpKind::Collective, Op::Barrier) }
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
}
