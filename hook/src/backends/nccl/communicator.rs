//! Known communicators, and host calls that may block until the peers arrive.

use std::{ffi::c_void, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::comm as comm_words,
    v1::{CommunicatorState, Op, OpKind},
};

use crate::{
    backends::nccl::library_calls::comm_number,
    interpose::hooked::Site,
    runtime::{
        abi::Comm,
        device::device,
        os::{clock, sys, thread_state},
        recorder::{NewOperation, Recorder, communicator_id::local_id, communicators::NewCommunicator},
    },
};

/// A handle that the library has written.
pub fn handle_at(place: usize) -> usize {
    let place = place as *const *mut c_void;
    // SAFETY: null, or the caller's place for the communicator, which the library has written.
    unsafe { place.as_ref() }.map_or(0, |comm| *comm as usize)
}

/// A handle in a place that the host may have freed. A thread that polls at the same time may have
/// learned that the communicator is ready, left the call and freed the place. `None` when the place
/// is unmapped or cannot be read.
pub fn handle_still_at(place: usize, caller: u32) -> Option<usize> {
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
pub fn known(recorder: &'static Recorder, site: Site, handle: Comm) -> Option<usize> {
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
        device: device().map_or(-1, |device| device.device_number()),
        parent: 0,
        created_ns: clock::now_ns(),
    })?;
    ready(recorder, site, index, handle as usize);
    Some(index)
}

/// The communicator can be used. Queries size and rank if they are unknown.
pub fn ready(recorder: &'static Recorder, site: Site, index: usize, handle: usize) {
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
pub fn host_call(
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
