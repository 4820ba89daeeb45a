//! What one dump of the ranks of a job on this node is to do, and what came of it.

use std::{path::PathBuf, time::Duration};

use xpu_timer_analysis::Verdict;
use xpu_timer_proto::v1::Trigger;

use crate::{
    incident::part::Kept,
    job::{key::JobKey, partition::Member},
    node::{evidence::Subject, launched::Unregistered},
    os::clock::{self, Now},
};

/// What is to be dumped.
#[derive(Debug)]
pub struct Plan {
    /// Name of the incident.
    pub incident: String,
    /// Attempt.
    pub attempt: u32,
    /// What opened the incident.
    pub trigger: Trigger,
    /// When.
    pub opened: Now,
    /// How long before that the timeout had run out.
    pub late_ns: u64,
    /// The job.
    pub key: JobKey,
    /// Its registered ranks on this node, ascending.
    pub subjects: Vec<Subject>,
    /// Those that are known here and have not registered.
    pub silent: Vec<Unregistered>,
    /// All processes of its name that are known, and their jobs.
    pub members: Vec<(Member, JobKey)>,
    /// Name of this node.
    pub node: String,
    /// Where this collector listens.
    pub socket: PathBuf,
    /// Hang timeout of the job.
    pub hang_timeout: Duration,
    /// Between the two samples.
    pub sample_interval: Duration,
    /// Where the folder goes.
    pub timeline_path: PathBuf,
    /// Where it goes when it cannot go there.
    pub fallback_path: PathBuf,
    /// What is kept for the cluster collector; `None` when there is to be none.
    pub for_cluster: Option<ForCluster>,
}

/// A part of a job-wide incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForCluster {
    /// So many operations of each flight record are for it.
    pub operations: usize,
    /// It did not answer: the node draws and tells for itself, and keeps the part for later.
    pub alone: bool,
}

impl Plan {
    /// Whether the verdict is made elsewhere.
    pub(crate) fn is_part(&self) -> bool {
        self.for_cluster.is_some_and(|part| !part.alone)
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// Name of the incident.
    pub incident: String,
    /// Its folder; `None` when none could be made.
    pub path: Option<PathBuf>,
    /// The verdict.
    pub verdict: Verdict,
    /// Whether its folder has it.
    pub written: bool,
    /// Where the folder was to go.
    pub timeline_path: PathBuf,
    /// When the first sample began, CLOCK_MONOTONIC.
    pub sampled_ns: u64,
    /// What the cluster collector is to have.
    pub part: Option<Kept>,
}

/// The time from the timeout until now.
pub(crate) fn finish_times(plan: &Plan, verdict: &mut Verdict) {
    let since = Now::get().mono_ns.saturating_sub(plan.opened.mono_ns) + plan.late_ns;
    verdict.timing.seconds_from_timeout = Some(clock::seconds(since));
}
