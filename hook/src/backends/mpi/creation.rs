//! Functions that create and free communicators.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::ring::comm;

use crate::{
    backends::mpi::{
        communicator::{create, ending, from_group, from_other_processes, from_parent, known, session, session_over},
        library::library,
        operations::{ERROR, VARIES, named_collective},
        request::{COUNT, MAX, NonblockingCall, PENDING, Pending, nonblocking},
    },
    interpose::hooked::{AfterCall, hooked},
    runtime::{
        abi::{SUCCESS, Word},
        os::{
            clock,
            thread_state::{IN_COLLECTIVES, IN_HOOK},
        },
        recorder::{Recorder, communicator_table::hash, communicators::NewCommunicator},
    },
};

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Comm_dup | PMPI_Comm_dup(comm: Word, new: Word) => |recorder, _| from_parent(recorder, "MPI_Comm_dup", comm, new);
    MPI_Comm_dup_with_info | PMPI_Comm_dup_with_info(comm: Word, info: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_dup_with_info", comm, new);
    MPI_Comm_idup | PMPI_Comm_idup(comm: Word, new: Word, request: Word)
        => |recorder, _| duplicating(recorder, "MPI_Comm_idup", comm, new, request);
    MPI_Comm_idup_with_info | PMPI_Comm_idup_with_info(comm: Word, info: Word, new: Word, request: Word)
        => |recorder, _| duplicating(recorder, "MPI_Comm_idup_with_info", comm, new, request);
    MPI_Comm_create | PMPI_Comm_create(comm: Word, group: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_create", comm, new);
    MPI_Comm_create_group | PMPI_Comm_create_group(comm: Word, group: Word, tag: Word, new: Word)
        => |recorder, _| from_group(recorder, "MPI_Comm_create_group", group, new);
    MPI_Comm_split | PMPI_Comm_split(comm: Word, color: Word, key: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_split", comm, new);
    MPI_Comm_split_type | PMPI_Comm_split_type(comm: Word, kind: Word, key: Word, info: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_split_type", comm, new);
    MPI_Cart_create | PMPI_Cart_create(comm: Word, count: Word, sizes: Word, periods: Word, reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Cart_create", comm, new);
    MPI_Cart_sub | PMPI_Cart_sub(comm: Word, remain: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Cart_sub", comm, new);
    MPI_Graph_create | PMPI_Graph_create(comm: Word, count: Word, index: Word, edges: Word, reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Graph_create", comm, new);
    MPI_Dist_graph_create | PMPI_Dist_graph_create(comm: Word, count: Word, sources: Word, degrees: Word, to: Word,
        weights: Word, info: Word, reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Dist_graph_create", comm, new);
    MPI_Dist_graph_create_adjacent | PMPI_Dist_graph_create_adjacent(comm: Word, incount: Word, from: Word,
        inweights: Word, outcount: Word, to: Word, outweights: Word, info: Word, reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Dist_graph_create_adjacent", comm, new);
    MPI_Intercomm_merge | PMPI_Intercomm_merge(comm: Word, high: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Intercomm_merge", comm, new);
    MPI_Intercomm_create | PMPI_Intercomm_create(comm: Word, leader: Word, peers: Word, remote: Word, tag: Word,
        new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Intercomm_create", comm, new);
    MPI_Comm_free | PMPI_Comm_free(comm: Word) => |recorder, _| ending(recorder, comm);
    MPI_Comm_disconnect | PMPI_Comm_disconnect(comm: Word) => |recorder, _| ending(recorder, comm);

    MPI_Comm_spawn | PMPI_Comm_spawn(program: Word, arguments: Word, count: Word, info: Word, root: Word, comm: Word,
        new: Word, errors: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_spawn", comm, new);
    MPI_Comm_spawn_multiple | PMPI_Comm_spawn_multiple(count: Word, programs: Word, arguments: Word, counts: Word,
        infos: Word, root: Word, comm: Word, new: Word, errors: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_spawn_multiple", comm, new);
    MPI_Comm_accept | PMPI_Comm_accept(port: Word, info: Word, root: Word, comm: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_accept", comm, new);
    MPI_Comm_connect | PMPI_Comm_connect(port: Word, info: Word, root: Word, comm: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_connect", comm, new);
    MPI_Comm_join | PMPI_Comm_join(socket: Word, new: Word) => |recorder, _| from_other_processes(recorder, "MPI_Comm_join", new);
    // The parent may have failed ranks.
    MPIX_Comm_shrink(comm: Word, new: Word) => |recorder, _| from_parent(recorder, "MPIX_Comm_shrink", comm, new);

    MPI_Session_init | PMPI_Session_init(info: Word, errors: Word, new: Word) => |_, _| session(new);
    MPI_Comm_create_from_group | PMPI_Comm_create_from_group(group: Word, tag: Word, info: Word, errors: Word, new: Word)
        => |recorder, _| from_group(recorder, "MPI_Comm_create_from_group", group, new);
    MPI_Intercomm_create_from_groups | PMPI_Intercomm_create_from_groups(own: Word, leader: Word, remote: Word,
        other: Word, tag: Word, info: Word, errors: Word, new: Word)
        => |recorder, _| from_other_processes(recorder, "MPI_Intercomm_create_from_groups", new);
    MPI_Session_finalize | PMPI_Session_finalize(place: Word) => |recorder, _| session_over(recorder, place);
}

/// A call of `MPI_Comm_idup`: the communicator is ready when its request completes. Its identity is
/// determined when the call is made.
pub(crate) struct Duplicating {
    nonblocking: NonblockingCall,
    request: Word,
    place: Word,
    made: Option<(usize, u64)>,
}

/// Called before `MPI_Comm_idup`, which writes the new communicator to `place`.
pub(crate) fn duplicating(
    recorder: &'static Recorder,
    name: &'static str,
    parent: Word,
    place: Word,
    request: Word,
) -> Duplicating {
    let made = known(recorder, parent).and_then(|parent| {
        let number = recorder.next_split(parent.index);
        let size_rank = recorder.comm_word(parent.index, comm::SIZE_RANK).load(Ordering::Relaxed);
        let (size, rank) = (size_rank as u32, (size_rank >> 32) as i32);
        let id = hash(&[&parent.id.to_le_bytes(), b"duplicate", &number.to_le_bytes()]);
        let new = NewCommunicator { id, size, rank, device: -1, parent: parent.id, created_ns: clock::now_ns() };
        let index = create(recorder, &new)?;
        parent.copy_remote_group_to(index);
        Some((index, id))
    });
    let what = named_collective(recorder, name, parent, VARIES);
    Duplicating { nonblocking: nonblocking(what, request, false), request, place, made }
}

impl AfterCall for Duplicating {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        self.nonblocking.after(recorder, result);
        let (Some((index, id)), Some(library)) = (self.made, library()) else { return };
        if result != SUCCESS {
            return recorder.retire_comm(index);
        }
        // SAFETY: the caller's place for the request, which the library has written.
        let request = unsafe { library.abi.handle_at(self.request, 0) };
        let one = Pending { request, place: self.place, index, id };
        if request == 0 || request == library.abi.request_null {
            return one.mark_created(recorder);
        }
        match PENDING.try_lock() {
            Ok(mut pending) if pending.len() < MAX => {
                pending.push(one);
                COUNT.store(pending.len(), Ordering::Relaxed);
            }
            _ => recorder.retire_comm(index),
        }
    }
}
