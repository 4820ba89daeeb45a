//! Events from nodes and from other threads.

use std::collections::BTreeMap;

use tracing::{info, warn};
use xpu_timer_analysis::stragglers::Comparison;
use xpu_timer_proto::v1::{
    NodeHello, NodeWelcome, RankEntry, RankPace, cluster_message::Message, node_message::Message as NodeMessage,
};

use crate::{
    cluster::{
        comparison::ComparisonInput,
        gather::GatherEvent,
        hub::{CAPTURE_NS, Command, Hub, SECOND},
        nodes::Outgoing,
        service::StreamEvent,
        status,
    },
    http::questions::Question,
    job::{JobKey, NodeId, StreamId},
    os::clock::Now,
};

/// A repeated reason for refusing streams is logged once in this time.
const AGAIN_NS: u64 = 600 * SECOND;

impl Hub {
    /// Handles an event of a node's stream.
    pub fn stream_event(&mut self, event: StreamEvent, now: Now) {
        match event {
            StreamEvent::Joined(stream, hello, outgoing) => self.node_joined(stream, *hello, outgoing, now),
            StreamEvent::Message(stream, message) => {
                // The stream may have been replaced by a newer one of the node.
                if let Some(node) = self.streams.get(&stream).copied() {
                    self.node_message(node, *message, now);
                }
            }
            StreamEvent::DeliveryStarted(key, known) => {
                // The sender of the question may be gone.
                let _ = known.send(self.expected.contains_key(&*key));
            }
            StreamEvent::DeliveryPiece(key, message, credit) => {
                // The key may have become void in the meantime.
                if let Some(expected) = self.expected.get(&*key).cloned() {
                    self.delivery_message(&expected, *message, credit, now);
                }
            }
            StreamEvent::Refused(node, why) => self.log_refused_stream(&node, why, now),
            StreamEvent::DeliveryEnded(key) => self.delivery_ended(&key, now),
            StreamEvent::Ended(stream, why) => {
                let Some(node) = self.streams.remove(&stream) else { return };
                // A full stream was given up before it ended; its remaining cleanup is done here.
                let given_up = self.nodes.get(node).is_some_and(|node| !node.is_joined());
                if self.nodes.disconnect(node, stream, now.mono_ns) || given_up {
                    info!("node {} disconnected: {why}", self.nodes.name(node));
                    self.node_lost(node, now);
                }
            }
        }
    }

    /// A refused node reconnects again and again; after an update of one side, all nodes do.
    pub(super) fn log_refused_stream(&mut self, node: &str, why: String, now: Now) {
        let last_logged = self.last_refusal.as_ref();
        if last_logged.is_none_or(|(before, when)| *before != why || now.mono_ns > when + AGAIN_NS) {
            warn!("node {node} is refused: {why}");
            self.last_refusal = Some((why, now.mono_ns));
        }
    }

    pub(super) fn node_joined(&mut self, stream: StreamId, hello: NodeHello, outgoing: Outgoing, now: Now) {
        let node = self.nodes.join(&hello.node, &hello.identity, stream, outgoing);
        self.streams.retain(|_, other| *other != node);
        self.streams.insert(stream, node);
        // Transfers on its old stream are lost.
        self.transfers_interrupted(node, now);
        let lasts = |id: &String| hello.incidents.iter().any(|alarm| alarm.incident == *id);
        for incident in self.incidents.values_mut().filter(|one| one.is_open() && !lasts(&one.head.id)) {
            // The hang ended there while the node was away.
            incident.note_hang(node, false, false, now.mono_ns);
        }
        let ranks = hello.ranks.unwrap_or_default().ranks;
        info!("node {} joined with {} ranks", hello.node, ranks.len());
        self.claim(node, ranks, now);
        let open: Vec<String> =
            self.incidents.values().filter(|one| one.is_open()).map(|one| one.head.id.clone()).collect();
        let requests = open.iter().filter_map(|id| self.dump_request(id, node, now)).collect();
        self.nodes.send(node, Message::Welcome(NodeWelcome { open: requests }), now.mono_ns);
        for alarm in hello.incidents {
            self.alarm(node, alarm, now);
        }
    }

    pub(super) fn claim(&mut self, node: NodeId, ranks: Vec<RankEntry>, now: Now) {
        let others = self.nodes.claim(node, ranks, now.mono_ns);
        for job in self.nodes.jobs_of(node) {
            let summary = self.nodes.job(&job);
            let now = (summary.attempt, summary.world_size);
            if summary.is_complete() && self.complete.insert(job.clone(), now) != Some(now) {
                info!(
                    "job {job} is complete: {} ranks on {} nodes, attempt {}",
                    summary.ranks,
                    summary.nodes.len(),
                    summary.attempt
                );
            }
        }
        for other in others {
            self.request_for_open_incidents(other, now);
        }
    }

    /// A node has lost its stream.
    pub(super) fn node_lost(&mut self, node: NodeId, now: Now) {
        self.transfers_interrupted(node, now);
        for other in self.nodes.competing_nodes(node) {
            self.request_for_open_incidents(other, now);
        }
    }

    /// The deliveries of a node end with its stream. They start over when it reconnects.
    pub(super) fn transfers_interrupted(&mut self, node: NodeId, now: Now) {
        for incident in self.incidents.values_mut() {
            if incident.interrupted(node) {
                incident.deadline_ns = incident.deadline_ns.max(now.mono_ns + CAPTURE_NS);
            }
        }
        self.expected.retain(|_, expected| expected.node != node);
    }

    pub(super) fn node_message(&mut self, node: NodeId, message: NodeMessage, now: Now) {
        match message {
            NodeMessage::Hello(_) => warn!("node {} sent Hello twice", self.nodes.name(node)),
            NodeMessage::Ranks(ranks) => {
                self.claim(node, ranks.ranks, now);
                self.request_for_open_incidents(node, now);
            }
            NodeMessage::Alarm(alarm) => self.alarm(node, alarm, now),
            NodeMessage::Captured(captured) => self.part_captured(&captured, node, now),
            NodeMessage::Update(update) => {
                if !update.hangs {
                    self.deferred.retain(|(other, alarm)| *other != node || alarm.incident != update.incident);
                }
                if update.hangs {
                    self.reopen(&update.incident, now);
                }
                if let Some(incident) = self.incidents.get_mut(&update.incident) {
                    incident.note_hang(node, update.hangs, update.ended, now.mono_ns);
                }
            }
            NodeMessage::Heartbeat(beat) => {
                for activity in beat.jobs {
                    let job = activity.job.unwrap_or_default();
                    self.nodes.launched(node, &job, activity.launch_age_ms, now.mono_ns);
                }
            }
            NodeMessage::Paces(paces) => self.add_paces(node, paces.ranks),
        }
    }

    /// New blocks for the comparison of ranks. Only blocks of the node's own ranks count.
    pub(super) fn add_paces(&mut self, node: NodeId, ranks: Vec<RankPace>) {
        let mut by_job: BTreeMap<JobKey, Vec<RankPace>> = BTreeMap::new();
        for mut rank in ranks {
            let Some(job) = rank.job.take().map(|job| self.nodes.key(node, &job)) else { continue };
            if self.nodes.node_of_rank(&job, rank.rank) == Some(node) {
                // Agents may count the attempts independently.
                rank.attempt = self.nodes.job(&job).attempt;
                by_job.entry(job).or_default().push(rank);
            }
        }
        for (job, ranks) in by_job {
            self.comparison.send(ComparisonInput::Paces(job, ranks));
        }
    }

    pub(super) fn note_comparison(&mut self, job: &JobKey, attempt: u32, comparison: Comparison, now: Now) {
        let nodes = &self.nodes;
        if nodes.job(job).attempt == attempt {
            let node_of = |rank| nodes.node_of_rank(job, rank).map_or(String::new(), |id| nodes.name(id).to_string());
            self.slow.note(job, attempt, comparison, node_of, now);
        }
    }

    /// Handles a message from another task or thread.
    pub fn command(&mut self, command: Command, now: Now) {
        match command {
            // The receiver of an answer may be gone, which is harmless.
            Command::Question(Question::Status(reply)) => drop(reply.send(status::status(self, now))),
            Command::Question(Question::Metrics(reply)) => drop(reply.send(status::metrics(self, now))),
            Command::Question(Question::Folders(reply)) => drop(reply.send(self.folders())),
            Command::Question(Question::WithoutFolder(reply)) => {
                drop(reply.send(status::without_folder(self)));
            }
            Command::Question(Question::SlowRanks(reply)) => drop(reply.send(self.slow.json())),
            Command::Question(Question::Dump { job, reply }) => self.dump_by_hand(job.as_deref(), reply, now),
            Command::Gather(id, GatherEvent::Judged(verdict)) => self.apply_verdict(&id, &verdict, now),
            Command::Gather(id, GatherEvent::Drawn) => self.drawing_finished(&id, now),
            Command::Gather(id, GatherEvent::Merged(node)) => {
                if let Some(incident) = self.incidents.get_mut(&id) {
                    incident.merging.remove(&node);
                }
                self.request_parts(now);
            }
            Command::Compared(job, attempt, comparison) => self.note_comparison(&job, attempt, comparison, now),
            Command::OpenIncidentsFound(found) => self.restore_all(found, now),
            Command::FolderMade(id, made) => self.folder_made(&id, made),
        }
    }
}
