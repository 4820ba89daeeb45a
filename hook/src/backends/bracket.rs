//! Brackets an operation between two events on its stream, and contains the rules for using a
//! stream on a launching thread.
//!
//! An operation is handed to the watcher before anything that may block, so that a launch that
//! never returns is seen too.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicUsize, Ordering},
};

use xpu_timer_proto::{ring::op, v1::OpStatus};

use crate::{
    interpose::hooked::AfterCall,
    runtime::{
        abi::{NCCL_IN_PROGRESS, SUCCESS},
        contexts,
        device::{Device, device, is_default},
        lock_free::slot::state,
        os::{clock, thread_state},
        recorder::{
            NewOperation, Recorder,
            operations::{chain, close_all, comm_of, members},
        },
    },
};

/// The slot of an operation whose call the host is executing.
#[derive(Clone, Copy)]
pub(crate) struct OpenOperation(pub usize);

/// Whether a launch on `stream` is only captured. Then nothing happens on the device, and recording
/// an event there would be an error.
pub(crate) fn is_captured(stream: usize) -> bool {
    device().is_some_and(|device| device.is_capturing(stream))
}

/// Begins an operation and records its start event.
pub(crate) fn open(recorder: &'static Recorder, what: &NewOperation) -> Option<OpenOperation> {
    let open = open_without_events(recorder, what)?;
    start(recorder, open.0);
    Some(open)
}

/// Like [`open`], unless the launch is only captured. Then it is not executed and gets no slot; the
/// launch of its graph does.
#[inline(never)]
pub(crate) fn open_unless_captured(recorder: &'static Recorder, what: &NewOperation) -> Option<OpenOperation> {
    if is_captured(what.stream) { None } else { open(recorder, what) }
}

/// Begins an operation whose stream is unknown. It ends when its call returns.
pub(crate) fn open_without_events(recorder: &'static Recorder, what: &NewOperation) -> Option<OpenOperation> {
    let index = recorder.begin(what)?;
    recorder.hand_over(index);
    Some(OpenOperation(index))
}

/// Records the start event of an operation, if events are used and the driver is available.
pub(crate) fn start(recorder: &'static Recorder, index: usize) {
    if recorder.bracketed.is_off() {
        return;
    }
    let slot = &recorder.slots[index];
    let stream = slot.stream.load(Ordering::Relaxed);
    let Some(device) = device() else { return };
    let Some(context) = device.context_of(stream) else { return };
    slot.context.store(context, Ordering::Relaxed);
    record(recorder, device, index, &slot.start);
}

/// Records a new event and stores it in `place`. On failure `place` stays empty.
fn record(recorder: &'static Recorder, device: &Device, index: usize, place: &AtomicUsize) {
    let slot = &recorder.slots[index];
    let (context, stream) = (slot.context.load(Ordering::Relaxed), slot.stream.load(Ordering::Relaxed));
    if !contexts::exists(context) {
        return;
    }
    let current = device.current();
    let elsewhere = current != context;
    if elsewhere && device.make_current(context).is_err() {
        return;
    }
    let leave = || {
        if elsewhere {
            // The context was current a moment ago. If it cannot become current again, the hook
            // cannot repair that.
            let _ = device.make_current(current);
        }
    };
    let spare = || spare_event(recorder, context);
    let event = spare().or_else(|| device.create_event().ok());
    let is_default = is_default(stream);
    if is_default {
        leave();
    }
    if let Some(event) = event {
        match device.record_event(event, stream) {
            Ok(()) => place.store(event, Ordering::Release),
            // The context was reset, which invalidated its spare events.
            Err(_) => while spare().is_some() {},
        }
    }
    if !is_default {
        leave();
    }
}

/// A spare event of a context: one that came back to the calling thread's lane, or one of the
/// context's pool.
fn spare_event(recorder: &Recorder, context: usize) -> Option<usize> {
    let lane = recorder.lane_of(thread_state::current());
    let own = lane.and_then(|lane| recorder.handoffs[lane].take_event(context));
    own.or_else(|| recorder.pools.of(context)?.pop())
}

/// Records the kernel of a collective, which identifies its algorithm. It belongs to the operations
/// on its stream that the thread is launching.
pub(crate) fn note_kernel(recorder: &'static Recorder, stream: usize, kernel: u64) {
    for member in launching(recorder, stream) {
        let function = &recorder.ring.op(member)[op::FUNCTION];
        if function.load(Ordering::Relaxed) == 0 {
            function.store(kernel, Ordering::Relaxed);
        }
    }
}

/// Records the size of the kernel of a collective.
pub(crate) fn note_channels(recorder: &'static Recorder, stream: usize, grid: [u32; 3], block: [u32; 3]) {
    let product = |sizes: [u32; 3]| sizes.into_iter().fold(1, u32::saturating_mul);
    launching(recorder, stream).for_each(|member| recorder.set_channels(member, product(grid), product(block)));
}

/// The operations on a stream that the thread is launching.
fn launching(recorder: &'static Recorder, stream: usize) -> impl Iterator<Item = usize> {
    let first = thread_state::with(|thread| thread.open.get());
    let leaders = chain(recorder, first, |recorder, slot| recorder.slots[slot].next.load(Ordering::Relaxed));
    let is_here = move |leader: &usize| recorder.slots[*leader].stream.load(Ordering::Relaxed) == stream;
    leaders.filter(is_here).flat_map(move |leader| members(recorder, leader))
}

/// Called when the call of an operation has returned: records the end event, or the status that the
/// result implies. `index` is the leader of its followers.
pub(crate) fn close(recorder: &'static Recorder, index: usize, result: c_int) {
    let now = clock::burst_now_ns(thread_state::current());
    for member in members(recorder, index) {
        recorder.returned(member, now);
    }
    let comm = comm_of(recorder, index);
    match result {
        SUCCESS => finish(recorder, index),
        NCCL_IN_PROGRESS if comm.is_some() => {
            if let Some(comm) = comm {
                recorder.wait_for_comm(comm, index);
            }
        }
        error => close_all(recorder, index, OpStatus::Failed, error as u32, now),
    }
}

/// The operation is completely in the stream. Records the end event; from now on the device
/// determines when it completes.
pub(crate) fn finish(recorder: &'static Recorder, index: usize) {
    let slot = &recorder.slots[index];
    if slot.start.load(Ordering::Relaxed) != 0
        && let Some(device) = device()
    {
        record(recorder, device, index, &slot.end);
    }
    if slot.end.load(Ordering::Relaxed) == 0 {
        // Its completion cannot be observed, so it must not look like a hang.
        close_all(recorder, index, OpStatus::Completed, 0, 0);
    } else {
        slot.become_state(state::ARMED);
    }
}

/// Ends the operation, and then does what else the call means.
impl<T: AfterCall> AfterCall for (Option<OpenOperation>, T) {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        let (open, other) = self;
        open.after(recorder, result);
        other.after(recorder, result);
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.0.has_work() || self.1.has_work()
    }
}

impl AfterCall for Option<OpenOperation> {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        if let Some(OpenOperation(index)) = self {
            thread_state::with(|thread| thread.open.set(0));
            close(recorder, index, result);
        }
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.is_some()
    }
}
