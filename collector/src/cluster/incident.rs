//! One incident of a job: which nodes were asked, what they delivered, and which of them still
//! hang.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
};

use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::v1::{FileKind, TriggerKind};

use crate::{
    http::questions::DumpReply,
    incident::{Head, State},
    job::NodeId,
};

/// The progress of a node with its part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// It was asked for a dump.
    Requested,
    /// It has taken its dump and waits for the request to deliver it.
    Captured,
    /// It is sending. Contains the deadline.
    Delivering(u64),
    /// All of its part has arrived.
    Delivered,
    /// It did not arrive in time, or failed. Contains the reason.
    Failed(String),
}

/// A node's part in an incident.
#[derive(Debug, Clone)]
pub struct Part {
    /// The progress of the part.
    pub progress: Progress,
    /// Ranks that the node may report, including unregistered ranks that it found.
    pub ranks: RankSet,
    /// Number of deliveries that were cut off while the node was connected.
    pub interruptions: u32,
    /// When it was last asked for.
    pub requested_ns: u64,
}

/// One incident.
#[derive(Debug)]
pub struct Incident {
    /// The facts that were known when it was opened.
    pub head: Head,
    /// Whether it was requested by hand and no problem is known.
    pub by_hand: bool,
    /// Whether it is only about a job that launches nothing.
    pub is_idle: bool,
    /// Whether a verdict without a hang makes its dump a mild capture: nobody has requested the
    /// dump, and no verdict has shown a problem. Users do not see it then.
    pub may_be_mild: bool,
    /// The current state.
    pub state: State,
    /// Number of the round, from 0. An incident that may not be a hang gets another round.
    pub round: u32,
    /// When the next round begins.
    pub next_round_ns: Option<u64>,
    /// Final state and closing time in Unix nanoseconds.
    pub closed: Option<(State, u64)>,
    /// The parts by node.
    pub parts: BTreeMap<NodeId, Part>,
    /// Nodes whose dumps are taken and wait for the request to deliver.
    pub captured: VecDeque<NodeId>,
    /// Nodes that are delivering.
    pub delivering: BTreeSet<NodeId>,
    /// Nodes whose parts wait to be merged.
    pub merging: BTreeSet<NodeId>,
    /// Nodes whose own ranks hang.
    pub hanging: BTreeSet<NodeId>,
    /// Whether some of them stopped hanging without having ended.
    pub recovered: bool,
    /// Since when no node hangs; another node may be about to report a hang.
    pub quiet_since_ns: Option<u64>,
    /// After this, nodes that have not taken their dump are not waited for.
    pub deadline_ns: u64,
    /// Its folder; `None` if none could be made.
    pub folder: Option<PathBuf>,
    /// Whether it has a thread that merges, as long as data may arrive.
    pub is_gathering: bool,
    /// Whether the last work of the thread is to draw. The thread is released after that.
    pub drawing: bool,
    /// The sentence of the verdict; empty until there is one.
    pub sentence: String,
    /// Cause of the verdict.
    pub cause: String,
    /// Culprits of the verdict.
    pub culprits: Vec<u32>,
    /// Whether the newest verdict has evidence of a hang.
    pub is_proven: bool,
    /// The verdict without a hang, while the files of the mild capture are fetched.
    pub mild_verdict: Option<Box<Verdict>>,
    /// The complete verdict, if it is in no folder.
    pub verdict: Option<Box<Verdict>>,
    /// Whether a verdict is being made.
    pub judging: bool,
    /// When the first part arrived that is in no verdict yet.
    pub late_since_ns: Option<u64>,
    /// The kind of the files that are being fetched.
    pub file_kind: FileKind,
    /// Nodes that are to be asked for timelines when the other files are here, with their ranks.
    pub timelines: BTreeMap<NodeId, RankSet>,
    /// Nodes that are still to be asked for files, with the ranks of these files.
    pub files_pending: BTreeMap<NodeId, RankSet>,
    /// Nodes that are sending files, with the ranks of these files.
    pub files_in_transfer: BTreeMap<NodeId, RankSet>,
    /// When files were requested, and the deadline without a new piece. `None` if no files are
    /// expected.
    pub files: Option<(u64, u64)>,
    /// Reply channels of dumps requested by hand.
    pub replies: Vec<DumpReply>,
}

impl Incident {
    /// A new incident before any node was asked.
    #[must_use]
    pub fn new(head: Head) -> Self {
        Incident {
            by_hand: head.trigger.kind() == TriggerKind::Manual,
            is_idle: false,
            may_be_mild: head.trigger.kind() != TriggerKind::Manual,
            head,
            state: State::Open,
            round: 0,
            next_round_ns: None,
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
            is_gathering: false,
            drawing: false,
            sentence: String::new(),
            cause: String::new(),
            culprits: Vec::new(),
            is_proven: false,
            mild_verdict: None,
            verdict: None,
            judging: false,
            late_since_ns: None,
            file_kind: FileKind::Stacktrace,
            timelines: BTreeMap::new(),
            files_pending: BTreeMap::new(),
            files_in_transfer: BTreeMap::new(),
            files: None,
            replies: Vec::new(),
        }
    }

    /// Whether users see it, or a dump that may show a hang is in progress.
    #[must_use]
    pub fn is_in_view(&self) -> bool {
        !self.may_be_mild || self.state == State::Open && !self.is_idle
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.state.is_open()
    }

    /// Whether data for its folder is still expected. It may already be closed then.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.is_open() || self.is_working()
    }

    /// Whether a verdict is being made, files are arriving or the viewer is drawing.
    #[must_use]
    pub fn is_working(&self) -> bool {
        self.judging || self.files.is_some() || self.drawing
    }

    /// Sets the progress of the part of a node.
    pub fn progress(&mut self, node: NodeId, progress: Progress) {
        if let Some(part) = self.parts.get_mut(&node) {
            self.delivering.remove(&node);
            match progress {
                Progress::Captured if part.progress != Progress::Captured => self.captured.push_back(node),
                Progress::Delivering(_) => _ = self.delivering.insert(node),
                _ => {}
            }
            part.progress = progress;
        }
    }

    /// The node has lost its stream or has a new one: transfers in progress start over. Returns
    /// whether there were any.
    pub fn interrupted(&mut self, node: NodeId) -> bool {
        self.captured.retain(|other| *other != node);
        if let Some(ranks) = self.files_in_transfer.remove(&node) {
            self.files_pending.insert(node, ranks);
        }
        let begun =
            matches!(self.parts.get(&node), Some(Part { progress: Progress::Captured | Progress::Delivering(_), .. }));
        if begun {
            self.progress(node, Progress::Requested);
        }
        begun
    }

    /// Starts a new round: all evidence is outdated, and every node is asked again.
    pub fn begin_round(&mut self) {
        self.round += 1;
        self.next_round_ns = None;
        self.state = State::Open;
        self.late_since_ns = None;
        self.captured.clear();
        self.merging.clear();
        self.timelines.clear();
        self.files_pending.clear();
        let nodes: Vec<NodeId> = self.parts.keys().copied().collect();
        for node in nodes {
            self.progress(node, Progress::Requested);
        }
    }

    /// Whether a node has not taken its dump yet or was not asked for one.
    #[must_use]
    pub fn awaits(&self, node: NodeId) -> bool {
        self.parts.get(&node).is_none_or(|part| part.progress == Progress::Requested)
    }

    /// Number of parts that are in transfer or wait to be merged.
    #[must_use]
    pub fn transfers(&self) -> usize {
        self.delivering.union(&self.merging).count()
    }

    /// Notes whether the ranks of a node hang.
    pub fn note_hang(&mut self, node: NodeId, hangs: bool, ended: bool, now_ns: u64) {
        if hangs {
            self.hanging.insert(node);
            self.quiet_since_ns = None;
            if std::mem::take(&mut self.by_hand) && self.state == State::Dumped {
                // The verdict does not include this node.
                self.next_round_ns = Some(now_ns);
            }
        } else if self.hanging.remove(&node) {
            self.recovered |= !ended;
            if self.hanging.is_empty() {
                self.quiet_since_ns = Some(now_ns);
            }
        }
    }

    /// Whether every part has arrived or failed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let is_open = |node: &NodeId| {
            let progress = self.parts.get(node).map(|part| &part.progress);
            matches!(progress, Some(Progress::Captured | Progress::Delivering(_)))
        };
        // A large job has thousands of parts, and nearly always some of them are open.
        if self.delivering.iter().chain(&self.captured).any(is_open) {
            return false;
        }
        self.parts.values().all(|part| matches!(part.progress, Progress::Delivered | Progress::Failed(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incident() -> Incident {
        let mut incident = Incident::new(Head::for_test());
        let part = Part {
            progress: Progress::Requested,
            ranks: RankSet::from_iter([0, 1]),
            interruptions: 0,
            requested_ns: 1,
        };
        incident.parts.insert(7, part);
        incident
    }

    #[test]
    fn transfers_of_a_lost_node_start_over() {
        let mut incident = incident();
        assert!(!incident.interrupted(7), "nothing was under way");
        incident.progress(7, Progress::Captured);
        incident.progress(7, Progress::Captured);
        assert_eq!(incident.captured, [7]);
        assert!(incident.interrupted(7) && incident.captured.is_empty());
        incident.progress(7, Progress::Delivering(5));
        incident.merging.insert(7);
        assert_eq!(incident.transfers(), 1, "one part takes one place");
        assert!(incident.interrupted(7) && incident.delivering.is_empty());
        assert_eq!(incident.parts[&7].progress, Progress::Requested);
        incident.progress(7, Progress::Delivered);
        incident.files_in_transfer.insert(7, RankSet::from_iter([1]));
        assert!(!incident.interrupted(7), "its part is here");
        assert_eq!(incident.files_pending[&7], RankSet::from_iter([1]), "the same files are asked for again");
        assert!(!incident.files_pending.contains_key(&8) && incident.files_in_transfer.is_empty());
    }
}
