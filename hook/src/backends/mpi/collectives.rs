//! Initialization, finalization, and the blocking and nonblocking collectives.

use xpu_timer_proto::v1::Op;

use crate::{
    backends::{
        host_call::BlockingCall,
        mpi::{
            communicator::init_call,
            library::library,
            nonblocking::started,
            operations::{ERROR, NOBODY, Size, VARIES, blocking, collective, int, named_collective, operation, sized},
            request::nonblocking,
        },
    },
    interpose::hooked::hooked,
    runtime::{
        abi::Word,
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::{NewOperation, Recorder},
    },
};

/// MPI_Finalize is recorded as a barrier of all ranks.
fn finalizing(recorder: &'static Recorder) -> BlockingCall {
    let Some(world) = library().map(|library| library.abi.world as Word) else { return BlockingCall::new(recorder) };
    let what = operation(recorder, Op::Barrier, world, NOBODY, VARIES);
    blocking(recorder, [what.map(|what| NewOperation { function: recorder.name_key("MPI_Finalize"), ..what })])
}

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Init | PMPI_Init(argc: Word, argv: Word) => |recorder, _| init_call(recorder, "MPI_Init");
    MPI_Init_thread | PMPI_Init_thread(argc: Word, argv: Word, wanted: Word, given: Word)
        => |recorder, _| init_call(recorder, "MPI_Init_thread");
    MPI_Finalize | PMPI_Finalize() => |recorder, _| finalizing(recorder);

    MPI_Barrier | PMPI_Barrier(comm: Word) => |recorder, _| collective(recorder, Op::Barrier, comm, NOBODY, VARIES);
    MPI_Bcast | PMPI_Bcast(buffer: Word, count: Word, dtype: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Broadcast, comm, root, Size(int(count), dtype));
    MPI_Reduce | PMPI_Reduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Reduce, comm, root, Size(int(count), dtype));
    MPI_Allreduce | PMPI_Allreduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllReduce, comm, NOBODY, Size(int(count), dtype));
    MPI_Allgather | PMPI_Allgather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            collective(recorder, Op::AllGather, comm, NOBODY, size)
        };
    MPI_Allgatherv | PMPI_Allgatherv(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word,
        rtype: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllGather, comm, NOBODY, VARIES);
    MPI_Gather | PMPI_Gather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            collective(recorder, Op::Gather, comm, root, size)
        };
    MPI_Gatherv | PMPI_Gatherv(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word,
        rtype: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Gather, comm, root, VARIES);
    MPI_Scatter | PMPI_Scatter(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word)
        => |recorder, _| {
            let size = sized(recv, Size(int(receives), rtype), Size(int(sends), stype));
            collective(recorder, Op::Scatter, comm, root, size)
        };
    MPI_Scatterv | PMPI_Scatterv(send: Word, sends: Word, offsets: Word, stype: Word, recv: Word, receives: Word,
        rtype: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Scatter, comm, root, VARIES);
    MPI_Alltoall | PMPI_Alltoall(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            collective(recorder, Op::AllToAll, comm, NOBODY, size)
        };
    MPI_Alltoallv | PMPI_Alltoallv(send: Word, sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word,
        roffsets: Word, rtype: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllToAll, comm, NOBODY, VARIES);
    MPI_Alltoallw | PMPI_Alltoallw(send: Word, sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word,
        roffsets: Word, rtypes: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllToAll, comm, NOBODY, VARIES);
    MPI_Reduce_scatter | PMPI_Reduce_scatter(send: Word, recv: Word, counts: Word, dtype: Word, reduce: Word,
        comm: Word)
        => |recorder, _| collective(recorder, Op::ReduceScatter, comm, NOBODY, VARIES);
    MPI_Reduce_scatter_block | PMPI_Reduce_scatter_block(send: Word, recv: Word, count: Word, dtype: Word,
        reduce: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::ReduceScatter, comm, NOBODY, Size(int(count), dtype));
    MPI_Scan | PMPI_Scan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Scan", comm, Size(int(count), dtype))]);
    MPI_Exscan | PMPI_Exscan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Exscan", comm, Size(int(count), dtype))]);

    MPI_Ibarrier | PMPI_Ibarrier(comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Barrier, comm, NOBODY, VARIES, request);
    MPI_Ibcast | PMPI_Ibcast(buffer: Word, count: Word, dtype: Word, root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Broadcast, comm, root, Size(int(count), dtype), request);
    MPI_Ireduce | PMPI_Ireduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, root: Word,
        comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Reduce, comm, root, Size(int(count), dtype), request);
    MPI_Iallreduce | PMPI_Iallreduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word,
        request: Word)
        => |recorder, _| started(recorder, Op::AllReduce, comm, NOBODY, Size(int(count), dtype), request);
    MPI_Iallgather | PMPI_Iallgather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            started(recorder, Op::AllGather, comm, NOBODY, size, request)
        };
    MPI_Iallgatherv | PMPI_Iallgatherv | MPI_Iallgatherv_c | PMPI_Iallgatherv_c(send: Word, sends: Word, stype: Word,
        recv: Word, receives: Word, offsets: Word, rtype: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::AllGather, comm, NOBODY, VARIES, request);
    MPI_Igather | PMPI_Igather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            started(recorder, Op::Gather, comm, root, size, request)
        };
    MPI_Igatherv | PMPI_Igatherv | MPI_Igatherv_c | PMPI_Igatherv_c(send: Word, sends: Word, stype: Word, recv: Word,
        receives: Word, offsets: Word, rtype: Word, root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Gather, comm, root, VARIES, request);
    MPI_Iscatter | PMPI_Iscatter(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(recv, Size(int(receives), rtype), Size(int(sends), stype));
            started(recorder, Op::Scatter, comm, root, size, request)
        };
    MPI_Iscatterv | PMPI_Iscatterv | MPI_Iscatterv_c | PMPI_Iscatterv_c(send: Word, sends: Word, offsets: Word, stype: Word,
        recv: Word, receives: Word, rtype: Word, root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Scatter, comm, root, VARIES, request);
    MPI_Ialltoall | PMPI_Ialltoall(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            started(recorder, Op::AllToAll, comm, NOBODY, size, request)
        };
    MPI_Ialltoallv | PMPI_Ialltoallv | MPI_Ialltoallv_c | PMPI_Ialltoallv_c(send: Word, sends: Word, soffsets: Word,
        stype: Word, recv: Word, receives: Word, roffsets: Word, rtype: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::AllToAll, comm, NOBODY, VARIES, request);
    MPI_Ialltoallw | PMPI_Ialltoallw | MPI_Ialltoallw_c | PMPI_Ialltoallw_c(send: Word, sends: Word, soffsets: Word,
        stypes: Word, recv: Word, receives: Word, roffsets: Word, rtypes: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::AllToAll, comm, NOBODY, VARIES, request);
    MPI_Ireduce_scatter | PMPI_Ireduce_scatter | MPI_Ireduce_scatter_c | PMPI_Ireduce_scatter_c(send: Word, recv: Word,
        counts: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::ReduceScatter, comm, NOBODY, VARIES, request);
    MPI_Ireduce_scatter_block | PMPI_Ireduce_scatter_block(send: Word, recv: Word, count: Word, dtype: Word,
        reduce: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::ReduceScatter, comm, NOBODY, Size(int(count), dtype), request);
    MPI_Iscan | PMPI_Iscan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Scan", comm, Size(int(count), dtype)), request, false);
    MPI_Iexscan | PMPI_Iexscan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Exscan", comm, Size(int(count), dtype)), request, false);

    MPI_Neighbor_allgather | PMPI_Neighbor_allgather | MPI_Neighbor_allgather_c | PMPI_Neighbor_allgather_c(send: Word,
        sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Neighbor_allgather", comm, VARIES)]);
    MPI_Neighbor_allgatherv | PMPI_Neighbor_allgatherv | MPI_Neighbor_allgatherv_c | PMPI_Neighbor_allgatherv_c(send: Word,
        sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Neighbor_allgatherv", comm, VARIES)]);
    MPI_Neighbor_alltoall | PMPI_Neighbor_alltoall | MPI_Neighbor_alltoall_c | PMPI_Neighbor_alltoall_c(send: Word,
        sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Neighbor_alltoall", comm, VARIES)]);
    MPI_Neighbor_alltoallv | PMPI_Neighbor_alltoallv | MPI_Neighbor_alltoallv_c | PMPI_Neighbor_alltoallv_c(send: Word,
        sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word, roffsets: Word, rtype: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Neighbor_alltoallv", comm, VARIES)]);
    MPI_Neighbor_alltoallw | PMPI_Neighbor_alltoallw | MPI_Neighbor_alltoallw_c | PMPI_Neighbor_alltoallw_c(send: Word,
        sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word, roffsets: Word, rtypes: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Neighbor_alltoallw", comm, VARIES)]);
    MPI_Ineighbor_allgather | PMPI_Ineighbor_allgather | MPI_Ineighbor_allgather_c | PMPI_Ineighbor_allgather_c(send: Word,
        sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Neighbor_allgather", comm, VARIES), request, false);
    MPI_Ineighbor_allgatherv | PMPI_Ineighbor_allgatherv | MPI_Ineighbor_allgatherv_c | PMPI_Ineighbor_allgatherv_c(
        send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Neighbor_allgatherv", comm, VARIES), request, false);
    MPI_Ineighbor_alltoall | PMPI_Ineighbor_alltoall | MPI_Ineighbor_alltoall_c | PMPI_Ineighbor_alltoall_c(send: Word,
        sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Neighbor_alltoall", comm, VARIES), request, false);
    MPI_Ineighbor_alltoallv | PMPI_Ineighbor_alltoallv | MPI_Ineighbor_alltoallv_c | PMPI_Ineighbor_alltoallv_c(send: Word,
        sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word, roffsets: Word, rtype: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Neighbor_alltoallv", comm, VARIES), request, false);
    MPI_Ineighbor_alltoallw | PMPI_Ineighbor_alltoallw | MPI_Ineighbor_alltoallw_c | PMPI_Ineighbor_alltoallw_c(send: Word,
        sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word, roffsets: Word, rtypes: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Neighbor_alltoallw", comm, VARIES), request, false);
}
