//! Calls that end communicators.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::v1::{CommunicatorState, Op, OpStatus};

use crate::{
    backends::nccl::communicator::host_call,
    interpose::hooked::After,
    runtime::{
        abi::{Comm, NCCL_IN_PROGRESS, SUCCESS},
        os::clock,
        recorder::{
            Recorder,
            slot_chain::{chain, close_all},
        },
    },
};

/// Whether the handle is valid after the call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HandleAfter {
    /// The handle is invalid.
    Invalid,
    /// The handle can still be used.
    Valid,
}

/// A call that ends a communicator.
pub struct Ending {
    slot: Option<usize>,
    comm: Option<usize>,
    handle_after: HandleAfter,
    state: CommunicatorState,
}

fn ending(recorder: &'static Recorder, op: Op, name: &'static str, comm: Comm, handle_after: HandleAfter) -> Ending {
    let index = recorder.comms.find(comm as usize);
    let id = index.map_or(0, |index| recorder.comm_id(index));
    let slot = host_call(recorder, op, name, index, id, -1);
    if let Some(slot) = slot {
        recorder.hand_over(slot);
    }
    let state = match op {
        Op::CommAbort => CommunicatorState::Aborted,
        _ => CommunicatorState::Finalized,
    };
    Ending { slot, comm: index, handle_after, state }
}

/// Called before ncclCommFinalize.
pub fn finalized(recorder: &'static Recorder, name: &'static str, comm: Comm) -> Ending {
    ending(recorder, Op::CommFinalize, name, comm, HandleAfter::Valid)
}

/// Called before ncclCommDestroy.
pub fn destroyed(recorder: &'static Recorder, name: &'static str, comm: Comm) -> Ending {
    ending(recorder, Op::CommDestroy, name, comm, HandleAfter::Invalid)
}

/// Called before ncclCommAbort or ncclCommRevoke. From now on, an operation that completes has been
/// aborted.
pub fn aborted(recorder: &'static Recorder, name: &'static str, comm: Comm, handle_after: HandleAfter) -> Ending {
    let ending = ending(recorder, Op::CommAbort, name, comm, handle_after);
    if let Some(index) = ending.comm {
        recorder.set_comm_state(index, CommunicatorState::Aborted);
    }
    ending
}

impl After for Ending {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        let now = clock::now_ns();
        let waits = result == NCCL_IN_PROGRESS && self.handle_after == HandleAfter::Valid;
        if let Some(slot) = self.slot {
            recorder.returned(slot, now);
            match (self.comm, result) {
                (Some(comm), NCCL_IN_PROGRESS) if waits => recorder.wait_for_comm(comm, slot),
                (_, SUCCESS | NCCL_IN_PROGRESS) => recorder.close(slot, OpStatus::Completed, 0, now),
                (_, error) => recorder.close(slot, OpStatus::Failed, error as u32, now),
            }
        }
        let Some(comm) = self.comm else { return };
        if waits {
            return;
        }
        if recorder.comm_state(comm) != CommunicatorState::Aborted {
            recorder.set_comm_state(comm, self.state);
        }
        if self.handle_after == HandleAfter::Invalid {
            // Operations that wait for the communicator to become ready will never start.
            let next = |recorder: &Recorder, slot: usize| recorder.slots[slot].next.load(Ordering::Relaxed);
            for slot in chain(recorder, recorder.take_waiting(comm), next) {
                close_all(recorder, slot, OpStatus::Aborted, 0, now);
            }
            recorder.retire_comm(comm);
        }
    }
}
