//! The nodes of a cluster and the ranks that each of them may report. Pure: the caller passes in
//! the time.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use tracing::info;
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::{
    procfs::TICK_NS,
    v1::{JobId, Presence, RankEntry},
};

use crate::{
    cluster::joins::{self, Unit},
    job::{self, JobKey, NodeId, StreamId},
};

/// One node collector.
#[derive(Debug)]
pub struct Node {
    /// Host or pod name.
    pub name: String,
    /// Its stream; `None` while it is away.
    pub stream: Option<StreamId>,
    /// When its last stream ended; meaningless while it has a stream.
    pub lost_ns: u64,
    reported: Vec<Reported>,
    launches: BTreeMap<JobKey, u64>,
    clock: Clock,
    // The cluster's keys of its jobs, for jobs whose own key differs.
    keys: BTreeMap<JobKey, JobKey>,
}

/// The fields that are kept of the entry of a rank, besides its claim. A cluster collector has a
/// hundred thousand of them.
#[derive(Debug)]
struct Reported {
    job: Arc<JobKey>,
    rank: u32,
    communicators: Box<[u64]>,
}

impl Reported {
    fn key(&self) -> (&JobKey, u32) {
        (&self.job, self.rank)
    }
}

/// A report that is to be stored.
struct NewClaim {
    reported: Reported,
    claim: Claim,
    age_is_known: bool,
}

/// Converts the boot time of a node, the clock of its process start times, to the clock of this
/// collector. The message with the shortest delay gives the best estimate.
#[derive(Debug, Clone, Copy, Default)]
struct Clock {
    // Nanoseconds that this collector's clock is ahead of the node's.
    ahead_ns: Option<i64>,
}

impl Clock {
    /// Notes a message that was sent at `sent_ns` of the node's clock and arrived now.
    fn note_message(&mut self, sent_ns: u64, now_ns: u64) {
        let ahead_ns = now_ns.cast_signed().saturating_sub(sent_ns.cast_signed());
        self.ahead_ns = Some(self.ahead_ns.map_or(ahead_ns, |least| least.min(ahead_ns)));
    }

    fn to_local(self, ns: u64) -> Option<u64> {
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

/// The report of one node about one rank of a job.
#[derive(Debug, Clone)]
struct Claim {
    attempt: u32,
    // World size according to the report; 0 if unknown.
    world_size: u32,
    presence: Presence,
    // Pid and start time; `None` if the process is not visible to the node.
    process: Option<(i32, u64)>,
    // On this collector's clock. The end is `u64::MAX` while the process lives.
    started_ns: u64,
    ended_ns: u64,
    // Whether its process has ended, and not in order.
    failed: bool,
    // Order of arrival.
    number: u64,
    hang_timeout_ms: u64,
    sample_interval_ms: u64,
    idle_timeout_ms: u64,
}

impl Claim {
    /// Not numbered yet.
    fn new(entry: &RankEntry, clock: Clock, now_ns: u64) -> Self {
        // Uses the node's clock if it is known, because a message may be late.
        let ago = |age_ms: u64| {
            let ago_ns = age_ms.saturating_mul(NS_PER_MS);
            let then = sent_ns(entry).and_then(|sent_ns| clock.to_local(sent_ns.saturating_sub(ago_ns)));
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
            failed: entry.failed,
            number: 0,
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

    /// Whether this repeats the other report of the same process.
    fn repeats(&self, other: &Claim) -> bool {
        (self.presence, self.failed) == (other.presence, other.failed) && self.has_same_place_as(other)
    }

    /// Whether the same process has the same rank in the same world, and is alive or dead as
    /// before.
    fn has_same_place_as(&self, other: &Claim) -> bool {
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

/// When the message with this entry was sent, on the clock of its node; `None` if the entry does
/// not contain it.
fn sent_ns(entry: &RankEntry) -> Option<u64> {
    let sent_ns = || entry.start.saturating_mul(TICK_NS).saturating_add(entry.age_ms.saturating_mul(NS_PER_MS));
    (entry.start > 0 && entry.age_ms > 0).then(sent_ns)
}

/// The current world, defined by the most recently started rank. A launcher starts a world after
/// the previous one has ended, so start times separate worlds. Attempt numbers do not: those of
/// different agents may differ after one of them failed, and they stay the same when the job grows
/// or shrinks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct World {
    size: u32,
    attempt: u32,
    started_ns: u64,
}

impl World {
    fn holds(self, rank: u32, claim: &Claim) -> bool {
        let of_size = self.size == 0 || (rank < self.size && (claim.world_size == self.size || claim.world_size == 0));
        // A rank that ended before the last rank was started belongs to the previous world, unless
        // its attempt is that of the last rank.
        of_size && (claim.ended_ns > self.started_ns.saturating_add(SAME_NS) || claim.attempt == self.attempt)
    }
}

/// The ranks of one job.
#[derive(Debug, Default)]
struct Claims {
    // By rank. If several nodes claim one rank, one of them holds it.
    ranks: BTreeMap<(u32, NodeId), Claim>,
    // Computed on demand. Adding a rank updates it; every other change drops it.
    summary: RefCell<Option<Arc<JobSummary>>>,
}

impl Claims {
    fn summary(&self, away: &BTreeSet<NodeId>) -> Arc<JobSummary> {
        Arc::clone(self.summary.borrow_mut().get_or_insert_with(|| {
            let newest = self.ranks.values().max_by_key(|claim| (claim.is_alive(), claim.started_ns, claim.number));
            let world = newest.map_or(World::default(), |claim| World {
                size: claim.world_size,
                attempt: claim.attempt,
                started_ns: claim.started_ns,
            });
            let mut summary = JobSummary { world, first_start_ns: u64::MAX, ..JobSummary::default() };
            let mut last = None;
            for (rank, _) in self.ranks.keys() {
                if last.replace(*rank) == Some(*rank) {
                    continue;
                }
                if let Some((node, claim)) = holder(&mut self.of_rank(world, *rank), away) {
                    summary.add(*rank, node, claim);
                }
                summary.contested |= self.of_rank(world, *rank).nth(1).is_some();
            }
            Arc::new(summary)
        }))
    }

    /// The reports about one rank of a world.
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
            if old.repeats(&claim) {
                return;
            }
            if old.is_process_of(&claim) {
                claim.number = old.number;
                // A message may be late but never early.
                claim.started_ns = claim.started_ns.min(old.started_ns);
            }
            if old.is_alive() && old.has_same_place_as(&claim) {
                // The rank has registered.
                claim.started_ns = old.started_ns;
                if let Some(known) = self.summary.get_mut() {
                    Arc::make_mut(known).merge_settings(&claim);
                }
                self.ranks.insert((rank, node), claim);
                return;
            }
        }
        let alone = self.ranks.range((rank, NodeId::MIN)..=(rank, NodeId::MAX)).next().is_none();
        let summary = self.summary.get_mut();
        match summary {
            Some(known) if alone && known.can_add(rank, &claim) => Arc::make_mut(known).add(rank, node, &claim),
            _ => *summary = None,
        }
        self.ranks.insert((rank, node), claim);
    }

    fn remove(&mut self, rank: u32, node: NodeId) {
        self.ranks.remove(&(rank, node));
        *self.summary.get_mut() = None;
    }
}

/// The node that holds a rank: among connected nodes with a living process, the first that claimed
/// it. Other nodes wait until it leaves.
fn holder<'c>(
    claims: &mut dyn Iterator<Item = (NodeId, &'c Claim)>,
    away: &BTreeSet<NodeId>,
) -> Option<(NodeId, &'c Claim)> {
    claims.max_by_key(|(node, claim)| {
        let alive = claim.is_alive();
        (alive && !away.contains(node), alive, Reverse(if alive { claim.number } else { 0 }), claim.started_ns)
    })
}

/// All nodes, and which node holds which rank.
#[derive(Debug, Default)]
pub struct Nodes {
    nodes: BTreeMap<NodeId, Node>,
    by_identity: HashMap<String, NodeId>,
    // Nodes without a stream.
    away: BTreeSet<NodeId>,
    claims: BTreeMap<JobKey, Claims>,
    next: NodeId,
    // Number of claims received.
    claimed: u64,
    // Names that may belong to several jobs, or jobs that nodes call differently.
    doubtful: BTreeSet<String>,
}

/// A summary of the ranks in the world of a job that is running or ran last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobSummary {
    /// The highest attempt among the ranks.
    pub attempt: u32,
    /// World size of the job.
    pub world_size: u32,
    /// Number of ranks that some node holds.
    pub ranks: u32,
    /// Its nodes.
    pub nodes: BTreeSet<NodeId>,
    /// Whether any of its ranks runs.
    pub alive: bool,
    /// The first of its ranks that has ended, and not in order.
    pub failed: Option<u32>,
    /// Hang timeout.
    pub hang_timeout_ms: u64,
    /// Time between the two samples.
    pub sample_interval_ms: u64,
    /// Idle timeout; 0 is off.
    pub idle_timeout_ms: u64,
    /// Start of the first of its living processes; `u64::MAX` if there is none.
    pub first_start_ns: u64,
    world: World,
    // Whether several nodes claim one rank.
    contested: bool,
    // Whether some rank has ended.
    ended: bool,
}

impl JobSummary {
    /// Whether a rank that no node has claimed yet can be added without recomputing the summary.
    fn can_add(&self, rank: u32, claim: &Claim) -> bool {
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
        self.failed = self.failed.into_iter().chain(claim.failed.then_some(rank)).min();
        if claim.is_alive() {
            self.first_start_ns = self.first_start_ns.min(claim.started_ns);
            self.world.started_ns = self.world.started_ns.max(claim.started_ns);
        }
        self.merge_settings(claim);
    }

    /// Merges the job settings that a rank reports.
    fn merge_settings(&mut self, claim: &Claim) {
        self.hang_timeout_ms = self.hang_timeout_ms.max(claim.hang_timeout_ms);
        self.sample_interval_ms = self.sample_interval_ms.max(claim.sample_interval_ms);
        self.idle_timeout_ms = self.idle_timeout_ms.max(claim.idle_timeout_ms);
    }

    /// Whether every rank of its world is held by a node.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.ranks >= self.world_size
    }
}

/// Ranks that a node claims and another node holds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RefusedClaim {
    /// The node that claims them.
    pub node: NodeId,
    /// The job.
    pub job: JobKey,
    /// The node that holds them.
    pub by: NodeId,
    /// The ranks.
    pub ranks: RankSet,
}

const NS_PER_MS: u64 = 1_000_000;
/// Times from different messages count as equal if they differ by less: messages have a delay.
const SAME_NS: u64 = 1_000_000_000;
/// A node without a stream and without a running rank is forgotten after this time.
const FORGET_NS: u64 = 600 * 1_000_000_000;

impl Nodes {
    /// The stream of the node with this identity.
    #[must_use]
    pub fn stream_of(&self, identity: &str) -> Option<StreamId> {
        self.nodes.get(self.by_identity.get(identity)?)?.stream
    }

    /// Handles the hello of a stream.
    pub fn join(&mut self, name: &str, identity: &str, stream: StreamId) -> NodeId {
        let id = *self.by_identity.entry(identity.into()).or_insert_with(|| {
            self.next += 1;
            self.next
        });
        let node = self.nodes.entry(id).or_insert_with(|| Node {
            name: name.into(),
            stream: None,
            lost_ns: 0,
            reported: Vec::new(),
            launches: BTreeMap::new(),
            clock: Clock::default(),
            keys: BTreeMap::new(),
        });
        node.stream = Some(stream);
        self.away.remove(&id);
        self.invalidate_summaries(id);
        id
    }

    /// Handles the end of a stream. Returns false if the node already has a newer one.
    pub fn disconnect(&mut self, id: NodeId, stream: StreamId, now_ns: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&id) else { return false };
        if node.stream != Some(stream) {
            return false;
        }
        node.stream = None;
        node.lost_ns = now_ns;
        self.away.insert(id);
        self.invalidate_summaries(id);
        true
    }

    /// A node joined or left, which may change the holder of ranks that other nodes also claim.
    fn invalidate_summaries(&mut self, id: NodeId) {
        for job in self.jobs_of(id) {
            if let Some(claims) = self.claims.get_mut(&job) {
                claims.summary.get_mut().take_if(|summary| summary.contested);
            }
        }
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

    /// Display name of a node.
    #[must_use]
    pub fn name(&self, id: NodeId) -> &str {
        self.nodes.get(&id).map_or("a node that is forgotten", |node| node.name.as_str())
    }

    /// Handles the list of the ranks of a node. Returns other nodes that also claim one of these
    /// ranks and may hold it from now on.
    pub fn claim(&mut self, id: NodeId, ranks: Vec<RankEntry>, now_ns: u64) -> BTreeSet<NodeId> {
        let mut clock = self.nodes.get(&id).map(|node| node.clock).unwrap_or_default();
        ranks.iter().filter_map(sent_ns).for_each(|sent_ns| clock.note_message(sent_ns, now_ns));
        if let Some(node) = self.nodes.get_mut(&id) {
            node.clock = clock;
        }
        // Most nodes have ranks of one job.
        let mut jobs: Vec<(&JobId, Arc<JobKey>)> = Vec::new();
        let mut claims = Vec::with_capacity(ranks.len());
        for entry in &ranks {
            let Some(job) = &entry.job else { continue };
            let known = jobs.iter().find(|(known, _)| *known == job).map(|(_, key)| Arc::clone(key));
            let job = known.unwrap_or_else(|| {
                let key = Arc::new(self.key(id, job));
                jobs.push((job, Arc::clone(&key)));
                key
            });
            let Some(rank) = entry.info.as_ref().and_then(|info| u32::try_from(info.rank).ok()) else { continue };
            let reported = Reported { job, rank, communicators: entry.communicators.as_slice().into() };
            let claim = Claim::new(entry, clock, now_ns);
            claims.push(NewClaim { reported, claim, age_is_known: entry.age_ms > 0 });
        }
        let of_node = jobs.iter().filter(|(_, key)| is_of_node(key)).map(|(_, key)| key.name.clone());
        self.doubtful.extend(of_node);
        let names: BTreeSet<String> = jobs.iter().map(|(_, key)| key.name.clone()).collect();
        let mut others = self.store_claims(id, claims);
        if !others.is_empty() {
            self.doubtful.extend(names.iter().cloned());
        }
        for name in names {
            if self.doubtful.contains(&name) {
                others.extend(self.join_jobs(&name));
            }
        }
        others
    }

    /// The cluster's key of a job, given the node's key.
    #[must_use]
    pub fn key(&self, id: NodeId, job: &JobId) -> JobKey {
        let own = job::cluster_key(job);
        self.nodes.get(&id).and_then(|node| node.keys.get(&own)).cloned().unwrap_or(own)
    }

    /// The node's key of a job, given the cluster's key.
    #[must_use]
    pub fn key_at(&self, id: NodeId, job: &JobKey) -> JobKey {
        let own = self.nodes.get(&id).and_then(|node| node.keys.iter().find(|(_, key)| *key == job));
        own.map_or(job, |(own, _)| own).clone()
    }

    /// The jobs that have ranks on a node.
    #[must_use]
    pub fn jobs_of(&self, id: NodeId) -> BTreeSet<JobKey> {
        self.reported(id)
            .iter()
            .map(|reported| &reported.job)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .map(|job| (**job).clone())
            .collect()
    }

    fn reported(&self, id: NodeId) -> &[Reported] {
        self.nodes.get(&id).map(|node| node.reported.as_slice()).unwrap_or_default()
    }

    /// Recomputes which jobs of this name on the nodes are one. Returns the nodes whose jobs
    /// changed their keys.
    fn join_jobs(&mut self, name: &str) -> BTreeSet<NodeId> {
        let mut units: BTreeMap<(NodeId, JobKey), Unit> = BTreeMap::new();
        for (id, node) in &self.nodes {
            for entry in node.reported.iter().filter(|entry| entry.job.name == name) {
                let job = self.key_at(*id, &entry.job);
                let new = || Unit {
                    node: *id,
                    job: job.clone(),
                    current: (*entry.job).clone(),
                    communicators: BTreeSet::new(),
                    ranks: BTreeSet::new(),
                };
                let unit = units.entry((*id, job.clone())).or_insert_with(new);
                unit.communicators.extend(&entry.communicators);
                if self.claim_of(*id, entry).is_some_and(Claim::is_alive) {
                    unit.ranks.insert(entry.rank);
                }
            }
        }
        for (id, node) in &mut self.nodes {
            node.keys.retain(|own, _| own.name != name || units.contains_key(&(*id, own.clone())));
        }
        let units: Vec<Unit> = units.into_values().collect();
        let keys = joins::keys(&units, is_of_node);
        let mut moved = BTreeSet::new();
        for (unit, key) in units.iter().zip(keys).filter(|(unit, key)| unit.current != *key) {
            let Some(node) = self.nodes.get_mut(&unit.node) else { continue };
            info!("job {} of node {} is job {key}", unit.job, node.name);
            node.keys.insert(unit.job.clone(), key);
            moved.insert(unit.node);
        }
        for id in &moved {
            let Some(node) = self.nodes.get(id) else { continue };
            let before: BTreeMap<&JobKey, &JobKey> =
                units.iter().filter(|unit| unit.node == *id).map(|unit| (&unit.current, &unit.job)).collect();
            let renamed = |entry: &Reported| {
                let own = before.get(&*entry.job).copied().unwrap_or(&entry.job);
                let job = Arc::new(node.keys.get(own).unwrap_or(own).clone());
                let reported = Reported { job, rank: entry.rank, communicators: entry.communicators.clone() };
                Some(NewClaim { reported, claim: self.claim_of(*id, entry)?.clone(), age_is_known: true })
            };
            let claims = node.reported.iter().filter_map(renamed).collect();
            self.store_claims(*id, claims);
        }
        moved
    }

    /// The claim of a rank that a node reports.
    fn claim_of(&self, id: NodeId, entry: &Reported) -> Option<&Claim> {
        self.claims.get(&*entry.job)?.ranks.get(&(entry.rank, id))
    }

    fn store_claims(&mut self, id: NodeId, new: Vec<NewClaim>) -> BTreeSet<NodeId> {
        let before = self.nodes.get_mut(&id).map(|node| std::mem::take(&mut node.reported)).unwrap_or_default();
        let listed: BTreeSet<(&JobKey, u32)> = new.iter().map(|new| new.reported.key()).collect();
        let mut others = BTreeSet::new();
        for (job, rank) in before.iter().map(Reported::key).filter(|old| !listed.contains(old)) {
            if let Some(claims) = self.claims.get_mut(job) {
                others.extend(claims.others(rank, id));
                claims.remove(rank, id);
                if claims.ranks.is_empty() {
                    self.claims.remove(job);
                }
            }
        }
        let mut reported = Vec::with_capacity(new.len());
        for NewClaim { reported: entry, mut claim, age_is_known } in new {
            if !self.claims.contains_key(&*entry.job) {
                self.claims.insert((*entry.job).clone(), Claims::default());
            }
            self.claimed += 1;
            claim.number = self.claimed;
            if let Some(claims) = self.claims.get_mut(&*entry.job) {
                others.extend(claims.others(entry.rank, id));
                claims.insert(entry.rank, id, claim, age_is_known);
            }
            reported.push(entry);
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            node.reported = reported;
        }
        others
    }

    /// Other nodes that claim a rank which this one also claims.
    #[must_use]
    pub fn competing_nodes(&self, id: NodeId) -> BTreeSet<NodeId> {
        let keys = self.reported(id).iter().map(Reported::key);
        keys.filter_map(|(job, rank)| Some((self.claims.get(job)?, rank)))
            .flat_map(|(claims, rank)| claims.others(rank, id))
            .collect()
    }

    /// Living ranks that a node claims while another node holds them.
    #[must_use]
    pub fn refused(&self) -> Vec<RefusedClaim> {
        let mut refused: BTreeMap<(NodeId, NodeId, &JobKey), RankSet> = BTreeMap::new();
        for (job, claims) in &self.claims {
            let summary = claims.summary(&self.away);
            if !summary.contested {
                continue;
            }
            for ((rank, node), claim) in &claims.ranks {
                let holder = holder(&mut claims.of_rank(summary.world, *rank), &self.away);
                let stands = claim.is_alive() && !self.away.contains(node) && summary.world.holds(*rank, claim);
                if let Some((by, _)) = holder.filter(|(by, held)| stands && by != node && held.is_alive()) {
                    refused.entry((*node, by, job)).or_default().insert(*rank);
                }
            }
        }
        refused.into_iter().map(|((node, by, job), ranks)| RefusedClaim { node, by, job: job.clone(), ranks }).collect()
    }

    /// Jobs that have a rank.
    pub fn jobs(&self) -> impl Iterator<Item = &JobKey> {
        self.claims.keys()
    }

    /// The summary of a job.
    #[must_use]
    pub fn job(&self, job: &JobKey) -> Arc<JobSummary> {
        self.claims.get(job).map(|claims| claims.summary(&self.away)).unwrap_or_default()
    }

    /// The ranks that one node holds.
    #[must_use]
    pub fn ranks_of(&self, job: &JobKey, node: NodeId) -> RankSet {
        let listed = self.reported(node).iter().map(Reported::key).filter(|(of, _)| *of == job);
        listed.map(|(_, rank)| rank).filter(|rank| self.node_of_rank(job, *rank) == Some(node)).collect()
    }

    /// The node that holds a rank.
    #[must_use]
    pub fn node_of_rank(&self, job: &JobKey, rank: u32) -> Option<NodeId> {
        let claims = self.claims.get(job)?;
        let world = claims.summary(&self.away).world;
        holder(&mut claims.of_rank(world, rank), &self.away).map(|(node, _)| node)
    }

    /// Whether all running ranks of a job on a node were started after a given time.
    #[must_use]
    pub fn all_started_after(&self, job: &JobKey, id: NodeId, ns: u64) -> bool {
        let (Some(node), Some(claims)) = (self.nodes.get(&id), self.claims.get(job)) else { return false };
        let ranks = node.reported.iter().map(Reported::key).filter(|(of, _)| *of == job);
        let claims = ranks.filter_map(|(_, rank)| claims.ranks.get(&(rank, id)));
        let mut living = claims.filter(|claim| claim.is_alive()).peekable();
        // For a process that is not visible, only the registration time is known.
        living.peek().is_some() && living.all(|claim| claim.process.is_some() && claim.started_ns > ns)
    }

    /// A node reports when a job last launched there; the time is on this collector's clock.
    pub fn launched(&mut self, id: NodeId, job: JobKey, last_ns: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.launches.insert(job, last_ns);
        }
    }

    /// When a job launched anything last, according to its nodes.
    #[must_use]
    pub fn last_launch_ns(&self, job: &JobKey) -> Option<u64> {
        self.nodes.values().filter_map(|node| node.launches.get(job).copied()).max()
    }

    /// Another node on which the job launched within its idle timeout.
    #[must_use]
    pub fn busy_elsewhere(&self, job: &JobKey, not: NodeId, now_ns: u64) -> Option<&str> {
        let summary = self.job(job);
        let recent = |last: &u64| now_ns.saturating_sub(*last) < summary.idle_timeout_ms.saturating_mul(1_000_000);
        let others = summary.nodes.iter().filter(|id| **id != not).filter_map(|id| self.nodes.get(id));
        let mut busy = others.filter(|node| node.is_joined() && node.launches.get(job).is_some_and(recent));
        busy.next().map(|node| node.name.as_str())
    }

    /// Forgets worlds that were replaced by newer ones, and nodes that left long ago.
    pub fn forget(&mut self, now_ns: u64) {
        let gone = |node: &Node| !node.is_joined() && now_ns > node.lost_ns + FORGET_NS;
        let nodes = &self.nodes;
        for claims in self.claims.values_mut() {
            let (before, world) = (claims.ranks.len(), claims.summary(&self.away).world);
            claims.ranks.retain(|(rank, node), claim| {
                (claim.is_alive() || world.holds(*rank, claim)) && nodes.get(node).is_some_and(|node| !gone(node))
            });
            if claims.ranks.len() < before {
                *claims.summary.get_mut() = None;
            }
        }
        self.claims.retain(|_, claims| !claims.ranks.is_empty());
        self.nodes.retain(|_, node| !gone(node));
        let nodes = &self.nodes;
        self.by_identity.retain(|_, id| nodes.contains_key(id));
        self.away.retain(|id| nodes.contains_key(id));
    }
}

/// Whether a key is meaningful only on the machine of its node.
fn is_of_node(job: &JobKey) -> bool {
    job.instance
        .rsplit_once(" on ")
        .is_some_and(|(own, _)| JobKey { name: String::new(), instance: own.into() }.is_of_process())
}

#[cfg(test)]
#[path = "nodes_tests.rs"]
mod tests;
