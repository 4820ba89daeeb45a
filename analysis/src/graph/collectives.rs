//! Edges of collectives.

use std::collections::BTreeSet;

use xpu_timer_proto::v1::{OpKind, Operation};

use super::{
    builder::{Builder, Node},
    event::Event,
};
use crate::{matching::certainly_absent, world::RankView};

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
            let begun = member.started.max(member.completed);
            let blocked = seqs.partition_point(|seq| *seq <= begun);
            if let Some(seq) = seqs.get(blocked).filter(|seq| **seq <= passed) {
                let event = self.event(Event::Collective { comm, seq: *seq });
                let host = view.halted() || runs_on_host(view);
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
/// under way. A host library runs a collective only while somebody waits for it.
fn runs_on_host(view: &RankView<'_>) -> bool {
    let under_way = |operation: &Operation| operation.kind() == OpKind::Collective && operation.started_ns != 0;
    !view.has_device() && !view.pending().any(under_way)
}
