//! The functions of NCCL, RCCL, MCCL, HCCL and CNCL, reached by interposition and through dlsym.
//!
//! A signal (NCCL since 2.28) is a send without data to a window of the peer, with the signal's
//! number as its tag. Waiting for signals is one receive for each awaited rank. Sending a signal
//! does not wait.
//!
//! Huawei's HCCL and Cambricon's CNCL differ from NCCL. For them, only what their public headers
//! guarantee is used, not the events of their devices. So their collectives count, with a sequence
//! number, but are never pending. A straggler is found when the job is idle.

use std::ffi::{c_int, c_uint};

use xpu_timer_proto::v1::Op;

use crate::{
    backends::{
        bracket::OpenOperation,
        nccl::{
            collective::{Call, NOBODY, collective, tagged},
            communicator::{HandleAfter, aborted, alone, destroyed, finalized, version_number},
            creation::{self, async_error, bytes_of_words, grow, init, init_all, shrink, split, subset, together},
            group::{group_end, group_simulated, group_start},
        },
    },
    interpose::hooked::{Site, hooked},
    runtime::{
        abi::{Comm, Data, NCCL_INVALID_USAGE, Stream, UniqueId},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::Recorder,
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

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Awaited {
    count: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

/// Maximum number of awaited ranks per call that are recorded.
const MAX_AWAITED: usize = 64;

fn awaited<'a>(list: Word, count: c_int) -> &'a [Awaited] {
    let list = list as *const Awaited;
    if list.is_null() || count <= 0 {
        return &[];
    }
    // SAFETY: the caller's array of `count` descriptors, which is valid during the call.
    unsafe { std::slice::from_raw_parts(list, (count as usize).min(MAX_AWAITED)) }
}

/// A message whose size may differ between ranks.
fn varies(op: Op, dtype: c_int, peer: c_int) -> Call {
    Call { op, count: 0, dtype, reduce: 0, peer }
}

/// Without a data type.
const NO_TYPE: c_int = -1;

/// An argument of a function whose signature has changed. The full register or stack slot is passed
/// on unchanged. The rows have as many arguments as the longest known form; for a shorter form, the
/// additional words belong to the caller's stack.
type Word = usize;

/// The first version of NCCL with signals in this form. Builds of older versions have functions
/// with these names and other arguments.
const FIRST_WITH_SIGNALS: c_int = 22900;

/// Signals, if the library has them in this form and the communicator is known. Otherwise the word
/// may not be a communicator, so it is not used.
fn signals<C: IntoIterator<Item = (Call, Option<c_int>)>>(
    recorder: &'static Recorder,
    site: Site,
    (comm, stream): (Word, Word),
    calls: impl FnOnce() -> C,
) -> Option<OpenOperation> {
    let version = version_number(site.companion(0, &[c"ncclGetVersion"])?)?;
    if version < FIRST_WITH_SIGNALS {
        return None;
    }
    let comm = recorder.comms.find(comm)?;
    tagged(recorder, calls(), Some(comm), stream as Stream)
}

// Functions of NCCL since 2.28, and further functions of RCCL and MCCL.
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

    ncclPutSignal(from: Word, count: Word, dtype: Word, peer: Word, window: Word, offset: Word, signal: Word, context: Word,
        flags: Word, comm: Word, stream: Word)
        => |recorder, site| {
            let put = Call { op: Op::Send, count, dtype: dtype as c_int, reduce: 0, peer: peer as c_int };
            signals(recorder, site, (comm, stream), || [(put, Some(signal as c_int))])
        };
    ncclSignal(peer: Word, signal: Word, context: Word, flags: Word, comm: Word, stream: Word, further: Word)
        => |recorder, site| {
            let empty = varies(Op::Send, NO_TYPE, peer as c_int);
            signals(recorder, site, (comm, stream), || [(empty, Some(signal as c_int))])
        };
    ncclWaitSignal(count: Word, list: Word, comm: Word, stream: Word, fifth: Word, sixth: Word, seventh: Word)
        => |recorder, site| {
            let receive = |one: &Awaited| (varies(Op::Recv, NO_TYPE, one.peer), Some(one.signal));
            signals(recorder, site, (comm, stream), || {
                awaited(list, count as c_int).iter().filter(|one| one.count > 0).map(receive)
            })
        };

    ncclGroupSimulateEnd(info: Data) => group_simulated;
    ncclCommWindowRegister(comm: Comm, buffer: Data, bytes: usize, window: *mut Data, flags: c_int)
        => |recorder, site| together(recorder, site, comm);
    ncclCommWindowDeregister(comm: Comm, window: Data) => |recorder, site| together(recorder, site, comm);
    ncclDevCommCreate(comm: Comm, wanted: Data, new: Data) => |recorder, site| together(recorder, site, comm);
    ncclCommRegister | mcclCommRegister(comm: Comm, buffer: Data, bytes: usize, handle: *mut Data)
        => alone;
    ncclCommDeregister | mcclCommDeregister(comm: Comm, handle: Data) => alone;
    ncclMemAlloc | mcclMemAlloc(address: *mut Data, bytes: usize) => alone;
    ncclMemFree | mcclMemFree(address: Data) => alone;
    ncclCommSuspend(comm: Comm, flags: c_int) => |recorder, site| together(recorder, site, comm);
    ncclCommResume(comm: Comm) => |recorder, site| together(recorder, site, comm);
}

/// `HCCL_E_PARA`, and `CNCL_RET_ERR_INTERNAL`.
const HCCL_CNCL_ERROR: c_int = 1;

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

// The functions of HCCL and CNCL.
hooked! {
    library Collectives, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing HCCL_CNCL_ERROR;

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
