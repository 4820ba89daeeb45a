//! Chains of waiting through processes that are not ranks: a rank waits for an engine, which waits
//! for a server, which is stopped.

use std::collections::{BTreeSet, HashSet};

use xpu_timer_proto::server::AwaitedKind;

use super::{
    builder::ResourceWait,
    chains::{Chain, End},
    members::{Member, Members, is_stream},
};
use crate::{stacks::ProcessState, world::World};

/// A rank that waits for a process that is not a rank, directly or through other processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessWait {
    /// Index of the rank.
    pub waiter: usize,
    /// The processes of the chain, as indices. The last one is its end.
    pub chain: Vec<usize>,
    /// At each step only one process has the other end.
    pub is_certain: bool,
    /// All processes of the chain descend from the rank: its loader workers, its child processes.
    pub is_own: bool,
    /// The state of the process at the end.
    pub state: ProcessState,
    /// Nothing outside of the chain wakes the process at its end: it waits without a timeout for a
    /// lock, or for processes of the chain, and none of its threads waits for anybody else.
    pub is_closed: bool,
    /// The chain passes through a process that waits for clients too, so the process at the end may
    /// be another client.
    pub is_served: bool,
    /// The process at the end stands still and holds up work that has begun: a process of the chain
    /// waits for the end of its child, for the result of a task of its pool, or for a lock that
    /// only the process at the end can hold.
    pub is_due: bool,
    /// Members of the chain wait for each other.
    pub mutual: Option<Mutual>,
}

/// The members of a cycle that are to blame for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mutual {
    /// The rank at the beginning of the chain.
    pub rank: bool,
    /// Processes of the chain, as indices.
    pub processes: Vec<usize>,
    pub fault: MutualFault,
}

/// Why members of a cycle are to blame for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MutualFault {
    /// They wait for each other, and nothing sets one of them apart.
    Alike,
    /// They wait for the end of a process that needs something first.
    ExpectsEnd,
    /// They do not receive what another member sends to them.
    LeavesUnread,
    /// They keep a lock for which another member waits. The member behind them that closes the
    /// cycle is this rank, which waits in an operation.
    KeepsLock { through: usize },
}

impl ProcessWait {
    /// The process at the end of the chain.
    pub(crate) fn end(&self) -> usize {
        self.chain.last().copied().unwrap_or_default()
    }

    /// Whether the process at the end can never answer, even if no rank waits in an operation.
    pub(crate) fn proves_hang(&self) -> bool {
        !self.is_served && (self.state.cannot_continue() || self.is_closed || self.is_due)
    }
}

/// The waits of ranks outside of all operations. The lists are in ascending order of their ranks.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Ranks that wait for a resource of another rank.
    pub of_ranks: Vec<ResourceWait>,
    /// Ranks that wait for each other, each cycle ascending, if nothing outside wakes any of them.
    pub cycles: Vec<Vec<usize>>,
    /// Ranks that wait for a process that is not a rank.
    pub of_processes: Vec<ProcessWait>,
    /// Ranks that wait for a process that waits for clients itself, and the index of that process,
    /// if it is not a rank.
    pub at_rest: Vec<(usize, Option<usize>)>,
    /// Ranks that wait for a process about which too little is known.
    pub on_unknown: Vec<usize>,
    /// Ranks that wait for a lock that only their own threads could release.
    pub locked_in: Vec<usize>,
}

/// Finds the waits of ranks outside of all operations.
pub(super) fn waits(world: &World<'_>) -> Waits {
    let all = Members::new(world);
    let mut waits = Waits::default();
    for waiter in 0..world.views.len() {
        match all.of_rank(waiter) {
            End::Rank(holder) => waits.of_ranks.push(ResourceWait { waiter, holder }),
            End::Process(chain) => waits.of_processes.push(ProcessWait::new(&all, waiter, chain, None)),
            End::Cycle(chain, from) => {
                let mutual = Mutual::of(&all, waiter, &chain, from);
                waits.of_processes.push(ProcessWait::new(&all, waiter, chain, Some(mutual)));
            }
            End::AtRest(Member::Process(server)) => waits.at_rest.push((waiter, Some(server))),
            End::AtRest(Member::Rank(_)) => waits.at_rest.push((waiter, None)),
            End::Unknown => waits.on_unknown.push(waiter),
            End::Start if all.is_locked_in(waiter) => waits.locked_in.push(waiter),
            End::Start if all.has_unknown_peer(waiter) => waits.on_unknown.push(waiter),
            End::Start | End::Back => {}
        }
    }
    waits.cycles = cycles(&all, &waits.of_ranks);
    waits
}

/// Facts about a rank at the beginning of a chain.
impl Members<'_, '_> {
    /// Whether all processes of a chain descend from the rank at its beginning, by the parents that
    /// are known.
    fn descend_from(&self, waiter: usize, chain: &[usize]) -> bool {
        let view = &self.world.views[waiter];
        let mut family = HashSet::from([view.pid().unwrap_or(0)]);
        let awaited = view.host.awaited.iter().flat_map(|awaited| &awaited.holders);
        family.extend(awaited.filter(|holder| holder.child).map(|holder| holder.pid));
        chain.iter().all(|index| {
            let host = &self.world.processes[*index].host;
            let belongs = family.contains(&host.pid) || family.contains(&host.parent_pid);
            family.insert(host.pid);
            let awaited = host.awaited.iter().flat_map(|awaited| &awaited.holders);
            family.extend(awaited.filter(|holder| belongs && holder.child).map(|holder| holder.pid));
            belongs
        })
    }

    /// Whether a rank waits for a message, and the sender is not known.
    fn has_unknown_peer(&self, rank_index: usize) -> bool {
        let member = Member::Rank(rank_index);
        let awaited = self.host(member).awaited.as_ref();
        self.waits_for_message(member) && awaited.is_some_and(|awaited| awaited.holders.is_empty())
    }

    /// Whether a rank waits without a timeout for a lock of its own threads, and none of these
    /// waits for anything else.
    fn is_locked_in(&self, rank_index: usize) -> bool {
        let member = Member::Rank(rank_index);
        let host = self.host(member);
        let is_own = host.awaited.as_ref().is_none_or(|awaited| awaited.kind() == AwaitedKind::Mutex);
        let waits = matches!(self.state(member), ProcessState::WaitsForLock) && host.same_in_both;
        waits && is_own && host.thread_waits.is_empty() && self.is_closed(member, &HashSet::new())
    }

    /// Whether the main thread of a process sends to another one.
    fn sends(&self, member: Member) -> bool {
        let awaited = self.host(member).awaited.as_ref();
        awaited.is_some_and(|awaited| is_stream(awaited.kind())) && self.host(member).is_in_send()
    }
}

/// The cycles of ranks that wait for resources of each other and that nothing else wakes.
fn cycles(all: &Members<'_, '_>, waits: &[ResourceWait]) -> Vec<Vec<usize>> {
    let holder = |waiter: usize| {
        let index = waits.binary_search_by_key(&waiter, |wait| wait.waiter).ok()?;
        Some(waits[index].holder)
    };
    let mut seen = HashSet::new();
    let mut cycles = Vec::new();
    for wait in waits {
        let mut path = Vec::new();
        let mut next = Some(wait.waiter);
        while let Some(rank_index) = next.filter(|rank_index| seen.insert(*rank_index)) {
            path.push(rank_index);
            next = holder(rank_index);
        }
        let Some(from) = path.iter().position(|rank_index| Some(*rank_index) == next) else { continue };
        let mut cycle = path.split_off(from);
        cycle.sort_unstable();
        let members: HashSet<Member> = cycle.iter().map(|rank_index| Member::Rank(*rank_index)).collect();
        if members.iter().all(|member| all.is_closed(*member, &members)) {
            cycles.push(cycle);
        }
    }
    cycles
}

impl ProcessWait {
    fn new(all: &Members<'_, '_>, waiter: usize, chain: Chain, mutual: Option<Mutual>) -> Self {
        let Chain { processes, is_certain, is_closed, is_served, is_due, .. } = chain;
        let end = processes.last().copied().unwrap_or_default();
        let is_own = all.descend_from(waiter, &processes);
        let end = Member::Process(end);
        let state = all.state(end);
        let stands = all.host(end).moved.is_some_and(|moved| !moved.is_progress() && !moved.helper_progressed);
        let is_due = is_due && stands;
        ProcessWait { waiter, chain: processes, is_certain, is_own, state, is_closed, is_served, is_due, mutual }
    }
}

impl Mutual {
    /// Finds the culprits in a cycle from this position of a chain on, or from the rank on. A
    /// process that waits for the end of another one must not expect that it ends while it needs
    /// something, and a process must receive what another one sends before it waits for an answer.
    fn of(all: &Members<'_, '_>, waiter: usize, chain: &Chain, from: Option<usize>) -> Self {
        if let Some((locker, through)) = chain.keeps_lock() {
            return Mutual { rank: false, processes: vec![locker], fault: MutualFault::KeepsLock { through } };
        }
        let inside = chain.processes[from.unwrap_or(0)..].iter().map(|index| Member::Process(*index));
        let members: Vec<Member> = from.is_none().then_some(Member::Rank(waiter)).into_iter().chain(inside).collect();
        let parents = members.iter().copied().filter(|member| all.waits_for_child(*member)).collect();
        let next = members.iter().cycle().skip(1);
        let leaves_unread = |(one, next): (&Member, &Member)| (all.sends(*one) && !all.sends(*next)).then_some(*next);
        let unread: Vec<Member> = members.iter().zip(next).filter_map(leaves_unread).collect();
        let choices =
            [(MutualFault::ExpectsEnd, parents), (MutualFault::LeavesUnread, unread), (MutualFault::Alike, members)];
        let found = choices.into_iter().find(|(_, blamed): &(_, Vec<Member>)| !blamed.is_empty());
        let (fault, blamed) = found.unwrap_or((MutualFault::Alike, Vec::new()));
        let processes: Vec<usize> = blamed.iter().copied().filter_map(Member::process).collect();
        Mutual { rank: processes.len() < blamed.len(), processes, fault }
    }
}

/// A process that should become a missing rank, or start it.
#[derive(Debug)]
pub(crate) struct ToCome {
    /// Index of the missing rank.
    pub rank_index: usize,
    /// Index of the process.
    pub process: usize,
    pub state: ProcessState,
    /// No other rank is missing, and the process is not a parent of ranks. So it is this rank's.
    pub is_that_rank: bool,
}

/// The processes that should become missing ranks or start them, ascending by the missing rank: a
/// parent of ranks that cannot continue, for all missing ranks; else, of the other children of
/// these parents, those that are stuck, or all of them, if there are as many as missing ranks.
pub(super) fn to_come(world: &World<'_>) -> Vec<ToCome> {
    let (views, processes) = (&world.views, &world.processes);
    let missing: Vec<usize> = (0..views.len()).filter(|index| views[*index].unseen()).collect();
    if processes.is_empty() || missing.is_empty() {
        return Vec::new();
    }
    let known = views.iter().filter(|view| view.host.parent_pid > 1);
    let parents: BTreeSet<(&str, i32)> =
        known.map(|view| (view.node().unwrap_or_default(), view.host.parent_pid)).collect();
    let states: Vec<ProcessState> =
        processes.iter().map(|process| ProcessState::of(&process.host, process.gil_holder.as_ref())).collect();
    let all = 0..processes.len();
    let is_parent = |index: &usize| parents.contains(&(processes[*index].node.as_str(), processes[*index].host.pid));
    if let Some(parent) = all.clone().filter(is_parent).find(|index| states[*index].cannot_continue()) {
        let state = &states[parent];
        let of_parent = |rank_index| ToCome { rank_index, process: parent, state: state.clone(), is_that_rank: false };
        return missing.into_iter().map(of_parent).collect();
    }
    let is_child =
        |index: &usize| parents.contains(&(processes[*index].node.as_str(), processes[*index].host.parent_pid));
    // A process that waits for a message is a helper at rest.
    let is_at_rest = |index: &usize| {
        let host = &processes[*index].host;
        host.rests
            || host.awaited.as_ref().is_some_and(|awaited| {
                is_stream(awaited.kind()) && awaited.holders.iter().any(|holder| holder.pid != host.pid)
            })
    };
    let children: Vec<usize> = all.filter(is_child).filter(|index| !is_at_rest(index)).collect();
    let stuck: Vec<usize> = children.iter().copied().filter(|index| states[*index].is_stuck()).collect();
    let chosen = [stuck, children].into_iter().find(|processes| processes.len() == missing.len());
    let is_that_rank = missing.len() == 1;
    let pairs = missing.into_iter().zip(chosen.unwrap_or_default());
    pairs
        .map(|(rank_index, process)| ToCome { rank_index, process, state: states[process].clone(), is_that_rank })
        .collect()
}
