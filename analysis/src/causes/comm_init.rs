//! `comm_init`: a communicator is being created, and not all of its ranks take part.
//!
//! Ranks are inside the call that creates or splits a communicator, or, by their stacks, in the
//! store behind it. A member has not made that call. Or its call returned without the others: they
//! still wait for it there, and it already uses the communicator.
//!
//! - If all members are inside, no rank is to blame: the network between them is.
//! - If they pass different numbers of ranks, the ranks that differ from the majority are the
//!   culprits.
//! - If some create the communicator and the others wait for them in a collective, the smaller
//!   group is to blame.
//! - If some cannot connect to the store at which the others meet, the smaller group probably uses
//!   the wrong address.
//!
//! If a member is dead, stopped, in its data loader or in I/O, that cause comes first.

mod claimed_size;
mod cycle;
mod store;

pub(super) use claimed_size::other_size;
use xpu_timer_proto::v1::Presence;

use super::{
    case::Case,
    missing_rank,
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::{Number, line},
};
use crate::{
    graph::{Event, Suspect},
    text::{capital, ranks},
    verdict::{Activity, Cause, Confidence},
};

/// With more suspects, the check whether all members create a communicator is skipped, because it
/// visits all members for each suspect.
const MOST: usize = 1024;

pub(super) const RULE: Rule = Rule { cause: Cause::CommInit, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Some(found) = claimed_size::explain(case, suspect).or_else(|| store::explain(case)) {
        return Some(found);
    }
    if let Suspect::Complete(event @ (Event::Init { .. } | Event::Split { .. })) = suspect {
        return Some(all_inside(case, *event));
    }
    if let Suspect::Cycle(events) = suspect {
        return cycle::explain(case, events);
    }
    let rank_index = case.host_rank(suspect)?;
    let none_yet = |view: &crate::world::RankView<'_>| view.flight.is_none_or(|flight| flight.communicators.is_empty());
    if case.world.views.iter().all(none_yet)
        && let Some(found) = missing_rank::stands_apart(case, suspect)
    {
        return Some(found);
    }
    let event = case.main_event(suspect);
    let asks = case.does(rank_index, Activity::CommInit) && case.graph.suspects.len() <= MOST;
    if let Some(found) = event.filter(|_| asks).and_then(|event| few_inside(case, event)) {
        return Some(found);
    }
    let by_stacks = event.is_none()
        && !case.stack_waiters.is_empty()
        && case.stack_waiters.iter().all(|rank_index| case.does(*rank_index, Activity::CommInit));
    if !by_stacks && !matches!(event, Some(Event::Init { .. } | Event::Split { .. })) {
        return None;
    }
    let view = case.view(rank_index);
    let returned = match event {
        Some(Event::Init { comm }) => case.comms[comm].member(rank_index).is_some(),
        _ => false,
    };
    let store = by_stacks
        && case.stack_waiters.iter().all(|rank_index| case.view(*rank_index).host.observed.witness.contains("Store::"));
    let what = if store {
        "not set the key that the others wait for in the store"
    } else if returned {
        "left the creation of a communicator that the others are still in"
    } else if view.presence == Presence::Unregistered {
        "not joined the communicator, nor made any device call"
    } else {
        "not joined the communicator"
    };
    // A process that computes and has no communicator at all has only just begun.
    let starts = view.host.moved.is_some_and(|moved| moved.is_progress())
        && view.flight.is_none_or(|flight| flight.communicators.is_empty());
    let moves = |number: Number| match starts {
        true => number
            .word("; it moves, so it is probably still starting", "; they move, so they are probably still starting"),
        false => "",
    };
    let statement = Statement::of_ranks(|number| {
        format!("{} {what}{}{}", number.has(), case.stands_clause(rank_index, number), moves(number))
    });
    let confidence = match () {
        () if starts => Confidence::Low,
        () if returned || by_stacks => Confidence::Medium,
        () => case.host_confidence(suspect),
    };
    let rank = view.rank;
    let inside = |event| {
        line(format!("{} in {}; rank {rank} is not", case.waiters_text(event), case.describe(event)), vec![rank])
    };
    let mut evidence: Vec<_> = event.map(inside).into_iter().collect();
    evidence.extend(case.position_lines(rank_index));
    Some(Finding { culprits: vec![rank_index], statement, confidence, evidence })
}

/// All known members are inside the creation or the split.
fn all_inside(case: &Case<'_>, event: Event) -> Finding {
    let inside = case.world.ranks(case.graph.waiters_of(event).iter().copied());
    let unnamed = match event {
        Event::Init { comm } | Event::Split { comm } => case.comms[comm].unnamed,
        _ => 0,
    };
    let rest = if unnamed > 0 {
        format!("; {unnamed} of its members are not known")
    } else {
        " and it does not end: look at the network between them".to_owned()
    };
    let what = case.describe(event);
    Finding {
        culprits: Vec::new(),
        statement: Statement::Sentence(format!(
            "{} {} in {what}{rest}.",
            capital(&ranks(&inside)),
            if inside.len() == 1 { "is" } else { "are" }
        )),
        confidence: if unnamed > 0 { Confidence::Low } else { Confidence::Medium },
        evidence: vec![line(format!("{} in {what}", ranks(&inside)), inside)],
    }
}

/// Few ranks wait in a collective for the others. By their stacks, the others are all in the
/// creation of a communicator, which the few have left out.
fn few_inside(case: &Case<'_>, event: Event) -> Option<Finding> {
    let Event::Collective { comm, .. } = event else { return None };
    let inside = case.graph.waiters_of(event);
    let members = case.comms[comm].members.iter().map(|member| member.rank_index);
    let outside: Vec<usize> = members.filter(|rank_index| inside.binary_search(rank_index).is_err()).collect();
    let creates = |rank_index: &usize| case.does(*rank_index, Activity::CommInit) && !case.view(*rank_index).halted();
    if inside.is_empty() || inside.len() >= outside.len() || !outside.iter().all(creates) {
        return None;
    }
    let (few, most) = (case.world.ranks(inside.iter().copied()), case.world.ranks(outside.iter().copied()));
    let place = if inside.len() == 1 { case.place(inside[0]) } else { String::new() };
    let (have, wait) = if few.len() == 1 { ("has", "waits") } else { ("have", "wait") };
    let sentence = format!(
        "{} {have} not come to the creation of a communicator that {} are in, and {wait} in {}{place}.",
        capital(&ranks(&few)),
        ranks(&most),
        case.describe(event),
    );
    let mut evidence = vec![line(format!("{} are in the creation of a communicator", ranks(&most)), most)];
    for &rank_index in inside.iter().chain(&outside).take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    Some(Finding {
        culprits: inside.to_vec(),
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence,
    })
}
