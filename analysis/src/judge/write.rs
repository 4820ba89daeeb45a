//! Writes an outcome as a verdict.

use std::collections::BTreeSet;

use xpu_timer_proto::v1::TriggerKind;

use super::outcome::{Outcome, waiting};
use crate::{
    causes::{Case, RULES, Rule, line},
    hang, report,
    text::{ranks, shape},
    verdict::{Cause, Confidence, EvidenceLine, FORMAT, RuledOut, Timing, Verdict},
};

/// Maximum number of facts. The facts about the first culprits come first.
pub(super) const MAX_EVIDENCE: usize = 40;

/// Writes an outcome as a verdict.
pub(super) fn write_verdict(case: &Case<'_>, outcome: Outcome) -> Verdict {
    let evidence = case.evidence;
    let culprits: BTreeSet<usize> = outcome.culprits.iter().copied().collect();
    let victims: BTreeSet<usize> = if outcome.cause == Cause::NotAHang { BTreeSet::new() } else { waiting(case) };
    let victims: Vec<usize> = victims.difference(&culprits).copied().collect();
    let mut lines = outcome.evidence;
    lines.truncate(MAX_EVIDENCE);
    lines.extend(evidence_gaps(case));
    let mut confidence = outcome.confidence;
    if let Some(cap) = younger_than_timeout(case) {
        lines.push(cap);
        confidence = confidence.min(Confidence::Medium);
    }
    let ruled_out = |rule: &Rule| {
        let reason = (rule.cause != outcome.cause).then(|| (rule.rule_out)(case, &outcome.culprits)).flatten()?;
        Some(RuledOut { cause: rule.cause, reason })
    };
    Verdict {
        format: FORMAT,
        incident: evidence.incident.clone(),
        job: evidence.job.clone(),
        world_size: case.world.size,
        attempt: evidence.attempt,
        trigger: report::trigger(evidence),
        sentence: outcome.sentence,
        cause: outcome.cause,
        confidence,
        culprits: case.world.ranks(outcome.culprits.iter().copied()),
        hang: hang::evidence(case, (outcome.cause, confidence), &outcome.culprits, victims.len()),
        helpers_busy: hang::helpers_busy(case, &outcome.culprits),
        victims: case.world.ranks(victims),
        evidence: lines,
        ruled_out: RULES.iter().filter_map(ruled_out).collect(),
        communicators: report::communicators(case, outcome.main.as_ref().and_then(|suspect| case.main_event(suspect))),
        ranks: report::ranks(&case.world),
        hook: report::hook(&case.world),
        timing: Timing::default(),
    }
}

/// What is missing in the evidence, and what opened the incident.
fn evidence_gaps(case: &Case<'_>) -> Vec<EvidenceLine> {
    let of = |keep: &dyn Fn(usize) -> bool| {
        case.world.ranks((0..case.world.views.len()).filter(|rank_index| keep(*rank_index)))
    };
    let mut lines = Vec::new();
    let mut add = |text: &str, who: Vec<u32>| {
        if !who.is_empty() {
            lines.push(line(format!("{text} {}", ranks(&who)), who));
        }
    };
    add("nothing is known of", of(&|rank_index| case.view(rank_index).unseen()));
    let known = |rank_index: usize| !case.view(rank_index).unseen() && !case.view(rank_index).dead();
    add("there is no stack of", of(&|rank_index| known(rank_index) && !case.view(rank_index).host.stack));
    add("there is no flight record of", of(&|rank_index| known(rank_index) && case.view(rank_index).flight.is_none()));
    add("the flight record lost operations of", of(&|rank_index| case.view(rank_index).lossy()));
    let stuck = |rank_index: usize| {
        let health = case.view(rank_index).flight.and_then(|flight| flight.health.as_ref());
        health.is_some_and(|health| !health.watcher_inside.is_empty()) && case.view(rank_index).watcher_stale()
    };
    add("the watcher is stuck inside a driver call on", of(&stuck));
    if let Some(trigger) = &case.evidence.trigger
        && let (Some(operation), Ok(rank)) = (&trigger.operation, u32::try_from(trigger.rank))
    {
        let of_comm = match operation.communicator {
            0 => String::new(),
            id => format!(", number {} of communicator {}", operation.seq, crate::text::communicator(id)),
        };
        lines.push(line(format!("rank {rank} signalled first: {}{of_comm}", shape(operation)), vec![rank]));
    }
    lines
}

/// A manual dump came before the hang timeout, so pending operations may still complete.
fn younger_than_timeout(case: &Case<'_>) -> Option<EvidenceLine> {
    let manual = case.evidence.trigger.as_ref().is_some_and(|trigger| trigger.kind() == TriggerKind::Manual);
    let oldest = case.world.views.iter().map(|view| view.oldest_pending_ns()).max().unwrap_or(0);
    (manual && oldest > 0 && oldest < case.evidence.hang_timeout_ns).then(|| {
        let text = format!(
            "the oldest operation is pending for {} s, less than the hang timeout of {} s",
            oldest / 1_000_000_000,
            case.evidence.hang_timeout_ns / 1_000_000_000
        );
        line(text, Vec::new())
    })
}
