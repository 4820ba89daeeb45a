//! The life of MPI's communicators, and identities for them that are equal on all ranks without a message between them.
//!
//! An identity is a hash of the members' ranks in the world, in their order, and of how many communicators with
//! exactly these members this process has made before. All members take part in making each of them, and in the same order,
//! because making one is a collective call. One between two groups has as members those of the group with the lowest
//! rank, then the others. A window and a file are the next thing that was made of their communicator.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use xpu_timer_proto::{
    env::Source,
    ring::comm,
    v1::{CommunicatorState, Op, OpKind},
};

use crate::{
    backends::{
        host_call::Running,
        mpi::{
            library::{Library, library},
            polling,
        },
    },
    interpose::hooked::After,
    runtime::{
        abi::{SUCCESS, Word},
        lifecycle::config,
        os::clock,
        recorder::{
            NewOperation, Recorder,
            communicator_id::{hash, local_id},
            communicators::NewCommunicator,
            host_operations::named_host_call,
        },
    },
};

/// A communicator that a call uses.
#[derive(Debug, Clone, Copy)]
pub struct KnownCommunicator {
    /// Its entry.
    pub index: usize,
    /// Its identity.
    pub id: u64,
}

/// WaitFor each entry that connects two groups, one more than the number of the other group's first member; else 0.
static FIRST_REMOTE: [AtomicU32; comm::SLOTS] = [const { AtomicU32::new(0) }; comm::SLOTS];

impl KnownCommunicator {
    /// Whether it connects two groups.
    pub fn is_inter(self) -> bool {
        FIRST_REMOTE[self.index].load(Ordering::Relaxed) != 0
    }

    /// A copy of it connects the same groups.
    pub fn copy_remote_group_to(self, copy: usize) {
        FIRST_REMOTE[copy].store(FIRST_REMOTE[self.index].load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The number of a peer among all its members: between two groups, a peer is one of the other group.
    pub fn peer(self, peer: Word) -> Word {
        peer + FIRST_REMOTE[self.index].load(Ordering::Relaxed).saturating_sub(1) as Word
    }
}

/// The communicator of a handle, made known when it was created where the hook did not see it. `None` for one that has only
/// this process in it: nobody can keep it waiting there.
pub fn known(recorder: &'static Recorder, handle: Word) -> Option<KnownCommunicator> {
    let library = library()?;
    let handle = library.abi.handle(handle);
    let index = recorder.comms.find(handle as usize).or_else(|| adopt(recorder, library, handle))?;
    with_others(recorder, index)
}

fn with_others(recorder: &'static Recorder, index: usize) -> Option<KnownCommunicator> {
    let alone = recorder.comm_word(index, comm::SIZE_RANK).load(Ordering::Relaxed) as u32 == 1;
    (!alone).then(|| KnownCommunicator { index, id: recorder.comm_id(index) })
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
    numbered(hash(&[b"MPI group", &bytes(ranks)]))
}

fn numbered(members: u64) -> u64 {
    hash(&[&members.to_le_bytes(), &generation(members).to_le_bytes()])
}

/// Who belongs to a communicator.
#[derive(Debug, PartialEq, Eq)]
struct Members {
    id: u64,
    size: u32,
    rank: i32,
    /// As [`FIRST_REMOTE`] has it.
    first_remote: u32,
}

/// The members of a communicator between two groups, of which this process is member `rank` of the first one.
fn both(own: &[c_int], remote: &[c_int], rank: i32) -> Members {
    let leads = own.iter().min() < remote.iter().min();
    let (first, second) = if leads { (own, remote) } else { (remote, own) };
    let (before_own, before_remote) = if leads { (0, first.len()) } else { (first.len(), 0) };
    Members {
        id: numbered(hash(&[b"MPI groups", &bytes(first), b"and", &bytes(second)])),
        size: (own.len() + remote.len()) as u32,
        rank: rank + before_own as i32,
        first_remote: before_remote as u32 + 1,
    }
}

fn members(library: &Library, handle: u64) -> Option<Members> {
    let (rank, size) = library.rank_and_size(handle)?;
    let plain = |id| Members { id, size, rank, first_remote: 0 };
    if handle == library.abi.world {
        return Some(plain(world_id()));
    }
    let own = library.world_ranks(handle);
    if !library.is_inter(handle) {
        return Some(plain(own.map_or_else(local_id, |own| identity(&own))));
    }
    match (own, library.remote_ranks(handle)) {
        (Some(own), Some(remote)) => Some(both(&own, &remote, rank)),
        // Spawned processes: neither side can tell the others' numbers. Nobody is matched there, and nothing is compared.
        _ => Some(Members { size: 0, rank: -1, first_remote: 1, ..plain(local_id()) }),
    }
}

#[cold]
fn adopt(recorder: &'static Recorder, library: &Library, handle: u64) -> Option<usize> {
    if handle == library.abi.comm_null || handle == 0 {
        return None;
    }
    let Members { id, size, rank, first_remote } = members(library, handle)?;
    let index =
        create(recorder, &NewCommunicator { id, size, rank, device: -1, parent: 0, created_ns: clock::now_ns() })?;
    FIRST_REMOTE[index].store(first_remote, Ordering::Relaxed);
    ready(recorder, index, handle as usize);
    Some(index)
}

/// A new entry.
pub fn create(recorder: &'static Recorder, new: &NewCommunicator) -> Option<usize> {
    let index = recorder.create_comm(new)?;
    FIRST_REMOTE[index].store(0, Ordering::Relaxed);
    Some(index)
}

/// It can be used from now on, by this handle.
pub fn ready(recorder: &'static Recorder, index: usize, handle: usize) {
    recorder.set_comm_handle(index, handle);
    recorder.set_comm_state(index, CommunicatorState::Ready);
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
    polling::interrupt(recorder);
    let comm = create(
        recorder,
        &NewCommunicator {
            id: world_id(),
            size: info.world_size,
            rank: info.rank,
            device: -1,
            parent: 0,
            created_ns: clock::now_ns(),
        },
    );
    let what = NewOperation { comm, communicator: world_id(), ..making(recorder, Op::CommInit, name) };
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

fn making(recorder: &'static Recorder, op: Op, name: &'static str) -> NewOperation {
    NewOperation { kind: OpKind::HostCall, op, ..named_host_call(recorder, name) }
}

/// What stands behind a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A communicator.
    Comm,
    /// A window.
    Window,
    /// A file, whose handle is a pointer in both interfaces.
    File,
}

impl Kind {
    fn handle(self, library: &Library, word: Word) -> usize {
        if self == Kind::File { word } else { library.abi.handle(word) as usize }
    }

    /// A handle in memory.
    ///
    /// # Safety
    /// `place` is null or points to a handle.
    unsafe fn handle_at(self, library: &Library, place: Word) -> usize {
        match self {
            // SAFETY: the caller's promise.
            Kind::File => unsafe { (place as *const usize).as_ref() }.map_or(0, |handle| *handle),
            // SAFETY: as above.
            _ => unsafe { library.abi.handle_at(place, 0) as usize },
        }
    }
}

/// A call that makes a communicator, or a window or a file of one.
pub struct Making {
    running: Running,
    output: Word,
    kind: Kind,
    /// Its entry, when who belongs to it is known before.
    comm: Option<usize>,
}

/// Before a call that all ranks of another communicator make. `output` is where the library writes the new one.
pub fn from_parent(recorder: &'static Recorder, name: &'static str, parent: Word, output: Word) -> Making {
    polling::interrupt(recorder);
    let running = of_parent(recorder, name, known(recorder, parent));
    Making { running, output, kind: Kind::Comm, comm: None }
}

fn of_parent(recorder: &'static Recorder, name: &'static str, parent: Option<KnownCommunicator>) -> Running {
    let running = Running::new(recorder);
    let Some(parent) = parent else { return running };
    let what =
        NewOperation { comm: Some(parent.index), communicator: parent.id, ..making(recorder, Op::CommSplit, name) };
    running.with(&what)
}

/// Before a call that makes a communicator with processes that share none with this one, or none that the call names.
pub fn from_strangers(recorder: &'static Recorder, name: &'static str, output: Word) -> Making {
    polling::interrupt(recorder);
    let running = Running::new(recorder).with(&making(recorder, Op::CommInit, name));
    Making { running, output, kind: Kind::Comm, comm: None }
}

/// Before a call that only the ranks of a group make.
pub fn from_group(recorder: &'static Recorder, name: &'static str, group: Word, output: Word) -> Making {
    polling::interrupt(recorder);
    let running = Running::new(recorder);
    let found = library().and_then(|library| {
        let group = library.abi.handle(group);
        Some((library.world_ranks_of(group)?, library.rank_in_group(group)?))
    });
    let Some((members, rank)) = found.filter(|(members, _)| members.len() > 1) else {
        return Making { running, output, kind: Kind::Comm, comm: None };
    };
    let id = identity(&members);
    let size = members.len() as u32;
    let comm =
        create(recorder, &NewCommunicator { id, size, rank, device: -1, parent: 0, created_ns: clock::now_ns() });
    let what = NewOperation { comm, communicator: id, ..making(recorder, Op::CommInit, name) };
    Making { running: running.with(&what), output, kind: Kind::Comm, comm }
}

/// Before a call that all ranks of a communicator make to get a window or a file.
pub fn derived(recorder: &'static Recorder, name: &'static str, parent: Word, output: Word, kind: Kind) -> Making {
    polling::interrupt(recorder);
    let parent = known(recorder, parent);
    let running = of_parent(recorder, name, parent);
    let comm = parent.and_then(|parent| {
        let number = recorder.next_split(parent.index);
        let size_rank = recorder.comm_word(parent.index, comm::SIZE_RANK).load(Ordering::Relaxed);
        let id = hash(&[&parent.id.to_le_bytes(), b"window or file", &number.to_le_bytes()]);
        let (size, rank) = (size_rank as u32, (size_rank >> 32) as i32);
        create(
            recorder,
            &NewCommunicator { id, size, rank, device: -1, parent: parent.id, created_ns: clock::now_ns() },
        )
    });
    Making { running, output, kind, comm }
}

impl After for Making {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.running.after(recorder, result);
        let library = library().filter(|_| result == SUCCESS);
        // SAFETY: the caller's place for the handle, which the library has just written.
        let made = library.map(|library| (library, unsafe { self.kind.handle_at(library, self.output) }));
        match (made, self.comm) {
            (Some((_, handle)), Some(index)) => ready(recorder, index, handle),
            (Some((library, handle)), None) if self.kind == Kind::Comm && recorder.comms.find(handle).is_none() => {
                adopt(recorder, library, handle as u64);
            }
            (None, Some(index)) => {
                recorder.set_comm_state(index, CommunicatorState::Failed);
                recorder.retire_comm(index);
            }
            _ => {}
        }
    }
}

/// The window or file of a handle. `None` for one that only this process has, and for one that was made unseen.
pub fn known_object(recorder: &'static Recorder, kind: Kind, handle: Word) -> Option<KnownCommunicator> {
    let index = recorder.comms.find(kind.handle(library()?, handle))?;
    with_others(recorder, index)
}

/// After `MPI_Session_init`.
pub struct Session(Word);

/// Before it. `place` is where it writes the session.
pub fn session(place: Word) -> Session {
    Session(place)
}

impl After for Session {
    fn after(self, _: &'static Recorder, result: c_int) {
        if let Some(library) = library().filter(|_| result == SUCCESS) {
            // SAFETY: the caller's place for the session, which the library has just written.
            library.set_session(unsafe { library.abi.handle_at(self.0, 0) });
        }
    }
}

/// Before `MPI_Session_finalize`, which may wait for those that the session's communicators were shared with, and writes the handle
/// over. The library may not be asked by it any more.
pub fn session_over(recorder: &'static Recorder, place: Word) -> Running {
    polling::interrupt(recorder);
    if let Some(library) = library() {
        // SAFETY: the caller's session.
        library.forget_session(unsafe { library.abi.handle_at(place, 0) });
    }
    Running::new(recorder).with(&named_host_call(recorder, "MPI_Session_finalize"))
}

/// A call that ends a communicator.
pub struct Ending(Option<usize>);

/// Before `MPI_Comm_free` and `MPI_Comm_disconnect`, which write the handle over.
pub fn ending(recorder: &'static Recorder, place: Word) -> Ending {
    polling::interrupt(recorder);
    ending_of(recorder, Kind::Comm, place).1
}

/// What stands behind the handle in a place, and its end.
pub fn ending_of(recorder: &'static Recorder, kind: Kind, place: Word) -> (Option<KnownCommunicator>, Ending) {
    // SAFETY: the caller's communicator, window or file.
    let handle = library().map(|library| unsafe { kind.handle_at(library, place) });
    let index = handle.and_then(|handle| recorder.comms.find(handle));
    (index.and_then(|index| with_others(recorder, index)), Ending(index))
}

impl After for Ending {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if let Some(index) = self.0.filter(|_| result == SUCCESS) {
            recorder.set_comm_state(index, CommunicatorState::Finalized);
            recorder.retire_comm(index);
        }
    }
}

/// A call that all members make to end a window or a file.
pub struct Freeing {
    /// The call.
    pub running: Running,
    /// What it ends.
    pub ending: Ending,
}

impl After for Freeing {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.running.after(recorder, result);
        self.ending.after(recorder, result);
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

    #[test]
    fn members_of_two_groups_have_one_number_each_on_both_sides() {
        // Ranks 0 and 2 on one side, 1 and 3 on the other; this is rank 2, and this is rank 3.
        let (two, three) = (both(&[0, 2], &[1, 3], 1), both(&[1, 3], &[0, 2], 1));
        assert_eq!((two.size, two.rank, two.first_remote), (4, 1, 3));
        assert_eq!((three.size, three.rank, three.first_remote), (4, 3, 1));
        let members = hash(&[b"MPI groups", &bytes(&[0, 2]), b"and", &bytes(&[1, 3])]);
        assert_eq!(two.id, hash(&[&members.to_le_bytes(), &0u64.to_le_bytes()]));
        assert_eq!(three.id, hash(&[&members.to_le_bytes(), &1u64.to_le_bytes()]), "in one process it is the next one");
    }
}
