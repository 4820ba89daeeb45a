//! Makes the verdict of an incident without risking the collector: if the judge panics, the verdict
//! is `unknown` and contains the known facts about the ranks.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use tracing::error;
use xpu_timer_analysis::{Activity, Cause, Confidence, EncodedOperations, HangEvidence, RankGroup, Verdict};
use xpu_timer_proto::v1::{Evidence, Grounds, RankEvidence};

use crate::os::clock::nanoseconds;

/// Makes the verdict. Never panics.
#[must_use]
pub(crate) fn judge(evidence: &Evidence) -> Verdict {
    judge_encoded(evidence, &[])
}

/// Like [`judge`], with the operations of each rank if they are encoded.
#[must_use]
pub(crate) fn judge_encoded(evidence: &Evidence, operations: &[EncodedOperations]) -> Verdict {
    judge_by(evidence, |evidence| xpu_timer_analysis::judge_encoded(evidence, operations))
}

/// A panic, with its message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Panicked(String);

/// Runs work and catches its panics, so that its thread does not end silently.
///
/// # Errors
/// The work has panicked.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    // Nothing that the work has touched is used after a panic.
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| Panicked(panic_message(&*payload)))
}

/// A verdict with the cause `unknown` and this sentence, for an incident that cannot be judged.
#[must_use]
pub(crate) fn unknown(evidence: &Evidence, sentence: String) -> Verdict {
    let bare = Evidence { ranks: Vec::new(), trigger: None, ..evidence.clone() };
    let mut verdict = xpu_timer_analysis::judge(&bare);
    (verdict.cause, verdict.confidence, verdict.sentence) = (Cause::Unknown, Confidence::Low, sentence);
    verdict
}

/// Whether a verdict justifies ending the ranks of its job.
#[must_use]
pub(crate) fn grounds(verdict: &Verdict) -> Grounds {
    // A low confidence in the cause `comm_init` means that a rank starts up and makes progress.
    let starts = verdict.cause == Cause::CommInit && verdict.confidence == Confidence::Low;
    match verdict.hang {
        HangEvidence::None => Grounds::Unspecified,
        _ if starts || verdict.confidence < Confidence::High && (verdict.helpers_busy || culprits_run(verdict)) => {
            Grounds::Doubtful
        }
        HangEvidence::PendingOperation | HangEvidence::WaitChain => Grounds::Proven,
    }
}

/// The time between two dumps of a job doubles up to this many times: long steps should not be
/// captured over and over.
const MOST_DOUBLINGS: u32 = 3;
/// Lower bound of that time: a short hang timeout, as in tests, does not shorten it further.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);

/// Nanoseconds until a job that may be healthy is dumped again, given the number of dumps so far.
#[must_use]
pub(crate) fn recheck_delay_ns(hang_timeout: Duration, looks: u32) -> u64 {
    let wait_ns = nanoseconds(hang_timeout.max(SHORTEST_WAIT));
    wait_ns.saturating_mul(1 << looks.min(MOST_DOUBLINGS))
}

/// Whether the culprits are computing: a long step or an endless loop.
fn culprits_run(verdict: &Verdict) -> bool {
    // A rank that used a processor may be asleep in a sample by chance.
    let runs = |group: &&RankGroup| {
        group.process_state.starts_with('R') || group.activity == Activity::Running || group.moved == Some(true)
    };
    let running: Vec<u32> = verdict.ranks.iter().filter(runs).flat_map(|group| group.ranks.iter().copied()).collect();
    !verdict.culprits.is_empty() && verdict.culprits.iter().all(|culprit| running.contains(culprit))
}

fn judge_by(evidence: &Evidence, judge: impl Fn(&Evidence) -> Verdict) -> Verdict {
    let why = match catch_panic(|| judge(evidence)) {
        Ok(verdict) => return verdict,
        Err(why) => why,
    };
    error!("incident {}: the judge failed: {why}", evidence.incident);
    let sentence = format!(
        "There is no verdict, because the judge failed ({why}); this folder has the stacks and flight records."
    );
    let bare = without_activity(evidence);
    // If the judge fails on all evidence, it may still work on the presence of the ranks alone.
    let mut verdict = catch_panic(|| judge(&bare)).unwrap_or_else(|_| unknown(evidence, String::new()));
    (verdict.cause, verdict.confidence, verdict.sentence) = (Cause::Unknown, Confidence::Low, sentence);
    verdict.culprits.clear();
    verdict.victims.clear();
    verdict.hang = HangEvidence::None;
    verdict.timing.errors.push(format!("the judge failed: {why}; please report it with evidence.bin"));
    verdict
}

/// A copy without the activity of the ranks.
fn without_activity(evidence: &Evidence) -> Evidence {
    let mut bare = without_dumps(evidence);
    for rank in &mut bare.ranks {
        (rank.flight, rank.host) = (None, None);
    }
    bare.processes.clear();
    bare
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".into())
}

/// A copy without the dumps, which are separate files.
pub(crate) fn without_dumps(evidence: &Evidence) -> Evidence {
    let ranks = evidence.ranks.iter().map(|rank| RankEvidence {
        rank: rank.rank,
        presence: rank.presence,
        dump: None,
        flight: rank.flight.clone(),
        node: rank.node.clone(),
        errors: rank.errors.clone(),
        failures: rank.failures.clone(),
        exit: rank.exit.clone(),
        host: rank.host.clone(),
        stay: rank.stay.clone(),
    });
    Evidence {
        ranks: ranks.collect(),
        incident: evidence.incident.clone(),
        job: evidence.job.clone(),
        trigger: evidence.trigger.clone(),
        processes: evidence.processes.clone(),
        ..*evidence
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{FlightRecord, Presence, RankEvidence};

    use super::*;

    fn evidence() -> Evidence {
        let rank = |rank: u32, presence: Presence| RankEvidence {
            rank,
            presence: presence.into(),
            flight: Some(FlightRecord::default()),
            ..Default::default()
        };
        let ranks = vec![rank(0, Presence::Present), rank(1, Presence::Dead)];
        Evidence { incident: "i".into(), job: "j".into(), world_size: 2, ranks, ..Default::default() }
    }

    #[test]
    fn a_panicking_judge_yields_an_unknown_verdict() {
        let verdict = judge_by(&evidence(), |evidence| {
            assert!(evidence.ranks.iter().all(|rank| rank.flight.is_none()), "no such rank");
            xpu_timer_analysis::judge(evidence)
        });
        assert_eq!((verdict.cause, verdict.confidence), (Cause::Unknown, Confidence::Low));
        assert!(verdict.sentence.contains("no such rank"), "{}", verdict.sentence);
        assert_eq!((verdict.incident.as_str(), verdict.world_size, verdict.timing.errors.len()), ("i", 2, 1));
        let shown: Vec<&str> = verdict.ranks.iter().map(|group| group.presence.as_str()).collect();
        assert!(shown.contains(&"dead") && shown.contains(&"present"), "{shown:?}");
        assert!(verdict.culprits.is_empty(), "the failed judge names nobody");
    }

    #[test]
    fn a_judge_that_always_panics_still_yields_a_verdict() {
        let verdict = judge_by(&evidence(), |_| panic!("never"));
        assert_eq!((verdict.cause, verdict.world_size, verdict.job.as_str()), (Cause::Unknown, 2, "j"));
        assert!(verdict.sentence.contains("never"), "{}", verdict.sentence);
    }

    #[test]
    fn only_evidence_of_a_hang_justifies_ending_ranks() {
        let of = |cause, confidence, hang| grounds(&Verdict { cause, confidence, hang, ..judge(&Evidence::default()) });
        let pending = HangEvidence::PendingOperation;
        for cause in [Cause::LongStep, Cause::NotAHang, Cause::Unknown, Cause::MissingRank] {
            assert_eq!(of(cause, Confidence::High, HangEvidence::None), Grounds::Unspecified);
        }
        assert_eq!(of(Cause::CommInit, Confidence::Low, pending), Grounds::Doubtful);
        assert_eq!(of(Cause::CommInit, Confidence::High, pending), Grounds::Proven);
        assert_eq!(of(Cause::Unknown, Confidence::Low, pending), Grounds::Proven);
        assert_eq!(of(Cause::MissingRank, Confidence::Low, HangEvidence::WaitChain), Grounds::Proven);
        let group =
            |rank, state: &str| RankGroup { ranks: vec![rank], process_state: state.into(), ..RankGroup::default() };
        let ranks = vec![group(0, "S (sleeping)"), group(1, "R (running)"), group(2, "R (running)")];
        let blamed = |culprits: &[u32], confidence| {
            let (culprits, ranks) = (culprits.to_vec(), ranks.clone());
            let cause = Cause::MissingRank;
            grounds(&Verdict { cause, culprits, ranks, confidence, hang: pending, ..judge(&Evidence::default()) })
        };
        assert_eq!(blamed(&[1, 2], Confidence::Medium), Grounds::Doubtful, "they may be in a long step");
        assert_eq!(blamed(&[1], Confidence::High), Grounds::Proven);
        let computes = vec![RankGroup { moved: Some(true), ..group(0, "S (sleeping)") }];
        let verdict = Verdict { ranks: computes, culprits: vec![0], ..judge(&Evidence::default()) };
        let verdict = Verdict { cause: Cause::MissingRank, confidence: Confidence::Medium, hang: pending, ..verdict };
        assert_eq!(grounds(&verdict), Grounds::Doubtful, "it was seen asleep by chance");
        let waits = Verdict { ranks: vec![group(0, "S (sleeping)")], helpers_busy: true, ..verdict };
        assert_eq!(grounds(&waits), Grounds::Doubtful, "its workers may be in a long step");
        assert_eq!(blamed(&[0, 1], Confidence::Medium), Grounds::Proven);
    }
}
