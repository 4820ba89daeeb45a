//! Describes the operations that a call of MPI executes.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::{comm, header},
    v1::{Op, OpKind},
};

use crate::{
    backends::{
        host_call::BlockingCall,
        mpi::{
            communicator::{self, known},
            library::{is_in_place, library},
            polling,
        },
    },
    runtime::{
        abi::Word,
        recorder::{NewOperation, Recorder, host_operations::named_host_call},
    },
};

/// `MPI_ERR_OTHER` of MPICH, returned by a call without an original. In Open MPI it is another
/// error code.
pub(crate) const ERROR: c_int = 15;

/// No root and no peer.
pub(crate) const NOBODY: Word = -1i32 as u32 as Word;

/// A C `int` in a word.
pub(crate) fn int(word: Word) -> i64 {
    i64::from(word as i32)
}

/// Element count and type, as a call passes them.
#[derive(Clone, Copy)]
pub(crate) struct Size(pub i64, pub Word);

/// The size may differ between ranks.
pub(crate) const VARIES: Size = Size(0, 0);

/// The size of a collective: that of the send buffer, or that of the receive buffer if the call
/// sends in place.
pub(crate) fn sized(send: Word, sends: Size, receives: Size) -> Size {
    if is_in_place(send) { receives } else { sends }
}

/// A collective. `None` for a communicator of this process alone.
pub(crate) fn operation(
    recorder: &'static Recorder,
    op: Op,
    comm: Word,
    root: Word,
    size: Size,
) -> Option<NewOperation> {
    let comm = known(recorder, comm)?;
    Some(NewOperation { seq: next(recorder, comm.index), ..collective_without_seq(op, comm, root, size) })
}

/// The sequence number of a collective that begins.
pub(crate) fn next(recorder: &'static Recorder, comm: usize) -> u64 {
    recorder.count(header::COLLECTIVES);
    recorder.comm_word(comm, comm::LAUNCHED).fetch_add(1, Ordering::Relaxed) + 1
}

/// A collective without its sequence number. In an intercommunicator, each group has its own root
/// and sizes.
pub(crate) fn collective_without_seq(
    op: Op,
    comm: communicator::KnownCommunicator,
    root: Word,
    size: Size,
) -> NewOperation {
    match comm.is_inter() {
        true => begin(op, comm, 0, NOBODY, VARIES),
        false => begin(op, comm, 0, root, size),
    }
}

pub(crate) fn begin(
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

/// A send or receive with a peer and a tag. `None` if the peer is `MPI_PROC_NULL`. The size of a
/// receive is not recorded, because a smaller message may arrive.
pub(crate) fn transfer(
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
    // -1 represents any tag, as in most ABIs.
    let tag = if tag as i32 == abi.any_tag { -1 } else { tag as i32 };
    Some(NewOperation { tag: Some(tag), ..begin(op, comm, seq, peer, size) })
}

/// Called before a blocking call that executes these operations.
pub(crate) fn blocking<const N: usize>(
    recorder: &'static Recorder,
    operations: [Option<NewOperation>; N],
) -> BlockingCall {
    polling::interrupt(recorder);
    operations.iter().flatten().fold(BlockingCall::new(recorder), |running, what| running.with(what))
}

pub(crate) fn collective(recorder: &'static Recorder, op: Op, comm: Word, root: Word, size: Size) -> BlockingCall {
    blocking(recorder, [operation(recorder, op, comm, root, size)])
}

/// A collective without an [`Op`], which its name identifies.
pub(crate) fn named_collective(
    recorder: &'static Recorder,
    name: &'static str,
    comm: Word,
    size: Size,
) -> Option<NewOperation> {
    let what = operation(recorder, Op::Unspecified, comm, NOBODY, size)?;
    Some(NewOperation { function: recorder.name_key(name), ..what })
}

/// The receive is the leader: small messages are sent without waiting for the peer, so such a call
/// usually waits for the receive.
pub(crate) fn receive_and_send(
    recorder: &'static Recorder,
    comm: Word,
    [to, from]: [(Word, Word); 2],
    sends: Size,
) -> [Option<NewOperation>; 2] {
    let send = transfer(recorder, Op::Send, comm, to, sends);
    [transfer(recorder, Op::Recv, comm, from, VARIES), send]
}

pub(crate) fn exchange(recorder: &'static Recorder, comm: Word, ends: [(Word, Word); 2], sends: Size) -> BlockingCall {
    blocking(recorder, receive_and_send(recorder, comm, ends, sends))
}

/// A call that waits for `peer` in a communicator or window, or for members that only the call
/// knows.
pub(crate) fn host_call_on(
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
