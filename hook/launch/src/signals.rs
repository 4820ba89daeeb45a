//! What the command inherits: before `main`, Rust's runtime ignores SIGPIPE and opens /dev/null for closed standard streams. The
//! command must see neither.

use std::{
    mem::MaybeUninit,
    sync::atomic::{AtomicBool, Ordering},
};

static IGNORED: AtomicBool = AtomicBool::new(false);
/// By descriptor, whether a standard stream was closed.
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// Looks at SIGPIPE and the standard streams before the runtime changes them.
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
        for (fd, closed) in (0..).zip(&CLOSED) {
            // SAFETY: only asks for the flags of a descriptor, which may be closed.
            closed.store(unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1, Ordering::Relaxed);
        }
    }
    look
};

/// Puts SIGPIPE back to how this process got it. Standard streams that were closed will be when another program is executed.
pub fn as_inherited() {
    let action = if IGNORED.load(Ordering::Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: one of the two actions that a process can inherit.
    unsafe { libc::signal(libc::SIGPIPE, action) };
    for (fd, _) in (0..).zip(&CLOSED).filter(|(_, closed)| closed.load(Ordering::Relaxed)) {
        // SAFETY: sets the flag of a descriptor that the runtime has opened.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}
