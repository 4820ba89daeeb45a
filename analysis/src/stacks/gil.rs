//! A deadlock on the GIL.

use xpu_timer_proto::server::Stacktrace;

use super::{
    classify::classify,
    names::{frame_label, is_named, own_frame},
    sample::{Sample, samples},
};
use crate::verdict::Activity;

/// A capture may stop and release a thread. A thread that used more processor time than this
/// between the samples ran by itself.
const MAX_CAPTURE_RUN_NS: u64 = 5_000_000;

/// The holder of the GIL, blocked at the same place in both samples while other threads wait for
/// the GIL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GilHolder {
    /// Name of the thread.
    pub thread: String,
    /// The native function that blocks it.
    pub function: String,
    /// Its place in Python code.
    pub place: Option<String>,
    /// Number of threads that wait for the GIL.
    pub waiting: usize,
}

/// Finds a deadlock on the GIL.
pub(crate) fn gil_holder(dump: &Stacktrace) -> Option<GilHolder> {
    let (first, last) = samples(dump);
    let first = first?;
    let holder = |sample: Sample<'_>| {
        sample
            .python
            .iter()
            .find(|thread| thread.owns_gil && thread.os_thread_id != 0)
            .map(|thread| thread.os_thread_id)
    };
    let tid = holder(last)?;
    if holder(first)? != tid {
        return None;
    }
    let find = |sample: Sample<'_>| sample.native.iter().find(|thread| thread.pid == tid).cloned();
    let (before, after) = (find(first)?, find(last)?);
    // A capture may have stopped the thread for a moment, which counts as running.
    let blocked = after.cpu_time_ns.saturating_sub(before.cpu_time_ns) < MAX_CAPTURE_RUN_NS
        && !after.state.starts_with('R')
        && !after.frames.is_empty()
        && after.frames.iter().map(|frame| frame.pc).eq(before.frames.iter().map(|frame| frame.pc));
    let waiting = last
        .native
        .iter()
        .filter(|thread| classify(Some(thread), None).activity == Activity::Gil)
        .filter(|thread| {
            first
                .native
                .iter()
                .any(|before| before.pid == thread.pid && classify(Some(before), None).activity == Activity::Gil)
        })
        .count();
    if !blocked || waiting == 0 {
        return None;
    }
    let python = last.python.iter().find(|thread| thread.os_thread_id == tid);
    Some(GilHolder {
        thread: python.map(|thread| thread.thread_name.clone()).unwrap_or_else(|| after.thread_name.clone()),
        function: after
            .frames
            .iter()
            .map(|frame| &frame.func_name)
            .find(|name| is_named(name))
            .cloned()
            .unwrap_or_default(),
        place: python.and_then(|thread| own_frame(&thread.frames)).map(frame_label),
        waiting,
    })
}
