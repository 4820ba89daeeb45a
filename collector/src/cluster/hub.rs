//! The state of the cluster collector and what happens to it. One task owns it; nothing here waits for a node, a disk or a verdict.

mod deadlines;
mod delivery;
mod files;
mod opening;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::PathBuf};

use tokio::sync::mpsc;
use tracing::{info, warn};
use xpu_timer_analysis::{HangEvidence, Verdict, stragglers::Comparison};
use xpu_timer_proto::v1::{
    Alarm, NodeHello, NodeWelcome, RankEntry, RankPace, cluster_message::Message, node_message::Message as Said,
};

pub use self::deadlines::TICK;
use super::{
    comparing::{self, Comparing},
    config::Settings,
    gather::{Done, Record},
    incident::{Incident, State},
    nodes::{NodeId, Nodes, Outgoing, StreamId},
    service::StreamEvent,
};
use crate::{client::webhook::Webhook, error::Error, http::questions::Question, incident::{folder::Folder, throttle::{BY_HAND, Throttle}}, job::key::JobKey, metrics::slow_ranks::SlowRanks, os::{clock::Now, disk::Disk}};

/// A message to the hub that is not from a node's stream.
#[derive(Debug)]
pub enum Command {
    /// What a page asks.
    Question(Question),
    /// The thread of an incident is done with something.
    Done(String, Done),
    /// The ranks of a job in an attempt were compared.
    Compared(JobKey, u32, Comparison),
    /// Incidents that an earlier cluster collector left open were found late.
    Found(Vec<Left>),
    /// The folder of an incident was made late, or could not be.
    Made(String, MadeFolder),
}

/// An incident that an earlier cluster collector left open: folder, record, and the verdict when there is one.
pub type Left = (PathBuf, Record, Option<Verdict>);
/// A folder, and why it is not where it should be.
type MadeFolder = Result<(Folder, Option<Error>), Error>;

/// Something that a node was asked to bring.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Expected {
    incident: String,
    node: NodeId,
    // Its `.stacktrace` files, else its part.
    files: bool,
}

/// The state.
pub struct Hub {
    /// Settings.
    pub settings: Settings,
    /// Nodes and ranks.
    pub nodes: Nodes,
    /// Incidents, oldest first.
    pub incidents: BTreeMap<String, Incident>,
    /// Incidents opened by this process.
    pub opened: u64,
    /// When it was started.
    pub started: Now,
    streams: BTreeMap<StreamId, NodeId>,
    throttle: Throttle<JobKey>,
    dumps: Throttle<JobKey>,
    // Alarms of jobs that have had too many incidents of late.
    held: Vec<(NodeId, Alarm)>,
    // What nodes were asked to bring, by the key that was drawn for it.
    expected: BTreeMap<String, Expected>,
    disk: Disk,
    // Jobs of which every rank is known, with attempt and world.
    whole: BTreeMap<JobKey, (u32, u32)>,
    // Nodes that say they have ranks of another one: since when, and whether that was told.
    refused: BTreeMap<(NodeId, NodeId, JobKey), (u64, bool)>,
    // What streams were refused for, and when that was told.
    turned_away: Option<(String, u64)>,
    forget_ns: u64,
    comparing: Comparing,
    /// Ranks that slow their job down.
    pub slow: SlowRanks,
    webhook: Option<Webhook>,
    commands: mpsc::UnboundedSender<Command>,
}

const SECOND: u64 = 1_000_000_000;
/// Beyond the sample interval, for a node to have taken its dump.
const CAPTURE_NS: u64 = 10 * SECOND;
/// The same words about streams that are refused are told once in so long.
const AGAIN_NS: u64 = 600 * SECOND;
/// After a restart, nodes come again within this time.
const RETURN_NS: u64 = 60 * SECOND;

impl Hub {
    /// With what an earlier cluster collector left open.
    #[must_use]
    pub fn new(settings: Settings, commands: mpsc::UnboundedSender<Command>, now: Now) -> Self {
        let webhook = settings.webhook.as_deref().map(Webhook::new);
        let mut hub = Hub {
            nodes: Nodes::default(),
            incidents: BTreeMap::new(),
            opened: 0,
            started: now,
            streams: BTreeMap::new(),
            throttle: Throttle::default(),
            dumps: Throttle::new(BY_HAND),
            held: Vec::new(),
            expected: BTreeMap::new(),
            // Nobody waits for it: what comes late is a command.
            disk: Disk::new(|| {}),
            whole: BTreeMap::new(),
            refused: BTreeMap::new(),
            turned_away: None,
            forget_ns: 0,
            comparing: Comparing::start(commands.clone()),
            slow: SlowRanks::default(),
            webhook,
            commands,
            settings,
        };
        for root in hub.folders() {
            let (commands, below) = (hub.commands.clone(), root.clone());
            let late = move |found| drop(commands.send(Command::Found(found)));
            let found = hub.disk.ask(&root, move || Record::open_in(&below), late);
            hub.restore_all(found.unwrap_or_default(), now);
        }
        hub
    }

    /// Folders in which incidents may lie.
    fn folders(&self) -> Vec<PathBuf> {
        vec![self.settings.timeline_path.clone(), self.settings.fallback_path.clone()]
    }

    fn restore_all(&mut self, found: Vec<Left>, now: Now) {
        for (folder, record, verdict) in found {
            // Found late, its nodes may have told of it.
            if !self.incidents.contains_key(&record.id) {
                self.restore(folder, record, verdict, now);
            }
        }
    }

    fn restore(&mut self, folder: PathBuf, record: Record, verdict: Option<Verdict>, now: Now) {
        info!("incident {} was left open by an earlier cluster collector", record.id);
        let trigger = xpu_timer_proto::lenient::decode(&record.trigger).unwrap_or_default();
        let age_ns = now.unix_ns.saturating_sub(record.opened_unix_ns);
        let opened = Now { mono_ns: now.mono_ns.saturating_sub(age_ns), unix_ns: record.opened_unix_ns };
        let job = JobKey { name: record.job, instance: record.instance };
        let mut incident = Incident::new(&record.id, &job, record.attempt, trigger, opened, record.late_ns);
        incident.folder = Some(folder);
        incident.deadline_ns = now.mono_ns + RETURN_NS;
        if let Some(verdict) = verdict {
            incident.state = State::Judged;
            (incident.sentence, incident.cause) = (verdict.sentence, verdict.cause.to_string());
            (incident.culprits, incident.is_proven) = (verdict.culprits, verdict.hang != HangEvidence::None);
            incident.quiet_since_ns = Some(now.mono_ns + RETURN_NS);
        }
        self.incidents.insert(record.id, incident);
    }

    /// Something happened on a node's stream.
    pub fn stream(&mut self, event: StreamEvent, now: Now) {
        match event {
            StreamEvent::Joined(stream, hello, outgoing) => self.joined(stream, *hello, outgoing, now),
            StreamEvent::Said(stream, message) => {
                // The stream may have been closed by the node's next one.
                if let Some(node) = self.streams.get(&stream).copied() {
                    self.said(node, *message, now);
                }
            }
            StreamEvent::Brings(key, known) => {
                // Whoever asked may be gone.
                let _ = known.send(self.expected.contains_key(&*key));
            }
            StreamEvent::Brought(key, message, credit) => {
                // The key may have become void in the meantime.
                if let Some(expected) = self.expected.get(&*key).cloned() {
                    self.brought(&expected, *message, credit, now);
                }
            }
            StreamEvent::Refused(node, why) => self.turned_away(&node, why, now),
            StreamEvent::Ceased(key) => self.ceased(&key, now),
            StreamEvent::Ended(stream, why) => {
                let Some(node) = self.streams.remove(&stream) else { return };
                // A stream that took nothing more was given up before it ended; what follows of that is done here.
                let given_up = self.nodes.get(node).is_some_and(|node| !node.is_joined());
                if self.nodes.lose(node, stream, now.mono_ns) || given_up {
                    info!("node {} is gone: {why}", self.nodes.name(node));
                    self.lost(node, now);
                }
            }
        }
    }

    /// A node that is refused dials again and again, and after an update of one side all nodes do.
    fn turned_away(&mut self, node: &str, why: String, now: Now) {
        let told = self.turned_away.as_ref();
        if told.is_none_or(|(before, when)| *before != why || now.mono_ns > when + AGAIN_NS) {
            warn!("node {node} is refused: {why}");
            self.turned_away = Some((why, now.mono_ns));
        }
    }

    fn joined(&mut self, stream: StreamId, hello: NodeHello, outgoing: Outgoing, now: Now) {
        let node = self.nodes.join(&hello.node, &hello.identity, stream, outgoing);
        self.streams.retain(|_, other| *other != node);
        self.streams.insert(stream, node);
        // What was under way on its old stream is lost.
        self.interrupted(node, now);
        let lasts = |id: &String| hello.incidents.iter().any(|alarm| alarm.incident == *id);
        for incident in self.incidents.values_mut().filter(|one| one.is_open() && !lasts(&one.id)) {
            // It was over there while the node was away.
            incident.hangs(node, false, false, now.mono_ns);
        }
        let ranks = hello.ranks.unwrap_or_default().ranks;
        info!("node {} joined with {} ranks", hello.node, ranks.len());
        self.claim(node, ranks, now);
        let open: Vec<String> = self.incidents.values().filter(|one| one.is_open()).map(|one| one.id.clone()).collect();
        let requests = open.iter().filter_map(|id| self.ask(id, node, now)).collect();
        self.nodes.send(node, Message::Welcome(NodeWelcome { open: requests }), now.mono_ns);
        for alarm in hello.incidents {
            self.alarm(node, alarm, now);
        }
    }

    fn claim(&mut self, node: NodeId, ranks: Vec<RankEntry>, now: Now) {
        let others = self.nodes.claim(node, ranks, now.mono_ns);
        for job in self.nodes.jobs_of(node) {
            let view = self.nodes.job(&job);
            let now = (view.attempt, view.world_size);
            if view.is_whole() && self.whole.insert(job.clone(), now) != Some(now) {
                info!(
                    "job {job} is whole: {} ranks on {} nodes, attempt {}",
                    view.ranks,
                    view.nodes.len(),
                    view.attempt
                );
            }
        }
        for other in others {
            self.ask_all_of(other, now);
        }
    }

    /// Whether a job has a world that was started after this incident was opened: what it is about is over.
    fn is_over(&self, incident: &Incident) -> bool {
        let view = self.nodes.job(&incident.job);
        view.alive && view.born_ns > incident.opened.mono_ns
    }

    /// Whether what a node alarms of is not what this incident is about: none of its ranks that run was there when it was asked for its
    /// part. That the world of the incident is over may not have been told by the others yet.
    fn is_before(&self, incident: &Incident, node: NodeId) -> bool {
        let asked = incident.parts.get(&node).map(|part| part.asked_ns);
        asked.is_some_and(|asked_ns| self.nodes.began_after(&incident.job, node, asked_ns))
    }

    /// A node has no stream any more.
    fn lost(&mut self, node: NodeId, now: Now) {
        self.interrupted(node, now);
        for other in self.nodes.rivals(node) {
            self.ask_all_of(other, now);
        }
    }

    /// Deliveries of a node end with its stream. They begin anew when it comes again.
    fn interrupted(&mut self, node: NodeId, now: Now) {
        for incident in self.incidents.values_mut() {
            if incident.interrupted(node) {
                incident.deadline_ns = incident.deadline_ns.max(now.mono_ns + CAPTURE_NS);
            }
        }
        self.expected.retain(|_, expected| expected.node != node);
    }

    fn said(&mut self, node: NodeId, message: Said, now: Now) {
        match message {
            Said::Hello(_) => warn!("node {} said hello twice", self.nodes.name(node)),
            Said::Ranks(ranks) => {
                self.claim(node, ranks.ranks, now);
                self.ask_all_of(node, now);
            }
            Said::Alarm(alarm) => self.alarm(node, alarm, now),
            Said::Captured(captured) => self.captured(&captured, node, now),
            Said::Update(update) => {
                if !update.hangs {
                    self.held.retain(|(other, alarm)| *other != node || alarm.incident != update.incident);
                }
                if update.hangs {
                    self.reopen(&update.incident, now);
                }
                if let Some(incident) = self.incidents.get_mut(&update.incident) {
                    incident.hangs(node, update.hangs, update.ended, now.mono_ns);
                }
            }
            Said::Heartbeat(beat) => {
                for activity in beat.jobs {
                    let job = activity.job.unwrap_or_default();
                    self.nodes.launched(node, &job, activity.launch_age_ms, now.mono_ns);
                }
            }
            Said::Paces(paces) => self.paces(node, paces.ranks),
        }
    }

    /// How ranks fare. A node speaks for its own ranks.
    fn paces(&mut self, node: NodeId, ranks: Vec<RankPace>) {
        let mut by_job: BTreeMap<JobKey, Vec<RankPace>> = BTreeMap::new();
        for mut rank in ranks {
            let Some(job) = rank.job.take().map(|job| self.nodes.key(node, &job)) else { continue };
            if self.nodes.of_rank(&job, rank.rank) == Some(node) {
                // Agents may count the attempts apart.
                rank.attempt = self.nodes.job(&job).attempt;
                by_job.entry(job).or_default().push(rank);
            }
        }
        for (job, ranks) in by_job {
            self.comparing.tell(comparing::Told::Paces(job, ranks));
        }
    }

    fn compared(&mut self, job: &JobKey, attempt: u32, comparison: Comparison, now: Now) {
        let nodes = &self.nodes;
        if nodes.job(job).attempt == attempt {
            let node_of = |rank| nodes.of_rank(job, rank).map_or(String::new(), |id| nodes.name(id).to_string());
            self.slow.note(job, attempt, comparison, node_of, now);
        }
    }

    /// A message from another task or thread.
    pub fn command(&mut self, command: Command, now: Now) {
        match command {
            // Whoever asked may be gone by now; that is no loss.
            Command::Question(Question::Status(reply)) => drop(reply.send(super::status::status(self, now))),
            Command::Question(Question::Metrics(reply)) => drop(reply.send(super::status::metrics(self, now))),
            Command::Question(Question::Folders(reply)) => drop(reply.send(self.folders())),
            Command::Question(Question::WithoutFolder(reply)) => {
                drop(reply.send(super::status::without_folder(self)));
            }
            Command::Question(Question::SlowRanks(reply)) => drop(reply.send(self.slow.json())),
            Command::Question(Question::Dump { job, reply }) => self.by_hand(job.as_deref(), reply, now),
            Command::Done(id, Done::Judged(verdict)) => self.judged(&id, &verdict, now),
            Command::Done(id, Done::Drawn) => self.drawn(&id, now),
            Command::Done(id, Done::Merged(node)) => {
                if let Some(incident) = self.incidents.get_mut(&id) {
                    incident.merging.remove(&node);
                }
                self.deliver(now);
            }
            Command::Compared(job, attempt, comparison) => self.compared(&job, attempt, comparison, now),
            Command::Found(found) => self.restore_all(found, now),
            Command::Made(id, made) => self.made(&id, made),
        }
    }
}
