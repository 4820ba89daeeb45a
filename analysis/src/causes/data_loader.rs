//! `data_loader`: others wait for a rank whose main thread waits for its next batch.
//!
//! The main thread stands in the `__next__` of a loader or in the `get` of a queue that a loader's frames surround, in both
//! samples. A reader thread or worker process that is stuck in input or output, dead or stopped, makes it certain and is
//! named; so is the cause behind the cause. A loader in which nothing is known to be stuck may only be slow: medium confidence.
//!
//! A main thread that receives from a queue of Python's multiprocessing counts, whatever the program calls it, when a worker process is stuck.
//! So does one that receives from any pipe of it when a child process is dead or nobody else has the other end open: nothing comes any more.

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
