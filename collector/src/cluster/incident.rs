//! One job-wide incident: which nodes were asked, what came, who still hangs.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
    sync::mpsc,
};

use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::v1::{Trigger, TriggerKind};

use crate::{
    cluster::{gather::Work, ids::NodeId},
    http::questions::DumpReply,
    job::key::JobKey,
    os::clock::Now,
};

/// How far a node is with its part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// Asked for a dump.
    Asked,
    /// It has taken its dump and waits to be asked for it.
    Captured,
    /// It sends, until a time at which it is given up.
    Delivering(u64),
    /// All of it is here.
    Delivered,
    /// It did not come in time.
    Failed(String),
}

/// A node's part in an incident.
#[derive(Debug, Clone)]
pub struct Part {
    /// How far it is.
    pub progress: Progress,
    /// Ranks that it may speak for, those included that it found without their having registered.
    pub ranks: RankSet,
    /// Deliveries of it that broke off while the node was there.
    pub broken: u32,
    /// When it was asked for last.
    pub asked_ns: u64,
}

/// Where an incident is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Parts are awaited.
    Gathering,
    /// The verdict is there; the hang lasts.
    Judged,
    /// What was wrong is over.
    Resolved,
    /// The job ended, or it was asked for by hand.
    Ended,
}

impl State {
    /// As `/status` shows it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            State::Gathering => "open",
            State::Judged => "dumped",
            State::Resolved => "resolved",
            State::Ended => "ended",
        }
    }
}

/// One incident.
#[derive(Debug)]
pub struct Incident {
    /// Name.
    pub id: String,
    /// The job.
    pub job: JobKey,
    /// Its attempt.
    pub attempt: u32,
    /// What opened it.
    pub trigger: Trigger,
    /// When.
    pub opened: Now,
    /// How long before that the timeout had run out.
    pub late_ns: u64,
    /// Somebody asked for it, and nothing is wrong as far as is known.
    pub by_hand: bool,
    /// Where it is in its life.
    pub state: State,
    /// Counts the looks at it from 0: one that may be no hang is looked at again.
    pub round: u32,
    /// When it is looked at again.
    pub again_ns: Option<u64>,
    /// How it was closed, and when, in Unix nanoseconds.
    pub closed: Option<(State, u64)>,
    /// The nodes.
    pub parts: BTreeMap<NodeId, Part>,
    /// Parts that were taken and wait to be asked for.
    pub captured: VecDeque<NodeId>,
    /// Parts that are on their way.
    pub delivering: BTreeSet<NodeId>,
    /// Parts that wait to be merged.
    pub merging: BTreeSet<NodeId>,
    /// Nodes whose own ranks hang.
    pub hanging: BTreeSet<NodeId>,
    /// Some of them stopped hanging without having ended.
    pub recovered: bool,
    /// When no node hung any more; a node may just be noticing.
    pub quiet_since_ns: Option<u64>,
    /// After this, nodes that have not taken their dump are not waited for.
    pub deadline_ns: u64,
    /// Its folder; `None` when none could be made.
    pub folder: Option<PathBuf>,
    /// The thread that merges, while there is something to come.
    pub work: Option<mpsc::Sender<Work>>,
    /// The last that it was given is to draw: it is let go after that.
    pub drawing: bool,
    /// The verdict in one sentence, its cause and culprits; empty until there is one.
    pub sentence: String,
    /// Cause.
    pub cause: String,
    /// Culprits.
    pub culprits: Vec<u32>,
    /// The newest verdict has evidence of a hang.
    pub is_proven: bool,
    /// The whole verdict, when no folder has it.
    pub verdict: Option<Box<Verdict>>,
    /// A verdict is being made.
    pub judging: bool,
    /// When the first of the parts came that no verdict knows yet.
    pub late_since_ns: Option<u64>,
    /// Nodes that are still to be asked for their files, and whose.
    pub files_wanted: BTreeMap<NodeId, RankSet>,
    /// Nodes that send files, and whose.
    pub files_coming: BTreeMap<NodeId, RankSet>,
    /// When files were asked for, and after what time without a piece they are not waited for; `None` when none are awaited.
    pub files: Option<(u64, u64)>,
    /// Who waits for a dump by hand.
    pub replies: Vec<DumpReply>,
}

impl Incident {
    /// One of which nobody was asked yet.
    #[must_use]
    pub fn new(id: &str, job: &JobKey, attempt: u32, trigger: Trigger, opened: Now, late_ns: u64) -> Self {
        Incident {
            id: id.into(),
            job: job.clone(),
            attempt,
            by_hand: trigger.kind() == TriggerKind::Manual,
            trigger,
            opened,
            late_ns,
            state: State::Gathering,
            round: 0,
            again_ns: None,
            closed: None,
            parts: BTreeMap::new(),
            captured: VecDeque::new(),
            delivering: BTreeSet::new(),
            merging: BTreeSet::new(),
            hanging: BTreeSet::new(),
            recovered: false,
            quiet_since_ns: None,
            deadline_ns: u64::MAX,
            folder: None,
            work: None,
            drawing: false,
            sentence: String::new(),
            cause: String::new(),
            culprits: Vec::new(),
            is_proven: false,
            verdict: None,
            judging: false,
            late_since_ns: None,
            files_wanted: BTreeMap::new(),
            files_coming: BTreeMap::new(),
            files: None,
            replies: Vec::new(),
        }
    }

    /// Whether it is not over.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Gathering | State::Judged)
    }

    /// Whether something is still to come for its folder: it may be over by then.
    #[must_use]
    pub fn is_in_work(&self) -> bool {
        self.is_open() || self.is_at_work()
    }

    /// Whether a verdict is being made, files are coming or something is drawn.
    #[must_use]
    pub fn is_at_work(&self) -> bool {
        self.judging || self.files.is_some() || self.drawing
    }

    /// How far the part of a node is.
    pub fn progress(&mut self, node: NodeId, progress: Progress) {
        if let Some(part) = self.parts.get_mut(&node) {
            self.delivering.remove(&node);
            match progress {
                Progress::Captured if !self.captured.contains(&node) => self.captured.push_back(node),
                Progress::Delivering(_) => _ = self.delivering.insert(node),
                _ => {}
            }
            part.progress = progress;
        }
    }

    /// Its node has no stream any more, or has a new one: what was under way begins anew. True when something was.
    pub fn interrupted(&mut self, node: NodeId) -> bool {
        self.captured.retain(|other| *other != node);
        if let Some(ranks) = self.files_coming.remove(&node) {
            self.files_wanted.insert(node, ranks);
        }
        let begun =
            matches!(self.parts.get(&node), Some(Part { progress: Progress::Captured | Progress::Delivering(_), .. }));
        if begun {
            self.progress(node, Progress::Asked);
        }
        begun
    }

    /// All that is known is old: everybody is asked once more.
    pub fn begin_round(&mut self) {
        self.round += 1;
        self.again_ns = None;
        self.state = State::Gathering;
        self.late_since_ns = None;
        self.work = None;
        self.captured.clear();
        self.merging.clear();
        self.files_wanted.clear();
        let nodes: Vec<NodeId> = self.parts.keys().copied().collect();
        for node in nodes {
            self.progress(node, Progress::Asked);
        }
    }

    /// Whether a node has not taken its dump yet, or was not asked for one.
    #[must_use]
    pub fn awaits(&self, node: NodeId) -> bool {
        self.parts.get(&node).is_none_or(|part| part.progress == Progress::Asked)
    }

    /// Parts that are under way, and wait to be merged.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.delivering.union(&self.merging).count()
    }

    /// A node's ranks hang, or no longer do.
    pub fn hangs(&mut self, node: NodeId, hangs: bool, ended: bool, now_ns: u64) {
        if hangs {
            self.hanging.insert(node);
            self.quiet_since_ns = None;
            if std::mem::take(&mut self.by_hand) && self.state == State::Judged {
                // Its verdict knows nothing of that.
                self.again_ns = Some(now_ns);
            }
        } else if self.hanging.remove(&node) {
            self.recovered |= !ended;
            if self.hanging.is_empty() {
                self.quiet_since_ns = Some(now_ns);
            }
        }
    }

    /// Whether every part has come or failed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.parts.values().all(|part| matches!(part.progress, Progress::Delivered | Progress::Failed(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incident() -> Incident {
        let job = JobKey { name: "j".into(), instance: String::new() };
        let now = Now { mono_ns: 1, unix_ns: 1 };
        let mut incident = Incident::new("1", &job, 0, Trigger::default(), now, 0);
        let part = Part { progress: Progress::Asked, ranks: RankSet::from_iter([0, 1]), broken: 0, asked_ns: 1 };
        incident.parts.insert(7, part);
        incident
    }

    #[test]
    fn what_a_lost_node_had_begun_begins_anew() {
        let mut incident = incident();
        assert!(!incident.interrupted(7), "nothing was under way");
        incident.progress(7, Progress::Captured);
        incident.progress(7, Progress::Captured);
        assert_eq!(incident.captured, [7]);
        assert!(incident.interrupted(7) && incident.captured.is_empty());
        incident.progress(7, Progress::Delivering(5));
        incident.merging.insert(7);
        assert_eq!(incident.under_way(), 1, "one part takes one place");
        assert!(incident.interrupted(7) && incident.delivering.is_empty());
        assert_eq!(incident.parts[&7].progress, Progress::Asked);
        incident.progress(7, Progress::Delivered);
        incident.files_coming.insert(7, RankSet::from_iter([1]));
        assert!(!incident.interrupted(7), "its part is here");
        assert_eq!(incident.files_wanted[&7], RankSet::from_iter([1]), "the same files are asked for again");
        assert!(!incident.files_wanted.contains_key(&8) && incident.files_coming.is_empty());
    }
}
