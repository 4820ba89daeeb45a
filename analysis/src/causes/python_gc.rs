//! `python_gc`: others wait for a rank that collects Python garbage. Not a hang.
//!
//! The frames of the garbage collector are on the main thread, in the last sample or in both. A
//! collection over a large heap takes seconds and ends by itself. The confidence is never high,
//! because a finalizer inside the collection can block.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement, never_ruled_out},
};
use crate::{
    graph::Suspect,
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::PythonGc, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Gc))?;
    let mut evidence = Vec::from_iter(case.witness_line(rank_index));
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::of_ranks(|number| {
            let collects = number.word("collects", "collect");
            format!("{collects} Python garbage{}, which is slow and probably not a hang", case.place(rank_index))
        }),
        confidence: Confidence::Medium,
        evidence,
    })
}
