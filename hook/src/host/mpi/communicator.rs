//! The life of MPI's communicators, and identities for them that are equal on all ranks without a message between them.
//!
//! An identity is a hash of the members' ranks in `MPI_COMM_WORLD`, in their order, and of how many communicators with
//! exactly these members this process has made before. All members take part in making each of them, and in the same order,
//! because making one is a collective call. A communicator between two groups has an identity of its own process only.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU64, Ordering},
};

use xpu_timer_proto::{
    env::Source,
    ring::comm,
    v1::{CommunicatorState, Op, OpKind},
};

use super::{
    Word,
    library::{Library, library},
};
use crate::{
    abi::SUCCESS,
    comms::{NewComm, hash, local_id},
    config,
    hooked::After,
    host::open::{Running, named},
    recorder::{Begin, Recorder},
    sys,
};

/// A communicator that a call uses.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    /// Its entry.
    pub index: usize,
    /// Its identity.
    pub id: u64,
}

/// The communicator of a handle, made known when it was created where the hook did not see it. `None` for one that has only
/// this process in it: nobody can keep it waiting there.
pub fn known(recorder: &'static Recorder, handle: Word) -> Option<Known> {
    let library = library()?;
    let handle = library.abi.handle(handle);
    let index = recorder.comms.find(handle as usize).or_else(|| adopt(recorder, library, handle))?;
    let alone = recorder.comm_word(index, comm::SIZE_RANK).load(Ordering::Relaxed) as u32 == 1;
    (!alone).then(|| Known { index, id: recorder.comm_id(index) })
}

/// Identity of `MPI_COMM_WORLD`.
fn world_id() -> u64 {
    hash(&[b"MPI_COMM_WORLD"])
}

fn bytes(ranks: &[c_int]) -> Vec<u8> {
    ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect()
}

/// How many communicators with these members there were before. The table is found by hash and never cleared; two groups
/// that meet in a place share its count, on all their members alike only when these are in both.
fn generation(members: u64) -> u64 {
    const GROUPS: usize = 1024;
    static SEEN: [(AtomicU64, AtomicU64); GROUPS] = [const { (AtomicU64::new(0), AtomicU64::new(0)) }; GROUPS];
    for step in 0..GROUPS {
        let (key, count) = &SEEN[(members as usize).wrapping_add(step) % GROUPS];
        let taken = key.compare_exchange(0, members, Ordering::AcqRel, Ordering::Acquire);
        if taken.is_ok() || taken == Err(members) {
            return count.fetch_add(1, Ordering::Relaxed);
        }
    }
    // More different groups than places: from here on they cannot be told from each other's first.
    0
}

fn identity(ranks: &[c_int]) -> u64 {
    let members = hash(&[b"MPI group", &bytes(ranks)]);
    hash(&[&members.to_le_bytes(), &generation(members).to_le_bytes()])
}

#[cold]
fn adopt(recorder: &'static Recorder, library: &Library, handle: u64) -> Option<usize> {
    if handle == library.abi.comm_null || handle == 0 {
        return None;
    }
    let (rank, size) = library.rank_and_size(handle)?;
    let id = match handle {
        world if world == library.abi.world => world_id(),
        _ if library.is_inter(handle) => local_id(),
        _ => library.world_ranks(handle).map_or_else(local_id, |ranks| identity(&ranks)),
    };
    let index = recorder.create_comm(&NewComm { id, size, rank, device: -1, parent: 0, created_ns: sys::now_ns() })?;
    recorder.set_comm_handle(index, handle as usize);
    recorder.set_comm_state(index, CommunicatorState::Ready);
    Some(index)
}

/// `MPI_Init`, which returns on no rank before all have called it.
pub struct Starting {
    running: Running,
    comm: Option<usize>,
}

/// Before `MPI_Init` of any form.
pub fn starting(recorder: &'static Recorder, name: &'static str) -> Starting {
    let environment = config::snapshot();
    let info = Source::new(move |name| config::value(&environment, name).map(str::to_string), "").rank_info();
    let comm = recorder.create_comm(&NewComm {
        id: world_id(),
        size: info.world_size,
        rank: info.rank,
        device: -1,
        parent: 0,
        created_ns: sys::now_ns(),
    });
    let what = Begin { comm, communicator: world_id(), ..making(recorder, Op::CommInit, name) };
    Starting { running: Running::new(recorder).with(&what), comm }
}

impl After for Starting {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.running.after(recorder, result);
        let Some(index) = self.comm else { return };
        let found = library().filter(|_| result == SUCCESS);
        let Some((library, (rank, size))) = found.and_then(|it| Some((it, it.rank_and_size(it.abi.world)?))) else {
            recorder.set_comm_state(index, CommunicatorState::Failed);
            recorder.retire_comm(index);
            return;
        };
        recorder.set_comm_size_rank(index, size, rank);
        recorder.set_comm_handle(index, library.abi.world as usize);
        recorder.set_comm_state(index, CommunicatorState::Ready);
    }
}

fn making(recorder: &'static Recorder, op: Op, name: &'static str) -> Begin {
    Begin { kind: OpKind::HostCall, op, ..named(recorder, name) }
}

/// A call that makes a communicator.
pub struct Making {
    running: Running,
    output: Word,
    /// Its entry, when who belongs to it is known before.
    comm: Option<usize>,
}

/// Before a call that all ranks of another communicator make. `output` is where the library writes the new one.
pub fn from_parent(recorder: &'static Recorder, name: &'static str, parent: Word, output: Word) -> Making {
    let parent = known(recorder, parent);
    let running = Running::new(recorder);
    let Some(parent) = parent else { return Making { running, output, comm: None } };
    let what = Begin { comm: Some(parent.index), communicator: parent.id, ..making(recorder, Op::CommSplit, name) };
    Making { running: running.with(&what), output, comm: None }
}

/// Before a call that only the ranks of a group make.
pub fn from_group(recorder: &'static Recorder, name: &'static str, group: Word, output: Word) -> Making {
    let running = Running::new(recorder);
    let found =
        library().and_then(|it| Some((it.world_ranks_of(it.abi.handle(group))?, it.rank_and_size(it.abi.world)?)));
    let Some((members, (own, _))) = found.filter(|(members, _)| members.len() > 1) else {
        return Making { running, output, comm: None };
    };
    let id = identity(&members);
    let comm = recorder.create_comm(&NewComm {
        id,
        size: members.len() as u32,
        rank: members.iter().position(|member| *member == own).map_or(-1, |rank| rank as i32),
        device: -1,
        parent: 0,
        created_ns: sys::now_ns(),
    });
    let what = Begin { comm, communicator: id, ..making(recorder, Op::CommInit, name) };
    Making { running: running.with(&what), output, comm }
}

impl After for Making {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.running.after(recorder, result);
        // SAFETY: the caller's place for the communicator, which the library has just written.
        let made = library().filter(|_| result == SUCCESS).map(|it| (it, unsafe { it.abi.handle_at(self.output, 0) }));
        match (made, self.comm) {
            (Some((_, handle)), Some(index)) => {
                recorder.set_comm_handle(index, handle as usize);
                recorder.set_comm_state(index, CommunicatorState::Ready);
            }
            (Some((library, handle)), None) if recorder.comms.find(handle as usize).is_none() => {
                adopt(recorder, library, handle);
            }
            (None, Some(index)) => {
                recorder.set_comm_state(index, CommunicatorState::Failed);
                recorder.retire_comm(index);
            }
            _ => {}
        }
    }
}

/// A call that ends a communicator.
pub struct Ending(Option<usize>);

/// Before `MPI_Comm_free` and `MPI_Comm_disconnect`, which write the handle over.
pub fn ending(recorder: &'static Recorder, place: Word) -> Ending {
    // SAFETY: the caller's communicator.
    let handle = library().map(|library| unsafe { library.abi.handle_at(place, 0) });
    Ending(handle.and_then(|handle| recorder.comms.find(handle as usize)))
}

impl After for Ending {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if let Some(index) = self.0.filter(|_| result == SUCCESS) {
            recorder.set_comm_state(index, CommunicatorState::Finalized);
            recorder.retire_comm(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_the_members_and_how_often_they_met() {
        let pair = identity(&[3, 5]);
        let again = identity(&[3, 5]);
        let turned = identity(&[5, 3]);
        assert!(pair != again && pair != turned && again != turned);
        // What another rank computes, which has also seen two such pairs, and others in between.
        let members = hash(&[b"MPI group", &bytes(&[3, 5])]);
        assert_eq!(pair, hash(&[&members.to_le_bytes(), &0u64.to_le_bytes()]));
        assert_eq!(again, hash(&[&members.to_le_bytes(), &1u64.to_le_bytes()]));
    }
}
