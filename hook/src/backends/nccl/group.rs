//! Groups. Between ncclGroupStart and the outermost ncclGroupEnd, calls are only queued. One pair
//! of events per stream brackets all operations of the group on that stream; the first one is their
//! leader.

use std::{ffi::c_int, sync::atomic::Ordering};

use crate::{
    backends::{
        bracket::{self, close},
        nccl::{
            collective::{is_host_call, next, withdraw},
            creation,
        },
    },
    interpose::hooked::{AfterCall, Site},
    runtime::{
        abi::SUCCESS,
        os::{
            clock,
            thread_state::{self, ThreadState},
        },
        recorder::{
            Recorder,
            operations::{self, chain},
        },
    },
};

/// Token of ncclGroupStart.
pub(crate) struct GroupStarted;

/// Called before ncclGroupStart.
pub(crate) fn group_start(recorder: &'static Recorder) -> GroupStarted {
    thread_state::with(|thread| {
        let depth = thread.group_depth.get();
        thread.group_depth.set(depth + 1);
        if depth == 0 {
            thread.group.set(recorder.next_group(thread));
            thread.group_first.set(0);
            thread.group_last.set(0);
        }
    });
    GroupStarted
}

impl AfterCall for GroupStarted {
    fn after(self, _: &'static Recorder, result: c_int) {
        if result != SUCCESS {
            thread_state::with(|thread| {
                leave(thread);
            });
        }
    }
}

/// Leaves one level. Returns the first slot of the list at the outermost level, else 0.
fn leave(thread: &ThreadState) -> u32 {
    let depth = thread.group_depth.get();
    thread.group_depth.set(depth.saturating_sub(1));
    if depth != 1 {
        return 0;
    }
    thread.group.set(0);
    thread.group_last.set(0);
    thread.group_first.replace(0)
}

/// The operations of a group that ends: a chain of leaders and host calls.
pub(crate) struct Ended {
    site: Site,
    first: u32,
}

/// Called before ncclGroupEnd. At the outermost level all operations are handed to the watcher, and
/// their start events are recorded.
pub(crate) fn group_end(recorder: &'static Recorder, site: Site) -> Ended {
    let first = thread_state::with(leave);
    let now = clock::now_ns();
    let mut last: Option<usize> = None;
    for slot in chain(recorder, first, next) {
        let stream = recorder.slots[slot].stream.load(Ordering::Relaxed);
        let leader = if is_host_call(recorder, slot) || last.is_none() {
            None
        } else {
            chain(recorder, first, next).take_while(|other| *other != slot).find(|other| {
                !is_host_call(recorder, *other) && recorder.slots[*other].stream.load(Ordering::Relaxed) == stream
            })
        };
        match (leader, last) {
            (Some(leader), Some(last)) => {
                operations::follow(recorder, leader, slot);
                recorder.slots[last].next.store(next(recorder, slot), Ordering::Relaxed);
            }
            _ => last = Some(slot),
        }
    }
    for slot in chain(recorder, first, next) {
        recorder.slots[slot].since_ns.store(now, Ordering::Relaxed);
        recorder.hand_over(slot);
        if !is_host_call(recorder, slot) {
            bracket::start(recorder, slot);
        }
    }
    thread_state::with(|thread| thread.open.set(first));
    Ended { site, first }
}

impl AfterCall for Ended {
    fn after(self, recorder: &'static Recorder, result: c_int) {
        thread_state::with(|thread| thread.open.set(0));
        for slot in chain(recorder, self.first, next) {
            if is_host_call(recorder, slot) {
                creation::grouped_init_returned(recorder, self.site, slot, result);
            } else {
                close(recorder, slot, result);
            }
        }
    }
}

/// Called before ncclGroupSimulateEnd. It launches nothing, but creates the communicators that were
/// queued.
pub(crate) fn group_simulated(recorder: &'static Recorder, site: Site) -> Ended {
    let slots: Vec<usize> = chain(recorder, thread_state::with(leave), next).collect();
    let (host_calls, others): (Vec<usize>, Vec<usize>) =
        slots.into_iter().partition(|slot| is_host_call(recorder, *slot));
    for slot in others {
        withdraw(recorder, slot);
    }
    let now = clock::now_ns();
    let first = host_calls.iter().rev().fold(0, |following, slot| {
        recorder.slots[*slot].next.store(following, Ordering::Relaxed);
        *slot as u32 + 1
    });
    for slot in host_calls {
        recorder.slots[slot].since_ns.store(now, Ordering::Relaxed);
        recorder.hand_over(slot);
    }
    thread_state::with(|thread| thread.open.set(first));
    Ended { site, first }
}
