//! A blocking call of a host thread and the operations that it executes.

use std::ffi::c_int;

use xpu_timer_proto::v1::OpStatus;

use crate::{
    interpose::hooked::AfterCall,
    runtime::{
        abi::SUCCESS,
        recorder::{
            self, NewOperation, Recorder,
            host_operations::{await_keys, close, follow, grant_startup_grace, leave, open},
        },
    },
};

/// A blocking call of this thread. Its operations end when it returns, or when the thread unwinds
/// out of it.
pub(crate) struct BlockingCall {
    recorder: &'static Recorder,
    leader: Option<usize>,
}

impl BlockingCall {
    /// A call without operations.
    pub(crate) fn new(recorder: &'static Recorder) -> Self {
        BlockingCall { recorder, leader: None }
    }

    /// Adds an operation that the call executes.
    pub(crate) fn with(mut self, what: &NewOperation) -> Self {
        match self.leader {
            None => self.leader = open(self.recorder, what),
            Some(leader) => follow(self.recorder, leader, what),
        }
        self
    }

    /// Adds the startup grace to the timeout if `starting`.
    pub(crate) fn with_startup_grace(self, recorder: &'static Recorder, starting: bool) -> Self {
        if let Some(leader) = self.leader.filter(|_| starting) {
            grant_startup_grace(recorder, leader);
        }
        self
    }

    /// Adds the keys that the call waits for in a store.
    pub(crate) fn with_keys<'a>(self, recorder: &'static Recorder, keys: impl Iterator<Item = &'a [u8]>) -> Self {
        if let Some(leader) = self.leader {
            await_keys(recorder, leader, keys);
        }
        self
    }

    /// Ends the operations.
    pub(crate) fn end(mut self, status: OpStatus, error: u32) {
        if let Some(leader) = self.leader.take() {
            close(self.recorder, leader, status, error);
        }
    }

    /// The host has left the call, but its operations may continue.
    pub(crate) fn leave(mut self) {
        if let Some(leader) = self.leader.take() {
            leave(self.recorder, leader);
        }
    }

    /// Keeps the operations open after the call. The caller ends them through the returned slot.
    pub(crate) fn keep(mut self) -> Option<usize> {
        self.leader.take()
    }
}

impl AfterCall for BlockingCall {
    fn after(self, _: &'static Recorder, result: c_int) {
        match result {
            SUCCESS => self.end(OpStatus::Completed, 0),
            error => self.end(OpStatus::Failed, error as u32),
        }
    }
}

impl Drop for BlockingCall {
    fn drop(&mut self) {
        // In a forked child the ring belongs to the parent.
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
    use std::sync::atomic::Ordering;

    #[test]
    fn operations_of_one_call_end_together() {
        let recorder = Recorder::for_test();
        let running = BlockingCall::new(recorder)
            .with(&NewOperation::barrier_for_test(1))
            .with(&NewOperation::barrier_for_test(2))
            .with(&NewOperation::barrier_for_test(3));
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
