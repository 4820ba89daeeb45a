//! MPI's communicators, windows and files, and identities for them that are equal on all ranks
//! without any message between them.
//!
//! An identity is a hash of the members' ranks in the world, in order, and of how many
//! communicators with exactly these members this process has created before. Creating a
//! communicator is a collective call of all members, so they all create them in the same order. The
//! members of an intercommunicator are those of the group with the lowest rank, then the others.
//! The identity of a window or file is derived from its communicator and from the number of objects
//! that were derived from that before.

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
        host_call::BlockingCall,
        mpi::{
            library::{Library, library},
            polling,
        },
    },
    interpose::hooked::AfterCall,
    runtime::{
        abi::{SUCCESS, Word},
        lifecycle::config,
        os::clock,
        recorder::{
            NewOperation, Recorder,
            communicator_table::{hash, local_id},
            communicators::NewCommunicator,
            host_operations::named_host_call,
        },
    },
};

/// A communicator that the hook knows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownCommunicator {
    /// Its entry in the communicator table.
    pub index: usize,
    /// Its identity.
    pub id: u64,
}

/// For the entry of an intercommunicator, the number of the remote group's first member plus one. 0
/// for other entries.
static FIRST_REMOTE: [AtomicU32; comm::SLOTS] = [const { AtomicU32::new(0) }; comm::SLOTS];

impl KnownCommunicator {
    /// Whether it is an intercommunicator.
    pub(crate) fn is_inter(self) -> bool {
        FIRST_REMOTE[self.index].load(Ordering::Relaxed) != 0
    }

    /// A duplicate connects the same groups.
    pub(crate) fn copy_remote_group_to(self, copy: usize) {
        FIRST_REMOTE[copy].store(FIRST_REMOTE[self.index].load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The number of a peer among all members. In an intercommunicator, a peer is a member of the
    /// remote group.
    pub(crate) fn peer(self, peer: Word) -> Word {
        peer + FIRST_REMOTE[self.index].load(Ordering::Relaxed).saturating_sub(1) as Word
    }
}

/// The communicator with a handle. It is registered now if its creation was not seen. `None` for a
/// communicator of this process alone, in which nothing waits for others.
pub(crate) fn known(recorder: &'static Recorder, handle: Word) -> Option<KnownCommunicator> {
    let library = library()?;
    let handle = library.abi.handle(handle);
    let index = recorder.comms.find(handle as usize).or_else(|| adopt(recorder, library, handle))?;
    unless_alone(recorder, index)
}

fn unless_alone(recorder: &'static Recorder, index: usize) -> Option<KnownCommunicator> {
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

/// How many communicators with these members were created before. The hash table is never cleared.
/// Two member sets that collide share their count; that count is equal on all members only if they
/// belong to both sets.
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
    // The table is full. From now on, communicators with the same members share an identity.
    0
}

fn identity(ranks: &[c_int]) -> u64 {
    with_generation(hash(&[b"MPI group", &bytes(ranks)]))
}

fn with_generation(members: u64) -> u64 {
    hash(&[&members.to_le_bytes(), &generation(members).to_le_bytes()])
}

/// The members of a communicator.
#[derive(Debug, PartialEq, Eq)]
struct Members {
    id: u64,
    size: u32,
    rank: i32,
    /// The value of [`FIRST_REMOTE`].
    first_remote: u32,
}

/// The members of an intercommunicator; this process is member `rank` of the local group.
fn intercommunicator_members(own: &[c_int], remote: &[c_int], rank: i32) -> Members {
    let leads = own.iter().min() < remote.iter().min();
    let (first, second) = if leads { (own, remote) } else { (remote, own) };
    let (before_own, before_remote) = if leads { (0, first.len()) } else { (first.len(), 0) };
    Members {
        id: with_generation(hash(&[b"MPI groups", &bytes(first), b"and", &bytes(second)])),
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
        (Some(own), Some(remote)) => Some(intercommunicator_members(&own, &remote, rank)),
        // Spawned processes: neither group can translate the other's ranks. The members are not
        // matched, and sizes are not compared.
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

/// Creates an entry.
pub(crate) fn create(recorder: &'static Recorder, new: &NewCommunicator) -> Option<usize> {
    let index = recorder.create_comm(new)?;
    FIRST_REMOTE[index].store(0, Ordering::Relaxed);
    Some(index)
}

/// The communicator can be used from now on, with this handle.
pub(crate) fn ready(recorder: &'static Recorder, index: usize, handle: usize) {
    recorder.set_comm_handle(index, handle);
    recorder.set_comm_state(index, CommunicatorState::Ready);
}

/// `MPI_Init`, which returns on no rank before all ranks have called it.
pub(crate) struct InitCall {
    running: BlockingCall,
    comm: Option<usize>,
}

/// Called before any form of `MPI_Init`.
pub(crate) fn init_call(recorder: &'static Recorder, name: &'static str) -> InitCall {
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
    InitCall { running: BlockingCall::new(recorder).with(&what), comm }
}

impl AfterCall for InitCall {
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

/// The object that a handle refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A communicator.
    Comm,
    /// A window.
    Window,
    /// A file, whose handle is a pointer in every ABI.
    File,
}

impl Kind {
    fn handle(self, library: &Library, word: Word) -> usize {
        if self == Kind::File { word } else { library.abi.handle(word) as usize }
    }

    /// Reads a handle from memory.
    ///
    /// # Safety
    /// `place` is null or points to a handle.
    unsafe fn handle_at(self, library: &Library, place: Word) -> usize {
        match self {
            // SAFETY: by the contract of this function, null or a handle, which is a pointer.
            Kind::File => unsafe { (place as *const usize).as_ref() }.map_or(0, |handle| *handle),
            // SAFETY: by the contract of this function, null or one handle.
            _ => unsafe { library.abi.handle_at(place, 0) as usize },
        }
    }
}

/// A call that creates a communicator, or a window or file of one.
pub(crate) struct CreationCall {
    running: BlockingCall,
    output: Word,
    kind: Kind,
    /// Its entry, if the members are known before the call.
    comm: Option<usize>,
}

/// Called before all ranks of a communicator create a new one. The library writes its handle to
/// `output`.
pub(crate) fn from_parent(recorder: &'static Recorder, name: &'static str, parent: Word, output: Word) -> CreationCall {
    polling::interrupt(recorder);
    let running = of_parent(recorder, name, known(recorder, parent));
    CreationCall { running, output, kind: Kind::Comm, comm: None }
}

fn of_parent(recorder: &'static Recorder, name: &'static str, parent: Option<KnownCommunicator>) -> BlockingCall {
    let running = BlockingCall::new(recorder);
    let Some(parent) = parent else { return running };
    let what =
        NewOperation { comm: Some(parent.index), communicator: parent.id, ..making(recorder, Op::CommSplit, name) };
    running.with(&what)
}

/// Called before the creation of a communicator with processes that share none with this one, or
/// without a parent.
pub(crate) fn from_other_processes(recorder: &'static Recorder, name: &'static str, output: Word) -> CreationCall {
    polling::interrupt(recorder);
    let running = BlockingCall::new(recorder).with(&making(recorder, Op::CommInit, name));
    CreationCall { running, output, kind: Kind::Comm, comm: None }
}

/// Called before only the ranks of a group create a communicator.
pub(crate) fn from_group(recorder: &'static Recorder, name: &'static str, group: Word, output: Word) -> CreationCall {
    polling::interrupt(recorder);
    let running = BlockingCall::new(recorder);
    let found = library().and_then(|library| {
        let group = library.abi.handle(group);
        Some((library.world_ranks_of(group)?, library.rank_in_group(group)?))
    });
    let Some((members, rank)) = found.filter(|(members, _)| members.len() > 1) else {
        return CreationCall { running, output, kind: Kind::Comm, comm: None };
    };
    let id = identity(&members);
    let size = members.len() as u32;
    let comm =
        create(recorder, &NewCommunicator { id, size, rank, device: -1, parent: 0, created_ns: clock::now_ns() });
    let what = NewOperation { comm, communicator: id, ..making(recorder, Op::CommInit, name) };
    CreationCall { running: running.with(&what), output, kind: Kind::Comm, comm }
}

/// Called before all ranks of a communicator create a window or file.
pub(crate) fn derived(
    recorder: &'static Recorder,
    name: &'static str,
    parent: Word,
    output: Word,
    kind: Kind,
) -> CreationCall {
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
    CreationCall { running, output, kind, comm }
}

impl AfterCall for CreationCall {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.running.after(recorder, result);
        let library = library().filter(|_| result == SUCCESS);
        // SAFETY: the caller's place for the handle, which the library has written.
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

/// The window or file with a handle. `None` if it belongs to this process alone, or if its creation
/// was not seen.
pub(crate) fn known_object(recorder: &'static Recorder, kind: Kind, handle: Word) -> Option<KnownCommunicator> {
    let index = recorder.comms.find(kind.handle(library()?, handle))?;
    unless_alone(recorder, index)
}

/// Token of `MPI_Session_init`.
pub(crate) struct Session(Word);

/// Called before `MPI_Session_init`, which writes the session to `place`.
pub(crate) fn session(place: Word) -> Session {
    Session(place)
}

impl AfterCall for Session {
    fn after(self, _: &'static Recorder, result: c_int) {
        if let Some(library) = library().filter(|_| result == SUCCESS) {
            // SAFETY: the caller's place for the session, which the library has written.
            library.set_session(unsafe { library.abi.handle_at(self.0, 0) });
        }
    }
}

/// Called before `MPI_Session_finalize`, which overwrites the handle and may wait for processes
/// that share the session's communicators. The hook must not use the session any more.
pub(crate) fn session_over(recorder: &'static Recorder, place: Word) -> BlockingCall {
    polling::interrupt(recorder);
    if let Some(library) = library() {
        // SAFETY: the caller's session.
        library.forget_session(unsafe { library.abi.handle_at(place, 0) });
    }
    BlockingCall::new(recorder).with(&named_host_call(recorder, "MPI_Session_finalize"))
}

/// A call that ends a communicator.
pub(crate) struct Ending(Option<usize>);

/// Called before `MPI_Comm_free` and `MPI_Comm_disconnect`, which overwrite the handle.
pub(crate) fn ending(recorder: &'static Recorder, place: Word) -> Ending {
    polling::interrupt(recorder);
    ending_of(recorder, Kind::Comm, place).1
}

/// The object behind a handle in memory, and its end.
pub(crate) fn ending_of(recorder: &'static Recorder, kind: Kind, place: Word) -> (Option<KnownCommunicator>, Ending) {
    // SAFETY: the caller's communicator, window or file.
    let handle = library().map(|library| unsafe { kind.handle_at(library, place) });
    let index = handle.and_then(|handle| recorder.comms.find(handle));
    (index.and_then(|index| unless_alone(recorder, index)), Ending(index))
}

impl AfterCall for Ending {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if let Some(index) = self.0.filter(|_| result == SUCCESS) {
            recorder.set_comm_state(index, CommunicatorState::Finalized);
            recorder.retire_comm(index);
        }
    }
}

/// A call that all members make to end a window or file.
pub(crate) struct Freeing {
    /// The call.
    pub running: BlockingCall,
    /// The object that it ends.
    pub ending: Ending,
}

impl AfterCall for Freeing {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.running.after(recorder, result);
        self.ending.after(recorder, result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_depends_on_members_and_generation() {
        let pair = identity(&[3, 5]);
        let again = identity(&[3, 5]);
        let turned = identity(&[5, 3]);
        assert!(pair != again && pair != turned && again != turned);
        // The computation of another rank, which has also created two such pairs, and others in
        // between.
        let members = hash(&[b"MPI group", &bytes(&[3, 5])]);
        assert_eq!(pair, hash(&[&members.to_le_bytes(), &0u64.to_le_bytes()]));
        assert_eq!(again, hash(&[&members.to_le_bytes(), &1u64.to_le_bytes()]));
    }

    #[test]
    fn members_of_an_intercommunicator_have_equal_numbers_on_both_sides() {
        // One group has ranks 0 and 2, the other 1 and 3. The first result is that of rank 2, the
        // second that of rank 3.
        let (two, three) =
            (intercommunicator_members(&[0, 2], &[1, 3], 1), intercommunicator_members(&[1, 3], &[0, 2], 1));
        assert_eq!((two.size, two.rank, two.first_remote), (4, 1, 3));
        assert_eq!((three.size, three.rank, three.first_remote), (4, 3, 1));
        let members = hash(&[b"MPI groups", &bytes(&[0, 2]), b"and", &bytes(&[1, 3])]);
        assert_eq!(two.id, hash(&[&members.to_le_bytes(), &0u64.to_le_bytes()]));
        assert_eq!(three.id, hash(&[&members.to_le_bytes(), &1u64.to_le_bytes()]), "in one process it is the next one");
    }
}
