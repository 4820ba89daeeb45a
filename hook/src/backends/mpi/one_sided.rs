//! One-sided communication (RMA), files, and buffered messages. A window or file is a communicator
//! of its own, with its own sequence numbers.
//!
//! `MPI_Put` and similar functions only begin an operation. The functions that wait for its
//! completion are here. A thread that waits for a window's lock waits for the rank that holds it,
//! which is unknown.

use xpu_timer_proto::v1::Op;

use crate::{
    backends::{
        host_call::BlockingCall,
        mpi::{
            communicator::{Freeing, Kind, KnownCommunicator, derived, ending_of, known, known_object},
            operations::{ERROR, NOBODY, VARIES, begin, blocking, host_call_on, next},
            request::{NonblockingCall, nonblocking},
            transfers::probing,
        },
    },
    interpose::hooked::hooked,
    runtime::{
        abi::Word,
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::{NewOperation, Recorder, host_operations::named_host_call},
    },
};

fn window(recorder: &'static Recorder, name: &'static str, window: Word) -> BlockingCall {
    on(recorder, name, known_object(recorder, Kind::Window, window))
}

fn file(recorder: &'static Recorder, name: &'static str, file: Word) -> BlockingCall {
    on(recorder, name, known_object(recorder, Kind::File, file))
}

/// Called before a collective on a window or file.
fn on(recorder: &'static Recorder, name: &'static str, object: Option<KnownCommunicator>) -> BlockingCall {
    blocking(recorder, [object.map(|object| of(recorder, name, object))])
}

fn of(recorder: &'static Recorder, name: &'static str, object: KnownCommunicator) -> NewOperation {
    let seq = next(recorder, object.index);
    NewOperation { function: recorder.name_key(name), ..begin(Op::Unspecified, object, seq, NOBODY, VARIES) }
}

fn nonblocking_file(recorder: &'static Recorder, name: &'static str, file: Word, request: Word) -> NonblockingCall {
    let object = known_object(recorder, Kind::File, file);
    nonblocking(object.map(|object| of(recorder, name, object)), request, false)
}

/// Called before a call that waits for some members of a window: for `peer`, or for members that
/// only the call knows.
fn partly(recorder: &'static Recorder, name: &'static str, window: Word, peer: Word) -> BlockingCall {
    let object = known_object(recorder, Kind::Window, window);
    blocking(recorder, [host_call_on(recorder, name, object, peer)])
}

fn freeing(recorder: &'static Recorder, name: &'static str, kind: Kind, place: Word) -> Freeing {
    let (object, ending) = ending_of(recorder, kind, place);
    Freeing { running: on(recorder, name, object), ending }
}

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Win_create | PMPI_Win_create | MPI_Win_create_c | PMPI_Win_create_c(base: Word, size: Word, unit: Word, info: Word,
        comm: Word, new: Word)
        => |recorder, _| derived(recorder, "MPI_Win_create", comm, new, Kind::Window);
    MPI_Win_allocate | PMPI_Win_allocate | MPI_Win_allocate_c | PMPI_Win_allocate_c(size: Word, unit: Word, info: Word,
        comm: Word, base: Word, new: Word)
        => |recorder, _| derived(recorder, "MPI_Win_allocate", comm, new, Kind::Window);
    MPI_Win_allocate_shared | PMPI_Win_allocate_shared | MPI_Win_allocate_shared_c | PMPI_Win_allocate_shared_c(size: Word,
        unit: Word, info: Word, comm: Word, base: Word, new: Word)
        => |recorder, _| derived(recorder, "MPI_Win_allocate_shared", comm, new, Kind::Window);
    MPI_Win_create_dynamic | PMPI_Win_create_dynamic(info: Word, comm: Word, new: Word)
        => |recorder, _| derived(recorder, "MPI_Win_create_dynamic", comm, new, Kind::Window);
    MPI_Win_free | PMPI_Win_free(place: Word) => |recorder, _| freeing(recorder, "MPI_Win_free", Kind::Window, place);
    MPI_Win_set_info | PMPI_Win_set_info(win: Word, info: Word) => |recorder, _| window(recorder, "MPI_Win_set_info", win);
    MPI_Win_fence | PMPI_Win_fence(assert: Word, win: Word) => |recorder, _| window(recorder, "MPI_Win_fence", win);
    MPI_Win_start | PMPI_Win_start(group: Word, assert: Word, win: Word)
        => |recorder, _| partly(recorder, "MPI_Win_start", win, NOBODY);
    MPI_Win_complete | PMPI_Win_complete(win: Word) => |recorder, _| partly(recorder, "MPI_Win_complete", win, NOBODY);
    MPI_Win_wait | PMPI_Win_wait(win: Word) => |recorder, _| partly(recorder, "MPI_Win_wait", win, NOBODY);
    MPI_Win_test | PMPI_Win_test(win: Word, flag: Word)
        => |_, _| probing(flag, move |recorder| {
            host_call_on(recorder, "MPI_Win_test", known_object(recorder, Kind::Window, win), NOBODY)
        });
    MPI_Win_lock | PMPI_Win_lock(kind: Word, peer: Word, assert: Word, win: Word)
        => |recorder, _| partly(recorder, "MPI_Win_lock", win, peer);
    MPI_Win_unlock | PMPI_Win_unlock(peer: Word, win: Word) => |recorder, _| partly(recorder, "MPI_Win_unlock", win, peer);
    MPI_Win_lock_all | PMPI_Win_lock_all(assert: Word, win: Word)
        => |recorder, _| partly(recorder, "MPI_Win_lock_all", win, NOBODY);
    MPI_Win_unlock_all | PMPI_Win_unlock_all(win: Word)
        => |recorder, _| partly(recorder, "MPI_Win_unlock_all", win, NOBODY);
    MPI_Win_flush | PMPI_Win_flush(peer: Word, win: Word) => |recorder, _| partly(recorder, "MPI_Win_flush", win, peer);
    MPI_Win_flush_local | PMPI_Win_flush_local(peer: Word, win: Word)
        => |recorder, _| partly(recorder, "MPI_Win_flush_local", win, peer);
    MPI_Win_flush_all | PMPI_Win_flush_all(win: Word)
        => |recorder, _| partly(recorder, "MPI_Win_flush_all", win, NOBODY);
    MPI_Win_flush_local_all | PMPI_Win_flush_local_all(win: Word)
        => |recorder, _| partly(recorder, "MPI_Win_flush_local_all", win, NOBODY);

    MPI_File_open | PMPI_File_open(comm: Word, path: Word, mode: Word, info: Word, new: Word)
        => |recorder, _| derived(recorder, "MPI_File_open", comm, new, Kind::File);
    MPI_File_close | PMPI_File_close(place: Word) => |recorder, _| freeing(recorder, "MPI_File_close", Kind::File, place);
    MPI_File_set_view | PMPI_File_set_view(fh: Word, at: Word, etype: Word, ftype: Word, name: Word, info: Word)
        => |recorder, _| file(recorder, "MPI_File_set_view", fh);
    MPI_File_set_size | PMPI_File_set_size(fh: Word, size: Word) => |recorder, _| file(recorder, "MPI_File_set_size", fh);
    MPI_File_preallocate | PMPI_File_preallocate(fh: Word, size: Word)
        => |recorder, _| file(recorder, "MPI_File_preallocate", fh);
    MPI_File_set_info | PMPI_File_set_info(fh: Word, info: Word) => |recorder, _| file(recorder, "MPI_File_set_info", fh);
    MPI_File_set_atomicity | PMPI_File_set_atomicity(fh: Word, flag: Word)
        => |recorder, _| file(recorder, "MPI_File_set_atomicity", fh);
    MPI_File_seek_shared | PMPI_File_seek_shared(fh: Word, at: Word, whence: Word)
        => |recorder, _| file(recorder, "MPI_File_seek_shared", fh);
    MPI_File_sync | PMPI_File_sync(fh: Word) => |recorder, _| file(recorder, "MPI_File_sync", fh);
    MPI_File_read_all | PMPI_File_read_all | MPI_File_read_all_c | PMPI_File_read_all_c(fh: Word, buffer: Word, n: Word,
        dtype: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_read_all", fh);
    MPI_File_write_all | PMPI_File_write_all | MPI_File_write_all_c | PMPI_File_write_all_c(fh: Word, buffer: Word, n: Word,
        dtype: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_write_all", fh);
    MPI_File_read_at_all | PMPI_File_read_at_all | MPI_File_read_at_all_c | PMPI_File_read_at_all_c(fh: Word, at: Word,
        buffer: Word, n: Word, dtype: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_read_at_all", fh);
    MPI_File_write_at_all | PMPI_File_write_at_all | MPI_File_write_at_all_c | PMPI_File_write_at_all_c(fh: Word, at: Word,
        buffer: Word, n: Word, dtype: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_write_at_all", fh);
    MPI_File_read_ordered | PMPI_File_read_ordered | MPI_File_read_ordered_c | PMPI_File_read_ordered_c(fh: Word,
        buffer: Word, n: Word, dtype: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_read_ordered", fh);
    MPI_File_write_ordered | PMPI_File_write_ordered | MPI_File_write_ordered_c | PMPI_File_write_ordered_c(fh: Word,
        buffer: Word, n: Word, dtype: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_write_ordered", fh);
    MPI_File_read_all_begin | PMPI_File_read_all_begin | MPI_File_read_all_begin_c | PMPI_File_read_all_begin_c(fh: Word,
        buffer: Word, n: Word, dtype: Word)
        => |recorder, _| file(recorder, "MPI_File_read_all_begin", fh);
    MPI_File_read_all_end | PMPI_File_read_all_end(fh: Word, buffer: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_read_all_end", fh);
    MPI_File_write_all_begin | PMPI_File_write_all_begin | MPI_File_write_all_begin_c | PMPI_File_write_all_begin_c(
        fh: Word, buffer: Word, n: Word, dtype: Word)
        => |recorder, _| file(recorder, "MPI_File_write_all_begin", fh);
    MPI_File_write_all_end | PMPI_File_write_all_end(fh: Word, buffer: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_write_all_end", fh);
    MPI_File_read_at_all_begin | PMPI_File_read_at_all_begin | MPI_File_read_at_all_begin_c | PMPI_File_read_at_all_begin_c(
        fh: Word, at: Word, buffer: Word, n: Word, dtype: Word)
        => |recorder, _| file(recorder, "MPI_File_read_at_all_begin", fh);
    MPI_File_read_at_all_end | PMPI_File_read_at_all_end(fh: Word, buffer: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_read_at_all_end", fh);
    MPI_File_write_at_all_begin | PMPI_File_write_at_all_begin | MPI_File_write_at_all_begin_c
        | PMPI_File_write_at_all_begin_c(fh: Word, at: Word, buffer: Word, n: Word, dtype: Word)
        => |recorder, _| file(recorder, "MPI_File_write_at_all_begin", fh);
    MPI_File_write_at_all_end | PMPI_File_write_at_all_end(fh: Word, buffer: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_write_at_all_end", fh);
    MPI_File_read_ordered_begin | PMPI_File_read_ordered_begin | MPI_File_read_ordered_begin_c
        | PMPI_File_read_ordered_begin_c(fh: Word, buffer: Word, n: Word, dtype: Word)
        => |recorder, _| file(recorder, "MPI_File_read_ordered_begin", fh);
    MPI_File_read_ordered_end | PMPI_File_read_ordered_end(fh: Word, buffer: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_read_ordered_end", fh);
    MPI_File_write_ordered_begin | PMPI_File_write_ordered_begin | MPI_File_write_ordered_begin_c
        | PMPI_File_write_ordered_begin_c(fh: Word, buffer: Word, n: Word, dtype: Word)
        => |recorder, _| file(recorder, "MPI_File_write_ordered_begin", fh);
    MPI_File_write_ordered_end | PMPI_File_write_ordered_end(fh: Word, buffer: Word, status: Word)
        => |recorder, _| file(recorder, "MPI_File_write_ordered_end", fh);
    MPI_File_iread_all | PMPI_File_iread_all | MPI_File_iread_all_c | PMPI_File_iread_all_c(fh: Word, buffer: Word, n: Word,
        dtype: Word, request: Word)
        => |recorder, _| nonblocking_file(recorder, "MPI_File_iread_all", fh, request);
    MPI_File_iwrite_all | PMPI_File_iwrite_all | MPI_File_iwrite_all_c | PMPI_File_iwrite_all_c(fh: Word, buffer: Word,
        n: Word, dtype: Word, request: Word)
        => |recorder, _| nonblocking_file(recorder, "MPI_File_iwrite_all", fh, request);
    MPI_File_iread_at_all | PMPI_File_iread_at_all | MPI_File_iread_at_all_c | PMPI_File_iread_at_all_c(fh: Word, at: Word,
        buffer: Word, n: Word, dtype: Word, request: Word)
        => |recorder, _| nonblocking_file(recorder, "MPI_File_iread_at_all", fh, request);
    MPI_File_iwrite_at_all | PMPI_File_iwrite_at_all | MPI_File_iwrite_at_all_c | PMPI_File_iwrite_at_all_c(fh: Word,
        at: Word, buffer: Word, n: Word, dtype: Word, request: Word)
        => |recorder, _| nonblocking_file(recorder, "MPI_File_iwrite_at_all", fh, request);
}

fn named_call(recorder: &'static Recorder, name: &'static str) -> BlockingCall {
    blocking(recorder, [Some(named_host_call(recorder, name))])
}

fn named_call_on(recorder: &'static Recorder, name: &'static str, comm: Word) -> BlockingCall {
    blocking(recorder, [host_call_on(recorder, name, known(recorder, comm), NOBODY)])
}

// Functions whose meaning is mostly unknown. Some are recorded only because they may block. Others
// create a request for which a thread may wait later; an earlier request with that handle is
// forgotten.
hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    // These wait until the messages in the buffer have been sent.
    MPI_Buffer_detach | PMPI_Buffer_detach | MPI_Buffer_detach_c | PMPI_Buffer_detach_c(buffer: Word, size: Word)
        => |recorder, _| named_call(recorder, "MPI_Buffer_detach");
    MPI_Session_detach_buffer | PMPI_Session_detach_buffer | MPI_Session_detach_buffer_c | PMPI_Session_detach_buffer_c(
        session: Word, buffer: Word, size: Word)
        => |recorder, _| named_call(recorder, "MPI_Session_detach_buffer");
    MPI_Comm_detach_buffer | PMPI_Comm_detach_buffer | MPI_Comm_detach_buffer_c | PMPI_Comm_detach_buffer_c(comm: Word,
        buffer: Word, size: Word)
        => |recorder, _| named_call_on(recorder, "MPI_Comm_detach_buffer", comm);
    MPI_Buffer_flush | PMPI_Buffer_flush() => |recorder, _| named_call(recorder, "MPI_Buffer_flush");
    MPI_Session_flush_buffer | PMPI_Session_flush_buffer(session: Word)
        => |recorder, _| named_call(recorder, "MPI_Session_flush_buffer");
    MPI_Comm_flush_buffer | PMPI_Comm_flush_buffer(comm: Word)
        => |recorder, _| named_call_on(recorder, "MPI_Comm_flush_buffer", comm);
    // The remaining ranks agree on those that have failed. Failed ranks take no part, so the call
    // has no sequence number.
    MPIX_Comm_agree(comm: Word, flag: Word) => |recorder, _| named_call_on(recorder, "MPIX_Comm_agree", comm);

    MPI_Imrecv | PMPI_Imrecv | MPI_Imrecv_c | PMPI_Imrecv_c(buffer: Word, n: Word, dtype: Word, message: Word,
        request: Word)
        => |_, _| nonblocking(None, request, false);
    MPI_Rput | PMPI_Rput | MPI_Rput_c | PMPI_Rput_c | MPI_Rget | PMPI_Rget | MPI_Rget_c | PMPI_Rget_c(own: Word, n: Word,
        dtype: Word, peer: Word, place: Word, m: Word, other: Word, window: Word, request: Word)
        => |_, _| nonblocking(None, request, false);
    MPI_Raccumulate | PMPI_Raccumulate | MPI_Raccumulate_c | PMPI_Raccumulate_c(own: Word, n: Word, dtype: Word, peer: Word,
        place: Word, m: Word, other: Word, reduce: Word, window: Word, request: Word)
        => |_, _| nonblocking(None, request, false);
    MPI_Rget_accumulate | PMPI_Rget_accumulate | MPI_Rget_accumulate_c | PMPI_Rget_accumulate_c(own: Word, n: Word,
        dtype: Word, result: Word, k: Word, third: Word, peer: Word, place: Word, m: Word, other: Word, reduce: Word,
        window: Word, request: Word)
        => |_, _| nonblocking(None, request, false);
    MPI_File_iread | PMPI_File_iread | MPI_File_iread_c | PMPI_File_iread_c | MPI_File_iread_shared | PMPI_File_iread_shared
        | MPI_File_iread_shared_c | PMPI_File_iread_shared_c | MPI_File_iwrite | PMPI_File_iwrite | MPI_File_iwrite_c
        | PMPI_File_iwrite_c | MPI_File_iwrite_shared | PMPI_File_iwrite_shared | MPI_File_iwrite_shared_c
        | PMPI_File_iwrite_shared_c(file: Word, buffer: Word, n: Word, dtype: Word, request: Word)
        => |_, _| nonblocking(None, request, false);
    MPI_File_iread_at | PMPI_File_iread_at | MPI_File_iread_at_c | PMPI_File_iread_at_c | MPI_File_iwrite_at
        | PMPI_File_iwrite_at | MPI_File_iwrite_at_c | PMPI_File_iwrite_at_c(file: Word, at: Word, buffer: Word, n: Word,
        dtype: Word, request: Word)
        => |_, _| nonblocking(None, request, false);
    MPI_Grequest_start | PMPI_Grequest_start(query: Word, free: Word, cancel: Word, state: Word, request: Word)
        => |_, _| nonblocking(None, request, false);
    MPI_Buffer_iflush | PMPI_Buffer_iflush(request: Word) => |_, _| nonblocking(None, request, false);
    MPI_Comm_iflush_buffer | PMPI_Comm_iflush_buffer | MPI_Session_iflush_buffer | PMPI_Session_iflush_buffer(whose: Word,
        request: Word)
        => |_, _| nonblocking(None, request, false);
}
