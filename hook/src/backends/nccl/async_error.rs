//! `ncclCommGetAsyncError`, with which a host polls a nonblocking communicator.

use std::ffi::c_int;

use xpu_timer_proto::v1::{CommunicatorState, OpStatus};

use crate::{
    backends::{
        bracket,
        nccl::{
            communicator::ready,
            creation,
            group_queue::{is_host_call, next},
        },
    },
    interpose::hooked::{After, Site},
    runtime::{
        abi::{Comm, NCCL_IN_PROGRESS, SUCCESS},
        os::clock,
        recorder::{
            Recorder,
            slot_chain::{chain, close_all},
        },
    },
};

/// A poll of a communicator's state. A nonblocking communicator becomes ready by it.
pub struct Polled {
    site: Site,
    comm: usize,
    error: usize,
}

/// Called before ncclCommGetAsyncError.
pub fn async_error(site: Site, comm: Comm, error: *mut c_int) -> Polled {
    Polled { site, comm: comm as usize, error: error as usize }
}

impl After for Polled {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        let Some(comm) = recorder.comms.find(self.comm) else { return };
        if result != SUCCESS || self.error == 0 {
            return;
        }
        // SAFETY: the caller's place, which the call has written.
        let state = unsafe { *(self.error as *const c_int) };
        if state == NCCL_IN_PROGRESS {
            return;
        }
        if state == SUCCESS && recorder.comm_state(comm) == CommunicatorState::Initializing {
            ready(recorder, self.site, comm, self.comm);
        }
        settle_waiting(recorder, self.site, comm, state);
    }
}

/// A nonblocking call of a communicator has finished. Ends the host calls and records the end
/// events of the operations that waited for it.
pub fn settle_waiting(recorder: &'static Recorder, site: Site, comm: usize, result: c_int) {
    let now = clock::now_ns();
    for slot in chain(recorder, recorder.take_waiting(comm), next) {
        if is_host_call(recorder, slot) {
            creation::host_call_settled(recorder, site, (slot, comm), result, now);
        } else if result == SUCCESS {
            bracket::finish(recorder, slot);
        } else {
            close_all(recorder, slot, OpStatus::Failed, result as u32, now);
        }
    }
}
