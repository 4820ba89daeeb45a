//! Edges of hosts that have not made a call, by their stacks.

use std::collections::BTreeSet;

use xpu_timer_proto::v1::{OpKind, Presence};

use super::builder::{Builder, Node};
use crate::verdict::Activity;

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
