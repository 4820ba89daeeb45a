//! `op_mismatch`: all ranks of a communicator have entered the collective with the same number, but
//! not the same operation.
//!
//! Every member has launched number N and its device has begun it, so no rank is behind. The
//! records of at least two members differ in one of these ways: they show different operations,
//! different roots of the same operation, reductions that compute something else, or the blocking
//! form of an MPI collective at one rank and the nonblocking form at another (which do not match by
//! the standard).
//!
//! The culprits are the ranks that differ from the largest group. If no group is the largest, the
//! operations before decide, if they repeat and only one group continues them. Otherwise all
//! members are named, with low confidence.

use std::collections::HashMap;

use xpu_timer_proto::v1::{Op, Operation};

use super::{
    case::Case,
    collective::{Collective, Dissent},
    rule::{Finding, Rule, Statement},
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    text::{name, ranks},
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::OpMismatch, explain, rule_out };

pub(super) fn key(operation: &Operation) -> (String, i32) {
    let rooted = matches!(operation.op(), Op::Reduce | Op::Broadcast | Op::Gather | Op::Scatter);
    (name(operation).to_owned(), if rooted { operation.peer } else { -1 })
}

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let collective = Collective::of(case, suspect)?;
    if let Some(dissent) = collective.dissent(case, key) {
        let words =
            |(name, root): &(String, i32)| if *root >= 0 { format!("{name} with root {root}") } else { name.clone() };
        return (!gave_up(&collective, &dissent)).then(|| finding(case, &collective, dissent, words));
    }
    let found = |dissent| finding(case, &collective, dissent, Clone::clone);
    if let Some(dissent) = collective.new_dissent(case, form) {
        return Some(found(dissent));
    }
    let dissent = collective.new_dissent(case, reduction)?;
    // The library does not compare what reductions compute. A difference makes wrong sums, and a
    // hang only together with another fault.
    let found = found(dissent);
    Some(Finding { confidence: found.confidence.min(Confidence::Medium), ..found })
}

/// The name of an MPI collective with its form: `MPI_Iallreduce` differs from `all_reduce`.
fn form(operation: &Operation) -> String {
    if operation.function.starts_with("MPI_I") { operation.function.clone() } else { name(operation).to_owned() }
}

/// The name of a reduction with what it computes: `all_reduce (max)`.
fn reduction(operation: &Operation) -> String {
    const COMPUTES: [&str; 5] = ["sum", "product", "max", "min", "average"];
    match operation.op() {
        Op::AllReduce | Op::Reduce | Op::ReduceScatter => {
            let computes = COMPUTES.get(operation.reduce_op as usize).unwrap_or(&"an operation of its own");
            format!("{} ({computes})", name(operation))
        }
        _ => name(operation).to_owned(),
    }
}

/// Whether all ranks that differ from the right group finalize their library. That is `teardown`.
pub(super) fn gave_up<Key: Ord + Clone>(collective: &Collective<'_>, dissent: &Dissent<Key>) -> bool {
    let ends = |rank_index: &usize| {
        let own = collective.operations.iter().find(|(other, _)| other == rank_index);
        own.is_some_and(|(_, operation)| operation.function.ends_with("Finalize"))
    };
    dissent.right.is_some() && dissent.culprits.iter().all(ends)
}

/// The finding about members that differ. All three mismatch rules use it.
pub(super) fn finding<Key: Ord + Clone>(
    case: &Case<'_>,
    collective: &Collective<'_>,
    dissent: Dissent<Key>,
    name: impl Fn(&Key) -> String,
) -> Finding {
    let at = case.describe(collective.event);
    let (_, place) = at.split_once(' ').unwrap_or(("", &at));
    let group = |views: &Vec<usize>| case.world.ranks(views.iter().copied());
    let does = |views: &Vec<usize>, key: &Key| {
        let who = group(views);
        format!("{} {} {}", ranks(&who), if who.len() == 1 { "runs" } else { "run" }, name(key))
    };
    let odd: Vec<String> = dissent
        .groups
        .iter()
        .filter(|(key, _)| dissent.right.as_ref() != Some(*key))
        .map(|(key, views)| {
            let place = if views.len() == 1 { case.place(views[0]) } else { String::new() };
            does(views, key) + &place
        })
        .collect();
    let right = dissent.right.as_ref().and_then(|key| dissent.groups.get_key_value(key));
    let sentence = match right {
        Some((key, views)) => {
            format!("At number {place}, {} while {}.", odd.join(" and "), does(views, key))
        }
        None => format!("At number {place}, the ranks differ: {}.", odd.join(", ")),
    };
    let mut evidence: Vec<_> = dissent
        .groups
        .iter()
        .map(|(key, views)| line(format!("{} at number {place}", does(views, key)), group(views)))
        .collect();
    if right.is_some() && !dissent.certain {
        evidence.push(line("no group is the larger one; the operations before decide which one was due", Vec::new()));
    }
    for &rank_index in dissent.culprits.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let size = match collective.event {
        Event::Collective { comm, .. } => case.comms[comm].size as usize,
        _ => 0,
    };
    let majority = right.is_some_and(|(_, views)| 2 * views.len() > size);
    let confidence = match (right.is_some(), dissent.certain) {
        (false, _) => Confidence::Low,
        (true, false) => Confidence::Medium,
        // The largest group is no majority of the communicator, or only a majority of the ranks
        // that came.
        (true, true) if !majority => Confidence::Medium,
        (true, true) => case.members_confidence(&[collective.event]),
    };
    Finding { culprits: dissent.culprits, statement: Statement::Sentence(sentence), confidence, evidence }
}

fn rule_out(case: &Case<'_>, _: &[usize]) -> Option<String> {
    // By the collective that a rank waits in, which is `oldest`.
    let mut waits: HashMap<(u64, u64), (String, i32)> = HashMap::new();
    for comm in &case.comms {
        for operation in comm.members.iter().filter_map(|member| member.oldest) {
            let first = waits.entry((comm.id, operation.seq)).or_insert_with(|| key(operation));
            if *first != key(operation) {
                return None;
            }
        }
    }
    (!waits.is_empty()).then(|| "ranks that are at the same number of a communicator run the same operation".to_owned())
}
