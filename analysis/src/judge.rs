//! From evidence to a verdict.

use xpu_timer_proto::v1::Evidence;

use crate::verdict::{Cause, Confidence, FORMAT, Timing, TriggerReport, Verdict};

/// Judges one incident: who stopped the job, where, and why.
///
/// Pure and deterministic: the same evidence gives the same verdict, byte for byte.
#[must_use]
pub fn judge(evidence: &Evidence) -> Verdict {
    Verdict {
        format: FORMAT,
        incident: evidence.incident.clone(),
        job: evidence.job.clone(),
        world_size: evidence.world_size,
        attempt: evidence.attempt,
        trigger: TriggerReport { kind: "unspecified".to_owned(), rank: None, operation: None },
        sentence: "It is not known why the job stopped.".to_owned(),
        cause: Cause::Unknown,
        confidence: Confidence::Low,
        culprits: Vec::new(),
        victims: Vec::new(),
        evidence: Vec::new(),
        ruled_out: Vec::new(),
        communicators: Vec::new(),
        ranks: Vec::new(),
        timing: Timing::default(),
    }
}
