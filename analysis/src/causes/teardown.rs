//! `teardown`: others wait for a rank that tears its communicators or its interpreter down.
//!
//! The main thread stands in the destruction, abort or finalization of a communicator, in the finalization of Python, or in the
//! exit handlers. A rank gets there early after an exception of its own, or because its loop was shorter; what it ran into
//! stands in its log. A rank that is torn down while it waits for the device waits, and is followed further instead.

use super::{Case, Cause, Finding, Rule, Says, never_mistaken};
use crate::{graph::Suspect, verdict::Activity};

pub(super) const RULE: Rule = Rule { cause: Cause::Teardown, explain, rule_out: never_mistaken };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let view = case.host(suspect).filter(|view| case.does(*view, Activity::Teardown))?;
    let content = case.view(view);
    let mut evidence = vec![case.witness(view)];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters(view, event)));
    evidence.extend(case.standing(view));
    Some(Finding {
        culprits: vec![view],
        says: Says::Rank(format!("is shutting down, in {}{}", content.host.doing.witness, case.place(view))),
        confidence: case.host_confidence(suspect),
        evidence,
    })
}
