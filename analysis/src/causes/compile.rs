//! `compile`: others wait for a rank that compiles. Not a hang.
//!
//! The main thread is in the frames of a compiler (torch.compile, Triton, a C++ extension, NVRTC),
//! or it waits for a child process that is a compiler. Compilers take minutes and end by
//! themselves. A compiler can hang as well, so the confidence is never high.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::{Number, line},
};
use crate::{
    facts,
    graph::Suspect,
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::Compile, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect)?;
    let view = case.view(rank_index);
    let child = if case.does(rank_index, Activity::Compile) {
        None
    } else {
        let busy = matches!(view.host.observed.activity, Activity::Unknown | Activity::Lock | Activity::Io);
        Some(facts::compiler_child(view.evidence?).filter(|_| busy)?)
    };
    let witness = |number: Number| match &child {
        None => format!("in {}", view.host.observed.witness),
        Some(compiler) => {
            format!("{} for {} child process {compiler}", number.word("it waits", "they wait"), number.its())
        }
    };
    let mut evidence = vec![line(format!("rank {}: {}", view.rank, witness(Number::One)), vec![view.rank])];
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::of_ranks(|number| {
            format!(
                "{} ({}){}, which is slow and probably not a hang",
                number.word("compiles", "compile"),
                witness(number),
                case.place(rank_index)
            )
        }),
        confidence: Confidence::Medium,
        evidence,
    })
}
