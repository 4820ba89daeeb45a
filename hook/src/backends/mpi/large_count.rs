//! The large-count functions of MPI 4, whose counts have 64 bits. mpi4py calls them if the library
//! has them.

use xpu_timer_proto::v1::Op;

use crate::{
    backends::mpi::{
        nonblocking::{nonblocking_exchange, prepared, prepared_named, started},
        operations::{ERROR, NOBODY, Size, VARIES, blocking, collective, exchange, named_collective, sized, transfer},
        request::nonblocking,
    },
    interpose::hooked::hooked,
    runtime::{
        abi::Word,
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
    },
};

/// A count in a word.
fn count(word: Word) -> i64 {
    word as i64
}

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Bcast_c | PMPI_Bcast_c(buffer: Word, n: Word, dtype: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Broadcast, comm, root, Size(count(n), dtype));
    MPI_Reduce_c | PMPI_Reduce_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Reduce, comm, root, Size(count(n), dtype));
    MPI_Allreduce_c | PMPI_Allreduce_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllReduce, comm, NOBODY, Size(count(n), dtype));
    MPI_Allgather_c | PMPI_Allgather_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            collective(recorder, Op::AllGather, comm, NOBODY, size)
        };
    MPI_Allgatherv_c | PMPI_Allgatherv_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word,
        offsets: Word, rtype: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllGather, comm, NOBODY, VARIES);
    MPI_Gather_c | PMPI_Gather_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            collective(recorder, Op::Gather, comm, root, size)
        };
    MPI_Gatherv_c | PMPI_Gatherv_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word,
        rtype: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Gather, comm, root, VARIES);
    MPI_Scatter_c | PMPI_Scatter_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word)
        => |recorder, _| {
            let size = sized(recv, Size(count(receives), rtype), Size(count(sends), stype));
            collective(recorder, Op::Scatter, comm, root, size)
        };
    MPI_Scatterv_c | PMPI_Scatterv_c(send: Word, sends: Word, offsets: Word, stype: Word, recv: Word, receives: Word,
        rtype: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Scatter, comm, root, VARIES);
    MPI_Alltoall_c | PMPI_Alltoall_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            collective(recorder, Op::AllToAll, comm, NOBODY, size)
        };
    MPI_Alltoallv_c | PMPI_Alltoallv_c(send: Word, sends: Word, soffsets: Word, stype: Word, recv: Word,
        receives: Word, roffsets: Word, rtype: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllToAll, comm, NOBODY, VARIES);
    MPI_Alltoallw_c | PMPI_Alltoallw_c(send: Word, sends: Word, soffsets: Word, stypes: Word, recv: Word,
        receives: Word, roffsets: Word, rtypes: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllToAll, comm, NOBODY, VARIES);
    MPI_Reduce_scatter_c | PMPI_Reduce_scatter_c(send: Word, recv: Word, counts: Word, dtype: Word, reduce: Word,
        comm: Word)
        => |recorder, _| collective(recorder, Op::ReduceScatter, comm, NOBODY, VARIES);
    MPI_Reduce_scatter_block_c | PMPI_Reduce_scatter_block_c(send: Word, recv: Word, n: Word, dtype: Word,
        reduce: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::ReduceScatter, comm, NOBODY, Size(count(n), dtype));
    MPI_Scan_c | PMPI_Scan_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Scan", comm, Size(count(n), dtype))]);
    MPI_Exscan_c | PMPI_Exscan_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| blocking(recorder, [named_collective(recorder, "MPI_Exscan", comm, Size(count(n), dtype))]);
    MPI_Ibcast_c | PMPI_Ibcast_c(buffer: Word, n: Word, dtype: Word, root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Broadcast, comm, root, Size(count(n), dtype), request);
    MPI_Ireduce_c | PMPI_Ireduce_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, root: Word,
        comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Reduce, comm, root, Size(count(n), dtype), request);
    MPI_Iallreduce_c | PMPI_Iallreduce_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word,
        request: Word)
        => |recorder, _| started(recorder, Op::AllReduce, comm, NOBODY, Size(count(n), dtype), request);
    MPI_Iallgather_c | PMPI_Iallgather_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word,
        rtype: Word, comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            started(recorder, Op::AllGather, comm, NOBODY, size, request)
        };
    MPI_Ialltoall_c | PMPI_Ialltoall_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            started(recorder, Op::AllToAll, comm, NOBODY, size, request)
        };
    MPI_Igather_c | PMPI_Igather_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            started(recorder, Op::Gather, comm, root, size, request)
        };
    MPI_Iscatter_c | PMPI_Iscatter_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, request: Word)
        => |recorder, _| {
            let size = sized(recv, Size(count(receives), rtype), Size(count(sends), stype));
            started(recorder, Op::Scatter, comm, root, size, request)
        };
    MPI_Ireduce_scatter_block_c | PMPI_Ireduce_scatter_block_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word,
        comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::ReduceScatter, comm, NOBODY, Size(count(n), dtype), request);
    MPI_Iscan_c | PMPI_Iscan_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Scan", comm, Size(count(n), dtype)), request, false);
    MPI_Iexscan_c | PMPI_Iexscan_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(named_collective(recorder, "MPI_Exscan", comm, Size(count(n), dtype)), request, false);

    MPI_Send_c | PMPI_Send_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, (peer, tag), Size(count(n), dtype))]);
    MPI_Ssend_c | PMPI_Ssend_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, (peer, tag), Size(count(n), dtype))]);
    MPI_Recv_c | PMPI_Recv_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word, status: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Recv, comm, (peer, tag), VARIES)]);
    MPI_Sendrecv_c | PMPI_Sendrecv_c(send: Word, sends: Word, stype: Word, to: Word, stag: Word, recv: Word,
        receives: Word, rtype: Word, from: Word, rtag: Word, comm: Word, status: Word)
        => |recorder, _| exchange(recorder, comm, [(to, stag), (from, rtag)], Size(count(sends), stype));
    MPI_Isend_c | PMPI_Isend_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(count(n), dtype)), request, false);
    MPI_Issend_c | PMPI_Issend_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(count(n), dtype)), request, false);
    MPI_Irecv_c | PMPI_Irecv_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, false);
    MPI_Rsend_c | PMPI_Rsend_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, (peer, tag), Size(count(n), dtype))]);
    MPI_Sendrecv_replace_c | PMPI_Sendrecv_replace_c(buffer: Word, n: Word, dtype: Word, to: Word, stag: Word, from: Word,
        rtag: Word, comm: Word, status: Word)
        => |recorder, _| exchange(recorder, comm, [(to, stag), (from, rtag)], Size(count(n), dtype));
    MPI_Irsend_c | PMPI_Irsend_c | MPI_Ibsend_c | PMPI_Ibsend_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word,
        comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(count(n), dtype)), request, false);
    MPI_Isendrecv_c | PMPI_Isendrecv_c(send: Word, sends: Word, stype: Word, to: Word, stag: Word, recv: Word,
        receives: Word, rtype: Word, from: Word, rtag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking_exchange(recorder, comm, [(to, stag), (from, rtag)], Size(count(sends), stype), request);
    MPI_Isendrecv_replace_c | PMPI_Isendrecv_replace_c(buffer: Word, n: Word, dtype: Word, to: Word, stag: Word, from: Word,
        rtag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking_exchange(recorder, comm, [(to, stag), (from, rtag)], Size(count(n), dtype), request);
    MPI_Send_init_c | PMPI_Send_init_c | MPI_Ssend_init_c | PMPI_Ssend_init_c | MPI_Rsend_init_c | PMPI_Rsend_init_c
        | MPI_Bsend_init_c | PMPI_Bsend_init_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word,
        request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Send, comm, (peer, tag), Size(count(n), dtype)), request, true);
    MPI_Recv_init_c | PMPI_Recv_init_c(buffer: Word, n: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| nonblocking(transfer(recorder, Op::Recv, comm, (peer, tag), VARIES), request, true);

    MPI_Bcast_init_c | PMPI_Bcast_init_c(buffer: Word, n: Word, dtype: Word, root: Word, comm: Word, info: Word,
        request: Word)
        => |recorder, _| prepared(recorder, Op::Broadcast, comm, root, Size(count(n), dtype), request);
    MPI_Reduce_init_c | PMPI_Reduce_init_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, root: Word,
        comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::Reduce, comm, root, Size(count(n), dtype), request);
    MPI_Allreduce_init_c | PMPI_Allreduce_init_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word,
        info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::AllReduce, comm, NOBODY, Size(count(n), dtype), request);
    MPI_Allgather_init_c | PMPI_Allgather_init_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word,
        rtype: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            prepared(recorder, Op::AllGather, comm, NOBODY, size, request)
        };
    MPI_Alltoall_init_c | PMPI_Alltoall_init_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word,
        rtype: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            prepared(recorder, Op::AllToAll, comm, NOBODY, size, request)
        };
    MPI_Gather_init_c | PMPI_Gather_init_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(send, Size(count(sends), stype), Size(count(receives), rtype));
            prepared(recorder, Op::Gather, comm, root, size, request)
        };
    MPI_Scatter_init_c | PMPI_Scatter_init_c(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| {
            let size = sized(recv, Size(count(receives), rtype), Size(count(sends), stype));
            prepared(recorder, Op::Scatter, comm, root, size, request)
        };
    MPI_Reduce_scatter_block_init_c | PMPI_Reduce_scatter_block_init_c(send: Word, recv: Word, n: Word, dtype: Word,
        reduce: Word, comm: Word, info: Word, request: Word)
        => |recorder, _| prepared(recorder, Op::ReduceScatter, comm, NOBODY, Size(count(n), dtype), request);
    MPI_Scan_init_c | PMPI_Scan_init_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word, info: Word,
        request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Scan", comm, Size(count(n), dtype), request);
    MPI_Exscan_init_c | PMPI_Exscan_init_c(send: Word, recv: Word, n: Word, dtype: Word, reduce: Word, comm: Word,
        info: Word, request: Word)
        => |recorder, _| prepared_named(recorder, "MPI_Exscan", comm, Size(count(n), dtype), request);
}
