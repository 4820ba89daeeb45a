//! Events from nodes and from the threads that gather and compare.

use std::collections::BTreeMap;

use tracing::{info, warn};
use xpu_timer_analysis::stragglers::Comparison;
use xpu_timer_proto::v1::{
    NodeHello, NodeWelcome, RankEntry, RankPace, cluster_message::Message, node_message::Message as NodeMessage,
};

use crate::{
    cluster::{
        comparison::ComparisonInput,
        engine::{Action, CAPTURE_NS, Engine, SECOND},
        gather::GatherEvent,
    },
    job::{JobKey, NodeId, StreamId},
    os::clock::Now,
};

/// A repeated reason for refusing streams is logged once in this time.
const AGAIN_NS: u64 = 600 * SECOND;

impl Engine {
    /// A node sent a message. Its stream may have been replaced by a newer one.
    pub fn message(&mut self, stream: StreamId, message: NodeMessage, now: Now) {
        if let Some(node) = self.streams.get(&stream).copied() {
            self.node_message(node, message, now);
        }
    }

    /// A stream ended, or its queue was full.
    pub fn stream_ended(&mut self, stream: StreamId, why: &str, now: Now) {
        let Some(node) = self.streams.remove(&stream) else { return };
        if self.nodes.disconnect(node, stream, now.mono_ns) {
            info!("node {} disconnected: {why}", self.nodes.name(node));
            self.node_lost(node, now);
        }
    }

    /// A refused node reconnects again and again; after an update of one side, all nodes do.
    pub fn log_refused_stream(&mut self, node: &str, why: String, now: Now) {
        let last_logged = self.last_refusal.as_ref();
        if last_logged.is_none_or(|(before, when)| *before != why || now.mono_ns > when + AGAIN_NS) {
            warn!("node {node} is refused: {why}");
            self.last_refusal = Some((why, now.mono_ns));
        }
    }

    /// A node sent its hello. If the same process reconnects, its old stream is closed.
    pub fn node_joined(&mut self, stream: StreamId, hello: NodeHello, now: Now) {
        let replaced = self.nodes.stream_of(&hello.identity);
        let node = self.nodes.join(&hello.node, &hello.identity, stream);
        if let Some(old) = replaced.filter(|old| self.streams.remove(old).is_some()) {
            self.actions.push_back(Action::Disconnect(old));
        }
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
        self.send(node, Message::Welcome(NodeWelcome { open: requests }));
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

    fn node_message(&mut self, node: NodeId, message: NodeMessage, now: Now) {
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
                    let job = self.nodes.key(node, &activity.job.unwrap_or_default());
                    let last_ns = now.mono_ns.saturating_sub(activity.launch_age_ms.saturating_mul(1_000_000));
                    // A job that has launched since it was examined is no longer idle. The times of
                    // two messages differ by their delays.
                    if self.idle.get(&job).is_some_and(|idle| last_ns >= idle.last_launch_ns + SECOND) {
                        self.idle.remove(&job);
                    }
                    self.nodes.launched(node, job, last_ns);
                }
            }
            NodeMessage::Paces(paces) => self.add_paces(node, paces.ranks),
        }
    }

    /// New blocks for the comparison of ranks. Only blocks of the node's own ranks count.
    fn add_paces(&mut self, node: NodeId, ranks: Vec<RankPace>) {
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
            self.actions.push_back(Action::Compare(ComparisonInput::Paces(job, ranks)));
        }
    }

    /// The ranks of a job in an attempt were compared.
    pub fn note_comparison(&mut self, job: &JobKey, attempt: u32, comparison: Comparison, now: Now) {
        let nodes = &self.nodes;
        if nodes.job(job).attempt == attempt {
            let node_of = |rank| nodes.node_of_rank(job, rank).map_or(String::new(), |id| nodes.name(id).to_string());
            self.slow.note(job, attempt, comparison, node_of, now);
        }
    }

    /// The thread of an incident has finished a step.
    pub fn gathered(&mut self, id: &str, event: GatherEvent, now: Now) {
        match event {
            GatherEvent::Judged(verdict) => self.apply_verdict(id, &verdict, now),
            GatherEvent::Drawn => self.drawing_finished(id, now),
            GatherEvent::Merged(node) => {
                if let Some(incident) = self.incidents.get_mut(id) {
                    incident.merging.remove(&node);
                }
                self.request_parts(now);
            }
        }
    }
}
