//! `size_mismatch`: all ranks have entered the same operation with different numbers of elements.
//!
//! Like `op_mismatch`, with the same operation and different counts. All-to-all is left out,
//! because its ranks may differ. The rule also covers a send and its receive that have both begun
//! on their devices with different counts: the rank is named whose size has changed from what it
//! had always been between these two, or both ranks if the past shows nothing.

use xpu_timer_proto::v1::{OpStatus, Operation};

use super::{
    case::Case,
    collective::{Collective, equal_sizes},
    op_mismatch::finding,
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    text::{ranks, shape},
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::SizeMismatch, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    // An MPI receive accepts any size up to its buffer's, so its record has no size.
    let differ = |one: &Operation, other: &Operation| one.count != other.count && one.count != 0 && other.count != 0;
    if let Some(found) = ends_differ(case, suspect, "sizes", differ, |operation| operation.count) {
        return Some(found);
    }
    let collective = Collective::of(case, suspect)?;
    if !collective.operations.iter().all(|(_, operation)| equal_sizes(operation.op())) {
        return None;
    }
    let dissent = collective.new_dissent(case, |operation| operation.count)?;
    let op = collective.operations.first()?.1.op();
    let name = |count: &u64| format!("{} of {count} elements", crate::text::op_name(op));
    Some(finding(case, &collective, dissent, name))
}

/// A send and a receive that match, alone or in a cycle, and differ in a property.
pub(super) fn ends_differ(
    case: &Case<'_>,
    suspect: &Suspect,
    what: &str,
    differ: impl Fn(&Operation, &Operation) -> bool,
    key: impl Fn(&Operation) -> u64,
) -> Option<Finding> {
    let events = match suspect {
        Suspect::Complete(event) => std::slice::from_ref(event),
        Suspect::Cycle(events) => events.as_slice(),
        _ => return None,
    };
    events.iter().find_map(|event| point_to_point(case, *event, what, &differ, &key))
}

fn point_to_point(
    case: &Case<'_>,
    event: Event,
    what: &str,
    differ: &impl Fn(&Operation, &Operation) -> bool,
    key: &impl Fn(&Operation) -> u64,
) -> Option<Finding> {
    let Event::PointToPoint { comm, rank_index, peer, recv } = event else { return None };
    let own = case.comms[comm].member(rank_index)?.comm_rank;
    let other = case.comms[comm].rank_index_of(peer)?;
    let counterpart = Event::PointToPoint { comm, rank_index: other, peer: own, recv: !recv };
    let (mine, theirs) = (case.operation(event)?, case.operation(counterpart)?);
    if !differ(mine, theirs) {
        return None;
    }
    // Both ends are suspects of their own. Either gives the same finding.
    let mut ends = [(case.view(rank_index).rank, mine), (case.view(other).rank, theirs)];
    ends.sort_by_key(|end| end.0);
    // Whether an end differs from what it had always been.
    let changed = |rank_index: usize, operation: &Operation| {
        let before: Vec<u64> = case
            .view(rank_index)
            .operations()
            .filter(|past| {
                past.status() == OpStatus::Completed
                    && (past.communicator, past.op, past.peer) == (operation.communicator, operation.op, operation.peer)
            })
            .map(&key)
            .collect();
        !before.is_empty() && before.iter().all(|past| *past == before[0] && *past != key(operation))
    };
    let blamed = match (changed(rank_index, mine), changed(other, theirs)) {
        (true, false) => vec![rank_index],
        (false, true) => vec![other],
        _ => vec![rank_index, other],
    };
    let both = case.world.ranks([rank_index, other]);
    let new = match blamed[..] {
        [one] => format!("; that of rank {} is not what it had always been", case.view(one).rank),
        _ => String::new(),
    };
    let sentence = format!(
        "Rank {} runs {} and its peer rank {} {}: the {what} differ{new}.",
        ends[0].0,
        shape(ends[0].1),
        ends[1].0,
        shape(ends[1].1)
    );
    let mut evidence = vec![line(format!("{} have both begun, and their {what} differ", ranks(&both)), both)];
    for &rank_index in &blamed {
        evidence.extend(case.position_lines(rank_index));
    }
    Some(Finding {
        culprits: blamed,
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence,
    })
}
