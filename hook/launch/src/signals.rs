//! What the command inherits: Rust's runtime ignores SIGPIPE before `main`, and the command must not.

use std::{
    mem::MaybeUninit,
    sync::atomic::{AtomicBool, Ordering},
};

static IGNORED: AtomicBool = AtomicBool::new(false);

/// Looks at SIGPIPE before the runtime changes it.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn look() {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: only reads the action, into a place that is valid and zeroed.
        let action = unsafe {
            libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
    }
    look
};

/// Puts SIGPIPE back to how this process got it.
pub fn as_inherited() {
    let action = if IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: one of the two actions that a process can inherit.
    unsafe { libc::signal(libc::SIGPIPE, action) };
}
