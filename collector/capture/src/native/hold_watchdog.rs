//! A watchdog that kills this process if it holds a stopped thread for too long.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// Maximum time for which an expendable process holds a thread. It is longer than the time limit
/// for a thread to stop.
const MAX_HOLD: Duration = Duration::from_millis(400);

static EXPENDABLE: AtomicBool = AtomicBool::new(false);

/// From now on, the kernel kills this process if it holds a thread for longer than
/// [`MAX_HOLD`], whatever prevents the release: a SIGSTOP, a debugger, a freezer, a busy
/// machine.
pub(crate) fn enable() {
    EXPENDABLE.store(true, Ordering::Relaxed);
}

/// A timer that kills this process unless it is dropped in time. SIGKILL also ends processes that
/// are stopped or frozen.
///
/// It uses system calls directly, because the functions of glibc 2.34 have a symbol version that
/// older systems lack.
pub(super) struct Watchdog(libc::c_int);

impl Watchdog {
    /// `None` in a process that may not be killed. After an error, no thread may be stopped.
    #[allow(unsafe_code)]
    pub fn new() -> io::Result<Option<Self>> {
        if !EXPENDABLE.load(Ordering::Relaxed) {
            return Ok(None);
        }
        // SAFETY: sigevent is plain data, and zeros are valid for it.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGKILL;
        let mut timer: libc::c_int = 0;
        // SAFETY: `event` is valid for reading and has the kernel's layout. `timer`, an int for the
        // kernel, is valid for writing.
        let result =
            unsafe { libc::syscall(libc::SYS_timer_create, libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        if result == 0 { Ok(Some(Watchdog(timer))) } else { Err(io::Error::last_os_error()) }
    }

    #[allow(unsafe_code)]
    pub fn start(&self) -> io::Result<()> {
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let after = libc::timespec { tv_sec: 0, tv_nsec: MAX_HOLD.as_nanos() as i64 };
        let once = libc::itimerspec { it_interval: never, it_value: after };
        // SAFETY: the timer exists until `self` is dropped, and `once` is valid for reading.
        let result = unsafe {
            libc::syscall(libc::SYS_timer_settime, self.0, 0, &raw const once, std::ptr::null_mut::<libc::itimerspec>())
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Watchdog {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: `new` created the timer, and nobody else uses it.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.0) };
    }
}
