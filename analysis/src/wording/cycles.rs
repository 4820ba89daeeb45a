//! Ranks that wait for each other in a cycle.

use super::{Number, Ranks, Statement, about, line, locations};
use crate::{
    case::Case,
    explanation::{CycleFault, PatternBreak},
    graph::Event,
    history::{Deviation, Token},
    text::{communicator, op_name},
    verdict::EvidenceLine,
};

/// The text about why ranks wait for each other in a cycle.
pub(super) fn statement(case: &Case<'_>, fault: &CycleFault) -> Statement {
    match fault {
        CycleFault::LeftPattern { culprits, kind, shown_by: (rank_index, deviation), waited } => {
            left_pattern(case, culprits, *kind, (*rank_index, deviation), *waited)
        }
        CycleFault::OtherOrder { culprits, waited } => other_order(case, culprits, waited),
        CycleFault::LeftOut { culprits, own, left_out: event } => left_out(case, culprits, *own, *event),
        CycleFault::OutOfStep { rank_index, own, owed } => out_of_step(case, *rank_index, *own, owed),
        CycleFault::Transfers { culprits, transfers } => cycle_of_transfers(case, culprits, transfers),
    }
}

/// The line of evidence about why ranks wait for each other. `None` if the other facts show it.
pub(super) fn fault_line(case: &Case<'_>, fault: &CycleFault) -> Option<EvidenceLine> {
    match fault {
        CycleFault::OutOfStep { rank_index, .. } => Some(in_all_cycles_line(case, *rank_index)),
        CycleFault::LeftPattern { .. }
        | CycleFault::OtherOrder { .. }
        | CycleFault::LeftOut { .. }
        | CycleFault::Transfers { .. } => None,
    }
}

/// An operation of a rank's past: `send to rank 3`, `all_reduce of communicator 0x1f`.
fn past_operation(case: &Case<'_>, rank_index: usize, token: Token) -> String {
    let name = op_name(token.op);
    if !token.is_p2p() {
        return format!("{name} of communicator {}", communicator(token.communicator));
    }
    let comm = case.comms.iter().find(|comm| comm.id == token.communicator && comm.member(rank_index).is_some());
    let peer = comm.and_then(|comm| comm.rank_index_of(token.peer)).map(|peer| case.view(peer).rank);
    if token.peer < 0 {
        return format!("{name} from any rank");
    }
    let towards = if name == "send" { "to" } else { "from" };
    match peer {
        Some(rank) => format!("{name} {towards} rank {rank}"),
        None => format!("{name} {towards} member {} of communicator {}", token.peer, communicator(token.communicator)),
    }
}

/// Ranks that left the pattern of their operations, shown by one of them. `waited` is an event in
/// which the others wait.
fn left_pattern(
    case: &Case<'_>,
    culprits: &[usize],
    kind: PatternBreak,
    (rank_index, deviation): (usize, &Deviation),
    waited: Option<Event>,
) -> Statement {
    let who = Ranks::of(case, culprits);
    let number = Number::of(culprits.len());
    let (it, its) = ("it", "its");
    let expected = past_operation(case, rank_index, deviation.expected);
    let actual = past_operation(case, rank_index, deviation.actual);
    let did = match kind {
        // While the rank is in the second of the two, nothing shows whether the first one comes.
        PatternBreak::Collective => {
            format!("skipped the {expected} that {it} had always called before the {actual}, or swapped the two")
        }
        PatternBreak::Transfer => {
            format!("skipped the {expected} that {it} had always called before the {actual}, or calls it later")
        }
        PatternBreak::NewCollective => {
            format!("called the {actual} for the first time, in place of {its} usual {expected}")
        }
        PatternBreak::NewTransfer => {
            format!("called a {actual} for the first time, in place of {its} usual {expected}")
        }
        PatternBreak::RepeatedTransfer => {
            format!("called the {actual} once more, in place of the {expected} that {it} had always called next")
        }
        PatternBreak::Order | PatternBreak::TransferOrder => {
            format!(
                "called the {actual} before the {expected}, although {it} had always called them in the other order"
            )
        }
    };
    let waits = waited.map_or_else(String::new, |event| format!(": {}", case.waiters_in(event)));
    // The operation of the one is not that of the others: each has its own peers.
    let one = Ranks::of(case, &[rank_index]);
    let subject = match number {
        Number::One => format!("{} {did}", who.capital()),
        Number::Many => {
            format!("{} left the pattern of their operations: {}, for example, {did}", who.capital(), one.text())
        }
    };
    Statement::Sentence(format!(
        "{subject}, and now the ranks wait for each other{waits}{}.",
        locations(case, culprits)
    ))
}

pub(super) fn left_pattern_line(case: &Case<'_>, rank_index: usize, deviation: &Deviation) -> EvidenceLine {
    let text = format!(
        "called the {} in place of the {}, which it had called at this point all {} times before",
        past_operation(case, rank_index, deviation.actual),
        past_operation(case, rank_index, deviation.expected),
        deviation.times
    );
    about(case, rank_index, &text)
}

/// Ranks that entered the communicators in another order than the ranks that wait in these events.
fn other_order(case: &Case<'_>, culprits: &[usize], waited: &[Event]) -> Statement {
    let parts: Vec<String> = waited.iter().take(2).map(|event| case.waiters_in(*event)).collect();
    // A rank that has launched all that the others wait in has left nothing out.
    let has_launched = |rank_index: usize, event: &Event| match *event {
        Event::Collective { comm, seq } => {
            case.comms[comm].member(rank_index).is_none_or(|member| member.launched >= seq)
        }
        _ => true,
    };
    let has_all = culprits.iter().all(|rank_index| waited.iter().all(|event| has_launched(*rank_index, event)));
    let or_skipped = if has_all { "" } else { ", or left one out" };
    Statement::Sentence(format!(
        "{} entered the communicators in another order than the others{or_skipped}, and now the ranks wait for each other: {}{}.",
        Ranks::of(case, culprits).capital(),
        parts.join(", and "),
        locations(case, culprits)
    ))
}

/// Ranks that are in event `own` instead of `left_out`, which other ranks have completed among
/// themselves.
fn left_out(case: &Case<'_>, culprits: &[usize], own: Event, left_out: Event) -> Statement {
    let (who, inside) = (Ranks::of(case, culprits), Ranks::of(case, case.graph.waiters_of(left_out)));
    Statement::Sentence(format!(
        "{} left out {}, in which {} {}, or made it in another order: {} in {}{}; another communicator of the same size completed its own.",
        who.capital(),
        case.describe(left_out),
        inside.text(),
        inside.number().waits(),
        who.number().is(),
        case.describe(own),
        case.place(culprits[0]),
    ))
}

/// A rank that is in event `own`, while others wait for it in several others.
fn out_of_step(case: &Case<'_>, rank_index: usize, own: Event, owed: &[Event]) -> Statement {
    Statement::Sentence(format!(
        "Rank {} is out of step: it is in {}{}, and others wait for it in {} and in {} more {}.",
        case.view(rank_index).rank,
        case.describe(own),
        case.place(rank_index),
        case.describe(owed[0]),
        owed.len() - 1,
        if owed.len() == 2 { "collective" } else { "collectives" },
    ))
}

fn in_all_cycles_line(case: &Case<'_>, rank_index: usize) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    line(format!("rank {rank} is the only rank in all wait cycles"), vec![rank])
}

/// Ranks whose sends and receives wait for each other.
fn cycle_of_transfers(case: &Case<'_>, culprits: &[usize], transfers: &[Event]) -> Statement {
    Statement::Sentence(format!(
        "{} wait for each other in a cycle of sends and receives; for example, {} is in {}{}.",
        Ranks::of(case, culprits).capital(),
        case.waiters_text(transfers[0]),
        case.describe(transfers[0]),
        locations(case, culprits)
    ))
}
