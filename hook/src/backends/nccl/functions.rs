//! The functions of NCCL, reached by interposition and through dlsym.

use std::ffi::c_int;

use xpu_timer_proto::v1::Op;

use crate::{
    backends::nccl::{
        async_error::async_error,
        collective::{Call, NOBODY, collective},
        creation::{self, grow, init, init_all, shrink, split},
        group::{group_end, group_start},
        teardown::{HandleAfter, aborted, destroyed, finalized},
    },
    interpose::hooked::hooked,
    runtime::{
        abi::{Comm, Data, NCCL_INVALID_USAGE, Stream, UniqueId},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
    },
};

hooked! {
    library Collectives, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing NCCL_INVALID_USAGE;

    ncclAllReduce | mcclAllReduce | mcclAllReduceExt(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::AllReduce, count, dtype, reduce, peer: NOBODY }, comm, stream);
    ncclReduce | mcclReduce(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, root: c_int, comm: Comm,
        stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::Reduce, count, dtype, reduce, peer: root }, comm, stream);
    ncclBroadcast | mcclBroadcast(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::Broadcast, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclBcast | mcclBcast(buffer: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::Broadcast, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclAllGather | mcclAllGather | mcclAllGatherExt(send: Data, recv: Data, count: usize, dtype: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::AllGather, count, dtype, reduce: 0, peer: NOBODY }, comm, stream);
    ncclReduceScatter | mcclReduceScatter | mcclReduceScatterExt(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::ReduceScatter, count, dtype, reduce, peer: NOBODY }, comm, stream);
    ncclAlltoAll | ncclAllToAll | mcclAlltoAll | mcclAllToAll | mcclAllToAllExt(send: Data, recv: Data, count: usize, dtype: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::AllToAll, count, dtype, reduce: 0, peer: NOBODY }, comm, stream);
    ncclGather | mcclGather(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::Gather, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclScatter | mcclScatter(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::Scatter, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclSend | mcclSend | mcclSendExt(buffer: Data, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::Send, count, dtype, reduce: 0, peer }, comm, stream);
    ncclRecv | mcclRecv | mcclRecvExt(buffer: Data, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, Call { op: Op::Recv, count, dtype, reduce: 0, peer }, comm, stream);

    ncclGroupStart | mcclGroupStart() => |recorder, _| group_start(recorder);
    ncclGroupEnd | mcclGroupEnd() => group_end;

    ncclCommInitRank | mcclCommInitRank(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int)
        => |recorder, site| init(recorder, site, &[&id.0], size, rank, comm);
    ncclCommInitRankConfig | mcclCommInitRankConfig(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int, config: Data)
        => |recorder, site| init(recorder, site, &[&id.0], size, rank, comm);
    ncclCommInitRankScalable | mcclCommInitRankScalable(comm: *mut Comm, size: c_int, rank: c_int, ids: c_int, id: *const UniqueId, config: Data)
        => |recorder, site| {
            let id = creation::bytes_of(id, ids);
            init(recorder, site, &[id], size, rank, comm)
        };
    ncclCommInitAll | mcclCommInitAll(comms: *mut Comm, devices: c_int, list: *const c_int)
        => |recorder, site| init_all(recorder, site, comms, devices);
    ncclCommSplit | mcclCommSplit(comm: Comm, color: c_int, key: c_int, new: *mut Comm, config: Data)
        => |recorder, site| split(recorder, site, comm, color, new);
    ncclCommShrink | mcclCommShrink(comm: Comm, excluded: *mut c_int, count: c_int, new: *mut Comm, config: Data, flags: c_int)
        => |recorder, site| shrink(recorder, site, comm, creation::ints_of(excluded, count), new);
    ncclCommGrow | mcclCommGrow(comm: Comm, size: c_int, id: *const UniqueId, rank: c_int, new: *mut Comm, config: Data)
        => |recorder, site| grow(recorder, site, (comm, size), (creation::bytes_of(id, 1), rank), new);
    ncclCommFinalize | mcclCommFinalize(comm: Comm) => |recorder, site| finalized(recorder, site.function.text(), comm);
    ncclCommDestroy | mcclCommDestroy(comm: Comm) => |recorder, site| destroyed(recorder, site.function.text(), comm);
    ncclCommAbort | mcclCommAbort(comm: Comm) => |recorder, site| aborted(recorder, site.function.text(), comm, HandleAfter::Invalid);
    ncclCommRevoke | mcclCommRevoke(comm: Comm, flags: c_int) => |recorder, site| aborted(recorder, site.function.text(), comm, HandleAfter::Valid);
    ncclCommGetAsyncError | mcclCommGetAsyncError(comm: Comm, error: *mut c_int) => |_, site| async_error(site, comm, error);
}
