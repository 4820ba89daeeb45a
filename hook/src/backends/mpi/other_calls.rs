//! Functions whose meaning is mostly unknown. Some are recorded only because they may block. Others
//! create a request for which a thread may wait later; an earlier request with that handle is
//! forgotten.

use crate::{
    backends::{
        host_call::Running,
        mpi::{
            communicator::known,
            operations::{ERROR, NOBODY, blocking, host_call_on},
            request::posted,
        },
    },
    interpose::hooked::hooked,
    runtime::{
        abi::Word,
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::{Recorder, host_operations::named_host_call},
    },
};

fn alone(recorder: &'static Recorder, name: &'static str) -> Running {
    blocking(recorder, [Some(named_host_call(recorder, name))])
}

fn with(recorder: &'static Recorder, name: &'static str, comm: Word) -> Running {
    blocking(recorder, [host_call_on(recorder, name, known(recorder, comm), NOBODY)])
}

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    // These wait until the messages in the buffer have been sent.
    MPI_Buffer_detach | PMPI_Buffer_detach | MPI_Buffer_detach_c | PMPI_Buffer_detach_c(buffer: Word, size: Word)
        => |recorder, _| alone(recorder, "MPI_Buffer_detach");
    MPI_Session_detach_buffer | PMPI_Session_detach_buffer | MPI_Session_detach_buffer_c | PMPI_Session_detach_buffer_c(
        session: Word, buffer: Word, size: Word)
        => |recorder, _| alone(recorder, "MPI_Session_detach_buffer");
    MPI_Comm_detach_buffer | PMPI_Comm_detach_buffer | MPI_Comm_detach_buffer_c | PMPI_Comm_detach_buffer_c(comm: Word,
        buffer: Word, size: Word)
        => |recorder, _| with(recorder, "MPI_Comm_detach_buffer", comm);
    MPI_Buffer_flush | PMPI_Buffer_flush() => |recorder, _| alone(recorder, "MPI_Buffer_flush");
    MPI_Session_flush_buffer | PMPI_Session_flush_buffer(session: Word)
        => |recorder, _| alone(recorder, "MPI_Session_flush_buffer");
    MPI_Comm_flush_buffer | PMPI_Comm_flush_buffer(comm: Word)
        => |recorder, _| with(recorder, "MPI_Comm_flush_buffer", comm);
    // The remaining ranks agree on those that have failed. Failed ranks take no part, so the call
    // has no sequence number.
    MPIX_Comm_agree(comm: Word, flag: Word) => |recorder, _| with(recorder, "MPIX_Comm_agree", comm);

    MPI_Imrecv | PMPI_Imrecv | MPI_Imrecv_c | PMPI_Imrecv_c(buffer: Word, n: Word, dtype: Word, message: Word,
        request: Word)
        => |_, _| posted(None, request, false);
    MPI_Rput | PMPI_Rput | MPI_Rput_c | PMPI_Rput_c | MPI_Rget | PMPI_Rget | MPI_Rget_c | PMPI_Rget_c(own: Word, n: Word,
        dtype: Word, peer: Word, place: Word, m: Word, other: Word, window: Word, request: Word)
        => |_, _| posted(None, request, false);
    MPI_Raccumulate | PMPI_Raccumulate | MPI_Raccumulate_c | PMPI_Raccumulate_c(own: Word, n: Word, dtype: Word, peer: Word,
        place: Word, m: Word, other: Word, reduce: Word, window: Word, request: Word)
        => |_, _| posted(None, request, false);
    MPI_Rget_accumulate | PMPI_Rget_accumulate | MPI_Rget_accumulate_c | PMPI_Rget_accumulate_c(own: Word, n: Word,
        dtype: Word, result: Word, k: Word, third: Word, peer: Word, place: Word, m: Word, other: Word, reduce: Word,
        window: Word, request: Word)
        => |_, _| posted(None, request, false);
    MPI_File_iread | PMPI_File_iread | MPI_File_iread_c | PMPI_File_iread_c | MPI_File_iread_shared | PMPI_File_iread_shared
        | MPI_File_iread_shared_c | PMPI_File_iread_shared_c | MPI_File_iwrite | PMPI_File_iwrite | MPI_File_iwrite_c
        | PMPI_File_iwrite_c | MPI_File_iwrite_shared | PMPI_File_iwrite_shared | MPI_File_iwrite_shared_c
        | PMPI_File_iwrite_shared_c(file: Word, buffer: Word, n: Word, dtype: Word, request: Word)
        => |_, _| posted(None, request, false);
    MPI_File_iread_at | PMPI_File_iread_at | MPI_File_iread_at_c | PMPI_File_iread_at_c | MPI_File_iwrite_at
        | PMPI_File_iwrite_at | MPI_File_iwrite_at_c | PMPI_File_iwrite_at_c(file: Word, at: Word, buffer: Word, n: Word,
        dtype: Word, request: Word)
        => |_, _| posted(None, request, false);
    MPI_Grequest_start | PMPI_Grequest_start(query: Word, free: Word, cancel: Word, state: Word, request: Word)
        => |_, _| posted(None, request, false);
    MPI_Buffer_iflush | PMPI_Buffer_iflush(request: Word) => |_, _| posted(None, request, false);
    MPI_Comm_iflush_buffer | PMPI_Comm_iflush_buffer | MPI_Session_iflush_buffer | PMPI_Session_iflush_buffer(whose: Word,
        request: Word)
        => |_, _| posted(None, request, false);
}
