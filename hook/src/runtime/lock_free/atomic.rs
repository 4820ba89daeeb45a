//! What the parts without locks are made of. `tests/models` compiles the same files ([`super::slot`], [`super::handoff`],
//! [`super::queue`], [`super::event_pools`], [`super::counter`]) with the atomics of loom and smaller sizes in place of these.

use std::cell::UnsafeCell;
pub use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// Spare events a lane keeps; more go to the pool of their context.
pub const LANE_EVENTS: usize = 1024;

/// Contexts whose events are kept for reuse; those of further ones are made and destroyed each time.
pub const CONTEXTS: usize = 16;

/// Spare events a context keeps; more are destroyed.
pub const POOL_EVENTS: usize = 512;

/// A word that one thread at a time may touch.
pub struct Word(UnsafeCell<usize>);

// SAFETY: the callers of its functions promise that no two threads are in them at once.
unsafe impl Sync for Word {}

impl Word {
    /// A word of 0.
    pub fn new() -> Self {
        Word(UnsafeCell::new(0))
    }

    /// The word.
    ///
    /// # Safety
    /// No other thread writes it meanwhile.
    pub unsafe fn get(&self) -> usize {
        // SAFETY: as above.
        unsafe { *self.0.get() }
    }

    /// Replaces the word.
    ///
    /// # Safety
    /// No other thread reads or writes it meanwhile.
    pub unsafe fn set(&self, word: usize) {
        // SAFETY: as above.
        unsafe { *self.0.get() = word }
    }
}
