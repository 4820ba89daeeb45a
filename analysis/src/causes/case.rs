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
    whole: Vec<bool>,
    /// By event: the ranks inside it, as text. Written once, because many suspects share an event.
    waiters_text: Vec<String>,
}

/// The file of a standard input that is a pipe.
const STANDARD_INPUT: &str = "/dev/stdin";

/// `path/train.py:88 in step` without its path.
fn short_frame(frame: &str) -> String {
    match frame.split_once(" in ") {
        Some((file, function)) => format!("{} in {function}", stacks::short(file)),
        None => frame.to_owned(),
    }
}

impl<'a> Case<'a> {
    /// Matches the communicators and follows who waits for whom.
    pub fn of(evidence: &'a Evidence) -> Self {
        let world = World::of(evidence);
        let comms = matching::communicators(&world);
        let graph = graph::build(&world, &comms);
        let whole = |comm: &Comm<'_>| {
            comm.unnamed == 0
                && comm.silent.iter().all(|view| matching::certainly_absent(&world, *view))
                && comm.members.iter().all(|member| !world.views[member.view].lossy())
        };
        let whole = comms.iter().map(whole).collect();
        let waiters_text = graph.waiters.iter().map(|views| ranks(&world.ranks(views.iter().copied()))).collect();
        Case { evidence, world, comms, graph, stack_waiters: Vec::new(), whole, waiters_text }
    }

    /// The ranks inside an event, as text.
    pub fn waiters_text(&self, event: Event) -> &str {
        self.graph.events.binary_search(&event).map_or("no rank", |index| &self.waiters_text[index])
    }

    /// A rank.
    pub fn view(&self, view: usize) -> &RankView<'a> {
        &self.world.views[view]
    }

    /// The rank that a suspect of the host kind is, unless it is not known to run at all.
    pub fn host(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { view, .. } => Some(*view),
            _ => None,
        }
    }

    /// The rank that a suspect is, host or device.
    pub fn one_rank(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { view, .. } | Suspect::Device { view, .. } => Some(*view),
            _ => None,
        }
    }

    /// Where the main thread of a rank stands, to follow a verb: ` at train.py:41 in load (C function read)`.
    pub fn place(&self, view: usize) -> String {
        let location = &self.view(view).host.location;
        let mut place = String::new();
        if let Some(python) = &location.python {
            let caller = location.caller.as_ref().map(|caller| format!("{}, by ", short_frame(caller)));
            place.push_str(&format!(" at {}{}", caller.unwrap_or_default(), stacks::short(python)));
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
    pub fn stands(&self, view: usize, number: Number) -> String {
        let place = self.place(view);
        let stands = number.word("; it stands", "; they stand");
        if place.is_empty() { place } else { format!("{stands}{place}") }
    }

    /// What a rank waits for itself, or what is stuck beside it, as a clause: `, and waits for its terminal /dev/pts/0`, `, and its child
    /// process 4242 (sh) has not ended`. Empty when nothing is known.
    pub fn itself(&self, view: usize, number: Number) -> String {
        let awaits = self.awaits(view);
        let mut clause =
            awaits.as_ref().map_or(String::new(), |awaits| format!(", and {} for {awaits}", number.waits()));
        // A pipe whose other end nobody has any more is explained by who should have it.
        let explains = |helper: &StuckHelper| awaits.is_none() || helper.is_dead();
        let helper = self.stuck_helper(view).filter(explains);
        if let Some(StuckHelper { who, place }) = helper {
            clause.push_str(&format!(", and {} {who} {place}", number.its()));
        }
        clause
    }

    /// What the system call of a rank's main thread waits for, beside the call itself: `the lock on x.lock, held by rank 3 (process 77)`.
    pub fn awaits(&self, view: usize) -> Option<String> {
        let awaited = self.view(view).host.awaited.as_ref()?;
        let own = |holder: &Holder| self.view(view).pid() == Some(holder.pid);
        let others: Vec<String> = awaited
            .holders
            .iter()
            .filter(|holder| !own(holder))
            .take(2)
            .map(|holder| self.holder(view, holder))
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
            AwaitedKind::File if self.at_terminal(view) => Some(format!("its terminal {}", awaited.name)),
            AwaitedKind::File => Some(stacks::short(&awaited.name).to_owned()),
            AwaitedKind::Socket if awaited.name.is_empty() => None,
            AwaitedKind::Socket => Some(awaited.name.clone()),
            AwaitedKind::Pipe if alone => Some("a pipe whose other end only it has open".to_owned()),
            AwaitedKind::Pipe if holders.is_empty() => None,
            AwaitedKind::Pipe => Some(format!("a pipe whose other end {holders} {have} open")),
            AwaitedKind::Lock if alone => {
                Some(format!("the lock on {}, which it holds itself", stacks::short(&awaited.name)))
            }
            AwaitedKind::Lock if holders.is_empty() => Some(format!(
                "the lock on {}, which another process or file handle holds",
                stacks::short(&awaited.name)
            )),
            AwaitedKind::Lock => Some(format!("the lock on {}, held by {holders}", stacks::short(&awaited.name))),
            AwaitedKind::Unspecified => None,
        }
    }

    /// Whether the main thread of a rank waits for what a person types, or what is fed to it in place of one.
    pub fn at_terminal(&self, view: usize) -> bool {
        let awaited = self.view(view).host.awaited.as_ref();
        awaited.is_some_and(|awaited| {
            let name = awaited.name.as_str();
            let typed = [STANDARD_INPUT, "/dev/console"].contains(&name);
            awaited.kind() == AwaitedKind::File
                && (typed || name.starts_with("/dev/pts/") || name.starts_with("/dev/tty"))
        })
    }

    /// Whether the main thread of a rank waits for a child process by a pipe: it has the other end open, or it is dead and only the rank itself
    /// has.
    pub fn child_behind_pipe(&self, view: usize) -> bool {
        let content = self.view(view);
        let dead = || self.stuck_helper(view).is_some_and(|helper| helper.is_dead());
        content.host.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Pipe).is_some_and(|awaited| {
            match awaited.holders.first() {
                Some(holder) if Some(holder.pid) != content.pid() => holder.child,
                _ => dead(),
            }
        })
    }

    fn holder(&self, view: usize, holder: &Holder) -> String {
        let of_rank = |other: &RankView<'_>| other.pid() == Some(holder.pid) && other.node() == self.view(view).node();
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
        let of_view = |view: usize| match event {
            Event::Collective { comm, seq } => {
                let id = self.comms[comm].id;
                self.view(view).operations().find(|operation| {
                    crate::world::is_collective(operation) && operation.communicator == id && operation.seq == seq
                })
            }
            Event::PointToPoint { comm, view, peer, recv } => {
                let id = self.comms[comm].id;
                let op = if recv { Op::Recv } else { Op::Send };
                self.view(view)
                    .pending()
                    .find(|operation| operation.communicator == id && operation.peer == peer && operation.op() == op)
            }
            Event::Init { .. } | Event::Split { .. } => {
                self.view(view).pending().find(|operation| crate::world::is_init(operation))
            }
        };
        match event {
            Event::PointToPoint { view, .. } => of_view(view),
            Event::Collective { comm, .. } => self
                .graph
                .waiters_of(event)
                .iter()
                .copied()
                .chain(self.comms[comm].members.iter().map(|member| member.view))
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
                let peer = match self.comms[comm].view_of(peer) {
                    Some(view) => format!("rank {}", self.view(view).rank),
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
    pub fn who_waits(&self, suspect: &Suspect, culprits: &[usize], said: &str) -> String {
        let held = self.one_rank(suspect).map_or(String::new(), |view| self.held_up(view));
        held + &self.who_waits_inside(suspect, culprits, said)
    }

    /// The clause that says which rank waits for what a rank holds.
    fn held_up(&self, holder: usize) -> String {
        let follower = self.graph.followers.iter().find(|follower| follower.holder == holder);
        let text = follower.and_then(|follower| {
            let what = self.awaits(follower.view)?;
            Some(format!("; rank {} waits for {what}{}", self.view(follower.view).rank, self.place(follower.view)))
        });
        text.unwrap_or_default()
    }

    fn who_waits_inside(&self, suspect: &Suspect, culprits: &[usize], said: &str) -> String {
        let it = if culprits.len() > 1 { "them" } else { "it" };
        let place = |event: Event| {
            let what = self.describe(event);
            if said.contains(&what) { "there".to_owned() } else { format!("in {what}") }
        };
        if let Some(event) = self.main_event(suspect) {
            let waiters =
                self.world.ranks(self.graph.waiters_of(event).iter().copied().filter(|view| !culprits.contains(view)));
            return match waiters.len() {
                0 => String::new(),
                1 => format!("; {} waits for {it} {}", ranks(&waiters), place(event)),
                _ => format!("; {} wait for {it} {}", ranks(&waiters), place(event)),
            };
        }
        let waiters = self.world.ranks(self.stack_waiters.iter().copied().filter(|view| !culprits.contains(view)));
        let place = self.stack_waiters.first().map_or("", |view| self.view(*view).host.doing.witness.as_str());
        match waiters.len() {
            0 => String::new(),
            1 => format!("; {} waits in {place}", ranks(&waiters)),
            _ => format!("; {} wait in {place}", ranks(&waiters)),
        }
    }

    /// The C function that tells where the main thread of a rank is, without the program's function that called it.
    fn native(&self, view: usize) -> &str {
        let native = self.view(view).host.location.native.as_deref().unwrap_or_default();
        native.split([' ', ',']).next().unwrap_or_default()
    }

    /// Whether what a rank does may come to its end by itself: its main thread runs, which on a busy machine is no question of the processor
    /// time that it gets, or sleeps for a time, or waits for somebody else, a child or a loader that is not known to be stuck.
    fn may_go_on(&self, view: usize) -> bool {
        let content = self.view(view);
        let host = &content.host;
        let helper = self.stuck_helper(view);
        let stuck = helper.as_ref().is_some_and(StuckHelper::is_stuck);
        let ran = host.moved.is_some_and(|moved| moved.main_ran);
        let goes_on = match host.doing.activity {
            Activity::Sleep | Activity::Running => true,
            Activity::DataLoader => !stuck && host.awaited.is_none(),
            Activity::Unknown => ran || self.asks_others(view) || helper.is_some() && !stuck,
            Activity::Io => ran,
            _ => false,
        };
        goes_on || stacks::is_sleep(self.native(view))
    }

    /// The main thread of a rank did not run at all between the samples, in a call that neither ends by itself nor waits for the work of
    /// another thread; what other threads do, as those of a library that poll, is nothing to it.
    pub fn blocked(&self, view: usize) -> bool {
        let host = &self.view(view).host;
        let stands = host.moved.is_some_and(|moved| !moved.io && !moved.own_frame && !moved.main_ran);
        stands && host.stack && self.does(view, Activity::Unknown) && !self.may_go_on(view)
    }

    /// Confidence in a suspect of the host kind: high only when its stacks and the records of all members of what the others
    /// wait in are there, and agree in both samples, and what it does cannot end by itself.
    pub fn host_confidence(&self, suspect: &Suspect) -> Confidence {
        let Suspect::Host { view, events, guess } = suspect else { return Confidence::Medium };
        let host = &self.view(*view).host;
        if *guess || events.is_empty() || !host.stack || host.moved.is_none() || !host.same_in_both || !host.frozen() {
            return Confidence::Medium;
        }
        if !self.view(*view).halted() && self.may_go_on(*view) {
            return Confidence::Medium;
        }
        // Whoever is no member of the new communicator is late for the split that makes it by a count of splits.
        let by_count = |event: &Event| {
            matches!(*event, Event::Init { comm }
                if self.comms[comm].member(*view).is_none() && !self.comms[comm].silent.contains(view))
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
            self.whole[comm]
        };
        if events.iter().all(known) { Confidence::High } else { Confidence::Medium }
    }

    /// The main thread of a rank sleeps and has run between the samples: it looks again and again for something.
    pub fn polls(&self, view: usize) -> bool {
        let ran = |moved: stacks::Moved| moved.main_ran && !moved.any();
        self.does(view, Activity::Sleep) && self.view(view).host.moved.is_some_and(ran)
    }

    /// Those of some ranks that wait in a call for members of a window of MPI, by their records, while another of these ranks is a
    /// member of it and in no such call.
    pub fn wait_in_windows(&self, views: &BTreeSet<usize>) -> BTreeSet<usize> {
        let named = |operation: &&Operation| {
            operation.kind() == OpKind::HostCall && operation.op() == Op::Unspecified && operation.communicator != 0
        };
        let index = |id: u64| self.comms.binary_search_by_key(&id, |comm| comm.id).ok();
        let windows = |view: usize| self.view(view).pending().filter(named).filter_map(|call| index(call.communicator));
        let is_elsewhere = |view: usize| views.contains(&view) && windows(view).next().is_none();
        let mut incomplete: BTreeSet<usize> = views.iter().flat_map(|view| windows(*view)).collect();
        incomplete.retain(|window| self.comms[*window].members.iter().any(|member| is_elsewhere(member.view)));
        views.iter().copied().filter(|view| windows(*view).any(|window| incomplete.contains(&window))).collect()
    }

    /// The main thread of a rank waits for what comes over a socket, or looks for something again and again, so that somebody else may
    /// be to blame.
    pub fn asks_others(&self, view: usize) -> bool {
        let host = &self.view(view).host;
        let socket = host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Socket);
        socket || stacks::is_network(self.native(view)) || self.polls(view)
    }

    /// The main thread of a rank waits for a lock that it shares with other processes, and none of its own child processes is known to keep it
    /// waiting: it may wait for another rank.
    pub fn in_shared_lock(&self, view: usize) -> bool {
        let content = self.view(view);
        let shared = self.does(view, Activity::Lock) && stacks::is_shared_lock(&content.host.doing.witness);
        shared && !self.stuck_helper(view).is_some_and(|helper| helper.is_stuck())
    }

    /// The main thread of a rank does nothing of its own: it sleeps, or waits for a message, a person or a signal.
    pub fn idles(&self, view: usize) -> bool {
        let signal = stacks::is_signal_wait(self.native(view));
        self.does(view, Activity::Sleep) || signal || self.asks_others(view) || self.at_terminal(view)
    }

    /// The main thread of a rank does this in its last sample.
    pub fn does(&self, view: usize, activity: Activity) -> bool {
        self.view(view).host.doing.activity == activity
    }

    fn stuck_helper(&self, view: usize) -> Option<StuckHelper> {
        self.view(view).evidence.and_then(facts::stuck_helper)
    }

    /// What else is stuck in a rank, to follow a sentence about it (`, and its thread saver is inside write at …`), and for the evidence.
    pub fn helper(&self, view: usize) -> Option<(String, EvidenceLine)> {
        let content = self.view(view);
        let StuckHelper { who, place } = self.stuck_helper(view)?;
        let fact = line(format!("rank {}: {who} {place}", content.rank), vec![content.rank]);
        Some((format!("{who} {place}"), fact))
    }

    /// The frame or function by which a rank's main thread is classified, for the evidence. None when it is the one that
    /// [`Case::standing`] tells more of.
    pub fn witness(&self, view: usize) -> Option<EvidenceLine> {
        let content = self.view(view);
        let (rank, witness) = (content.rank, &content.host.doing.witness);
        let location = &content.host.location;
        let stands =
            location.python_function.as_deref().zip(location.python.as_deref()).is_some_and(|(function, place)| {
                let file = place.rsplit_once('/').map_or(place, |(_, file)| file);
                *witness == format!("{function} ({file})")
            });
        (!stands).then(|| line(format!("rank {rank}: inside {witness}"), vec![rank]))
    }

    /// Facts on where a rank stands, for the evidence.
    pub fn standing(&self, view: usize) -> Vec<EvidenceLine> {
        let content = self.view(view);
        let rank = content.rank;
        let mut lines = Vec::new();
        let host = &content.host;
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
        if let Some(awaits) = self.awaits(view) {
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
            let why = content.evidence.map(|evidence| evidence.errors.join("; ")).filter(|why| !why.is_empty());
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            let what = match content.presence {
                Presence::Missing => "nothing is known of it",
                _ => "no stack",
            };
            lines.push(line(format!("rank {rank}: {what}{why}"), vec![rank]));
        }
        lines
    }

    /// The counters of a suspect against those of the others, for the evidence.
    pub fn counters(&self, view: usize, event: Event) -> Option<EvidenceLine> {
        let Event::Collective { comm, seq } = event else { return None };
        let rank = self.view(view).rank;
        let id = communicator(self.comms[comm].id);
        let others = match self.graph.waiters_of(event).len() {
            0 => String::new(),
            _ => format!("; {} in number {seq}", self.waiters_text(event)),
        };
        let text = match self.comms[comm].member(view) {
            Some(member) => format!(
                "rank {rank}: {} collectives launched, {} begun and {} completed on communicator {id}{others}",
                member.launched, member.started, member.completed
            ),
            None => format!("rank {rank}: no collective recorded on communicator {id}{others}"),
        };
        Some(line(text, vec![rank]))
    }
}
