//! `compile`: others wait for a rank that compiles. Not a hang.
//!
//! The main thread stands in the frames of a compiler (torch.compile, Triton, a C++ extension, NVRTC), or it waits for a
//! child process that is one. Compilers take minutes and end by themselves, so the confidence is never high: a compiler can
//! hang as well.

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
    let view = case.host(suspect)?;
    let content = case.view(view);
    let child = if case.does(view, Activity::Compile) {
        None
    } else {
        let busy = matches!(content.host.doing.activity, Activity::Unknown | Activity::Lock | Activity::Io);
        Some(facts::compiler_child(content.evidence?).filter(|_| busy)?)
    };
    let witness = |number: Number| match &child {
        None => format!("in {}", content.host.doing.witness),
        Some(compiler) => {
            format!("{} for {} child process {compiler}", number.word("it waits", "they wait"), number.its())
        }
    };
    let mut evidence = vec![line(format!("rank {}: {}", content.rank, witness(Number::One)), vec![content.rank])];
    evidence.extend(case.standing(view));
    Some(Finding {
        culprits: vec![view],
        statement: Statement::of_ranks(|number| {
            format!(
                "{} ({}){}, which is slow and probably not a hang",
                number.word("compiles", "compile"),
                witness(number),
                case.place(view)
            )
        }),
        confidence: Confidence::Medium,
        evidence,
    })
}
