//! The nodes of a cluster and the ranks that each of them may speak for. Pure: streams are only held here, and time is passed in.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use tokio::sync::mpsc;
use tonic::Status;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::v1::{ClusterMessage, JobId, Presence, RankEntry, cluster_message::Message};

use crate::{member, registry::JobKey};

/// A node collector process. It keeps its number when its stream ends and another one begins.
pub type NodeId = u64;
/// One stream.
pub type StreamId = u64;
/// A message to a node. In a box, because a channel has room for 32 of them from the start, and there is one for each node.
pub type Outbound = Box<Result<ClusterMessage, Status>>;
/// The sending side of a stream.
pub type Outgoing = mpsc::Sender<Outbound>;

/// One node collector.
#[derive(Debug)]
pub struct Node {
    /// Host or pod name.
    pub name: String,
    stream: Option<(StreamId, Outgoing)>,
    /// When its last stream ended; meaningless while it has one.
    pub lost_ns: u64,
    told: Vec<RankEntry>,
    refused: usize,
    launches: BTreeMap<JobKey, u64>,
}

impl Node {
    /// Whether it has a stream.
    #[must_use]
    pub fn is_joined(&self) -> bool {
        self.stream.is_some()
    }
}

/// One rank of one job.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The node that speaks for it.
    pub node: NodeId,
    /// Whether its process runs.
    pub presence: Presence,
    /// Ranks of the job, as it says.
    pub world_size: u32,
    hang_timeout_ms: u64,
    sample_interval_ms: u64,
    idle_timeout_ms: u64,
}

impl Claim {
    fn is_alive(&self) -> bool {
        self.presence == Presence::Present
    }
}

/// The ranks of one job.
#[derive(Debug, Default)]
struct Claims {
    // By attempt and rank.
    ranks: BTreeMap<(u32, u32), Claim>,
    // Made when it is asked for. Only what adds a rank keeps it true; whatever else changes drops it.
    view: RefCell<Option<Arc<JobView>>>,
}

impl Claims {
    fn view(&self) -> Arc<JobView> {
        Arc::clone(self.view.borrow_mut().get_or_insert_with(|| {
            let attempt = self.ranks.last_key_value().map_or(0, |((attempt, _), _)| *attempt);
            let mut view = JobView { attempt, ..JobView::default() };
            for ((_, rank), claim) in self.ranks.range((attempt, 0)..) {
                view.add(*rank, claim);
            }
            Arc::new(view)
        }))
    }

    fn insert(&mut self, attempt: u32, rank: u32, claim: Claim) {
        let view = self.view.get_mut();
        match view {
            Some(known) if known.attempt == attempt && !self.ranks.contains_key(&(attempt, rank)) => {
                Arc::make_mut(known).add(rank, &claim);
            }
            _ => *view = None,
        }
        self.ranks.insert((attempt, rank), claim);
    }

    fn remove(&mut self, attempt: u32, rank: u32) {
        self.ranks.remove(&(attempt, rank));
        *self.view.get_mut() = None;
    }
}

/// All nodes, and who may speak for which rank.
#[derive(Debug, Default)]
pub struct Nodes {
    nodes: BTreeMap<NodeId, Node>,
    by_identity: HashMap<String, NodeId>,
    // Those without a stream.
    away: BTreeSet<NodeId>,
    claims: BTreeMap<JobKey, Claims>,
    next: NodeId,
}

/// What the ranks of a job in its newest attempt say of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobView {
    /// The newest attempt.
    pub attempt: u32,
    /// Ranks of the job.
    pub world_size: u32,
    /// Ranks that some node speaks for.
    pub ranks: u32,
    /// Its nodes.
    pub nodes: BTreeSet<NodeId>,
    /// Whether any of its ranks runs.
    pub alive: bool,
    /// Hang timeout.
    pub hang_timeout_ms: u64,
    /// Between the two samples.
    pub sample_interval_ms: u64,
    /// Idle timeout; 0 is off.
    pub idle_timeout_ms: u64,
}

impl JobView {
    fn add(&mut self, rank: u32, claim: &Claim) {
        self.ranks += 1;
        self.world_size = self.world_size.max(claim.world_size).max(rank + 1);
        self.nodes.insert(claim.node);
        self.alive |= claim.is_alive();
        self.hang_timeout_ms = self.hang_timeout_ms.max(claim.hang_timeout_ms);
        self.sample_interval_ms = self.sample_interval_ms.max(claim.sample_interval_ms);
        self.idle_timeout_ms = self.idle_timeout_ms.max(claim.idle_timeout_ms);
    }

    /// Whether every rank of its world is some node's.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.ranks >= self.world_size
    }
}

/// Ranks that another node has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The job.
    pub job: JobKey,
    /// Ranks that another node speaks for.
    pub ranks: RankSet,
    /// Name of that node.
    pub by: String,
}

/// A node without a stream and without a running rank is forgotten after this long.
const FORGET_NS: u64 = 600 * 1_000_000_000;

impl Nodes {
    /// A stream said hello. The same process may come again; its old stream is closed.
    pub fn join(&mut self, name: &str, identity: &str, stream: StreamId, outgoing: Outgoing) -> NodeId {
        let id = *self.by_identity.entry(identity.into()).or_insert_with(|| {
            self.next += 1;
            self.next
        });
        let node = self.nodes.entry(id).or_insert_with(|| Node {
            name: name.into(),
            stream: None,
            lost_ns: 0,
            told: Vec::new(),
            refused: 0,
            launches: BTreeMap::new(),
        });
        node.stream = Some((stream, outgoing));
        self.away.remove(&id);
        id
    }

    /// A stream ended. The node, when it has no newer one.
    pub fn lose(&mut self, id: NodeId, stream: StreamId, now_ns: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&id) else { return false };
        if node.stream.as_ref().is_none_or(|(current, _)| *current != stream) {
            return false;
        }
        node.stream = None;
        node.lost_ns = now_ns;
        self.away.insert(id);
        true
    }

    /// Sends to a node. One whose stream takes nothing more loses it.
    pub fn send(&mut self, id: NodeId, message: Message, now_ns: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&id) else { return false };
        let Some((_, outgoing)) = &node.stream else { return false };
        let sent = outgoing.try_send(Box::new(Ok(ClusterMessage { message: Some(message) }))).is_ok();
        if !sent {
            node.stream = None;
            node.lost_ns = now_ns;
            self.away.insert(id);
        }
        sent
    }

    /// One node.
    #[must_use]
    pub fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// All nodes.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter().map(|(id, node)| (*id, node))
    }

    /// Nodes without a stream.
    pub fn away(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.away.iter().copied()
    }

    /// Name of a node, for people.
    #[must_use]
    pub fn name(&self, id: NodeId) -> &str {
        self.nodes.get(&id).map_or("a node that is forgotten", |node| node.name.as_str())
    }

    /// A node lists its ranks. A rank that another living node has is refused, until that one goes.
    pub fn claim(&mut self, id: NodeId, ranks: Vec<RankEntry>) -> Vec<Refused> {
        let listed: BTreeSet<(JobKey, u32, u32)> = ranks.iter().filter_map(key_of).collect();
        let before = self.nodes.get_mut(&id).map(|node| std::mem::take(&mut node.told)).unwrap_or_default();
        for (job, attempt, rank) in before.iter().filter_map(key_of).filter(|old| !listed.contains(old)) {
            if let Some(claims) = self.claims.get_mut(&job)
                && claims.ranks.get(&(attempt, rank)).is_some_and(|claim| claim.node == id)
            {
                claims.remove(attempt, rank);
                if claims.ranks.is_empty() {
                    self.claims.remove(&job);
                }
            }
        }
        let mut refused: Vec<Refused> = Vec::new();
        for entry in &ranks {
            let Some((job, attempt, rank)) = key_of(entry) else { continue };
            let info = entry.info.clone().unwrap_or_default();
            let claims = self.claims.entry(job.clone()).or_default();
            if let Some(other) = claims.ranks.get(&(attempt, rank)).filter(|other| other.node != id && other.is_alive())
                && let Some(holder) = self.nodes.get(&other.node).filter(|holder| holder.is_joined())
            {
                match refused.iter_mut().find(|one| one.job == job && one.by == holder.name) {
                    Some(one) => _ = one.ranks.insert(rank),
                    None => refused.push(Refused { job, ranks: RankSet::from_iter([rank]), by: holder.name.clone() }),
                }
                continue;
            }
            let claim = Claim {
                node: id,
                presence: entry.presence(),
                world_size: info.world_size,
                hang_timeout_ms: entry.hang_timeout_ms,
                sample_interval_ms: entry.sample_interval_ms,
                idle_timeout_ms: entry.idle_timeout_ms,
            };
            claims.insert(attempt, rank, claim);
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            node.told = ranks;
            node.refused = refused.iter().map(|one| one.ranks.len() as usize).sum();
        }
        refused
    }

    /// Looks again at what was refused: a node that had the rank may be gone. The nodes that got one.
    pub fn claim_again(&mut self) -> Vec<NodeId> {
        let waiting: Vec<NodeId> = self.nodes.iter().filter(|(_, node)| node.refused > 0).map(|(id, _)| *id).collect();
        let mut helped = Vec::new();
        for id in waiting {
            let Some(node) = self.nodes.get(&id) else { continue };
            let (told, before) = (node.told.clone(), node.refused);
            self.claim(id, told);
            if self.nodes.get(&id).is_some_and(|node| node.refused < before) {
                helped.push(id);
            }
        }
        helped
    }

    /// Jobs that have a rank.
    pub fn jobs(&self) -> impl Iterator<Item = &JobKey> {
        self.claims.keys()
    }

    /// What is known of a job.
    #[must_use]
    pub fn job(&self, job: &JobKey) -> Arc<JobView> {
        self.claims.get(job).map(Claims::view).unwrap_or_default()
    }

    /// The ranks that one node speaks for.
    #[must_use]
    pub fn ranks_of(&self, job: &JobKey, attempt: u32, node: NodeId) -> RankSet {
        let told = self.nodes.get(&node).map(|node| node.told.as_slice()).unwrap_or_default();
        let claims = self.claims.get(job);
        let own = |rank: u32| {
            claims.and_then(|claims| claims.ranks.get(&(attempt, rank))).is_some_and(|claim| claim.node == node)
        };
        let listed = told.iter().filter_map(key_of).filter(|(of, when, _)| of == job && *when == attempt);
        listed.map(|(_, _, rank)| rank).filter(|rank| own(*rank)).collect()
    }

    /// The node that speaks for a rank.
    #[must_use]
    pub fn of_rank(&self, job: &JobKey, attempt: u32, rank: u32) -> Option<NodeId> {
        Some(self.claims.get(job)?.ranks.get(&(attempt, rank))?.node)
    }

    /// A node says when each of its jobs launched last.
    pub fn launched(&mut self, id: NodeId, job: &JobId, age_ms: u64, now_ns: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.launches.insert(member::key(job), now_ns.saturating_sub(age_ms.saturating_mul(1_000_000)));
        }
    }

    /// A node other than this one on which the job launched within its idle timeout.
    #[must_use]
    pub fn busy_elsewhere(&self, job: &JobKey, not: NodeId, now_ns: u64) -> Option<&str> {
        let view = self.job(job);
        let recent = |last: &u64| now_ns.saturating_sub(*last) < view.idle_timeout_ms.saturating_mul(1_000_000);
        let others = view.nodes.iter().filter(|id| **id != not).filter_map(|id| self.nodes.get(id));
        let mut busy = others.filter(|node| node.is_joined() && node.launches.get(job).is_some_and(recent));
        busy.next().map(|node| node.name.as_str())
    }

    /// Forgets attempts that a newer one has taken the place of, and nodes that are gone for long.
    pub fn forget(&mut self, now_ns: u64) {
        let gone = |node: &Node| !node.is_joined() && now_ns > node.lost_ns + FORGET_NS;
        let nodes = &self.nodes;
        for claims in self.claims.values_mut() {
            let (before, newest) = (claims.ranks.len(), claims.view().attempt);
            claims.ranks.retain(|(attempt, _), claim| {
                *attempt == newest && nodes.get(&claim.node).is_some_and(|node| !gone(node))
            });
            if claims.ranks.len() < before {
                *claims.view.get_mut() = None;
            }
        }
        self.claims.retain(|_, claims| !claims.ranks.is_empty());
        self.nodes.retain(|_, node| !gone(node));
        let nodes = &self.nodes;
        self.by_identity.retain(|_, id| nodes.contains_key(id));
        self.away.retain(|id| nodes.contains_key(id));
    }
}

fn key_of(entry: &RankEntry) -> Option<(JobKey, u32, u32)> {
    let info = entry.info.as_ref()?;
    Some((member::key(entry.job.as_ref()?), info.attempt, u32::try_from(info.rank).ok()?))
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::RankInfo;

    use super::*;

    fn job(name: &str) -> JobKey {
        JobKey { name: name.into(), instance: String::new() }
    }

    fn entry(name: &str, rank: i32, attempt: u32, world_size: u32) -> RankEntry {
        RankEntry {
            job: Some(JobId { name: name.into(), instance: String::new() }),
            info: Some(RankInfo { rank, attempt, world_size, ..Default::default() }),
            presence: Presence::Present.into(),
            idle_timeout_ms: 10_000,
            ..Default::default()
        }
    }

    fn node(nodes: &mut Nodes, name: &str, stream: StreamId) -> (NodeId, mpsc::Receiver<Outbound>) {
        let (sender, receiver) = mpsc::channel(8);
        (nodes.join(name, name, stream, sender), receiver)
    }

    fn ranks(nodes: &Nodes, id: NodeId) -> String {
        nodes.ranks_of(&job("j"), 0, id).to_string()
    }

    #[test]
    fn a_rank_belongs_to_one_living_node() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        assert_eq!(nodes.claim(a, vec![entry("j", 0, 0, 4), entry("j", 1, 0, 4)]), []);
        let refused = nodes.claim(b, vec![entry("j", 1, 0, 4), entry("j", 2, 0, 4), entry("k", 1, 0, 4)]);
        assert_eq!(refused, [Refused { job: job("j"), ranks: RankSet::from_iter([1]), by: "a".into() }]);
        assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0-1".into(), "2".into()));
        assert!(nodes.of_rank(&job("j"), 0, 1) == Some(a) && nodes.of_rank(&job("j"), 0, 3).is_none());
        // The first node goes: its rank may have moved.
        assert!(nodes.lose(a, 1, 5));
        assert_eq!(nodes.claim_again(), [b]);
        assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0".into(), "1-2".into()));
        // It comes again and finds its rank taken.
        let (again, _again) = node(&mut nodes, "a", 3);
        assert_eq!(again, a);
        assert_eq!(nodes.claim(a, vec![entry("j", 0, 0, 4), entry("j", 1, 0, 4)]).len(), 1);
        assert!(!nodes.lose(a, 1, 6), "the old stream is not the node's any more");
    }

    #[test]
    fn the_newest_attempt_counts_with_its_world() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        nodes.claim(a, vec![entry("j", 0, 0, 4), entry("j", 1, 0, 4)]);
        nodes.claim(b, vec![entry("j", 2, 0, 4), entry("j", 3, 0, 4)]);
        assert_eq!((nodes.job(&job("j")).world_size, nodes.job(&job("j")).nodes.len()), (4, 2));
        nodes.claim(a, vec![entry("j", 0, 1, 2), entry("j", 1, 1, 2)]);
        let view = nodes.job(&job("j"));
        assert_eq!((view.attempt, view.world_size, view.nodes.clone()), (1, 2, BTreeSet::from([a])));
        assert!(view.is_whole());
        nodes.forget(5);
        assert_eq!(nodes.claims[&job("j")].ranks.len(), 2, "the older attempt is forgotten");
        nodes.claim(a, Vec::new());
        assert_eq!(nodes.jobs().count(), 0);
    }

    #[test]
    fn idle_is_idle_everywhere() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        nodes.claim(a, vec![entry("j", 0, 0, 2)]);
        nodes.claim(b, vec![entry("j", 1, 0, 2)]);
        let second = 1_000_000_000;
        let id = JobId { name: "j".into(), instance: String::new() };
        nodes.launched(b, &id, 1000, 20 * second);
        assert_eq!(nodes.busy_elsewhere(&job("j"), a, 28 * second), Some("b"));
        assert_eq!(nodes.busy_elsewhere(&job("j"), b, 28 * second), None);
        assert_eq!(nodes.busy_elsewhere(&job("j"), a, 29 * second), None);
    }

    #[test]
    fn a_stream_that_is_stuck_is_given_up() {
        let mut nodes = Nodes::default();
        let (a, _receiver) = node(&mut nodes, "a", 1);
        let message = || Message::Closed(Default::default());
        assert_eq!((0..20).filter(|_| nodes.send(a, message(), 5)).count(), 8);
        assert!(!nodes.get(a).unwrap().is_joined());
        nodes.forget(6 + FORGET_NS);
        assert!(nodes.get(a).is_none());
    }
}
