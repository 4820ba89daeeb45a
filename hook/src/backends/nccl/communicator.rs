//! Known communicators, host calls that may block until the peers arrive, and calls that end
//! communicators.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::Ordering,
};

use xpu_timer_proto::{
    ring::comm as comm_words,
    v1::{CommunicatorState, Op, OpKind, OpStatus},
};

use crate::{
    backends::host_call::BlockingCall,
    interpose::hooked::{AfterCall, Site},
    runtime::{
        abi::{Comm, NCCL_IN_PROGRESS, SUCCESS},
        device::device_now,
        os::{clock, sys, thread_state},
        recorder::{
            NewOperation, Recorder,
            communicator_table::local_id,
            communicators::NewCommunicator,
            host_operations::named_host_call,
            operations::{chain, close_all},
        },
    },
};

/// A handle that the library has written.
pub(crate) fn handle_at(place: usize) -> usize {
    let place = place as *const *mut c_void;
    // SAFETY: null, or the caller's place for the communicator, which the library has written.
    unsafe { place.as_ref() }.map_or(0, |comm| *comm as usize)
}

/// A handle in a place that the host may have freed. A thread that polls at the same time may have
/// learned that the communicator is ready, left the call and freed the place. `None` when the place
/// is unmapped or cannot be read.
pub(crate) fn handle_still_at(place: usize, caller: u32) -> Option<usize> {
    match sys::word_at(place) {
        Ok(handle) => Some(handle),
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => None,
        // The system does not permit the checked read. Then read only if the thread that provided
        // the place is inside this call.
        Err(_) => (caller != 0 && caller == thread_state::current().tid()).then(|| handle_at(place)),
    }
}

/// The communicator with a handle. One whose creation was not seen gets a local identity: it cannot
/// be matched with those of other ranks, but its operations are watched.
pub(crate) fn known(recorder: &'static Recorder, site: Site, handle: Comm) -> Option<usize> {
    recorder.comms.find(handle as usize).or_else(|| adopt(recorder, site, handle))
}

#[cold]
fn adopt(recorder: &'static Recorder, site: Site, handle: Comm) -> Option<usize> {
    if handle.is_null() {
        return None;
    }
    let index = recorder.create_comm(&NewCommunicator {
        id: local_id(),
        size: 0,
        rank: -1,
        device: device_now().map_or(-1, |device| device.device_number()),
        parent: 0,
        created_ns: clock::now_ns(),
    })?;
    ready(recorder, site, index, handle as usize);
    Some(index)
}

/// The communicator can be used. Queries size and rank if they are unknown.
pub(crate) fn ready(recorder: &'static Recorder, site: Site, index: usize, handle: usize) {
    recorder.set_comm_handle(index, handle);
    recorder.set_comm_state(index, CommunicatorState::Ready);
    complete(recorder, site, index, handle);
}

fn complete(recorder: &'static Recorder, site: Site, index: usize, handle: usize) {
    let known = recorder.comm_word(index, comm_words::SIZE_RANK).load(Ordering::Relaxed);
    if known as u32 == 0 {
        let ask = |number, names| {
            let function = site.companion(number, names)?;
            comm_number(function, handle as *mut c_void)
        };
        let size = ask(0, &[c"ncclCommCount", c"mcclCommCount", c"HcclGetRankSize"]).unwrap_or(0);
        let rank = ask(1, &[c"ncclCommUserRank", c"mcclCommUserRank", c"HcclGetRankId"]).unwrap_or(-1);
        recorder.set_comm_size_rank(index, size as u32, rank);
    }
}

/// Begins a host call. In a group it is queued.
pub(crate) fn host_call(
    recorder: &'static Recorder,
    op: Op,
    name: &'static str,
    comm: Option<usize>,
    communicator: u64,
    peer: i32,
) -> Option<usize> {
    let what = NewOperation {
        comm,
        communicator,
        seq: recorder.next_host_call(),
        peer,
        function: recorder.name_key(name),
        ..NewOperation::new(OpKind::HostCall, op)
    };
    recorder.begin(&what)
}

/// A call that needs no other rank, and that may block nevertheless, for example in the driver.
pub(crate) struct Alone(BlockingCall);

/// Called before such a call. It is recorded under its name.
pub(crate) fn alone(recorder: &'static Recorder, site: Site) -> Alone {
    Alone(BlockingCall::new(recorder).with(&named_host_call(recorder, site.function.text())))
}

impl AfterCall for Alone {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.0.after(recorder, if result == NCCL_IN_PROGRESS { SUCCESS } else { result });
    }
}

/// Calls a function of the collective library that takes a communicator and returns an int.
pub(crate) fn comm_number(function: *mut c_void, comm: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion of a function that received this communicator, which exists.
    // ncclCommCount and ncclCommUserRank have this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(comm, &mut number) };
    (result == 0).then_some(number)
}

/// The version of the collective library.
pub(crate) fn version_number(function: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion; ncclGetVersion has this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(&mut number) };
    (result == 0).then_some(number)
}

/// Whether the handle is valid after the call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleAfter {
    /// The handle is invalid.
    Invalid,
    /// The handle can still be used.
    Valid,
}

/// A call that ends a communicator.
pub(crate) struct Ending {
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
pub(crate) fn finalized(recorder: &'static Recorder, name: &'static str, comm: Comm) -> Ending {
    ending(recorder, Op::CommFinalize, name, comm, HandleAfter::Valid)
}

/// Called before ncclCommDestroy.
pub(crate) fn destroyed(recorder: &'static Recorder, name: &'static str, comm: Comm) -> Ending {
    ending(recorder, Op::CommDestroy, name, comm, HandleAfter::Invalid)
}

/// Called before ncclCommAbort or ncclCommRevoke. From now on, an operation that completes has been
/// aborted.
pub(crate) fn aborted(
    recorder: &'static Recorder,
    name: &'static str,
    comm: Comm,
    handle_after: HandleAfter,
) -> Ending {
    let ending = ending(recorder, Op::CommAbort, name, comm, handle_after);
    if let Some(index) = ending.comm {
        recorder.set_comm_state(index, CommunicatorState::Aborted);
    }
    ending
}

impl AfterCall for Ending {
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
