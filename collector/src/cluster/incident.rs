//! One job-wide incident: which nodes were asked, what came, who still hangs.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::mpsc,
};

use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::v1::{Trigger, TriggerKind};

use super::{gather::Work, nodes::NodeId};
use crate::{clock::Now, inbox::DumpReply, registry::JobKey};

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
    /// Where it is in its life.
    pub state: State,
    /// The nodes.
    pub parts: BTreeMap<NodeId, Part>,
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
    /// A verdict is being made.
    pub judging: bool,
    /// When the first of the parts came that no verdict knows yet.
    pub late_since_ns: Option<u64>,
    /// Nodes that are still to be asked for their files, and those that send them.
    pub files_wanted: BTreeMap<NodeId, RankSet>,
    /// Nodes that send files.
    pub files_coming: BTreeSet<NodeId>,
    /// Files are not waited for after this; `None` before they are asked for.
    pub files_until_ns: Option<u64>,
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
            trigger,
            opened,
            late_ns,
            state: State::Gathering,
            parts: BTreeMap::new(),
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
            judging: false,
            late_since_ns: None,
            files_wanted: BTreeMap::new(),
            files_coming: BTreeSet::new(),
            files_until_ns: None,
            replies: Vec::new(),
        }
    }

    /// Whether it is not over.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Gathering | State::Judged)
    }

    /// Whether somebody asked for it by hand.
    #[must_use]
    pub fn is_manual(&self) -> bool {
        self.trigger.kind() == TriggerKind::Manual
    }

    /// A node's ranks hang, or no longer do.
    pub fn hangs(&mut self, node: NodeId, hangs: bool, ended: bool, now_ns: u64) {
        if hangs {
            self.hanging.insert(node);
            self.quiet_since_ns = None;
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
