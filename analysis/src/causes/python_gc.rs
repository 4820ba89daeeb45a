//! `python_gc`: others wait for a rank that collects Python garbage. Not a hang.
//!
//! The collector's frames stand on the main thread. A collection over a large heap takes seconds and ends by itself; it is
//! seen in the last sample or in both. The confidence is never high, because a finalizer inside it can block.

use super::{Case, Cause, Confidence, Finding, Rule, Says, never_mistaken};
use crate::{graph::Suspect, verdict::Activity};

pub(super) const RULE: Rule = Rule { cause: Cause::PythonGc, explain, rule_out: never_mistaken };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let view = case.host(suspect).filter(|view| case.does(*view, Activity::Gc))?;
    let mut evidence = Vec::from_iter(case.witness(view));
    evidence.extend(case.standing(view));
    Some(Finding {
        culprits: vec![view],
        says: Says::rank(|number| {
            let collects = number.word("collects", "collect");
            format!("{collects} Python garbage{}, which is slow and probably not a hang", case.place(view))
        }),
        confidence: Confidence::Medium,
        evidence,
    })
}
