//! `teardown`: others wait for a rank that tears down its communicators or its interpreter.
//!
//! The main thread is in the destruction, abort or finalization of a communicator, in the
//! finalization of Python, or in the exit handlers. A rank gets there early after an exception of
//! its own, or because its loop was shorter; its log has the reason. If the main threads of the
//! ranks that wait for it are at the same place, the ranks train in other threads, and the place
//! means nothing. A rank that waits for the device during its teardown is a waiter, and the
//! wait-for graph continues there. In a wait cycle, the ranks in the finalization of their library
//! are the culprits, with medium confidence.

use super::{collective::Collective, mismatch};
use crate::{
    case::Case,
    explanation::{Explanation, HostState},
    finding::{Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::{Event, Suspect},
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::Teardown, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Suspect::Cycle(events) = suspect {
        return finalizes_in_cycle(case, events);
    }
    if let Some(found) = ends_instead(case, suspect) {
        return Some(found);
    }
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Teardown))?;
    let waiters = case.main_event(suspect).map_or(&[][..], |event| case.graph.waiters_of(event));
    if !waiters.is_empty() && waiters.iter().all(|waiter| case.position(*waiter) == case.position(rank_index)) {
        return None;
    }
    let mut evidence = vec![RankFact::WitnessUnlessShown.of(rank_index)];
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let explanation = Explanation::Host { rank_index, state: HostState::ShutsDown };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: case.host_confidence(suspect), evidence })
}

/// Ranks that finalize their library where the others are in a collective with the same number.
fn ends_instead(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let collective = Collective::of(case, suspect)?;
    let dissent = collective.dissent(case, mismatch::operation_key)?;
    if !mismatch::finalizes_instead(&collective, &dissent) {
        return None;
    }
    let (found, differ) = mismatch::differ(case, &collective, dissent, mismatch::without_root);
    let explanation = Explanation::ShutDownInstead { culprits: found.culprits.clone(), differ };
    Some(Finding { explanation, ..found })
}

/// Ranks of a wait cycle that finalize their library while the others continue.
fn finalizes_in_cycle(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let finalizes = |event: &&Event| {
        let function = case.operation(**event).map_or("", |operation| operation.function.as_str());
        function.ends_with("Finalize")
    };
    let event = *events.iter().find(finalizes)?;
    let culprits = case.graph.waiters_of(event).to_vec();
    if culprits.is_empty() {
        return None;
    }
    let continues = |other: &Event| *other != event && !case.graph.waiters_of(*other).is_empty();
    let others: Vec<Event> = events.iter().copied().filter(continues).take(8).collect();
    let mut evidence = vec![Fact::Inside(event), Fact::Explained];
    evidence.extend(Fact::positions(&culprits));
    let explanation = Explanation::ShutDownInCycle { culprits: culprits.clone(), others };
    Some(Finding { culprits, explanation, confidence: Confidence::Medium, evidence })
}
