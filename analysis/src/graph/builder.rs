//! The graph under construction: nodes, edges, the events that ranks wait in, and the resources of
//! other ranks that they wait for: a file lock that another rank holds, or a pipe or socket whose
//! other end it has.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use xpu_timer_proto::v1::{Op, Operation};

use crate::{
    matching::{Comm, Member},
    world::{World, is_init, is_p2p},
};

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

/// The end of a chain of waiting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Suspect {
    /// A rank has not made the call that others wait for, and nothing shows that it waits itself.
    Host {
        /// Index of the rank.
        rank_index: usize,
        /// The events that the others wait in. Empty if nobody waits.
        events: Vec<Event>,
        /// No record shows that the rank is absent. It is suspected only because no other rank is.
        guess: bool,
    },
    /// A rank has launched what others wait for (or waits for its own device), and its device has
    /// not started it.
    Device {
        /// Index of the rank.
        rank_index: usize,
        /// The events that the others wait in.
        events: Vec<Event>,
    },
    /// All ranks have entered the event, and it does not complete.
    Complete(Event),
    /// Ranks wait for each other in a cycle.
    Cycle(Vec<Event>),
}

/// A rank whose main thread waits for a resource that the process of another rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResourceWait {
    /// Index of the rank that waits.
    pub waiter: usize,
    /// Index of the rank that has the resource.
    pub holder: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// The host of the rank with this index.
    Host(usize),
    /// The device of the rank with this index.
    Device(usize),
    /// The event with this index.
    Event(usize),
}

pub(super) struct Builder<'w, 'a> {
    pub(super) world: &'w World<'a>,
    pub(super) comms: &'w [Comm<'a>],
    pub(super) by_id: HashMap<u64, usize>,
    pub(super) events: Vec<Event>,
    pub(super) waiters: Vec<Vec<usize>>,
    /// The oldest pending sends and receives of each rank, one for each communicator, peer and
    /// direction.
    pub(super) transfers: Vec<BTreeMap<Event, &'a Operation>>,
    /// Edges by the number of their node; see `number`.
    pub(super) edges: Vec<Vec<usize>>,
    /// Communicators that some rank is still creating.
    pub(super) creating: Vec<bool>,
    /// Hosts that are only assumed to wait for their device: their stacks do not show it.
    pub(super) assumed_device_wait: Vec<bool>,
    /// Hosts that are suspected only because their peers wait and they have no record.
    pub(super) guess: Vec<bool>,
    /// A living rank waits for something. Then pending operations of dead ranks do not count as
    /// waits.
    pub(super) living_waiter: bool,
    /// Ranks that wait for a resource of another rank.
    pub(super) resource_waits: Vec<ResourceWait>,
}

impl<'w, 'a> Builder<'w, 'a> {
    pub(super) fn new(world: &'w World<'a>, comms: &'w [Comm<'a>], resource_waits: Vec<ResourceWait>) -> Self {
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
            resource_waits,
        }
    }

    /// The collective that a member waits in.
    pub(super) fn waiting_seq(&self, member: &Member<'_>) -> Option<u64> {
        member.waiting_seq.filter(|_| !(self.living_waiter && self.world.views[member.rank_index].dead()))
    }

    pub(super) fn number(&self, node: Node) -> usize {
        let views = self.world.views.len();
        match node {
            Node::Host(rank_index) => rank_index,
            Node::Device(rank_index) => views + rank_index,
            Node::Event(event) => 2 * views + event,
        }
    }

    pub(super) fn node(&self, number: usize) -> Node {
        let views = self.world.views.len();
        match number {
            host if host < views => Node::Host(host),
            device if device < 2 * views => Node::Device(device - views),
            event => Node::Event(event - 2 * views),
        }
    }

    pub(super) fn edge(&mut self, from: Node, to: Node) {
        let (from, to) = (self.number(from), self.number(to));
        self.edges[from].push(to);
    }

    pub(super) fn event(&self, event: Event) -> Node {
        // `collect_events` has collected every event before the first edge is added.
        Node::Event(self.events.binary_search(&event).unwrap_or(0))
    }

    /// Collects every event that a rank waits for or takes part in.
    pub(super) fn collect_events(&mut self) {
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

    pub(super) fn split_of(&self, rank_index: usize) -> Option<Event> {
        let split = self.world.views[rank_index]
            .pending()
            .find(|operation| is_init(operation) && operation.op() == Op::CommSplit)?;
        let comm = *self.by_id.get(&split.communicator)?;
        // If the call names the child, the creation of the child is already an event, and waits for
        // the members of the parent.
        let known = self.world.views[rank_index].flight.into_iter().flat_map(|flight| &flight.communicators);
        let parent = known.into_iter().find(|known| known.id == split.communicator).map(|known| known.parent);
        let made = parent.and_then(|parent| self.by_id.get(&parent)).is_some_and(|parent| !self.creating[*parent]);
        let child = self.comms[comm].member(rank_index).is_some_and(|member| member.initializing);
        (!child || !made).then_some(Event::Split { comm })
    }

    pub(super) fn add_waiter(&mut self, event: Node, rank_index: usize) {
        if let Node::Event(index) = event {
            self.waiters[index].push(rank_index);
        }
    }
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
