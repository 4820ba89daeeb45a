//! The incidents of the whole cluster: what opens one, what its nodes deliver, and what closes it.
//! Pure: the caller passes in the events and the time, and executes the returned actions.

pub(crate) mod deadlines;
mod delivery;
mod events;
mod opening;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    path::PathBuf,
};

use serde_json::Value;
use tracing::info;
use xpu_timer_analysis::{HangEvidence, Status, Verdict};
use xpu_timer_proto::v1::{Alarm, cluster_message::Message};

use crate::{
    cluster::{
        comparison::ComparisonInput,
        gather::{GatherSetup, GatherTask},
        incident::Incident,
        nodes::Nodes,
    },
    http::questions::{DumpReply, Refusal},
    incident::{BY_HAND, IdleJob, State, Throttle, engine::Record, records::OpenIncident},
    job::{JobKey, NodeId, StreamId},
    metrics::slow_ranks::SlowRanks,
    os::clock::Now,
};

/// An action for the caller. Actions are executed in their order.
#[derive(Debug)]
pub enum Action {
    /// Send a message to a node. If its queue is full, [`Engine::stream_ended`] follows.
    Send(StreamId, Message),
    /// Close a stream that was replaced.
    Disconnect(StreamId),
    /// Make the folder of an incident with this record; [`Engine::folder_made`] follows.
    MakeFolder(Record),
    /// Remove a folder that was made too late.
    RemoveFolder(PathBuf),
    /// Write the status of an incident, and when it was closed, into its verdict.
    WriteStatus {
        /// Name of the incident.
        incident: String,
        /// Its folder.
        folder: PathBuf,
        /// Its status.
        status: Status,
        /// When it was closed, Unix time.
        closed_unix_ns: Option<u64>,
    },
    /// Give a task to the gathering thread of an incident. The setup starts the thread. If that
    /// fails, [`Engine::gathering_failed`] follows.
    Gather(String, Option<Box<GatherSetup>>, GatherTask),
    /// Release the gathering thread of an incident.
    Release(String),
    /// Pass data to the comparison of ranks.
    Compare(ComparisonInput),
    /// Post a verdict, with the folder of its incident, to the webhook.
    Notify(Box<Verdict>, Option<PathBuf>),
    /// Answer a request for a dump, after the work on the folder of its incident.
    Reply(DumpReply, Option<PathBuf>, Result<Value, Refusal>),
    /// Make the mild captures of a job incidents. `reason` completes "it is kept because".
    Promote {
        /// The job.
        job: JobKey,
        /// When the first of its processes was started.
        started_ns: u64,
        /// The reason.
        reason: String,
    },
    /// Remove expired incident folders, except those of these incidents.
    Retire(BTreeSet<String>),
}

/// A delivery that a node was requested to send.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Expected {
    incident: String,
    node: NodeId,
    // Whether it delivers its `.stacktrace` files instead of its part.
    files: bool,
}

/// The state of the cluster collector.
pub struct Engine {
    /// Nodes and ranks.
    pub nodes: Nodes,
    /// Incidents, oldest first.
    pub incidents: BTreeMap<String, Incident>,
    /// Number of incidents opened by this process.
    pub opened: u64,
    /// Jobs that were examined and found idle.
    pub idle: BTreeMap<JobKey, IdleJob>,
    /// When this collector was started.
    pub started: Now,
    /// Ranks that slow their job down.
    pub slow: SlowRanks,
    actions: VecDeque<Action>,
    streams: BTreeMap<StreamId, NodeId>,
    // Draws the key of a delivery, which no node can guess.
    draw_key: fn() -> String,
    // Jobs with mild captures, and when the first of their processes was started.
    captured: BTreeMap<JobKey, u64>,
    throttle: Throttle<JobKey>,
    dumps: Throttle<JobKey>,
    // Alarms of jobs that have had too many incidents recently.
    deferred: Vec<(NodeId, Alarm)>,
    // Expected deliveries by the key that was drawn for each.
    expected: BTreeMap<String, Expected>,
    // Jobs with all ranks present, with attempt and world size.
    complete: BTreeMap<JobKey, (u32, u32)>,
    // Nodes that claim ranks of another node: since when, and whether this was logged.
    refused: BTreeMap<(NodeId, NodeId, JobKey), (u64, bool)>,
    // The last reason for refusing a stream, and when it was logged.
    last_refusal: Option<(String, u64)>,
    forget_ns: u64,
}

pub(crate) const SECOND: u64 = 1_000_000_000;
/// Time beyond the sample interval in which a node should take its dump.
pub(crate) const CAPTURE_NS: u64 = 10 * SECOND;
/// After a restart, nodes reconnect within this time.
pub(crate) const RETURN_NS: u64 = 60 * SECOND;

impl Engine {
    /// No nodes and no incidents. `draw_key` draws the key of a delivery.
    #[must_use]
    pub fn new(draw_key: fn() -> String, now: Now) -> Self {
        Engine {
            nodes: Nodes::default(),
            incidents: BTreeMap::new(),
            opened: 0,
            idle: BTreeMap::new(),
            started: now,
            slow: SlowRanks::default(),
            actions: VecDeque::new(),
            streams: BTreeMap::new(),
            draw_key,
            captured: BTreeMap::new(),
            throttle: Throttle::default(),
            dumps: Throttle::new(BY_HAND),
            deferred: Vec::new(),
            expected: BTreeMap::new(),
            complete: BTreeMap::new(),
            refused: BTreeMap::new(),
            last_refusal: None,
            forget_ns: 0,
        }
    }

    /// The next action to execute.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Sends a message to a node. Returns whether it is connected.
    fn send(&mut self, node: NodeId, message: Message) -> bool {
        let stream = self.nodes.get(node).and_then(|node| node.stream);
        self.actions.extend(stream.map(|stream| Action::Send(stream, message)));
        stream.is_some()
    }

    /// Continues with the incidents that an earlier cluster collector left open.
    pub fn restore(&mut self, found: Vec<OpenIncident>, now: Now) {
        for OpenIncident { folder, record, verdict } in found {
            // Its nodes may have reported it before it was found.
            if self.incidents.contains_key(&record.id) {
                continue;
            }
            info!("incident {} was left open by an earlier cluster collector", record.id);
            let age_ns = now.unix_ns.saturating_sub(record.opened_unix_ns);
            let mut incident = Incident::new(record.head(now.mono_ns.saturating_sub(age_ns)));
            incident.folder = Some(folder);
            incident.deadline_ns = now.mono_ns + RETURN_NS;
            if let Some(verdict) = verdict {
                (incident.state, incident.may_be_mild) = (State::Dumped, false);
                (incident.sentence, incident.cause) = (verdict.sentence, verdict.cause.to_string());
                (incident.culprits, incident.is_proven) = (verdict.culprits, verdict.hang != HangEvidence::None);
                incident.quiet_since_ns = Some(now.mono_ns + RETURN_NS);
            }
            self.incidents.insert(record.id, incident);
        }
    }

    /// Whether the job has a world that was started after this incident was opened. The hang of the
    /// incident is over then.
    fn is_over(&self, incident: &Incident) -> bool {
        let summary = self.nodes.job(&incident.head.job);
        summary.alive && summary.first_start_ns > incident.head.opened.mono_ns
    }

    /// Whether an alarm of a node is about something other than this incident: none of its running
    /// ranks existed when the node was asked for its part. The other nodes may not have reported
    /// yet that the world of the incident is over.
    fn is_before(&self, incident: &Incident, node: NodeId) -> bool {
        let asked = incident.parts.get(&node).map(|part| part.requested_ns);
        asked.is_some_and(|requested_ns| self.nodes.all_started_after(&incident.head.job, node, requested_ns))
    }
}
