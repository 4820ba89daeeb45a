//! Calls that create communicators, and `ncclCommGetAsyncError`, with which a host polls until a
//! nonblocking communicator is ready.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::{child_id, comm as comm_words, op},
    v1::{CommunicatorState, Op, OpStatus},
};

use crate::{
    backends::{
        bracket,
        nccl::{
            collective::{self, is_host_call, next},
            communicator::{handle_at, handle_still_at, host_call, known, ready},
        },
    },
    interpose::hooked::{AfterCall, Site},
    runtime::{
        abi::{Comm, Data, NCCL_IN_PROGRESS, NCCL_SPLIT_NOCOLOR, SUCCESS, UniqueId},
        device::device_now,
        os::{clock, thread_state},
        recorder::{
            Recorder,
            communicator_table::{hash, local_id},
            communicators::NewCommunicator,
            operations::{chain, close_all, comm_of},
        },
    },
};

/// Bytes of an array of unique ids.
pub(crate) fn bytes_of<'a>(ids: *const UniqueId, count: c_int) -> &'a [u8] {
    if ids.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the caller's array of `count` ids, which is valid during the call.
    unsafe { std::slice::from_raw_parts(ids.cast::<u8>(), count as usize * size_of::<UniqueId>()) }
}

/// Bytes of an array of ints.
pub(crate) fn ints_of<'a>(ints: *const c_int, count: c_int) -> &'a [u8] {
    if ints.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the caller's array of `count` ints, which is valid during the call.
    unsafe { std::slice::from_raw_parts(ints.cast::<u8>(), count as usize * size_of::<c_int>()) }
}

/// Bytes of a structure or array of the caller.
pub(crate) fn bytes_of_words<'a>(place: Data, bytes: usize) -> &'a [u8] {
    if place.is_null() {
        return &[];
    }
    // SAFETY: the caller's structure or array of that size, which is valid during the call.
    unsafe { std::slice::from_raw_parts(place.cast::<u8>(), bytes) }
}

/// A call that creates a communicator.
pub(crate) struct Creating {
    site: Site,
    /// Slot of the host call. `None` if there was none, or if it is queued in a group.
    slot: Option<usize>,
    comm: Option<usize>,
    output: usize,
}

/// Relations of a new communicator to others.
#[derive(Default)]
struct Relations {
    /// Index of its parent.
    parent: Option<usize>,
    /// A second identity by which other ranks know it, 0 for none.
    alias: u64,
}

fn create(
    recorder: &'static Recorder,
    site: Site,
    op: Op,
    (new, relations): (&NewCommunicator, Relations),
    output: *mut Comm,
) -> Creating {
    let comm = recorder.create_comm(new);
    if let Some(comm) = comm {
        recorder.comm_word(comm, comm_words::ALIAS).store(relations.alias, Ordering::Relaxed);
        // If the parent is unknown, the identity of the child may not be unique.
        let unique = op == Op::CommInit || new.parent != 0;
        recorder.comm_word(comm, comm_words::UNIQUE).store(u64::from(unique), Ordering::Relaxed);
        if let Some(parent) = relations.parent {
            recorder.set_comm_parent(comm, parent);
        }
    }
    let slot = host_call(recorder, op, site.function.text(), comm, new.id, -1);
    let creating = Creating { site, slot, comm, output: output as usize };
    let Some(index) = slot else { return creating };
    if thread_state::with(|thread| thread.group_depth.get()) > 0 {
        recorder.slots[index].output.store(output as usize, Ordering::Relaxed);
        collective::queue(recorder, index);
        return Creating { site, slot: None, comm: None, output: 0 };
    }
    recorder.hand_over(index);
    creating
}

impl AfterCall for Creating {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        created(recorder, self.site, (self.slot, self.comm), self.output, result);
    }
}

pub(crate) fn created(
    recorder: &'static Recorder,
    site: Site,
    (slot, comm): (Option<usize>, Option<usize>),
    output: usize,
    result: c_int,
) {
    let (now, handle) = (clock::now_ns(), handle_at(output));
    if let Some(slot) = slot {
        recorder.returned(slot, now);
    }
    if let Some(comm) = comm {
        match result {
            SUCCESS => ready(recorder, site, comm, handle),
            NCCL_IN_PROGRESS => recorder.set_comm_handle(comm, handle),
            _ => {
                recorder.set_comm_state(comm, CommunicatorState::Failed);
                recorder.retire_comm(comm);
            }
        }
    }
    match (slot, comm, result) {
        (Some(slot), Some(comm), NCCL_IN_PROGRESS) => {
            // A child without a handle gets it when its parent has finished.
            let parent = recorder.comm_parent(comm).filter(|_| handle == 0);
            recorder.slots[slot].output.store(if parent.is_some() { output } else { 0 }, Ordering::Relaxed);
            recorder.wait_for_comm(parent.unwrap_or(comm), slot);
        }
        // Without a communicator, the end of the call cannot be observed. The host has left it.
        (Some(slot), _, SUCCESS | NCCL_IN_PROGRESS) => recorder.close(slot, OpStatus::Completed, 0, now),
        (Some(slot), _, error) => recorder.close(slot, OpStatus::Failed, error as u32, now),
        (None, ..) => {}
    }
}

/// The group of a creating call has ended. Only now its communicator is valid.
pub(crate) fn grouped_init_returned(recorder: &'static Recorder, site: Site, slot: usize, result: c_int) {
    let output = recorder.slots[slot].output.load(Ordering::Relaxed);
    let comm = comm_of(recorder, slot);
    created(recorder, site, (Some(slot), comm), output, result);
}

/// The communicator `waited_for`, for which a host call waited, has finished. If the call created a
/// child of it, the child has a handle now.
pub(crate) fn host_call_settled(
    recorder: &'static Recorder,
    site: Site,
    (slot, waited_for): (usize, usize),
    result: c_int,
    now: u64,
) {
    let output = recorder.slots[slot].output.load(Ordering::Relaxed);
    if let Some(child) = comm_of(recorder, slot).filter(|child| output != 0 && !recorder.has_handle(*child)) {
        let caller = (recorder.ring.op(slot)[op::WHAT].load(Ordering::Relaxed) >> 32) as u32;
        match (result, handle_still_at(output, caller)) {
            // The library writes the handle a moment later, and the host still waits for it.
            (SUCCESS, Some(0)) => return recorder.wait_for_comm(waited_for, slot),
            (SUCCESS, Some(handle)) => ready(recorder, site, child, handle),
            // It gets another identity when it is used.
            (SUCCESS, None) => recorder.retire_comm(child),
            _ => {
                recorder.set_comm_state(child, CommunicatorState::Failed);
                recorder.retire_comm(child);
            }
        }
    }
    let status = if result == SUCCESS { OpStatus::Completed } else { OpStatus::Failed };
    recorder.close(slot, status, result as u32, now);
}

/// Called before any form of ncclCommInitRank.
pub(crate) fn init(
    recorder: &'static Recorder,
    site: Site,
    id: &[&[u8]],
    size: c_int,
    rank: c_int,
    output: *mut Comm,
) -> Creating {
    let new = NewCommunicator {
        id: hash(id),
        size: size as u32,
        rank,
        device: device_now().map_or(-1, |device| device.device_number()),
        parent: 0,
        created_ns: clock::now_ns(),
    };
    create(recorder, site, Op::CommInit, (&new, Relations::default()), output)
}

/// A child of a communicator. Every rank of the parent makes this call in the same order.
fn child(recorder: &'static Recorder, parent: Option<usize>, what: &[u8], color: c_int) -> NewCommunicator {
    let parent_id = parent.map_or(0, |parent| recorder.comm_id(parent));
    let number = parent.map_or(0, |parent| recorder.next_split(parent));
    NewCommunicator {
        id: child_id(parent_id, hash(&[&number.to_le_bytes(), &color.to_le_bytes(), what])),
        size: 0,
        rank: -1,
        device: device_now().map_or(-1, |device| device.device_number()),
        parent: parent_id,
        created_ns: clock::now_ns(),
    }
}

/// Called before ncclCommSplit. A rank without a color takes part in the call but gets no
/// communicator.
pub(crate) fn split(
    recorder: &'static Recorder,
    site: Site,
    parent: Comm,
    color: c_int,
    output: *mut Comm,
) -> Creating {
    let parent = known(recorder, site, parent);
    let new = child(recorder, parent, b"split", color);
    if color != NCCL_SPLIT_NOCOLOR {
        return create(recorder, site, Op::CommSplit, (&new, Relations { parent, alias: 0 }), output);
    }
    without_communicator(recorder, site, new.parent)
}

/// Called before a call that all ranks of a communicator make together or that waits for them, and
/// that creates no communicator.
pub(crate) fn together(recorder: &'static Recorder, site: Site, comm: Comm) -> Creating {
    let id = known(recorder, site, comm).map_or(0, |comm| recorder.comm_id(comm));
    without_communicator(recorder, site, id)
}

fn without_communicator(recorder: &'static Recorder, site: Site, id: u64) -> Creating {
    let slot = host_call(recorder, Op::CommSplit, site.function.text(), None, id, -1);
    let Some(index) = slot else { return Creating { site, slot, comm: None, output: 0 } };
    if thread_state::with(|thread| thread.group_depth.get()) > 0 {
        collective::queue(recorder, index);
        return Creating { site, slot: None, comm: None, output: 0 };
    }
    recorder.hand_over(index);
    Creating { site, slot, comm: None, output: 0 }
}

/// Called before a call that only a subset of a communicator makes. All members pass the same
/// `identity_parts`.
pub(crate) fn subset(
    recorder: &'static Recorder,
    site: Site,
    parent: *const Comm,
    (size, rank): (c_int, c_int),
    identity_parts: &[&[u8]],
    output: *mut Comm,
) -> Creating {
    // SAFETY: null, or the caller's place for a communicator.
    let parent = unsafe { parent.as_ref() }.and_then(|parent| known(recorder, site, *parent));
    let parent = parent.map_or(0, |parent| recorder.comm_id(parent)).to_le_bytes();
    let parts: Vec<&[u8]> = std::iter::once(&parent[..]).chain(identity_parts.iter().copied()).collect();
    init(recorder, site, &parts, size, rank, output)
}

/// Called before ncclCommShrink. The remaining ranks agree on those that leave.
pub(crate) fn shrink(
    recorder: &'static Recorder,
    site: Site,
    parent: Comm,
    excluded: &[u8],
    output: *mut Comm,
) -> Creating {
    let parent = known(recorder, site, parent);
    let new = child(recorder, parent, excluded, 0);
    create(recorder, site, Op::CommSplit, (&new, Relations { parent, alias: 0 }), output)
}

/// Called before ncclCommGrow. Existing ranks know the parent, and only the one that created the id
/// knows that id. New ranks know only the id. So the communicator has two identities, one for each
/// kind of rank, and that one rank declares them equal. Those of its children follow by
/// [`child_id`].
pub(crate) fn grow(
    recorder: &'static Recorder,
    site: Site,
    (parent, size): (Comm, c_int),
    (id, rank): (&[u8], c_int),
    output: *mut Comm,
) -> Creating {
    if parent.is_null() {
        return init(recorder, site, &[id], size, rank, output);
    }
    // Existing ranks keep their numbers.
    let parent = known(recorder, site, parent);
    let rank = parent.map_or(-1, |parent| recorder.comm_rank(parent));
    let new = NewCommunicator { size: size as u32, rank, ..child(recorder, parent, b"grow", size) };
    let alias = if id.is_empty() { 0 } else { hash(&[id]) };
    create(recorder, site, Op::CommInit, (&new, Relations { parent, alias }), output)
}

/// A call that creates the communicators of several devices of this process.
pub(crate) struct CreatingAll {
    site: Site,
    slot: Option<usize>,
    id: u64,
    first: usize,
    count: usize,
}

/// Called before ncclCommInitAll.
pub(crate) fn init_all(recorder: &'static Recorder, site: Site, comms: *mut Comm, devices: c_int) -> CreatingAll {
    let id = local_id();
    let slot = host_call(recorder, Op::CommInit, site.function.text(), None, id, -1);
    if let Some(slot) = slot {
        recorder.hand_over(slot);
    }
    CreatingAll { site, slot, id, first: comms as usize, count: devices.max(0) as usize }
}

impl AfterCall for CreatingAll {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        let now = clock::now_ns();
        if let Some(slot) = self.slot {
            recorder.returned(slot, now);
            let status = if result == SUCCESS { OpStatus::Completed } else { OpStatus::Failed };
            recorder.close(slot, status, result as u32, now);
        }
        if result != SUCCESS {
            return;
        }
        for rank in 0..self.count {
            let comm = recorder.create_comm(&NewCommunicator {
                id: self.id,
                size: self.count as u32,
                rank: rank as i32,
                device: -1,
                parent: 0,
                created_ns: now,
            });
            if let Some(comm) = comm {
                ready(recorder, self.site, comm, handle_at(self.first + rank * size_of::<Comm>()));
            }
        }
    }
}

/// A poll of a communicator's state. A nonblocking communicator becomes ready by it.
pub(crate) struct Polled {
    site: Site,
    comm: usize,
    error: usize,
}

/// Called before ncclCommGetAsyncError.
pub(crate) fn async_error(site: Site, comm: Comm, error: *mut c_int) -> Polled {
    Polled { site, comm: comm as usize, error: error as usize }
}

impl AfterCall for Polled {
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
        if state != SUCCESS {
            recorder.comm_word(comm, comm_words::ASYNC_ERROR).store(u64::from(state as u32), Ordering::Relaxed);
        }
        if state == SUCCESS && recorder.comm_state(comm) == CommunicatorState::Initializing {
            ready(recorder, self.site, comm, self.comm);
        }
        settle_waiting(recorder, self.site, comm, state);
    }
}

/// A nonblocking call of a communicator has finished. Ends the host calls and records the end
/// events of the operations that waited for it.
pub(crate) fn settle_waiting(recorder: &'static Recorder, site: Site, comm: usize, result: c_int) {
    let now = clock::now_ns();
    for slot in chain(recorder, recorder.take_waiting(comm), next) {
        if is_host_call(recorder, slot) {
            host_call_settled(recorder, site, (slot, comm), result, now);
        } else if result == SUCCESS {
            bracket::finish(recorder, slot);
        } else {
            close_all(recorder, slot, OpStatus::Failed, result as u32, now);
        }
    }
}
