//! Whether the hook learns of libraries that are loaded later.

use std::sync::atomic::{AtomicBool, Ordering};

static LISTENS: AtomicBool = AtomicBool::new(false);

/// Whether the hook learns of libraries that are loaded later. It does not when that is turned off,
/// when the system forbids a change of code, under a debugger, and in some forked children.
pub fn listens() -> bool {
    LISTENS.load(Ordering::Relaxed) && !has_stopped_listening()
}

/// Sets whether the hook learns of them.
pub fn set_listening(listens: bool) {
    LISTENS.store(listens, Ordering::Relaxed);
}

static DEAF: AtomicBool = AtomicBool::new(false);

/// Whether it has stopped for good.
pub fn has_stopped_listening() -> bool {
    DEAF.load(Ordering::Relaxed)
}

/// Stops it for good.
pub fn stop_listening() {
    DEAF.store(true, Ordering::Relaxed);
}
