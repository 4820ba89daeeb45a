//! Operations that a thread polls for.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::runtime::{
    os::clock,
    recorder::{Recorder, host_operations::leave},
};

/// Who has not asked for so long has stopped asking.
pub const STOPPED_NS: u64 = 3_000_000_000;

/// An operation that a thread asks for. Whoever takes the slot out of it, its thread or the watcher, ends the operation.
pub struct PolledOperation {
    pub recorder: AtomicUsize,
    /// Slot plus one; 0 for a free place.
    pub link: AtomicU32,
    pub polled_ns: AtomicU64,
}

/// So many threads can be seen waiting in this way at once.
pub static POLLED: [PolledOperation; 64] = [const {
    PolledOperation { recorder: AtomicUsize::new(0), link: AtomicU32::new(0), polled_ns: AtomicU64::new(0) }
}; 64];

impl PolledOperation {
    /// Takes the slot out, when it is still this one.
    pub fn take(&self, slot: usize) -> bool {
        self.link.compare_exchange(slot as u32 + 1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// What tells this process's recorder from the one of the process that it was forked from.
pub fn recorder_address(recorder: &'static Recorder) -> usize {
    std::ptr::from_ref(recorder) as usize
}

pub fn publish(recorder: &'static Recorder, slot: usize, now: u64) -> Option<(usize, usize)> {
    for (place, open) in POLLED.iter().enumerate() {
        // A place that is being filled belongs to nobody's recorder.
        if open.link.compare_exchange(0, slot as u32 + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            open.polled_ns.store(now, Ordering::Relaxed);
            open.recorder.store(recorder_address(recorder), Ordering::Release);
            return Some((place, slot));
        }
    }
    leave(recorder, slot);
    None
}

/// Ends what no thread has asked for lately; for the watcher.
pub fn expire(recorder: &'static Recorder) {
    let now = clock::now_ns();
    for open in &POLLED {
        let Some(slot) = open.link.load(Ordering::Acquire).checked_sub(1).map(|slot| slot as usize) else { continue };
        if open.recorder.load(Ordering::Acquire) != recorder_address(recorder) {
            // Of the process that this one was forked from, unless it is just being filled.
            if now.saturating_sub(open.polled_ns.load(Ordering::Relaxed)) > STOPPED_NS {
                open.take(slot);
            }
            continue;
        }
        if now.saturating_sub(open.polled_ns.load(Ordering::Relaxed)) > STOPPED_NS && open.take(slot) {
            leave(recorder, slot);
        }
    }
}
