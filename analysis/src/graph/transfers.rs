//! Edges of sends and receives.

use std::collections::BTreeMap;

use xpu_timer_proto::v1::{Op, Operation, Presence};

use super::builder::{Builder, Event, Node};
use crate::{matching::certainly_absent, world::World};

/// Most members of a communicator to consider as senders to a receive from any rank. It bounds the
/// size of the graph.
const MOST_SENDERS: usize = 1024;

impl Builder<'_, '_> {
    pub(super) fn point_to_point(&mut self) {
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
                    // The tags differ, so each end waits for another message.
                    Some(_) if !tags_meet(self.world, comms[comm].id, (rank_index, event), (other, counterpart)) => {
                        self.edge(node, Node::Host(other));
                    }
                    // The two ends match. If something holds them up, it is another operation of
                    // the peer's group.
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

    /// Sends and receives of one group complete together, so each of them waits for what the others
    /// wait for.
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

    /// Whether a peer that has left can be assumed to have completed its part of a transfer, so
    /// that the transfer is pending only because of its group: the peer has launched as many
    /// transfers as the waiting rank, and another peer of the group, which left as well, has
    /// launched fewer.
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

    /// Number of sends and receives that a rank has launched on a communicator.
    fn launched_transfers(&self, comm: usize, rank_index: usize) -> u64 {
        let communicators = self.world.views[rank_index].flight.into_iter().flat_map(|flight| &flight.communicators);
        let of = |id: u64| communicators.into_iter().find(|communicator| communicator.id == id);
        of(self.comms[comm].id).map_or(0, |communicator| communicator.point_to_point)
    }

    /// A receive from any rank waits for every member that does not send to it, as long as one of
    /// them may still send.
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
}

/// Whether one of the pending sends and receives at both ends of a pair can match by tag. Only MPI
/// and gloo have tags. A negative tag matches any.
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
