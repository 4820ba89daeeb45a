//! Operations that a thread polls for instead of blocking.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::runtime::{
    os::clock,
    recorder::{Recorder, host_operations::leave},
};

/// A thread that has not polled for this long has stopped polling.
pub const STOPPED_NS: u64 = 3_000_000_000;

/// An operation that a thread polls for. Either its thread or the watcher takes the slot out and
/// ends the operation.
pub struct PolledOperation {
    pub recorder: AtomicUsize,
    /// Slot plus one, 0 for a free entry.
    pub link: AtomicU32,
    pub polled_ns: AtomicU64,
}

/// Number of polling threads that can be observed at the same time.
pub static POLLED: [PolledOperation; 64] = [const {
    PolledOperation { recorder: AtomicUsize::new(0), link: AtomicU32::new(0), polled_ns: AtomicU64::new(0) }
}; 64];

impl PolledOperation {
    /// Takes the slot out, if the entry still contains it.
    pub fn take(&self, slot: usize) -> bool {
        self.link.compare_exchange(slot as u32 + 1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// Distinguishes this process's recorder from that of the process that forked it.
pub fn recorder_address(recorder: &'static Recorder) -> usize {
    std::ptr::from_ref(recorder) as usize
}

pub fn publish(recorder: &'static Recorder, slot: usize, now: u64) -> Option<(usize, usize)> {
    for (place, open) in POLLED.iter().enumerate() {
        // An entry that is being filled has no recorder yet.
        if open.link.compare_exchange(0, slot as u32 + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            open.polled_ns.store(now, Ordering::Relaxed);
            open.recorder.store(recorder_address(recorder), Ordering::Release);
            return Some((place, slot));
        }
    }
    leave(recorder, slot);
    None
}

/// Ends operations that no thread has polled for lately. Called by the watcher.
pub fn expire(recorder: &'static Recorder) {
    let now = clock::now_ns();
    for open in &POLLED {
        let Some(slot) = open.link.load(Ordering::Acquire).checked_sub(1).map(|slot| slot as usize) else { continue };
        if open.recorder.load(Ordering::Acquire) != recorder_address(recorder) {
            // The entry belongs to the process that forked this one, unless it is being filled.
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
