//! One incident, as the rules see it: the ranks, the communicators and the graph, what a rank does,
//! and how far a suspect can be trusted.

use std::collections::BTreeSet;

use xpu_timer_proto::{
    server::{Awaited, AwaitedKind, Holder},
    v1::{Evidence, Op, OpKind, Operation, TriggerKind},
};

use crate::{
    facts,
    graph::{self, Event, Graph, ProcessWait, Suspect},
    kernels,
    matching::{self, Comm, KernelGroup},
    stacks::{self, ProcessState, StuckHelper},
    verdict::{Activity, Confidence, Location},
    world::{EncodedOperations, RankView, World, is_collective, is_init},
};

/// Number of peers whose operations are searched for one that a rank waits in.
const MOST_PEERS: usize = 4;

/// Where the main thread of a rank is, to compare it with others. It has the names of files without
/// their folders, as the sentence does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position<'a> {
    /// The frame of the user's code: `file:line`, and its function.
    pub python: Option<(&'a str, Option<&'a str>)>,
    /// The frame in another file of the user that called it: `file:line`, and its function.
    pub caller: Option<(&'a str, Option<&'a str>)>,
    /// The C function.
    pub native: Option<&'a str>,
}

impl<'a> Position<'a> {
    /// The position that a location shows.
    pub(crate) fn of(location: &'a Location) -> Self {
        let python = location.python.as_deref();
        Position {
            python: python.map(|python| (stacks::base_name(python), location.python_function.as_deref())),
            caller: python.and(location.caller.as_deref()).map(|caller| match caller.split_once(" in ") {
                Some((file, function)) => (stacks::base_name(file), Some(function)),
                None => (caller, None),
            }),
            native: location.native.as_deref(),
        }
    }

    /// Whether no stack shows the position.
    pub(crate) fn is_unknown(&self) -> bool {
        self.python.is_none() && self.native.is_none()
    }
}

/// The process behind a rank that waits.
#[derive(Debug)]
pub(crate) enum Behind<'a> {
    /// The rank itself.
    Itself,
    /// The process at the end of this chain, which belongs to the rank.
    Process(&'a ProcessWait),
    /// A child process that is stuck.
    Child(StuckHelper),
}

/// One incident, as the rules see it.
pub(crate) struct Case<'a> {
    /// The evidence of the verdict.
    pub evidence: &'a Evidence,
    /// The ranks.
    pub world: World<'a>,
    /// The communicators.
    pub comms: Vec<Comm<'a>>,
    /// The wait-for graph.
    pub graph: Graph,
    /// Ranks whose stacks show that they wait, if no flight record shows anything. As indices.
    pub stack_waiters: Vec<usize>,
    /// By communicator: every member is known, from a record without losses or contradictions.
    fully_recorded: Vec<bool>,
}

impl<'a> Case<'a> {
    /// Matches the communicators and builds the wait-for graph.
    pub(crate) fn of(evidence: &'a Evidence, operations: &'a [EncodedOperations]) -> Self {
        let world = World::of(evidence, operations);
        let mut comms = matching::communicators(&world);
        kernels::add_collectives(&world, &mut comms);
        let graph = graph::build(&world, &comms);
        let fully_recorded = |comm: &Comm<'_>| {
            comm.unnamed == 0
                && comm.silent.iter().all(|rank_index| matching::certainly_absent(&world, *rank_index))
                && comm.members.iter().all(|member| !member.contradicts && !world.views[member.rank_index].lossy())
        };
        let fully_recorded = comms.iter().map(fully_recorded).collect();
        Case { evidence, world, comms, graph, stack_waiters: Vec::new(), fully_recorded }
    }

    /// The kind of the trigger that opened the incident.
    pub(crate) fn trigger_kind(&self) -> TriggerKind {
        self.evidence.trigger.as_ref().map_or(TriggerKind::Unspecified, |trigger| trigger.kind())
    }

    /// The view of a rank.
    pub(crate) fn view(&self, rank_index: usize) -> &RankView<'a> {
        &self.world.views[rank_index]
    }

    /// Where the main thread of a rank is.
    pub(crate) fn position(&self, rank_index: usize) -> Position<'_> {
        Position::of(&self.view(rank_index).host.location)
    }

    /// The rank of a suspect of the host kind.
    pub(crate) fn host_rank(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { rank_index, .. } => Some(*rank_index),
            _ => None,
        }
    }

    /// The rank of a suspect of the host or the device kind.
    pub(crate) fn suspect_rank(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { rank_index, .. } | Suspect::Device { rank_index, .. } => Some(*rank_index),
            _ => None,
        }
    }

    /// The event of a suspect in which most ranks wait. If there are several, the first.
    pub(crate) fn main_event(&self, suspect: &Suspect) -> Option<Event> {
        let events = match suspect {
            Suspect::Host { events, .. } | Suspect::Device { events, .. } | Suspect::Cycle(events) => events,
            Suspect::Complete(event) => return Some(*event),
        };
        let most = events.iter().map(|event| self.graph.waiters_of(*event).len()).max()?;
        events.iter().copied().find(|event| self.graph.waiters_of(*event).len() == most)
    }

    /// The operation of an event, from the record of one of its waiters.
    pub(crate) fn operation(&self, event: Event) -> Option<&'a Operation> {
        let of_view = |rank_index: usize| match event {
            Event::Collective { comm, seq } => {
                let id = self.comms[comm].id;
                self.view(rank_index)
                    .operations()
                    .find(|operation| is_collective(operation) && operation.communicator == id && operation.seq == seq)
            }
            Event::PointToPoint { comm, rank_index, peer, recv } => {
                let id = self.comms[comm].id;
                let op = if recv { Op::Recv } else { Op::Send };
                self.view(rank_index)
                    .pending()
                    .find(|operation| operation.communicator == id && operation.peer == peer && operation.op() == op)
            }
            Event::Init { .. } | Event::Split { .. } => {
                self.view(rank_index).pending().find(|operation| is_init(operation))
            }
        };
        match event {
            Event::PointToPoint { rank_index, .. } => of_view(rank_index),
            Event::Collective { comm, .. } => self
                .graph
                .waiters_of(event)
                .iter()
                .copied()
                .chain(self.comms[comm].members.iter().map(|member| member.rank_index))
                .find_map(of_view),
            _ => self.graph.waiters_of(event).iter().copied().find_map(of_view),
        }
    }

    /// The kernel of an event that is a collective without a host call, and its launch number.
    pub(crate) fn kernel_of(&self, event: Event) -> Option<(&KernelGroup, u64)> {
        let Event::Collective { comm, seq } = event else { return None };
        Some((self.comms[comm].kernel.as_ref()?, seq))
    }

    /// The C function in which the main thread of a rank is, without the program's own function
    /// that called it.
    fn native_function(&self, rank_index: usize) -> &str {
        let native = self.view(rank_index).host.location.native.as_deref().unwrap_or_default();
        native.split([' ', ',']).next().unwrap_or_default()
    }

    /// The main thread of a rank sleeps and has run between the samples: it polls for something.
    pub(crate) fn polls(&self, rank_index: usize) -> bool {
        let ran = |moved: stacks::Movement| moved.main_ran && !moved.is_progress();
        self.does(rank_index, Activity::Sleep) && self.view(rank_index).host.moved.is_some_and(ran)
    }

    /// The main thread of a rank polls seldom, as one that tries again after a failure.
    pub(crate) fn retries(&self, rank_index: usize) -> bool {
        self.polls(rank_index) && self.view(rank_index).host.moved.is_some_and(|moved| moved.main_ran_seldom)
    }

    /// The ranks in `views` that, by their records, wait in a call for members of an MPI window,
    /// while another rank in `views` is a member of that window and in no such call.
    pub(crate) fn ranks_waiting_in_windows(&self, views: &BTreeSet<usize>) -> BTreeSet<usize> {
        let named = |operation: &&Operation| {
            operation.kind() == OpKind::HostCall && operation.op() == Op::Unspecified && operation.communicator != 0
        };
        let index = |id: u64| self.comms.binary_search_by_key(&id, |comm| comm.id).ok();
        let windows = |rank_index: usize| {
            self.view(rank_index).pending().filter(named).filter_map(|call| index(call.communicator))
        };
        let is_elsewhere = |rank_index: usize| views.contains(&rank_index) && windows(rank_index).next().is_none();
        let mut incomplete: BTreeSet<usize> = views.iter().flat_map(|rank_index| windows(*rank_index)).collect();
        incomplete.retain(|window| self.comms[*window].members.iter().any(|member| is_elsewhere(member.rank_index)));
        views
            .iter()
            .copied()
            .filter(|rank_index| windows(*rank_index).any(|window| incomplete.contains(&window)))
            .collect()
    }

    /// The main thread of a rank waits for data from a socket, or polls for something, so another
    /// process may be the culprit.
    pub(crate) fn waits_for_peer(&self, rank_index: usize) -> bool {
        let host = &self.view(rank_index).host;
        let socket = host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Socket);
        socket || stacks::is_network(self.native_function(rank_index)) || self.polls(rank_index)
    }

    /// The main thread of a rank waits for an event, a message or a semaphore that processes share,
    /// by its C function. The object itself may be unknown.
    pub(crate) fn waits_for_message(&self, rank_index: usize) -> bool {
        stacks::is_message_wait(self.native_function(rank_index))
    }

    /// The main thread of a rank waits for a lock that it shares with other processes, and no child
    /// process of the rank is known to hold it up. It may wait for another rank.
    pub(crate) fn in_shared_lock(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let shared = self.does(rank_index, Activity::Lock) && stacks::is_shared_lock(&view.host.observed.witness);
        shared && !self.stuck_helper(rank_index).is_some_and(|helper| helper.is_stuck())
    }

    /// Whether a rank in a shared lock may wait for one of these processes, each a node and a pid:
    /// one of them shares the lock, or it is not known which do.
    pub(crate) fn may_share_lock(&self, rank_index: usize, others: &BTreeSet<(Option<&str>, i32)>) -> bool {
        let view = self.view(rank_index);
        let holders = view.host.awaited.as_ref().map_or(&[][..], |awaited| &awaited.holders);
        let shares = |holder: &Holder| others.contains(&(view.node(), holder.pid));
        !others.is_empty() && (holders.is_empty() || holders.iter().any(shares))
    }

    /// The main thread of a rank has nothing to do: it sleeps, or waits for a message, a person or
    /// a signal.
    pub(crate) fn is_idle(&self, rank_index: usize) -> bool {
        let signal = stacks::is_signal_wait(self.native_function(rank_index));
        self.does(rank_index, Activity::Sleep)
            || signal
            || self.waits_for_peer(rank_index)
            || self.at_terminal(rank_index)
    }

    /// Whether an operation of a rank has been pending for `timeout_ns`.
    ///
    /// A peer that has completed a collective shows when the last member entered it. Since then,
    /// the rank waits only for the transfer, and its record may lag behind that of the peer: a
    /// watcher writes ten times a second which operations have completed.
    pub(crate) fn has_overdue_operation(&self, rank_index: usize, timeout_ns: u64) -> bool {
        let view = self.view(rank_index);
        let is_old = |operation: &&Operation| view.age_ns(operation.entered_ns) >= timeout_ns;
        let is_stuck = |operation| self.since_released_ns(operation).is_none_or(|since_ns| since_ns >= timeout_ns);
        view.pending().filter(is_old).any(is_stuck)
    }

    /// Nanoseconds since a peer completed a collective, if no rank completes it before all have
    /// entered it. `None` if no record shows that.
    fn since_released_ns(&self, operation: &Operation) -> Option<u64> {
        if !matching::synchronizes(operation.op()) {
            return None;
        }
        let comm = self.comms.iter().find(|comm| comm.id == operation.communicator)?;
        let completed = comm.members.iter().filter(|member| member.completed >= operation.seq).take(MOST_PEERS);
        let ages = completed.filter_map(|member| {
            let peer = self.view(member.rank_index);
            let mut completed_ns = 0;
            peer.any_operation(|other| {
                let is_same = (other.communicator, other.seq) == (operation.communicator, operation.seq);
                completed_ns = if is_same { other.completed_ns } else { 0 };
                completed_ns != 0
            });
            (completed_ns != 0).then(|| peer.age_ns(completed_ns))
        });
        ages.max()
    }

    /// Whether the main thread of a rank has this activity in its last sample.
    pub(crate) fn does(&self, rank_index: usize, activity: Activity) -> bool {
        self.view(rank_index).host.observed.activity == activity
    }

    /// Whether a rank compiles, by itself or in a child process, and the compiler makes progress as
    /// far as the samples show.
    pub(crate) fn compiles(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let progresses = |moved: stacks::Movement| moved.is_progress() || moved.helper_busy || moved.library_progressed;
        self.does(rank_index, Activity::Compile) && view.host.moved.is_none_or(progresses)
            || self.compiler_child(rank_index).is_some()
    }

    /// The name of a child process of a rank that is a compiler and makes progress.
    pub(crate) fn compiler_child(&self, rank_index: usize) -> Option<String> {
        self.view(rank_index).evidence.and_then(facts::compiler_child)
    }

    /// The thread or child process of a rank that is stuck.
    pub(crate) fn stuck_helper(&self, rank_index: usize) -> Option<StuckHelper> {
        self.view(rank_index).evidence.and_then(facts::stuck_helper)
    }

    /// The stuck child process for which a rank waits: the rank waits for a loader or for a lock,
    /// or its wait is otherwise unknown.
    pub(crate) fn stuck_child(&self, rank_index: usize) -> Option<StuckHelper> {
        let waits_inside = self.does(rank_index, Activity::DataLoader) || self.does(rank_index, Activity::Lock);
        let explains = |child: &StuckHelper| child.is_dead() || waits_inside || self.awaited(rank_index).is_none();
        self.stuck_helper(rank_index).filter(|helper| helper.pid > 0).filter(explains)
    }

    /// The process behind a rank that waits: one of its own (a stuck one, or the end of the chain
    /// of its waits), or the rank itself.
    pub(crate) fn behind(&self, rank_index: usize) -> Behind<'_> {
        let wait = self.graph.process_wait(rank_index).filter(|wait| wait.is_own);
        let helper = self.stuck_child(rank_index);
        let is_helper_stuck = helper.as_ref().is_some_and(StuckHelper::is_stuck);
        match (wait, helper) {
            // A lock that stays locked may have been that of a worker that died.
            (Some(wait), Some(child)) if child.is_dead() && matches!(wait.state, ProcessState::WaitsForLock) => {
                Behind::Child(child)
            }
            (Some(wait), _)
                if wait.is_certain && wait.mutual.is_none() || wait.state.is_stuck() || !is_helper_stuck =>
            {
                Behind::Process(wait)
            }
            (_, Some(child)) => Behind::Child(child),
            _ => Behind::Itself,
        }
    }

    /// The object that the system call of a rank's main thread waits for, if it has a name or a
    /// known holder.
    pub(crate) fn awaited(&self, rank_index: usize) -> Option<&Awaited> {
        let view = self.view(rank_index);
        view.host.awaited.as_ref().filter(|awaited| {
            let has_others = awaited.holders.iter().any(|holder| Some(holder.pid) != view.pid());
            match awaited.kind() {
                AwaitedKind::File | AwaitedKind::Lock | AwaitedKind::Child => true,
                // Only a mutex of glibc has its owner where the capture reads it.
                AwaitedKind::Mutex => stacks::is_mutex(self.native_function(rank_index)),
                AwaitedKind::Socket => !awaited.name.is_empty() || has_others,
                AwaitedKind::Pipe => !awaited.holders.is_empty(),
                AwaitedKind::Event
                | AwaitedKind::Several
                | AwaitedKind::SharedMemory
                | AwaitedKind::Semaphore
                | AwaitedKind::MessageQueue => has_others,
                AwaitedKind::Unspecified => false,
            }
        })
    }

    /// Whether the main thread of a rank waits for keyboard input, or for a standard input that
    /// replaces it.
    pub(crate) fn at_terminal(&self, rank_index: usize) -> bool {
        self.view(rank_index).host.awaited.as_ref().is_some_and(stacks::is_terminal)
    }

    /// Whether the main thread of a rank waits for a child process by a pipe: the child has the
    /// other end open, or the child is dead and only the rank itself has it open.
    pub(crate) fn waits_for_child_by_pipe(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let dead = || self.stuck_helper(rank_index).is_some_and(|helper| helper.is_dead());
        view.host.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Pipe).is_some_and(|awaited| {
            match awaited.holders.first() {
                Some(holder) if Some(holder.pid) != view.pid() => holder.child,
                _ => dead(),
            }
        })
    }
}

/// How far a suspect can be trusted.
impl<'a> Case<'a> {
    /// Whether the activity of a rank may end by itself. Its main thread runs (however little
    /// processor time a busy machine gives it), sleeps for a time, or waits for a peer, a child
    /// process or a loader that is not known to be stuck.
    fn may_finish(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let host = &view.host;
        let helper = self.stuck_helper(rank_index);
        let stuck = helper.as_ref().is_some_and(StuckHelper::is_stuck);
        let ran = host.moved.is_some_and(|moved| moved.main_ran);
        let busy = host.moved.is_some_and(|moved| moved.helper_busy);
        let ends_by_itself = match host.observed.activity {
            Activity::Sleep | Activity::Running => true,
            Activity::DataLoader => !stuck && (host.awaited.is_none() || busy),
            Activity::Unknown => ran || self.waits_for_peer(rank_index) || helper.is_some() && !stuck,
            Activity::Io => ran,
            _ => false,
        };
        ends_by_itself || stacks::is_sleep(self.native_function(rank_index))
    }

    /// The main thread of a rank did not run at all between the samples, in a call that neither
    /// ends by itself nor waits for the work of another thread. Other threads do not matter, such
    /// as those of a library that polls.
    pub(crate) fn blocked(&self, rank_index: usize) -> bool {
        let host = &self.view(rank_index).host;
        let stands_still = host.moved.is_some_and(|moved| !moved.io && !moved.own_frame && !moved.main_ran);
        stands_still && host.stack && self.does(rank_index, Activity::Unknown) && !self.may_finish(rank_index)
    }

    /// Confidence in a suspect of the host kind. High only if its stacks and the records of all
    /// members of its events are there, both samples agree, and its activity cannot end by itself.
    pub(crate) fn host_confidence(&self, suspect: &Suspect) -> Confidence {
        let Suspect::Host { rank_index, events, guess } = suspect else { return Confidence::Medium };
        let host = &self.view(*rank_index).host;
        if *guess || events.is_empty() || !host.stack || host.moved.is_none() || !host.same_in_both || !host.frozen() {
            return Confidence::Medium;
        }
        if !self.view(*rank_index).halted() && self.may_finish(*rank_index) {
            return Confidence::Medium;
        }
        // A rank that is not a member of the new communicator is late for the split only by a count
        // of splits.
        let by_count = |event: &Event| {
            matches!(*event, Event::Init { comm }
                if self.comms[comm].member(*rank_index).is_none() && !self.comms[comm].silent.contains(rank_index))
        };
        if events.iter().any(by_count) {
            return Confidence::Medium;
        }
        self.members_confidence(events)
    }

    /// High if every member of the events' communicators is known, else medium. The group of ranks
    /// that launch a kernel may be a guess.
    pub(crate) fn members_confidence(&self, events: &[Event]) -> Confidence {
        let known = |event: &Event| {
            let (Event::Collective { comm, .. }
            | Event::PointToPoint { comm, .. }
            | Event::Init { comm }
            | Event::Split { comm }) = *event;
            self.fully_recorded[comm] && self.comms[comm].kernel.as_ref().is_none_or(|kernel| kernel.certain)
        };
        if events.iter().all(known) { Confidence::High } else { Confidence::Medium }
    }
}
