//! Hangs as evidence, each with the right verdict: one file for each family of causes, and one for
//! the laws that hold for all verdicts.

mod collectives;
mod devices;
mod graphs;
mod groups;
mod hang;
mod hosts;
mod idle;
mod laws;
mod processes;
mod resource_waits;
mod threads;
mod transfers;

use crate::{Cause, Confidence, Verdict};

/// Checks the core of a verdict. A failure shows the full text.
#[track_caller]
fn expect(verdict: &Verdict, cause: Cause, culprits: &[u32], confidence: Confidence) {
    let text = verdict.to_text();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (cause, culprits), "\n{text}");
    assert_eq!(verdict.confidence, confidence, "\n{text}");
    assert!(verdict.victims.iter().all(|victim| !culprits.contains(victim)), "\n{text}");
    assert!(verdict.ruled_out.iter().all(|ruled_out| ruled_out.cause != cause), "\n{text}");
    assert!(verdict.sentence.ends_with('.') && !verdict.sentence.contains(".."), "\n{text}");
}
