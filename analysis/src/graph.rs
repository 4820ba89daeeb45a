//! Who waits for whom: the wait-for graph over all communicators, and the places where the waiting ends.
//!
//! A node is the host of a rank (it has not launched something), the device of a rank (it has launched something that has not
//! begun), or an event: a collective, a point-to-point operation, or the creation of a communicator. Edges go from the one
//! that waits to what it waits for. Where no edge goes on, there is the suspect. The graph has a number of edges linear in
//! the number of memberships, because the collectives of one communicator are chained: who waits for number 9 waits for all
//! that number 8 waits for.

mod builder;
mod collectives;
mod components;
mod creations;
mod event;
mod hosts;
mod suspects;
mod transfers;

use builder::Builder;
pub(crate) use event::{Event, Suspect};
pub(crate) use transfers::tags_meet;

use crate::{matching::Comm, resource_waits::ResourceWait, world::World};

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
    builder.creations();
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
