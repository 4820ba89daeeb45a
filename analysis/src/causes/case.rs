//! What a rule is shown: the ranks, the communicators and the graph, and the words that rules have in common.

use std::collections::BTreeSet;

use xpu_timer_proto::{
    server::{AwaitedKind, Holder},
    v1::{Evidence, Op, OpKind, Operation, Presence},
};

use super::wording::{Number, line};
use crate::{
    facts,
    graph::{self, Event, Graph, Suspect},
    matching::{self, Comm},
    stacks::{self, StuckHelper},
    text::{self, communicator, ranks},
    verdict::{Activity, Confidence, EvidenceLine},
    world::{RankView, World},
};

/// One incident, as the rules see it.
pub(crate) struct Case<'a> {
    /// What the verdict is made from.
    pub evidence: &'a Evidence,
    /// The ranks.
    pub world: World<'a>,
    /// The communicators.
    pub comms: Vec<Comm<'a>>,
    /// Who waits for whom.
    pub graph: Graph,
    /// Ranks whose stacks alone tell that they wait, when no flight record tells anything; as views.
    pub stack_waiters: Vec<usize>,
    /// By communicator: every member is known, by a record that lost nothing.
    fully_recorded: Vec<bool>,
    /// By event: the ranks inside it, as text. Written once, because many suspects share an event.
    waiters_text: Vec<String>,
}

/// The file of a standard input that is a pipe.
const STANDARD_INPUT: &str = "/dev/stdin";

/// `path/train.py:88 in step` without its path.
fn short_frame(frame: &str) -> String {
    match frame.split_once(" in ") {
        Some((file, function)) => format!("{} in {function}", stacks::base_name(file)),
        None => frame.to_owned(),
    }
}

impl<'a> Case<'a> {
    /// Matches the communicators and follows who waits for whom.
    pub fn of(evidence: &'a Evidence) -> Self {
        let world = World::of(evidence);
        let comms = matching::communicators(&world);
        let graph = graph::build(&world, &comms);
        let fully_recorded = |comm: &Comm<'_>| {
            comm.unnamed == 0
                && comm.silent.iter().all(|rank_index| matching::certainly_absent(&world, *rank_index))
                && comm.members.iter().all(|member| !world.views[member.rank_index].lossy())
        };
        let fully_recorded = comms.iter().map(fully_recorded).collect();
        let waiters_text = graph.waiters.iter().map(|views| ranks(&world.ranks(views.iter().copied()))).collect();
        Case { evidence, world, comms, graph, stack_waiters: Vec::new(), fully_recorded, waiters_text }
    }

    /// The ranks inside an event, as text.
    pub fn waiters_text(&self, event: Event) -> &str {
        self.graph.events.binary_search(&event).map_or("no rank", |index| &self.waiters_text[index])
    }

    /// A rank.
    pub fn view(&self, rank_index: usize) -> &RankView<'a> {
        &self.world.views[rank_index]
    }

    /// The rank that a suspect of the host kind is, unless it is not known to run at all.
    pub fn host_rank(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { rank_index, .. } => Some(*rank_index),
            _ => None,
        }
    }

    /// The rank that a suspect is, host or device.
    pub fn suspect_rank(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { rank_index, .. } | Suspect::Device { rank_index, .. } => Some(*rank_index),
            _ => None,
        }
    }

    /// Where the main thread of a rank stands, to follow a verb: ` at train.py:41 in load (C function read)`.
    pub fn place(&self, rank_index: usize) -> String {
        let location = &self.view(rank_index).host.location;
        let mut place = String::new();
        if let Some(python) = &location.python {
            let caller = location.caller.as_ref().map(|caller| format!("{}, by ", short_frame(caller)));
            place.push_str(&format!(" at {}{}", caller.unwrap_or_default(), stacks::base_name(python)));
            if let Some(function) = &location.python_function {
                place.push_str(&format!(" in {function}"));
            }
        }
        match &location.native {
            Some(native) if place.is_empty() => place.push_str(&format!(" in C function {native}")),
            Some(native) => place.push_str(&format!(" (C function {native})")),
            None => {}
        }
        place
    }

    /// Where a rank stands, as a clause: `; it stands at train.py:41 in load`. Empty when it is not known.
    pub fn stands_clause(&self, rank_index: usize, number: Number) -> String {
        let place = self.place(rank_index);
        let stands = number.word("; it stands", "; they stand");
        if place.is_empty() { place } else { format!("{stands}{place}") }
    }

    /// What a rank waits for itself, or what is stuck beside it, as a clause: `, and waits for its terminal /dev/pts/0`, `, and its child
    /// process 4242 (sh) has not ended`. Empty when nothing is known.
    pub fn own_wait_clause(&self, rank_index: usize, number: Number) -> String {
        let awaits = self.awaited_text(rank_index);
        let mut clause =
            awaits.as_ref().map_or(String::new(), |awaits| format!(", and {} for {awaits}", number.waits()));
        // A pipe whose other end nobody has any more is explained by who should have it.
        let explains = |helper: &StuckHelper| awaits.is_none() || helper.is_dead();
        let helper = self.stuck_helper(rank_index).filter(explains);
        if let Some(StuckHelper { who, place }) = helper {
            clause.push_str(&format!(", and {} {who} {place}", number.its()));
        }
        clause
    }

    /// What the system call of a rank's main thread waits for, beside the call itself: `the lock on x.lock, held by rank 3 (process 77)`.
    pub fn awaited_text(&self, rank_index: usize) -> Option<String> {
        let awaited = self.view(rank_index).host.awaited.as_ref()?;
        let own = |holder: &Holder| self.view(rank_index).pid() == Some(holder.pid);
        let others: Vec<String> = awaited
            .holders
            .iter()
            .filter(|holder| !own(holder))
            .take(2)
            .map(|holder| self.holder_text(rank_index, holder))
            .collect();
        let have = if others.len() == 1 { "has" } else { "have" };
        let holders = others.join(" and ");
        let alone = others.is_empty() && awaited.holders.iter().any(own);
        match awaited.kind() {
            AwaitedKind::File if awaited.name == STANDARD_INPUT && holders.is_empty() => {
                Some("its standard input".to_owned())
            }
            AwaitedKind::File if awaited.name == STANDARD_INPUT => {
                Some(format!("its standard input, whose other end {holders} {have} open"))
            }
            AwaitedKind::File if self.at_terminal(rank_index) => Some(format!("its terminal {}", awaited.name)),
            AwaitedKind::File => Some(stacks::base_name(&awaited.name).to_owned()),
            AwaitedKind::Socket if awaited.name.is_empty() => None,
            AwaitedKind::Socket => Some(awaited.name.clone()),
            AwaitedKind::Pipe if alone => Some("a pipe whose other end only it has open".to_owned()),
            AwaitedKind::Pipe if holders.is_empty() => None,
            AwaitedKind::Pipe => Some(format!("a pipe whose other end {holders} {have} open")),
            AwaitedKind::Lock if alone => {
                Some(format!("the lock on {}, which it holds itself", stacks::base_name(&awaited.name)))
            }
            AwaitedKind::Lock if holders.is_empty() => Some(format!(
                "the lock on {}, which another process or file handle holds",
                stacks::base_name(&awaited.name)
            )),
            AwaitedKind::Lock => Some(format!("the lock on {}, held by {holders}", stacks::base_name(&awaited.name))),
            AwaitedKind::Unspecified => None,
        }
    }

    /// Whether the main thread of a rank waits for what a person types, or what is fed to it in place of one.
    pub fn at_terminal(&self, rank_index: usize) -> bool {
        let awaited = self.view(rank_index).host.awaited.as_ref();
        awaited.is_some_and(|awaited| {
            let name = awaited.name.as_str();
            let typed = [STANDARD_INPUT, "/dev/console"].contains(&name);
            awaited.kind() == AwaitedKind::File
                && (typed || name.starts_with("/dev/pts/") || name.starts_with("/dev/tty"))
        })
    }

    /// Whether the main thread of a rank waits for a child process by a pipe: it has the other end open, or it is dead and only the rank itself
    /// has.
    pub fn waits_for_child_by_pipe(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let dead = || self.stuck_helper(rank_index).is_some_and(|helper| helper.is_dead());
        view.host.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Pipe).is_some_and(|awaited| {
            match awaited.holders.first() {
                Some(holder) if Some(holder.pid) != view.pid() => holder.child,
                _ => dead(),
            }
        })
    }

    fn holder_text(&self, rank_index: usize, holder: &Holder) -> String {
        let of_rank =
            |other: &RankView<'_>| other.pid() == Some(holder.pid) && other.node() == self.view(rank_index).node();
        match self.world.views.iter().position(of_rank) {
            Some(other) => format!("rank {} (process {})", self.view(other).rank, holder.pid),
            None if holder.child => format!("its child process {} ({})", holder.pid, holder.name),
            None => format!("process {} ({})", holder.pid, holder.name),
        }
    }

    /// The event of a suspect in which most ranks wait; the first of equals.
    pub fn main_event(&self, suspect: &Suspect) -> Option<Event> {
        let events = match suspect {
            Suspect::Host { events, .. } | Suspect::Device { events, .. } | Suspect::Cycle(events) => events,
            Suspect::Complete(event) => return Some(*event),
        };
        let most = events.iter().map(|event| self.graph.waiters_of(*event).len()).max()?;
        events.iter().copied().find(|event| self.graph.waiters_of(*event).len() == most)
    }

    /// An operation that stands for an event: that of one of its waiters.
    pub fn operation(&self, event: Event) -> Option<&'a Operation> {
        let of_view = |rank_index: usize| match event {
            Event::Collective { comm, seq } => {
                let id = self.comms[comm].id;
                self.view(rank_index).operations().find(|operation| {
                    crate::world::is_collective(operation) && operation.communicator == id && operation.seq == seq
                })
            }
            Event::PointToPoint { comm, rank_index, peer, recv } => {
                let id = self.comms[comm].id;
                let op = if recv { Op::Recv } else { Op::Send };
                self.view(rank_index)
                    .pending()
                    .find(|operation| operation.communicator == id && operation.peer == peer && operation.op() == op)
            }
            Event::Init { .. } | Event::Split { .. } => {
                self.view(rank_index).pending().find(|operation| crate::world::is_init(operation))
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

    /// `all_reduce 31 of communicator 0x1f (4 ranks)`.
    pub fn describe(&self, event: Event) -> String {
        let of_comm = |comm: usize| {
            format!("communicator {} ({} ranks)", communicator(self.comms[comm].id), self.comms[comm].size)
        };
        match event {
            Event::Collective { comm, seq } => {
                let name = self.operation(event).map_or("collective", text::name);
                format!("{name} {seq} of {}", of_comm(comm))
            }
            Event::PointToPoint { comm, peer, recv, .. } => {
                let peer = match self.comms[comm].rank_index_of(peer) {
                    Some(rank_index) => format!("rank {}", self.view(rank_index).rank),
                    None if peer < 0 => "any rank".to_owned(),
                    None => format!("member {peer}"),
                };
                let name = if recv { format!("a recv from {peer}") } else { format!("a send to {peer}") };
                format!("{name} on {}", of_comm(comm))
            }
            Event::Init { comm } => format!("the creation of {}", of_comm(comm)),
            Event::Split { comm } => match self.operation(event).map(|operation| operation.function.as_str()) {
                // MPI has several calls that make a communicator out of another one.
                Some(function) if function.starts_with("MPI_") => format!("{function} of {}", of_comm(comm)),
                _ => format!("a split of {}", of_comm(comm)),
            },
        }
    }

    /// The clause that says who waits for a suspect: `; ranks 0-1, 3 wait for it in all_reduce 31 of …`, or `there` when `said` names
    /// that already.
    pub fn waiters_clause(&self, suspect: &Suspect, culprits: &[usize], said: &str) -> String {
        let held =
            self.suspect_rank(suspect).map_or(String::new(), |rank_index| self.resource_waiter_clause(rank_index));
        held + &self.event_waiters_clause(suspect, culprits, said)
    }

    /// The clause that says which rank waits for what a rank holds.
    fn resource_waiter_clause(&self, holder: usize) -> String {
        let wait = self.graph.resource_waits.iter().find(|wait| wait.holder == holder);
        let text = wait.and_then(|wait| {
            let what = self.awaited_text(wait.waiter)?;
            Some(format!("; rank {} waits for {what}{}", self.view(wait.waiter).rank, self.place(wait.waiter)))
        });
        text.unwrap_or_default()
    }

    fn event_waiters_clause(&self, suspect: &Suspect, culprits: &[usize], said: &str) -> String {
        let it = if culprits.len() > 1 { "them" } else { "it" };
        let place = |event: Event| {
            let what = self.describe(event);
            if said.contains(&what) { "there".to_owned() } else { format!("in {what}") }
        };
        if let Some(event) = self.main_event(suspect) {
            let waiters = self.world.ranks(
                self.graph.waiters_of(event).iter().copied().filter(|rank_index| !culprits.contains(rank_index)),
            );
            return match waiters.len() {
                0 => String::new(),
                1 => format!("; {} waits for {it} {}", ranks(&waiters), place(event)),
                _ => format!("; {} wait for {it} {}", ranks(&waiters), place(event)),
            };
        }
        let waiters =
            self.world.ranks(self.stack_waiters.iter().copied().filter(|rank_index| !culprits.contains(rank_index)));
        let place =
            self.stack_waiters.first().map_or("", |rank_index| self.view(*rank_index).host.observed.witness.as_str());
        match waiters.len() {
            0 => String::new(),
            1 => format!("; {} waits in {place}", ranks(&waiters)),
            _ => format!("; {} wait in {place}", ranks(&waiters)),
        }
    }

    /// The C function that tells where the main thread of a rank is, without the program's function that called it.
    fn native_function(&self, rank_index: usize) -> &str {
        let native = self.view(rank_index).host.location.native.as_deref().unwrap_or_default();
        native.split([' ', ',']).next().unwrap_or_default()
    }

    /// Whether what a rank does may come to its end by itself: its main thread runs, which on a busy machine is no question of the processor
    /// time that it gets, or sleeps for a time, or waits for somebody else, a child or a loader that is not known to be stuck.
    fn may_finish(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let host = &view.host;
        let helper = self.stuck_helper(rank_index);
        let stuck = helper.as_ref().is_some_and(StuckHelper::is_stuck);
        let ran = host.moved.is_some_and(|moved| moved.main_ran);
        let goes_on = match host.observed.activity {
            Activity::Sleep | Activity::Running => true,
            Activity::DataLoader => !stuck && host.awaited.is_none(),
            Activity::Unknown => ran || self.waits_for_peer(rank_index) || helper.is_some() && !stuck,
            Activity::Io => ran,
            _ => false,
        };
        goes_on || stacks::is_sleep(self.native_function(rank_index))
    }

    /// The main thread of a rank did not run at all between the samples, in a call that neither ends by itself nor waits for the work of
    /// another thread; what other threads do, as those of a library that poll, is nothing to it.
    pub fn blocked(&self, rank_index: usize) -> bool {
        let host = &self.view(rank_index).host;
        let stands = host.moved.is_some_and(|moved| !moved.io && !moved.own_frame && !moved.main_ran);
        stands && host.stack && self.does(rank_index, Activity::Unknown) && !self.may_finish(rank_index)
    }

    /// Confidence in a suspect of the host kind: high only when its stacks and the records of all members of what the others
    /// wait in are there, and agree in both samples, and what it does cannot end by itself.
    pub fn host_confidence(&self, suspect: &Suspect) -> Confidence {
        let Suspect::Host { rank_index, events, guess } = suspect else { return Confidence::Medium };
        let host = &self.view(*rank_index).host;
        if *guess || events.is_empty() || !host.stack || host.moved.is_none() || !host.same_in_both || !host.frozen() {
            return Confidence::Medium;
        }
        if !self.view(*rank_index).halted() && self.may_finish(*rank_index) {
            return Confidence::Medium;
        }
        // Whoever is no member of the new communicator is late for the split that makes it by a count of splits.
        let by_count = |event: &Event| {
            matches!(*event, Event::Init { comm }
                if self.comms[comm].member(*rank_index).is_none() && !self.comms[comm].silent.contains(rank_index))
        };
        if events.iter().any(by_count) {
            return Confidence::Medium;
        }
        self.members_confidence(events)
    }

    /// High when every member of the events' communicators is known, medium otherwise.
    pub fn members_confidence(&self, events: &[Event]) -> Confidence {
        let known = |event: &Event| {
            let (Event::Collective { comm, .. }
            | Event::PointToPoint { comm, .. }
            | Event::Init { comm }
            | Event::Split { comm }) = *event;
            self.fully_recorded[comm]
        };
        if events.iter().all(known) { Confidence::High } else { Confidence::Medium }
    }

    /// The main thread of a rank sleeps and has run between the samples: it looks again and again for something.
    pub fn polls(&self, rank_index: usize) -> bool {
        let ran = |moved: stacks::Movement| moved.main_ran && !moved.is_progress();
        self.does(rank_index, Activity::Sleep) && self.view(rank_index).host.moved.is_some_and(ran)
    }

    /// Those of some ranks that wait in a call for members of a window of MPI, by their records, while another of these ranks is a
    /// member of it and in no such call.
    pub fn ranks_waiting_in_windows(&self, views: &BTreeSet<usize>) -> BTreeSet<usize> {
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

    /// The main thread of a rank waits for what comes over a socket, or looks for something again and again, so that somebody else may
    /// be to blame.
    pub fn waits_for_peer(&self, rank_index: usize) -> bool {
        let host = &self.view(rank_index).host;
        let socket = host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Socket);
        socket || stacks::is_network(self.native_function(rank_index)) || self.polls(rank_index)
    }

    /// The main thread of a rank waits for a lock that it shares with other processes, and none of its own child processes is known to keep it
    /// waiting: it may wait for another rank.
    pub fn in_shared_lock(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let shared = self.does(rank_index, Activity::Lock) && stacks::is_shared_lock(&view.host.observed.witness);
        shared && !self.stuck_helper(rank_index).is_some_and(|helper| helper.is_stuck())
    }

    /// The main thread of a rank does nothing of its own: it sleeps, or waits for a message, a person or a signal.
    pub fn is_idle(&self, rank_index: usize) -> bool {
        let signal = stacks::is_signal_wait(self.native_function(rank_index));
        self.does(rank_index, Activity::Sleep)
            || signal
            || self.waits_for_peer(rank_index)
            || self.at_terminal(rank_index)
    }

    /// The main thread of a rank does this in its last sample.
    pub fn does(&self, rank_index: usize, activity: Activity) -> bool {
        self.view(rank_index).host.observed.activity == activity
    }

    fn stuck_helper(&self, rank_index: usize) -> Option<StuckHelper> {
        self.view(rank_index).evidence.and_then(facts::stuck_helper)
    }

    /// What else is stuck in a rank, to follow a sentence about it (`, and its thread saver is inside write at …`), and for the evidence.
    pub fn helper_fact(&self, rank_index: usize) -> Option<(String, EvidenceLine)> {
        let view = self.view(rank_index);
        let StuckHelper { who, place } = self.stuck_helper(rank_index)?;
        let fact = line(format!("rank {}: {who} {place}", view.rank), vec![view.rank]);
        Some((format!("{who} {place}"), fact))
    }

    /// The frame or function by which a rank's main thread is classified, for the evidence. None when it is the one that
    /// [`Case::standing`] tells more of.
    pub fn witness_line(&self, rank_index: usize) -> Option<EvidenceLine> {
        let view = self.view(rank_index);
        let (rank, witness) = (view.rank, &view.host.observed.witness);
        let location = &view.host.location;
        let stands =
            location.python_function.as_deref().zip(location.python.as_deref()).is_some_and(|(function, place)| {
                let file = place.rsplit_once('/').map_or(place, |(_, file)| file);
                *witness == format!("{function} ({file})")
            });
        (!stands).then(|| line(format!("rank {rank}: inside {witness}"), vec![rank]))
    }

    /// Facts on where a rank stands, for the evidence.
    pub fn position_lines(&self, rank_index: usize) -> Vec<EvidenceLine> {
        let view = self.view(rank_index);
        let rank = view.rank;
        let mut lines = Vec::new();
        let host = &view.host;
        if let Some(python) = &host.location.python {
            let function = host.location.python_function.as_deref().unwrap_or("?");
            let samples = match (host.moved, host.same_in_both) {
                (None, _) => " (one sample)",
                (Some(moved), _) if moved.own_frame => ", and stood elsewhere in the first sample",
                (Some(_), true) => ", in both samples",
                (Some(_), false) => "",
            };
            lines.push(line(format!("rank {rank}: stands in {function} at {python}{samples}"), vec![rank]));
        }
        if let Some(awaits) = self.awaited_text(rank_index) {
            lines.push(line(format!("rank {rank}: its system call waits for {awaits}"), vec![rank]));
        }
        if let Some(native) = &host.location.native {
            lines.push(line(format!("rank {rank}: in C function {native}"), vec![rank]));
        }
        if let Some(moved) = host.moved {
            lines.push(line(
                format!(
                    "rank {rank}: between the samples {:.0} % of a processor used, {} bytes read or written",
                    moved.cpu_share * 100.0,
                    moved.io_bytes
                ),
                vec![rank],
            ));
        }
        if !host.stack {
            let why = view.evidence.map(|evidence| evidence.errors.join("; ")).filter(|why| !why.is_empty());
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            let what = match view.presence {
                Presence::Missing => "nothing is known of it",
                _ => "no stack",
            };
            lines.push(line(format!("rank {rank}: {what}{why}"), vec![rank]));
        }
        lines
    }

    /// The counters of a suspect against those of the others, for the evidence.
    pub fn counters_line(&self, rank_index: usize, event: Event) -> Option<EvidenceLine> {
        let Event::Collective { comm, seq } = event else { return None };
        let rank = self.view(rank_index).rank;
        let id = communicator(self.comms[comm].id);
        let others = match self.graph.waiters_of(event).len() {
            0 => String::new(),
            _ => format!("; {} in number {seq}", self.waiters_text(event)),
        };
        let text = match self.comms[comm].member(rank_index) {
            Some(member) => format!(
                "rank {rank}: {} collectives launched, {} begun and {} completed on communicator {id}{others}",
                member.launched, member.started, member.completed
            ),
            None => format!("rank {rank}: no collective recorded on communicator {id}{others}"),
        };
        Some(line(text, vec![rank]))
    }
}
