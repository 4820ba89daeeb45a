//! Collectives, sends and receives: a sequence number, a slot, and two events around the launch.

use std::{ffi::c_int, sync::atomic::Ordering};

use xpu_timer_proto::{
    ring::comm,
    v1::{DataType, Op, OpKind},
};

use super::{communicator::known, group};
use crate::{
    abi::{Comm, Stream},
    bracket::{self, Open},
    graphs::{self, Held},
    hooked::Site,
    recorder::{Begin, Recorder},
    thread_state,
};

/// Arguments of a call that matter.
pub struct Call {
    pub op: Op,
    pub count: usize,
    pub dtype: c_int,
    pub reduce: c_int,
    pub peer: c_int,
}

impl Call {
    fn dtype(&self) -> DataType {
        DataType::try_from(self.dtype.saturating_add(1)).unwrap_or_default()
    }

    fn captured(&self, comm: usize, communicator: u64) -> Held {
        let (count, reduce) = (self.count as u64, self.reduce as u8);
        Held { op: self.op, dtype: self.dtype(), reduce, count, peer: self.peer, comm, communicator }
    }
}

/// Before a collective. In a group it is only queued; the end of the group brackets it.
pub fn collective(recorder: &'static Recorder, site: Site, call: Call, handle: Comm, stream: Stream) -> Option<Open> {
    let stream = stream as usize;
    let comm = known(recorder, site, handle);
    // A captured collective does not happen now. Each launch of its graph gives it a number.
    if bracket::is_captured(stream) {
        if let Some(comm) = comm {
            graphs::hold(stream, &[call.captured(comm, recorder.comm_id(comm))]);
        }
        return None;
    }
    let point_to_point = matches!(call.op, Op::Send | Op::Recv);
    let counter = if point_to_point { comm::POINT_TO_POINT } else { comm::LAUNCHED };
    let seq = comm.map_or(0, |comm| recorder.comm_word(comm, counter).fetch_add(1, Ordering::Relaxed) + 1);
    if !point_to_point {
        recorder.launched_collective();
    }
    let what = Begin {
        dtype: call.dtype(),
        reduce: call.reduce as u8,
        comm,
        communicator: comm.map_or(0, |comm| recorder.comm_id(comm)),
        seq,
        count: call.count as u64,
        peer: call.peer,
        stream,
        ..Begin::new(OpKind::Collective, call.op)
    };
    if thread_state::with(|thread| thread.group_depth.get()) > 0 {
        if let Some(index) = recorder.begin(&what) {
            group::queue(recorder, index);
        }
        return None;
    }
    let open = bracket::open(recorder, &what);
    thread_state::with(|thread| thread.open.set(open.map_or(0, |Open(index)| index as u32 + 1)));
    open
}
