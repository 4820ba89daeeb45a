//! `data_loader`: others wait for a rank whose main thread waits for its next batch.
//!
//! In both samples, the main thread is in the `__next__` of a loader, or in the `get` of a queue
//! that a loader's frames surround. A reader thread or worker process that is dead, stopped or
//! stuck in I/O makes the cause certain; the sentence names it as the cause behind the cause. If
//! nothing in the loader is known to be stuck, the loader may only be slow, and the confidence is
//! medium.
//!
//! A main thread that receives from a queue of Python's multiprocessing counts if a worker process
//! is stuck, whatever the program calls the queue. A main thread that receives from any pipe of
//! multiprocessing counts if a child process is dead or no other process has the other end open: no
//! more data can come.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement},
};
use crate::{
    graph::Suspect,
    verdict::{Activity, Cause},
};

pub(super) const RULE: Rule = Rule { cause: Cause::DataLoader, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::DataLoader))?;
    let mut evidence = Vec::from_iter(case.witness_line(rank_index));
    let helper = case.helper_fact(rank_index);
    let because = match (&helper, case.awaited_text(rank_index)) {
        (Some((helper, _)), _) => format!(", whose {helper}"),
        (None, Some(awaits)) => format!(", by {awaits}"),
        (None, None) => String::new(),
    };
    let statement = Statement::of_ranks(|number| {
        format!("{} for {} data loader{}{because}", number.waits(), number.its(), case.place(rank_index))
    });
    evidence.extend(helper.map(|(_, fact)| fact));
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
    evidence.extend(case.position_lines(rank_index));
    Some(Finding { culprits: vec![rank_index], statement, confidence: case.host_confidence(suspect), evidence })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    (case.view(culprit).host.stack && culprits.iter().all(|rank_index| !case.does(*rank_index, Activity::DataLoader)))
        .then(|| "the main thread is not in a data loader".to_owned())
}
