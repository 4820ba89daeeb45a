//! Operations that one pair of events brackets. They form a chain of slots: a leader and its
//! followers.

use std::sync::atomic::Ordering;

use xpu_timer_proto::{
    ring::op,
    v1::{CommunicatorState, OpStatus},
};

use crate::runtime::recorder::{Recorder, operations::comm_of};

/// Ends an operation and its followers with a status that the host determined. Followers first,
/// because the watcher frees them all together with the leader.
pub fn close_all(recorder: &'static Recorder, index: usize, status: OpStatus, error: u32, now_ns: u64) {
    for member in members(recorder, index).skip(1) {
        recorder.settle(member, status, error, now_ns);
    }
    recorder.close(index, status, error, now_ns);
}

/// Adds an operation to those that the events of `leader` bracket.
pub fn follow(recorder: &'static Recorder, leader: usize, index: usize) {
    let behind = recorder.slots[leader].follower.swap(index as u32 + 1, Ordering::Relaxed);
    recorder.slots[index].follower.store(behind, Ordering::Relaxed);
}

/// The slots that the events of `index` bracket, `index` first. Must not be called once the watcher
/// may free them.
pub fn members(recorder: &'static Recorder, index: usize) -> impl Iterator<Item = usize> {
    chain(recorder, index as u32 + 1, |recorder, slot| recorder.slots[slot].follower.load(Ordering::Relaxed))
}

/// Follows a chain of slots whose links are slot numbers plus one. Each link is read before its
/// slot is returned, so the caller may give the slot away.
pub fn chain(
    recorder: &'static Recorder,
    first: u32,
    next: impl Fn(&Recorder, usize) -> u32,
) -> impl Iterator<Item = usize> {
    let mut link = first;
    // No chain is longer than the table, so a corrupted one ends.
    (0..op::SLOTS).map_while(move |_| {
        let slot = link.checked_sub(1)? as usize;
        link = next(recorder, slot);
        Some(slot)
    })
}

/// The status of an operation whose end event is complete. After an abort the kernel has ended, but
/// it did not do its work.
pub fn completed_status(recorder: &Recorder, index: usize) -> OpStatus {
    match comm_of(recorder, index).map(|comm| recorder.comm_state(comm)) {
        Some(CommunicatorState::Aborted) => OpStatus::Aborted,
        _ => OpStatus::Completed,
    }
}
