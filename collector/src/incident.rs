//! Incidents: their lifecycle, rate, verdict, folder and retention.

pub(crate) mod engine;
pub mod folder;
pub(crate) mod judging;
pub(crate) mod mild;
pub mod part;
pub(crate) mod records;
pub(crate) mod retention;
pub(crate) mod verdict_files;
pub(crate) mod viewer;

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use serde_json::{Value, json};
use xpu_timer_analysis::{Status, Verdict};
use xpu_timer_proto::v1::{Evidence, Trigger};

use crate::{
    job::JobKey,
    os::clock::{Now, nanoseconds, rfc3339},
};

/// The facts that are known when an incident is opened, on a node and at the cluster collector.
#[derive(Debug, Clone)]
pub struct Head {
    /// UTC time and a number.
    pub id: String,
    /// The job.
    pub job: JobKey,
    /// Its attempt.
    pub attempt: u32,
    /// The trigger that opened it.
    pub trigger: Trigger,
    /// When it was opened.
    pub opened: Now,
    /// How long before that the timeout had expired.
    pub late_ns: u64,
}

#[cfg(test)]
impl Head {
    /// An incident of job `j`.
    pub(crate) fn for_test() -> Self {
        Head {
            id: "1".into(),
            job: JobKey { name: "j".into(), instance: String::new() },
            attempt: 0,
            trigger: Trigger::default(),
            opened: Now { mono_ns: 1, unix_ns: 1 },
            late_ns: 0,
        }
    }
}

/// The plan of a dump, on a node and at the cluster collector.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The incident.
    pub head: Head,
    /// Hang timeout of the job.
    pub hang_timeout: Duration,
    /// Time between the two samples.
    pub sample_interval: Duration,
}

impl Plan {
    /// Evidence without ranks.
    #[must_use]
    pub fn evidence(&self) -> Evidence {
        Evidence {
            incident: self.head.id.clone(),
            job: self.head.job.name.clone(),
            world_size: 0,
            attempt: self.head.attempt,
            trigger: Some(self.head.trigger.clone()),
            ranks: Vec::new(),
            processes: Vec::new(),
            hang_timeout_ns: nanoseconds(self.hang_timeout),
            sample_interval_ns: nanoseconds(self.sample_interval),
        }
    }

    /// Records in a new verdict that the incident is open, when it was opened, and that it was
    /// judged now.
    pub fn date(&self, verdict: &mut Verdict) {
        verdict.timing.status = Status::Open;
        verdict.timing.opened_at = Some(rfc3339(self.head.opened.unix_ns));
        verdict.timing.judged_at = Some(rfc3339(Now::get().unix_ns));
    }
}

/// The lifecycle of an incident, on a node and at the cluster collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Its dump is in progress. At the cluster collector: it waits for the parts of the nodes.
    Open,
    /// Its verdict is made; the hang lasts.
    Dumped,
    /// The problem is over.
    Resolved,
    /// The job ended, or a dump by hand is finished.
    Ended,
    /// A node collector found it on disk after a restart. Whether the hang lasts is not known yet.
    Adopted,
}

impl State {
    /// Whether its dump is in progress or its hang lasts.
    #[must_use]
    pub fn is_open(self) -> bool {
        matches!(self, State::Open | State::Dumped)
    }

    /// The status of the incident in its verdict.
    #[must_use]
    pub fn status(self) -> Status {
        match self {
            State::Resolved => Status::Resolved,
            State::Ended => Status::Ended,
            State::Open | State::Dumped | State::Adopted => Status::Open,
        }
    }
}

/// A job that was examined and found idle.
#[derive(Debug)]
pub struct IdleJob {
    /// Its last launch, CLOCK_MONOTONIC of this machine.
    pub last_launch_ns: u64,
    /// The sentence of the verdict.
    pub sentence: String,
}

impl IdleJob {
    /// The entry of `/status`.
    #[must_use]
    pub fn json(&self, job: &JobKey, now: Now) -> Value {
        let since_ns = now.unix_ns.saturating_sub(now.mono_ns.saturating_sub(self.last_launch_ns));
        json!({ "job": job.to_string(), "since": rfc3339(since_ns), "sentence": self.sentence })
    }
}

/// A burst, followed by one incident per interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate {
    /// Number of incidents that may follow each other directly.
    pub burst: u64,
    /// Interval of further incidents in nanoseconds.
    pub refill_ns: u64,
}

/// Rate of incidents of a hanging job.
pub(crate) const HANGS: Rate = Rate { burst: 4, refill_ns: 900 * 1_000_000_000 };
/// Rate of dumps of a job by hand.
pub(crate) const BY_HAND: Rate = Rate { burst: 10, refill_ns: 30 * 1_000_000_000 };

/// Limits the incidents of each job. Otherwise, a job that flaps around its timeout would be dumped
/// all day and fill the disk.
#[derive(Debug)]
pub(crate) struct Throttle<Job> {
    rate: Rate,
    /// The time at which the full burst of each job is available again (the generic cell rate
    /// algorithm).
    free_at: BTreeMap<Job, u64>,
}

impl<Job: Ord + Clone> Default for Throttle<Job> {
    fn default() -> Self {
        Self::new(HANGS)
    }
}

impl<Job: Ord + Clone> Throttle<Job> {
    /// Starts with a full burst.
    #[must_use]
    pub(crate) fn new(rate: Rate) -> Self {
        Throttle { rate, free_at: BTreeMap::new() }
    }

    /// Whether a job may have an incident now.
    #[must_use]
    pub(crate) fn would_allow(&self, job: &Job, now_ns: u64) -> bool {
        self.wait_ns(job, now_ns) == 0
    }

    /// Nanoseconds until a job may have its next incident.
    #[must_use]
    pub(crate) fn wait_ns(&self, job: &Job, now_ns: u64) -> u64 {
        let allowed_ns = now_ns + (self.rate.burst - 1) * self.rate.refill_ns;
        self.free_at.get(job).map_or(0, |free_at| free_at.saturating_sub(allowed_ns))
    }

    /// As [`Throttle::would_allow`], and counts the incident if it is allowed.
    pub(crate) fn allows(&mut self, job: &Job, now_ns: u64) -> bool {
        if !self.would_allow(job, now_ns) {
            return false;
        }
        self.free_at.retain(|_, free_at| *free_at > now_ns);
        let free_at = self.free_at.entry(job.clone()).or_insert(now_ns);
        *free_at = now_ns.max(*free_at) + self.rate.refill_ns;
        true
    }

    /// Takes back one call of [`Throttle::allows`] that returned true.
    pub(crate) fn refund(&mut self, job: &Job) {
        if let Some(free_at) = self.free_at.get_mut(job) {
            *free_at = free_at.saturating_sub(self.rate.refill_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_at_a_time() {
        let mut throttle = Throttle::new(HANGS);
        let allowed =
            |throttle: &mut Throttle<u8>, job, now_ns| (0..10).filter(|_| throttle.allows(&job, now_ns)).count();
        assert_eq!(allowed(&mut throttle, 1, 5), HANGS.burst as usize);
        assert_eq!(allowed(&mut throttle, 2, 5), HANGS.burst as usize, "another job has its own");
        assert_eq!(allowed(&mut throttle, 1, HANGS.refill_ns), 0);
        assert_eq!(allowed(&mut throttle, 1, HANGS.refill_ns + 5), 1);
        assert_eq!(allowed(&mut throttle, 1, 3 * HANGS.refill_ns + 5), 2);
        assert_eq!(allowed(&mut throttle, 1, 100 * HANGS.refill_ns), HANGS.burst as usize);
        assert_eq!(throttle.wait_ns(&1, 100 * HANGS.refill_ns), HANGS.refill_ns, "until the next one");
        throttle.refund(&1);
        assert_eq!(allowed(&mut throttle, 1, 100 * HANGS.refill_ns), 1);
        assert_eq!(throttle.free_at.len(), 1, "jobs that are long gone are forgotten");
    }
}
