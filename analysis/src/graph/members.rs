//! The members of chains: ranks and other processes, what they wait for, and who has the other end.

use std::collections::{HashMap, HashSet};

use xpu_timer_proto::{
    LISTENS,
    server::{Awaited, AwaitedKind, Holder},
    v1::Operation,
};

use crate::{
    facts,
    stacks::{self, Host, Polling, ProcessState},
    verdict::Activity,
    world::{ProcessView, World, is_collective},
};

/// A member of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Member {
    Rank(usize),
    Process(usize),
}

impl Member {
    pub(super) fn process(self) -> Option<usize> {
        match self {
            Member::Process(index) => Some(index),
            Member::Rank(_) => None,
        }
    }
}

/// The ranks and the other processes of a capture, and what each of them waits for.
pub(super) struct Members<'w, 'a> {
    pub world: &'w World<'a>,
    pub by_pid: HashMap<(&'w str, i32), Member>,
    /// By the local and the remote address.
    by_connection: HashMap<(&'w str, &'w str), Vec<Member>>,
    /// The known processes from which ranks descend. They wait for the ends of these all the time.
    pub launchers: HashSet<Member>,
}

impl<'w, 'a> Members<'w, 'a> {
    /// A process is identified by its node and pid.
    pub(super) fn new(world: &'w World<'a>) -> Self {
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
        let mut launchers = HashSet::new();
        for view in &world.views {
            let mut above = Some((view.node().unwrap_or_default(), view.host.parent_pid));
            while let Some(member) = above.and_then(|id| by_pid.get(&id)).filter(|member| launchers.insert(**member)) {
                let host = host(world, *member);
                above = above.map(|(node, _)| (node, host.parent_pid));
            }
        }
        Members { world, by_pid, by_connection, launchers }
    }
}

/// Facts about a member.
impl Members<'_, '_> {
    pub(super) fn host(&self, member: Member) -> &Host {
        host(self.world, member)
    }

    /// The state that holds the process of a member.
    pub(super) fn state(&self, member: Member) -> ProcessState {
        let holder = match member {
            Member::Rank(index) => self.world.views[index].evidence.and_then(facts::gil_holder),
            Member::Process(index) => self.world.processes[index].gil_holder.clone(),
        };
        ProcessState::of(self.host(member), holder.as_ref())
    }

    pub(super) fn node(&self, member: Member) -> &str {
        match member {
            Member::Rank(index) => self.world.views[index].node().unwrap_or_default(),
            Member::Process(index) => &self.world.processes[index].node,
        }
    }

    pub(super) fn pid(&self, member: Member) -> i32 {
        match member {
            Member::Rank(index) => self.world.views[index].pid().unwrap_or(0),
            Member::Process(index) => self.world.processes[index].host.pid,
        }
    }

    pub(super) fn waits_in_operation(&self, rank_index: usize) -> bool {
        let view = &self.world.views[rank_index];
        view.host.observed.activity == Activity::DeviceWait || view.pending().any(is_collective)
    }

    /// Whether a rank waits in a collective that another rank, which is a member too, is not in.
    pub(super) fn waits_in_operation_for(&self, rank_index: usize, other: usize) -> bool {
        let [view, other] = [rank_index, other].map(|index| &self.world.views[index]);
        let is_member =
            |id: u64| other.flight.is_some_and(|flight| flight.communicators.iter().any(|one| one.id == id));
        let is_inside = |id: u64, seq: u64| other.pending().any(|one| (one.communicator, one.seq) == (id, seq));
        let awaits = |operation: &Operation| {
            let (id, seq) = (operation.communicator, operation.seq);
            is_collective(operation) && is_member(id) && !is_inside(id, seq)
        };
        view.pending().any(awaits)
    }

    pub(super) fn is_halted(&self, member: Member) -> bool {
        let host = self.host(member);
        host.stopped() || host.gone()
    }

    /// The memory that a member polls. A rank in an operation polls for that.
    pub(super) fn polling(&self, member: Member) -> Option<&Polling> {
        let host = self.host(member);
        let in_operation = matches!(member, Member::Rank(index) if self.waits_in_operation(index));
        host.polling.as_ref().filter(|_| !host.halted() && !in_operation && host.awaited.is_none())
    }

    /// The known processes that share the memory which a member polls, without ranks in an
    /// operation and launchers: these wait for the ranks all the time.
    pub(super) fn sharers(&self, member: Member) -> Vec<Member> {
        let holders = self.polling(member).map_or(&[][..], |polling| &polling.sharers);
        let known = holders.iter().filter_map(|holder| self.by_pid.get(&(self.node(member), holder.pid)).copied());
        let waits = |member: Member| matches!(member, Member::Rank(index) if self.waits_in_operation(index));
        known.filter(|member| !waits(*member) && !self.waits_for_its_ranks(*member)).collect()
    }

    /// Whether a process in this state, which is stuck, may only be at rest: it waits for one of
    /// `members`, for another process that is not known, for some time, or through another thread.
    pub(super) fn may_rest(&self, member: Member, state: &ProcessState, members: &HashSet<Member>) -> bool {
        let host = self.host(member);
        let awaited = host.awaited.as_ref();
        let next = awaited.map_or_else(Vec::new, |awaited| self.next(member, awaited).candidates());
        let is_for_others = match state {
            ProcessState::StuckInIo => awaited.is_none_or(|awaited| !awaited.name.starts_with('/')),
            ProcessState::WaitsForLock => {
                stacks::is_shared_lock(&host.observed.witness)
                    || awaited.is_some_and(|awaited| awaited.kind() != AwaitedKind::Mutex)
                    || host.timed == Some(true)
            }
            _ => false,
        };
        let in_members = next.iter().any(|one| members.contains(&one.member));
        is_for_others || in_members || !host.thread_waits.is_empty()
    }

    /// Whether a process serves clients in threads of its own, runs no code of the program, and
    /// waits for a lock: a manager of Python's multiprocessing. Its clients hold its locks.
    pub(super) fn keeps_locks_of_clients(&self, member: Member) -> bool {
        matches!(self.state(member), ProcessState::WaitsForLock) && self.host(member).only_serves()
    }

    /// The processes that the other threads of a process wait for.
    pub(super) fn of_threads(&self, member: Member) -> Vec<Candidate> {
        let waits = self.host(member).thread_waits.iter();
        waits.flat_map(|wait| self.next(member, &wait.awaited).candidates()).collect()
    }

    /// The processes that were killed or failed and had memory in common with a member. A lock in
    /// that memory stays locked, and a counter in it is never written again.
    pub(super) fn ended_sharers(&self, member: Member) -> Vec<usize> {
        let is_sharer = |process: &ProcessView| {
            process.node == self.node(member) && process.shared_memory_with.contains(&self.pid(member))
        };
        let processes = self.world.processes.iter().enumerate();
        processes.filter(|(_, process)| is_sharer(process)).map(|(index, _)| index).collect()
    }

    /// Whether a process that is not a rank of this job waits in an operation.
    pub(super) fn in_operation_of_its_own(&self, member: Member) -> bool {
        let host = self.host(member);
        let waits = matches!(host.observed.activity, Activity::DeviceWait | Activity::CommInit);
        waits && !self.state(member).cannot_continue()
    }

    /// Whether a member waits in the store of its job. It waits for the member that sets its key.
    /// It waits for the process that has the store only if that process cannot answer.
    pub(super) fn in_store(&self, member: Member) -> bool {
        let host = self.host(member);
        let awaited = host.awaited.as_ref().filter(|_| host.observed.activity == Activity::CommInit);
        let next = awaited.map(|awaited| self.next(member, awaited));
        matches!(next, Some(Next::One(store)) if !self.state(store).cannot_continue())
    }

    /// Whether the main thread of a process waits for a message of another one. One that sends has
    /// something to do.
    pub(super) fn waits_for_message(&self, member: Member) -> bool {
        use AwaitedKind::{Event, MessageQueue, Pipe, Several, Socket};
        let host = self.host(member);
        let is_message = |awaited: &Awaited| matches!(awaited.kind(), Pipe | Socket | Several | Event | MessageQueue);
        host.awaited.as_ref().is_some_and(is_message) && !self.host(member).is_in_send()
    }

    /// Whether a process that waits for clients has taken the requests of all its clients and
    /// cannot answer: none of its threads waits for a message, and some wait for locks at different
    /// places. If they wait at one place, or a thread waits for a message of another client, they
    /// may wait on behalf of their clients, for a key that nobody has set.
    pub(super) fn has_locked_requests(&self, member: Member) -> bool {
        self.host(member).has_locked_threads && self.of_threads(member).is_empty()
    }

    /// Whether the main thread of a process waits for the end of a child.
    pub(super) fn waits_for_child(&self, member: Member) -> bool {
        let awaited = self.host(member).awaited.as_ref();
        awaited.is_some_and(|awaited| awaited.kind() == AwaitedKind::Child)
    }

    /// Whether a process that is not a rank has started ranks, and its main thread waits for their
    /// ends: it shares the locks that it has made for them, and holds none.
    pub(super) fn waits_for_its_ranks(&self, member: Member) -> bool {
        let is_launcher = matches!(member, Member::Process(_)) && self.launchers.contains(&member);
        is_launcher && self.host(member).waits_for_children()
    }

    /// Whether the main thread of a process may wait for another thread: it waits for no process,
    /// and not for its device.
    pub(super) fn may_wait_for_threads(&self, member: Member) -> bool {
        let host = self.host(member);
        let is_inner = |awaited: &Awaited| awaited.holders.iter().all(|holder| holder.pid == self.pid(member));
        let by_signal = host.location.native.as_deref().is_some_and(stacks::is_signal_wait);
        !matches!(host.observed.activity, Activity::DeviceWait | Activity::CommInit)
            && !by_signal
            && host.awaited.as_ref().is_none_or(is_inner)
    }

    /// Whether nothing outside of `members` wakes a process: it waits without a timeout, and its
    /// threads wait only for these.
    pub(super) fn is_closed(&self, member: Member, members: &HashSet<Member>) -> bool {
        let host = self.host(member);
        let is_inside = |awaited: &Awaited| {
            let next = self.next(member, awaited);
            let candidates = next.candidates();
            // On a busy machine the other end may not have been found in time.
            let is_found = !(awaited.name.is_empty() && awaited.object.is_empty() && awaited.holders.is_empty());
            is_found
                && !awaited.name.starts_with(LISTENS)
                && !matches!(next, Next::Unknown)
                && candidates.iter().all(|candidate| members.contains(&candidate.member))
        };
        host.timed == Some(false)
            && host.moved.is_some_and(|moved| !moved.main_ran && !moved.is_progress())
            && host.thread_waits.iter().all(|wait| is_inside(&wait.awaited))
    }

    /// The process that a member waits for. Several may have the other end of a pipe or socket,
    /// because processes inherit descriptors.
    pub(super) fn next(&self, current: Member, awaited: &Awaited) -> Next {
        let own = self.pid(current);
        let in_memory = awaited.kind() == AwaitedKind::SharedMemory;
        let is_launcher = |holder: &Holder| {
            let member = self.by_pid.get(&(self.node(current), holder.pid));
            in_memory && member.is_some_and(|member| self.waits_for_its_ranks(*member))
        };
        let others: Vec<&Holder> =
            awaited.holders.iter().filter(|holder| holder.pid != own && !is_launcher(holder)).collect();
        let ended = if in_memory { self.ended_sharers(current) } else { Vec::new() };
        if others.is_empty() && ended.is_empty() {
            return self.on_other_node(current, awaited);
        }
        if awaited.kind() == AwaitedKind::Unspecified {
            return Next::Unknown;
        }
        let candidate = |holder: &&Holder| {
            let member = self.by_pid.get(&(self.node(current), holder.pid)).copied()?;
            Some(Candidate { member, is_child: holder.child, has_both_ends: holder.both_ends })
        };
        let Some(mut known) = others.iter().map(candidate).collect::<Option<Vec<Candidate>>>() else {
            return Next::Unknown;
        };
        let is_known = |index: &usize| others.iter().any(|one| one.pid == self.pid(Member::Process(*index)));
        let ended = ended.into_iter().filter(|index| !is_known(index));
        known.extend(ended.map(|index| Candidate::of(Member::Process(index))));
        let waits_alike = |member: Member| {
            let object = self.host(member).awaited.as_ref().map(|awaited| &awaited.object);
            object.is_some_and(|object| !object.is_empty() && *object == awaited.object)
        };
        if let [only] = known[..] {
            return if waits_alike(only.member) { Next::Unknown } else { Next::One(only.member) };
        }
        // A rank in a collective cannot be expected to answer.
        let waits = |member: Member| matches!(member, Member::Rank(index) if self.waits_in_operation(index));
        let (in_operation, able): (Vec<Candidate>, Vec<Candidate>) =
            known.into_iter().filter(|one| !waits_alike(one.member)).partition(|one| waits(one.member));
        // A process with both ends of a pair has made it for others: it is not the one that
        // answers.
        let others_answer =
            able.iter().all(|one| one.has_both_ends) && in_operation.iter().any(|one| !one.has_both_ends);
        if able.is_empty() || others_answer { Next::Unknown } else { Next::Any(able) }
    }

    /// The member on another node that has the other end of the awaited TCP connection.
    fn on_other_node(&self, current: Member, awaited: &Awaited) -> Next {
        let own = self.host(current).connections.iter().filter(|connection| connection.remote == awaited.name);
        let peers = own.filter_map(|connection| self.by_connection.get(&(&*connection.remote, &*connection.local)));
        let peers: HashSet<Member> = peers.flatten().copied().filter(|member| *member != current).collect();
        let mut peers = peers.into_iter();
        match (peers.next(), peers.next()) {
            (None, _) => Next::Nobody,
            (Some(member), None) => Next::One(member),
            // Processes inherit connections.
            (Some(_), Some(_)) => Next::Unknown,
        }
    }

    /// The one of several candidates that is likely to have the other end in use.
    pub(super) fn likely(&self, current: Member, candidates: &[Candidate]) -> Option<Member> {
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
    pub(super) fn is_orphaned(&self, current: Member, awaited: &Awaited, next: &Next) -> bool {
        let parent = self.host(current).ended_parent_pid;
        // The orphans of one parent have the same new parent.
        let new_parent = self.host(current).parent_pid;
        let is_sibling = |holder: &Holder| {
            let member = self.by_pid.get(&(self.node(current), holder.pid));
            member.map(|member| self.host(*member)).is_some_and(|host| {
                host.ended_parent_pid == parent || host.ended_parent_pid == 0 && host.parent_pid == new_parent
            })
        };
        let is_left = matches!(next, Next::Nobody) || awaited.holders.iter().all(is_sibling);
        parent > 0 && is_stream(awaited.kind()) && is_left && !awaited.name.starts_with(LISTENS)
    }
}

fn host<'w>(world: &'w World<'_>, member: Member) -> &'w Host {
    match member {
        Member::Rank(index) => &world.views[index].host,
        Member::Process(index) => &world.processes[index].host,
    }
}

/// Whether a wait is for the other end of a pipe or of a socket.
pub(super) fn is_stream(kind: AwaitedKind) -> bool {
    matches!(kind, AwaitedKind::Pipe | AwaitedKind::Socket | AwaitedKind::Several)
}

/// A process that has the other end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub member: Member,
    /// It descends from the process that waits.
    is_child: bool,
    /// It has the end of the process that waits open as well.
    has_both_ends: bool,
}

impl Candidate {
    pub(super) fn of(member: Member) -> Self {
        Candidate { member, is_child: false, has_both_ends: false }
    }
}

/// The next member of a chain.
pub(super) enum Next {
    /// No other process has the other end.
    Nobody,
    /// It is an unknown process, or one that waits for the same thing.
    Unknown,
    /// Only this one has the other end.
    One(Member),
    /// Each of these has the other end; others that have it cannot answer.
    Any(Vec<Candidate>),
}

impl Next {
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        match self {
            Next::Nobody | Next::Unknown => Vec::new(),
            Next::One(member) => vec![Candidate::of(*member)],
            Next::Any(candidates) => candidates.clone(),
        }
    }
}
