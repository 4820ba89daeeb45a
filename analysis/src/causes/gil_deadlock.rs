//! `gil_deadlock`: others wait for a rank in which a thread holds the GIL and is blocked in native
//! code.
//!
//! The same thread holds the GIL in both samples, it is at the same place, and it used no processor
//! in between. At least one other thread waits for the GIL in both samples. Only all of this
//! together counts: a single wait for the GIL is normal. The sentence includes what blocks the
//! holder, such as a file or another lock. Without the GIL, that would not harm the other threads.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement},
    wording::line,
};
use crate::{
    facts,
    graph::Suspect,
    verdict::{Activity, Cause},
};

pub(super) const RULE: Rule = Rule { cause: Cause::GilDeadlock, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.suspect_rank(suspect)?;
    let view = case.view(rank_index);
    let holder = facts::gil_holder(view.evidence?)?;
    let place = holder.place.as_ref().map_or(String::new(), |place| format!(" at {place}"));
    let how = format!(
        "deadlocked on Python's global lock: thread {} holds it and is blocked in {}{place}, and {} for it",
        holder.thread,
        holder.function,
        match holder.waiting {
            1 => "another thread waits".to_owned(),
            waiting => format!("{waiting} other threads wait"),
        }
    );
    let mut evidence = vec![line(format!("rank {} is {how}, in both samples", view.rank), vec![view.rank])];
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
    evidence.extend(case.position_lines(rank_index));
    let statement = Statement::of_ranks(|number| format!("{} {how}", number.is()));
    Some(Finding { culprits: vec![rank_index], statement, confidence: case.host_confidence(suspect), evidence })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    (case.view(culprit).host.stack && culprits.iter().all(|rank_index| !case.does(*rank_index, Activity::Gil)))
        .then(|| "the main thread does not wait for Python's global lock".to_owned())
}
