//! The timelines of jobs that users request: asks the nodes of the job, some at a time, and passes
//! their files on as they arrive. Does no I/O; the hub sends the requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tokio::sync::mpsc;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::{
    timeline,
    v1::{JobId, TimelineFile, TimelineRequest},
};

use crate::{
    cluster::{nodes::Nodes, service::Credit},
    http::questions::{Refusal, WantedRecording, WantedTimeline, wanted_job},
    job::{JobKey, NodeId},
    os::clock::{Now, nanoseconds},
    timeline::DETAIL_MARGIN,
};

/// Nodes that send at a time. Each has some pieces of half a megabyte in memory here.
const NODES: usize = 8;
/// A node sends its next piece within this time.
const PIECE_NS: u64 = 60_000_000_000;

/// A chunk, with its share of the memory.
pub(crate) type Chunk = (TimelineFile, Credit);

/// The requests in progress.
pub(crate) struct Timelines {
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
    // How long all nodes record before the cluster collector requests their files; 0 if they do not
    // record.
    recording_ns: u64,
    // Whether the request to record must still be sent to them.
    begins: bool,
    waiting: VecDeque<NodeId>,
    // Until when each node may send its next piece.
    sending: BTreeMap<NodeId, u64>,
    sender: mpsc::UnboundedSender<Chunk>,
}

impl Timelines {
    /// No requests. `draw_key` draws the key of a delivery.
    #[must_use]
    pub(crate) fn new(draw_key: fn() -> String) -> Self {
        Timelines { draw_key, next: 0, requests: BTreeMap::new(), expected: BTreeMap::new() }
    }

    /// Begins a request. Returns its files in chunks.
    ///
    /// # Errors
    /// If there is no such job, or no such rank.
    pub(crate) fn start(
        &mut self,
        wanted: WantedTimeline,
        nodes: &Nodes,
        now: Now,
    ) -> Result<mpsc::UnboundedReceiver<Chunk>, Refusal> {
        let jobs: Vec<JobKey> = nodes.jobs().cloned().collect();
        let alive: Vec<JobKey> = jobs.iter().filter(|job| nodes.job(job).alive).cloned().collect();
        let choice = if wanted.job.is_none() && !alive.is_empty() { &alive } else { &jobs };
        let job = wanted_job(choice, wanted.job.as_deref())?;
        let (waiting, unknown) = match &wanted.ranks {
            Some(ranks) => nodes_of(&job, ranks, nodes),
            None => (nodes.job(&job).nodes.clone(), RankSet::new()),
        };
        if waiting.is_empty() {
            return Err(Refusal::NoJob(format!("no node has rank {unknown} of job {job}")));
        }
        let (sender, chunks) = mpsc::unbounded_channel();
        self.next += 1;
        let begins = wanted.records();
        let recording_ns = if begins { nanoseconds(wanted.window.saturating_add(DETAIL_MARGIN)) } else { 0 };
        let (asked_ns, sending) = (now.mono_ns, BTreeMap::new());
        let waiting = waiting.into_iter().collect();
        let request = TimelineInProgress { job, wanted, asked_ns, recording_ns, begins, waiting, sending, sender };
        if !unknown.is_empty() {
            request.report(format!("no node has rank {unknown} of job {job}", job = request.job));
        }
        self.requests.insert(self.next, request);
        Ok(chunks)
    }

    /// The requests to nodes that are to be sent now.
    pub(crate) fn next_requests(&mut self, nodes: &Nodes, now: Now) -> Vec<(NodeId, TimelineRequest)> {
        let mut messages = Vec::new();
        for (id, request) in &mut self.requests {
            let window = request.wanted.window;
            // The window of every node begins at the same time.
            let since_ns = now.mono_ns.saturating_sub(request.asked_ns);
            let before_ns = if request.recording_ns > 0 { 0 } else { nanoseconds(window) };
            let window_ns = if request.begins { nanoseconds(window) } else { before_ns.saturating_add(since_ns) };
            let ranks = request.wanted.ranks.as_ref().map(RankSet::to_message).unwrap_or_default();
            let message = |node: NodeId, key: String, detail: bool| {
                let JobKey { name, instance } = nodes.key_at(node, &request.job);
                let job = Some(JobId { name, instance });
                let (ranks, window_ms) = (ranks.clone(), window_ns / 1_000_000);
                let recording = request.wanted.recording.map(WantedRecording::to_message);
                (node, TimelineRequest { key, job, window_ms, ranks, detail, recording })
            };
            if std::mem::take(&mut request.begins) {
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
    pub(crate) fn expects(&self, key: &str) -> bool {
        self.expected.contains_key(key)
    }

    /// A piece of a delivery. A node sends the files of its own ranks only.
    pub(crate) fn piece(&mut self, key: &str, file: TimelineFile, credit: Credit, nodes: &Nodes, now: Now) {
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
    pub(crate) fn ended(&mut self, key: &str, nodes: &Nodes) {
        let Some((id, node)) = self.expected.remove(key) else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.sending.remove(&node);
        request.report(format!("the timeline of node {} was cut off", nodes.name(node)));
    }

    /// Gives up nodes that do not answer, and requests whose requester is gone.
    pub(crate) fn tick(&mut self, nodes: &Nodes, now: Now) {
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

/// The nodes of these ranks, and the ranks that no node has.
fn nodes_of(job: &JobKey, ranks: &RankSet, nodes: &Nodes) -> (BTreeSet<NodeId>, RankSet) {
    // A range may be larger than any job.
    let in_world = ranks.intersection(&RankSet::world(nodes.job(job).world_size));
    let (known, of_ranks): (RankSet, BTreeSet<NodeId>) =
        in_world.iter().filter_map(|rank| Some((rank, nodes.node_of_rank(job, rank)?))).unzip();
    (of_ranks, ranks.intersection(&known.complement(u32::MAX)))
}

impl TimelineInProgress {
    fn report(&self, problem: String) {
        // Fails if the requester is gone.
        let _ = self.sender.send((TimelineFile { problem, ..Default::default() }, Credit::default()));
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicU64, time::Duration};

    use xpu_timer_proto::v1::{Presence, RankEntry, RankInfo};

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn at(second: u64) -> Now {
        Now { mono_ns: second * SECOND, unix_ns: second * SECOND }
    }

    /// `count` nodes, each with one rank of job `j`.
    fn cluster(count: u32) -> (Nodes, Timelines) {
        static KEYS: AtomicU64 = AtomicU64::new(0);
        let draw_key = || KEYS.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_string();
        let mut nodes = Nodes::default();
        for rank in 0..count {
            let id = nodes.join(&format!("n{rank}"), &format!("n{rank}"), u64::from(rank) + 1);
            let entry = RankEntry {
                job: Some(JobId { name: "j".into(), instance: String::new() }),
                info: Some(RankInfo { rank: rank as i32, world_size: count, ..Default::default() }),
                presence: Presence::Present.into(),
                ..Default::default()
            };
            nodes.claim(id, vec![entry], 1);
        }
        (nodes, Timelines::new(draw_key))
    }

    fn wanted(ranks: Option<&str>, detail: bool) -> WantedTimeline {
        let ranks = ranks.map(|ranks| ranks.parse().unwrap());
        WantedTimeline { job: Some("j".into()), ranks, window: Duration::from_secs(20), detail, recording: None }
    }

    fn file(name: &str) -> TimelineFile {
        TimelineFile { name: name.into(), last: true, ..Default::default() }
    }

    fn received(chunks: &mut mpsc::UnboundedReceiver<Chunk>) -> Vec<TimelineFile> {
        std::iter::from_fn(|| chunks.try_recv().ok()).map(|(file, _)| file).collect()
    }

    #[test]
    fn some_nodes_are_asked_at_a_time_until_all_have_answered() {
        let (nodes, mut timelines) = cluster(20);
        let mut chunks = timelines.start(wanted(None, false), &nodes, at(1)).unwrap();
        let mut asked = 0;
        loop {
            let requests = timelines.next_requests(&nodes, at(2));
            let Some((_, request)) = requests.first() else { break };
            assert!(requests.len() <= NODES && request.window_ms == 21_000, "the window begins at the same time");
            for (node, request) in requests {
                let name = format!("{:05}-00020.ops", node - 1);
                timelines.piece(&request.key, file(&name), Credit::default(), &nodes, at(2));
                timelines.piece(&request.key, TimelineFile::default(), Credit::default(), &nodes, at(2));
                timelines.ended(&request.key, &nodes);
                asked += 1;
            }
        }
        let files = received(&mut chunks);
        assert_eq!((asked, files.len(), files.last()), (20, 21, Some(&TimelineFile::default())));
        assert!(chunks.try_recv().is_err() && timelines.requests.is_empty() && timelines.expected.is_empty());
    }

    #[test]
    fn a_node_that_fails_is_reported_and_others_ranks_are_not_taken_from_it() {
        let (mut nodes, mut timelines) = cluster(3);
        assert!(nodes.disconnect(3, 3, 1));
        let mut chunks = timelines.start(wanted(None, false), &nodes, at(1)).unwrap();
        let requests = timelines.next_requests(&nodes, at(1));
        assert_eq!(requests.len(), 2);
        let key = |index: usize| requests[index].1.key.clone();
        timelines.piece(&key(0), file("00001-00003.ops"), Credit::default(), &nodes, at(2));
        timelines.piece("unknown", file("00000-00003.ops"), Credit::default(), &nodes, at(2));
        assert!(timelines.expects(&key(0)) && !timelines.expects("unknown"));
        timelines.ended(&key(0), &nodes);
        timelines.tick(&nodes, at(30));
        assert!(timelines.expects(&key(1)));
        timelines.tick(&nodes, at(90));
        timelines.next_requests(&nodes, at(90));
        let problems: Vec<String> = received(&mut chunks).into_iter().map(|file| file.problem).collect();
        let expected =
            ["node n2 is not connected", "the timeline of node n0 was cut off", "node n1 does not answer", ""];
        assert_eq!(problems, expected);
    }

    #[test]
    fn all_nodes_record_every_kernel_at_once_before_they_are_asked() {
        let (nodes, mut timelines) = cluster(20);
        let _chunks = timelines.start(wanted(None, true), &nodes, at(1)).unwrap();
        let requests = timelines.next_requests(&nodes, at(1));
        assert!(requests.len() == 20 && requests.iter().all(|(_, one)| one.detail && one.key.is_empty()));
        assert_eq!(requests[0].1.window_ms, 20_000);
        assert!(timelines.next_requests(&nodes, at(21)).is_empty());
        let requests = timelines.next_requests(&nodes, at(22));
        assert!(requests.len() == NODES && requests.iter().all(|(_, one)| !one.detail && !one.key.is_empty()));
        assert_eq!(requests[0].1.window_ms, 21_000, "the time of the recording");
    }

    #[test]
    fn a_request_may_want_some_ranks_and_ends_with_its_requester() {
        let (nodes, mut timelines) = cluster(3);
        assert!(timelines.start(wanted(Some("7"), false), &nodes, at(1)).is_err());
        let mut chunks = timelines.start(wanted(Some("1-2,7"), false), &nodes, at(1)).unwrap();
        let requests = timelines.next_requests(&nodes, at(1));
        let asked: Vec<NodeId> = requests.iter().map(|(node, _)| *node).collect();
        assert_eq!(asked, [2, 3], "the nodes of ranks 1 and 2");
        assert_eq!(requests[0].1.ranks, "1-2/7".parse::<RankSet>().unwrap().to_message());
        assert_eq!(received(&mut chunks)[0].problem, "no node has rank 7 of job j");
        drop(chunks);
        timelines.tick(&nodes, at(2));
        assert!(timelines.requests.is_empty() && !timelines.expects(&requests[0].1.key));
    }
}
