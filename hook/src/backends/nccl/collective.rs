//! Collectives, sends and receives: a sequence number, a slot, and two events around the launch.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::{comm, op},
    v1::{DataType, Op, OpKind},
};

use crate::{
    backends::{
        bracket::{self, OpenOperation},
        cuda::graphs::{self, CapturedCollective},
        nccl::communicator::known,
    },
    interpose::hooked::Site,
    runtime::{
        abi::{Comm, Stream},
        lock_free::slot::state,
        os::thread_state,
        recorder::{NewOperation, Recorder, operations},
    },
};

/// The arguments of a call that are recorded.
pub(crate) struct Call {
    pub op: Op,
    pub count: usize,
    pub dtype: c_int,
    pub reduce: c_int,
    pub peer: c_int,
}

impl Call {
    /// NCCL's numbers are those of the schema minus one, up to the last type that NCCL has.
    fn dtype(&self) -> DataType {
        const LAST: c_int = DataType::Float8E5m2 as c_int;
        let number = self.dtype.saturating_add(1);
        if number > LAST { DataType::Unspecified } else { DataType::try_from(number).unwrap_or_default() }
    }

    fn captured(&self, tag: Option<c_int>, comm: usize, communicator: u64) -> CapturedCollective {
        let (count, reduce) = (self.count as u64, self.reduce as u8);
        CapturedCollective { op: self.op, dtype: self.dtype(), reduce, count, peer: self.peer, tag, comm, communicator }
    }

    /// The operation as it begins, with its sequence number.
    fn begin(
        &self,
        recorder: &'static Recorder,
        tag: Option<c_int>,
        comm: Option<usize>,
        stream: usize,
    ) -> NewOperation {
        let counter = counter_of(self.op);
        let seq = comm.map_or(0, |comm| recorder.comm_word(comm, counter).fetch_add(1, Ordering::Relaxed) + 1);
        if counter == comm::LAUNCHED {
            recorder.launched_collective();
        }
        NewOperation {
            dtype: self.dtype(),
            reduce: self.reduce as u8,
            comm,
            communicator: comm.map_or(0, |comm| recorder.comm_id(comm)),
            seq,
            count: self.count as u64,
            peer: self.peer,
            tag,
            stream,
            ..NewOperation::new(OpKind::Collective, self.op)
        }
    }
}

/// The communicator's counter for such an operation.
fn counter_of(op: Op) -> usize {
    if matches!(op, Op::Send | Op::Recv) { comm::POINT_TO_POINT } else { comm::LAUNCHED }
}

/// Called before a collective. In a group it is only queued; the end of the group brackets it.
#[inline]
pub(crate) fn collective(
    recorder: &'static Recorder,
    site: Site,
    call: Call,
    handle: Comm,
    stream: Stream,
) -> Option<OpenOperation> {
    tagged(recorder, [(call, None)], known(recorder, site, handle), stream)
}

/// Like [`collective`], for several operations of one call, with tags for those between two ranks.
/// They end together.
#[inline]
pub(crate) fn tagged(
    recorder: &'static Recorder,
    calls: impl IntoIterator<Item = (Call, Option<c_int>)>,
    comm: Option<usize>,
    stream: Stream,
) -> Option<OpenOperation> {
    let stream = stream as usize;
    // A captured collective is not executed now. Each launch of its graph gets a sequence number.
    if bracket::is_captured(stream) {
        for (call, tag) in calls {
            if let Some(comm) = comm {
                graphs::capture_collectives(stream, &[call.captured(tag, comm, recorder.comm_id(comm))]);
            }
        }
        return None;
    }
    let grouped = thread_state::with(|thread| thread.group_depth.get()) > 0;
    let mut leader = None;
    for (call, tag) in calls {
        let Some(index) = recorder.begin(&call.begin(recorder, tag, comm, stream)) else { continue };
        match leader {
            _ if grouped => queue(recorder, index),
            None => leader = Some(index),
            Some(leader) => operations::follow(recorder, leader, index),
        }
    }
    let leader = leader?;
    recorder.hand_over(leader);
    bracket::start(recorder, leader);
    thread_state::with(|thread| thread.open.set(leader as u32 + 1));
    Some(OpenOperation(leader))
}

/// Removes an operation of a group that was only simulated.
pub(crate) fn withdraw(recorder: &'static Recorder, slot: usize) {
    let words = recorder.ring.op(slot);
    let op = Op::try_from((words[op::WHAT].load(Ordering::Relaxed) >> 8 & 0xff) as i32).unwrap_or_default();
    words[op::TICKET].store(0, Ordering::Relaxed);
    if recorder.kind(slot) == OpKind::Collective {
        let counter = counter_of(op);
        if let Some(comm) = operations::comm_of(recorder, slot) {
            recorder.comm_word(comm, counter).fetch_sub(1, Ordering::Relaxed);
        }
        if counter == comm::LAUNCHED {
            recorder.withdrew_collective();
        }
    }
    recorder.slots[slot].become_state(state::FREE);
}

/// No root and no peer.
pub(crate) const NOBODY: c_int = -1;

/// Adds an operation to the thread's open group.
pub(crate) fn queue(recorder: &'static Recorder, index: usize) {
    let link = index as u32 + 1;
    thread_state::with(|thread| {
        match thread.group_last.replace(link) {
            0 => thread.group_first.set(link),
            last => recorder.slots[last as usize - 1].next.store(link, Ordering::Relaxed),
        };
    });
}

pub(crate) fn next(recorder: &Recorder, slot: usize) -> u32 {
    recorder.slots[slot].next.load(Ordering::Relaxed)
}

pub(crate) fn is_host_call(recorder: &Recorder, slot: usize) -> bool {
    recorder.kind(slot) == OpKind::HostCall
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_nccl_type_number_has_its_type() {
        let of = |dtype: c_int| Call { op: Op::AllReduce, count: 1, dtype, reduce: 0, peer: -1 }.dtype();
        // By nccl.h: char, unsigned char, int, unsigned, two of 64 bits, half, float, double,
        // bfloat16, two of 8 bits; no others.
        let known = [
            DataType::Int8,
            DataType::Uint8,
            DataType::Int32,
            DataType::Uint32,
            DataType::Int64,
            DataType::Uint64,
            DataType::Float16,
            DataType::Float32,
            DataType::Float64,
            DataType::Bfloat16,
            DataType::Float8E4m3,
            DataType::Float8E5m2,
        ];
        assert_eq!((0..12).map(of).collect::<Vec<_>>(), known);
        for dtype in [-2, -1, 12, 13, 14, c_int::MAX] {
            assert_eq!(of(dtype), DataType::Unspecified, "{dtype}");
        }
    }
}
