//! `compile`: others wait for a rank that compiles. Not a hang.
//!
//! The main thread stands in the frames of a compiler (torch.compile, Triton, a C++ extension, NVRTC), or it waits for a
//! child process that is one. Compilers take minutes and end by themselves, so the confidence is never high: a compiler can
//! hang as well.

use super::{Case, Cause, Confidence, Finding, Rule, Says, line, never_mistaken};
use crate::{facts, graph::Suspect, verdict::Activity};

pub(super) const RULE: Rule = Rule { cause: Cause::Compile, explain, rule_out: never_mistaken };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let view = case.host(suspect)?;
    let content = case.view(view);
    let witness = if case.does(view, Activity::Compile) {
        format!("in {}", content.host.doing.witness)
    } else {
        let busy = matches!(content.host.doing.activity, Activity::Unknown | Activity::Lock | Activity::Io);
        let compiler = facts::compiler_child(content.evidence?).filter(|_| busy)?;
        format!("it waits for its child process {compiler}")
    };
    let mut evidence = vec![line(format!("rank {}: {witness}", content.rank), vec![content.rank])];
    evidence.extend(case.standing(view));
    Some(Finding {
        culprits: vec![view],
        says: Says::Rank(format!("compiles ({witness}){}, which is slow and probably not a hang", case.place(view))),
        confidence: Confidence::Medium,
        evidence,
    })
}
