//! Whether the hook hears of libraries that are loaded later.

use std::sync::atomic::{AtomicBool, Ordering};

static LISTENS: AtomicBool = AtomicBool::new(false);

/// Whether the hook hears of libraries that are loaded later. Not so when that is turned off, when the system does not let code be
/// changed, under a debugger, and in some forked children.
pub fn listens() -> bool {
    LISTENS.load(Ordering::Relaxed) && !has_stopped_listening()
}

/// From now on the hook hears of them, or it does not.
pub fn set_listening(listens: bool) {
    LISTENS.store(listens, Ordering::Relaxed);
}

static DEAF: AtomicBool = AtomicBool::new(false);

/// Whether it has stopped listening.
pub fn has_stopped_listening() -> bool {
    DEAF.load(Ordering::Relaxed)
}

/// It stops listening, for good.
pub fn stop_listening() {
    DEAF.store(true, Ordering::Relaxed);
}
