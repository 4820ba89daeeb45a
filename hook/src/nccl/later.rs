//! Functions of NCCL since 2.28, and those that RCCL and MCCL have besides: rows.
//!
//! A signal is a send of nothing to a window of the peer, with the signal's number as its tag, and waiting for signals is as many
//! receives as ranks are waited for. The signal itself waits for nobody.

use std::ffi::{c_int, c_uint};

use xpu_timer_proto::v1::Op;

use super::{
    Call, NOBODY, collective,
    collective::tagged,
    communicator::{init, together},
    group::group_simulated,
};
use crate::{
    abi::{Comm, Data, NCCL_INVALID_USAGE, Stream, UniqueId},
    hooked::hooked,
    thread_state::{IN_COLLECTIVES, IN_HOOK},
};

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Awaited {
    count: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

/// So many ranks that one call waits for are noted.
const MOST_AWAITED: usize = 64;

fn awaited<'a>(list: *const Awaited, count: c_int) -> &'a [Awaited] {
    if list.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the caller's array of `count` descriptors, valid during the call that this is used in.
    unsafe { std::slice::from_raw_parts(list, (count as usize).min(MOST_AWAITED)) }
}

/// A message whose size each rank says for itself.
fn varies(op: Op, dtype: c_int, peer: c_int) -> Call {
    Call { op, count: 0, dtype, reduce: 0, peer }
}

/// Of a type that nobody says.
const NO_TYPE: c_int = -1;

hooked! {
    library Collectives, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing NCCL_INVALID_USAGE;

    ncclAllReduceConfig(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream, config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::AllReduce, count, dtype, reduce, peer: NOBODY }, comm, stream);
    ncclBroadcastConfig(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream, config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::Broadcast, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclReduceConfig(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, root: c_int, comm: Comm, stream: Stream,
        config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::Reduce, count, dtype, reduce, peer: root }, comm, stream);
    ncclAllGatherConfig(send: Data, recv: Data, count: usize, dtype: c_int, comm: Comm, stream: Stream, config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::AllGather, count, dtype, reduce: 0, peer: NOBODY }, comm, stream);
    ncclReduceScatterConfig(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream, config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::ReduceScatter, count, dtype, reduce, peer: NOBODY }, comm, stream);
    ncclAlltoAllConfig(send: Data, recv: Data, count: usize, dtype: c_int, comm: Comm, stream: Stream, config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::AllToAll, count, dtype, reduce: 0, peer: NOBODY }, comm, stream);
    ncclGatherConfig(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream, config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::Gather, count, dtype, reduce: 0, peer: root }, comm, stream);
    ncclScatterConfig(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, stream: Stream, config: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::Scatter, count, dtype, reduce: 0, peer: root }, comm, stream);

    ncclAllReduceWithBias(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream, bias: Data)
        => |recorder, site| collective(recorder, site, Call { op: Op::AllReduce, count, dtype, reduce, peer: NOBODY }, comm, stream);
    ncclAllToAllv | mcclAllToAllv | mcclAllToAllvExt(send: Data, counts: Data, places: Data, recv: Data, receives: Data, to: Data,
        dtype: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, varies(Op::AllToAll, dtype, NOBODY), comm, stream);
    mcclAllToAlld(send: Data, counts: Data, recv: Data, receives: Data, dtype: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, varies(Op::AllToAll, dtype, NOBODY), comm, stream);
    mcclCommInitRankMulti(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int, device: c_int)
        => |recorder, site| init(recorder, site, &[&id.0], size, rank, comm);

    ncclPutSignal(from: Data, count: usize, dtype: c_int, peer: c_int, window: Data, offset: usize, signal: c_int, context: c_int,
        flags: c_uint, comm: Comm, stream: Stream)
        => |recorder, site| {
            let put = Call { op: Op::Send, count, dtype, reduce: 0, peer };
            tagged(recorder, site, [(put, Some(signal))], comm, stream)
        };
    ncclSignal(peer: c_int, signal: c_int, context: c_int, flags: c_uint, comm: Comm, stream: Stream)
        => |recorder, site| tagged(recorder, site, [(varies(Op::Send, NO_TYPE, peer), Some(signal))], comm, stream);
    ncclWaitSignal(count: c_int, list: *const Awaited, comm: Comm, stream: Stream)
        => |recorder, site| {
            let receive = |one: &Awaited| (varies(Op::Recv, NO_TYPE, one.peer), Some(one.signal));
            tagged(recorder, site, awaited(list, count).iter().filter(|one| one.count > 0).map(receive), comm, stream)
        };

    ncclGroupSimulateEnd(info: Data) => |recorder, _| group_simulated(recorder);
    ncclCommWindowRegister(comm: Comm, buffer: Data, bytes: usize, window: *mut Data, flags: c_int)
        => |recorder, site| together(recorder, site, comm);
    ncclCommWindowDeregister(comm: Comm, window: Data) => |recorder, site| together(recorder, site, comm);
    ncclDevCommCreate(comm: Comm, wanted: Data, new: Data) => |recorder, site| together(recorder, site, comm);
    ncclCommSuspend(comm: Comm, flags: c_int) => |recorder, site| together(recorder, site, comm);
    ncclCommResume(comm: Comm) => |recorder, site| together(recorder, site, comm);
}
