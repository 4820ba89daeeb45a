//! The wait-for graph over all communicators, and the places where chains of waiting end.
//!
//! A node is one of three things: the host of a rank (it has not launched something), the device of
//! a rank (it has launched something that has not started), or an event (a collective, a
//! point-to-point operation, or the creation of a communicator). An edge leads from a waiter to
//! what it waits for. A node without an outgoing edge is a suspect. The number of edges is linear
//! in the number of memberships, because the collectives of one communicator form a chain: number 9
//! waits for number 8.

mod builder;
mod chains;
mod edges;
mod members;
mod processes;
mod suspects;
mod transfers;

use builder::{Builder, ResourceWait};
pub(crate) use builder::{Event, Suspect};
pub(crate) use processes::{Mutual, MutualFault, ProcessWait, ToCome};
pub(crate) use transfers::tags_meet;

use crate::{matching::Comm, world::World};

/// The graph of one job.
#[derive(Debug)]
pub(crate) struct Graph {
    /// All events, ascending.
    pub events: Vec<Event>,
    /// The ranks inside each event, as indices: their devices have started it.
    pub waiters: Vec<Vec<usize>>,
    /// Where chains of waiting end.
    pub suspects: Vec<Suspect>,
    /// Ranks that wait for a resource of another rank, where nothing else shows what they wait for.
    pub resource_waits: Vec<ResourceWait>,
    /// Ranks that wait for resources of each other, each cycle ascending, if nothing outside wakes
    /// any of them.
    pub rank_cycles: Vec<Vec<usize>>,
    /// Ranks that wait for a process that is not a rank, ascending.
    pub process_waits: Vec<ProcessWait>,
    /// The processes that should become missing ranks; see [`Graph::to_come`].
    to_come: Vec<ToCome>,
    /// Ranks that wait for a process that waits for clients itself, ascending, and that process, if
    /// it is not a rank.
    at_rest: Vec<(usize, Option<usize>)>,
    /// Ranks that wait for a process about which too little is known, ascending.
    on_unknown: Vec<usize>,
    /// Ranks that wait for a lock that only their own threads could release, ascending.
    locked_in: Vec<usize>,
    /// Ranks for which others wait, and that are only assumed to wait themselves, because they have
    /// no stack.
    pub assumed: Vec<usize>,
}

impl Graph {
    /// The chain of processes for which a rank waits, if it waits for any.
    pub(crate) fn process_wait(&self, rank_index: usize) -> Option<&ProcessWait> {
        let index = self.process_waits.binary_search_by_key(&rank_index, |wait| wait.waiter).ok()?;
        Some(&self.process_waits[index])
    }

    /// The process that should become a missing rank or start it.
    pub(crate) fn to_come(&self, rank_index: usize) -> Option<&ToCome> {
        let index = self.to_come.binary_search_by_key(&rank_index, |process| process.rank_index).ok()?;
        Some(&self.to_come[index])
    }

    /// Whether a rank waits for a process that waits for clients itself.
    pub(crate) fn is_at_rest(&self, rank_index: usize) -> bool {
        self.at_rest.binary_search_by_key(&rank_index, |(waiter, _)| *waiter).is_ok()
    }

    /// The process that waits for clients itself, and for which a rank waits.
    pub(crate) fn server_at_rest(&self, rank_index: usize) -> Option<usize> {
        let index = self.at_rest.binary_search_by_key(&rank_index, |(waiter, _)| *waiter).ok()?;
        self.at_rest[index].1
    }

    /// Whether a rank waits for a process about which too little is known: it was not found in
    /// time, or is on another machine.
    pub(crate) fn waits_for_unknown(&self, rank_index: usize) -> bool {
        self.on_unknown.binary_search(&rank_index).is_ok()
    }

    /// Whether a rank waits without a timeout for a lock of its own threads, and all of these wait
    /// for each other too.
    pub(crate) fn is_locked_in(&self, rank_index: usize) -> bool {
        self.locked_in.binary_search(&rank_index).is_ok()
    }

    /// The ranks inside an event, as indices.
    pub(crate) fn waiters_of(&self, event: Event) -> &[usize] {
        self.events.binary_search(&event).map_or(&[], |index| &self.waiters[index])
    }
}

/// Builds the graph and finds its suspects.
pub(crate) fn build(world: &World<'_>, comms: &[Comm<'_>]) -> Graph {
    let waits = processes::waits(world);
    let mut builder = Builder::new(world, comms, waits.of_ranks);
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
        rank_cycles: waits.cycles,
        process_waits: waits.of_processes,
        to_come: processes::to_come(world),
        at_rest: waits.at_rest,
        on_unknown: waits.on_unknown,
        locked_in: waits.locked_in,
        assumed,
    }
}
