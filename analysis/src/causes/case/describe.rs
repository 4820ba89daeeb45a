//! Events in words, and the ranks that wait in them.

use xpu_timer_proto::v1::{Op, Operation};

use super::Case;
use crate::{
    graph::{Event, Suspect},
    text::{self, communicator, ranks},
    world::{is_collective, is_init},
};

impl<'a> Case<'a> {
    /// The operation of an event, from the record of one of its waiters.
    pub fn operation(&self, event: Event) -> Option<&'a Operation> {
        let of_view = |rank_index: usize| match event {
            Event::Collective { comm, seq } => {
                let id = self.comms[comm].id;
                self.view(rank_index)
                    .operations()
                    .find(|operation| is_collective(operation) && operation.communicator == id && operation.seq == seq)
            }
            Event::PointToPoint { comm, rank_index, peer, recv } => {
                let id = self.comms[comm].id;
                let op = if recv { Op::Recv } else { Op::Send };
                self.view(rank_index)
                    .pending()
                    .find(|operation| operation.communicator == id && operation.peer == peer && operation.op() == op)
            }
            Event::Init { .. } | Event::Split { .. } => {
                self.view(rank_index).pending().find(|operation| is_init(operation))
            }
        };
        match event {
            Event::PointToPoint { rank_index, .. } => of_view(rank_index),
            Event::Collective { comm, .. } => self
                .graph
                .waiters_of(event)
                .iter()
                .copied()
                .chain(self.comms[comm].members.iter().map(|member| member.rank_index))
                .find_map(of_view),
            _ => self.graph.waiters_of(event).iter().copied().find_map(of_view),
        }
    }

    /// `all_reduce 31 of communicator 0x1f (4 ranks)`.
    pub fn describe(&self, event: Event) -> String {
        let of_comm = |comm: usize| {
            format!("communicator {} ({} ranks)", communicator(self.comms[comm].id), self.comms[comm].size)
        };
        match event {
            Event::Collective { comm, seq } => {
                let name = self.operation(event).map_or("collective", text::name);
                format!("{name} {seq} of {}", of_comm(comm))
            }
            Event::PointToPoint { comm, peer, recv, .. } => {
                let peer = match self.comms[comm].rank_index_of(peer) {
                    Some(rank_index) => format!("rank {}", self.view(rank_index).rank),
                    None if peer < 0 => "any rank".to_owned(),
                    None => format!("member {peer}"),
                };
                let name = if recv { format!("a recv from {peer}") } else { format!("a send to {peer}") };
                format!("{name} on {}", of_comm(comm))
            }
            Event::Init { comm } => format!("the creation of {}", of_comm(comm)),
            Event::Split { comm } => match self.operation(event).map(|operation| operation.function.as_str()) {
                // MPI has several calls that make a communicator from another one.
                Some(function) if function.starts_with("MPI_") => format!("{function} of {}", of_comm(comm)),
                _ => format!("a split of {}", of_comm(comm)),
            },
        }
    }

    /// The clause with the ranks that wait for a suspect: `; ranks 0-1, 3 wait for it in all_reduce
    /// 31 of …`, or `there` if `said` already names the event.
    pub fn waiters_clause(&self, suspect: &Suspect, culprits: &[usize], said: &str) -> String {
        let held =
            self.suspect_rank(suspect).map_or(String::new(), |rank_index| self.resource_waiter_clause(rank_index));
        held + &self.event_waiters_clause(suspect, culprits, said)
    }

    /// The clause with the rank that waits for a resource of this rank.
    fn resource_waiter_clause(&self, holder: usize) -> String {
        let wait = self.graph.resource_waits.iter().find(|wait| wait.holder == holder);
        let text = wait.and_then(|wait| {
            let what = self.awaited_text(wait.waiter)?;
            Some(format!("; rank {} waits for {what}{}", self.view(wait.waiter).rank, self.place(wait.waiter)))
        });
        text.unwrap_or_default()
    }

    fn event_waiters_clause(&self, suspect: &Suspect, culprits: &[usize], said: &str) -> String {
        let it = if culprits.len() > 1 { "them" } else { "it" };
        let place = |event: Event| {
            let what = self.describe(event);
            if said.contains(&what) { "there".to_owned() } else { format!("in {what}") }
        };
        if let Some(event) = self.main_event(suspect) {
            let waiters = self.world.ranks(
                self.graph.waiters_of(event).iter().copied().filter(|rank_index| !culprits.contains(rank_index)),
            );
            return match waiters.len() {
                0 => String::new(),
                1 => format!("; {} waits for {it} {}", ranks(&waiters), place(event)),
                _ => format!("; {} wait for {it} {}", ranks(&waiters), place(event)),
            };
        }
        let waiters =
            self.world.ranks(self.stack_waiters.iter().copied().filter(|rank_index| !culprits.contains(rank_index)));
        let place =
            self.stack_waiters.first().map_or("", |rank_index| self.view(*rank_index).host.observed.witness.as_str());
        match waiters.len() {
            0 => String::new(),
            1 => format!("; {} waits in {place}", ranks(&waiters)),
            _ => format!("; {} wait in {place}", ranks(&waiters)),
        }
    }
}
