//! The MPI of the process, Open MPI or MPICH, by interposition of the `MPI_` functions and through dlsym. A function is a row.
//!
//! What is not seen: the Fortran bindings that enter the library by other names, one-sided communication, files, and MPI
//! linked statically. Arguments are words: all of them travel in integer registers or in stack slots of eight bytes, and go
//! on as they came, so that no type of either interface is needed.

mod communicator;
pub mod large;
mod library;
mod request;

use std::ffi::c_int;

use xpu_timer_proto::{
    ring::{comm, header},
    v1::{Op, OpKind},
};

use crate::{
    hooked::hooked,
    host::open::Running,
    recorder::{Begin, Recorder},
    thread_state::{IN_COLLECTIVES, IN_HOOK},
};
use communicator::{ending, from_group, from_parent, known, starting};
use library::{in_place, library};
use request::{For, Posted, posted, waiting};
use std::sync::atomic::Ordering;

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
    recorder.count(header::COLLECTIVES);
    let seq = recorder.comm_word(comm.index, comm::LAUNCHED).fetch_add(1, Ordering::Relaxed) + 1;
    Some(begin(op, comm, seq, root, size))
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

/// A send or a receive. `None` for one with nobody. A receive takes what comes, up to its size, which is not noted.
fn transfer(recorder: &'static Recorder, op: Op, comm: Word, peer: Word, size: Size) -> Option<Begin> {
    let abi = library()?.abi;
    if peer as i32 == abi.proc_null {
        return None;
    }
    let comm = known(recorder, comm)?;
    let seq = recorder.comm_word(comm.index, comm::POINT_TO_POINT).fetch_add(1, Ordering::Relaxed) + 1;
    let peer = if peer as i32 == abi.any_source { NOBODY } else { peer };
    Some(begin(op, comm, seq, peer, size))
}

/// Before a blocking call that runs these operations.
fn blocking<const N: usize>(recorder: &'static Recorder, operations: [Option<Begin>; N]) -> Running {
    operations.iter().flatten().fold(Running::new(recorder), |running, what| running.with(what))
}

fn collective(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size) -> Running {
    blocking(recorder, [operation(recorder, op, comm, root, size)])
}

/// A collective for which there is no [`Op`]; its name tells.
fn scan(recorder: &'static Recorder, name: &'static str, comm: Word, size: Size) -> Option<Begin> {
    let what = operation(recorder, Op::Unspecified, comm, NOBODY, size)?;
    Some(Begin { function: recorder.name_key(name), ..what })
}

fn started(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size, request: Word) -> Posted {
    posted(operation(recorder, op, comm, root, size), request, false)
}

fn exchange(recorder: &'static Recorder, comm: Word, [to, from]: [Word; 2], sends: Size) -> Running {
    let send = transfer(recorder, Op::Send, comm, to, sends);
    // The receive leads: small messages are sent without the peer, so it is what such a call mostly waits for.
    blocking(recorder, [transfer(recorder, Op::Recv, comm, from, VARIES), send])
}

/// The end of MPI is a barrier of all ranks by another name.
fn finalizing(recorder: &'static Recorder) -> Running {
    let Some(world) = library().map(|library| library.abi.world as Word) else { return Running::new(recorder) };
    let what = operation(recorder, Op::Barrier, world, NOBODY, VARIES);
    blocking(recorder, [what.map(|what| Begin { function: recorder.name_key("MPI_Finalize"), ..what })])
}

hooked! {
    library Mpi, mark IN_COLLECTIVES, bypass IN_COLLECTIVES | IN_HOOK, missing ERROR;

    MPI_Init(argc: Word, argv: Word) => |recorder, _| starting(recorder, "MPI_Init");
    MPI_Init_thread(argc: Word, argv: Word, wanted: Word, given: Word)
        => |recorder, _| starting(recorder, "MPI_Init_thread");
    MPI_Finalize() => |recorder, _| finalizing(recorder);

    MPI_Barrier(comm: Word) => |recorder, _| collective(recorder, Op::Barrier, comm, NOBODY, VARIES);
    MPI_Bcast(buffer: Word, count: Word, dtype: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Broadcast, comm, root, Size(int(count), dtype));
    MPI_Reduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Reduce, comm, root, Size(int(count), dtype));
    MPI_Allreduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllReduce, comm, NOBODY, Size(int(count), dtype));
    MPI_Allgather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            collective(recorder, Op::AllGather, comm, NOBODY, size)
        };
    MPI_Allgatherv(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word,
        comm: Word)
        => |recorder, _| collective(recorder, Op::AllGather, comm, NOBODY, VARIES);
    MPI_Gather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, root: Word, comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            collective(recorder, Op::Gather, comm, root, size)
        };
    MPI_Gatherv(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word,
        root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Gather, comm, root, VARIES);
    MPI_Scatter(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, root: Word, comm: Word)
        => |recorder, _| {
            let size = sized(recv, Size(int(receives), rtype), Size(int(sends), stype));
            collective(recorder, Op::Scatter, comm, root, size)
        };
    MPI_Scatterv(send: Word, sends: Word, offsets: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::Scatter, comm, root, VARIES);
    MPI_Alltoall(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            collective(recorder, Op::AllToAll, comm, NOBODY, size)
        };
    MPI_Alltoallv(send: Word, sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word, roffsets: Word,
        rtype: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllToAll, comm, NOBODY, VARIES);
    MPI_Alltoallw(send: Word, sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word, roffsets: Word,
        rtypes: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::AllToAll, comm, NOBODY, VARIES);
    MPI_Reduce_scatter(send: Word, recv: Word, counts: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::ReduceScatter, comm, NOBODY, VARIES);
    MPI_Reduce_scatter_block(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| collective(recorder, Op::ReduceScatter, comm, NOBODY, Size(int(count), dtype));
    MPI_Scan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| blocking(recorder, [scan(recorder, "MPI_Scan", comm, Size(int(count), dtype))]);
    MPI_Exscan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word)
        => |recorder, _| blocking(recorder, [scan(recorder, "MPI_Exscan", comm, Size(int(count), dtype))]);

    MPI_Ibarrier(comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Barrier, comm, NOBODY, VARIES, request);
    MPI_Ibcast(buffer: Word, count: Word, dtype: Word, root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Broadcast, comm, root, Size(int(count), dtype), request);
    MPI_Ireduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Reduce, comm, root, Size(int(count), dtype), request);
    MPI_Iallreduce(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::AllReduce, comm, NOBODY, Size(int(count), dtype), request);
    MPI_Iallgather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word,
        request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            started(recorder, Op::AllGather, comm, NOBODY, size, request)
        };
    MPI_Iallgatherv(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word,
        comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::AllGather, comm, NOBODY, VARIES, request);
    MPI_Igather(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, root: Word, comm: Word,
        request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            started(recorder, Op::Gather, comm, root, size, request)
        };
    MPI_Igatherv(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, offsets: Word, rtype: Word,
        root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Gather, comm, root, VARIES, request);
    MPI_Iscatter(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, root: Word, comm: Word,
        request: Word)
        => |recorder, _| {
            let size = sized(recv, Size(int(receives), rtype), Size(int(sends), stype));
            started(recorder, Op::Scatter, comm, root, size, request)
        };
    MPI_Iscatterv(send: Word, sends: Word, offsets: Word, stype: Word, recv: Word, receives: Word, rtype: Word,
        root: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::Scatter, comm, root, VARIES, request);
    MPI_Ialltoall(send: Word, sends: Word, stype: Word, recv: Word, receives: Word, rtype: Word, comm: Word,
        request: Word)
        => |recorder, _| {
            let size = sized(send, Size(int(sends), stype), Size(int(receives), rtype));
            started(recorder, Op::AllToAll, comm, NOBODY, size, request)
        };
    MPI_Ialltoallv(send: Word, sends: Word, soffsets: Word, stype: Word, recv: Word, receives: Word, roffsets: Word,
        rtype: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::AllToAll, comm, NOBODY, VARIES, request);
    MPI_Ialltoallw(send: Word, sends: Word, soffsets: Word, stypes: Word, recv: Word, receives: Word, roffsets: Word,
        rtypes: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::AllToAll, comm, NOBODY, VARIES, request);
    MPI_Ireduce_scatter(send: Word, recv: Word, counts: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| started(recorder, Op::ReduceScatter, comm, NOBODY, VARIES, request);
    MPI_Ireduce_scatter_block(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word,
        request: Word)
        => |recorder, _| started(recorder, Op::ReduceScatter, comm, NOBODY, Size(int(count), dtype), request);
    MPI_Iscan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| posted(scan(recorder, "MPI_Scan", comm, Size(int(count), dtype)), request, false);
    MPI_Iexscan(send: Word, recv: Word, count: Word, dtype: Word, reduce: Word, comm: Word, request: Word)
        => |recorder, _| posted(scan(recorder, "MPI_Exscan", comm, Size(int(count), dtype)), request, false);

    MPI_Send(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype))]);
    MPI_Ssend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype))]);
    MPI_Rsend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype))]);
    MPI_Recv(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, status: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Recv, comm, peer, VARIES)]);
    MPI_Probe(peer: Word, tag: Word, comm: Word, status: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Recv, comm, peer, VARIES)]);
    MPI_Mprobe(peer: Word, tag: Word, comm: Word, message: Word, status: Word)
        => |recorder, _| blocking(recorder, [transfer(recorder, Op::Recv, comm, peer, VARIES)]);
    MPI_Sendrecv(send: Word, sends: Word, stype: Word, to: Word, stag: Word, recv: Word, receives: Word, rtype: Word,
        from: Word, rtag: Word, comm: Word, status: Word)
        => |recorder, _| exchange(recorder, comm, [to, from], Size(int(sends), stype));
    MPI_Sendrecv_replace(buffer: Word, count: Word, dtype: Word, to: Word, stag: Word, from: Word, rtag: Word,
        comm: Word, status: Word)
        => |recorder, _| exchange(recorder, comm, [to, from], Size(int(count), dtype));

    MPI_Isend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype)), request, false);
    MPI_Issend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype)), request, false);
    MPI_Irsend(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype)), request, false);
    MPI_Irecv(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Recv, comm, peer, VARIES), request, false);
    MPI_Send_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype)), request, true);
    MPI_Ssend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype)), request, true);
    MPI_Rsend_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Send, comm, peer, Size(int(count), dtype)), request, true);
    MPI_Recv_init(buffer: Word, count: Word, dtype: Word, peer: Word, tag: Word, comm: Word, request: Word)
        => |recorder, _| posted(transfer(recorder, Op::Recv, comm, peer, VARIES), request, true);

    MPI_Wait(request: Word, status: Word)
        => |recorder, _| waiting(recorder, "MPI_Wait", request, 1, For::All);
    MPI_Waitall(count: Word, requests: Word, statuses: Word)
        => |recorder, _| waiting(recorder, "MPI_Waitall", requests, count as i32, For::All);
    MPI_Waitany(count: Word, requests: Word, index: Word, status: Word)
        => |recorder, _| waiting(recorder, "MPI_Waitany", requests, count as i32, For::Any { index });
    MPI_Waitsome(count: Word, requests: Word, finished: Word, indices: Word, statuses: Word)
        => |recorder, _| waiting(recorder, "MPI_Waitsome", requests, count as i32, For::Some);

    MPI_Comm_dup(comm: Word, new: Word) => |recorder, _| from_parent(recorder, "MPI_Comm_dup", comm, new);
    MPI_Comm_dup_with_info(comm: Word, info: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_dup_with_info", comm, new);
    MPI_Comm_create(comm: Word, group: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_create", comm, new);
    MPI_Comm_create_group(comm: Word, group: Word, tag: Word, new: Word)
        => |recorder, _| from_group(recorder, "MPI_Comm_create_group", group, new);
    MPI_Comm_split(comm: Word, color: Word, key: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_split", comm, new);
    MPI_Comm_split_type(comm: Word, kind: Word, key: Word, info: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Comm_split_type", comm, new);
    MPI_Cart_create(comm: Word, count: Word, sizes: Word, periods: Word, reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Cart_create", comm, new);
    MPI_Cart_sub(comm: Word, remain: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Cart_sub", comm, new);
    MPI_Graph_create(comm: Word, count: Word, index: Word, edges: Word, reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Graph_create", comm, new);
    MPI_Dist_graph_create(comm: Word, count: Word, sources: Word, degrees: Word, to: Word, weights: Word, info: Word,
        reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Dist_graph_create", comm, new);
    MPI_Dist_graph_create_adjacent(comm: Word, incount: Word, from: Word, inweights: Word, outcount: Word, to: Word,
        outweights: Word, info: Word, reorder: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Dist_graph_create_adjacent", comm, new);
    MPI_Intercomm_merge(comm: Word, high: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Intercomm_merge", comm, new);
    MPI_Intercomm_create(comm: Word, leader: Word, peers: Word, remote: Word, tag: Word, new: Word)
        => |recorder, _| from_parent(recorder, "MPI_Intercomm_create", comm, new);
    MPI_Comm_free(comm: Word) => |recorder, _| ending(recorder, comm);
    MPI_Comm_disconnect(comm: Word) => |recorder, _| ending(recorder, comm);
}
