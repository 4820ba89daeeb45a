//! What a call of MPI runs.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::{comm, header},
    v1::{Op, OpKind},
};

use crate::{
    backends::{
        host_call::Running,
        mpi::{
            communicator::{self, known},
            library::{in_place, library},
            polling,
        },
    },
    runtime::{
        abi::Word,
        recorder::{NewOperation, Recorder, host_operations::named_host_call},
    },
};

/// `MPI_ERR_OTHER` of MPICH, for a call whose original is not there; in Open MPI it is a code nearby, and an error too.
pub const ERROR: c_int = 15;

/// No root and no peer.
pub const NOBODY: Word = -1i32 as u32 as Word;

/// A C `int` in a word.
pub fn int(word: Word) -> i64 {
    i64::from(word as i32)
}

/// Elements and their type, as a call has them.
#[derive(Clone, Copy)]
pub struct Size(pub i64, pub Word);

/// Ranks may rightly differ in it.
pub const VARIES: Size = Size(0, 0);

/// What a call says of the size of its operation: what it sends, or what it receives when it sends in place.
pub fn sized(send: Word, sends: Size, receives: Size) -> Size {
    if in_place(send) { receives } else { sends }
}

/// A collective. `None` when there is nobody to wait for.
pub fn operation(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size) -> Option<NewOperation> {
    let comm = known(recorder, comm)?;
    Some(NewOperation { seq: next(recorder, comm.index), ..collective_without_seq(op, comm, root, size) })
}

/// The number of a collective that begins.
pub fn next(recorder: &'static Recorder, comm: usize) -> u64 {
    recorder.count(header::COLLECTIVES);
    recorder.comm_word(comm, comm::LAUNCHED).fetch_add(1, Ordering::Relaxed) + 1
}

/// A collective without its number. Between two groups each has a root and sizes of its own.
pub fn collective_without_seq(op: Op, comm: communicator::KnownCommunicator, root: Word, size: Size) -> NewOperation {
    match comm.is_inter() {
        true => begin(op, comm, 0, NOBODY, VARIES),
        false => begin(op, comm, 0, root, size),
    }
}

pub fn begin(
    op: Op,
    comm: communicator::KnownCommunicator,
    seq: u64,
    peer: Word,
    Size(count, dtype): Size,
) -> NewOperation {
    let (count, dtype) = match (dtype, library()) {
        (0, _) | (_, None) => Default::default(),
        (dtype, Some(library)) => library.shape(count, dtype),
    };
    NewOperation {
        comm: Some(comm.index),
        communicator: comm.id,
        seq,
        count,
        dtype,
        peer: peer as i32,
        ..NewOperation::new(OpKind::Collective, op)
    }
}

/// A send to, or a receive from, a peer by a tag. `None` for one with nobody. A receive takes what comes, up to its size,
/// which is not noted.
pub fn transfer(
    recorder: &'static Recorder,
    op: Op,
    comm: Word,
    (peer, tag): (Word, Word),
    size: Size,
) -> Option<NewOperation> {
    let abi = library()?.abi;
    if peer as i32 == abi.proc_null {
        return None;
    }
    let comm = known(recorder, comm)?;
    let seq = recorder.comm_word(comm.index, comm::POINT_TO_POINT).fetch_add(1, Ordering::Relaxed) + 1;
    let peer = if peer as i32 == abi.any_source { NOBODY } else { comm.peer(peer) };
    // As most interfaces have it, -1 is any tag.
    let tag = if tag as i32 == abi.any_tag { -1 } else { tag as i32 };
    Some(NewOperation { tag: Some(tag), ..begin(op, comm, seq, peer, size) })
}

/// Before a blocking call that runs these operations.
pub fn blocking<const N: usize>(recorder: &'static Recorder, operations: [Option<NewOperation>; N]) -> Running {
    polling::interrupt(recorder);
    operations.iter().flatten().fold(Running::new(recorder), |running, what| running.with(what))
}

pub fn collective(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size) -> Running {
    blocking(recorder, [operation(recorder, op, comm, root, size)])
}

/// A collective for which there is no [`Op`]; its name tells.
pub fn named_collective(
    recorder: &'static Recorder,
    name: &'static str,
    comm: Word,
    size: Size,
) -> Option<NewOperation> {
    let what = operation(recorder, Op::Unspecified, comm, NOBODY, size)?;
    Some(NewOperation { function: recorder.name_key(name), ..what })
}

/// The receive leads: small messages are sent without the peer, so it is what such a call mostly waits for.
pub fn receive_and_send(
    recorder: &'static Recorder,
    comm: Word,
    [to, from]: [(Word, Word); 2],
    sends: Size,
) -> [Option<NewOperation>; 2] {
    let send = transfer(recorder, Op::Send, comm, to, sends);
    [transfer(recorder, Op::Recv, comm, from, VARIES), send]
}

pub fn exchange(recorder: &'static Recorder, comm: Word, ends: [(Word, Word); 2], sends: Size) -> Running {
    blocking(recorder, receive_and_send(recorder, comm, ends, sends))
}

/// A call that waits for `peer` in a communicator or a window, or for those of its members that only the call knows.
pub fn host_call_on(
    recorder: &'static Recorder,
    name: &'static str,
    object: Option<communicator::KnownCommunicator>,
    peer: Word,
) -> Option<NewOperation> {
    object.map(|object| NewOperation {
        comm: Some(object.index),
        communicator: object.id,
        peer: peer as i32,
        ..named_host_call(recorder, name)
    })
}
