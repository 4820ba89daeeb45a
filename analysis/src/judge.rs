//! From evidence to a verdict: matches the collectives, builds the wait-for graph, lets the rules
//! explain the suspects, and writes the findings as a verdict. Only [`write_verdict`] makes text.

mod arbitration;
mod outcome;
mod suspicion;

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::v1::{Evidence, Failure, FailureKind, TriggerKind};

use arbitration::arbitrate;
use outcome::{Outcome, hang_evidence, helpers_busy, not_a_hang, unexplained, waiting};

use crate::{
    alias,
    calibration::{self, FIRST_RUNS},
    case::{Behind, Case},
    causes::RULES,
    finding::{Conclusion, EvidenceGap, HealthyReason, JobFact, Rule, TableRule, rules},
    graph::Suspect,
    report, stay, suspended,
    verdict::{Cause, Confidence, CulpritProcess, FORMAT, RuledOut, Timing, Verdict},
    wording,
    world::{EncodedOperations, RankView},
};

/// Maximum numbers of lines about waits for keys, about asynchronous errors, and about exceptions
/// and signals.
const MOST_KEY_WAITS: usize = 8;
const MOST_ASYNC_ERRORS: usize = 8;
const MOST_FAILURES: usize = 8;

/// Judges one incident: which ranks stopped the job, where, and why.
///
/// Pure and deterministic: the same evidence gives the same verdict, byte for byte.
/// [`Verdict::timing`] keeps its default, because only the collector knows it.
#[must_use]
pub fn judge(evidence: &Evidence) -> Verdict {
    judge_encoded(evidence, &[])
}

/// Like [`judge`], with the operations of each rank if they are encoded.
#[must_use]
pub fn judge_encoded(evidence: &Evidence, operations: &[EncodedOperations]) -> Verdict {
    let (evidence, operations) = alias::resolved(evidence, operations);
    let mut case = Case::of(&evidence, operations);
    let outcome = if rules(REASONS_TO_JUDGE).any(|applies| applies(&case)) {
        if case.graph.events.is_empty() {
            case.graph.suspects = suspicion::suspects(&mut case);
        }
        conclude(&case)
    } else {
        not_a_hang(HealthyReason::AllLaunchedRecently, Confidence::Medium)
    };
    let mut verdict = write_verdict(&case, outcome);
    verdict.evidence.extend(stay::lines(&evidence, &verdict.culprits));
    verdict.evidence.extend(suspended::lines(&evidence, &verdict.culprits));
    verdict
}

/// Whether a rule applies to a case.
type Condition = fn(&Case<'_>) -> bool;

/// Why a job is judged although its pending operations may have been launched recently.
const REASONS_TO_JUDGE: &[TableRule<Condition>] = &[
    TableRule {
        name: "other_trigger",
        reason: "A death, a silent job or a stuck watcher does not depend on the age of the pending operations.",
        scenario: "devices::without_events_the_launches_of_a_known_kernel_show_who_is_behind",
        rule: |case| !matches!(case.trigger_kind(), TriggerKind::Manual | TriggerKind::Operation),
    },
    TableRule {
        name: "nothing_pending",
        reason: "Where no operation is pending, none is young, and the stacks show what the ranks wait for.",
        scenario: "devices::a_dump_on_demand_of_a_job_without_a_pending_operation_is_not_a_hang",
        rule: |case| case.graph.events.is_empty(),
    },
    TableRule {
        name: "old_operation",
        reason: "An operation that is older than the time between the samples was pending all that time.",
        scenario: "devices::a_dump_on_demand_of_a_young_hang_is_a_hang",
        rule: has_old_operation,
    },
    TableRule {
        name: "halted",
        reason: "A rank that cannot run does not complete an operation, however young that is.",
        scenario: "devices::a_rank_that_cannot_run_or_is_unknown_counts_although_the_operations_are_young",
        rule: |case| case.world.views.iter().any(|view| view.halted()),
    },
    TableRule {
        name: "unseen",
        reason: "An operation of a rank without data may be old.",
        scenario: "devices::a_rank_that_cannot_run_or_is_unknown_counts_although_the_operations_are_young",
        rule: |case| case.world.views.iter().any(|view| view.unseen()),
    },
    TableRule {
        name: "polls",
        reason: "If a rank polls for the end of a collective, its newest poll does not show the age of the collective.",
        scenario: "devices::a_polling_rank_counts_as_waiting",
        rule: |case| case.world.views.iter().any(polls_collective),
    },
];

/// Whether an operation may have been pending since the first sample.
fn has_old_operation(case: &Case<'_>) -> bool {
    let limits = [case.evidence.sample_interval_ns, case.evidence.hang_timeout_ns / 2];
    let limit = limits.into_iter().filter(|limit| *limit > 0).min();
    let oldest = case.world.views.iter().map(|view| view.oldest_pending_ns()).max().unwrap_or(0);
    limit.is_none_or(|limit| oldest >= limit)
}

/// Whether a rank polls for the end of a collective. Then its newest poll does not show the age of
/// the collective.
fn polls_collective(view: &RankView<'_>) -> bool {
    let mut communicators = view.flight.into_iter().flat_map(|flight| &flight.communicators);
    communicators.any(|communicator| view.polled_collective(communicator).is_some())
}

/// Lets the rules explain the suspects, and weighs the findings.
fn conclude(case: &Case<'_>) -> Outcome {
    let arbitrated = arbitrate(case);
    let Some(first) = arbitrated.findings.first() else { return unexplained(case) };
    let (cause, confidence) = (first.cause(), arbitrated.confidence());
    let alike = arbitrated.all_stuck_alike();
    let weight = |suspect: &Suspect| case.main_event(suspect).map_or(0, |event| case.graph.waiters_of(event).len());
    let main = arbitrated
        .primary()
        .map(|ruling| ruling.suspect)
        .reduce(|best, next| if weight(next) > weight(best) { next } else { best });
    let primary = arbitrated.primary().count();
    let findings = arbitrated.findings.into_iter().map(|ruling| ruling.finding).collect();
    if alike {
        let conclusion = Conclusion::AllStuckAlike(findings);
        return Outcome { cause, culprits: Vec::new(), confidence, conclusion, main: None };
    }
    let conclusion = Conclusion::Explained { findings, primary };
    Outcome { cause, culprits: arbitrated.culprits, confidence, conclusion, main: main.cloned() }
}

/// Writes an outcome as a verdict.
fn write_verdict(case: &Case<'_>, outcome: Outcome) -> Verdict {
    let evidence = case.evidence;
    let culprits: BTreeSet<usize> = outcome.culprits.iter().copied().collect();
    let victims: BTreeSet<usize> = if outcome.cause == Cause::NotAHang { BTreeSet::new() } else { waiting(case) };
    let victims: Vec<usize> = victims.difference(&culprits).copied().collect();
    let mut about_job = evidence_gaps(case);
    let mut strength = outcome.confidence;
    if let Some(cap) = younger_than_timeout(case) {
        about_job.push(cap);
        strength = strength.min(Confidence::Medium);
    }
    let others = !outcome.conclusion.culprit_processes().is_empty();
    let kind = calibration::kind(case, outcome.cause, &outcome.culprits, others);
    let ruled_out = |rule: &Rule| {
        let exclusion = (rule.cause != outcome.cause).then(|| (rule.rule_out)(case, &outcome.culprits)).flatten()?;
        Some(RuledOut { cause: rule.cause, reason: wording::evidence::reason(case, exclusion, &outcome.culprits) })
    };
    Verdict {
        format: FORMAT,
        incident: evidence.incident.clone(),
        job: evidence.job.clone(),
        world_size: case.world.size,
        attempt: evidence.attempt,
        trigger: report::trigger(evidence),
        sentence: wording::verdict::sentence(case, &outcome.conclusion, outcome.main.as_ref(), &outcome.culprits),
        cause: outcome.cause,
        confidence: calibration::confidence(FIRST_RUNS, kind, strength),
        probability: Some(rounded(calibration::probability(FIRST_RUNS, kind, strength))),
        kind: Some(kind),
        strength: Some(strength),
        culprits: case.world.ranks(outcome.culprits.iter().copied()),
        culprit_processes: culprit_processes(case, &outcome),
        hang: hang_evidence(case, &outcome, strength, victims.len()),
        helpers_busy: helpers_busy(case, &outcome),
        victims: case.world.ranks(victims),
        evidence: wording::evidence::lines(case, outcome.conclusion.evidence(), &about_job),
        known_defects: report::known_defects(case, &outcome.conclusion),
        ruled_out: RULES.iter().filter_map(ruled_out).collect(),
        communicators: report::communicators(case, outcome.main.as_ref().and_then(|suspect| case.main_event(suspect))),
        ranks: report::ranks(&case.world),
        hook: report::hook(&case.world),
        timing: Timing::default(),
    }
}

/// A probability with three digits.
fn rounded(probability: f64) -> f64 {
    (probability * 1000.0).round() / 1000.0
}

/// The processes of the culprits. If a rank waits for a process of its own, such as a loader
/// worker, that is the process; others belong to no rank.
fn culprit_processes(case: &Case<'_>, outcome: &Outcome) -> Vec<CulpritProcess> {
    let (waits, in_cycles) = (outcome.conclusion.ranks_that_wait(), outcome.conclusion.ranks_in_cycles());
    let of_rank = |index: &usize| {
        let view = case.view(*index);
        if in_cycles.contains(index) || !waits.contains(index) {
            return report::process(view);
        }
        match case.behind(*index) {
            Behind::Process(wait) => Some(report::other_process(&case.world.processes[wait.end()], Some(view.rank))),
            Behind::Child(child) => Some(report::child_process(view, child)),
            Behind::Itself => report::process(view),
        }
    };
    let others = outcome.conclusion.culprit_processes().into_iter();
    let others = others.map(|index| report::other_process(&case.world.processes[index], None));
    outcome.culprits.iter().filter_map(of_rank).chain(others).collect()
}

/// The gaps in the evidence, and the trigger of the incident.
fn evidence_gaps(case: &Case<'_>) -> Vec<JobFact> {
    type Check = fn(&RankView<'_>) -> bool;
    const GAPS: [(EvidenceGap, Check); 5] = [
        (EvidenceGap::Unseen, |view| view.unseen()),
        (EvidenceGap::NoStack, |view| is_known(view) && !view.host.stack),
        (EvidenceGap::NoFlightRecord, |view| is_known(view) && view.flight.is_none()),
        (EvidenceGap::LostOperations, |view| view.lossy()),
        (EvidenceGap::StuckWatcher, is_watcher_stuck),
    ];
    let mut facts = Vec::new();
    for (gap, has) in GAPS {
        let who: Vec<usize> = (0..case.world.views.len()).filter(|index| has(case.view(*index))).collect();
        if !who.is_empty() {
            facts.push(JobFact::Gap(gap, who));
        }
    }
    facts.extend(async_errors(case).take(MOST_ASYNC_ERRORS));
    facts.extend(failures(case));
    facts.extend(
        case.key_waits()
            .into_iter()
            .take(MOST_KEY_WAITS)
            .map(|wait| JobFact::WaitsForKeys { waiters: wait.waiters, call: Box::new(wait.operation.clone()) }),
    );
    if let Some(trigger) = &case.evidence.trigger
        && let (Some(operation), Ok(rank)) = (&trigger.operation, u32::try_from(trigger.rank))
    {
        facts.push(JobFact::SignalledFirst { rank, operation: Box::new(operation.clone()) });
    }
    facts
}

/// How much earlier than the hang timeout a living rank may have printed a traceback that is shown.
const FAILURE_MARGIN_NS: u64 = 60_000_000_000;

/// The failures of all ranks, equal ones together. A living rank may have recovered from an
/// exception that it printed long ago.
fn failures(case: &Case<'_>) -> impl Iterator<Item = JobFact> {
    let recent_ns = case.evidence.hang_timeout_ns + FAILURE_MARGIN_NS;
    let mut all: Vec<(Failure, Vec<usize>)> = Vec::new();
    for (rank_index, view) in case.world.views.iter().enumerate() {
        for failure in view.failures() {
            let is_shown = view.dead() || failure.kind() != FailureKind::Exception || failure.age_ns <= recent_ns;
            let known = || Failure { age_ns: 0, ..failure.clone() };
            if !is_shown {
                continue;
            }
            match all.iter().position(|(other, _)| *other == known()) {
                Some(index) => all[index].1.push(rank_index),
                None if all.len() < MOST_FAILURES => all.push((known(), vec![rank_index])),
                None => {}
            }
        }
    }
    all.into_iter().map(|(failure, rank_indices)| JobFact::Fails { rank_indices, failure: Box::new(failure) })
}

/// The asynchronous errors of all communicators.
fn async_errors(case: &Case<'_>) -> impl Iterator<Item = JobFact> {
    let mut errors: BTreeMap<(u64, u32), Vec<usize>> = BTreeMap::new();
    for (rank_index, view) in case.world.views.iter().enumerate() {
        for communicator in view.flight.into_iter().flat_map(|flight| &flight.communicators) {
            if communicator.async_error != 0 {
                errors.entry((communicator.id, communicator.async_error)).or_default().push(rank_index);
            }
        }
    }
    let fact = |((communicator, error), reported_to)| JobFact::AsyncError { communicator, error, reported_to };
    errors.into_iter().map(fact)
}

fn is_known(view: &RankView<'_>) -> bool {
    !view.unseen() && !view.dead()
}

fn is_watcher_stuck(view: &RankView<'_>) -> bool {
    let health = view.flight.and_then(|flight| flight.health.as_ref());
    health.is_some_and(|health| !health.watcher_inside.is_empty()) && view.watcher_stale()
}

/// A manual dump came before the hang timeout, so pending operations may still complete.
fn younger_than_timeout(case: &Case<'_>) -> Option<JobFact> {
    let manual = case.trigger_kind() == TriggerKind::Manual;
    let oldest_ns = case.world.views.iter().map(|view| view.oldest_pending_ns()).max().unwrap_or(0);
    let timeout_ns = case.evidence.hang_timeout_ns;
    let younger = manual && oldest_ns > 0 && oldest_ns < timeout_ns;
    younger.then_some(JobFact::YoungerThanTimeout { oldest_ns, timeout_ns })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::assert_table;

    #[test]
    fn every_rule_has_a_name_of_its_own_a_reason_and_a_scenario() {
        assert_table(REASONS_TO_JUDGE.iter().map(TableRule::texts));
    }
}
