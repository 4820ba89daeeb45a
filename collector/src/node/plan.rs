//! The input and the outcome of one dump of a job's ranks on this node.

use std::{path::PathBuf, time::Duration};

use xpu_timer_analysis::Verdict;
use xpu_timer_proto::v1::Trigger;

use crate::{
    incident::{engine::Record, part::Kept},
    job::{key::JobKey, partition::Member},
    node::{evidence::Subject, launched::Unregistered},
    os::clock::{self, Now},
};

/// The input of a dump.
#[derive(Debug)]
pub struct Plan {
    /// Name of the incident.
    pub incident: String,
    /// Attempt of the job.
    pub attempt: u32,
    /// What opened the incident.
    pub trigger: Trigger,
    /// When the incident was opened.
    pub opened: Now,
    /// Time between the timeout and `opened`.
    pub late_ns: u64,
    /// The job.
    pub key: JobKey,
    /// Its registered ranks on this node, in ascending order.
    pub subjects: Vec<Subject>,
    /// Its known ranks on this node that have not registered.
    pub unregistered: Vec<Unregistered>,
    /// All known processes with this job name, and their jobs.
    pub members: Vec<(Member, JobKey)>,
    /// Name of this node.
    pub node: String,
    /// The socket of this collector.
    pub socket: PathBuf,
    /// Hang timeout of the job.
    pub hang_timeout: Duration,
    /// Time between the two samples.
    pub sample_interval: Duration,
    /// The folder that gets the incident folder.
    pub timeline_path: PathBuf,
    /// The folder to use when that cannot be written.
    pub fallback_path: PathBuf,
    /// The state of the incident that a next collector needs if this one is killed while it writes.
    pub record: Record,
    /// What is kept for the cluster collector; `None` without one.
    pub for_cluster: Option<ForCluster>,
}

/// A part of a job-wide incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForCluster {
    /// Number of operations of each flight record that the cluster gets.
    pub operations: usize,
    /// The cluster did not answer: the node draws the pictures and reports by itself, and keeps the
    /// part for later.
    pub alone: bool,
}

impl Plan {
    /// Whether the verdict is made elsewhere.
    pub(crate) fn is_part(&self) -> bool {
        self.for_cluster.is_some_and(|part| !part.alone)
    }
}

/// The outcome of a dump.
#[derive(Debug)]
pub struct Outcome {
    /// Name of the incident.
    pub incident: String,
    /// Its folder; `None` when none could be made.
    pub path: Option<PathBuf>,
    /// The verdict.
    pub verdict: Verdict,
    /// Whether its folder has the verdict.
    pub written: bool,
    /// The folder that should have got the incident folder.
    pub timeline_path: PathBuf,
    /// When the first sample began, CLOCK_MONOTONIC.
    pub sampled_ns: u64,
    /// What the cluster collector gets.
    pub part: Option<Kept>,
}

/// Records the time from the timeout until now.
pub(crate) fn finish_times(plan: &Plan, verdict: &mut Verdict) {
    let since = Now::get().mono_ns.saturating_sub(plan.opened.mono_ns) + plan.late_ns;
    verdict.timing.seconds_from_timeout = Some(clock::seconds(since));
}
