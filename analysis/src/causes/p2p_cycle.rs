//! `p2p_cycle`: sends and receives wait for each other in a cycle.
//!
//! The wait-for graph has a cycle over at least two sends or receives, and every host in it is
//! known to wait: two ranks that both send before they receive, or a pipeline whose stages disagree
//! on the order. All ranks that wait in such a send or receive are named, because their common plan
//! is at fault. If only some of them made their operations in another order than ever before, only
//! these are named. The confidence is high only for a plan that never worked. If the ranks have
//! made the same transfers before, one of them has left the plan, and the record does not show
//! which.

use super::{
    case::Case,
    pattern_break::{self, Break, PatternCheck},
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    history::made_before,
    text::{capital, ranks},
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::P2pCycle, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    match pattern_break::check(case, suspect, &[Break::TransferOrder]) {
        PatternCheck::Finding(found) => return Some(found),
        PatternCheck::OtherBreak => return None,
        PatternCheck::Kept => {}
    }
    let Suspect::Cycle(events) = suspect else { return None };
    let transfers: Vec<Event> =
        events.iter().copied().filter(|event| matches!(event, Event::PointToPoint { .. })).collect();
    if transfers.len() < 2 {
        return None;
    }
    let mut culprits: Vec<usize> = transfers.iter().flat_map(|event| case.graph.waiters_of(*event).to_vec()).collect();
    culprits.sort_unstable();
    culprits.dedup();
    if culprits.len() < 2 {
        return None;
    }
    let who = case.world.ranks(culprits.iter().copied());
    let evidence = transfers.iter().take(8).map(|event| {
        let inside = case.world.ranks(case.graph.waiters_of(*event).iter().copied());
        line(format!("{}: {}", ranks(&inside), case.describe(*event)), inside)
    });
    let evidence = evidence.collect();
    let first = case.describe(transfers[0]);
    Some(Finding {
        statement: Statement::Sentence(format!(
            "{} wait for each other in a circle of sends and receives: {} is in {first}, and so on round.",
            capital(&ranks(&who)),
            ranks(&case.world.ranks(case.graph.waiters_of(transfers[0]).iter().copied())),
        )),
        confidence: case.members_confidence(&transfers).min(plan_confidence(case, &transfers, &culprits)),
        culprits,
        evidence,
    })
}

/// A cycle is certain only if the stacks of its ranks are known. The plan is at fault only if it
/// never worked.
fn plan_confidence(case: &Case<'_>, transfers: &[Event], views: &[usize]) -> Confidence {
    let worked = |event: &Event| match (event, case.operation(*event)) {
        (Event::PointToPoint { rank_index, .. }, Some(operation)) => made_before(case.view(*rank_index), operation),
        _ => false,
    };
    let stacks = views.iter().all(|rank_index| case.view(*rank_index).host.stack);
    if stacks && !transfers.iter().any(worked) { Confidence::High } else { Confidence::Medium }
}
