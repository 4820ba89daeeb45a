//! Nonblocking and persistent operations. Each start of a persistent collective is the next
//! collective of the communicator.

use xpu_timer_proto::v1::Op;

use crate::{
    backends::mpi::{
        communicator::known,
        operations::{ERROR, NOBODY, Size, VARIES, collective_without_seq, int, operation, receive_and_send, sized},
        request::{NonblockingCall, nonblocking, nonblocking_pair, restart},
    },
    interpose::hooked::hooked,
    runtime::{
        abi::Word,
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::{NewOperation, Recorder},
    },
};

pub(crate) fn started(
    recorder: &'static Recorder,
    op: Op,
    comm: Word,
    root: Word,
    size: Size,
    request: Word,
) -> NonblockingCall {
    let what = operation(recorder, op, comm, root, size);
    nonblocking(
        what.map(|what| NewOperation { function: recorder.name_key(function_name(op)), ..what }),
        request,
        false,
    )
}

/// The function that starts such a collective. The standard does not let it match a blocking one,
/// so the record distinguishes them.
fn function_name(op: Op) -> &'static str {
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

pub(crate) fn nonblocking_exchange(
    recorder: &'static Recorder,
    comm: Word,
    ends: [(Word, Word); 2],
    sends: Size,
    request: Word,
) -> NonblockingCall {
    nonblocking_pair(receive_and_send(recorder, comm, ends, sends), request)
}

/// Called before a call that creates a persistent collective.
pub(super) fn prepared(
    recorder: &'static Recorder,
    op: Op,
    comm: Word,
    root: Word,
    size: Size,
    request: Word,
) -> NonblockingCall {
    nonblocking(known(recorder, comm).map(|comm| collective_without_seq(op, comm, root, size)), request, true)
}

/// Called before a call that creates a persistent collective without an [`Op`].
pub(super) fn prepared_named(
    recorder: &'static Recorder,
    name: &'static str,
    comm: Word,
    size: Size,
    request: Word,
) -> NonblockingCall {
    let what = known(recorder, comm).map(|comm| NewOperation {
        function: recorder.name_key(name),
        ..collective_without_seq(Op::Unspecified, comm, NOBODY, size)
    });
    nonblocking(what, request, true)
}

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Barrier_init | PMPI_Barrier_init | MPIX_Barrier_init(comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::Barrier, comm, NOBODY, VARIES, request);
    MPI_Bcast_init | PMPI_Bcast_init | MPIX_Bcast_init(buffer: Word, n: Word, dtype: Word, root: Word, comm: Word,
        info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::Broadcast, comm, root, Size(int(n), dtype), request);
    MPI_Reduce_init | PMPI_Reduce_init | MPIX_Reduce_init(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word,
        root: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::Reduce, comm, root, Size(int(n), dtype), request);
    MPI_Allreduce_init | PMPI_Allreduce_init | MPIX_Allreduce_init(send: Word, recv: Word, n: Word, dtype: Word,
        reduce: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::AllReduce, comm, NOBODY, Size(int(n), dtype), request);
    MPI_Allgather_init | PMPI_Allgather_init | MPIX_Allgather_init(send: Word, sends: Word, stype: Word, recv: Word,
        receives: Word, rtype: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            prepared(recorder, Op::AllGather, comm, NOBODY, size, request)
        };
    MPI_Allgatherv_init | PMPI_Allgatherv_init | MPI_Allgatherv_init_c | PMPI_Allgatherv_init_c
        | MPIX_Allgatherv_init(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word,
        comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::AllGather, comm, NOBODY, VARIES, request);
    MPI_Gather_init | PMPI_Gather_init | MPIX_Gather_init(send: Word, sends: Word, stype: Word, recv: Word,
        receives: Word, rtype: Word, root: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            prepared(recorder, Op::Gather, comm, root, size, request)
        };
    MPI_Gatherv_init | PMPI_Gatherv_init | MPI_Gatherv_init_c | PMPI_Gatherv_init_c
        | MPIX_Gatherv_init(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word,
        root: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::Gather, comm, root, VARIES, request);
    MPI_Scatter_init | PMPI_Scatter_init | MPIX_Scatter_init(send: Word, sends: Word, stype: Word, recv: Word,
        receives: Word, rtype: Word, root: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(recv, Size(int(receives), rtype), Size(int(sends), stype));
            prepared(recorder, Op::Scatter, comm, root, size, request)
        };
    MPI_Scatterv_init | PMPI_Scatterv_init | MPI_Scatterv_init_c | PMPI_Scatterv_init_c
        | MPIX_Scatterv_init(send: Word, sends: Word, offsets: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::Scatter, comm, root, VARIES, request);
    MPI_Alltoall_init | PMPI_Alltoall_init | MPIX_Alltoall_init(send: Word, sends: Word, stype: Word, recv: Word,
        receives: Word, rtype: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            prepared(recorder, Op::AllToAll, comm, NOBODY, size, request)
        };
    MPI_Alltoallv_init | PMPI_Alltoallv_init | MPI_Alltoallv_init_c | PMPI_Alltoallv_init_c
        | MPIX_Alltoallv_init(send: Word, sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word,
        roffsets: Word, rtype: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::AllToAll, comm, NOBODY, VARIES, request);
    MPI_Alltoallw_init | PMPI_Alltoallw_init | MPI_Alltoallw_init_c | PMPI_Alltoallw_init_c
        | MPIX_Alltoallw_init(send: Word, sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word,
        roffsets: Word, rtypes: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::AllToAll, comm, NOBODY, VARIES, request);
    MPI_Reduce_scatter_init | PMPI_Reduce_scatter_init | MPI_Reduce_scatter_init_c | PMPI_Reduce_scatter_init_c
        | MPIX_Reduce_scatter_init(send: Word, recv: Word, counts: Word, dtype: Word, reduce: Word, comm: Word, info: Word,
        request: Word)
        => |recorder, _| prepared(recorder, Op::ReduceScatter, comm, NOBODY, VARIES, request);
    MPI_Reduce_scatter_block_init | PMPI_Reduce_scatter_block_init | MPIX_Reduce_scatter_block_init(send: Word,
        recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::ReduceScatter, comm, NOBODY, Size(int(n), dtype), request);
    MPI_Scan_init | PMPI_Scan_init
        | MPIX_Scan_init(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Scan", comm, Size(int(n), dtype), request);
    MPI_Exscan_init | PMPI_Exscan_init
        | MPIX_Exscan_init(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word, info: Word,
        request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Exscan", comm, Size(int(n), dtype), request);
    MPI_Neighbor_allgather_init | PMPI_Neighbor_allgather_init | MPI_Neighbor_allgather_init_c
        | PMPI_Neighbor_allgather_init_c
        | MPIX_Neighbor_allgather_init(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word, info: Word, request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Neighbor_allgather", comm, VARIES, request);
    MPI_Neighbor_allgatherv_init | PMPI_Neighbor_allgatherv_init | MPI_Neighbor_allgatherv_init_c
        | PMPI_Neighbor_allgatherv_init_c
        | MPIX_Neighbor_allgatherv_init(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word,
        rtype: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Neighbor_allgatherv", comm, VARIES, request);
    MPI_Neighbor_alltoall_init | PMPI_Neighbor_alltoall_init | MPI_Neighbor_alltoall_init_c | PMPI_Neighbor_alltoall_init_c
        | MPIX_Neighbor_alltoall_init(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word, info: Word, request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Neighbor_alltoall", comm, VARIES, request);
    MPI_Neighbor_alltoallv_init | PMPI_Neighbor_alltoallv_init | MPI_Neighbor_alltoallv_init_c
        | PMPI_Neighbor_alltoallv_init_c
        | MPIX_Neighbor_alltoallv_init(send: Word, sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word,
        roffsets: Word, rtype: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Neighbor_alltoallv", comm, VARIES, request);
    MPI_Neighbor_alltoallw_init | PMPI_Neighbor_alltoallw_init | MPI_Neighbor_alltoallw_init_c
        | PMPI_Neighbor_alltoallw_init_c
        | MPIX_Neighbor_alltoallw_init(send: Word, sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word,
        roffsets: Word, rtypes: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Neighbor_alltoallw", comm, VARIES, request);

    MPI_Start | PMPI_Start(request: Word) => |recorder, _| restart(recorder, request, 1);
    MPI_Startall | PMPI_Startall(count: Word, requests: Word)
        => |recorder, _| restart(recorder, requests, count as i32);
}
