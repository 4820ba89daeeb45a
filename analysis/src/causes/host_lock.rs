//! `host_lock`: others wait for a rank whose main thread waits for a lock or a condition, of its
//! own process or shared with others.
//!
//! In both samples, the innermost native functions of the main thread wait for a mutex, a
//! condition, a semaphore or another thread. It is not a data loader's queue, a wait for the device
//! or the GIL. The holder of the lock is not visible from outside, so the confidence is medium. The
//! sentence names a thread or child process that is stuck in I/O.
//!
//! Processes share the locks, semaphores, conditions and barriers of Python's multiprocessing, and
//! these processes may be ranks. A rank in such a lock waits for one of them, so it is not a
//! culprit while another rank stands still elsewhere.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement},
};
use crate::{
    graph::Suspect,
    stacks::is_shared_lock,
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::HostLock, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Lock))?;
    let view = case.view(rank_index);
    if !view.host.same_in_both || !view.host.frozen() {
        return None;
    }
    let mut evidence = Vec::from_iter(case.witness_line(rank_index));
    let shared = is_shared_lock(&view.host.observed.witness);
    let helper = case.helper_fact(rank_index);
    let statement = Statement::of_ranks(|number| {
        let (waits, its, place) = (number.waits(), number.its(), case.place(rank_index));
        let helper = helper.as_ref().map_or(String::new(), |(helper, _)| format!(", while {its} {helper}"));
        match shared {
            true => format!("{waits} for a lock that processes share{place}{helper}"),
            false => format!("{waits} for a lock or a thread of {its} own process{place}{helper}"),
        }
    });
    evidence.extend(helper.as_ref().map(|(_, fact)| fact.clone()));
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement,
        confidence: case.host_confidence(suspect).min(Confidence::Medium),
        evidence,
    })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    (case.view(culprit).host.stack && culprits.iter().all(|rank_index| !case.does(*rank_index, Activity::Lock)))
        .then(|| "the main thread does not wait for a lock".to_owned())
}
