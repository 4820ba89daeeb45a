//! Finds the suspects: the places where chains of waiting end.

use std::collections::{BTreeSet, HashMap};

use super::{
    builder::{Builder, Node},
    components::sinks,
    event::{Event, Suspect},
};
use crate::{resource_waits::ResourceWait, verdict::Activity};

/// How often `suspects` removes ends of the graph to look behind them.
const MOST_PEELED: usize = 16;

impl Builder<'_, '_> {
    /// The strongly connected components that no edge leaves, as suspects.
    pub(super) fn suspects(&self) -> Vec<Suspect> {
        let found = self.suspects_of(&self.edges);
        let unknown = |suspect: &Suspect| matches!(suspect, Suspect::Complete(event) if self.unknown_creation(*event));
        if found.is_empty() || !found.iter().all(unknown) {
            return found;
        }
        // The creation of a communicator with unknown members explains nothing. Ranks that are not
        // behind it may wait for something that is known.
        let mut left_out = BTreeSet::new();
        let mut ends = found.clone();
        for _ in 0..MOST_PEELED {
            let complete: Vec<Event> = ends
                .iter()
                .filter_map(|suspect| match suspect {
                    Suspect::Complete(event) => Some(*event),
                    _ => None,
                })
                .collect();
            if complete.is_empty() || complete.len() < ends.len() {
                break;
            }
            for event in complete {
                let index = self.events.binary_search(&event).unwrap_or(0);
                left_out.insert(self.number(Node::Event(index)));
                let inside = self.waiters[index].iter();
                left_out.extend(
                    inside
                        .flat_map(|rank_index| [Node::Host(*rank_index), Node::Device(*rank_index)])
                        .map(|at| self.number(at)),
                );
            }
            let mut edges = self.edges.clone();
            edges.iter_mut().for_each(|to| to.retain(|node| !left_out.contains(node)));
            let gone = |suspect: &Suspect| match suspect {
                Suspect::Complete(event) => {
                    let index = self.events.binary_search(event).unwrap_or(0);
                    left_out.contains(&self.number(Node::Event(index)))
                }
                _ => false,
            };
            ends = self.suspects_of(&edges);
            ends.retain(|suspect| !gone(suspect));
        }
        if ends.is_empty() { found } else { ends }
    }

    fn unknown_creation(&self, event: Event) -> bool {
        matches!(event, Event::Init { comm } | Event::Split { comm } if self.comms[comm].unnamed > 0)
    }

    fn suspects_of(&self, edges: &[Vec<usize>]) -> Vec<Suspect> {
        let base = 2 * self.world.views.len();
        let roots = base..base + self.events.len();
        let components = sinks(edges, roots);
        let mut into: HashMap<usize, Vec<Event>> = HashMap::new();
        for (index, event) in self.events.iter().enumerate() {
            for &to in &edges[base + index] {
                if to < base {
                    into.entry(to).or_default().push(*event);
                }
            }
        }
        let direct = |node: Node| into.get(&self.number(node)).cloned().unwrap_or_default();
        // A rank that holds up another rank also holds up the ranks that wait for that one.
        let events_into = |node: Node| {
            let Node::Host(rank_index) = node else { return direct(node) };
            let events = direct(node);
            if events.is_empty() {
                self.waiters_behind(rank_index)
                    .into_iter()
                    .flat_map(|rank_index| direct(Node::Host(rank_index)))
                    .collect()
            } else {
                events
            }
        };
        let mut suspects = Vec::new();
        for component in components {
            match (component.len(), self.node(component[0])) {
                (1, Node::Host(rank_index)) => {
                    suspects.push(Suspect::Host {
                        rank_index,
                        events: events_into(Node::Host(rank_index)),
                        guess: self.guess[rank_index],
                    });
                }
                (1, Node::Device(rank_index)) => {
                    let mut events = events_into(Node::Device(rank_index));
                    if events.is_empty() {
                        events = events_into(Node::Host(rank_index));
                    }
                    suspects.push(Suspect::Device { rank_index, events });
                }
                (1, Node::Event(event)) => {
                    let ahead = self.gone_ahead(event, &into);
                    if ahead.is_empty() {
                        suspects.push(Suspect::Complete(self.events[event]));
                    }
                    suspects.extend(ahead);
                }
                _ => self.cycle(&component, &events_into, &mut suspects),
            }
        }
        // A rank in the store, or in the creation of a communicator that no record shows, waits for
        // some other rank.
        let waits_elsewhere = |suspect: &Suspect| {
            matches!(suspect, Suspect::Host { rank_index, .. } if !self.world.views[*rank_index].halted()
                && self.world.views[*rank_index].host.observed.activity == Activity::CommInit)
        };
        let certain = |suspect: &Suspect| !matches!(suspect, Suspect::Host { guess: true, .. });
        if suspects.iter().any(|suspect| certain(suspect) && !waits_elsewhere(suspect)) {
            suspects.retain(|suspect| !waits_elsewhere(suspect));
        }
        // A guess counts only when there is nothing better.
        if suspects.iter().any(|suspect| !matches!(suspect, Suspect::Host { guess: true, .. })) {
            suspects.retain(|suspect| !matches!(suspect, Suspect::Host { guess: true, .. }));
        }
        suspects
    }

    /// The ranks inside the creation of a communicator, if others wait for each of them in the
    /// creation of an earlier one: they have left that creation without the others, so the others
    /// cannot come to theirs.
    fn gone_ahead(&self, event: usize, into: &HashMap<usize, Vec<Event>>) -> Vec<Suspect> {
        let creation = |event: &Event| matches!(event, Event::Init { .. } | Event::Split { .. });
        if !creation(&self.events[event]) {
            return Vec::new();
        }
        let suspect = |&rank_index: &usize| {
            let missed: Vec<Event> =
                into.get(&self.number(Node::Host(rank_index)))?.iter().copied().filter(creation).collect();
            (!missed.is_empty()).then_some(Suspect::Host { rank_index, events: missed, guess: self.guess[rank_index] })
        };
        self.waiters[event].iter().map(suspect).collect::<Option<Vec<_>>>().unwrap_or_default()
    }

    /// The ranks that wait for a resource of this rank, directly or through other ranks.
    fn waiters_behind(&self, holder: usize) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut wanted = vec![holder];
        while let Some(holder) = wanted.pop() {
            for wait in self.resource_waits.iter().filter(|wait| wait.holder == holder) {
                if found.insert(wait.waiter) {
                    wanted.push(wait.waiter);
                }
            }
        }
        found
    }

    /// A cycle is real only if every host in it is known to wait. A host that is only assumed to
    /// wait is the suspect.
    fn cycle(&self, component: &[usize], events_into: &dyn Fn(Node) -> Vec<Event>, suspects: &mut Vec<Suspect>) {
        let hosts: Vec<usize> = component
            .iter()
            .filter_map(|number| match self.node(*number) {
                Node::Host(rank_index) => Some(rank_index),
                _ => None,
            })
            .collect();
        // A rank that holds a resource and waits for the rank that needs it could have released it.
        let holds = |rank_index: &usize| {
            let of = |wait: &&ResourceWait| wait.holder == *rank_index && hosts.contains(&wait.waiter);
            self.resource_waits.iter().any(|wait| of(&wait))
        };
        let holders: Vec<usize> = hosts.iter().copied().filter(holds).collect();
        if !holders.is_empty() {
            suspects.extend(holders.into_iter().map(|rank_index| {
                Suspect::Host {
                    rank_index,
                    events: self
                        .waiters_behind(rank_index)
                        .into_iter()
                        .flat_map(|rank_index| events_into(Node::Host(rank_index)))
                        .collect(),
                    guess: false,
                }
            }));
            return;
        }
        let assumed_device_wait: Vec<usize> =
            hosts.iter().copied().filter(|rank_index| self.assumed_device_wait[*rank_index]).collect();
        // If no host is known to wait, the stacks tell nothing, and the cycle is the better
        // explanation.
        if !assumed_device_wait.is_empty() && assumed_device_wait.len() < hosts.len() || assumed_device_wait.len() == 1
        {
            suspects.extend(assumed_device_wait.into_iter().map(|rank_index| Suspect::Host {
                rank_index,
                events: events_into(Node::Host(rank_index)),
                guess: self.guess[rank_index],
            }));
            return;
        }
        let mut events: Vec<Event> = component
            .iter()
            .filter_map(|number| match self.node(*number) {
                Node::Event(event) => Some(self.events[event]),
                _ => None,
            })
            .collect();
        events.sort_unstable();
        // The two ends of a transfer match and nothing else holds them up: they wait for the data,
        // not for a rank.
        if hosts.is_empty() && events.len() == component.len() {
            suspects.extend(events.into_iter().map(Suspect::Complete));
            return;
        }
        suspects.push(Suspect::Cycle(events));
    }
}
