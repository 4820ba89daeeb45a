//! The list of operations in a thread's open group.

use std::sync::atomic::Ordering;

use xpu_timer_proto::v1::OpKind;

use crate::runtime::{os::thread_state, recorder::Recorder};

/// Adds an operation to the thread's open group.
pub fn queue(recorder: &'static Recorder, index: usize) {
    let link = index as u32 + 1;
    thread_state::with(|thread| {
        match thread.group_last.replace(link) {
            0 => thread.group_first.set(link),
            last => recorder.slots[last as usize - 1].next.store(link, Ordering::Relaxed),
        };
    });
}

pub fn next(recorder: &Recorder, slot: usize) -> u32 {
    recorder.slots[slot].next.load(Ordering::Relaxed)
}

pub fn is_host_call(recorder: &Recorder, slot: usize) -> bool {
    recorder.kind(slot) == OpKind::HostCall
}
