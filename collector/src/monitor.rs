//! What the headers of the rings say once a second: whose watcher stands still, and which job launches nothing. Pure.

use std::{collections::BTreeSet, time::Duration};

use crate::registry::{JobKey, RankId};

/// A watcher turns many times a second, so a shorter silence would only be found on an overloaded machine.
const SHORTEST_SILENCE: Duration = Duration::from_secs(3);

/// One living rank as seen now.
#[derive(Debug, Clone)]
pub struct Observation {
    /// Its job.
    pub job: JobKey,
    /// Its entry.
    pub id: RankId,
    /// Stopped by a signal or a debugger.
    pub stopped: bool,
    /// Last turn of its watcher; 0 before the first.
    pub heartbeat_ns: u64,
    /// Last launch of anything; 0 before the first.
    pub last_launch_ns: u64,
    /// When it registered.
    pub registered_ns: u64,
    /// Its hang timeout.
    pub hang_timeout: Duration,
    /// Its idle timeout; zero is off.
    pub idle_timeout: Duration,
}

/// What holds now.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// Ranks whose watcher is stuck although they run.
    pub stuck: BTreeSet<RankId>,
    /// Jobs without any launch for longer than their idle timeout.
    pub idle: BTreeSet<JobKey>,
}

/// Remembers what was seen a second ago.
#[derive(Debug, Default)]
pub struct Monitor {
    silent: BTreeSet<RankId>,
}

impl Monitor {
    /// Judges one look at all living ranks.
    pub fn look(&mut self, observations: &[Observation], now_ns: u64) -> Conditions {
        let silent: BTreeSet<RankId> =
            observations.iter().filter(|rank| is_silent(rank, now_ns)).map(|rank| rank.id).collect();
        // Twice in a row: after the whole node was frozen the first look may come before the watcher's first turn.
        let stuck = silent.intersection(&self.silent).copied().collect();
        self.silent = silent;
        let jobs: BTreeSet<&JobKey> = observations.iter().map(|rank| &rank.job).collect();
        let idle = jobs.into_iter().filter(|job| is_idle(observations, job, now_ns)).cloned().collect();
        Conditions { stuck, idle }
    }
}

fn is_silent(rank: &Observation, now_ns: u64) -> bool {
    let since = if rank.heartbeat_ns == 0 { rank.registered_ns } else { rank.heartbeat_ns };
    // A stopped process has no watcher that could turn. It is evidence in the incident that its peers cause.
    !rank.stopped && now_ns.saturating_sub(since) > nanoseconds(rank.hang_timeout.max(SHORTEST_SILENCE))
}

fn is_idle(observations: &[Observation], job: &JobKey, now_ns: u64) -> bool {
    let ranks = || observations.iter().filter(|rank| rank.job == *job);
    let timeout = ranks().map(|rank| rank.idle_timeout).max().unwrap_or_default();
    let last = ranks().map(|rank| rank.last_launch_ns.max(rank.registered_ns)).max().unwrap_or(now_ns);
    // A job that somebody stopped as a whole is not hung.
    !timeout.is_zero() && now_ns.saturating_sub(last) > nanoseconds(timeout) && ranks().any(|rank| !rank.stopped)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn job() -> JobKey {
        JobKey { name: "j".into(), instance: String::new() }
    }

    fn rank(id: RankId, heartbeat_s: u64, launch_s: u64) -> Observation {
        Observation {
            job: job(),
            id,
            stopped: false,
            heartbeat_ns: heartbeat_s * SECOND,
            last_launch_ns: launch_s * SECOND,
            registered_ns: SECOND,
            hang_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(10),
        }
    }

    #[test]
    fn a_watcher_is_stuck_when_seen_silent_twice() {
        let mut monitor = Monitor::default();
        let ranks = [rank(1, 94, 100), rank(2, 99, 100)];
        assert_eq!(monitor.look(&ranks, 100 * SECOND), Conditions::default());
        assert_eq!(monitor.look(&ranks, 101 * SECOND).stuck, BTreeSet::from([1]));
        let ranks = [rank(1, 102, 100), rank(2, 102, 100)];
        assert_eq!(monitor.look(&ranks, 102 * SECOND), Conditions::default());
    }

    #[test]
    fn a_stopped_rank_is_not_a_stuck_watcher() {
        let mut monitor = Monitor::default();
        let ranks = [Observation { stopped: true, ..rank(1, 2, 2) }, rank(2, 100, 100)];
        for _ in 0..3 {
            assert_eq!(monitor.look(&ranks, 100 * SECOND), Conditions::default());
        }
    }

    #[test]
    fn a_short_timeout_does_not_make_heartbeats_nervous() {
        let mut monitor = Monitor::default();
        let ranks = [Observation { hang_timeout: Duration::from_millis(100), ..rank(1, 98, 100) }];
        monitor.look(&ranks, 100 * SECOND);
        assert_eq!(monitor.look(&ranks, 100 * SECOND), Conditions::default());
        assert_eq!(monitor.look(&ranks, 102 * SECOND).stuck.len(), 0);
        assert_eq!(monitor.look(&ranks, 102 * SECOND).stuck.len(), 1);
    }

    #[test]
    fn a_watcher_that_never_turned_is_stuck_after_the_timeout() {
        let mut monitor = Monitor::default();
        let ranks = [rank(1, 0, 8)];
        monitor.look(&ranks, 5 * SECOND);
        assert_eq!(monitor.look(&ranks, 5 * SECOND), Conditions::default());
        monitor.look(&ranks, 7 * SECOND);
        assert_eq!(monitor.look(&ranks, 7 * SECOND).stuck, BTreeSet::from([1]));
    }

    #[test]
    fn idle_is_all_ranks_and_can_be_off() {
        let mut monitor = Monitor::default();
        assert_eq!(monitor.look(&[rank(1, 100, 80), rank(2, 100, 95)], 100 * SECOND).idle, BTreeSet::new());
        let quiet = [rank(1, 100, 80), rank(2, 100, 89)];
        assert_eq!(monitor.look(&quiet, 100 * SECOND).idle, BTreeSet::from([job()]));
        let off = quiet.clone().map(|rank| Observation { idle_timeout: Duration::ZERO, ..rank });
        assert_eq!(monitor.look(&off, 100 * SECOND), Conditions::default());
        let stopped = quiet.map(|rank| Observation { stopped: true, ..rank });
        assert_eq!(monitor.look(&stopped, 100 * SECOND), Conditions::default());
    }
}
