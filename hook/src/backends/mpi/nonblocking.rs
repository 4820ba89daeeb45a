//! Nonblocking and persistent operations.

use xpu_timer_proto::v1::Op;

use crate::{
    backends::mpi::{
        communicator::known,
        operations::{NOBODY, Size, collective_without_seq, operation, receive_and_send},
        request::{Posted, posted, posted_both},
    },
    runtime::{
        abi::Word,
        recorder::{NewOperation, Recorder},
    },
};

pub fn started(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size, request: Word) -> Posted {
    let what = operation(recorder, op, comm, root, size);
    posted(what.map(|what| NewOperation { function: recorder.name_key(nonblocking(op)), ..what }), request, false)
}

/// The function that starts such a collective. The standard does not let it match a blocking one,
/// so the record distinguishes them.
fn nonblocking(op: Op) -> &'static str {
    match op {
        Op::Barrier => "MPI_Ibarrier",
        Op::Broadcast => "MPI_Ibcast",
        Op::Reduce => "MPI_Ireduce",
        Op::AllReduce => "MPI_Iallreduce",
        Op::AllGather => "MPI_Iallgather",
        Op::Gather => "MPI_Igather",
        Op::Scatter => "MPI_Iscatter",
        Op::AllToAll => "MPI_Ialltoall",
        Op::ReduceScatter => "MPI_Ireduce_scatter",
        _ => "a nonblocking collective",
    }
}

pub fn exchange_posted(
    recorder: &'static Recorder,
    comm: Word,
    ends: [(Word, Word); 2],
    sends: Size,
    request: Word,
) -> Posted {
    posted_both(receive_and_send(recorder, comm, ends, sends), request)
}

/// Called before a call that creates a persistent collective.
pub(super) fn prepared(
    recorder: &'static Recorder,
    op: Op,
    comm: Word,
    root: Word,
    size: Size,
    request: Word,
) -> Posted {
    posted(known(recorder, comm).map(|comm| collective_without_seq(op, comm, root, size)), request, true)
}

/// Called before a call that creates a persistent collective without an [`Op`].
pub(super) fn prepared_named(
    recorder: &'static Recorder,
    name: &'static str,
    comm: Word,
    size: Size,
    request: Word,
) -> Posted {
    let what = known(recorder, comm).map(|comm| NewOperation {
        function: recorder.name_key(name),
        ..collective_without_seq(Op::Unspecified, comm, NOBODY, size)
    });
    posted(what, request, true)
}
