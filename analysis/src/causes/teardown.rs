//! `teardown`: others wait for a rank that tears down its communicators or its interpreter.
//!
//! The main thread is in the destruction, abort or finalization of a communicator, in the
//! finalization of Python, or in the exit handlers. A rank gets there early after an exception of
//! its own, or because its loop was shorter; its log has the reason. If the main threads of the
//! ranks that wait for it are at the same place, the ranks train in other threads, and the place
//! means nothing. A rank that waits for the device during its teardown is a waiter, and the
//! wait-for graph continues there. In a wait cycle, the ranks in the finalization of their library
//! gave up early, with medium confidence.

use super::{
    case::Case,
    collective::Collective,
    op_mismatch,
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    text::{capital, ranks},
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::Teardown, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Suspect::Cycle(events) = suspect {
        return gave_up(case, events);
    }
    if let Some(found) = ends_instead(case, suspect) {
        return Some(found);
    }
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Teardown))?;
    let waiters = case.main_event(suspect).map_or(&[][..], |event| case.graph.waiters_of(event));
    if !waiters.is_empty() && waiters.iter().all(|waiter| case.place(*waiter) == case.place(rank_index)) {
        return None;
    }
    let mut evidence = Vec::from_iter(case.witness_line(rank_index));
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::of_ranks(|number| {
            format!("{} shutting down{}{}", number.is(), witness_beside(case, rank_index), case.place(rank_index))
        }),
        confidence: case.host_confidence(suspect),
        evidence,
    })
}

/// The frame that shows the teardown, unless the place of the rank already contains it.
fn witness_beside(case: &Case<'_>, rank_index: usize) -> String {
    let witness = &case.view(rank_index).host.observed.witness;
    if case.place(rank_index).contains(witness.as_str()) { String::new() } else { format!(", in {witness}") }
}

/// Ranks that finalize their library where the others are in a collective with the same number.
fn ends_instead(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let collective = Collective::of(case, suspect)?;
    let dissent = collective.dissent(case, op_mismatch::key)?;
    if !op_mismatch::gave_up(&collective, &dissent) {
        return None;
    }
    let found = op_mismatch::finding(case, &collective, dissent, |(name, _)| name.clone());
    let Statement::Sentence(differs) = &found.statement else { return None };
    let who = case.world.ranks(found.culprits.iter().copied());
    let are = if who.len() == 1 { "is" } else { "are" };
    let sentence = format!("{} {are} shutting down while others go on: {}", capital(&ranks(&who)), lower(differs));
    Some(Finding { statement: Statement::Sentence(sentence), ..found })
}

/// The text with its first letter in lower case.
fn lower(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

/// Ranks of a wait cycle that finalize their library while the others go on.
fn gave_up(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let finalizes = |event: &&Event| {
        let function = case.operation(**event).map_or("", |operation| operation.function.as_str());
        function.ends_with("Finalize")
    };
    let event = *events.iter().find(finalizes)?;
    let culprits = case.graph.waiters_of(event).to_vec();
    if culprits.is_empty() {
        return None;
    }
    let who = case.world.ranks(culprits.iter().copied());
    let place = if culprits.len() == 1 { case.place(culprits[0]) } else { String::new() };
    let others: Vec<String> = events
        .iter()
        .filter(|other| **other != event && !case.graph.waiters_of(**other).is_empty())
        .map(|other| format!("{} in {}", case.waiters_text(*other), case.describe(*other)))
        .take(8)
        .collect();
    let are = if culprits.len() == 1 { "is" } else { "are" };
    let sentence = format!(
        "{} {are} shutting down{place}, while others go on: {}.",
        capital(&ranks(&who)),
        others[..others.len().min(2)].join(", ")
    );
    let mut evidence = vec![line(format!("{} {are} in {}", ranks(&who), case.describe(event)), who)];
    evidence.extend(others.into_iter().map(|other| line(other, Vec::new())));
    for &rank_index in culprits.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    Some(Finding { culprits, statement: Statement::Sentence(sentence), confidence: Confidence::Medium, evidence })
}
