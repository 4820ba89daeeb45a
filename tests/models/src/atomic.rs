//! In place of the hook's `atomic.rs`: the atomics of loom, with sizes that can be explored, and with orderings that a test can weaken.

use loom::cell::UnsafeCell;
pub use loom::sync::atomic::Ordering;

/// As the hook's, smaller.
pub const LANE_EVENTS: usize = 2;
/// As above.
pub const CONTEXTS: usize = 2;
/// As above.
pub const POOL_EVENTS: usize = 2;

/// Which ordering is weakened.
pub mod weakening {
    use std::{
        collections::BTreeSet,
        panic::Location,
        sync::{Mutex, MutexGuard, PoisonError},
    };

    use super::Ordering;

    static BUSY: Mutex<()> = Mutex::new(());
    /// Places where an ordering is given, as file, line and column; of a compare-exchange the second is that of its failure.
    static SITES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    static WEAKENED: Mutex<String> = Mutex::new(String::new());

    fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all sites. One model at a time.
    pub fn begin() -> MutexGuard<'static, ()> {
        let busy = locked(&BUSY);
        locked(&SITES).clear();
        busy
    }

    /// Sites seen since then with an ordering that can be weakened.
    pub fn sites() -> Vec<String> {
        locked(&SITES).iter().cloned().collect()
    }

    /// Weakens one.
    pub fn weaken(site: &str) {
        *locked(&WEAKENED) = site.into();
    }

    #[track_caller]
    pub(super) fn shipped(ordering: Ordering, number: u8) -> Ordering {
        if ordering == Ordering::Relaxed {
            return ordering;
        }
        let site = format!("{} {number}", Location::caller());
        if *locked(&WEAKENED) == site {
            return Ordering::Relaxed;
        }
        locked(&SITES).insert(site);
        ordering
    }
}

use weakening::shipped;

/// A fence; one that is weakened is none.
#[track_caller]
pub fn fence(ordering: Ordering) {
    let ordering = shipped(ordering, 0);
    if ordering != Ordering::Relaxed {
        loom::sync::atomic::fence(ordering);
    }
}

macro_rules! atomics {
    ($($name:ident $value:ty;)*) => {$(
        /// That of loom, and a word that every load writes.
        ///
        /// Loom (0.7.3) compares an access with the last dependent one alone, and takes two loads for independent. A thread that loads
        /// a word and then stores to it hides the earlier load of another thread in this way: loom never runs the two the other way
        /// round. Stores to a second word make loads of the first dependent on each other, and say nothing about memory.
        #[derive(Debug, Default)]
        pub struct $name(loom::sync::atomic::$name, loom::sync::atomic::AtomicU8);

        #[allow(missing_docs)]
        impl $name {
            pub fn new(value: $value) -> Self {
                Self(loom::sync::atomic::$name::new(value), loom::sync::atomic::AtomicU8::new(0))
            }

            #[track_caller]
            pub fn load(&self, ordering: Ordering) -> $value {
                self.1.store(0, Ordering::Relaxed);
                self.0.load(shipped(ordering, 0))
            }

            #[track_caller]
            pub fn store(&self, value: $value, ordering: Ordering) {
                self.0.store(value, shipped(ordering, 0));
            }

            #[track_caller]
            pub fn swap(&self, value: $value, ordering: Ordering) -> $value {
                self.0.swap(value, shipped(ordering, 0))
            }

            /// # Errors
            /// The value, when it is another one.
            #[track_caller]
            pub fn compare_exchange(&self, from: $value, to: $value, success: Ordering, failure: Ordering) -> Result<$value, $value> {
                self.0.compare_exchange(from, to, shipped(success, 0), shipped(failure, 1))
            }

            /// # Errors
            /// As above.
            #[track_caller]
            pub fn compare_exchange_weak(&self, from: $value, to: $value, success: Ordering, failure: Ordering) -> Result<$value, $value> {
                self.0.compare_exchange_weak(from, to, shipped(success, 0), shipped(failure, 1))
            }
        }
    )*};
}

atomics! {
    AtomicU8 u8;
    AtomicU16 u16;
    AtomicU32 u32;
    AtomicU64 u64;
    AtomicUsize usize;
}

/// A word that one thread at a time may touch; loom fails when two do.
pub struct Word(UnsafeCell<usize>);

#[allow(clippy::missing_safety_doc, reason = "as the hook's")]
impl Word {
    /// A word of 0.
    pub fn new() -> Self {
        Word(UnsafeCell::new(0))
    }

    /// The word.
    pub unsafe fn get(&self) -> usize {
        // SAFETY: as the hook's; loom checks it.
        self.0.with(|word| unsafe { *word })
    }

    /// Replaces the word.
    pub unsafe fn set(&self, word: usize) {
        // SAFETY: as above.
        self.0.with_mut(|place| unsafe { *place = word });
    }
}

// SAFETY: loom fails when two threads touch the word at once.
unsafe impl Sync for Word {}
