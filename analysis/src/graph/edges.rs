//! Edges of collectives, of the creation and the split of communicators, and of hosts that have not
//! made a call, by their stacks.

use std::collections::{BTreeSet, HashMap};

use xpu_timer_proto::v1::{CommunicatorState, Op, OpKind, OpStatus, Operation, Presence};

use super::builder::{Builder, Event, Node};
use crate::{
    matching::{Member, certainly_absent},
    verdict::Activity,
    world::{RankView, World, is_collective, is_init},
};

/// Collectives.
impl Builder<'_, '_> {
    /// Adds the edges of all pending collectives.
    pub(super) fn collectives(&mut self) {
        let comms = self.comms;
        for (comm, content) in comms.iter().enumerate().filter(|(_, content)| content.busy()) {
            let seqs: BTreeSet<u64> = content.members.iter().filter_map(|member| self.waiting_seq(member)).collect();
            let seqs: Vec<u64> = seqs.into_iter().collect();
            if seqs.is_empty() {
                continue;
            }
            self.chain_collectives(comm, &seqs);
            let has_blocker = self.member_edges(comm, &seqs);
            let has_blocker = self.absent_member_edges(comm, seqs[0]) || has_blocker;
            if !has_blocker {
                self.fallback_edges(comm, seqs[0]);
            }
        }
    }

    /// A collective waits for the collective before it in the same communicator.
    fn chain_collectives(&mut self, comm: usize, seqs: &[u64]) {
        for pair in seqs.windows(2) {
            let [before, after] = [pair[0], pair[1]].map(|seq| self.event(Event::Collective { comm, seq }));
            self.edge(after, before);
        }
    }

    /// Connects each member with the collective that it waits in and with the first ones that wait
    /// for its host and for its device. Returns whether the first collective waits for a member.
    fn member_edges(&mut self, comm: usize, seqs: &[u64]) -> bool {
        let comms = self.comms;
        let mut has_blocker = false;
        for member in &comms[comm].members {
            let view = &self.world.views[member.rank_index];
            if let Some(seq) = self.waiting_seq(member)
                && member.started >= seq
            {
                let event = self.event(Event::Collective { comm, seq });
                self.edge(Node::Device(member.rank_index), event);
                self.add_waiter(event, member.rank_index);
            }
            let passed = if view.dead() { member.completed } else { member.launched };
            let late = seqs.partition_point(|seq| *seq <= passed);
            if let Some(seq) = seqs.get(late) {
                let event = self.event(Event::Collective { comm, seq: *seq });
                self.edge(event, Node::Host(member.rank_index));
                has_blocker |= late == 0;
            }
            let started = member.started.max(member.completed);
            let blocked = seqs.partition_point(|seq| *seq <= started);
            if let Some(seq) = seqs.get(blocked).filter(|seq| **seq <= passed) {
                let event = self.event(Event::Collective { comm, seq: *seq });
                let in_call = view.busy_in_nccl() && is_in_call(view, comms[comm].id, *seq);
                let host = view.halted() || runs_on_host(view) || in_call;
                let to = if host { Node::Host(member.rank_index) } else { Node::Device(member.rank_index) };
                self.edge(event, to);
                has_blocker |= blocked == 0;
            }
        }
        has_blocker
    }

    /// The first collective waits for members without a record that are certainly not in it.
    /// Returns whether there are any.
    fn absent_member_edges(&mut self, comm: usize, first: u64) -> bool {
        let comms = self.comms;
        let first = self.event(Event::Collective { comm, seq: first });
        let mut any = false;
        for &rank_index in comms[comm].silent.iter().filter(|index| certainly_absent(self.world, **index)) {
            self.edge(first, Node::Host(rank_index));
            any = true;
        }
        any
    }

    /// All known members are in the first collective. A member without any record is suspected
    /// before the network is. So is a member that cannot run, because its threads move the data.
    fn fallback_edges(&mut self, comm: usize, seq: u64) {
        let comms = self.comms;
        let content = &comms[comm];
        let first = self.event(Event::Collective { comm, seq });
        for &rank_index in &content.silent {
            self.guess[rank_index] = true;
            self.edge(first, Node::Host(rank_index));
        }
        for member in &content.members {
            let halted = self.world.views[member.rank_index].halted();
            if content.silent.is_empty() && halted && member.completed < seq {
                self.edge(first, Node::Host(member.rank_index));
            }
        }
    }
}

/// Whether the host itself runs what the rank has launched: it has no device, and no collective is
/// under way. A host library runs a collective only while a thread waits for it.
fn runs_on_host(view: &RankView<'_>) -> bool {
    let under_way = |operation: &Operation| operation.kind() == OpKind::Collective && operation.started_ns != 0;
    !view.has_device() && !view.pending().any(under_way)
}

/// Whether the host is inside the call of a collective, by the record. The device cannot start what
/// the host has not launched yet.
fn is_in_call(view: &RankView<'_>, communicator: u64, seq: u64) -> bool {
    let of_call = |operation: &&Operation| {
        is_collective(operation) && (operation.communicator, operation.seq) == (communicator, seq)
    };
    view.pending().find(of_call).is_some_and(|operation| operation.returned_ns == 0 && operation.started_ns == 0)
}

/// The creation and the split of communicators.
impl Builder<'_, '_> {
    /// Adds the edges of all communicators that some rank creates or splits.
    pub(super) fn creations(&mut self) {
        let comms = self.comms;
        let creating = |member: &&Member<'_>| member.initializing;
        let creators: BTreeSet<usize> = comms
            .iter()
            .flat_map(|comm| comm.members.iter().filter(creating))
            .map(|member| member.rank_index)
            .collect();
        for (comm, content) in comms.iter().enumerate() {
            let initializing: Vec<usize> =
                content.members.iter().filter(creating).map(|member| member.rank_index).collect();
            if !initializing.is_empty() {
                self.creation_edges(comm, &initializing, &creators);
            }
        }
        self.split_edges();
    }

    /// Connects the members inside the creation of a communicator and the members that are not.
    fn creation_edges(&mut self, comm: usize, initializing: &[usize], creators: &BTreeSet<usize>) {
        let comms = self.comms;
        let content = &comms[comm];
        let node = self.event(Event::Init { comm });
        for &rank_index in initializing {
            self.edge(Node::Host(rank_index), node);
            self.add_waiter(node, rank_index);
            if self.world.views[rank_index].halted() {
                self.edge(node, Node::Host(rank_index));
            }
        }
        for &rank_index in &content.silent {
            // A member that is in the store, which comes before the creation, waits for the others
            // as well. A member that creates another communicator waits in that creation.
            let view = &self.world.views[rank_index];
            let in_store = view.host.observed.activity == Activity::CommInit && !view.halted();
            if in_store && !creators.contains(&rank_index) {
                self.edge(Node::Host(rank_index), node);
                self.add_waiter(node, rank_index);
                continue;
            }
            self.guess[rank_index] |= !certainly_absent(self.world, rank_index);
            self.edge(node, Node::Host(rank_index));
        }
        // A rank whose creation has returned while others are still inside did not take part in it.
        let returned =
            |state| matches!(state, CommunicatorState::Ready | CommunicatorState::Failed | CommunicatorState::Aborted);
        if content.silent.is_empty() && content.unnamed == 0 {
            for member in content.members.iter().filter(|member| returned(member.state)) {
                self.edge(node, Node::Host(member.rank_index));
            }
        }
        self.late_for_split(node, comm, initializing[0]);
    }

    /// Connects the ranks inside a split, and the members of its communicator that are not.
    fn split_edges(&mut self) {
        let comms = self.comms;
        for rank_index in 0..self.world.views.len() {
            if let Some(event) = self.split_of(rank_index) {
                let node = self.event(event);
                self.edge(Node::Host(rank_index), node);
                self.add_waiter(node, rank_index);
            }
        }
        for index in 0..self.events.len() {
            let Event::Split { comm } = self.events[index] else { continue };
            let inside: BTreeSet<usize> = self.waiters[index].iter().copied().collect();
            let members = comms[comm].members.iter().map(|member| member.rank_index);
            for rank_index in members.chain(comms[comm].silent.iter().copied()) {
                if !inside.contains(&rank_index) {
                    self.edge(Node::Event(index), Node::Host(rank_index));
                }
            }
        }
    }

    /// Suspects the ranks that have made fewer splits of the parent than a rank inside the creation
    /// of `child`: all ranks of a communicator split it together. Only a complete record shows how
    /// many splits a rank has made, and a rank inside a split of the parent is not late.
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
}

/// The splits of a communicator that a rank has made, with and without a child of its own. If
/// `unknown`, splits whose child is no longer listed count as well, because they may be of this
/// communicator.
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

/// Hosts.
impl Builder<'_, '_> {
    /// Adds what each such host waits for itself.
    pub(super) fn hosts(&mut self) {
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
                // A call of a host library that no record shows, such as one on an MPI window.
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

    pub(super) fn assumed(&self) -> Vec<usize> {
        let base = 2 * self.world.views.len();
        let awaited: BTreeSet<usize> = self.edges[base..].iter().flatten().copied().collect();
        let assumed = |rank_index: &usize| {
            self.assumed_device_wait[*rank_index]
                && !self.world.views[*rank_index].host.stack
                && awaited.contains(&self.number(Node::Host(*rank_index)))
        };
        (0..self.world.views.len()).filter(assumed).collect()
    }
}
