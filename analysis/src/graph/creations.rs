//! Edges of the creation and the split of communicators.

use std::collections::{BTreeSet, HashMap};

use xpu_timer_proto::v1::{CommunicatorState, Op, OpKind, OpStatus, Operation};

use super::{
    builder::{Builder, Node},
    event::Event,
};
use crate::{
    matching::{Member, certainly_absent},
    verdict::Activity,
    world::{World, is_init},
};

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
