//! Functions of NCCL since 2.28, and further functions of RCCL and MCCL.
//!
//! A signal is a send without data to a window of the peer, with the signal's number as its tag.
//! Waiting for signals is one receive for each awaited rank. Sending a signal does not wait.

use std::ffi::c_int;

use xpu_timer_proto::v1::Op;

use crate::{
    backends::{
        bracket::OpenOperation,
        nccl::{
            collective::{Call, NOBODY, collective, tagged},
            creation::{init, together},
            group::group_simulated,
            library_calls::version_number,
        },
    },
    interpose::hooked::{Site, hooked},
    runtime::{
        abi::{Comm, Data, NCCL_INVALID_USAGE, Stream, UniqueId},
        os::thread_state::{IN_COLLECTIVES, IN_HOOK},
        recorder::Recorder,
    },
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
    ncclCommSuspend(comm: Comm, flags: c_int) => |recorder, site| together(recorder, site, comm);
    ncclCommResume(comm: Comm) => |recorder, site| together(recorder, site, comm);
}
