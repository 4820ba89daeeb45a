//! Evaluates the headers of the rings once a second: which watcher stands still, and which job
//! launches nothing. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    job::{JobKey, RankId},
    os::clock::nanoseconds,
};

/// A watcher turns many times a second. A shorter silence would only reveal an overloaded machine.
pub(super) const SHORTEST_SILENCE: Duration = Duration::from_secs(3);

/// One living rank, as observed now.
#[derive(Debug, Clone)]
pub(super) struct Observation {
    /// Its job.
    pub job: JobKey,
    /// Its entry.
    pub id: RankId,
    /// Whether a signal or a debugger has stopped it.
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

/// The conditions that hold now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Conditions {
    /// Ranks whose watcher is stuck although they run, and since when.
    pub stuck: BTreeMap<RankId, u64>,
    /// Jobs without any launch for longer than their idle timeout, and since when.
    pub idle: BTreeMap<JobKey, u64>,
}

/// Remembers earlier observations.
#[derive(Debug, Default)]
pub(super) struct Monitor {
    silent: BTreeSet<RankId>,
    looked_ns: Option<u64>,
    // When a job was last found idle.
    idle_ns: BTreeMap<JobKey, u64>,
    // When all ranks of a job were last seen stopped, or could not be observed because this
    // collector stood still. No rank can have launched anything, and no watcher can have turned,
    // before that.
    resumed_ns: BTreeMap<JobKey, u64>,
}

/// The collector looks every second. After a longer gap it must have been stopped, and the job may
/// have been stopped as well.
const GAP: Duration = Duration::from_secs(4);

impl Monitor {
    /// A job was examined and found idle. It is examined again after another idle timeout.
    pub(super) fn note_idle(&mut self, job: &JobKey, now_ns: u64) {
        self.idle_ns.insert(job.clone(), now_ns);
    }

    /// Evaluates one observation of all living ranks.
    pub(super) fn evaluate(&mut self, observations: &[Observation], now_ns: u64) -> Conditions {
        let before_ns = self.looked_ns.replace(now_ns);
        let stood_still = before_ns.is_some_and(|before_ns| now_ns.saturating_sub(before_ns) > nanoseconds(GAP));
        let jobs: BTreeSet<&JobKey> = observations.iter().map(|rank| &rank.job).collect();
        for job in &jobs {
            let is_stopped = observations.iter().filter(|rank| rank.job == **job).all(|rank| rank.stopped);
            if is_stopped || stood_still {
                self.resumed_ns.insert((*job).clone(), now_ns);
            }
        }
        self.resumed_ns.retain(|job, _| jobs.contains(job));
        self.idle_ns.retain(|job, _| jobs.contains(job));
        let resumed_ns = |job: &JobKey| self.resumed_ns.get(job).copied().unwrap_or(0);
        let examined_ns = |job: &JobKey| resumed_ns(job).max(self.idle_ns.get(job).copied().unwrap_or(0));

        let silences =
            observations.iter().filter_map(|rank| Some((rank.id, silence(rank, resumed_ns(&rank.job), now_ns)?)));
        let silences: BTreeMap<RankId, u64> = silences.collect();
        // Only a watcher that is silent twice in a row is stuck: after a freeze of the entire node
        // the first look may come before the watcher's first turn.
        let stuck =
            silences.iter().filter(|(id, _)| self.silent.contains(id)).map(|(id, since)| (*id, *since)).collect();
        let idle =
            jobs.into_iter().filter_map(|job| Some((job.clone(), idle(observations, job, examined_ns(job), now_ns)?)));
        let idle = idle.collect();
        self.silent = silences.into_keys().collect();
        Conditions { stuck, idle }
    }
}

/// Since when a watcher has not turned, if that is too long.
fn silence(rank: &Observation, resumed_ns: u64, now_ns: u64) -> Option<u64> {
    let since = if rank.heartbeat_ns == 0 { rank.registered_ns } else { rank.heartbeat_ns }.max(resumed_ns);
    // The watcher of a stopped process cannot turn. The stopped process is evidence in the incident
    // that its peers cause.
    let is_long = now_ns.saturating_sub(since) > nanoseconds(rank.hang_timeout.max(SHORTEST_SILENCE));
    (!rank.stopped && is_long).then_some(since)
}

/// Since when no rank of a job has launched anything, if that is too long.
fn idle(observations: &[Observation], job: &JobKey, resumed_ns: u64, now_ns: u64) -> Option<u64> {
    let ranks = || observations.iter().filter(|rank| rank.job == *job);
    let timeout = ranks().map(|rank| rank.idle_timeout).max().unwrap_or_default();
    let last = ranks().map(|rank| rank.last_launch_ns.max(rank.registered_ns)).max().unwrap_or(now_ns);
    let since = last.max(resumed_ns);
    (!timeout.is_zero() && now_ns.saturating_sub(since) > nanoseconds(timeout)).then_some(since)
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
        assert_eq!(monitor.evaluate(&ranks, 100 * SECOND), Conditions::default());
        assert_eq!(monitor.evaluate(&ranks, 101 * SECOND).stuck, BTreeMap::from([(1, 94 * SECOND)]));
        let ranks = [rank(1, 102, 100), rank(2, 102, 100)];
        assert_eq!(monitor.evaluate(&ranks, 102 * SECOND), Conditions::default());
    }

    #[test]
    fn a_stopped_rank_is_not_a_stuck_watcher() {
        let mut monitor = Monitor::default();
        let ranks = [Observation { stopped: true, ..rank(1, 2, 2) }, rank(2, 100, 100)];
        for _ in 0..3 {
            assert_eq!(monitor.evaluate(&ranks, 100 * SECOND), Conditions::default());
        }
    }

    #[test]
    fn a_short_hang_timeout_keeps_the_shortest_silence() {
        let mut monitor = Monitor::default();
        let ranks = [Observation { hang_timeout: Duration::from_millis(100), ..rank(1, 98, 100) }];
        monitor.evaluate(&ranks, 100 * SECOND);
        assert_eq!(monitor.evaluate(&ranks, 100 * SECOND), Conditions::default());
        assert_eq!(monitor.evaluate(&ranks, 102 * SECOND).stuck.len(), 0);
        assert_eq!(monitor.evaluate(&ranks, 102 * SECOND).stuck.len(), 1);
    }

    #[test]
    fn a_watcher_that_never_turned_is_stuck_after_the_timeout() {
        let mut monitor = Monitor::default();
        let ranks = [rank(1, 0, 8)];
        monitor.evaluate(&ranks, 5 * SECOND);
        assert_eq!(monitor.evaluate(&ranks, 5 * SECOND), Conditions::default());
        monitor.evaluate(&ranks, 7 * SECOND);
        assert_eq!(monitor.evaluate(&ranks, 7 * SECOND).stuck, BTreeMap::from([(1, SECOND)]));
    }

    #[test]
    fn idle_needs_all_ranks_and_can_be_off() {
        let mut monitor = Monitor::default();
        assert_eq!(monitor.evaluate(&[rank(1, 100, 80), rank(2, 100, 95)], 100 * SECOND).idle, BTreeMap::new());
        let quiet = [rank(1, 100, 80), rank(2, 100, 89)];
        assert_eq!(monitor.evaluate(&quiet, 100 * SECOND).idle, BTreeMap::from([(job(), 89 * SECOND)]));
        let off = quiet.clone().map(|rank| Observation { idle_timeout: Duration::ZERO, ..rank });
        assert_eq!(monitor.evaluate(&off, 100 * SECOND), Conditions::default());
        let stopped = quiet.map(|rank| Observation { stopped: true, ..rank });
        assert_eq!(monitor.evaluate(&stopped, 100 * SECOND), Conditions::default());
    }

    #[test]
    fn a_resumed_job_is_neither_idle_nor_stuck() {
        let mut monitor = Monitor::default();
        let look = |monitor: &mut Monitor, stopped: bool, now_s: u64| {
            let ranks = [1, 2].map(|id| Observation { stopped, ..rank(id, 10, 10) });
            monitor.evaluate(&ranks, now_s * SECOND)
        };
        for now_s in 10..60 {
            assert_eq!(look(&mut monitor, true, now_s), Conditions::default());
        }
        for now_s in 60..=64 {
            assert_eq!(look(&mut monitor, false, now_s), Conditions::default(), "it has just gone on: {now_s}");
        }
        look(&mut monitor, false, 65);
        assert_eq!(look(&mut monitor, false, 66).stuck.len(), 2, "that its watchers do not turn is something else");
        for now_s in 67..70 {
            assert_eq!(look(&mut monitor, false, now_s).idle.len(), 0);
        }
        assert_eq!(look(&mut monitor, false, 70).idle, BTreeMap::from([(job(), 59 * SECOND)]));
    }

    #[test]
    fn time_during_which_the_collector_was_stopped_does_not_count() {
        let mut monitor = Monitor::default();
        let ranks = [rank(1, 10, 10)];
        monitor.evaluate(&ranks, 11 * SECOND);
        for now_s in 50..=53 {
            assert_eq!(monitor.evaluate(&ranks, now_s * SECOND), Conditions::default(), "{now_s}");
        }
    }

    #[test]
    fn one_stopped_rank_does_not_excuse_other_ranks() {
        let mut monitor = Monitor::default();
        let ranks = [Observation { stopped: true, ..rank(1, 10, 10) }, rank(2, 100, 20)];
        monitor.evaluate(&ranks, 99 * SECOND);
        assert_eq!(monitor.evaluate(&ranks, 100 * SECOND).idle, BTreeMap::from([(job(), 20 * SECOND)]));
    }
}
