//! The timelines of jobs that users request: asks the nodes of the job, some at a time, and passes
//! their files on as they arrive. Does no I/O; the hub sends the requests.

use std::collections::{BTreeMap, VecDeque};

use tokio::sync::mpsc;
use xpu_timer_proto::{
    timeline,
    v1::{JobId, RankRun, TimelineFile, TimelineRequest},
};

use crate::{
    cluster::{nodes::Nodes, service::Credit},
    http::questions::{Refusal, WantedTimeline, wanted_job},
    job::{JobKey, NodeId},
    os::clock::{Now, nanoseconds},
    timeline::DETAIL_MARGIN,
};

/// Nodes that send at a time. Each has some pieces of half a megabyte in memory here.
const NODES: usize = 8;
/// A node sends its next piece within this time.
const PIECE_NS: u64 = 60_000_000_000;

/// A chunk, with its share of the memory.
pub type Chunk = (TimelineFile, Credit);

/// The requests in progress.
pub struct Timelines {
    // Draws the key of a delivery, which no node can guess.
    draw_key: fn() -> String,
    next: u64,
    requests: BTreeMap<u64, TimelineInProgress>,
    // The request and the node of each expected delivery.
    expected: BTreeMap<String, (u64, NodeId)>,
}

struct TimelineInProgress {
    job: JobKey,
    wanted: WantedTimeline,
    asked_ns: u64,
    // How long all nodes record every kernel before they are asked for their files; 0 for not.
    recording_ns: u64,
    waiting: VecDeque<NodeId>,
    // Until when each node may send its next piece.
    sending: BTreeMap<NodeId, u64>,
    sender: mpsc::UnboundedSender<Chunk>,
}

impl Timelines {
    /// No requests. `draw_key` draws the key of a delivery.
    #[must_use]
    pub fn new(draw_key: fn() -> String) -> Self {
        Timelines { draw_key, next: 0, requests: BTreeMap::new(), expected: BTreeMap::new() }
    }

    /// Begins a request. Returns its files in chunks.
    ///
    /// # Errors
    /// If there is no such job, or no such rank.
    pub fn start(
        &mut self,
        wanted: WantedTimeline,
        nodes: &Nodes,
        now: Now,
    ) -> Result<mpsc::UnboundedReceiver<Chunk>, Refusal> {
        let jobs: Vec<JobKey> = nodes.jobs().cloned().collect();
        let alive: Vec<JobKey> = jobs.iter().filter(|job| nodes.job(job).alive).cloned().collect();
        let choice = if wanted.job.is_none() && !alive.is_empty() { &alive } else { &jobs };
        let job = wanted_job(choice, wanted.job.as_deref())?;
        let waiting: VecDeque<NodeId> = match wanted.rank {
            Some(rank) => nodes.node_of_rank(&job, rank).into_iter().collect(),
            None => nodes.job(&job).nodes.iter().copied().collect(),
        };
        if waiting.is_empty() {
            return Err(Refusal::NoJob(format!("job {job} has no such rank")));
        }
        let (sender, chunks) = mpsc::unbounded_channel();
        self.next += 1;
        let recording_ns = if wanted.detail { nanoseconds(wanted.window.saturating_add(DETAIL_MARGIN)) } else { 0 };
        let (asked_ns, sending) = (now.mono_ns, BTreeMap::new());
        let request = TimelineInProgress { job, wanted, asked_ns, recording_ns, waiting, sending, sender };
        self.requests.insert(self.next, request);
        Ok(chunks)
    }

    /// The requests to nodes that are to be sent now.
    pub fn next_requests(&mut self, nodes: &Nodes, now: Now) -> Vec<(NodeId, TimelineRequest)> {
        let mut messages = Vec::new();
        for (id, request) in &mut self.requests {
            let WantedTimeline { rank, window, .. } = request.wanted;
            // The window of every node begins at the same time.
            let since_ns = now.mono_ns.saturating_sub(request.asked_ns);
            let before_ns = if request.recording_ns > 0 { 0 } else { nanoseconds(window) };
            let window_ns =
                if request.wanted.detail { nanoseconds(window) } else { before_ns.saturating_add(since_ns) };
            let message = |node: NodeId, key: String, detail: bool| {
                let JobKey { name, instance } = nodes.key_at(node, &request.job);
                let job = Some(JobId { name, instance });
                let ranks = rank.iter().map(|rank| RankRun { first: *rank, last: *rank }).collect();
                (node, TimelineRequest { key, job, window_ms: window_ns / 1_000_000, ranks, detail })
            };
            if std::mem::take(&mut request.wanted.detail) {
                // All nodes record at the same time.
                let of_job = nodes.job(&request.job);
                messages.extend(of_job.nodes.iter().map(|node| message(*node, String::new(), true)));
            }
            if since_ns < request.recording_ns {
                continue;
            }
            while request.sending.len() < NODES
                && let Some(node) = request.waiting.pop_front()
            {
                if nodes.get(node).is_none_or(|node| node.stream.is_none()) {
                    request.report(format!("node {} is not connected", nodes.name(node)));
                    continue;
                }
                request.sending.insert(node, now.mono_ns + PIECE_NS);
                let key = (self.draw_key)();
                self.expected.insert(key.clone(), (*id, node));
                messages.push(message(node, key, false));
            }
        }
        self.finish();
        messages
    }

    /// Whether a delivery with this key is expected.
    #[must_use]
    pub fn expects(&self, key: &str) -> bool {
        self.expected.contains_key(key)
    }

    /// A piece of a delivery. A node sends the files of its own ranks only.
    pub fn piece(&mut self, key: &str, file: TimelineFile, credit: Credit, nodes: &Nodes, now: Now) {
        let Some((id, node)) = self.expected.get(key).copied() else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.sending.insert(node, now.mono_ns + PIECE_NS);
        if file.name.is_empty() && file.problem.is_empty() {
            request.sending.remove(&node);
            self.expected.remove(key);
            return;
        }
        let rank = timeline::rank_of_file(std::path::Path::new(&file.name)).map(|(rank, _)| rank);
        let is_own = rank.is_some_and(|rank| nodes.node_of_rank(&request.job, rank) == Some(node));
        if !file.problem.is_empty() {
            request.report(format!("node {}: {}", nodes.name(node), file.problem));
        } else if is_own {
            // Fails if the requester is gone; then the request ends.
            if request.sender.send((file, credit)).is_err() {
                self.drop_request(id);
            }
        }
    }

    /// A delivery ended, complete or not.
    pub fn ended(&mut self, key: &str, nodes: &Nodes) {
        let Some((id, node)) = self.expected.remove(key) else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.sending.remove(&node);
        request.report(format!("the timeline of node {} was cut off", nodes.name(node)));
    }

    /// Gives up nodes that do not answer, and requests whose requester is gone.
    pub fn tick(&mut self, nodes: &Nodes, now: Now) {
        let mut late = Vec::new();
        for (id, request) in &mut self.requests {
            let over: Vec<NodeId> =
                request.sending.iter().filter(|(_, until)| **until <= now.mono_ns).map(|(node, _)| *node).collect();
            for node in over {
                request.sending.remove(&node);
                request.report(format!("node {} does not answer", nodes.name(node)));
                late.push((*id, node));
            }
        }
        self.expected.retain(|_, delivery| !late.contains(delivery));
        let gone: Vec<u64> =
            self.requests.iter().filter(|(_, request)| request.sender.is_closed()).map(|(id, _)| *id).collect();
        gone.into_iter().for_each(|id| self.drop_request(id));
    }

    fn drop_request(&mut self, id: u64) {
        self.requests.remove(&id);
        self.expected.retain(|_, (of, _)| *of != id);
    }

    /// Ends the requests to which all nodes have answered.
    fn finish(&mut self) {
        self.requests.retain(|_, request| {
            let is_complete = request.waiting.is_empty() && request.sending.is_empty();
            if is_complete {
                // Fails if the requester is gone.
                let _ = request.sender.send((TimelineFile::default(), Credit::default()));
            }
            !is_complete
        });
    }
}

impl TimelineInProgress {
    fn report(&self, problem: String) {
        // Fails if the requester is gone.
        let _ = self.sender.send((TimelineFile { problem, ..Default::default() }, Credit::default()));
    }
}
