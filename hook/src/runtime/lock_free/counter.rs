//! Counters with one writer and any number of readers. They need no atomic read-modify-write.

use super::atomic::{AtomicU64, Ordering};

/// Adds to a word that only the calling thread writes.
#[inline(always)]
pub fn add(word: &AtomicU64, by: u64) {
    word.store(word.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// Replaces `from` by `me` as the owner of a lane. False when another thread was faster.
pub fn claim(owner: &AtomicU64, from: u64, me: u64) -> bool {
    owner.compare_exchange(from, me, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
