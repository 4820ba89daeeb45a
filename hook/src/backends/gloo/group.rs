//! Process groups of gloo. Their creation blocks until all members have met in the store.
//!
//! The identity of a group is the key under which its members find each other in the store, without
//! the part that names the member. PyTorch prefixes the key with the group's name or number, so it
//! is equal on all members and differs between groups.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int},
};

use xpu_timer_proto::v1::{CommunicatorState, Op, OpKind, OpStatus};

use crate::{
    interpose::hooked::After,
    runtime::{
        abi::Word,
        os::clock,
        recorder::{
            self, NewOperation, Recorder,
            communicator_id::{hash, local_id},
            communicators::NewCommunicator,
            host_operations::{close, grant_startup_grace, named_host_call, open},
        },
    },
};

/// The group that a thread is creating.
#[derive(Clone, Copy)]
struct GroupInCreation {
    rank: i32,
    size: u32,
    /// Its entry and operation, once its identity is known.
    comm: Option<usize>,
    slot: Option<usize>,
}

thread_local! {
    static GROUP_IN_CREATION: Cell<Option<GroupInCreation>> = const { Cell::new(None) };
}

/// The entry and identity of a group. A group whose creation was not seen gets an identity that
/// only this process has.
pub fn known(recorder: &'static Recorder, group: Word) -> Option<(usize, u64)> {
    let index = recorder.comms.find(group).or_else(|| adopt(recorder, group, -1, 0))?;
    Some((index, recorder.comm_id(index)))
}

fn adopt(recorder: &'static Recorder, group: Word, rank: i32, size: u32) -> Option<usize> {
    let created_ns = clock::now_ns();
    let new = NewCommunicator { id: local_id(), size, rank, device: -1, parent: 0, created_ns };
    let index = recorder.create_comm(&new)?;
    ready(recorder, index, group);
    Some(index)
}

fn ready(recorder: &'static Recorder, index: usize, group: Word) {
    recorder.set_comm_handle(index, group);
    recorder.set_comm_state(index, CommunicatorState::Ready);
}

/// The constructor of a group.
pub struct Creating {
    recorder: &'static Recorder,
    group: Word,
    rank: i32,
    size: u32,
}

/// Called before the constructor.
pub fn creating(recorder: &'static Recorder, group: Word, rank: Word, size: Word) -> Creating {
    let (rank, size) = (rank as i32, size as u32);
    GROUP_IN_CREATION.set(Some(GroupInCreation { rank, size, comm: None, slot: None }));
    Creating { recorder, group, rank, size }
}

impl Creating {
    fn end(&self, made: bool) {
        let Some(creation) = GROUP_IN_CREATION.take() else { return };
        let recorder = self.recorder;
        if let Some(slot) = creation.slot {
            close(recorder, slot, if made { OpStatus::Completed } else { OpStatus::Failed }, 0);
        }
        match creation.comm {
            Some(index) if made => {
                forget(recorder, self.group);
                ready(recorder, index, self.group);
            }
            Some(index) => {
                recorder.set_comm_state(index, CommunicatorState::Failed);
                recorder.retire_comm(index);
            }
            None if made => {
                forget(recorder, self.group);
                adopt(recorder, self.group, self.rank, self.size);
            }
            None => {}
        }
    }
}

/// Forgets an earlier group at the same address.
fn forget(recorder: &'static Recorder, group: Word) {
    if let Some(old) = recorder.comms.find(group) {
        recorder.set_comm_state(old, CommunicatorState::Finalized);
        recorder.retire_comm(old);
    }
}

impl After for Creating {
    fn after(self, _: &'static Recorder, _: c_int) {
        self.end(true);
    }
}

impl Drop for Creating {
    fn drop(&mut self) {
        // The constructor threw. In a forked child the ring belongs to the parent.
        if recorder::running().is_some_and(|now| std::ptr::eq(now, self.recorder)) {
            self.end(false);
        }
    }
}

/// Whether the calling thread is creating a group whose identity is not known yet.
pub fn needs_identity() -> bool {
    GROUP_IN_CREATION.get().is_some_and(|creation| creation.comm.is_none())
}

/// Called when a key is set in a store during the creation of a group. The first key identifies the
/// group.
pub fn store_key_set(recorder: &'static Recorder, key: Word) {
    let Some(creation) = GROUP_IN_CREATION.get().filter(|_| key != 0) else { return };
    // SAFETY: in both ABIs of libstdc++, a std::string begins with a pointer to its terminated
    // characters.
    let key = unsafe { CStr::from_ptr(*(key as *const *const c_char)) }.to_bytes();
    let common = key.iter().rposition(|byte| *byte == b'/').map_or(&key[..0], |slash| &key[..slash]);
    let id = if common.is_empty() { local_id() } else { hash(&[b"gloo", common]) };
    let comm = recorder.create_comm(&NewCommunicator {
        id,
        size: creation.size,
        rank: creation.rank,
        device: -1,
        parent: 0,
        created_ns: clock::now_ns(),
    });
    let name = named_host_call(recorder, "c10d::ProcessGroupGloo");
    let what = NewOperation { kind: OpKind::HostCall, op: Op::CommInit, comm, communicator: id, ..name };
    let slot = open(recorder, &what);
    if let Some(slot) = slot.filter(|_| comm == Some(0)) {
        grant_startup_grace(recorder, slot);
    }
    GROUP_IN_CREATION.set(Some(GroupInCreation { comm, slot, ..creation }));
}
