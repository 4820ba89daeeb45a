//! The lock-free files of the hook, unchanged, with loom's atomics. The models are in
//! `tests/models.rs`.
//!
//! [`check`] explores a model with the original orderings. Then it weakens one ordering after the
//! other to `Relaxed`: a model that still passes proves nothing about that ordering.

#![allow(clippy::new_without_default, clippy::len_without_is_empty, reason = "private parts of the hook, public here")]

pub mod atomic;
#[path = "../../../hook/src/runtime/lock_free/event_pools.rs"]
#[allow(unsafe_code)]
pub mod event_pools;
#[path = "../../../hook/src/runtime/lock_free/handoff.rs"]
pub mod handoff;
#[path = "../../../hook/src/runtime/lock_free/slot.rs"]
pub mod slot;

use std::process::Command;

use atomic::weakening;

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
