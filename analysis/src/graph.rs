//! Who waits for whom: the wait-for graph over all communicators, and the places where the waiting ends.
//!
//! A node is the host of a rank (it has not launched something), the device of a rank (it has launched something that has not
//! begun), or an event: a collective, a point-to-point operation, or the creation of a communicator. Edges go from the one
//! that waits to what it waits for. Where no edge goes on, there is the suspect. The graph has a number of edges linear in
//! the number of memberships, because the collectives of one communicator are chained: who waits for number 9 waits for all
//! that number 8 waits for.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use xpu_timer_proto::v1::{CommunicatorState, Op, OpKind, OpStatus, Operation, Presence};

use crate::{
    matching::{Comm, Member, certainly_absent},
    resource_waits::{ResourceWait, resource_waits},
    verdict::Activity,
    world::{RankView, World, is_init, is_p2p},
};

/// Of a communicator so many members are looked at as senders to one that receives from any rank, which keeps the graph small.
const MOST_SENDERS: usize = 1024;

/// So often the ends of waiting are left out to see what is behind them.
const MOST_PEELED: usize = 16;

/// Something that ranks wait in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Event {
    /// A collective of the communicator with this index, by its sequence number.
    Collective { comm: usize, seq: u64 },
    /// The oldest pending send or receive of a rank on a communicator with a peer.
    PointToPoint { comm: usize, rank_index: usize, peer: i32, recv: bool },
    /// The creation of a communicator.
    Init { comm: usize },
    /// The split of a communicator.
    Split { comm: usize },
}

/// Where a chain of waiting ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Suspect {
    /// A rank has not made the call that others wait for, and nothing shows that it waits itself.
    Host {
        /// The rank's view.
        rank_index: usize,
        /// What the others wait in; empty when nobody waits.
        events: Vec<Event>,
        /// No record tells that it is absent; it is suspected because nobody else is.
        guess: bool,
    },
    /// A rank has launched what others wait for (or waits for its own device), and its device has not begun it.
    Device {
        /// The rank's view.
        rank_index: usize,
        /// What the others wait in.
        events: Vec<Event>,
    },
    /// All ranks have entered, and it does not complete.
    Complete(Event),
    /// Ranks wait for each other in a circle.
    Cycle(Vec<Event>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Node {
    Host(usize),
    Device(usize),
    Event(usize),
}

/// The graph of one job.
#[derive(Debug)]
pub(crate) struct Graph {
    /// All events, ascending.
    pub events: Vec<Event>,
    /// Ranks that are inside an event, begun on their device; by event.
    pub waiters: Vec<Vec<usize>>,
    /// Where the waiting ends.
    pub suspects: Vec<Suspect>,
    /// Ranks that wait for what another one holds, where nothing else tells what they wait for.
    pub resource_waits: Vec<ResourceWait>,
    /// Ranks for which others wait, and of which it is only assumed that they wait themselves: there is no stack of them.
    pub assumed: Vec<usize>,
}

impl Graph {
    /// The ranks inside an event.
    pub fn waiters_of(&self, event: Event) -> &[usize] {
        self.events.binary_search(&event).map_or(&[], |index| &self.waiters[index])
    }
}

/// Builds the graph and follows it to its ends.
pub(crate) fn build(world: &World<'_>, comms: &[Comm<'_>]) -> Graph {
    let mut builder = Builder::new(world, comms);
    builder.collect_events();
    builder.collectives();
    builder.point_to_point();
    builder.inits();
    builder.hosts();
    let suspects = builder.suspects();
    let assumed = builder.assumed();
    Graph {
        events: builder.events,
        waiters: builder.waiters,
        suspects,
        resource_waits: builder.resource_waits,
        assumed,
    }
}

struct Builder<'w, 'a> {
    world: &'w World<'a>,
    comms: &'w [Comm<'a>],
    by_id: HashMap<u64, usize>,
    events: Vec<Event>,
    waiters: Vec<Vec<usize>>,
    /// The oldest pending sends and receives of each rank, one for each communicator, peer and direction.
    transfers: Vec<BTreeMap<Event, &'a Operation>>,
    /// Edges by node; see `number`.
    edges: Vec<Vec<usize>>,
    /// Communicators that some rank still creates.
    creating: Vec<bool>,
    /// Hosts whose edge to their device is an assumption: their stack does not say that they wait.
    assumed_device_wait: Vec<bool>,
    /// Hosts that are suspected only because their peers wait and they have no record.
    guess: Vec<bool>,
    /// A rank that lives waits for something, so what the dead had not completed is no wait.
    living_waiter: bool,
    /// Ranks that wait for what another one holds.
    resource_waits: Vec<ResourceWait>,
}

impl<'w, 'a> Builder<'w, 'a> {
    fn new(world: &'w World<'a>, comms: &'w [Comm<'a>]) -> Self {
        let by_id: HashMap<u64, usize> = comms.iter().enumerate().map(|(index, comm)| (comm.id, index)).collect();
        let views = world.views.len();
        let living_waiter = comms
            .iter()
            .flat_map(|comm| &comm.members)
            .any(|member| member.waiting_seq.is_some() && !world.views[member.rank_index].dead());
        let waits = |rank_index: usize| !(living_waiter && world.views[rank_index].dead());
        let transfers = (0..views)
            .map(|rank_index| if waits(rank_index) { transfers_of(world, &by_id, rank_index) } else { BTreeMap::new() })
            .collect();
        Builder {
            world,
            comms,
            by_id,
            events: Vec::new(),
            waiters: Vec::new(),
            transfers,
            edges: Vec::new(),
            creating: comms.iter().map(|comm| comm.members.iter().any(|member| member.initializing)).collect(),
            assumed_device_wait: vec![false; views],
            guess: vec![false; views],
            living_waiter,
            resource_waits: resource_waits(world),
        }
    }

    /// The collective that a member waits in.
    fn waiting_seq(&self, member: &Member<'_>) -> Option<u64> {
        member.waiting_seq.filter(|_| !(self.living_waiter && self.world.views[member.rank_index].dead()))
    }

    fn number(&self, node: Node) -> usize {
        let views = self.world.views.len();
        match node {
            Node::Host(rank_index) => rank_index,
            Node::Device(rank_index) => views + rank_index,
            Node::Event(event) => 2 * views + event,
        }
    }

    fn node(&self, number: usize) -> Node {
        let views = self.world.views.len();
        match number {
            host if host < views => Node::Host(host),
            device if device < 2 * views => Node::Device(device - views),
            event => Node::Event(event - 2 * views),
        }
    }

    fn edge(&mut self, from: Node, to: Node) {
        let (from, to) = (self.number(from), self.number(to));
        self.edges[from].push(to);
    }

    fn event(&self, event: Event) -> Node {
        // Every event was collected before any edge is drawn.
        Node::Event(self.events.binary_search(&event).unwrap_or(0))
    }

    fn collect_events(&mut self) {
        let mut events = BTreeSet::new();
        for (comm, content) in self.comms.iter().enumerate() {
            for member in &content.members {
                if let Some(seq) = self.waiting_seq(member) {
                    events.insert(Event::Collective { comm, seq });
                }
                if member.initializing {
                    events.insert(Event::Init { comm });
                }
            }
        }
        for rank_index in 0..self.world.views.len() {
            events.extend(self.transfers[rank_index].keys().copied());
            events.extend(self.split_of(rank_index));
        }
        self.events = events.into_iter().collect();
        self.waiters = vec![Vec::new(); self.events.len()];
        self.edges = vec![Vec::new(); 2 * self.world.views.len() + self.events.len()];
    }

    fn split_of(&self, rank_index: usize) -> Option<Event> {
        let split = self.world.views[rank_index]
            .pending()
            .find(|operation| is_init(operation) && operation.op() == Op::CommSplit)?;
        let comm = *self.by_id.get(&split.communicator)?;
        // Where the identity is that of the child, its creation is an event already that waits for the members of the parent.
        let known = self.world.views[rank_index].flight.into_iter().flat_map(|flight| &flight.communicators);
        let parent = known.into_iter().find(|known| known.id == split.communicator).map(|known| known.parent);
        let made = parent.and_then(|parent| self.by_id.get(&parent)).is_some_and(|parent| !self.creating[*parent]);
        let child = self.comms[comm].member(rank_index).is_some_and(|member| member.initializing);
        (!child || !made).then_some(Event::Split { comm })
    }

    /// What a rank that has not made a call leads to: its host, unless it cannot run at all, which is the same node.
    fn collectives(&mut self) {
        let comms = self.comms;
        for (comm, content) in comms.iter().enumerate().filter(|(_, content)| content.busy()) {
            let seqs: Vec<u64> = {
                let seqs: BTreeSet<u64> =
                    content.members.iter().filter_map(|member| self.waiting_seq(member)).collect();
                seqs.into_iter().collect()
            };
            if seqs.is_empty() {
                continue;
            }
            let at = |seq: u64| Event::Collective { comm, seq };
            for pair in seqs.windows(2) {
                let (from, to) = (self.event(at(pair[1])), self.event(at(pair[0])));
                self.edge(from, to);
            }
            // The first event that each member holds up.
            let mut has_blocker = vec![false; seqs.len()];
            for member in &content.members {
                let view = &self.world.views[member.rank_index];
                if let Some(seq) = self.waiting_seq(member)
                    && member.started >= seq
                {
                    let event = self.event(at(seq));
                    self.edge(Node::Device(member.rank_index), event);
                    self.add_waiter(event, member.rank_index);
                }
                let passed = if view.dead() { member.completed } else { member.launched };
                let late = seqs.partition_point(|seq| *seq <= passed);
                if let Some(seq) = seqs.get(late) {
                    let event = self.event(at(*seq));
                    self.edge(event, Node::Host(member.rank_index));
                    has_blocker[late] = true;
                }
                let begun = member.started.max(member.completed);
                let blocked = seqs.partition_point(|seq| *seq <= begun);
                if let Some(seq) = seqs.get(blocked).filter(|seq| **seq <= passed) {
                    let event = self.event(at(*seq));
                    let host = view.halted() || runs_on_host(view);
                    let to = if host { Node::Host(member.rank_index) } else { Node::Device(member.rank_index) };
                    self.edge(event, to);
                    has_blocker[blocked] = true;
                }
            }
            let first = self.event(at(seqs[0]));
            let absent = content.silent.iter().filter(|rank_index| certainly_absent(self.world, **rank_index));
            for &rank_index in absent {
                self.edge(first, Node::Host(rank_index));
                has_blocker[0] = true;
            }
            if has_blocker[0] {
                continue;
            }
            // Everybody who is known is in. A member of whom nothing is known is suspected before the network is, and so is
            // one that cannot run, because its threads move the data.
            for &rank_index in &content.silent {
                self.guess[rank_index] = true;
                self.edge(first, Node::Host(rank_index));
            }
            for member in &content.members {
                if content.silent.is_empty()
                    && self.world.views[member.rank_index].halted()
                    && member.completed < seqs[0]
                {
                    self.edge(first, Node::Host(member.rank_index));
                }
            }
        }
    }

    fn add_waiter(&mut self, event: Node, rank_index: usize) {
        if let Node::Event(index) = event {
            self.waiters[index].push(rank_index);
        }
    }

    fn point_to_point(&mut self) {
        let comms = self.comms;
        for rank_index in 0..self.world.views.len() {
            let transfers: Vec<(Event, &Operation)> =
                self.transfers[rank_index].iter().map(|(event, operation)| (*event, *operation)).collect();
            self.groups(&transfers);
            for (event, operation) in transfers {
                let Event::PointToPoint { comm, peer, recv, .. } = event else { continue };
                let node = self.event(event);
                if operation.started_ns != 0 {
                    self.edge(Node::Device(rank_index), node);
                    self.add_waiter(node, rank_index);
                } else {
                    // It waits for its own device first.
                    self.edge(node, Node::Device(rank_index));
                    continue;
                }
                if recv && peer < 0 {
                    self.any_source_receive(node, comm, rank_index);
                    continue;
                }
                let Some(other) = comms[comm].rank_index_of(peer) else {
                    for &silent in &comms[comm].silent {
                        self.guess[silent] |= !certainly_absent(self.world, silent);
                        self.edge(node, Node::Host(silent));
                    }
                    continue;
                };
                let own = comms[comm].member(rank_index).map_or(-1, |member| member.comm_rank);
                let counterpart = Event::PointToPoint { comm, rank_index: other, peer: own, recv: !recv };
                match self.transfers[other].get(&counterpart) {
                    None if self.counterpart_completed(comm, rank_index, other, operation.group) => {}
                    None => self.edge(node, Node::Host(other)),
                    Some(_) if self.world.views[other].halted() => self.edge(node, Node::Host(other)),
                    Some(operation) if operation.started_ns == 0 => self.edge(node, Node::Device(other)),
                    // Each waits for another message than the one that the other is about.
                    Some(_) if !tags_meet(self.world, comms[comm].id, (rank_index, event), (other, counterpart)) => {
                        self.edge(node, Node::Host(other));
                    }
                    // The two ends meet. What holds them up, if anything does, is what the other end was grouped with.
                    Some(_) => {
                        let there = self.event(counterpart);
                        if there != node {
                            self.edge(node, there);
                        }
                    }
                }
            }
        }
    }

    /// Sends and receives that were launched as one group complete as one: each of them waits for what the others wait for.
    fn groups(&mut self, transfers: &[(Event, &Operation)]) {
        let mut groups: BTreeMap<u64, Vec<Event>> = BTreeMap::new();
        for (event, operation) in transfers.iter().filter(|(_, operation)| operation.started_ns != 0) {
            if operation.group != 0 {
                groups.entry(operation.group).or_default().push(*event);
            }
        }
        for group in groups.into_values().filter(|group| group.len() > 1) {
            let round = group.iter().zip(group.iter().cycle().skip(1));
            for (from, to) in round {
                let (from, to) = (self.event(*from), self.event(*to));
                self.edge(from, to);
            }
        }
    }

    /// Whether a peer that has left can be taken to have made its part of a transfer, which then is pending only because of what it
    /// was grouped with: it has launched as many transfers as the rank that waits, and another peer of the group, which left as well,
    /// has launched fewer.
    fn counterpart_completed(&self, comm: usize, rank_index: usize, peer: usize, group: u64) -> bool {
        let launched = |rank_index: usize| self.launched_transfers(comm, rank_index);
        let left = |rank_index: usize| self.world.views[rank_index].presence == Presence::Left;
        if group == 0 || !left(peer) || launched(peer) < launched(rank_index) {
            return false;
        }
        self.transfers[rank_index].iter().any(|(event, operation)| match *event {
            Event::PointToPoint { comm: of, peer: other, .. } if of == comm && operation.group == group => self.comms
                [comm]
                .rank_index_of(other)
                .is_some_and(|other| left(other) && launched(other) < launched(rank_index)),
            _ => false,
        })
    }

    /// Sends and receives that a rank has launched on a communicator.
    fn launched_transfers(&self, comm: usize, rank_index: usize) -> u64 {
        let communicators = self.world.views[rank_index].flight.into_iter().flat_map(|flight| &flight.communicators);
        let of = |id: u64| communicators.into_iter().find(|communicator| communicator.id == id);
        of(self.comms[comm].id).map_or(0, |communicator| communicator.point_to_point)
    }

    /// Who receives from any rank waits for all that do not send to it: as long as one of them may still come, it is that one's turn.
    fn any_source_receive(&mut self, node: Node, comm: usize, rank_index: usize) {
        let content = &self.comms[comm];
        let Some(own) = content.member(rank_index).map(|member| member.comm_rank) else { return };
        for member in content.members.iter().filter(|member| member.rank_index != rank_index).take(MOST_SENDERS) {
            let sends = Event::PointToPoint { comm, rank_index: member.rank_index, peer: own, recv: false };
            if !self.transfers[member.rank_index].contains_key(&sends) {
                self.edge(node, Node::Host(member.rank_index));
            }
        }
    }

    fn inits(&mut self) {
        let comms = self.comms;
        let creating = |member: &&Member<'_>| member.initializing;
        let creates: BTreeSet<usize> = comms
            .iter()
            .flat_map(|comm| comm.members.iter().filter(creating))
            .map(|member| member.rank_index)
            .collect();
        for (comm, content) in comms.iter().enumerate() {
            let initializing: Vec<usize> =
                content.members.iter().filter(|member| member.initializing).map(|member| member.rank_index).collect();
            if initializing.is_empty() {
                continue;
            }
            let node = self.event(Event::Init { comm });
            for &rank_index in &initializing {
                self.edge(Node::Host(rank_index), node);
                self.add_waiter(node, rank_index);
                if self.world.views[rank_index].halted() {
                    self.edge(node, Node::Host(rank_index));
                }
            }
            for &rank_index in &content.silent {
                // One that stands in the store, which comes before the creation, waits for the others as well.
                // One that creates another communicator waits in that one.
                if self.world.views[rank_index].host.observed.activity == Activity::CommInit
                    && !self.world.views[rank_index].halted()
                    && !creates.contains(&rank_index)
                {
                    self.edge(Node::Host(rank_index), node);
                    self.add_waiter(node, rank_index);
                    continue;
                }
                self.guess[rank_index] |= !certainly_absent(self.world, rank_index);
                self.edge(node, Node::Host(rank_index));
            }
            // A rank whose creation has returned while others are still inside did not take part in it.
            let returned = |state| {
                matches!(state, CommunicatorState::Ready | CommunicatorState::Failed | CommunicatorState::Aborted)
            };
            if content.silent.is_empty() && content.unnamed == 0 {
                for member in content.members.iter().filter(|member| returned(member.state)) {
                    self.edge(node, Node::Host(member.rank_index));
                }
            }
            self.late_for_split(node, comm, initializing[0]);
        }
        for rank_index in 0..self.world.views.len() {
            if let Some(event) = self.split_of(rank_index) {
                let node = self.event(event);
                self.edge(Node::Host(rank_index), node);
                self.add_waiter(node, rank_index);
            }
        }
        for index in 0..self.events.len() {
            if let Event::Split { comm } = self.events[index] {
                let inside: BTreeSet<usize> = self.waiters[index].iter().copied().collect();
                let outside = comms[comm]
                    .members
                    .iter()
                    .map(|member| member.rank_index)
                    .chain(comms[comm].silent.iter().copied());
                for rank_index in outside.filter(|rank_index| !inside.contains(rank_index)) {
                    self.edge(Node::Event(index), Node::Host(rank_index));
                }
            }
        }
    }

    /// All ranks of a communicator split it together, so who of them has made fewer splits holds up all children of this one. Only
    /// a record that is complete tells how many a rank has made, and one that is inside a split of it is there.
    fn late_for_split(&mut self, child: Node, comm: usize, inside: usize) {
        let id = self.comms[comm].id;
        let view = &self.world.views[inside];
        let known = view.flight.into_iter().flat_map(|flight| &flight.communicators);
        let Some(parent) = known.into_iter().find(|known| known.id == id).map(|known| known.parent) else { return };
        let split = view.pending().any(|operation| is_init(operation) && operation.function.contains("Split"));
        let Some(&parent) = self.by_id.get(&parent).filter(|_| split) else { return };
        let parent_id = self.comms[parent].id;
        let made = splits_of(self.world, parent_id, inside, false).count();
        let is_late = |view: &usize| {
            let splits: Vec<&Operation> = splits_of(self.world, parent_id, *view, true).collect();
            let inside = splits.iter().any(|split| split.status() == OpStatus::Pending);
            self.world.views[*view].has_full_history() && !inside && splits.len() < made
        };
        let late: Vec<usize> =
            self.comms[parent].members.iter().map(|member| member.rank_index).filter(is_late).collect();
        for view in late {
            self.edge(child, Node::Host(view));
        }
    }

    /// What a host that has not made a call waits for itself, by its stack.
    fn hosts(&mut self) {
        let resource_waits = std::mem::take(&mut self.resource_waits);
        for rank_index in 0..self.world.views.len() {
            let content = &self.world.views[rank_index];
            let in_host_call = !self.edges[self.number(Node::Host(rank_index))].is_empty();
            if content.halted() {
                let number = self.number(Node::Host(rank_index));
                self.edges[number].clear();
                continue;
            }
            if in_host_call || content.presence == Presence::Unregistered || content.unseen() {
                continue;
            }
            let device_waits = !self.edges[self.number(Node::Device(rank_index))].is_empty();
            let kernel = content.pending().any(|operation| {
                matches!(operation.kind(), OpKind::Kernel | OpKind::GraphLaunch) || operation.started_ns == 0
            });
            let activity = content.host.observed.activity;
            let follows =
                resource_waits.iter().find(|wait| wait.waiter == rank_index && activity != Activity::DeviceWait);
            if let Some(&wait) = follows {
                self.resource_waits.push(wait);
                self.edge(Node::Host(rank_index), Node::Host(wait.holder));
                continue;
            }
            match activity {
                // A call of a library on the host that no record tells of, as for a window of MPI.
                Activity::DeviceWait if !device_waits && content.flight.is_some() && !content.has_device() => {}
                Activity::DeviceWait => self.edge(Node::Host(rank_index), Node::Device(rank_index)),
                Activity::DataLoader | Activity::Io | Activity::Compile | Activity::Gc => {}
                _ if device_waits || kernel && !content.host.stack => {
                    self.assumed_device_wait[rank_index] = true;
                    self.edge(Node::Host(rank_index), Node::Device(rank_index));
                }
                _ => {}
            }
        }
    }

    fn assumed(&self) -> Vec<usize> {
        let base = 2 * self.world.views.len();
        let awaited: BTreeSet<usize> = self.edges[base..].iter().flatten().copied().collect();
        let assumed = |rank_index: &usize| {
            self.assumed_device_wait[*rank_index]
                && !self.world.views[*rank_index].host.stack
                && awaited.contains(&self.number(Node::Host(*rank_index)))
        };
        (0..self.world.views.len()).filter(assumed).collect()
    }

    /// The strongly connected components from which no edge leads away, as suspects.
    fn suspects(&self) -> Vec<Suspect> {
        let found = self.suspects_of(&self.edges);
        let unknown = |suspect: &Suspect| matches!(suspect, Suspect::Complete(event) if self.unknown_creation(*event));
        if found.is_empty() || !found.iter().all(unknown) {
            return found;
        }
        // A creation of which members are not known ends nothing: what those wait for who are not behind it may be known.
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
        // Who holds up a rank holds up what others wait for that rank in.
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
        // Who waits for the store, or in the creation of a communicator that no record tells of, waits for some other rank.
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

    /// Ranks that are in the creation of a communicator while others wait for all of them in that of an earlier one: they have
    /// left that one without the others, and it is no wonder that nobody comes to theirs.
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

    /// The ranks that wait for what a rank holds, and those that wait for what these hold, and so on.
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

    /// A circle is real only when every host in it is known to wait. One that was merely assumed to wait is the suspect.
    fn cycle(&self, component: &[usize], events_into: &dyn Fn(Node) -> Vec<Event>, suspects: &mut Vec<Suspect>) {
        let hosts: Vec<usize> = component
            .iter()
            .filter_map(|number| match self.node(*number) {
                Node::Host(rank_index) => Some(rank_index),
                _ => None,
            })
            .collect();
        // Who holds what another one waits for, and waits for that one, could have let go of it.
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
        // When no host is known to wait, their stacks tell nothing, and the circle is the better explanation.
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
        // Ends that meet and are held up by nothing else: they wait for no rank, but for the data.
        if hosts.is_empty() && events.len() == component.len() {
            suspects.extend(events.into_iter().map(Suspect::Complete));
            return;
        }
        suspects.push(Suspect::Cycle(events));
    }
}

/// Whether it is the host itself that has to run what the rank has launched, for it has no device and nothing is under way in its place: a
/// library of the host runs a collective when somebody waits for it.
fn runs_on_host(view: &RankView<'_>) -> bool {
    let under_way = |operation: &Operation| operation.kind() == OpKind::Collective && operation.started_ns != 0;
    !view.has_device() && !view.pending().any(under_way)
}

/// Whether one of the sends and receives that are pending at both ends of a pair may match, by their tags. Only MPI and gloo have
/// tags; one that is negative matches all.
pub(crate) fn tags_meet(world: &World<'_>, comm_id: u64, one: (usize, Event), other: (usize, Event)) -> bool {
    let tags = |(rank_index, event): (usize, Event)| -> Vec<i32> {
        let Event::PointToPoint { peer, recv, .. } = event else { return Vec::new() };
        let op = if recv { Op::Recv } else { Op::Send };
        world.views[rank_index]
            .pending()
            .filter(|operation| operation.communicator == comm_id && operation.peer == peer && operation.op() == op)
            .map(|operation| operation.tag.unwrap_or(-1))
            .collect()
    };
    let (one, other) = (tags(one), tags(other));
    one.iter().any(|one| other.iter().any(|other| *one < 0 || *other < 0 || one == other))
}

/// The splits of a communicator that a rank has made: those that made it a child, and those that made it none. `unknown` are those
/// whose child is not listed any longer, so that it may be one of this communicator.
fn splits_of<'a>(
    world: &World<'a>,
    parent: u64,
    rank_index: usize,
    unknown: bool,
) -> impl Iterator<Item = &'a Operation> + use<'a> {
    let content = &world.views[rank_index];
    let known = content.flight.into_iter().flat_map(|flight| &flight.communicators);
    let parents: HashMap<u64, u64> = known.map(|known| (known.id, known.parent)).collect();
    content.operations().filter(move |operation| {
        let of_parent = |id: u64| id == parent || parents.get(&id).map_or(unknown, |of| *of == parent);
        operation.kind() == OpKind::HostCall && operation.op() == Op::CommSplit && of_parent(operation.communicator)
    })
}

fn transfers_of<'a>(
    world: &World<'a>,
    by_id: &HashMap<u64, usize>,
    rank_index: usize,
) -> BTreeMap<Event, &'a Operation> {
    let mut found = BTreeMap::new();
    for operation in world.views[rank_index].pending().filter(|operation| is_p2p(operation)) {
        if let Some(&comm) = by_id.get(&operation.communicator) {
            let recv = operation.op() == Op::Recv;
            found.entry(Event::PointToPoint { comm, rank_index, peer: operation.peer, recv }).or_insert(operation);
        }
    }
    found
}

/// Tarjan's algorithm without recursion, from the given roots; only the components without an edge that leaves them.
/// Components come in the order of their smallest node, which is the order of ranks.
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
