//! `process_stopped`: others wait for a rank whose process is stopped.
//!
//! In the last sample, the state of the process is `T` (a signal such as SIGSTOP, or a job control
//! key) or `t` (a debugger holds it), or it is in the freezer of its control group (`F`), as in a
//! paused container. Newer kernels show the freezer as `D` in a function where a signal would wake
//! the thread. The process runs no code, neither its training loop nor the threads that move its
//! data, so it is to blame wherever it is.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement},
    wording::{Number, line},
};
use crate::{
    graph::Suspect,
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::ProcessStopped, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.suspect_rank(suspect).filter(|rank_index| case.view(*rank_index).host.stopped())?;
    let view = case.view(rank_index);
    let state = &view.host.state;
    let how = |number: Number| match state.chars().next() {
        Some('F') => format!("frozen with {} control group (a paused container?)", number.its()),
        Some('t') => format!("stopped by a debugger (state {state})"),
        _ => format!("stopped by a signal (state {state})"),
    };
    let mut evidence = vec![line(format!("rank {}: process state {state}", view.rank), vec![view.rank])];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::of_ranks(|number| format!("{} {}{}", number.is(), how(number), case.place(rank_index))),
        confidence: Confidence::High,
        evidence,
    })
}

fn rule_out(case: &Case<'_>, _: &[usize]) -> Option<String> {
    let states = || case.world.views.iter().filter(|view| !view.host.state.is_empty());
    (states().next().is_some() && states().all(|view| !view.host.stopped()))
        .then(|| "no process is in state T".to_owned())
}
