//! Operations that host threads execute. The host begins and ends them, the watcher observes them,
//! and the thread that ends an operation frees its slot.
//!
//! An MPI program makes many more calls than the watcher has turns, so a slot does not travel to
//! the watcher and back. While an operation is open, a cell of a small table refers to it; when it
//! ends, its slot is free at once. Neither side waits for the other.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use xpu_timer_proto::{
    ring::{comm, header, offset, op, pack_halves, store_wait},
    v1::{OpKind, OpStatus},
};

use crate::runtime::{
    lock_free::slot::state,
    os::{clock, thread_state},
    recorder::{NewOperation, Recorder, operations::members, store_text},
};

/// Begins an operation that a host thread executes. Its age counts from now.
pub(crate) fn open(recorder: &'static Recorder, what: &NewOperation) -> Option<usize> {
    let slot = queue(recorder, what)?;
    mark_started(recorder, slot);
    Some(slot)
}

/// The ranks of a job do not start at the same time: each must load its libraries, on a machine
/// where the others do so too. So the timeout of the first collective call of all ranks begins this
/// much later.
pub(crate) const STARTUP_GRACE_NS: u64 = 10_000_000_000;

/// Adds the startup grace to an operation that is the first rendezvous with the other ranks.
pub(crate) fn grant_startup_grace(recorder: &'static Recorder, slot: usize) {
    recorder.slots[slot].since_ns.store(clock::now_ns() + STARTUP_GRACE_NS, Ordering::Relaxed);
}

/// Begins an operation that another host thread will execute. Its age counts from now.
pub(crate) fn queue(recorder: &'static Recorder, what: &NewOperation) -> Option<usize> {
    let slot = recorder.begin_unwatched(what)?;
    let cell = recorder.open_calls.put(slot, thread_state::with(|thread| thread.tid()));
    if cell == 0 {
        recorder.count(header::OVERFLOWS);
    }
    recorder.slots[slot].output.store(cell, Ordering::Relaxed);
    Some(slot)
}

/// Begins an operation that the same call executes, and that ends with `leader`.
pub(crate) fn follow(recorder: &'static Recorder, leader: usize, what: &NewOperation) {
    let Some(slot) = recorder.begin_unwatched(what) else { return };
    mark_started(recorder, slot);
    let link = &recorder.slots[leader].follower;
    recorder.slots[slot].follower.store(link.load(Ordering::Relaxed), Ordering::Relaxed);
    link.store(slot as u32 + 1, Ordering::Relaxed);
}

/// Records that a host thread executes the operation now.
pub(crate) fn mark_started(recorder: &'static Recorder, slot: usize) {
    recorder.ring.op(slot)[op::STARTED_NS].store(clock::now_ns(), Ordering::Relaxed);
    recorder.raise_counter(slot, comm::STARTED);
}

/// Ends an operation and its followers.
pub(crate) fn close(recorder: &'static Recorder, leader: usize, status: OpStatus, error: u32) {
    if status == OpStatus::Completed {
        for slot in members(recorder, leader) {
            recorder.raise_counter(slot, comm::COMPLETED);
        }
    }
    free(recorder, leader, status, error);
}

/// The host stops waiting for an operation and its followers, whose outcome is unknown.
pub(crate) fn leave(recorder: &'static Recorder, leader: usize) {
    free(recorder, leader, OpStatus::Completed, 0);
}

pub(crate) fn free(recorder: &'static Recorder, leader: usize, status: OpStatus, error: u32) {
    let now = clock::now_ns();
    for slot in members(recorder, leader) {
        recorder.returned(slot, now);
        recorder.settle(slot, status, error, now);
    }
    recorder.open_calls.clear(recorder.slots[leader].output.swap(0, Ordering::Relaxed));
    for slot in members(recorder, leader) {
        recorder.slots[slot].become_state(state::FREE);
    }
}

/// A call that may block and whose meaning is unknown. Only its name is recorded.
pub(crate) fn named_host_call(recorder: &'static Recorder, name: &'static str) -> NewOperation {
    NewOperation {
        seq: recorder.next_host_call(),
        function: recorder.name_key(name),
        ..NewOperation::new(OpKind::HostCall, xpu_timer_proto::v1::Op::Unspecified)
    }
}

/// Bytes of the keys in an entry.
const KEY_BYTES: usize = (store_wait::WORDS - store_wait::TEXT) * 8;

/// Records the keys that an open call waits for in a store: their number, and the first of them
/// that fit, each ended by a zero byte.
pub(crate) fn await_keys<'a>(recorder: &'static Recorder, slot: usize, keys: impl Iterator<Item = &'a [u8]>) {
    let Some(cell) = recorder.slots[slot].output.load(Ordering::Relaxed).checked_sub(1) else { return };
    let entry = recorder.ring.entry(offset::STORE_WAITS, cell, store_wait::WORDS);
    let mut bytes = [0; KEY_BYTES];
    let (mut used, mut count, mut is_full) = (0, 0, false);
    for key in keys {
        count += 1;
        is_full |= used > 0 && key.len() >= KEY_BYTES.saturating_sub(used);
        if !is_full {
            // The last byte stays zero.
            let length = key.len().min(KEY_BYTES - 1);
            bytes[used..used + length].copy_from_slice(&key[..length]);
            used += length + 1;
        }
    }
    entry[store_wait::TICKET].store(0, Ordering::Relaxed);
    std::sync::atomic::fence(Ordering::Release);
    entry[store_wait::KEYS].store(count, Ordering::Relaxed);
    store_text(&entry[store_wait::TEXT..], &bytes);
    entry[store_wait::TICKET].store(recorder.ring.op(slot)[op::TICKET].load(Ordering::Relaxed), Ordering::Release);
}

/// Sets the tag of a recorded operation that has none yet.
pub(crate) fn set_first_tag(recorder: &'static Recorder, slot: usize, tag: u32) {
    let word = &recorder.ring.op(slot)[op::TAG];
    if word.load(Ordering::Relaxed) == 0 {
        word.store(pack_halves(tag, 1), Ordering::Relaxed);
    }
}

/// A thread that has not polled for this long has stopped polling.
pub(crate) const POLLING_STOPPED_NS: u64 = 3_000_000_000;

/// An operation that a thread polls for instead of blocking. Either its thread or the watcher takes
/// the slot out and ends the operation.
pub(crate) struct PolledOperation {
    pub recorder: AtomicUsize,
    /// Slot plus one, 0 for a free entry.
    pub link: AtomicU32,
    pub polled_ns: AtomicU64,
}

/// Number of polling threads that can be observed at the same time.
pub(crate) static POLLED: [PolledOperation; 64] = [const {
    PolledOperation { recorder: AtomicUsize::new(0), link: AtomicU32::new(0), polled_ns: AtomicU64::new(0) }
}; 64];

impl PolledOperation {
    /// Takes the slot out, if the entry still contains it.
    pub(crate) fn take(&self, slot: usize) -> bool {
        self.link.compare_exchange(slot as u32 + 1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// Distinguishes this process's recorder from that of the process that forked it.
pub(crate) fn recorder_address(recorder: &'static Recorder) -> usize {
    std::ptr::from_ref(recorder) as usize
}

pub(crate) fn publish_polled(recorder: &'static Recorder, slot: usize, now: u64) -> Option<(usize, usize)> {
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
pub(crate) fn expire_polled(recorder: &'static Recorder) {
    let now = clock::now_ns();
    for open in &POLLED {
        let Some(slot) = open.link.load(Ordering::Acquire).checked_sub(1).map(|slot| slot as usize) else { continue };
        if open.recorder.load(Ordering::Acquire) != recorder_address(recorder) {
            // The entry belongs to the process that forked this one, unless it is being filled.
            if now.saturating_sub(open.polled_ns.load(Ordering::Relaxed)) > POLLING_STOPPED_NS {
                open.take(slot);
            }
            continue;
        }
        if now.saturating_sub(open.polled_ns.load(Ordering::Relaxed)) > POLLING_STOPPED_NS && open.take(slot) {
            leave(recorder, slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::recorder::OPEN_CALL_CELLS;

    #[test]
    fn a_hundred_thousand_calls_need_no_watcher() {
        let recorder = Recorder::for_test();
        for seq in 0..100_000 {
            let slot = open(recorder, &NewOperation::barrier_for_test(seq)).expect("the slots are free again");
            assert_eq!(recorder.open_calls.slots().collect::<Vec<_>>(), [slot]);
            close(recorder, slot, OpStatus::Completed, 0);
        }
        assert_eq!(recorder.open_calls.slots().count(), 0);
        assert_eq!(recorder.ring.header(header::DROPPED).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_keys_of_an_open_call_are_recorded_as_far_as_they_fit() {
        let recorder = Recorder::for_test();
        let entry = |slot: usize| {
            let cell = recorder.slots[slot].output.load(Ordering::Relaxed) - 1;
            let entry = recorder.ring.entry(offset::STORE_WAITS, cell, store_wait::WORDS);
            let words: Vec<u64> = entry.iter().map(|word| word.load(Ordering::Relaxed)).collect();
            let bytes: Vec<u8> = words[store_wait::TEXT..].iter().flat_map(|word| word.to_le_bytes()).collect();
            (words[store_wait::TICKET], words[store_wait::KEYS], bytes)
        };
        let slot = open(recorder, &NewOperation::barrier_for_test(1)).unwrap();
        await_keys(recorder, slot, [&b"done.0"[..], b"done.1"].into_iter());
        let (ticket, count, bytes) = entry(slot);
        assert_eq!((ticket, count), (recorder.ring.op(slot)[op::TICKET].load(Ordering::Relaxed), 2));
        assert!(bytes.starts_with(b"done.0\0done.1\0\0"), "{bytes:?}");
        // The second key does not fit, and the third one, which would, does not take its place.
        let long = [b'x'; KEY_BYTES];
        await_keys(recorder, slot, [&b"first"[..], &long, b"third"].into_iter());
        let (_, count, bytes) = entry(slot);
        assert_eq!((count, &bytes[..7]), (3, &b"first\0\0"[..]));
        await_keys(recorder, slot, std::iter::once(&long[..]));
        let (_, count, bytes) = entry(slot);
        assert_eq!((count, bytes.iter().position(|byte| *byte == 0)), (1, Some(KEY_BYTES - 1)));
        close(recorder, slot, OpStatus::Completed, 0);
    }

    #[test]
    fn more_open_calls_than_cells_are_recorded_and_counted() {
        let recorder = Recorder::for_test();
        let slots: Vec<usize> = (0..OPEN_CALL_CELLS as u64 + 3)
            .map(|seq| open(recorder, &NewOperation::barrier_for_test(seq)).unwrap())
            .collect();
        assert_eq!(recorder.open_calls.slots().count(), OPEN_CALL_CELLS);
        assert_eq!(recorder.ring.header(header::OVERFLOWS).load(Ordering::Relaxed), 3);
        for slot in slots {
            close(recorder, slot, OpStatus::Completed, 0);
        }
        assert_eq!(recorder.open_calls.slots().count(), 0);
    }
}
