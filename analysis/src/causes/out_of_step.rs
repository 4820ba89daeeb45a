//! `missing_rank`, in a wait cycle: one rank has gone on to another collective than the others, and
//! they wait for it in several communicators.
//!
//! The ranks wait for each other, and every wait cycle passes through one and the same rank, and
//! through no other. That rank has not entered the collectives of at least two communicators in
//! which others wait for it: it left out a step, or ended its epoch early. If it had exchanged two
//! collectives, it would be missing in only one of them; that is `order_mismatch`. The confidence
//! is medium, because the past of the ranks does not show what was due.

use super::{
    case::Case,
    pattern_break::{self, PatternCheck},
    rule::{Finding, Rule, Statement, never_ruled_out},
    wait_cycle,
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::MissingRank, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Cycle(events) = suspect else { return None };
    if !matches!(pattern_break::check(case, suspect, &[]), PatternCheck::Kept) {
        return None;
    }
    let rank_index = wait_cycle::in_all_cycles(case, events)?;
    let own = *events.iter().find(|event| case.graph.waiters_of(**event).contains(&rank_index))?;
    let owed: Vec<Event> = events
        .iter()
        .copied()
        .filter(|event| wait_cycle::awaited_members(case, *event).contains(&rank_index))
        .collect();
    let mut comms: Vec<usize> = owed
        .iter()
        .filter_map(|event| match *event {
            Event::Collective { comm, .. } => Some(comm),
            _ => None,
        })
        .collect();
    comms.dedup();
    if comms.len() < 2 || !matches!(own, Event::Collective { .. }) {
        return None;
    }
    let rank = case.view(rank_index).rank;
    let sentence = format!(
        "Rank {rank} is out of step: it is in {}{}, and others wait for it in {} and {} more.",
        case.describe(own),
        case.place(rank_index),
        case.describe(owed[0]),
        owed.len() - 1,
    );
    let mut evidence: Vec<_> = owed.iter().take(8).filter_map(|event| case.counters_line(rank_index, *event)).collect();
    evidence
        .push(line(format!("all circles of waiting go through rank {rank}, and through no other rank"), vec![rank]));
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence,
    })
}
