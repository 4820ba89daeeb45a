//! Finds the suspects: the places where chains of waiting end.

use std::collections::{BTreeSet, HashMap};

use super::builder::{Builder, Event, Node, ResourceWait, Suspect};
use crate::verdict::Activity;

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
        let behind = self.behind_creations(found.clone());
        if behind.is_empty() { found } else { behind }
    }

    /// The creation of a communicator with unknown members explains nothing. Ranks that are not
    /// behind it may wait for something that is known: removes such ends of the graph, and what
    /// waits in them, until other ends appear.
    fn behind_creations(&self, mut ends: Vec<Suspect>) -> Vec<Suspect> {
        let mut left_out = BTreeSet::new();
        for _ in 0..MOST_PEELED {
            let complete = |suspect: &Suspect| match suspect {
                Suspect::Complete(event) => Some(self.events.binary_search(event).unwrap_or(0)),
                _ => None,
            };
            let Some(complete) = ends.iter().map(complete).collect::<Option<Vec<usize>>>() else { break };
            if complete.is_empty() {
                break;
            }
            for event in complete {
                left_out.insert(self.number(Node::Event(event)));
                let inside = self.waiters[event].iter();
                let nodes = inside.flat_map(|rank_index| [Node::Host(*rank_index), Node::Device(*rank_index)]);
                left_out.extend(nodes.map(|node| self.number(node)));
            }
            let mut edges = self.edges.clone();
            edges.iter_mut().for_each(|to| to.retain(|node| !left_out.contains(node)));
            ends = self.suspects_of(&edges);
            ends.retain(|suspect| {
                !matches!(suspect, Suspect::Complete(event)
                    if left_out.contains(&self.number(Node::Event(self.events.binary_search(event).unwrap_or(0)))))
            });
        }
        ends
    }

    fn unknown_creation(&self, event: Event) -> bool {
        matches!(event, Event::Init { comm } | Event::Split { comm } if self.comms[comm].unnamed > 0)
    }

    fn suspects_of(&self, edges: &[Vec<usize>]) -> Vec<Suspect> {
        let base = 2 * self.world.views.len();
        let into = self.events_into_ranks(edges);
        // A rank that holds up another rank also holds up the ranks that wait for that one.
        let direct = |node: Node| into.get(&self.number(node)).cloned().unwrap_or_default();
        let events_into = |node: Node| match (node, direct(node)) {
            (Node::Host(rank_index), events) if events.is_empty() => {
                let waiters = self.waiters_behind(rank_index).into_iter();
                waiters.flat_map(|rank_index| direct(Node::Host(rank_index))).collect()
            }
            (_, events) => events,
        };
        let mut suspects = Vec::new();
        for component in sinks(edges, base..base + self.events.len()) {
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
        self.drop_weaker(&mut suspects);
        suspects
    }

    /// The events that wait for each host and each device, by the number of its node.
    fn events_into_ranks(&self, edges: &[Vec<usize>]) -> HashMap<usize, Vec<Event>> {
        let base = 2 * self.world.views.len();
        let mut into: HashMap<usize, Vec<Event>> = HashMap::new();
        for (index, event) in self.events.iter().enumerate() {
            for &to in edges[base + index].iter().filter(|to| **to < base) {
                into.entry(to).or_default().push(*event);
            }
        }
        into
    }

    /// Drops the suspects that count only if there is nothing better.
    fn drop_weaker(&self, suspects: &mut Vec<Suspect>) {
        // A rank in the store, or in the creation of a communicator that no record shows, waits for
        // some other rank.
        let waits_elsewhere = |suspect: &Suspect| {
            matches!(suspect, Suspect::Host { rank_index, .. } if !self.world.views[*rank_index].halted()
                && self.world.views[*rank_index].host.observed.activity == Activity::CommInit)
        };
        let is_guess = |suspect: &Suspect| matches!(suspect, Suspect::Host { guess: true, .. });
        if suspects.iter().any(|suspect| !is_guess(suspect) && !waits_elsewhere(suspect)) {
            suspects.retain(|suspect| !waits_elsewhere(suspect));
        }
        if suspects.iter().any(|suspect| !is_guess(suspect)) {
            suspects.retain(|suspect| !is_guess(suspect));
        }
    }

    /// The ranks inside the creation of a communicator, if others wait for each of them in the
    /// creation of an earlier one: they have left that creation without the others, so the others
    /// cannot reach theirs.
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
        // If no host is known to wait, the stacks show nothing, and the cycle is the better
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

/// The strongly connected components that no edge leaves: Tarjan's algorithm without recursion,
/// from the given roots. Ordered by their smallest node, which is the order of ranks.
fn sinks(edges: &[Vec<usize>], roots: std::ops::Range<usize>) -> Vec<Vec<usize>> {
    const NEW: usize = usize::MAX;
    let mut order = vec![NEW; edges.len()];
    let mut low = vec![0; edges.len()];
    let mut component_of = vec![NEW; edges.len()];
    let mut components: Vec<Vec<usize>> = Vec::new();
    let mut counter = 0;
    let mut stack: Vec<usize> = Vec::new();
    let mut work: Vec<(usize, usize)> = Vec::new();
    for root in roots {
        if order[root] != NEW {
            continue;
        }
        work.push((root, 0));
        while let Some((node, next)) = work.pop() {
            if next == 0 {
                order[node] = counter;
                low[node] = counter;
                counter += 1;
                stack.push(node);
            }
            if let Some(&to) = edges[node].get(next) {
                work.push((node, next + 1));
                if order[to] == NEW {
                    work.push((to, 0));
                } else if component_of[to] == NEW {
                    low[node] = low[node].min(order[to]);
                }
                continue;
            }
            if low[node] == order[node] {
                let mut component = Vec::new();
                while let Some(member) = stack.pop() {
                    component_of[member] = components.len();
                    component.push(member);
                    if member == node {
                        break;
                    }
                }
                component.sort_unstable();
                components.push(component);
            }
            if let Some(&(parent, _)) = work.last() {
                low[parent] = low[parent].min(low[node]);
            }
        }
    }
    let mut sinks: Vec<Vec<usize>> = components
        .iter()
        .enumerate()
        .filter(|(index, component)| {
            component.iter().all(|node| edges[*node].iter().all(|to| component_of[*to] == *index))
        })
        .map(|(_, component)| component.clone())
        .collect();
    sinks.sort_unstable();
    sinks
}
