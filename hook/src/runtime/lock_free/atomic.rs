//! The atomics, sizes, prefetches and hash function of the lock-free data structures.
//! `tests/models` compiles the other files of this folder with the atomics of loom and smaller
//! sizes in place of this file.

use std::cell::UnsafeCell;

pub use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// Spare events per lane. Further events go to the pool of their context.
pub const LANE_EVENTS: usize = 1024;

/// Contexts whose events are reused. The events of further contexts are created and destroyed each
/// time.
pub const CONTEXTS: usize = 16;

/// Spare events per context. Further events are destroyed.
pub const POOL_EVENTS: usize = 512;

/// A word that only one thread at a time may access.
pub struct Word(UnsafeCell<usize>);

// SAFETY: the callers guarantee that no two threads access a word at the same time.
unsafe impl Sync for Word {}

impl Word {
    /// A word of 0.
    pub fn new() -> Self {
        Word(UnsafeCell::new(0))
    }

    /// Reads the word.
    ///
    /// # Safety
    /// No other thread writes the word at the same time.
    pub unsafe fn get(&self) -> usize {
        // SAFETY: by the contract of this function, no other thread writes the word.
        unsafe { *self.0.get() }
    }

    /// Replaces the word.
    ///
    /// # Safety
    /// No other thread reads or writes the word at the same time.
    pub unsafe fn set(&self, word: usize) {
        // SAFETY: by the contract of this function, no other thread accesses the word.
        unsafe { *self.0.get() = word }
    }
}

/// Prefetches the cache line of a word that is written soon. The watcher wrote the words of the
/// ring last, often on another core.
#[inline(always)]
pub fn prefetch<T>(word: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: this hint only affects the cache; a processor without the instruction executes it as
    // a no-op. The compiler's intrinsic emits the prefetch for reading, because the first x86-64
    // processors lacked this one.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) std::ptr::from_ref(word), options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

/// Knuth's multiplicative hash: 2^64 divided by the golden ratio. It spreads neighbouring keys such
/// as handles.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// Where the search for a key begins in a table of `PLACES` entries, a power of two. The highest
/// bits of the product depend on every bit of the key.
#[inline(always)]
pub fn home_slot<const PLACES: usize>(key: u64) -> usize {
    const { assert!(PLACES.is_power_of_two() && PLACES > 1) };
    (key.wrapping_mul(FACTOR) >> (64 - PLACES.trailing_zeros())) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_handles_spread_over_the_whole_table() {
        let used: std::collections::BTreeSet<usize> = (1..=1024).map(|handle| home_slot::<256>(handle * 64)).collect();
        assert!(used.len() > 240, "{}", used.len());
        assert_ne!(home_slot::<4096>(7), home_slot::<4096>(7 | 1 << 63), "also the highest bit counts");
    }
}
