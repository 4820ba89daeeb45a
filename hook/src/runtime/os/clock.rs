//! The clocks. Under a seccomp filter only those are read that need no system call.

use std::sync::atomic::Ordering;

use xpu_timer_proto::ring::COARSE_TICK_NS;

use crate::runtime::os::{
    seccomp::{
        self,
        tsc::{self, FORBIDDEN, RATE, is_forbidden},
    },
    thread_state::ThreadState,
};

/// CLOCK_MONOTONIC in nanoseconds.
#[inline]
pub(crate) fn now_ns() -> u64 {
    clock_ns(if seccomp::may_read_clock() { libc::CLOCK_MONOTONIC } else { libc::CLOCK_MONOTONIC_COARSE })
}

/// `CLOCK_MONOTONIC` at the last timer tick: a few milliseconds old, and several times cheaper to
/// read.
#[inline]
pub(crate) fn coarse_now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

/// CPU time of the calling thread in nanoseconds. This is a system call, unlike the other clocks. A
/// thread that may not make it appears to compute all the time.
pub(crate) fn thread_cpu_ns() -> u64 {
    if seccomp::may_call() { clock_ns(libc::CLOCK_THREAD_CPUTIME_ID) } else { coarse_now_ns() }
}

/// How often the kernel has taken a thread from its processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Switches {
    /// Because it waited for something, which includes every sleep.
    pub sleeps: u64,
    /// Because another thread had a turn, which includes `sched_yield`.
    pub preemptions: u64,
}

/// The counts of the calling thread. This is a system call; a thread that may not make it appears
/// never to leave its processor.
pub(crate) fn thread_switches() -> Switches {
    if !seccomp::may_call() {
        return Switches { sleeps: 0, preemptions: 0 };
    }
    // SAFETY: a zeroed rusage is valid, and `getrusage` only writes to it; RUSAGE_THREAD exists
    // since Linux 2.6.26.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage
    };
    Switches { sleeps: usage.ru_nvcsw as u64, preemptions: usage.ru_nivcsw as u64 }
}

#[inline]
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec; both clocks exist since Linux 2.6.32.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Whether a value of [`RATE`] is a rate. One comparison excludes both 0 and [`FORBIDDEN`].
#[inline]
fn is_known(rate: u64) -> bool {
    rate.cast_signed() > 0
}

/// A value that advances at a constant, unknown rate.
#[inline]
pub(crate) fn ticks() -> u64 {
    if is_forbidden() { coarse_now_ns() } else { tsc::counter() }
}

/// Ticks for which a clock reading is reused: 0.05 to 0.15 ms.
const CACHE_TICKS: u64 = 1 << 18;

/// A clock reading that took fewer ticks was not interrupted.
const UNINTERRUPTED_TICKS: u64 = 2000;

/// Duration of a measurement. The error of the rate is then a few millionths.
const MEASURED_NS: u64 = 100_000_000;

/// A tick of a real processor takes 0.1 to 2 ns.
const PLAUSIBLE: std::ops::Range<u64> = (1 << 32) / 16..(1 << 32) * 4;

/// `CLOCK_MONOTONIC` in nanoseconds, late by less than a microsecond, for threads that read it
/// often. It costs a read of the time stamp counter, and never goes back on one thread.
///
/// A clock reading is reused for about 0.1 ms. Within that time, the counter tells how much time
/// has passed, at the rate that the watcher measures. If the counters of two processors differ, or
/// a counter jumps when a virtual machine migrates, the time is wrong for no longer than that.
/// While the rate is unknown, every call reads the clock.
#[inline]
pub(crate) fn burst_now_ns(thread: &ThreadState) -> u64 {
    let rate = RATE.load(Ordering::Relaxed);
    let mut passed = 0;
    // Without a rate, the counter may be forbidden.
    if is_known(rate) {
        passed = tsc::counter().wrapping_sub(thread.clock_counter.get());
        if passed < CACHE_TICKS {
            return thread.clock_ns.get() + ((passed * rate) >> 32);
        }
    }
    if !seccomp::may_read_clock() {
        return now_without_clock(thread, rate, passed);
    }
    let (now, counter) = reading();
    thread.clock_ns.set(now);
    // No counter value is near 0, so the next call reads the clock.
    thread.clock_counter.set(counter.unwrap_or(0));
    now
}

/// Under a seccomp filter: extrapolates the last reading with the counter, within the bounds of the
/// coarse clock.
#[cold]
fn now_without_clock(thread: &ThreadState, rate: u64, passed: u64) -> u64 {
    let since = (is_known(rate) && thread.clock_counter.get() != 0).then_some((rate, passed));
    let now = extrapolate(thread.clock_ns.get(), since, coarse_now_ns());
    thread.clock_ns.set(now);
    thread.clock_counter.set(if is_known(rate) { tsc::counter() } else { 0 });
    now
}

/// The time after `last` by the given number of ticks, never before a time that the thread was
/// given since.
fn extrapolate(last: u64, since: Option<(u64, u64)>, coarse: u64) -> u64 {
    let Some((rate, passed)) = since else { return last.max(coarse) };
    let after = |ticks: u64| last.saturating_add(((u128::from(ticks) * u128::from(rate)) >> 32) as u64);
    after(passed).clamp(coarse, coarse + COARSE_TICK_NS).max(after(CACHE_TICKS.min(passed)))
}

/// Reads the clock, and the counter just after it unless the thread was interrupted in between.
fn reading() -> (u64, Option<u64>) {
    let before = tsc::counter();
    let now = now_ns();
    let after = tsc::counter();
    (now, Some(after).filter(|after| after.wrapping_sub(before) < UNINTERRUPTED_TICKS))
}

/// Measures the rate of the counter repeatedly.
#[derive(Debug, Default)]
pub(crate) struct RateMeasurement {
    since: Option<(u64, u64)>,
}

impl RateMeasurement {
    /// Called regularly by one thread.
    pub(crate) fn measure(&mut self) {
        if !seccomp::may_read_clock() {
            return;
        }
        let (now, Some(counter)) = reading() else { return };
        let Some((ns, ticks)) = self.since.map(|(ns, from)| (now.saturating_sub(ns), counter.wrapping_sub(from)))
        else {
            self.since = Some((now, counter));
            return;
        };
        if ns >= MEASURED_NS {
            self.since = Some((now, counter));
            // A counter that was forbidden meanwhile stays forbidden.
            let new = rate_of(ns, ticks);
            let unless_forbidden = |rate| (rate != FORBIDDEN).then_some(new);
            let _ = RATE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, unless_forbidden);
        }
    }
}

/// The rate of `ticks` in `ns`, 0 when the result is not plausible.
pub(crate) fn rate_of(ns: u64, ticks: u64) -> u64 {
    let rate = (u128::from(ns) << 32).checked_div(u128::from(ticks)).unwrap_or(0);
    u64::try_from(rate).ok().filter(|rate| PLAUSIBLE.contains(rate)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;
    use crate::runtime::os::thread_state;

    #[test]
    fn a_sleep_is_counted_and_a_yield_is_not() {
        // Another thread of the test runner may hold a lock of the allocator, so nothing is
        // allocated here.
        let before = thread_switches().sleeps;
        (0..1000).for_each(|_| thread::yield_now());
        // A page that has to be read from the disk is a sleep.
        assert!(thread_switches().sleeps < before + 100);
        let before = thread_switches().sleeps;
        (0..3).for_each(|_| thread::sleep(Duration::from_millis(1)));
        assert!(thread_switches().sleeps >= before + 3);
    }

    #[test]
    fn the_coarse_clock_is_the_same_clock() {
        let (coarse, fine) = (coarse_now_ns(), now_ns());
        assert!(fine >= coarse && fine - coarse < 1_000_000_000, "{coarse} {fine}");
    }

    #[test]
    fn the_time_follows_the_clock_and_never_goes_back() {
        let mut rate = RateMeasurement::default();
        // A busy machine interrupts some of the readings.
        for _ in 0..100 {
            rate.measure();
            thread::sleep(Duration::from_millis(110));
            rate.measure();
            if RATE.load(Ordering::Relaxed) != 0 {
                break;
            }
        }
        assert_ne!(RATE.load(Ordering::Relaxed), 0);
        let thread = thread_state::current();
        let (mut last, mut from_counter) = (0, 0);
        for _ in 0..1_000_000 {
            let (base, before) = (thread.clock_counter.get(), now_ns());
            let now = burst_now_ns(thread);
            let after = now_ns();
            assert!((before.saturating_sub(2000)..=after).contains(&now), "{before} {now} {after}");
            assert!(now >= last, "{now} after {last}");
            last = now;
            from_counter += usize::from(base != 0 && base == thread.clock_counter.get());
        }
        assert!(from_counter > 900_000, "{from_counter} of a million without the clock");
    }

    #[test]
    fn without_the_clock_the_time_is_extrapolated_within_a_tick() {
        const HALF: u64 = 1 << 31;
        let last = 1_000_000_000;
        assert_eq!(extrapolate(last, Some((HALF, 2_000_000)), last - 3_000_000), last + 1_000_000);
        assert_eq!(extrapolate(last, Some((HALF, 2_000_000)), last + 5_000_000), last + 5_000_000, "behind the clock");
        let passed = 100 * COARSE_TICK_NS;
        assert_eq!(extrapolate(last, Some((HALF, passed)), last), last + COARSE_TICK_NS, "ahead of it");
        let poll_successful = (CACHE_TICKS * HALF) >> 32;
        assert_eq!(
            extrapolate(last, Some((HALF, passed)), last - 2 * COARSE_TICK_NS),
            last + poll_successful,
            "and never back"
        );
        assert_eq!(extrapolate(last, None, last - 1), last);
        assert_eq!(extrapolate(last, None, last + 1), last + 1);
    }

    #[test]
    fn a_forbidden_counter_has_no_rate() {
        assert!(!is_known(0) && !is_known(FORBIDDEN));
        assert!(is_known(PLAUSIBLE.start) && is_known(PLAUSIBLE.end));
    }

    #[test]
    fn an_implausible_rate_is_rejected() {
        assert_eq!(rate_of(1000, 2000), 1 << 31);
        assert_eq!(rate_of(1000, 1000), 1 << 32);
        assert_eq!((rate_of(1000, 0), rate_of(1000, 1), rate_of(0, 1000), rate_of(1000, u64::MAX - 5)), (0, 0, 0, 0));
    }
}
