//! The clocks. Under a seccomp filter only those are read that need no system call.

use crate::runtime::os::seccomp;

/// CLOCK_MONOTONIC in nanoseconds.
#[inline]
pub fn now_ns() -> u64 {
    clock_ns(if seccomp::may_read_clock() { libc::CLOCK_MONOTONIC } else { libc::CLOCK_MONOTONIC_COARSE })
}

/// `CLOCK_MONOTONIC` at the last timer tick: a few milliseconds old, and several times cheaper to
/// read.
#[inline]
pub fn coarse_now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

/// CPU time of the calling thread in nanoseconds. This is a system call, unlike the other clocks. A
/// thread that may not make it appears to compute all the time.
pub fn thread_cpu_ns() -> u64 {
    if seccomp::may_call() { clock_ns(libc::CLOCK_THREAD_CPUTIME_ID) } else { coarse_now_ns() }
}

/// How often the calling thread has given up the processor to wait for something, which includes
/// every sleep. The kernel does not count a thread whose processor was taken away, nor
/// `sched_yield`. This is a system call; a thread that may not make it appears never to sleep.
pub fn thread_sleeps() -> u64 {
    if !seccomp::may_call() {
        return 0;
    }
    // SAFETY: a zeroed rusage is valid, and `getrusage` only writes to it; RUSAGE_THREAD exists
    // since Linux 2.6.26.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage
    };
    usage.ru_nvcsw as u64
}

#[inline]
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec; both clocks exist since Linux 2.6.32.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;

    #[test]
    fn a_sleep_is_counted_and_a_yield_is_not() {
        // Another thread of the test runner may hold a lock of the allocator, so nothing is
        // allocated here.
        let before = thread_sleeps();
        (0..1000).for_each(|_| thread::yield_now());
        assert_eq!(thread_sleeps(), before);
        (0..3).for_each(|_| thread::sleep(Duration::from_millis(1)));
        assert!(thread_sleeps() >= before + 3);
    }

    #[test]
    fn the_coarse_clock_is_the_same_clock() {
        let (coarse, fine) = (coarse_now_ns(), now_ns());
        assert!(fine >= coarse && fine - coarse < 1_000_000_000, "{coarse} {fine}");
    }
}
