//! The state of the cluster collector and its transitions. One task owns it and never waits for a
//! node, a disk or a verdict.

pub(crate) mod deadlines;
mod delivery;
mod events;
mod opening;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::PathBuf};

use tokio::sync::mpsc;
use tracing::info;
use xpu_timer_analysis::{HangEvidence, stragglers::Comparison};
use xpu_timer_proto::v1::Alarm;

use crate::{
    client::webhook::Webhook,
    cluster::{comparison::ComparisonThread, config::Settings, gather::GatherEvent, incident::Incident, nodes::Nodes},
    error::Error,
    http::questions::Question,
    incident::{
        State,
        folder::Folder,
        records::{self, OpenIncident},
        throttle::{BY_HAND, Throttle},
    },
    job::{JobKey, NodeId, StreamId},
    metrics::slow_ranks::SlowRanks,
    os::{clock::Now, disk::Disk},
};

/// A message to the hub that is not from a node's stream.
#[derive(Debug)]
pub enum Command {
    /// A question of an HTTP page.
    Question(Question),
    /// The thread of an incident has finished a step.
    Gather(String, GatherEvent),
    /// The ranks of a job in an attempt were compared.
    Compared(JobKey, u32, Comparison),
    /// Incidents that an earlier cluster collector left open, found after a delay.
    OpenIncidentsFound(Vec<OpenIncident>),
    /// The folder of an incident was made after a delay, or could not be made.
    FolderMade(String, MadeFolder),
}

/// A folder, with the reason if it is not in its intended place.
pub type MadeFolder = Result<(Folder, Option<Error>), Error>;

/// A delivery that a node was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Expected {
    incident: String,
    node: NodeId,
    // Whether it delivers its `.stacktrace` files instead of its part.
    files: bool,
}

/// The state of the cluster collector.
pub struct Hub {
    /// Settings.
    pub settings: Settings,
    /// Nodes and ranks.
    pub nodes: Nodes,
    /// Incidents, oldest first.
    pub incidents: BTreeMap<String, Incident>,
    /// Number of incidents opened by this process.
    pub opened: u64,
    /// When this collector was started.
    pub started: Now,
    streams: BTreeMap<StreamId, NodeId>,
    throttle: Throttle<JobKey>,
    dumps: Throttle<JobKey>,
    // Alarms of jobs that have had too many incidents recently.
    deferred: Vec<(NodeId, Alarm)>,
    // Expected deliveries by the key that was drawn for each.
    expected: BTreeMap<String, Expected>,
    disk: Disk,
    // Jobs with all ranks present, with attempt and world size.
    complete: BTreeMap<JobKey, (u32, u32)>,
    // Nodes that claim ranks of another node: since when, and whether this was logged.
    refused: BTreeMap<(NodeId, NodeId, JobKey), (u64, bool)>,
    // The last reason for refusing a stream, and when it was logged.
    last_refusal: Option<(String, u64)>,
    forget_ns: u64,
    comparison: ComparisonThread,
    /// Ranks that slow their job down.
    pub slow: SlowRanks,
    webhook: Option<Webhook>,
    commands: mpsc::UnboundedSender<Command>,
}

pub(crate) const SECOND: u64 = 1_000_000_000;
/// Time beyond the sample interval in which a node should take its dump.
pub(crate) const CAPTURE_NS: u64 = 10 * SECOND;
/// After a restart, nodes reconnect within this time.
pub(crate) const RETURN_NS: u64 = 60 * SECOND;

impl Hub {
    /// Starts with the incidents that an earlier cluster collector left open.
    #[must_use]
    pub fn new(settings: Settings, commands: mpsc::UnboundedSender<Command>, now: Now) -> Self {
        let webhook = settings.webhook.as_deref().map(Webhook::new);
        let to_hub = commands.clone();
        let comparison = ComparisonThread::start(move |job, attempt, comparison| {
            // Fails only if the hub has ended before the thread.
            let _ = to_hub.send(Command::Compared(job, attempt, comparison));
        });
        let mut hub = Hub {
            nodes: Nodes::default(),
            incidents: BTreeMap::new(),
            opened: 0,
            started: now,
            streams: BTreeMap::new(),
            throttle: Throttle::default(),
            dumps: Throttle::new(BY_HAND),
            deferred: Vec::new(),
            expected: BTreeMap::new(),
            // Nothing waits for it: late results arrive as commands.
            disk: Disk::new(|| {}),
            complete: BTreeMap::new(),
            refused: BTreeMap::new(),
            last_refusal: None,
            forget_ns: 0,
            comparison,
            slow: SlowRanks::default(),
            webhook,
            commands,
            settings,
        };
        for root in hub.folders() {
            let (commands, below) = (hub.commands.clone(), root.clone());
            let late = move |found| drop(commands.send(Command::OpenIncidentsFound(found)));
            let found = hub.disk.run(&root, move || records::open_in_cluster(&below), late);
            hub.restore_all(found.unwrap_or_default(), now);
        }
        hub
    }

    /// Roots that may contain incident folders.
    fn folders(&self) -> Vec<PathBuf> {
        vec![self.settings.timeline_path.clone(), self.settings.fallback_path.clone()]
    }

    fn restore_all(&mut self, found: Vec<OpenIncident>, now: Now) {
        for incident in found {
            // Its nodes may have reported it before it was found.
            if !self.incidents.contains_key(&incident.record.id) {
                self.restore(incident, now);
            }
        }
    }

    fn restore(&mut self, OpenIncident { folder, record, verdict }: OpenIncident, now: Now) {
        info!("incident {} was left open by an earlier cluster collector", record.id);
        let age_ns = now.unix_ns.saturating_sub(record.opened_unix_ns);
        let mut incident = Incident::new(record.head(now.mono_ns.saturating_sub(age_ns)));
        incident.folder = Some(folder);
        incident.deadline_ns = now.mono_ns + RETURN_NS;
        if let Some(verdict) = verdict {
            incident.state = State::Dumped;
            (incident.sentence, incident.cause) = (verdict.sentence, verdict.cause.to_string());
            (incident.culprits, incident.is_proven) = (verdict.culprits, verdict.hang != HangEvidence::None);
            incident.quiet_since_ns = Some(now.mono_ns + RETURN_NS);
        }
        self.incidents.insert(record.id, incident);
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
