//! Layer A: the host API of NCCL, by interposition and through dlsym. A function is a row; what it means is in the modules below.

mod collective;
mod communicator;
mod group;

use std::ffi::c_int;

use xpu_timer_proto::v1::Op;

use crate::{
    abi::{Comm, Data, NCCL_INVALID_USAGE, Stream, UniqueId},
    hooked::hooked,
    thread_state::{IN_COLLECTIVES, IN_HOOK},
};
use collective::{Call, collective};
use communicator::{Made, aborted, async_error, destroyed, finalized, init, init_all, shrink, split};
use group::{group_end, group_start};

/// No root and no peer.
const NOBODY: c_int = -1;

hooked! {
    library Collectives, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing NCCL_INVALID_USAGE;

    ncclAllReduce(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::AllReduce, count, dtype, reduce, peer: NOBODY }, comm, stream);
    ncclReduce(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, root: c_int, comm: Comm,
        stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::Reduce, count, dtype, reduce, peer: root }, comm, stream);
    ncclBroadcast(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::Broadcast, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclBcast(buffer: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::Broadcast, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclAllGather(send: Data, recv: Data, count: usize, dtype: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::AllGather, count, dtype, reduce: 0, peer: NOBODY }, comm, stream);
    ncclReduceScatter(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::ReduceScatter, count, dtype, reduce, peer: NOBODY }, comm, stream);
    ncclAlltoAll(send: Data, recv: Data, count: usize, dtype: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::AllToAll, count, dtype, reduce: 0, peer: NOBODY }, comm, stream);
    ncclGather(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::Gather, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclScatter(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::Scatter, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclSend(buffer: Data, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::Send, count, dtype, reduce: 0, peer }, comm, stream);
    ncclRecv(buffer: Data, count: usize, dtype: c_int, peer: c_int, comm: Comm, stream: Stream)
        => |recorder, _| collective(recorder, Call { op: Op::Recv, count, dtype, reduce: 0, peer }, comm, stream);

    ncclGroupStart() => |recorder, _| group_start(recorder);
    ncclGroupEnd() => |recorder, _| group_end(recorder);

    ncclCommInitRank(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int)
        => |recorder, _| init(recorder, "ncclCommInitRank", &[&id.0], size, rank, comm);
    ncclCommInitRankConfig(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int, config: Data)
        => |recorder, _| init(recorder, "ncclCommInitRankConfig", &[&id.0], size, rank, comm);
    ncclCommInitRankScalable(comm: *mut Comm, size: c_int, rank: c_int, ids: c_int, id: *const UniqueId, config: Data)
        => |recorder, _| {
            let id = communicator::bytes_of(id, ids);
            init(recorder, "ncclCommInitRankScalable", &[id], size, rank, comm)
        };
    ncclCommInitAll(comms: *mut Comm, devices: c_int, list: *const c_int)
        => |recorder, _| init_all(recorder, comms, devices);
    ncclCommSplit(comm: Comm, color: c_int, key: c_int, new: *mut Comm, config: Data)
        => |recorder, _| split(recorder, comm, color, new);
    ncclCommShrink(comm: Comm, excluded: *mut c_int, count: c_int, new: *mut Comm, config: Data, flags: c_int)
        => |recorder, _| shrink(recorder, comm, communicator::ints_of(excluded, count), new);
    ncclCommFinalize(comm: Comm) => |recorder, _| finalized(recorder, comm);
    ncclCommDestroy(comm: Comm) => |recorder, _| destroyed(recorder, comm);
    ncclCommAbort(comm: Comm) => |recorder, _| aborted(recorder, comm, Made::Gone);
    ncclCommRevoke(comm: Comm, flags: c_int) => |recorder, _| aborted(recorder, comm, Made::Kept);
    ncclCommGetAsyncError(comm: Comm, error: *mut c_int) => |_, _| async_error(comm, error);
}
