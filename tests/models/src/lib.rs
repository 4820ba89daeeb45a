//! The files of the hook that have no locks, as they ship, on the atomics of loom. The models are in `tests/models.rs`.
//!
//! [`check`] explores a model with the orderings that ship. Then it weakens them, one after the other, to `Relaxed`: a model
//! that does not notice proves nothing about that ordering.

#![allow(clippy::new_without_default, clippy::len_without_is_empty, reason = "private parts of the hook, public here")]

pub mod atomic;
#[path = "../../../hook/src/runtime/lock_free/counter.rs"]
pub mod counter;
#[path = "../../../hook/src/runtime/lock_free/event_pools.rs"]
pub mod event_pools;
#[path = "../../../hook/src/runtime/lock_free/handoff.rs"]
pub mod handoff;
#[path = "../../../hook/src/runtime/lock_free/queue.rs"]
#[allow(unsafe_code)]
pub mod queue;
#[path = "../../../hook/src/runtime/lock_free/slot.rs"]
pub mod slot;

/// In place of the hook's.
pub mod cpu {
    /// The model has no caches.
    pub fn prefetch<T>(_: &T) {}
}

use std::process::Command;

use atomic::weakening;

/// How many times a thread may be interrupted where it need not be. Most mistakes show with two.
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

/// In the environment of a process that explores with one ordering weakened.
const WEAKENED: &str = "XPU_TIMER_MODELS_WEAKENED";

/// Explores the models of a file, and requires that one of them fails with each of the file's orderings weakened. `test` is the name of
/// the calling test: that is run again for each, in a process of its own, because a model that fails may end its process.
///
/// # Panics
/// When a model fails, or none does although an ordering is weakened.
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
