//! `long_step`: others wait for a rank that is busy and makes progress. Not a hang.
//!
//! Between the samples the rank read or wrote bytes, or its own Python code reached another line:
//! an evaluation, a checkpoint or a preprocessing that takes longer than the timeout. A busy
//! processor at one and the same line proves nothing, because an endless loop is busy as well. The
//! rule also covers a device that is far behind its host: an operation in the awaited streams began
//! or completed between the samples. The confidence is never high.

use super::{
    case::Case,
    rule::{Finding, Rule, Statement},
    wording::line,
};
use crate::{
    graph::Suspect,
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::LongStep, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Suspect::Device { rank_index, .. } = suspect {
        return slow_device(case, *rank_index);
    }
    let rank_index = case.host_rank(suspect)?;
    let view = case.view(rank_index);
    let moved = view.host.moved.filter(|moved| moved.io || moved.own_frame)?;
    if matches!(view.host.observed.activity, Activity::DeviceWait | Activity::CommInit) {
        return None;
    }
    let how = if moved.own_frame { "Python code goes on" } else { "bytes flow" };
    let mut evidence = vec![line(format!("rank {}: its {how} between the samples", view.rank), vec![view.rank])];
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::of_ranks(|number| {
            let (is, its, place) = (number.is(), number.its(), case.place(rank_index));
            format!("{is} busy{place}: {its} {how}, so this is probably a long step and not a hang")
        }),
        confidence: Confidence::Medium,
        evidence,
    })
}

/// The device is behind its host, and its stream makes progress: an operation began or completed
/// since the first sample.
fn slow_device(case: &Case<'_>, rank_index: usize) -> Option<Finding> {
    let view = case.view(rank_index);
    let read_ns = view.flight?.read_ns;
    let recent = |ns: u64| ns != 0 && read_ns.saturating_sub(ns) < case.evidence.sample_interval_ns;
    let streams: Vec<u64> = view.pending().map(|operation| operation.stream).collect();
    let went_on = view
        .operations()
        .filter(|operation| streams.contains(&operation.stream))
        .any(|operation| recent(operation.completed_ns) || recent(operation.started_ns));
    if !went_on {
        return None;
    }
    let rank = view.rank;
    let mut evidence = vec![line(format!("rank {rank}: its device went on between the samples"), vec![rank])];
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::of_ranks(|number| {
            let (is, its, stands) = (number.is(), number.its(), case.stands_clause(rank_index, number));
            format!("{is} slow on {its} device, which goes on, so this is probably not a hang{stands}")
        }),
        confidence: Confidence::Medium,
        evidence,
    })
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    let frozen = culprits
        .iter()
        .all(|rank_index| case.view(*rank_index).host.moved.is_some() && case.view(*rank_index).host.frozen());
    let who = if culprits.len() == 1 { format!("rank {}", case.view(culprit).rank) } else { "the culprits".to_owned() };
    frozen.then(|| format!("nothing moved on {who} between the two samples"))
}
