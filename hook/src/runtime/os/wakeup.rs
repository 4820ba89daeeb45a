//! Wakes the watcher before its pause ends. A launching thread does so after many operations, and
//! an ending process does so for the final turn.
//!
//! This is a futex: the host cannot close it as it could close a descriptor, and a signal handler
//! may use it. A rank with as many operations as a training job never wakes the watcher.

use std::{
    sync::atomic::{AtomicU32, Ordering, fence},
    time::Duration,
};

use crate::runtime::os::seccomp;

static REQUESTED: AtomicU32 = AtomicU32::new(0);

/// Wakes the watcher, if this thread may make the system call. While an earlier request is
/// unanswered, this only reads one word.
#[cold]
pub(crate) fn wake_watcher() {
    if !seccomp::may_call() {
        return;
    }
    // The reason for the request was written before the word is read. The watcher clears the word
    // before it looks for reasons.
    fence(Ordering::SeqCst);
    if REQUESTED.load(Ordering::Relaxed) == 0 && REQUESTED.swap(1, Ordering::AcqRel) == 0 {
        futex_wake(&REQUESTED);
    }
}

/// Sleeps until a request comes, at most for `pause`. Only the watcher calls it.
pub(crate) fn wait(pause: Duration) {
    futex_wait(&REQUESTED, 0, pause);
    REQUESTED.swap(0, Ordering::SeqCst);
}

/// Sleeps while the word has this value, at most for `pause`. May return early without a reason.
/// Async-signal-safe.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, pause: Duration) {
    let time = libc::timespec {
        tv_sec: pause.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(pause.subsec_nanos() as i32),
    };
    // SAFETY: the word and the time are valid during the call, which changes neither.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            value,
            &raw const time,
        )
    };
}

/// Wakes all threads that sleep on the word. Async-signal-safe.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the kernel uses only the address of the word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_wakeup_before_or_during_the_pause_ends_it() {
        let begun = Instant::now();
        wake_watcher();
        wait(Duration::from_secs(600));
        std::thread::scope(|scope| {
            scope.spawn(|| wait(Duration::from_secs(600)));
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                wake_watcher();
            });
        });
        assert!(begun.elapsed() < Duration::from_secs(300));
        wait(Duration::from_millis(1));
    }
}
