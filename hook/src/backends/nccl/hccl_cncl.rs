//! The functions of Huawei's HCCL and Cambricon's CNCL, which differ from NCCL's.
//!
//! This uses only what their public headers guarantee. It does not use the events of their devices,
//! so their collectives count, with a sequence number, but are never pending. A straggler is found
//! when the job is idle.

use std::ffi::{c_int, c_uint};

use xpu_timer_proto::v1::Op;

use crate::{
    backends::nccl::{
        collective::{Call, NOBODY, collective},
        creation::{bytes_of_words, init, subset},
        teardown::{HandleAfter, aborted, destroyed},
    },
    interpose::hooked::hooked,
    runtime::{
        abi::{Comm, Data, Stream},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
    },
};

/// `HCCL_E_PARA`, and `CNCL_RET_ERR_INTERNAL`.
const ERROR: c_int = 1;

/// Size of `HcclRootInfo`.
const ROOT_INFO_BYTES: usize = 4108;

/// Size of the part of a `cnclCliqueId` that identifies the clique.
const CLIQUE_ID_BYTES: usize = 128;

/// A type that NCCL does not have.
const OTHER: c_int = -1;

/// NCCL's number of an HCCL data type.
fn hccl(dtype: c_int) -> c_int {
    const TYPES: [c_int; 12] = [0, OTHER, 2, 6, 7, 4, 5, 1, OTHER, 3, 8, 9];
    usize::try_from(dtype).ok().and_then(|number| TYPES.get(number).copied()).unwrap_or(OTHER)
}

/// NCCL's number of a CNCL data type.
fn cncl(dtype: c_int) -> c_int {
    match dtype {
        0x10 => 6,
        0x11 => 9,
        0x12 => 7,
        0x20 => 0,
        0x22 => 2,
        0x23 => 4,
        0x30 => 1,
        0x32 => 3,
        0x33 => 5,
        _ => OTHER,
    }
}

fn call(op: Op, count: u64, dtype: c_int, reduce: c_int, peer: c_int) -> Call {
    Call { op, count: count as usize, dtype, reduce, peer }
}

/// The first int of an array, -1 without an array.
fn first(numbers: *const c_int) -> c_int {
    // SAFETY: null, or the caller's array, which is not empty.
    unsafe { numbers.as_ref() }.map_or(NOBODY, |number| *number)
}

hooked! {
    library Collectives, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    HcclAllReduce(send: Data, recv: Data, count: u64, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::AllReduce, count, hccl(dtype), reduce, NOBODY), comm, stream);
    HcclReduce(send: Data, recv: Data, count: u64, dtype: c_int, reduce: c_int, root: c_uint, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::Reduce, count, hccl(dtype), reduce, root as c_int), comm, stream);
    HcclBroadcast(buffer: Data, count: u64, dtype: c_int, root: c_uint, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::Broadcast, count, hccl(dtype), 0, root as c_int), comm, stream);
    HcclAllGather(send: Data, recv: Data, count: u64, dtype: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::AllGather, count, hccl(dtype), 0, NOBODY), comm, stream);
    HcclReduceScatter(send: Data, recv: Data, count: u64, dtype: c_int, reduce: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::ReduceScatter, count, hccl(dtype), reduce, NOBODY), comm, stream);
    HcclScatter(send: Data, recv: Data, count: u64, dtype: c_int, root: c_uint, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::Scatter, count, hccl(dtype), 0, root as c_int), comm, stream);
    HcclAlltoAll(send: Data, count: u64, dtype: c_int, recv: Data, receives: u64, rtype: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::AllToAll, count, hccl(dtype), 0, NOBODY), comm, stream);
    // Each rank may send a different amount to each other rank.
    HcclAlltoAllV(send: Data, counts: Data, offsets: Data, dtype: c_int, recv: Data, receives: Data, places: Data,
        rtype: c_int, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::AllToAll, 0, OTHER, 0, NOBODY), comm, stream);
    HcclBarrier(comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::Barrier, 0, OTHER, 0, NOBODY), comm, stream);
    HcclSend(buffer: Data, count: u64, dtype: c_int, peer: c_uint, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::Send, count, hccl(dtype), 0, peer as c_int), comm, stream);
    HcclRecv(buffer: Data, count: u64, dtype: c_int, peer: c_uint, comm: Comm, stream: Stream)
        => |recorder, site| collective(recorder, site, call(Op::Recv, count, hccl(dtype), 0, peer as c_int), comm, stream);

    HcclCommInitRootInfo(size: c_uint, root: Data, rank: c_uint, comm: *mut Comm)
        => |recorder, site| {
            let root = bytes_of_words(root, ROOT_INFO_BYTES);
            init(recorder, site, &[root], size as c_int, rank as c_int, comm)
        };
    HcclCommInitRootInfoConfig(size: c_uint, root: Data, rank: c_uint, config: Data, comm: *mut Comm)
        => |recorder, site| {
            let root = bytes_of_words(root, ROOT_INFO_BYTES);
            init(recorder, site, &[root], size as c_int, rank as c_int, comm)
        };
    HcclCreateSubCommConfig(comm: *const Comm, size: c_uint, ranks: Data, id: u64, rank: c_uint, config: Data,
        new: *mut Comm)
        => |recorder, site| {
            let members = bytes_of_words(ranks, size as usize * size_of::<c_uint>());
            subset(recorder, site, comm, (size as c_int, rank as c_int), &[&id.to_le_bytes(), members], new)
        };
    HcclCommDestroy(comm: Comm) => |recorder, site| destroyed(recorder, site.function.text(), comm);

    cnclAllReduce(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, queue: Stream)
        => |recorder, site| collective(recorder, site, call(Op::AllReduce, count as u64, cncl(dtype), reduce, NOBODY), comm, queue);
    cnclReduceScatter(send: Data, recv: Data, count: usize, dtype: c_int, reduce: c_int, comm: Comm, queue: Stream)
        => |recorder, site| collective(recorder, site, call(Op::ReduceScatter, count as u64, cncl(dtype), reduce, NOBODY), comm, queue);
    cnclBroadcast(send: Data, recv: Data, count: usize, dtype: c_int, root: c_int, comm: Comm, queue: Stream)
        => |recorder, site| collective(recorder, site, call(Op::Broadcast, count as u64, cncl(dtype), 0, root), comm, queue);
    // A call with several communicators belongs to one process. Only the first one is recorded.
    cnclInitComms(comms: *mut Comm, count: c_int, devices: *const c_int, ranks: *const c_int, size: c_int, clique: Data)
        => |recorder, site| {
            let clique = bytes_of_words(clique, CLIQUE_ID_BYTES);
            init(recorder, site, &[clique], size, first(ranks), comms)
        };
    cnclFreeComm(comm: Comm) => |recorder, site| destroyed(recorder, site.function.text(), comm);
    cnclAbortComm(comm: Comm) => |recorder, site| aborted(recorder, site.function.text(), comm, HandleAfter::Invalid);
}
