//! Replaces the hook's `atomic.rs`: loom's atomics, with sizes that loom can explore, and with
//! orderings that a test can weaken.

use loom::cell::UnsafeCell;
pub use loom::sync::atomic::Ordering;

/// Like the hook's constant, but smaller.
pub const LANE_EVENTS: usize = 2;
/// Like the hook's constant, but smaller.
pub const CONTEXTS: usize = 2;
/// Like the hook's constant, but smaller.
pub const POOL_EVENTS: usize = 2;

/// Replaces the hook's function. A model has no caches.
pub fn prefetch<T>(_: &T) {}

/// Selects the ordering that is weakened.
pub mod weakening {
    use std::{
        collections::BTreeSet,
        panic::Location,
        sync::{Mutex, MutexGuard, PoisonError},
    };

    use super::Ordering;

    static BUSY: Mutex<()> = Mutex::new(());
    /// The sites of orderings, as file, line and column. The second site of a compare-exchange is
    /// that of its failure ordering.
    static SITES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    static WEAKENED: Mutex<String> = Mutex::new(String::new());

    fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Clears all sites. Only one model runs at a time.
    pub fn begin() -> MutexGuard<'static, ()> {
        let busy = locked(&BUSY);
        locked(&SITES).clear();
        busy
    }

    /// The sites seen since `begin` whose ordering can be weakened.
    pub fn sites() -> Vec<String> {
        locked(&SITES).iter().cloned().collect()
    }

    /// Weakens the ordering of a site.
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

/// A fence. A weakened fence does nothing.
#[track_caller]
pub fn fence(ordering: Ordering) {
    let ordering = shipped(ordering, 0);
    if ordering != Ordering::Relaxed {
        loom::sync::atomic::fence(ordering);
    }
}

macro_rules! atomics {
    ($($name:ident $value:ty;)*) => {$(
        /// Loom's atomic, and an additional word that every load writes.
        ///
        /// Loom (0.7.3) compares an access only with the last dependent one, and treats two loads
        /// as independent. A thread that loads a word and then stores to it hides the earlier load
        /// of another thread: loom never runs the two in the opposite order. Stores to a second
        /// word make loads of the first word dependent on each other, without any effect on memory
        /// ordering.
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
            /// The current value, if it differs.
            #[track_caller]
            pub fn compare_exchange(&self, from: $value, to: $value, success: Ordering, failure: Ordering) -> Result<$value, $value> {
                self.0.compare_exchange(from, to, shipped(success, 0), shipped(failure, 1))
            }

            /// # Errors
            /// The current value, if it differs.
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

/// A word that only one thread may access at a time; loom fails otherwise.
pub struct Word(UnsafeCell<usize>);

#[allow(clippy::missing_safety_doc, reason = "as the hook's")]
impl Word {
    /// A word with the value 0.
    pub fn new() -> Self {
        Word(UnsafeCell::new(0))
    }

    /// The word.
    pub unsafe fn get(&self) -> usize {
        // SAFETY: the caller upholds the same contract as in the hook; loom checks it.
        self.0.with(|word| unsafe { *word })
    }

    /// Replaces the word.
    pub unsafe fn set(&self, word: usize) {
        // SAFETY: the caller upholds the same contract as in the hook; loom checks it.
        self.0.with_mut(|place| unsafe { *place = word });
    }
}

// SAFETY: loom fails if two threads access the word at the same time.
unsafe impl Sync for Word {}
