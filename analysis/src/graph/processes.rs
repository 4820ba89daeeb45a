//! Chains of waiting through processes that are no ranks: a rank waits for an engine, which waits
//! for a server, which is stopped.

use std::collections::{BTreeSet, HashMap, HashSet};

use xpu_timer_proto::server::{Awaited, AwaitedKind, Holder};

use super::builder::ResourceWait;
use crate::{
    facts,
    stacks::{Host, ProcessState},
    verdict::Activity,
    world::{World, is_collective},
};

/// Start of the name of an awaited socket on which a process listens: it waits for a client.
const LISTENS: &str = "anybody who connects";

/// Maximum number of times that one chain continues through the other threads of a process.
const MAX_INNER: usize = 3;

/// A rank that waits for a process that is no rank, directly or through other processes.
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
}

impl ProcessWait {
    /// The process at the end of the chain.
    pub fn end(&self) -> usize {
        self.chain.last().copied().unwrap_or_default()
    }

    /// Whether the process at the end can never answer, even if no rank waits in an operation.
    pub fn proves_hang(&self) -> bool {
        self.state.cannot_continue() || self.is_closed
    }
}

/// A member of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Member {
    Rank(usize),
    Process(usize),
}

/// What ranks wait for outside of all operations. The lists are in ascending order of their ranks.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Ranks that wait for a resource of another rank.
    pub of_ranks: Vec<ResourceWait>,
    /// Ranks that wait for a process that is no rank.
    pub of_processes: Vec<ProcessWait>,
    /// Ranks that wait for a process that waits for clients itself.
    pub at_rest: Vec<usize>,
}

/// Finds what ranks wait for. A process is identified by its node and pid.
pub(super) fn waits(world: &World<'_>) -> Waits {
    let mut by_pid: HashMap<(&str, i32), Member> = HashMap::new();
    for (index, process) in world.processes.iter().enumerate() {
        by_pid.insert((&process.node, process.host.pid), Member::Process(index));
    }
    for (index, view) in world.views.iter().enumerate() {
        if let Some(pid) = view.pid().filter(|pid| *pid > 0) {
            by_pid.insert((view.node().unwrap_or_default(), pid), Member::Rank(index));
        }
    }
    let chains = Chains { world, by_pid };
    let (mut of_ranks, mut of_processes, mut at_rest) = (Vec::new(), Vec::new(), Vec::new());
    for waiter in 0..world.views.len() {
        match chains.follow(Member::Rank(waiter), &HashSet::new(), MAX_INNER) {
            End::Rank(holder) => of_ranks.push(ResourceWait { waiter, holder }),
            End::Process { chain, is_certain, is_closed } => {
                let is_own = chains.descend_from(waiter, &chain);
                let end = chain.last().copied().unwrap_or_default();
                let state = chains.state(Member::Process(end));
                of_processes.push(ProcessWait { waiter, chain, is_certain, is_own, state, is_closed });
            }
            End::AtRest => at_rest.push(waiter),
            End::Start | End::Back | End::Unknown => {}
        }
    }
    Waits { of_ranks, of_processes, at_rest }
}

struct Chains<'w, 'a> {
    world: &'w World<'a>,
    by_pid: HashMap<(&'w str, i32), Member>,
}

impl Chains<'_, '_> {
    fn host(&self, member: Member) -> &Host {
        match member {
            Member::Rank(index) => &self.world.views[index].host,
            Member::Process(index) => &self.world.processes[index].host,
        }
    }

    fn node(&self, member: Member) -> &str {
        match member {
            Member::Rank(index) => self.world.views[index].node().unwrap_or_default(),
            Member::Process(index) => &self.world.processes[index].node,
        }
    }

    fn pid(&self, member: Member) -> i32 {
        match member {
            Member::Rank(index) => self.world.views[index].pid().unwrap_or(0),
            Member::Process(index) => self.world.processes[index].host.pid,
        }
    }

    fn state(&self, member: Member) -> ProcessState {
        let holder = match member {
            Member::Rank(index) => self.world.views[index].evidence.and_then(facts::gil_holder),
            Member::Process(index) => self.world.processes[index].gil_holder.clone(),
        };
        ProcessState::of(self.host(member), holder.as_ref())
    }

    /// The end of the chain that begins at `start`. `before` has the members that lead to `start`.
    /// The chain may pass through the other threads of a process at most `inner` times.
    fn follow(&self, start: Member, before: &HashSet<Member>, inner: usize) -> End {
        let mut current = start;
        if matches!(start, Member::Rank(index) if self.world.views[index].halted()) {
            return End::Start;
        }
        let mut seen = before.clone();
        seen.insert(start);
        let mut chain: Vec<usize> = match start {
            Member::Rank(_) => Vec::new(),
            Member::Process(index) => vec![index],
        };
        let mut is_certain = true;
        loop {
            let host = self.host(current);
            let is_first = current == start && before.is_empty();
            let awaited = host.awaited.as_ref().filter(|_| !host.halted() && host.same_in_both);
            let next = match awaited.map(|awaited| (awaited, self.next(current, awaited))) {
                Some((awaited, next)) if is_first && self.is_orphaned(current, awaited, &next) => {
                    is_certain = false;
                    let parent = (self.node(current), self.host(current).ended_parent_pid);
                    self.by_pid.get(&parent).copied().unwrap_or(current)
                }
                Some((awaited, _)) if awaited.name.starts_with(LISTENS) && !is_first => return End::AtRest,
                Some((_, Next::Unknown)) => return End::Unknown,
                Some((_, Next::One { member, is_only })) => {
                    is_certain &= is_only;
                    member
                }
                Some((_, Next::Nobody)) | None => return self.follow_threads(current, chain, is_certain, &seen, inner),
            };
            if !seen.insert(next) {
                return End::Back;
            }
            match next {
                // A server that waits for the answer of a rank in a collective waits for the ranks
                // of that collective, and one of these may be the rank at the beginning.
                Member::Rank(holder) if !is_first && self.waits_in_operation(holder) => return End::Unknown,
                Member::Rank(holder) => return End::Rank(holder),
                Member::Process(index) => chain.push(index),
            }
            current = next;
        }
    }

    /// The end of a chain at a process whose main thread waits for no other process. It may wait
    /// for another thread of its process, which waits for another process: for a reply that a
    /// reader thread puts into a queue.
    fn follow_threads(
        &self,
        current: Member,
        mut chain: Vec<usize>,
        is_certain: bool,
        seen: &HashSet<Member>,
        inner: usize,
    ) -> End {
        let host = self.host(current);
        let waits_in_operation = matches!(current, Member::Rank(index) if self.waits_in_operation(index));
        let is_known = !host.halted() && host.same_in_both && !waits_in_operation && inner > 0;
        let waits = if is_known { &host.thread_waits[..] } else { &[] };
        let mut is_open = !is_known;
        let mut nexts = BTreeSet::new();
        for wait in waits {
            match self.next(current, &wait.awaited) {
                _ if wait.awaited.name.starts_with(LISTENS) => is_open = true,
                Next::Unknown => is_open = true,
                Next::Nobody => {}
                Next::One { member, .. } => drop(nexts.insert(member)),
            }
        }
        let only = nexts.len() == 1 && matches!(waits, [wait] if wait.own);
        let mut ends = Vec::new();
        for next in nexts.into_iter().filter(|next| !seen.contains(next)) {
            match self.follow(next, seen, inner - 1) {
                End::Back => {}
                End::Start => ends.extend(Self::of_rank(next)),
                end @ (End::Rank(_) | End::Process { .. }) => ends.push(end),
                End::AtRest | End::Unknown => is_open = true,
            }
        }
        // Of a process that sleeps or computes, nothing shows that the main thread waits for it.
        ends.retain(|end| only || self.state_at(end).is_some_and(|state| state.is_stuck()));
        let halted = |end: &End| self.state_at(end).is_some_and(|state| state.cannot_continue());
        if ends.iter().filter(|end| halted(end)).count() == 1 {
            ends.retain(halted);
        }
        match (ends.pop(), ends.is_empty()) {
            (Some(End::Process { chain: behind, is_closed, .. }), true) => {
                chain.extend(behind);
                return End::Process { chain, is_certain: false, is_closed };
            }
            (Some(end), true) => return end,
            (Some(_), false) => is_open = true,
            (None, _) => {}
        }
        if chain.is_empty() {
            return End::Start;
        }
        let waits = matches!(self.state(current), ProcessState::WaitsForLock)
            || host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Lock);
        let stands =
            host.timed == Some(false) && host.moved.is_some_and(|moved| !moved.main_ran && !moved.is_progress());
        End::Process { chain, is_certain, is_closed: waits && stands && !is_open }
    }

    fn of_rank(member: Member) -> Option<End> {
        match member {
            Member::Rank(index) => Some(End::Rank(index)),
            Member::Process(_) => None,
        }
    }

    /// The state of the process at an end.
    fn state_at(&self, end: &End) -> Option<ProcessState> {
        match end {
            End::Rank(index) => Some(self.state(Member::Rank(*index))),
            End::Process { chain, .. } => chain.last().map(|index| self.state(Member::Process(*index))),
            _ => None,
        }
    }

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

    /// The process that a member waits for. Several may have the other end of a pipe or socket,
    /// because processes inherit descriptors.
    fn next(&self, current: Member, awaited: &Awaited) -> Next {
        let own = self.pid(current);
        let others: Vec<&Holder> = awaited.holders.iter().filter(|holder| holder.pid != own).collect();
        if others.is_empty() {
            return Next::Nobody;
        }
        let member = |holder: &&Holder| self.by_pid.get(&(self.node(current), holder.pid)).copied();
        // A standard input comes from a person, or from a program that replaces one.
        if matches!(awaited.kind(), AwaitedKind::Unspecified | AwaitedKind::File) {
            return Next::Unknown;
        }
        let waits_alike = |member: Member| {
            let object = self.host(member).awaited.as_ref().map(|awaited| &awaited.object);
            object.is_some_and(|object| !object.is_empty() && *object == awaited.object)
        };
        if others.iter().any(|holder| member(holder).is_none()) {
            return Next::Unknown;
        }
        let known =
            others.iter().filter_map(|holder| Some(Candidate { member: member(holder)?, is_child: holder.child }));
        let known: Vec<Candidate> = known.collect();
        if let [only] = known[..] {
            return if waits_alike(only.member) {
                Next::Unknown
            } else {
                Next::One { member: only.member, is_only: true }
            };
        }
        // A rank in a collective cannot be expected to answer.
        let waits = |member: Member| matches!(member, Member::Rank(index) if self.waits_in_operation(index));
        let able = known.into_iter().filter(|one| !waits_alike(one.member) && !waits(one.member));
        self.likely(current, &able.collect::<Vec<_>>())
            .map_or(Next::Unknown, |member| Next::One { member, is_only: false })
    }

    /// The one of several candidates that is likely to have the other end in use.
    fn likely(&self, current: Member, candidates: &[Candidate]) -> Option<Member> {
        let parent = self.host(current).parent_pid;
        let is_parent = |candidate: &Candidate| self.pid(candidate.member) == parent;
        let only = |choice: &dyn Fn(&Candidate) -> bool| {
            let mut chosen = candidates.iter().filter(|candidate| choice(candidate));
            chosen.next().filter(|_| chosen.next().is_none()).map(|candidate| candidate.member)
        };
        only(&|candidate| self.is_halted(candidate.member))
            // A child answers its parent.
            .or_else(|| only(&|candidate| candidate.is_child))
            // A parent has both ends of the pipes that it makes for its children.
            .or_else(|| only(&|candidate| !is_parent(candidate)))
            // Children inherit the ends of each other's pipes.
            .or_else(|| only(&is_parent))
    }

    /// Whether a rank waits for the process that had started it and has ended: nobody has the other
    /// end of its pipe or socket, except ranks that inherited it from the same parent.
    fn is_orphaned(&self, current: Member, awaited: &Awaited, next: &Next) -> bool {
        let parent = self.host(current).ended_parent_pid;
        let is_sibling = |holder: &Holder| {
            let member = self.by_pid.get(&(self.node(current), holder.pid));
            member.is_some_and(|member| self.host(*member).ended_parent_pid == parent)
        };
        let is_stream = matches!(awaited.kind(), AwaitedKind::Pipe | AwaitedKind::Socket | AwaitedKind::Several);
        let is_left = matches!(next, Next::Nobody) || awaited.holders.iter().all(is_sibling);
        parent > 0 && is_stream && is_left && !awaited.name.starts_with(LISTENS)
    }

    fn waits_in_operation(&self, rank_index: usize) -> bool {
        let view = &self.world.views[rank_index];
        view.host.observed.activity == Activity::DeviceWait || view.pending().any(is_collective)
    }

    fn is_halted(&self, member: Member) -> bool {
        let host = self.host(member);
        host.stopped() || host.gone()
    }
}

/// A process that has the other end.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    member: Member,
    /// It descends from the process that waits.
    is_child: bool,
}

/// The next member of a chain.
enum Next {
    /// No other process has the other end.
    Nobody,
    /// Several are possible, or it is a process of which nothing is known.
    Unknown,
    /// This one; `is_only` if no other process has the other end.
    One { member: Member, is_only: bool },
}

/// The end of a chain.
enum End {
    Rank(usize),
    Process {
        chain: Vec<usize>,
        is_certain: bool,
        /// See [`ProcessWait::is_closed`].
        is_closed: bool,
    },
    /// The rank at the beginning: it waits for no process that is known.
    Start,
    /// The chain leads back to one of its members.
    Back,
    /// A process that waits for clients.
    AtRest,
    /// Several processes are possible, or nothing is known of the next one.
    Unknown,
}
