//! The lock-free files of the hook, unchanged, with loom's atomics. The models are in
//! `tests/models.rs`.
//!
//! [`check`] explores a model with the original orderings. Then it weakens one ordering after the
//! other to `Relaxed`: a model that still passes proves nothing about that ordering.

#![allow(clippy::new_without_default, clippy::len_without_is_empty, reason = "private parts of the hook, public here")]

#[path = "../../../hook/src/runtime/lock_free/event_pools.rs"]
#[allow(unsafe_code)]
pub mod event_pools;
#[path = "../../../hook/src/runtime/lock_free/handoff.rs"]
pub mod handoff;
#[path = "../../../hook/src/runtime/lock_free/slot.rs"]
pub mod slot;

use std::process::Command;

use atomic::weakening;

/// Replaces the hook's `atomic.rs`: loom's atomics, with sizes that loom can explore, and with
/// orderings that a test can weaken.
pub mod atomic {
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
        /// The sites of orderings, as file, line and column. The second site of a compare-exchange
        /// is that of its failure ordering.
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
            /// Loom (0.7.3) compares an access only with the last dependent one, and treats two
            /// loads as independent. A thread that loads a word and then stores to it hides the
            /// earlier load of another thread: loom never runs the two in the opposite order.
            /// Stores to a second word make loads of the first word dependent on each other,
            /// without any effect on memory ordering.
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
}

/// Maximum number of preemptions of a thread. Two reveal most errors.
fn preemptions() -> Option<usize> {
    match std::env::var("XPU_TIMER_MODELS").as_deref() {
        // `cargo xtask model`: every interleaving.
        Ok("exhaustive") => None,
        _ => Some(2),
    }
}

/// Explores a model.
pub fn explore(model: fn()) {
    use std::sync::atomic::{AtomicU64, Ordering};

    static WAYS: AtomicU64 = AtomicU64::new(0);
    let before = WAYS.load(Ordering::Relaxed);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions();
    builder.max_branches = 10_000;
    builder.check(move || {
        WAYS.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} ways to come between each other", WAYS.load(Ordering::Relaxed) - before);
}

/// Environment variable of a process that explores with one weakened ordering.
const WEAKENED: &str = "XPU_TIMER_MODELS_WEAKENED";

/// Explores the models of a file, and requires that at least one fails for each weakened ordering
/// of the file. `test` is the name of the calling test. It runs again in a separate process for
/// each ordering, because a failing model may end its process.
///
/// # Panics
/// A model fails, or none fails although an ordering is weakened.
pub fn check(test: &str, file: &str, models: &[fn()]) {
    let _one_at_a_time = weakening::begin();
    if let Ok(site) = std::env::var(WEAKENED) {
        weakening::weaken(&site);
        return models.iter().copied().for_each(explore);
    }
    models.iter().copied().for_each(explore);
    let sites = weakening::sites();
    let sites: Vec<String> = sites.into_iter().filter(|site| site.contains(&format!("/{file}:"))).collect();
    assert!(!sites.is_empty(), "{file}: no ordering is used");
    let own = std::env::current_exe().expect("a test is a program");
    let is_unnoticed = |site: &&String| {
        let mut weakened = Command::new(&own);
        weakened.args(["--exact", test]).env(WEAKENED, site).env("RUST_BACKTRACE", "0");
        weakened.output().expect("it can be run again").status.success()
    };
    let unnoticed: Vec<&String> = sites.iter().filter(is_unnoticed).collect();
    assert!(unnoticed.is_empty(), "{file}: no model notices when these are Relaxed: {unnoticed:?}");
    println!("{file}: {} orderings, and each one weakened is found", sites.len());
}
