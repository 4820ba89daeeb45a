//! The two clocks: CLOCK_MONOTONIC, which rings and deadlines use, and the wall clock, which people
//! read.

use std::time::Duration;

use jiff::Timestamp;
use nix::time::ClockId;

/// One moment on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Now {
    /// CLOCK_MONOTONIC, nanoseconds.
    pub mono_ns: u64,
    /// Nanoseconds since the Unix epoch.
    pub unix_ns: u64,
}

impl Now {
    /// Reads both clocks.
    #[must_use]
    pub fn get() -> Self {
        Now { mono_ns: read(ClockId::CLOCK_MONOTONIC), unix_ns: read(ClockId::CLOCK_REALTIME) }
    }
}

fn read(clock: ClockId) -> u64 {
    let time = clock.now().expect("Linux has these three clocks");
    // Neither clock is negative on a machine whose date is set to this century.
    u64::try_from(time.tv_sec()).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0)
}

/// Time since boot in nanoseconds, including suspend. The start times in /proc use this clock.
#[must_use]
pub fn since_boot_ns() -> u64 {
    read(ClockId::CLOCK_BOOTTIME)
}

/// `2026-11-21T10:55:00.123Z`.
#[must_use]
pub fn rfc3339(unix_ns: u64) -> String {
    timestamp(unix_ns).strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// `20261121T105500Z`, the format in incident names.
#[must_use]
pub fn compact(unix_ns: u64) -> String {
    timestamp(unix_ns).strftime("%Y%m%dT%H%M%SZ").to_string()
}

/// A duration in nanoseconds, at most [`u64::MAX`].
#[must_use]
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Seconds between two moments of one clock, rounded to milliseconds.
#[must_use]
pub fn seconds(ns: u64) -> f64 {
    (ns / 1_000_000) as f64 / 1000.0
}

fn timestamp(unix_ns: u64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(unix_ns)).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_utc() {
        assert_eq!(compact(1_795_258_500_123_456_789), "20261121T105500Z");
        assert_eq!(rfc3339(1_795_258_500_123_456_789), "2026-11-21T10:55:00.123Z");
        assert_eq!(seconds(1_234_567_890), 1.234);
    }

    #[test]
    fn the_clocks_run() {
        let first = Now::get();
        assert!(first.unix_ns > 1_700_000_000_000_000_000);
        assert!(Now::get() >= first);
    }
}
