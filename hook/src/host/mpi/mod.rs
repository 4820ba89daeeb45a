//! The MPI of the process, Open MPI, MPICH or one with the standard interface of MPI 5, by interposition of its functions and through dlsym. A function is a row.
//!
//! Each has two names: C programs call `MPI_`, and so does the Fortran of MPICH; the Fortran of Open MPI, and tools that stand between,
//! call `PMPI_`. A call inside a hooked call is not seen again. What is not seen: `MPI_Put` and its kin, whose ends are seen;
//! reading a file alone; and MPI linked statically. A form of MPI 4 whose name ends with `_c` stands beside the other one where nothing
//! that it counts is read, else in [`large`].
//! Arguments are words: all of them travel in integer registers or in stack slots of eight bytes, and go
//! on as they came, so that no type of either interface is needed.

mod communicator;
pub mod creation;
mod duplicates;
pub mod large;
mod library;
pub mod others;
pub mod persistent;
pub mod polling;
mod request;
pub mod transfers;
pub mod windows;

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::{comm, header},
    v1::{Op, OpKind},
};

use crate::{
    hooked::hooked,
    host::open::{Running, named},
    recorder::{Begin, Recorder},
    thread_state::{IN_COLLECTIVES, IN_HOOK},
};
use communicator::{known, starting};
use library::{in_place, library};
use request::{Posted, posted, posted_both};

/// An argument as it travels.
type Word = usize;

/// `MPI_ERR_OTHER` of MPICH, for a call whose original is not there; in Open MPI it is a code nearby, and an error too.
const ERROR: c_int = 15;
/// No root and no peer.
const NOBODY: Word = -1i32 as u32 as Word;

/// A C `int` in a word.
fn int(word: Word) -> i64 {
    i64::from(word as i32)
}

/// Elements and their type, as a call has them.
#[derive(Clone, Copy)]
struct Size(i64, Word);

/// Ranks may rightly differ in it.
const VARIES: Size = Size(0, 0);

/// What a call says of the size of its operation: what it sends, or what it receives when it sends in place.
fn sized(send: Word, sends: Size, receives: Size) -> Size {
    if in_place(send) { receives } else { sends }
}

/// A collective. `None` when there is nobody to wait for.
fn operation(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size) -> Option<Begin> {
    let comm = known(recorder, comm)?;
    Some(Begin { seq: next(recorder, comm.index), ..described(op, comm, root, size) })
}

/// The number of a collective that begins.
fn next(recorder: &'static Recorder, comm: usize) -> u64 {
    recorder.count(header::COLLECTIVES);
    recorder.comm_word(comm, comm::LAUNCHED).fetch_add(1, Ordering::Relaxed) + 1
}

/// A collective without its number. Between two groups each has a root and sizes of its own.
fn described(op: Op, comm: communicator::Known, root: Word, size: Size) -> Begin {
    match comm.is_inter() {
        true => begin(op, comm, 0, NOBODY, VARIES),
        false => begin(op, comm, 0, root, size),
    }
}

fn begin(op: Op, comm: communicator::Known, seq: u64, peer: Word, Size(count, dtype): Size) -> Begin {
    let (count, dtype) = match (dtype, library()) {
        (0, _) | (_, None) => Default::default(),
        (dtype, Some(library)) => library.shape(count, dtype),
    };
    Begin {
        comm: Some(comm.index),
        communicator: comm.id,
        seq,
        count,
        dtype,
        peer: peer as i32,
        ..Begin::new(OpKind::Collective, op)
    }
}

/// A send to, or a receive from, a peer by a tag. `None` for one with nobody. A receive takes what comes, up to its size,
/// which is not noted.
fn transfer(recorder: &'static Recorder, op: Op, comm: Word, (peer, tag): (Word, Word), size: Size) -> Option<Begin> {
    let abi = library()?.abi;
    if peer as i32 == abi.proc_null {
        return None;
    }
    let comm = known(recorder, comm)?;
    let seq = recorder.comm_word(comm.index, comm::POINT_TO_POINT).fetch_add(1, Ordering::Relaxed) + 1;
    let peer = if peer as i32 == abi.any_source { NOBODY } else { comm.peer(peer) };
    // As most interfaces have it, -1 is any tag.
    let tag = if tag as i32 == abi.any_tag { -1 } else { tag as i32 };
    Some(Begin { tag: Some(tag), ..begin(op, comm, seq, peer, size) })
}

/// Before a blocking call that runs these operations.
fn blocking<const N: usize>(recorder: &'static Recorder, operations: [Option<Begin>; N]) -> Running {
    polling::interrupt(recorder);
    operations.iter().flatten().fold(Running::new(recorder), |running, what| running.with(what))
}

fn collective(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size) -> Running {
    blocking(recorder, [operation(recorder, op, comm, root, size)])
}

/// A collective for which there is no [`Op`]; its name tells.
fn named_collective(recorder: &'static Recorder, name: &'static str, comm: Word, size: Size) -> Option<Begin> {
    let what = operation(recorder, Op::Unspecified, comm, NOBODY, size)?;
    Some(Begin { function: recorder.name_key(name), ..what })
}

fn started(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size, request: Word) -> Posted {
    let what = operation(recorder, op, comm, root, size);
    posted(what.map(|what| Begin { function: recorder.name_key(nonblocking(op)), ..what }), request, false)
}

/// The function that starts such a collective. The standard does not let it match a blocking one, so the record tells them apart.
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

/// The receive leads: small messages are sent without the peer, so it is what such a call mostly waits for.
fn both_ways(
    recorder: &'static Recorder,
    comm: Word,
    [to, from]: [(Word, Word); 2],
    sends: Size,
) -> [Option<Begin>; 2] {
    let send = transfer(recorder, Op::Send, comm, to, sends);
    [transfer(recorder, Op::Recv, comm, from, VARIES), send]
}

fn exchange(recorder: &'static Recorder, comm: Word, ends: [(Word, Word); 2], sends: Size) -> Running {
    blocking(recorder, both_ways(recorder, comm, ends, sends))
}

fn exchange_posted(
    recorder: &'static Recorder,
    comm: Word,
    ends: [(Word, Word); 2],
    sends: Size,
    request: Word,
) -> Posted {
    posted_both(both_ways(recorder, comm, ends, sends), request)
}

/// A call that waits for `peer` in a communicator or a window, or for those of its members that only the call knows.
fn among(
    recorder: &'static Recorder,
    name: &'static str,
    object: Option<communicator::Known>,
    peer: Word,
) -> Option<Begin> {
    object.map(|object| Begin {
        comm: Some(object.index),
        communicator: object.id,
        peer: peer as i32,
        ..named(recorder, name)
    })
}

/// The end of MPI is a barrier of all ranks by another name.
fn finalizing(recorder: &'static Recorder) -> Running {
    let Some(world) = library().map(|library| library.abi.world as Word) else { return Running::new(recorder) };
    let what = operation(recorder, Op::Barrier, world, NOBODY, VARIES);
    blocking(recorder, [what.map(|what| Begin { function: recorder.name_key("MPI_Finalize"), ..what })])
}

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Init | PMPI_Init(argc: Word, argv: Word) => |recorder, _| starting(recorder, "MPI_Init");
    MPI_Init_thread | PMPI_Init_thread(argc: Word, argv: Word, wanted: Word, given: Word)
        => |recorder, _| starting(recorder, "MPI_Init_thread");
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
        => |recorder, _| posted(named_collective(recorder, "MPI_Scan", comm, Size(int(count), dtype)), request, false);
    MPI_Iexscan | PMPI_Iexscan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(named_collective(recorder, "MPI_Exscan", comm, Size(int(count), dtype)), request, false);

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
        => |recorder, _| posted(named_collective(recorder, "MPI_Neighbor_allgather", comm, VARIES), request, false);
    MPI_Ineighbor_allgatherv | PMPI_Ineighbor_allgatherv | MPI_Ineighbor_allgatherv_c | PMPI_Ineighbor_allgatherv_c(
        send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(named_collective(recorder, "MPI_Neighbor_allgatherv", comm, VARIES), request, false);
    MPI_Ineighbor_alltoall | PMPI_Ineighbor_alltoall | MPI_Ineighbor_alltoall_c | PMPI_Ineighbor_alltoall_c(send: Word,
        sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word, request: Word)
        => |recorder, _| posted(named_collective(recorder, "MPI_Neighbor_alltoall", comm, VARIES), request, false);
    MPI_Ineighbor_alltoallv | PMPI_Ineighbor_alltoallv | MPI_Ineighbor_alltoallv_c | PMPI_Ineighbor_alltoallv_c(send: Word,
        sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word, roffsets: Word, rtype: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(named_collective(recorder, "MPI_Neighbor_alltoallv", comm, VARIES), request, false);
    MPI_Ineighbor_alltoallw | PMPI_Ineighbor_alltoallw | MPI_Ineighbor_alltoallw_c | PMPI_Ineighbor_alltoallw_c(send: Word,
        sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word, roffsets: Word, rtypes: Word, comm: Word,
        request: Word)
        => |recorder, _| posted(named_collective(recorder, "MPI_Neighbor_alltoallw", comm, VARIES), request, false);
}
