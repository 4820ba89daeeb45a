//! Chains of waiting through processes that are no ranks: a rank waits for an engine, which waits
//! for a server, which is stopped.

use std::collections::{HashMap, HashSet};

use xpu_timer_proto::server::{Awaited, AwaitedKind, Holder};

use super::builder::ResourceWait;
use crate::{
    stacks::Host,
    verdict::Activity,
    world::{World, is_collective},
};

/// Start of the name of an awaited socket on which a process listens: it waits for a client.
const LISTENS: &str = "anybody who connects";

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
}

impl ProcessWait {
    /// The process at the end of the chain.
    pub fn end(&self) -> usize {
        self.chain.last().copied().unwrap_or_default()
    }
}

/// A member of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    let mut by_connection: HashMap<(&str, &str), Vec<Member>> = HashMap::new();
    let ranks = world.views.iter().enumerate().map(|(index, view)| (Member::Rank(index), &view.host));
    let others = world.processes.iter().enumerate().map(|(index, process)| (Member::Process(index), &process.host));
    for (member, host) in ranks.chain(others) {
        for connection in &host.connections {
            by_connection.entry((&connection.local, &connection.remote)).or_default().push(member);
        }
    }
    let chains = Chains { world, by_pid, by_connection };
    let (mut of_ranks, mut of_processes, mut at_rest) = (Vec::new(), Vec::new(), Vec::new());
    for waiter in 0..world.views.len() {
        match chains.follow(waiter) {
            End::Rank(holder) => of_ranks.push(ResourceWait { waiter, holder }),
            End::Process { chain, is_certain } => {
                let is_own = chains.descend_from(waiter, &chain);
                of_processes.push(ProcessWait { waiter, chain, is_certain, is_own });
            }
            End::AtRest => at_rest.push(waiter),
            End::Unknown => {}
        }
    }
    Waits { of_ranks, of_processes, at_rest }
}

struct Chains<'w, 'a> {
    world: &'w World<'a>,
    by_pid: HashMap<(&'w str, i32), Member>,
    /// By the local and the remote address.
    by_connection: HashMap<(&'w str, &'w str), Vec<Member>>,
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

    /// The end of the chain that begins at a rank. It is unknown if the rank waits for no process
    /// that is known, if several are possible, or if the chain leads back.
    fn follow(&self, waiter: usize) -> End {
        let mut current = Member::Rank(waiter);
        if self.world.views[waiter].halted() {
            return End::Unknown;
        }
        let mut seen = HashSet::from([current]);
        let (mut chain, mut is_certain) = (Vec::new(), true);
        loop {
            let host = self.host(current);
            let awaited = host.awaited.as_ref().filter(|_| !host.halted() && host.same_in_both);
            let next = match awaited.map(|awaited| (awaited, self.next(current, awaited))) {
                Some((awaited, next)) if chain.is_empty() && self.is_orphaned(current, awaited, &next) => {
                    is_certain = false;
                    let parent = (self.node(current), self.host(current).ended_parent_pid);
                    self.by_pid.get(&parent).copied().unwrap_or(current)
                }
                Some((awaited, _)) if awaited.name.starts_with(LISTENS) && !chain.is_empty() => return End::AtRest,
                Some((_, Next::Unknown)) => return End::Unknown,
                Some((_, Next::One { member, is_only })) => {
                    is_certain &= is_only;
                    member
                }
                Some((_, Next::Nobody)) | None if chain.is_empty() => return End::Unknown,
                Some((_, Next::Nobody)) | None => return End::Process { chain, is_certain },
            };
            if !seen.insert(next) {
                return End::Unknown;
            }
            match next {
                // A server that waits for the answer of a rank in a collective waits for the ranks
                // of that collective, and one of these may be the rank at the beginning.
                Member::Rank(holder) if !chain.is_empty() && self.waits_in_operation(holder) => return End::Unknown,
                Member::Rank(holder) => return End::Rank(holder),
                Member::Process(index) => chain.push(index),
            }
            current = next;
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
            return self.on_other_node(current, awaited);
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

    /// The member on another node that has the other end of the awaited TCP connection.
    fn on_other_node(&self, current: Member, awaited: &Awaited) -> Next {
        let own = self.host(current).connections.iter().filter(|connection| connection.remote == awaited.name);
        let peers = own.filter_map(|connection| self.by_connection.get(&(&*connection.remote, &*connection.local)));
        let peers: HashSet<Member> = peers.flatten().copied().filter(|member| *member != current).collect();
        let mut peers = peers.into_iter();
        match (peers.next(), peers.next()) {
            (None, _) => Next::Nobody,
            (Some(member), None) => Next::One { member, is_only: true },
            // Processes inherit connections.
            (Some(_), Some(_)) => Next::Unknown,
        }
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
    },
    /// A process that waits for clients.
    AtRest,
    Unknown,
}
