//! Incidents: their lifecycle, verdict, folder and retention.

pub(crate) mod engine;
pub mod folder;
pub(crate) mod judging;
pub(crate) mod mild;
pub mod part;
pub(crate) mod records;
pub(crate) mod retention;
pub(crate) mod throttle;
pub(crate) mod verdict_files;
pub(crate) mod viewer;

use std::time::Duration;

use serde::Serialize;
use xpu_timer_analysis::{Status, Verdict};
use xpu_timer_proto::v1::{Evidence, Trigger};

use crate::{
    job::JobKey,
    os::clock::{Now, nanoseconds, rfc3339},
};

/// What is known of an incident when it is opened, on a node and at the cluster collector.
#[derive(Debug, Clone)]
pub struct Head {
    /// UTC time and a number.
    pub id: String,
    /// The job.
    pub job: JobKey,
    /// Its attempt.
    pub attempt: u32,
    /// What opened it.
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
