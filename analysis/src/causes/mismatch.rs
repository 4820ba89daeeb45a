//! `op_mismatch`, `dtype_mismatch` and `size_mismatch`: all ranks of a communicator have entered
//! the collective with the same number, and their operations differ. The last two also cover a send
//! and its receive.

use std::collections::HashMap;

use xpu_timer_proto::v1::{DataType, Op, OpStatus, Operation};

use super::collective::{Collective, Dissent, equal_sizes};
use crate::{
    case::Case,
    explanation::{CollectiveFault, Differ, Explanation, OperationVariant, Property, TransferFault},
    finding::{CollectiveFact, Exclusion, Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::{Event, Suspect},
    text::{self, name},
    verdict::{Cause, Confidence},
    world::{Exit, is_collective},
};

/// `op_mismatch`: all ranks of a communicator have entered the collective with the same number, but
/// not the same operation.
///
/// Every member has launched number N and its device has started it, so no rank is behind. The
/// records of at least two members differ in one of these ways: they show different operations,
/// different roots of the same operation, reductions that compute something else, or the blocking
/// form of an MPI collective at one rank and the nonblocking form at another (which do not match by
/// the standard).
///
/// The culprits are the ranks that differ from the largest group. If no group is the largest, the
/// operations before decide, if they repeat and only one group continues them. Otherwise all
/// members are named, with low confidence.
pub(super) const OPERATION: Rule =
    Rule { cause: Cause::OpMismatch, explain: operations_differ, rule_out: operations_agree };

/// `op_mismatch`, of kernels that communicate by themselves: ranks of one group busy-wait for each
/// other in different kernels.
///
/// The ranks of a wait cycle are stuck in launches of at least two kernels, and in nothing else.
/// The culprits are the ranks outside the largest group, with medium confidence, because they may
/// also launch the same kernels in another order. If no group is the largest, all are named with
/// low confidence.
pub(super) const KERNEL: Rule = Rule { cause: Cause::OpMismatch, explain: kernels_differ, rule_out: never_ruled_out };

/// `dtype_mismatch`: all ranks have entered the same operation with different element types.
///
/// Like [`OPERATION`], with the same operation and different types. It comes before
/// `size_mismatch`, because a rank that sends the same bytes as another type differs in both. Ranks
/// that differed in the same way before, in an operation that completed, may do so. The rule also
/// covers a send and its receive, and a rank that gloo aborted in the collective: gloo ends the
/// process that receives more bytes than fit, which is mostly not the one that differs. Then the
/// confidence is at most medium.
pub(super) const TYPE: Rule = Rule { cause: Cause::DtypeMismatch, explain: types_differ, rule_out: never_ruled_out };

/// `size_mismatch`: all ranks have entered the same operation with different numbers of elements.
///
/// Like [`OPERATION`], with the same operation and different counts. All-to-all is left out,
/// because its ranks may differ. The rule also covers a send and its receive that have both started
/// on their devices with different counts: the rank is named whose size has changed from what it
/// had always been between these two, or both ranks if the past shows nothing.
pub(super) const SIZE: Rule = Rule { cause: Cause::SizeMismatch, explain: sizes_differ, rule_out: never_ruled_out };

/// Identifies an operation for [`OPERATION`]: its name, and its root or -1.
pub(super) fn operation_key(operation: &Operation) -> (String, i32) {
    let rooted = matches!(operation.op(), Op::Reduce | Op::Broadcast | Op::Gather | Op::Scatter);
    (name(operation).to_owned(), if rooted { operation.peer } else { -1 })
}

fn operations_differ(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let collective = Collective::of(case, suspect)?;
    if let Some(dissent) = collective.dissent(case, operation_key) {
        return (!finalizes_instead(&collective, &dissent)).then(|| finding(case, &collective, dissent, with_root));
    }
    let found = |dissent| finding(case, &collective, dissent, |name: &String| of_name(name, None));
    if let Some(dissent) = collective.new_dissent(case, form) {
        return Some(found(dissent));
    }
    let dissent = collective.new_dissent(case, reduction)?;
    // The library does not compare what reductions compute. A difference makes wrong sums, and a
    // hang only together with another fault.
    let found = found(dissent);
    Some(Finding { confidence: found.confidence.min(Confidence::Medium), ..found })
}

fn kernels_differ(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Cycle(events) = suspect else { return None };
    let peers = |event: &Event| case.kernel_of(*event).map(|(kernel, _)| &kernel.peers);
    let first = peers(events.first()?)?;
    if events.len() < 2 || !events.iter().all(|event| peers(event) == Some(first)) {
        return None;
    }
    let groups = events.iter().map(|event| (*event, case.graph.waiters_of(*event).to_vec()));
    let mut odd: Vec<(Event, Vec<usize>)> = groups.filter(|(_, ranks)| !ranks.is_empty()).collect();
    let largest = odd.iter().map(|(_, ranks)| ranks.len()).max()?;
    let mut leaders = odd.iter().enumerate().filter(|(_, (_, ranks))| ranks.len() == largest);
    let leader = leaders.next().filter(|_| leaders.next().is_none()).map(|(index, _)| index);
    let most = leader.map(|leader| odd.remove(leader));
    let mut culprits: Vec<usize> = odd.iter().flat_map(|(_, ranks)| ranks.clone()).collect();
    culprits.sort_unstable();
    culprits.dedup();
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&culprits));
    let confidence = if most.is_some() { Confidence::Medium } else { Confidence::Low };
    let explanation = Explanation::Collective(CollectiveFault::OtherKernels { odd, most });
    Some(Finding { culprits, explanation, confidence, evidence })
}

fn of_name(name: &str, root: Option<i32>) -> OperationVariant {
    OperationVariant::Operation { name: name.to_owned(), root }
}

fn with_root((name, root): &(String, i32)) -> OperationVariant {
    of_name(name, (*root >= 0).then_some(*root))
}

/// An operation without its root.
pub(super) fn without_root((name, _): &(String, i32)) -> OperationVariant {
    of_name(name, None)
}

/// The name of an MPI collective with its form: `MPI_Iallreduce` differs from `all_reduce`.
fn form(operation: &Operation) -> String {
    if operation.function.starts_with("MPI_I") { operation.function.clone() } else { name(operation).to_owned() }
}

/// The name of a collective with what it computes if it is a reduction.
fn reduction(operation: &Operation) -> String {
    match operation.op() {
        Op::AllReduce | Op::Reduce | Op::ReduceScatter => text::reduction(operation),
        _ => name(operation).to_owned(),
    }
}

fn types_differ(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let differ = |one: &Operation, other: &Operation| one.dtype != other.dtype && one.dtype != 0 && other.dtype != 0;
    let key = |operation: &Operation| operation.dtype as u64;
    if let Some(found) = ends_differ(case, suspect, Property::Type, differ, key) {
        return Some(found);
    }
    let (collective, aborted) = entered_or_aborted(case, suspect)?;
    if collective.dissent(case, operation_key).is_some() {
        return None;
    }
    let dissent = collective.new_dissent(case, |operation| operation.dtype)?;
    let op = collective.operations.first()?.1.op();
    let variant = |dtype: &i32| OperationVariant::Type { op, dtype: DataType::try_from(*dtype).unwrap_or_default() };
    let found = finding(case, &collective, dissent, variant);
    Some(with_aborted(found, aborted))
}

fn sizes_differ(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    // An MPI receive accepts any size up to its buffer's, so its record has no size.
    let differ = |one: &Operation, other: &Operation| one.count != other.count && one.count != 0 && other.count != 0;
    if let Some(found) = ends_differ(case, suspect, Property::Size, differ, |operation| operation.count) {
        return Some(found);
    }
    let (collective, aborted) = entered_or_aborted(case, suspect)?;
    if !collective.operations.iter().all(|(_, operation)| equal_sizes(operation.op()))
        || collective.dissent(case, operation_key).is_some()
    {
        return None;
    }
    let dissent = collective.new_dissent(case, |operation| operation.count)?;
    let op = collective.operations.first()?.1.op();
    let found = finding(case, &collective, dissent, |count: &u64| OperationVariant::Elements { op, count: *count });
    Some(with_aborted(found, aborted))
}

/// The collective of a suspect that all members have entered, or the one in which gloo aborted a
/// suspect, with that suspect.
fn entered_or_aborted<'a>(case: &Case<'a>, suspect: &Suspect) -> Option<(Collective<'a>, Option<usize>)> {
    if let Some(entered) = Collective::of(case, suspect) {
        return Some((entered, None));
    }
    let rank_index = case.host_rank(suspect)?;
    let view = case.view(rank_index);
    if view.exit() != Exit::Signal("SIGABRT") || view.has_device() {
        return None;
    }
    let last = view.operations().filter(|operation| is_collective(operation)).last()?;
    let comm = case.comms.iter().position(|comm| comm.id == last.communicator)?;
    let event = Event::Collective { comm, seq: last.seq };
    let unfinished = last.status() != OpStatus::Completed;
    let collective = Collective::of(case, &Suspect::Complete(event)).filter(|_| unfinished)?;
    Some((collective, Some(rank_index)))
}

/// A finding about a collective in which gloo aborted a rank, if there is one.
fn with_aborted(mut found: Finding, aborted: Option<usize>) -> Finding {
    if let Some(rank_index) = aborted {
        found.confidence = found.confidence.min(Confidence::Medium);
        found.evidence.insert(1, RankFact::AbortedByGloo.of(rank_index));
    }
    found
}

/// Whether all ranks that differ from the right group finalize their library. That is `teardown`.
pub(super) fn finalizes_instead<Key: Ord + Clone>(collective: &Collective<'_>, dissent: &Dissent<Key>) -> bool {
    let ends = |rank_index: &usize| {
        let own = collective.operations.iter().find(|(other, _)| other == rank_index);
        own.is_some_and(|(_, operation)| operation.function.ends_with("Finalize"))
    };
    dissent.right.is_some() && dissent.culprits.iter().all(ends)
}

/// The finding about members that differ. All three rules use it.
fn finding<Key: Ord + Clone>(
    case: &Case<'_>,
    collective: &Collective<'_>,
    dissent: Dissent<Key>,
    variant: impl Fn(&Key) -> OperationVariant,
) -> Finding {
    differ(case, collective, dissent, variant).0
}

/// The finding about members that differ, and how they differ.
pub(super) fn differ<Key: Ord + Clone>(
    case: &Case<'_>,
    collective: &Collective<'_>,
    dissent: Dissent<Key>,
    variant: impl Fn(&Key) -> OperationVariant,
) -> (Finding, Differ) {
    let event = collective.event;
    let groups = dissent.groups.iter().map(|(key, members)| (variant(key), members.clone())).collect();
    let right = dissent.right.as_ref().and_then(|right| dissent.groups.keys().position(|key| key == right));
    let differ = Differ { event, groups, right };
    let by_history = right.is_some() && !dissent.certain;
    let mut evidence = vec![Fact::Explained];
    evidence.extend(by_history.then_some(Fact::Collective(CollectiveFact::DueByHistory)));
    evidence.extend(Fact::positions(&dissent.culprits));
    let size = match event {
        Event::Collective { comm, .. } => case.comms[comm].size as usize,
        _ => 0,
    };
    let majority = right.is_some_and(|right| 2 * differ.groups[right].1.len() > size);
    let confidence = match (right.is_some(), dissent.certain) {
        (false, _) => Confidence::Low,
        (true, false) => Confidence::Medium,
        // The largest group is not a majority of the communicator, or only a majority of the ranks
        // that came.
        (true, true) if !majority => Confidence::Medium,
        (true, true) => case.members_confidence(&[event]),
    };
    let explanation = Explanation::Collective(CollectiveFault::Differ(differ.clone()));
    (Finding { culprits: dissent.culprits, explanation, confidence, evidence }, differ)
}

fn operations_agree(case: &Case<'_>, _: &[usize]) -> Option<Exclusion> {
    // By the collective that a rank waits in, which is `oldest`.
    let mut waits: HashMap<(u64, u64), (String, i32)> = HashMap::new();
    for comm in &case.comms {
        for operation in comm.members.iter().filter_map(|member| member.oldest) {
            let first = waits.entry((comm.id, operation.seq)).or_insert_with(|| operation_key(operation));
            if *first != operation_key(operation) {
                return None;
            }
        }
    }
    (!waits.is_empty()).then_some(Exclusion::OperationsAgree)
}

/// A send and a receive that match, alone or in a cycle, and differ in a property.
pub(super) fn ends_differ(
    case: &Case<'_>,
    suspect: &Suspect,
    property: Property,
    differ: impl Fn(&Operation, &Operation) -> bool,
    key: impl Fn(&Operation) -> u64,
) -> Option<Finding> {
    let events = match suspect {
        Suspect::Complete(event) => std::slice::from_ref(event),
        Suspect::Cycle(events) => events.as_slice(),
        _ => return None,
    };
    events.iter().find_map(|event| point_to_point(case, *event, property, &differ, &key))
}

fn point_to_point(
    case: &Case<'_>,
    event: Event,
    property: Property,
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
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&blamed));
    let ends = Box::new([(rank_index, mine.clone()), (other, theirs.clone())]);
    let explanation = Explanation::Transfer(TransferFault::EndsDiffer { ends, property, blamed: blamed.clone() });
    Some(Finding { culprits: blamed, explanation, confidence: Confidence::Medium, evidence })
}
