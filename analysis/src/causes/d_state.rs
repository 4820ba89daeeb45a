//! `d_state`: others wait for a rank whose main thread sleeps uninterruptibly in the kernel.
//!
//! The main thread is in state `D` in both samples, in the same kernel function, and did not run in
//! between. The kernel waits for a disk, a network file system or a driver. No signal reaches the
//! process, not even SIGKILL. The rule comes before `storage_io`, which is the same wait where a
//! signal would end it.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement},
    wording::line,
};
use crate::{
    graph::Suspect,
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::DState, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.suspect_rank(suspect)?;
    let view = case.view(rank_index);
    let sleep = view.host.d_sleep.as_ref().filter(|sleep| sleep.main)?;
    let place = if sleep.wchan.is_empty() { String::new() } else { format!(" in kernel function {}", sleep.wchan) };
    let mut evidence = vec![line(
        format!("rank {}: in state D{place} in both samples, without having run in between", view.rank),
        vec![view.rank],
    )];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::of_ranks(|number| {
            format!("{} uninterruptibly{place}{}", number.word("sleeps", "sleep"), case.place(rank_index))
        }),
        confidence: Confidence::High,
        evidence,
    })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let states =
        || culprits.iter().map(|rank_index| &case.view(*rank_index).host).filter(|host| !host.state.is_empty());
    (states().next().is_some() && states().all(|host| host.d_sleep.is_none()))
        .then(|| "no thread sleeps uninterruptibly in both samples".to_owned())
}
