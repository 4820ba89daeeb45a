//! The state of an incident after its verdict, of the ranks that are being ended for it, and of the
//! verdicts that could not be written yet.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::v1::Grounds;

use crate::{
    incident::{judging, mild},
    os::process::Handle,
};

/// The result of an incident, for `/status`.
#[derive(Debug, Clone, Default)]
pub(super) struct IncidentReport {
    /// Its folder.
    pub path: Option<PathBuf>,
    /// The verdict in one sentence; empty until there is one.
    pub sentence: String,
    /// Cause of the verdict.
    pub cause: String,
    /// Culprit ranks.
    pub culprits: Vec<u32>,
    /// The pids of the culprits that are not ranks.
    pub culprit_processes: Vec<i32>,
    /// Ranks that hang by the newest verdict.
    pub hanging: RankSet,
    /// When the first sample of the newest dump began, CLOCK_MONOTONIC.
    pub sampled_ns: u64,
    /// This node's own verdict, for when the cluster's does not come.
    pub own: Option<VerdictSummary>,
    /// The errors.
    pub errors: Vec<String>,
    /// The verdict, as long as no folder has it.
    pub verdict: Option<Box<Verdict>>,
    /// A killed collector has left its folder unfinished.
    pub is_unfinished: bool,
    /// This node's own verdict shows no problem.
    pub is_mild: bool,
    /// Users see it. A dump whose verdict shows no hang is not shown, and before its verdict no
    /// dump that may be one of those.
    pub is_shown: bool,
}

impl IncidentReport {
    /// The report of a verdict that was made here, from a dump that began at this CLOCK_MONOTONIC
    /// time.
    pub(super) fn of(verdict: Verdict, sampled_ns: u64) -> Self {
        let judged = VerdictSummary::of(&verdict);
        let culprit_processes = no_ranks(&verdict);
        IncidentReport {
            path: None,
            is_mild: mild::is_mild(&verdict),
            is_shown: true,
            sentence: verdict.sentence,
            cause: verdict.cause.to_string(),
            culprit_processes,
            culprits: verdict.culprits,
            hanging: judged.hanging.clone(),
            sampled_ns,
            own: Some(judged),
            errors: verdict.timing.errors,
            verdict: None,
            is_unfinished: false,
        }
    }
}

/// The pids of the culprits that are not ranks.
fn no_ranks(verdict: &Verdict) -> Vec<i32> {
    let processes = verdict.culprit_processes.iter();
    processes.filter(|process| process.rank.is_none()).map(|process| process.pid).collect()
}

/// A summary of the verdict on a job that may not hang.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExaminedJob<'a> {
    /// It shows no hang.
    pub is_mild: bool,
    /// Its sentence.
    pub sentence: &'a str,
    /// Culprit ranks.
    pub culprits: &'a [u32],
}

/// A summary of a verdict for the ranks of its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VerdictSummary {
    /// Whether the verdict is a reason to end the ranks.
    pub grounds: Grounds,
    /// Culprit ranks.
    pub culprits: Vec<u32>,
    /// Ranks that hang: culprits and victims; empty without evidence of a hang.
    pub hanging: RankSet,
    /// Whether the cluster collector made it. The cluster collector alone sees the entire job and
    /// looks again by itself.
    pub by_cluster: bool,
}

impl VerdictSummary {
    /// The summary of a verdict that was made on this node.
    pub(super) fn of(verdict: &Verdict) -> Self {
        VerdictSummary {
            grounds: judging::grounds(verdict),
            culprits: verdict.culprits.clone(),
            hanging: verdict.hanging_ranks().into_iter().collect(),
            by_cluster: false,
        }
    }
}

/// Processes that are being ended, and incidents with another look pending.
#[derive(Debug, Default)]
pub(super) struct VerdictActions {
    pub(super) signalled: Vec<SignalledProcess>,
    pub(super) rechecks: BTreeMap<String, Recheck>,
}

/// A process that received a signal to end.
#[derive(Debug)]
pub(super) struct SignalledProcess {
    pub(super) rank: i32,
    pub(super) process: Arc<Handle>,
    // When to check it again.
    pub(super) due_ns: u64,
    // Whether SIGKILL was sent after `KILL_AFTER_NS`.
    pub(super) was_killed: bool,
}

/// An incident whose ranks the last verdict did not end.
#[derive(Debug, Default)]
pub(super) struct Recheck {
    pub(super) count: u32,
    pub(super) due_ns: Option<u64>,
    // The last verdict had evidence of a hang: a second one in a row with evidence is enough.
    pub(super) suspected: bool,
    // The verdict stands, and only progress kept the ranks from being ended.
    pub(super) postponed: bool,
}

impl VerdictActions {
    pub(super) fn is_busy(&self) -> bool {
        !self.signalled.is_empty()
    }

    /// An incident has got another name.
    pub(super) fn rename(&mut self, old: &str, new: &str) {
        if let Some(recheck) = self.rechecks.remove(old) {
            self.rechecks.insert(new.into(), recheck);
        }
    }
}

/// The verdicts to be written, by incident.
#[derive(Debug, Default)]
pub(super) struct UnwrittenVerdicts {
    pub(super) waiting: BTreeMap<String, UnwrittenVerdict>,
}

/// A verdict that waits for its next attempt.
#[derive(Debug)]
pub(super) struct UnwrittenVerdict {
    pub(super) root: PathBuf,
    pub(super) due_ns: u64,
    pub(super) pause_ns: u64,
    pub(super) under_way: bool,
}
