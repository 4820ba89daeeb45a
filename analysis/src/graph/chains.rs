//! Follows what a process waits for, from process to process, to the end of the chain.

use std::collections::{BTreeSet, HashMap, HashSet};

use xpu_timer_proto::{
    LISTENS, REPLIES,
    server::{Awaited, AwaitedKind, Holder},
    v1::Operation,
};

use crate::{
    facts,
    stacks::{self, Host, Polling, ProcessState},
    verdict::Activity,
    world::{ProcessView, World, is_collective},
};

/// Maximum number of times that one chain branches.
const MAX_BRANCHES: usize = 3;

/// A member of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Member {
    Rank(usize),
    Process(usize),
}

impl Member {
    fn process(self) -> Option<usize> {
        match self {
            Member::Process(index) => Some(index),
            Member::Rank(_) => None,
        }
    }
}

/// The end of a chain.
#[derive(Debug)]
pub(super) enum End {
    /// A rank, whose own wait is a part of the graph.
    Rank(usize),
    /// The last process of the chain.
    Process(Chain),
    /// The processes of the chain from this position on wait for each other. So does the rank at
    /// the beginning, if the position is `None`.
    Cycle(Chain, Option<usize>),
    /// The rank at the beginning: it waits for no process that is known.
    Start,
    /// The chain leads back to a member of the chain that branched.
    Back,
    /// A process that waits for clients.
    AtRest(Member),
    /// Several processes are possible, or nothing is known of the next one.
    Unknown,
}

/// Processes that wait one for the next.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain {
    /// As indices; the process that the rank waits for comes first.
    pub processes: Vec<usize>,
    /// At each step only one process has the other end.
    pub is_certain: bool,
    /// Nothing outside of the chain wakes the process at its end.
    pub is_closed: bool,
    /// The chain passes through a process that waits for clients too.
    pub is_served: bool,
    /// The end holds up work that has begun: a member waits for the end of its child process, for
    /// the result of a task of its pool, or for a lock that only the end can hold.
    pub is_due: bool,
    /// The member before the end expects a reply from it.
    owes_reply: bool,
    /// The last process of the chain that holds a lock for which the member before it waits.
    locker: Option<usize>,
    /// The chain continues with this rank, which waits in an operation for the rank at the
    /// beginning.
    pub through: Option<usize>,
}

impl Chain {
    /// The process that keeps a lock from the rank at the beginning, and waits for that rank itself
    /// through a rank in an operation. The other members of such a cycle cannot release the lock.
    pub(super) fn keeps_lock(&self) -> Option<(usize, usize)> {
        self.locker.zip(self.through)
    }
}

/// What all processes wait for.
pub(super) struct Chains<'w, 'a> {
    pub world: &'w World<'a>,
    by_pid: HashMap<(&'w str, i32), Member>,
    /// By the local and the remote address.
    by_connection: HashMap<(&'w str, &'w str), Vec<Member>>,
    /// The known processes from which ranks descend. They wait for the ends of these all the time.
    launchers: HashSet<Member>,
}

impl<'w, 'a> Chains<'w, 'a> {
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
        Chains { world, by_pid, by_connection, launchers }
    }

    /// The end of the chain that begins at a rank. The standard input of a rank comes from a
    /// person, or from a program that replaces one, unless that program waits for work itself.
    pub(super) fn of_rank(&self, rank_index: usize) -> End {
        let member = Member::Rank(rank_index);
        let is_held = |one: &Awaited| one.holders.iter().any(|holder| holder.pid != self.pid(member));
        let awaited = self.host(member).awaited.as_ref();
        let is_typed = awaited.is_some_and(|one| one.kind() == AwaitedKind::File && is_held(one));
        match self.follow(member, &HashSet::new(), MAX_BRANCHES) {
            End::Process(chain) if is_typed && !chain.is_due => End::Unknown,
            End::Process(chain) if self.ends_at_rest(&chain) => {
                End::AtRest(chain.processes.last().map_or(member, |index| Member::Process(*index)))
            }
            End::Rank(_) | End::Cycle(..) if is_typed => End::Unknown,
            end => end,
        }
    }
}

/// Facts about a member.
impl Chains<'_, '_> {
    pub(super) fn host(&self, member: Member) -> &Host {
        host(self.world, member)
    }

    /// What holds the process of a member.
    pub(super) fn state(&self, member: Member) -> ProcessState {
        let holder = match member {
            Member::Rank(index) => self.world.views[index].evidence.and_then(facts::gil_holder),
            Member::Process(index) => self.world.processes[index].gil_holder.clone(),
        };
        ProcessState::of(self.host(member), holder.as_ref())
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

    fn waits_in_operation(&self, rank_index: usize) -> bool {
        let view = &self.world.views[rank_index];
        view.host.observed.activity == Activity::DeviceWait || view.pending().any(is_collective)
    }

    /// Whether a rank waits in a collective that another rank, which is a member too, is not in.
    fn waits_in_operation_for(&self, rank_index: usize, other: usize) -> bool {
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

    /// Whether the last process of a chain waits for its next request or task, and nothing shows
    /// that it owes the end of an earlier one.
    fn ends_at_rest(&self, chain: &Chain) -> bool {
        let last = chain.processes.last().map(|index| Member::Process(*index));
        !chain.is_due && last.is_some_and(|last| self.host(last).rests && !self.state(last).cannot_continue())
    }

    fn is_halted(&self, member: Member) -> bool {
        let host = self.host(member);
        host.stopped() || host.gone()
    }
}

/// The search.
impl Chains<'_, '_> {
    /// The end of the chain that begins at `start`. `before` has the members that lead to `start`.
    /// The chain may branch at most `branches` times.
    fn follow(&self, start: Member, before: &HashSet<Member>, branches: usize) -> End {
        let mut current = start;
        if matches!(start, Member::Rank(index) if self.world.views[index].halted()) || self.in_store(start) {
            return End::Start;
        }
        let mut seen = before.clone();
        seen.insert(start);
        let mut chain = Chain { is_certain: true, ..Chain::default() };
        if let Member::Process(index) = start {
            chain.processes.push(index);
        }
        // The only other process that shares a lock for which a member waits.
        let mut held = None;
        loop {
            let host = self.host(current);
            let is_first = current == start && before.is_empty();
            let awaited = host.awaited.as_ref().filter(|_| !host.halted() && host.same_in_both);
            let Some(awaited) = awaited else {
                chain.is_due |= held == Some(current);
                return self.without_object(current, chain, &seen, branches);
            };
            let next = match self.next(current, awaited) {
                next if is_first && self.is_orphaned(current, awaited, &next) => {
                    chain.is_certain = false;
                    let parent = (self.node(current), self.host(current).ended_parent_pid);
                    self.by_pid.get(&parent).copied().unwrap_or(current)
                }
                Next::Nobody if !is_first && awaited.name.starts_with(LISTENS) => {
                    let candidates = self.of_threads(current);
                    let locked = self.has_locked_requests(current).then(|| chain.clone());
                    let lost = self.host(current).lost_request.is_some().then(|| chain.clone());
                    let any = self.through_any(current, chain, &candidates, awaited, (&seen, branches));
                    return any.unwrap_or(End::AtRest(current)).or_lost(lost).or_served(locked);
                }
                Next::Unknown => return End::Unknown,
                Next::Nobody => return self.through_threads(current, chain, &seen, branches),
                Next::One(member) if !awaited.name.starts_with(LISTENS) => {
                    held = self.host(current).wants_exclusive_lock().then_some(member);
                    member
                }
                next => {
                    let candidates = next.candidates();
                    match self.through_any(current, chain, &candidates, awaited, (&seen, branches)) {
                        Ok(end) => return end,
                        Err((so_far, member)) => {
                            chain = Chain { is_certain: false, ..so_far };
                            member
                        }
                    }
                }
            };
            if !seen.insert(next) {
                return self.back(next, chain, before, &seen);
            }
            chain.is_due |= self.waits_for_child(current) && !self.launchers.contains(&current);
            chain.owes_reply = awaited.name.starts_with(REPLIES);
            match next {
                // A server that waits for the answer of a rank in a collective waits for the ranks
                // of that collective, and one of these may be the rank at the beginning.
                Member::Rank(holder) if !is_first && self.waits_in_operation(holder) => {
                    let is_cycle = matches!(start, Member::Rank(waiter)
                        if before.is_empty() && self.waits_in_operation_for(holder, waiter));
                    let chain = Chain { through: is_cycle.then_some(holder), ..chain };
                    return if chain.keeps_lock().is_some() { End::Cycle(chain, None) } else { End::Unknown };
                }
                Member::Rank(holder) => return End::Rank(holder),
                // It may be a rank of another job, unless it is a child.
                Member::Process(_) if self.in_operation_of_its_own(next) && !self.waits_for_child(current) => {
                    return End::Unknown;
                }
                Member::Process(index) => {
                    let wants_lock = awaited.kind() == AwaitedKind::Lock || held == Some(next);
                    chain.locker = wants_lock.then_some(index).or(chain.locker);
                    chain.processes.push(index);
                }
            }
            current = next;
        }
    }

    /// The end of a chain at a process whose main thread waits for nothing that the kernel shows.
    /// One that polls the memory that it shares looks as if it slept.
    fn without_object(&self, current: Member, mut chain: Chain, seen: &HashSet<Member>, branches: usize) -> End {
        let host = self.host(current);
        let polls = host.observed.activity == Activity::Sleep && host.same_in_both;
        match self.ended_sharers(current)[..] {
            [only] if polls => {
                chain.processes.push(only);
                End::Process(Chain { is_certain: false, ..chain })
            }
            _ => match self.through_memory(current, seen, branches) {
                Some(end) => end.after(chain),
                None => self.through_threads(current, chain, seen, branches),
            },
        }
    }

    /// The end of a chain at a process that polls memory: of the processes that share the memory
    /// with it, or with others that poll too, the only one that is stuck. A process that sleeps in
    /// a loop for another reason looks the same. So one that may be at rest is no end: it waits for
    /// a process that polls, or through another thread. In a job in which nobody waits in an
    /// operation, the end must be unable to continue, unless a library is known to poll.
    fn through_memory(&self, current: Member, seen: &HashSet<Member>, branches: usize) -> Option<End> {
        let in_ring = self.polling(current)?.in_ring;
        let mut pollers = vec![current];
        let mut reached_from: HashMap<Member, Member> = HashMap::new();
        let mut others = Vec::new();
        for index in 0.. {
            let Some(poller) = pollers.get(index).copied() else { break };
            for member in self.sharers(poller) {
                let is_new = !seen.contains(&member) && !pollers.contains(&member) && !others.contains(&member);
                if is_new {
                    reached_from.insert(member, poller);
                    let polls = self.polling(member).is_some();
                    if polls { pollers.push(member) } else { others.push(member) }
                }
            }
        }
        let inside: HashSet<Member> = seen.iter().chain(&pollers).copied().collect();
        let candidates: Vec<Candidate> = others.into_iter().map(Candidate::of).collect();
        let mut reached = self.branches(&candidates, &inside, branches);
        let is_due = in_ring || (0..self.world.views.len()).any(|rank_index| self.waits_in_operation(rank_index));
        reached.ends.retain(|(member, state, _)| {
            state.cannot_continue() || is_due && state.is_stuck() && !self.may_rest(*member, state, &inside)
        });
        let behind = match reached.likely_end(|_| true)? {
            End::Process(behind) => behind,
            end => return Some(end),
        };
        let first = behind.processes.first().map(|index| Member::Process(*index));
        let way =
            std::iter::successors(first, |member| reached_from.get(member).copied().filter(|one| *one != current));
        let mut processes: Vec<usize> = way.skip(1).filter_map(Member::process).collect();
        processes.reverse();
        processes.extend(&behind.processes);
        Some(End::Process(Chain { processes, ..behind }))
    }

    /// The memory that a member polls. A rank in an operation polls for that.
    fn polling(&self, member: Member) -> Option<&Polling> {
        let host = self.host(member);
        let in_operation = matches!(member, Member::Rank(index) if self.waits_in_operation(index));
        host.polling.as_ref().filter(|_| !host.halted() && !in_operation && host.awaited.is_none())
    }

    /// The known processes that share the memory which a member polls, without ranks in an
    /// operation and launchers: these wait for the ranks all the time.
    fn sharers(&self, member: Member) -> Vec<Member> {
        let holders = self.polling(member).map_or(&[][..], |polling| &polling.sharers);
        let known = holders.iter().filter_map(|holder| self.by_pid.get(&(self.node(member), holder.pid)).copied());
        let waits = |member: Member| matches!(member, Member::Rank(index) if self.waits_in_operation(index));
        known.filter(|member| !waits(*member) && !self.waits_for_its_ranks(*member)).collect()
    }

    /// Whether a process in this state, which is stuck, may only be at rest: it waits for one of
    /// `members`, for another process that is not known, for some time, or through another thread.
    fn may_rest(&self, member: Member, state: &ProcessState, members: &HashSet<Member>) -> bool {
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

    /// The end of a chain that leads to a member for the second time.
    fn back(&self, member: Member, mut chain: Chain, before: &HashSet<Member>, seen: &HashSet<Member>) -> End {
        if !before.is_empty() {
            return if before.contains(&member) { End::Back } else { End::Unknown };
        }
        let from = match member {
            Member::Rank(_) => None,
            Member::Process(index) => chain.processes.iter().position(|one| *one == index),
        };
        let members = chain.processes[from.unwrap_or(0)..].iter().map(|index| Member::Process(*index));
        let members: Vec<Member> = members.chain(from.is_none().then_some(member)).collect();
        // The kernel of a notebook and its front end look like this between two cells: the front
        // end has started it, or waits for anything. A client that waits for one answer does not.
        let expects_answer = members.iter().all(|member| self.host(*member).reads_one_stream());
        let has_front_end = members.iter().any(|member| self.launchers.contains(member));
        let may_rest = self.world.views.len() == 1
            && members.iter().all(|member| self.waits_for_message(*member))
            && (has_front_end || !expects_answer);
        chain.is_closed = !may_rest && members.iter().all(|member| self.is_closed(*member, seen));
        End::Cycle(chain, from)
    }

    /// The end of a chain at a process whose main thread waits for no other process. It may wait
    /// for another thread of its process, which waits for another process: for a reply that a
    /// reader thread puts into a queue.
    fn through_threads(&self, current: Member, mut chain: Chain, seen: &HashSet<Member>, branches: usize) -> End {
        let host = self.host(current);
        let in_operation = matches!(current, Member::Rank(index) if self.waits_in_operation(index));
        let is_inside = !host.halted() && host.same_in_both && !in_operation && self.may_wait_for_threads(current);
        let waits = if is_inside { &host.thread_waits[..] } else { &[] };
        let candidates = if is_inside { self.of_threads(current) } else { Vec::new() };
        if !chain.processes.is_empty() && self.keeps_locks_of_clients(current) {
            return self.through_clients(chain, &candidates, seen, branches);
        }
        let reached = self.branches(&candidates, seen, branches);
        let in_queue = matches!(host.observed.activity, Activity::Lock | Activity::DataLoader);
        let only = in_queue && matches!((&reached.ends[..], waits), ([_], [wait]) if wait.own);
        // Of a process that sleeps or computes, nothing shows that the main thread waits for it.
        let inside = reached.inside.clone();
        match reached.likely_end(|state| only || host.awaits_result || state.is_stuck()) {
            Some(end) => end.after(Chain { is_due: chain.is_due || host.awaits_result, ..chain }),
            None if chain.processes.is_empty() => End::Start,
            None if candidates.iter().any(|one| seen.contains(&one.member) && self.waits_for_child(one.member)) => {
                let parent = candidates.iter().map(|one| one.member).find(|member| self.waits_for_child(*member));
                self.back(parent.unwrap_or(current), chain, &HashSet::new(), seen)
            }
            None => {
                let waits_inside = matches!(self.state(current), ProcessState::WaitsForLock)
                    || host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Lock)
                    || host.waits_for_itself();
                chain.is_closed = waits_inside && self.is_closed(current, &inside)
                    || host.stands_in_storage()
                    || host.lost_request.is_some();
                End::Process(chain)
            }
        }
    }

    /// The end of a chain at a server that keeps the locks and queues of its clients: the only
    /// other client may have the lock, or should fill the queue. If clients wait for a process that
    /// is stuck, that one is the end.
    fn through_clients(
        &self,
        mut chain: Chain,
        candidates: &[Candidate],
        seen: &HashSet<Member>,
        branches: usize,
    ) -> End {
        let waits = |member: Member| matches!(member, Member::Rank(index) if self.waits_in_operation(index));
        let is_other = |one: &&Candidate| {
            !seen.contains(&one.member) && !waits(one.member) && !self.waits_for_its_ranks(one.member)
        };
        let clients: Vec<Candidate> = candidates.iter().filter(is_other).copied().collect();
        chain = Chain { is_certain: false, is_served: true, ..chain };
        match (self.branches(&clients, seen, branches).likely_end(ProcessState::is_stuck), &clients[..]) {
            (Some(end), _) => end.after(chain),
            (None, [Candidate { member: Member::Rank(index), .. }]) => End::Rank(*index),
            (None, [Candidate { member: Member::Process(index), .. }]) => {
                chain.processes.push(*index);
                End::Process(chain)
            }
            (None, _) => End::Unknown,
        }
    }

    /// Whether a process serves clients in threads of its own, runs no code of the program, and
    /// waits for a lock: a manager of Python's multiprocessing. Its clients hold its locks.
    fn keeps_locks_of_clients(&self, member: Member) -> bool {
        matches!(self.state(member), ProcessState::WaitsForLock) && self.host(member).only_serves()
    }

    /// The processes that the other threads of a process wait for.
    fn of_threads(&self, member: Member) -> Vec<Candidate> {
        let waits = self.host(member).thread_waits.iter();
        waits.flat_map(|wait| self.next(member, &wait.awaited).candidates()).collect()
    }

    /// The processes that were killed or failed and had memory in common with a member. A lock in
    /// that memory stays locked, and a counter in it is never written again.
    fn ended_sharers(&self, member: Member) -> Vec<usize> {
        let is_sharer = |process: &ProcessView| {
            process.node == self.node(member) && process.shared_memory_with.contains(&self.pid(member))
        };
        let processes = self.world.processes.iter().enumerate();
        processes.filter(|(_, process)| is_sharer(process)).map(|(index, _)| index).collect()
    }

    /// Whether a process that is not a rank of this job waits in an operation.
    fn in_operation_of_its_own(&self, member: Member) -> bool {
        let host = self.host(member);
        let waits = matches!(host.observed.activity, Activity::DeviceWait | Activity::CommInit);
        waits && !self.state(member).cannot_continue()
    }

    /// Whether a member waits in the store of its job. It waits for whoever sets its key, and not
    /// for the process that has the store, unless that cannot answer.
    fn in_store(&self, member: Member) -> bool {
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
    fn has_locked_requests(&self, member: Member) -> bool {
        self.host(member).has_locked_threads && self.of_threads(member).is_empty()
    }

    /// Whether the main thread of a process waits for the end of a child.
    pub(super) fn waits_for_child(&self, member: Member) -> bool {
        let awaited = self.host(member).awaited.as_ref();
        awaited.is_some_and(|awaited| awaited.kind() == AwaitedKind::Child)
    }

    /// Whether a process that is not a rank has started ranks, and its main thread waits for their
    /// ends: it shares the locks that it has made for them, and holds none.
    fn waits_for_its_ranks(&self, member: Member) -> bool {
        let is_launcher = matches!(member, Member::Process(_)) && self.launchers.contains(&member);
        is_launcher && self.host(member).waits_for_children()
    }

    /// Whether the main thread of a process may wait for another thread: it waits for no process,
    /// and not for its device.
    fn may_wait_for_threads(&self, member: Member) -> bool {
        let host = self.host(member);
        let is_inner = |awaited: &Awaited| awaited.holders.iter().all(|holder| holder.pid == self.pid(member));
        let by_signal = host.location.native.as_deref().is_some_and(stacks::is_signal_wait);
        !matches!(host.observed.activity, Activity::DeviceWait | Activity::CommInit)
            && !by_signal
            && host.awaited.as_ref().is_none_or(is_inner)
    }

    /// The end of a chain at a process that waits for any of several processes, or the next member
    /// of the chain. If a process waits for new clients too, one of its clients counts only if it
    /// is stuck.
    fn through_any(
        &self,
        current: Member,
        mut chain: Chain,
        candidates: &[Candidate],
        awaited: &Awaited,
        (seen, branches): (&HashSet<Member>, usize),
    ) -> Result<End, (Chain, Member)> {
        let serves = awaited.name.starts_with(LISTENS);
        let reached = self.branches(candidates, seen, branches);
        let agree = !serves && !reached.is_open && reached.agree();
        let leads_back = reached.ends.is_empty() && !reached.is_open;
        let inside = reached.inside.clone();
        if let Some(end) = reached.likely_end(|state| agree || state.is_stuck()) {
            chain.is_served |= serves;
            chain.is_due |= self.is_held(current, &end, candidates);
            return Ok(end.after(chain));
        }
        let is_process = !chain.processes.is_empty();
        if serves {
            return Ok(match is_process {
                true if chain.owes_reply => End::Process(Chain { is_served: true, ..chain }),
                true => End::AtRest(current),
                false => End::Start,
            });
        }
        if leads_back {
            // All of them wait for this process.
            chain.is_closed = self.is_closed(current, &inside);
            return Ok(if is_process { End::Process(chain) } else { End::Start });
        }
        match self.likely(current, candidates) {
            Some(member) => Err((chain, member)),
            None => Ok(End::Unknown),
        }
    }

    /// Whether a process waits for a lock that only the last process of a chain can hold: all other
    /// processes that share the lock wait for locks or for the end of a child themselves.
    fn is_held(&self, current: Member, end: &End, candidates: &[Candidate]) -> bool {
        let End::Process(chain) = end else { return false };
        let last = chain.processes.last().map(|index| Member::Process(*index));
        let waits = |member: Member| {
            let awaited = self.host(member).awaited.as_ref().map(Awaited::kind);
            matches!(awaited, Some(AwaitedKind::Semaphore | AwaitedKind::SharedMemory | AwaitedKind::Child))
        };
        self.host(current).wants_exclusive_lock()
            && candidates.iter().any(|one| Some(one.member) == last)
            && candidates.iter().all(|one| Some(one.member) == last || waits(one.member))
    }

    /// Follows each candidate that the chain has not met.
    fn branches(&self, candidates: &[Candidate], seen: &HashSet<Member>, branches: usize) -> Branches {
        let mut reached = Branches { inside: seen.clone(), ..Branches::default() };
        let members: BTreeSet<Member> = candidates.iter().map(|candidate| candidate.member).collect();
        for member in members.into_iter().filter(|member| !seen.contains(member)) {
            if branches == 0 {
                reached.is_open = true;
                break;
            }
            let end = match self.follow(member, seen, branches - 1) {
                End::Start => match member {
                    Member::Rank(index) => End::Rank(index),
                    Member::Process(_) => continue,
                },
                end => end,
            };
            match end {
                End::Back => drop(reached.inside.insert(member)),
                End::Process(ref chain) if self.ends_at_rest(chain) => {}
                End::Rank(index) => reached.ends.push((Member::Rank(index), self.state(Member::Rank(index)), end)),
                End::Process(ref chain) => {
                    let last = chain.processes.last().copied().unwrap_or_default();
                    reached.ends.push((Member::Process(last), self.state(Member::Process(last)), end));
                }
                End::Cycle(..) | End::Start | End::AtRest(_) | End::Unknown => reached.is_open = true,
            }
        }
        reached
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
    fn next(&self, current: Member, awaited: &Awaited) -> Next {
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
struct Candidate {
    member: Member,
    /// It descends from the process that waits.
    is_child: bool,
    /// It has the end of the process that waits open as well.
    has_both_ends: bool,
}

impl Candidate {
    fn of(member: Member) -> Self {
        Candidate { member, is_child: false, has_both_ends: false }
    }
}

/// The next member of a chain.
enum Next {
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
    fn candidates(&self) -> Vec<Candidate> {
        match self {
            Next::Nobody | Next::Unknown => Vec::new(),
            Next::One(member) => vec![Candidate::of(*member)],
            Next::Any(candidates) => candidates.clone(),
        }
    }
}

/// Where the branches of a chain end.
#[derive(Default)]
struct Branches {
    /// The last member of each branch, its state, and the end.
    ends: Vec<(Member, ProcessState, End)>,
    /// The end of a branch is unknown, or waits for somebody outside.
    is_open: bool,
    /// The members of the chain, and the first members of the branches that lead back to it.
    inside: HashSet<Member>,
}

impl Branches {
    /// Whether all branches have the same end.
    fn agree(&self) -> bool {
        let mut members = self.ends.iter().map(|(member, ..)| member);
        let first = members.next();
        first.is_some() && members.all(|member| Some(member) == first)
    }

    /// The only acceptable end; of several, the only one that cannot continue.
    fn likely_end(mut self, accept: impl Fn(&ProcessState) -> bool) -> Option<End> {
        self.ends.retain(|(_, state, _)| accept(state));
        if !self.agree() {
            self.ends.retain(|(_, state, _)| state.cannot_continue());
        }
        if !self.agree() {
            return None;
        }
        let is_due = self.ends.iter().any(|(.., end)| matches!(end, End::Process(chain) if chain.is_due));
        match self.ends.pop()?.2 {
            End::Process(chain) => Some(End::Process(Chain { is_due, ..chain })),
            end => Some(end),
        }
    }
}

impl End {
    /// This end, or that of the chain to a server with a request that never ends.
    fn or_lost(self, chain: Option<Chain>) -> End {
        match (self, chain) {
            (End::AtRest(_), Some(chain)) => End::Process(Chain { is_closed: true, is_certain: false, ..chain }),
            (end, _) => end,
        }
    }

    /// This end, or that of the chain to a server that is not at rest.
    fn or_served(self, chain: Option<Chain>) -> End {
        match (self, chain) {
            (End::AtRest(_), Some(chain)) => End::Process(Chain { is_served: true, is_certain: false, ..chain }),
            (end, _) => end,
        }
    }

    /// This end, reached through a chain and a branch.
    fn after(self, mut chain: Chain) -> End {
        match self {
            End::Process(behind) => {
                chain.processes.extend(behind.processes);
                chain.is_served |= behind.is_served;
                chain.is_due |= behind.is_due;
                End::Process(Chain { is_certain: false, is_closed: behind.is_closed, ..chain })
            }
            end => end,
        }
    }
}
