//! The nodes of a cluster and the ranks that each of them may speak for. Pure: streams are only held here, and time is passed in.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use tokio::sync::mpsc;
use tonic::Status;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::v1::{ClusterMessage, JobId, Presence, RankEntry, cluster_message::Message};

use crate::{member, process::TICK_NS, registry::JobKey};

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
    launches: BTreeMap<JobKey, u64>,
    clock: Clock,
}

/// The time since boot by which a node has the start of its processes, on this collector's clock. Of the messages that a node has sent, the
/// one that took least time tells it best.
#[derive(Debug, Clone, Copy, Default)]
struct Clock {
    // Nanoseconds of this collector's clock minus those of the node's.
    ahead_ns: Option<i64>,
}

impl Clock {
    /// A message that was sent at this time of the node has come now.
    fn hear(&mut self, sent_ns: u64, now_ns: u64) {
        let ahead_ns = now_ns.cast_signed().saturating_sub(sent_ns.cast_signed());
        self.ahead_ns = Some(self.ahead_ns.map_or(ahead_ns, |least| least.min(ahead_ns)));
    }

    fn here(self, ns: u64) -> Option<u64> {
        Some(ns.checked_add_signed(self.ahead_ns?).unwrap_or(0))
    }
}

impl Node {
    /// Whether it has a stream.
    #[must_use]
    pub fn is_joined(&self) -> bool {
        self.stream.is_some()
    }
}

/// What one node says of one rank of a job.
#[derive(Debug, Clone)]
struct Claim {
    attempt: u32,
    // Ranks of the job, as it says; 0 when it does not know.
    world_size: u32,
    presence: Presence,
    // Pid and start time; `None` when the node cannot see it.
    process: Option<(i32, u64)>,
    // By this collector's clock; the end is `u64::MAX` while the process lives.
    started_ns: u64,
    ended_ns: u64,
    // In the order in which they came.
    number: u64,
    hang_timeout_ms: u64,
    sample_interval_ms: u64,
    idle_timeout_ms: u64,
}

impl Claim {
    fn new(entry: &RankEntry, number: u64, clock: Clock, now_ns: u64) -> Self {
        // By the node's clock if that is known, because a message may be late.
        let ago = |age_ms: u64| {
            let ago_ns = age_ms.saturating_mul(NS_PER_MS);
            let then = sent_ns(entry).and_then(|sent_ns| clock.here(sent_ns.saturating_sub(ago_ns)));
            then.unwrap_or_else(|| now_ns.saturating_sub(ago_ns))
        };
        let info = entry.info.as_ref();
        let mut claim = Claim {
            attempt: info.map_or(0, |info| info.attempt),
            world_size: info.map_or(0, |info| info.world_size),
            presence: entry.presence(),
            process: info.filter(|_| entry.start > 0).map(|info| (info.pid, entry.start)),
            started_ns: ago(entry.age_ms),
            ended_ns: u64::MAX,
            number,
            hang_timeout_ms: entry.hang_timeout_ms,
            sample_interval_ms: entry.sample_interval_ms,
            idle_timeout_ms: entry.idle_timeout_ms,
        };
        if !claim.is_alive() {
            claim.ended_ns = ago(entry.ended_age_ms);
        }
        claim
    }

    fn is_alive(&self) -> bool {
        matches!(self.presence, Presence::Present | Presence::Unregistered)
    }

    /// Whether the same process says the same again.
    fn is_again(&self, other: &Claim) -> bool {
        self.presence == other.presence && self.is_as_before(other)
    }

    /// Whether the same process, alive or not as before, is in the same place of the world.
    fn is_as_before(&self, other: &Claim) -> bool {
        let what = |claim: &Claim| (claim.attempt, claim.world_size, claim.is_alive());
        what(self) == what(other) && self.is_process_of(other) && self.started_ns.abs_diff(other.started_ns) < SAME_NS
    }

    fn is_process_of(&self, other: &Claim) -> bool {
        match (self.process, other.process) {
            (Some(one), Some(other)) => one == other,
            _ => self.started_ns.abs_diff(other.started_ns) < SAME_NS,
        }
    }
}

/// When the message with this entry was sent, by the clock of its node; `None` when it does not tell.
fn sent_ns(entry: &RankEntry) -> Option<u64> {
    let sent_ns = || entry.start.saturating_mul(TICK_NS).saturating_add(entry.age_ms.saturating_mul(NS_PER_MS));
    (entry.start > 0 && entry.age_ms > 0).then(sent_ns)
}

/// The world that runs, by the rank of it that was started last. A launcher starts a world when the one before has ended, so that they
/// are told apart by time; the attempts by which its agents count may differ after one of them has failed, and stay the same when the
/// job grows or shrinks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct World {
    size: u32,
    attempt: u32,
    started_ns: u64,
}

impl World {
    fn holds(self, rank: u32, claim: &Claim) -> bool {
        let of_size = self.size == 0 || (rank < self.size && (claim.world_size == self.size || claim.world_size == 0));
        // Who ended before its last rank was started belongs to the world before, unless it counts as that rank does.
        of_size && (claim.ended_ns > self.started_ns.saturating_add(SAME_NS) || claim.attempt == self.attempt)
    }
}

/// The ranks of one job.
#[derive(Debug, Default)]
struct Claims {
    // By rank; of nodes that say that they have the same, one holds it.
    ranks: BTreeMap<(u32, NodeId), Claim>,
    // Made when it is asked for. Only what adds a rank keeps it true; whatever else changes drops it.
    view: RefCell<Option<Arc<JobView>>>,
}

impl Claims {
    fn view(&self, away: &BTreeSet<NodeId>) -> Arc<JobView> {
        Arc::clone(self.view.borrow_mut().get_or_insert_with(|| {
            let newest = self.ranks.values().max_by_key(|claim| (claim.is_alive(), claim.started_ns, claim.number));
            let world = newest.map_or(World::default(), |claim| World {
                size: claim.world_size,
                attempt: claim.attempt,
                started_ns: claim.started_ns,
            });
            let mut view = JobView { world, born_ns: u64::MAX, ..JobView::default() };
            let mut last = None;
            for (rank, _) in self.ranks.keys() {
                if last.replace(*rank) == Some(*rank) {
                    continue;
                }
                if let Some((node, claim)) = holder(&mut self.of_rank(world, *rank), away) {
                    view.add(*rank, node, claim);
                }
                view.contested |= self.of_rank(world, *rank).nth(1).is_some();
            }
            Arc::new(view)
        }))
    }

    /// What nodes say of a rank of a world.
    fn of_rank(&self, world: World, rank: u32) -> impl Iterator<Item = (NodeId, &Claim)> {
        let claims = self.ranks.range((rank, NodeId::MIN)..=(rank, NodeId::MAX));
        claims.map(|((_, node), claim)| (*node, claim)).filter(move |(_, claim)| world.holds(rank, claim))
    }

    fn others(&self, rank: u32, node: NodeId) -> impl Iterator<Item = NodeId> {
        let claims = self.ranks.range((rank, NodeId::MIN)..=(rank, NodeId::MAX));
        claims.map(|((_, other), _)| *other).filter(move |other| *other != node)
    }

    fn insert(&mut self, rank: u32, node: NodeId, mut claim: Claim, age_is_known: bool) {
        if let Some(old) = self.ranks.get(&(rank, node)) {
            if !age_is_known && (old.attempt, old.world_size) == (claim.attempt, claim.world_size) {
                claim.started_ns = old.started_ns;
            }
            if old.is_again(&claim) {
                return;
            }
            if old.is_process_of(&claim) {
                claim.number = old.number;
                // A message may be late, and never early.
                claim.started_ns = claim.started_ns.min(old.started_ns);
            }
            if old.is_alive() && old.is_as_before(&claim) {
                // It has registered.
                claim.started_ns = old.started_ns;
                if let Some(known) = self.view.get_mut() {
                    Arc::make_mut(known).hear(&claim);
                }
                self.ranks.insert((rank, node), claim);
                return;
            }
        }
        let alone = self.ranks.range((rank, NodeId::MIN)..=(rank, NodeId::MAX)).next().is_none();
        let view = self.view.get_mut();
        match view {
            Some(known) if alone && known.takes(rank, &claim) => Arc::make_mut(known).add(rank, node, &claim),
            _ => *view = None,
        }
        self.ranks.insert((rank, node), claim);
    }

    fn remove(&mut self, rank: u32, node: NodeId) {
        self.ranks.remove(&(rank, node));
        *self.view.get_mut() = None;
    }
}

/// The node that speaks for a rank: of those that live and are there, the first that said so. Another one waits until it goes.
fn holder<'c>(
    claims: &mut dyn Iterator<Item = (NodeId, &'c Claim)>,
    away: &BTreeSet<NodeId>,
) -> Option<(NodeId, &'c Claim)> {
    claims.max_by_key(|(node, claim)| {
        let alive = claim.is_alive();
        (alive && !away.contains(node), alive, Reverse(if alive { claim.number } else { 0 }), claim.started_ns)
    })
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
    // Claims that have come.
    claimed: u64,
}

/// What the ranks of the world of a job that runs, or ran last, say of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobView {
    /// The greatest attempt that one of them counts.
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
    /// When the first of its processes that live was started; `u64::MAX` without one.
    pub born_ns: u64,
    world: World,
    // Some rank is more than one node's, as they say.
    contested: bool,
    // Some rank has ended.
    ended: bool,
}

impl JobView {
    /// Whether a rank of which no node has spoken yet changes nothing but that it is there.
    fn takes(&self, rank: u32, claim: &Claim) -> bool {
        let in_order =
            claim.started_ns <= self.world.started_ns || (!self.ended && claim.attempt == self.world.attempt);
        claim.is_alive() && claim.world_size == self.world.size && in_order && self.world.holds(rank, claim)
    }

    fn add(&mut self, rank: u32, node: NodeId, claim: &Claim) {
        self.ranks += 1;
        self.attempt = self.attempt.max(claim.attempt);
        self.world_size = self.world_size.max(claim.world_size).max(rank + 1);
        self.nodes.insert(node);
        self.alive |= claim.is_alive();
        self.ended |= !claim.is_alive();
        if claim.is_alive() {
            self.born_ns = self.born_ns.min(claim.started_ns);
            self.world.started_ns = self.world.started_ns.max(claim.started_ns);
        }
        self.hear(claim);
    }

    /// What a rank says of its job's settings.
    fn hear(&mut self, claim: &Claim) {
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
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refused {
    /// Who says that it has them.
    pub node: NodeId,
    /// The job.
    pub job: JobKey,
    /// The node that speaks for them.
    pub by: NodeId,
    /// The ranks.
    pub ranks: RankSet,
}

const NS_PER_MS: u64 = 1_000_000;
/// Times that were told by different messages are the same when they differ by less: messages take their time.
const SAME_NS: u64 = 1_000_000_000;
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
            launches: BTreeMap::new(),
            clock: Clock::default(),
        });
        node.stream = Some((stream, outgoing));
        self.away.remove(&id);
        self.unsettle(id);
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
        self.unsettle(id);
        true
    }

    /// A node came or went: who holds the ranks that others have, too, may have changed.
    fn unsettle(&mut self, id: NodeId) {
        let told = self.nodes.get(&id).map(|node| node.told.as_slice()).unwrap_or_default();
        let jobs: BTreeSet<JobKey> = told.iter().filter_map(key_of).map(|(job, _)| job).collect();
        for job in jobs {
            if let Some(claims) = self.claims.get_mut(&job) {
                claims.view.get_mut().take_if(|view| view.contested);
            }
        }
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
            self.unsettle(id);
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

    /// A node lists its ranks. Returns other nodes that have said that they have one of these, and may speak for it from now on.
    pub fn claim(&mut self, id: NodeId, ranks: Vec<RankEntry>, now_ns: u64) -> BTreeSet<NodeId> {
        let listed: BTreeSet<(JobKey, u32)> = ranks.iter().filter_map(key_of).collect();
        let before = self.nodes.get_mut(&id).map(|node| std::mem::take(&mut node.told)).unwrap_or_default();
        let mut others = BTreeSet::new();
        for (job, rank) in before.iter().filter_map(key_of).filter(|old| !listed.contains(old)) {
            if let Some(claims) = self.claims.get_mut(&job) {
                others.extend(claims.others(rank, id));
                claims.remove(rank, id);
                if claims.ranks.is_empty() {
                    self.claims.remove(&job);
                }
            }
        }
        let mut clock = self.nodes.get(&id).map(|node| node.clock).unwrap_or_default();
        ranks.iter().filter_map(sent_ns).for_each(|sent_ns| clock.hear(sent_ns, now_ns));
        for entry in &ranks {
            let Some((job, rank)) = key_of(entry) else { continue };
            let claims = self.claims.entry(job).or_default();
            others.extend(claims.others(rank, id));
            self.claimed += 1;
            claims.insert(rank, id, Claim::new(entry, self.claimed, clock, now_ns), entry.age_ms > 0);
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            (node.told, node.clock) = (ranks, clock);
        }
        others
    }

    /// Other nodes that say that they have a rank which this one says it has.
    #[must_use]
    pub fn rivals(&self, id: NodeId) -> BTreeSet<NodeId> {
        let told = self.nodes.get(&id).map(|node| node.told.as_slice()).unwrap_or_default();
        let keys = told.iter().filter_map(key_of);
        keys.filter_map(|(job, rank)| Some((self.claims.get(&job)?, rank)))
            .flat_map(|(claims, rank)| claims.others(rank, id))
            .collect()
    }

    /// Living ranks that nodes say they have while another node speaks for them.
    #[must_use]
    pub fn refused(&self) -> Vec<Refused> {
        let mut refused: BTreeMap<(NodeId, NodeId, &JobKey), RankSet> = BTreeMap::new();
        for (job, claims) in &self.claims {
            let view = claims.view(&self.away);
            if !view.contested {
                continue;
            }
            for ((rank, node), claim) in &claims.ranks {
                let holder = holder(&mut claims.of_rank(view.world, *rank), &self.away);
                let stands = claim.is_alive() && !self.away.contains(node) && view.world.holds(*rank, claim);
                if let Some((by, _)) = holder.filter(|(by, held)| stands && by != node && held.is_alive()) {
                    refused.entry((*node, by, job)).or_default().insert(*rank);
                }
            }
        }
        refused.into_iter().map(|((node, by, job), ranks)| Refused { node, by, job: job.clone(), ranks }).collect()
    }

    /// Jobs that have a rank.
    pub fn jobs(&self) -> impl Iterator<Item = &JobKey> {
        self.claims.keys()
    }

    /// What is known of a job.
    #[must_use]
    pub fn job(&self, job: &JobKey) -> Arc<JobView> {
        self.claims.get(job).map(|claims| claims.view(&self.away)).unwrap_or_default()
    }

    /// The ranks that one node speaks for.
    #[must_use]
    pub fn ranks_of(&self, job: &JobKey, node: NodeId) -> RankSet {
        let told = self.nodes.get(&node).map(|node| node.told.as_slice()).unwrap_or_default();
        let listed = told.iter().filter_map(key_of).filter(|(of, _)| of == job);
        listed.map(|(_, rank)| rank).filter(|rank| self.of_rank(job, *rank) == Some(node)).collect()
    }

    /// The node that speaks for a rank.
    #[must_use]
    pub fn of_rank(&self, job: &JobKey, rank: u32) -> Option<NodeId> {
        let claims = self.claims.get(job)?;
        let world = claims.view(&self.away).world;
        holder(&mut claims.of_rank(world, rank), &self.away).map(|(node, _)| node)
    }

    /// Whether all ranks of a job that run on a node were started after a time.
    #[must_use]
    pub fn began_after(&self, job: &JobKey, id: NodeId, ns: u64) -> bool {
        let (Some(node), Some(claims)) = (self.nodes.get(&id), self.claims.get(job)) else { return false };
        let ranks = node.told.iter().filter_map(key_of).filter(|(of, _)| of == job);
        let claims = ranks.filter_map(|(_, rank)| claims.ranks.get(&(rank, id)));
        let mut living = claims.filter(|claim| claim.is_alive()).peekable();
        // Of a process that cannot be seen only its registration is known.
        living.peek().is_some() && living.all(|claim| claim.process.is_some() && claim.started_ns > ns)
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

    /// Forgets worlds that a newer one has taken the place of, and nodes that are gone for long.
    pub fn forget(&mut self, now_ns: u64) {
        let gone = |node: &Node| !node.is_joined() && now_ns > node.lost_ns + FORGET_NS;
        let nodes = &self.nodes;
        for claims in self.claims.values_mut() {
            let (before, world) = (claims.ranks.len(), claims.view(&self.away).world);
            claims.ranks.retain(|(rank, node), claim| {
                (claim.is_alive() || world.holds(*rank, claim)) && nodes.get(node).is_some_and(|node| !gone(node))
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

fn key_of(entry: &RankEntry) -> Option<(JobKey, u32)> {
    Some((member::key(entry.job.as_ref()?), u32::try_from(entry.info.as_ref()?.rank).ok()?))
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
        nodes.ranks_of(&job("j"), id).to_string()
    }

    const SECOND: u64 = 1_000_000_000;

    /// A rank of a process that is `age_s` old, and ended so long ago.
    fn aged(rank: i32, attempt: u32, world_size: u32, age_s: u64, ended_s: Option<u64>) -> RankEntry {
        let presence = if ended_s.is_some() { Presence::Dead } else { Presence::Present };
        RankEntry {
            presence: presence.into(),
            age_ms: age_s * 1000,
            ended_age_ms: ended_s.unwrap_or(0) * 1000,
            ..entry("j", rank, attempt, world_size)
        }
    }

    #[test]
    fn a_rank_belongs_to_one_living_node() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        nodes.claim(a, vec![entry("j", 0, 0, 4), entry("j", 1, 0, 4)], 1);
        assert_eq!(nodes.refused(), []);
        let others = nodes.claim(b, vec![entry("j", 1, 0, 4), entry("j", 2, 0, 4), entry("k", 1, 0, 4)], 2);
        assert_eq!(others, BTreeSet::from([a]));
        assert_eq!(
            nodes.refused(),
            [Refused { node: b, job: job("j"), by: a, ranks: RankSet::from_iter([1]) }],
            "the younger process does not take the place of the older one"
        );
        assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0-1".into(), "2".into()));
        assert!(nodes.of_rank(&job("j"), 1) == Some(a) && nodes.of_rank(&job("j"), 3).is_none());
        // The first node goes: its rank may have moved.
        assert!(nodes.lose(a, 1, 5));
        assert_eq!(nodes.rivals(a), BTreeSet::from([b]));
        assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0".into(), "1-2".into()));
        // It comes again, and the rank is its own: it was the first to have it.
        let (again, _again) = node(&mut nodes, "a", 3);
        assert_eq!(again, a);
        assert_eq!((ranks(&nodes, a), nodes.refused().len()), ("0-1".into(), 1));
        assert!(!nodes.lose(a, 1, 6), "the old stream is not the node's any more");
    }

    #[test]
    fn the_newest_attempt_counts_with_its_world() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        nodes.claim(a, vec![entry("j", 0, 0, 4), entry("j", 1, 0, 4)], 1);
        nodes.claim(b, vec![entry("j", 2, 0, 4), entry("j", 3, 0, 4)], 2);
        assert_eq!((nodes.job(&job("j")).world_size, nodes.job(&job("j")).nodes.len()), (4, 2));
        nodes.claim(a, vec![entry("j", 0, 1, 2), entry("j", 1, 1, 2)], 2 * SECOND);
        let view = nodes.job(&job("j"));
        assert_eq!((view.attempt, view.world_size, view.nodes.clone()), (1, 2, BTreeSet::from([a])));
        assert!(view.is_whole());
        nodes.claim(b, vec![aged(2, 0, 4, 3, Some(2)), aged(3, 0, 4, 3, Some(2))], 3 * SECOND);
        nodes.forget(4 * SECOND);
        assert_eq!(nodes.claims[&job("j")].ranks.len(), 2, "the older world is forgotten");
        nodes.claim(a, Vec::new(), 5 * SECOND);
        assert_eq!(nodes.jobs().count(), 0);
    }

    #[test]
    fn agents_that_count_restarts_apart_have_one_world() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        let at = |seconds: u64| seconds * SECOND;
        nodes.claim(a, vec![aged(0, 0, 4, 5, None), aged(1, 0, 4, 5, None)], at(10));
        nodes.claim(b, vec![aged(2, 0, 4, 5, None), aged(3, 0, 4, 5, None)], at(10));
        assert!(nodes.job(&job("j")).is_whole());
        // A rank of the first node crashes: its agent counts that, the other one only sees that a member was away.
        nodes.claim(a, vec![aged(0, 1, 4, 1, None), aged(1, 1, 4, 1, None)], at(30));
        nodes.claim(b, vec![aged(2, 0, 4, 26, Some(5)), aged(3, 0, 4, 26, Some(5))], at(31));
        let view = nodes.job(&job("j"));
        assert_eq!((view.attempt, view.ranks, view.nodes.clone()), (1, 2, BTreeSet::from([a])));
        assert_eq!(view.born_ns, at(29), "the world before is not that one");
        nodes.claim(b, vec![aged(2, 0, 4, 2, None), aged(3, 0, 4, 2, None)], at(31));
        let view = nodes.job(&job("j"));
        assert!(view.is_whole() && view.nodes.len() == 2 && view.attempt == 1, "{view:?}");
        assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0-1".into(), "2-3".into()));
        // Who dies in this world is one of it, whatever it counts.
        nodes.claim(b, vec![aged(2, 0, 4, 10, Some(1)), aged(3, 0, 4, 10, None)], at(40));
        assert_eq!((nodes.job(&job("j")).ranks, ranks(&nodes, b).as_str()), (4, "2-3"));
        // And again, when the other agent's counter is ahead.
        nodes.claim(b, vec![aged(2, 1, 4, 1, None), aged(3, 1, 4, 1, None)], at(50));
        nodes.claim(a, vec![aged(0, 1, 4, 1, None), aged(1, 1, 4, 1, None)], at(50));
        assert!(nodes.job(&job("j")).is_whole());
        assert_eq!(nodes.refused(), []);
    }

    /// As [`aged`], of the process with this pid that was started so many seconds after its node.
    fn started(pid: i32, start_s: u64, entry: RankEntry) -> RankEntry {
        let info = entry.info.map(|info| RankInfo { pid, ..info });
        RankEntry { info, start: start_s * SECOND / TICK_NS, ..entry }
    }

    #[test]
    fn a_late_message_moves_neither_a_process_nor_the_beginning_of_a_world() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        let at = |seconds: u64| seconds * SECOND;
        // Of a node that was started 5 s before this collector.
        nodes.claim(a, vec![started(7, 10, aged(0, 0, 2, 5, None))], at(10));
        nodes.claim(b, vec![aged(1, 0, 2, 5, None)], at(10));
        assert_eq!(nodes.job(&job("j")).born_ns, at(5));
        let number = nodes.claims[&job("j")].ranks[&(0, a)].number;
        // Four seconds late, and with another place in the world: it is the same process.
        nodes.claim(a, vec![started(7, 10, aged(0, 0, 3, 10, None))], at(19));
        let claim = &nodes.claims[&job("j")].ranks[&(0, a)];
        assert_eq!((claim.started_ns, claim.number), (at(5), number));
        assert!(!nodes.began_after(&job("j"), a, at(5)) && nodes.began_after(&job("j"), a, at(4)));
        // The first message of a node is late, the next one is not: its processes were not started when the first one told.
        let (c, _c) = node(&mut nodes, "c", 3);
        nodes.claim(c, vec![started(7, 100, aged(0, 0, 1, 1, None))], at(30));
        assert_eq!(nodes.job(&job("j")).world.started_ns, at(29));
        nodes.claim(c, vec![started(7, 100, aged(0, 0, 1, 5, None))], at(31));
        assert_eq!(nodes.job(&job("j")).world.started_ns, at(26));
        // Another process within the second.
        let before = nodes.claims[&job("j")].ranks[&(0, c)].number;
        nodes.claim(c, vec![started(8, 100, aged(0, 0, 1, 5, None))], at(31));
        let claim = &nodes.claims[&job("j")].ranks[&(0, c)];
        assert!(claim.process.is_some_and(|(pid, _)| pid == 8) && claim.number > before);
        // Of one that is not seen nobody knows when it was started.
        assert!(!nodes.began_after(&job("j"), b, at(1)));
    }

    #[test]
    fn a_rank_that_has_not_registered_is_one_of_its_world() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        let at = |seconds: u64| seconds * SECOND;
        nodes.claim(a, vec![aged(0, 0, 2, 5, None)], at(10));
        let silent = RankEntry { presence: Presence::Unregistered.into(), ..started(7, 10, aged(1, 0, 2, 5, None)) };
        nodes.claim(b, vec![silent], at(10));
        let view = nodes.job(&job("j"));
        assert!(view.is_whole() && view.alive && view.nodes.contains(&b) && view.hang_timeout_ms == 0);
        drop(view);
        let registered = RankEntry { hang_timeout_ms: 300, ..started(7, 10, aged(1, 0, 2, 6, None)) };
        nodes.claim(b, vec![registered], at(11));
        assert!(nodes.claims[&job("j")].view.borrow().is_some(), "in a large job that is not worked out for each rank");
        assert_eq!(nodes.job(&job("j")).hang_timeout_ms, 300);
        assert_eq!(nodes.claims[&job("j")].ranks[&(1, b)].presence, Presence::Present);
        nodes.claim(b, vec![started(7, 10, aged(1, 0, 2, 7, Some(1)))], at(12));
        assert_eq!((nodes.job(&job("j")).ranks, nodes.job(&job("j")).ended), (2, true));
    }

    #[test]
    fn a_world_that_grows_and_shrinks_within_an_attempt() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        let (c, _c) = node(&mut nodes, "c", 3);
        let at = |seconds: u64| seconds * SECOND;
        nodes.claim(a, vec![aged(0, 0, 2, 5, None)], at(10));
        nodes.claim(b, vec![aged(1, 0, 2, 5, None)], at(10));
        // A node more: its rank comes before the old ones are told to be gone, and has one of their numbers.
        nodes.claim(c, vec![aged(0, 0, 3, 1, None)], at(20));
        let view = nodes.job(&job("j"));
        assert_eq!((view.world_size, view.ranks, nodes.refused()), (3, 1, vec![]), "nobody complains of the old ranks");
        nodes.claim(a, vec![aged(1, 0, 3, 1, None)], at(20));
        nodes.claim(b, vec![aged(1, 0, 2, 15, Some(2)), aged(2, 0, 3, 1, None)], at(20));
        assert!(nodes.job(&job("j")).is_whole());
        assert_eq!((ranks(&nodes, a), ranks(&nodes, b), ranks(&nodes, c)), ("1".into(), "2".into(), "0".into()));
        // The first node is preempted, and the others have its place.
        nodes.claim(a, vec![aged(1, 0, 3, 11, Some(2))], at(30));
        nodes.claim(b, vec![aged(0, 0, 2, 1, None)], at(30));
        nodes.claim(c, vec![aged(1, 0, 2, 1, None)], at(30));
        let view = nodes.job(&job("j"));
        assert_eq!((view.world_size, view.ranks, view.nodes.clone()), (2, 2, BTreeSet::from([b, c])));
        // Another takes its place in a world of the same size: the old number is free as soon as its process has ended.
        nodes.claim(c, vec![aged(1, 0, 2, 11, Some(1))], at(40));
        nodes.claim(a, vec![aged(1, 0, 2, 0, None)], at(41));
        nodes.claim(b, vec![aged(0, 0, 2, 1, None)], at(41));
        assert_eq!((ranks(&nodes, a), ranks(&nodes, b), ranks(&nodes, c)), ("1".into(), "0".into(), String::new()));
        assert!(nodes.job(&job("j")).is_whole() && nodes.refused().is_empty());
    }

    #[test]
    fn idle_is_idle_everywhere() {
        let mut nodes = Nodes::default();
        let (a, _a) = node(&mut nodes, "a", 1);
        let (b, _b) = node(&mut nodes, "b", 2);
        nodes.claim(a, vec![entry("j", 0, 0, 2)], 1);
        nodes.claim(b, vec![entry("j", 1, 0, 2)], 1);
        let second = SECOND;
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
