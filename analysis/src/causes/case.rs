//! One incident, as the rules see it: the ranks, the communicators and the graph.

mod confidence;
mod describe;
mod evidence;
mod waits;

use std::collections::BTreeSet;

use xpu_timer_proto::{
    server::AwaitedKind,
    v1::{Evidence, Op, OpKind, Operation},
};

use super::wording::Number;
use crate::{
    facts,
    graph::{self, Event, Graph, Suspect},
    matching::{self, Comm},
    stacks::{self, StuckHelper},
    text::ranks,
    verdict::Activity,
    world::{RankView, World},
};

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
    /// By communicator: every member is known, from a record without losses.
    fully_recorded: Vec<bool>,
    /// By event: the ranks inside it, as text. Formatted once, because many suspects share an
    /// event.
    waiters_text: Vec<String>,
}

/// Shortens `path/train.py:88 in step` to `train.py:88 in step`.
fn short_frame(frame: &str) -> String {
    match frame.split_once(" in ") {
        Some((file, function)) => format!("{} in {function}", stacks::base_name(file)),
        None => frame.to_owned(),
    }
}

impl<'a> Case<'a> {
    /// Matches the communicators and builds the wait-for graph.
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

    /// The view of a rank.
    pub fn view(&self, rank_index: usize) -> &RankView<'a> {
        &self.world.views[rank_index]
    }

    /// The rank of a suspect of the host kind.
    pub fn host_rank(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { rank_index, .. } => Some(*rank_index),
            _ => None,
        }
    }

    /// The rank of a suspect of the host or the device kind.
    pub fn suspect_rank(&self, suspect: &Suspect) -> Option<usize> {
        match suspect {
            Suspect::Host { rank_index, .. } | Suspect::Device { rank_index, .. } => Some(*rank_index),
            _ => None,
        }
    }

    /// Where the main thread of a rank is, to follow a verb: ` at train.py:41 in load (C function
    /// read)`.
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

    /// Where a rank is, as a clause: `; it stands at train.py:41 in load`. Empty if it is not
    /// known.
    pub fn stands_clause(&self, rank_index: usize, number: Number) -> String {
        let place = self.place(rank_index);
        let stands = number.word("; it stands", "; they stand");
        if place.is_empty() { place } else { format!("{stands}{place}") }
    }

    /// The event of a suspect in which most ranks wait. Of several, the first.
    pub fn main_event(&self, suspect: &Suspect) -> Option<Event> {
        let events = match suspect {
            Suspect::Host { events, .. } | Suspect::Device { events, .. } | Suspect::Cycle(events) => events,
            Suspect::Complete(event) => return Some(*event),
        };
        let most = events.iter().map(|event| self.graph.waiters_of(*event).len()).max()?;
        events.iter().copied().find(|event| self.graph.waiters_of(*event).len() == most)
    }

    /// The C function in which the main thread of a rank is, without the program's own function
    /// that called it.
    fn native_function(&self, rank_index: usize) -> &str {
        let native = self.view(rank_index).host.location.native.as_deref().unwrap_or_default();
        native.split([' ', ',']).next().unwrap_or_default()
    }

    /// The main thread of a rank sleeps and has run between the samples: it polls for something.
    pub fn polls(&self, rank_index: usize) -> bool {
        let ran = |moved: stacks::Movement| moved.main_ran && !moved.is_progress();
        self.does(rank_index, Activity::Sleep) && self.view(rank_index).host.moved.is_some_and(ran)
    }

    /// Those of `views` that, by their records, wait in a call for members of an MPI window, while
    /// another of `views` is a member of that window and in no such call.
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

    /// The main thread of a rank waits for data from a socket, or polls for something, so another
    /// process may be to blame.
    pub fn waits_for_peer(&self, rank_index: usize) -> bool {
        let host = &self.view(rank_index).host;
        let socket = host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Socket);
        socket || stacks::is_network(self.native_function(rank_index)) || self.polls(rank_index)
    }

    /// The main thread of a rank waits for a lock that it shares with other processes, and no child
    /// process of the rank is known to hold it up. It may wait for another rank.
    pub fn in_shared_lock(&self, rank_index: usize) -> bool {
        let view = self.view(rank_index);
        let shared = self.does(rank_index, Activity::Lock) && stacks::is_shared_lock(&view.host.observed.witness);
        shared && !self.stuck_helper(rank_index).is_some_and(|helper| helper.is_stuck())
    }

    /// The main thread of a rank has nothing to do: it sleeps, or waits for a message, a person or
    /// a signal.
    pub fn is_idle(&self, rank_index: usize) -> bool {
        let signal = stacks::is_signal_wait(self.native_function(rank_index));
        self.does(rank_index, Activity::Sleep)
            || signal
            || self.waits_for_peer(rank_index)
            || self.at_terminal(rank_index)
    }

    /// Whether the main thread of a rank has this activity in its last sample.
    pub fn does(&self, rank_index: usize, activity: Activity) -> bool {
        self.view(rank_index).host.observed.activity == activity
    }

    fn stuck_helper(&self, rank_index: usize) -> Option<StuckHelper> {
        self.view(rank_index).evidence.and_then(facts::stuck_helper)
    }
}
