//! Restores what the command inherits: before `main`, Rust's runtime ignores SIGPIPE and opens
//! /dev/null for closed standard streams. The command must see neither.

use std::{
    mem::MaybeUninit,
    sync::atomic::{AtomicBool, Ordering},
};

static IGNORED: AtomicBool = AtomicBool::new(false);
/// Whether each standard stream was closed, by descriptor.
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Records SIGPIPE and the standard streams before the runtime changes them.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn look() {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: only reads the action, into valid zeroed memory.
        let action = unsafe {
            libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Ordering::Relaxed);
        for (fd, closed) in (0..).zip(&CLOSED) {
            // SAFETY: only reads the flags of a descriptor, which may be closed.
            closed.store(unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1, Ordering::Relaxed);
        }
    }
    look
};

/// Restores the inherited action of SIGPIPE. Standard streams that were closed are closed again
/// when another program is executed.
pub fn as_inherited() {
    let action = if IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: the action is one of the two that a process can inherit.
    unsafe { libc::signal(libc::SIGPIPE, action) };
    for (fd, _) in (0..).zip(&CLOSED).filter(|(_, closed)| closed.load(Ordering::Relaxed)) {
        // SAFETY: sets a flag of a descriptor that the runtime opened.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}
