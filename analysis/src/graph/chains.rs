//! Follows what a process waits for, from process to process, to the end of the chain.

use std::collections::{BTreeSet, HashMap, HashSet};

use xpu_timer_proto::{
    LISTENS, REPLIES,
    server::{Awaited, AwaitedKind},
};

use super::members::{Candidate, Member, Members, Next};
use crate::{stacks::ProcessState, verdict::Activity};

/// Maximum number of times that one chain branches.
const MAX_BRANCHES: usize = 3;

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
    /// Several processes are possible, or the next one is unknown.
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

impl Members<'_, '_> {
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

    /// Whether the last process of a chain waits for its next request or task, and nothing shows
    /// that it owes the end of an earlier one.
    fn ends_at_rest(&self, chain: &Chain) -> bool {
        let last = chain.processes.last().map(|index| Member::Process(*index));
        !chain.is_due && last.is_some_and(|last| self.host(last).rests && !self.state(last).cannot_continue())
    }

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
    /// a loop for another reason looks the same. So a process that may be at rest is not an end: it
    /// waits for a process that polls, or through another thread. In a job in which nobody waits in
    /// an operation, the end must be unable to continue, unless a library is known to poll.
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
        reached.retain_stuck(|member, state| is_due && state.is_stuck() && !self.may_rest(member, state, &inside));
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
        // Nothing shows that the main thread waits for a process that sleeps or computes.
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
        let mut reached = self.branches(candidates, seen, branches);
        if serves {
            // A client that may be at rest does not keep the server from its other clients.
            reached.retain_stuck(|member, state| !self.may_rest(member, state, seen));
        }
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
    /// Keeps the ends that cannot continue, and the others that are `accepted`.
    fn retain_stuck(&mut self, accepted: impl Fn(Member, &ProcessState) -> bool) {
        self.ends.retain(|(member, state, _)| state.cannot_continue() || accepted(*member, state));
    }

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
