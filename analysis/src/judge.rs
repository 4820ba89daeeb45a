//! From evidence to a verdict: matches the collectives, builds the wait-for graph, lets the rules
//! explain the suspects, and combines the findings into one sentence.

mod arbitration;
mod outcome;
mod sentence;
mod suspicion;
mod unexplained;
mod write;

use xpu_timer_proto::v1::{Evidence, TriggerKind};

use arbitration::{Ruling, arbitrate};
use outcome::{Outcome, not_a_hang};
use sentence::sentence;
use unexplained::unexplained;
use write::MAX_EVIDENCE;

use crate::{
    alias,
    causes::Case,
    graph::Suspect,
    verdict::{Cause, Confidence, Verdict},
    world::RankView,
};

/// Judges one incident: who stopped the job, where, and why.
///
/// Pure and deterministic: the same evidence gives the same verdict, byte for byte.
/// [`Verdict::timing`] keeps its default, because only the collector knows it.
#[must_use]
pub fn judge(evidence: &Evidence) -> Verdict {
    let evidence = alias::resolved(evidence);
    let mut case = Case::of(&evidence);
    let outcome = if all_launched_recently(&case) {
        not_a_hang("every operation that is pending was launched a moment ago".to_owned(), Confidence::Medium)
    } else {
        if case.graph.events.is_empty() {
            case.graph.suspects = suspicion::suspects(&mut case);
        }
        conclude(&case)
    };
    write::write_verdict(&case, outcome)
}

/// Every pending operation is younger than the time between the samples, so none was pending all
/// that time.
fn all_launched_recently(case: &Case<'_>) -> bool {
    let evidence = case.evidence;
    let limit =
        [evidence.sample_interval_ns, evidence.hang_timeout_ns / 2].into_iter().filter(|limit| *limit > 0).min();
    let oldest = case.world.views.iter().map(|view| view.oldest_pending_ns()).max().unwrap_or(0);
    let kind = evidence.trigger.as_ref().map_or(TriggerKind::Unspecified, |trigger| trigger.kind());
    matches!(kind, TriggerKind::Manual | TriggerKind::Operation)
        && !case.graph.events.is_empty()
        && limit.is_some_and(|limit| oldest < limit)
        && !case.world.views.iter().any(|view| view.halted() || view.unseen() || polls_collective(view))
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
    let findings = &arbitrated.findings;
    let Some(first) = findings.first() else { return unexplained(case) };
    let confidence = arbitrated.confidence();
    if all_stuck_alike(case, findings) {
        return no_rank_differs(case, findings, confidence);
    }
    let weight = |suspect: &Suspect| case.main_event(suspect).map_or(0, |event| case.graph.waiters_of(event).len());
    let main = arbitrated
        .primary()
        .map(|ruling| ruling.suspect)
        .reduce(|best, next| if weight(next) > weight(best) { next } else { best });
    let mut evidence = Vec::new();
    for ruling in findings {
        if evidence.len() < MAX_EVIDENCE {
            evidence.extend(ruling.finding.evidence.iter().cloned());
        }
    }
    Outcome {
        cause: first.cause(),
        confidence,
        sentence: sentence(case, findings, first.rule, main, &arbitrated.culprits),
        evidence,
        main: main.cloned(),
        culprits: arbitrated.culprits,
    }
}

/// No rank waits for another, and all ranks of the job are stuck in the same way: they wait for
/// something outside the job.
fn all_stuck_alike(case: &Case<'_>, findings: &[Ruling<'_>]) -> bool {
    let is_outside = |ruling: &Ruling<'_>| {
        matches!(ruling.cause(), Cause::DataLoader | Cause::StorageIo | Cause::DState | Cause::HostLock)
    };
    let all = case.world.views.len();
    all > 1
        && case.graph.events.is_empty()
        && findings.len() == all
        && case.stack_waiters.len() == all
        && findings.iter().all(|ruling| ruling.rule == findings[0].rule && is_outside(ruling))
}

fn no_rank_differs(case: &Case<'_>, findings: &[Ruling<'_>], confidence: Confidence) -> Outcome {
    let all: Vec<usize> = (0..case.world.views.len()).collect();
    let said = sentence(case, findings, findings[0].rule, None, &all);
    let evidence = findings.iter().take(4).flat_map(|ruling| ruling.finding.evidence.iter().cloned());
    Outcome {
        cause: findings[0].cause(),
        culprits: Vec::new(),
        confidence,
        sentence: format!(
            "{}; these are all ranks of the job, so none is to blame: look at what they wait for.",
            said.trim_end_matches('.')
        ),
        evidence: evidence.collect(),
        main: None,
    }
}
