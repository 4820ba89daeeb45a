//! Ranks that wait for each other in a cycle: `order_mismatch`, the rank through which every cycle
//! passes, and the ranks that left their own pattern.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::v1::Operation;

use crate::{
    case::Case,
    explanation::{CycleFault, Explanation, PatternBreak},
    finding::{Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::{Event, Suspect},
    history::{Deviation, deviation, made_before, made_token_before},
    matching::{Comm, Member},
    verdict::{Cause, Confidence},
    world::RankView,
};

/// Cycles of more ranks are not searched, nor is their past.
const MOST: usize = 4096;

/// Longer cycles are not searched for a rank through which all cycles pass.
const MOST_TRIED: usize = 64;

/// `order_mismatch`: ranks enter several communicators in different orders, and wait for each
/// other.
///
/// The wait-for graph has a cycle over collectives of at least two communicators: some ranks are in
/// the first and wait for others, which are in the second and wait for them. The culprits are, in
/// this order of preference:
///
/// - The ranks that exchanged two collectives which they had always made in the other order, or
///   that made a new collective where another one had always come. The collective of the others
///   comes later for them, or never.
/// - The only rank through which all cycles pass.
/// - The ranks in the collective with the fewest waiters. If all have the same number of waiters,
///   all are named, with lower confidence.
///
/// Other ranks may have completed such a collective among themselves, in a communicator of the same
/// size. Ranks in it are not named while another of these collectives lacks that precedent. If it
/// is the only collective with the fewest waiters, its ranks did what others did, and the ranks
/// that they wait for are named.
pub(super) const ORDER_MISMATCH: Rule =
    Rule { cause: Cause::OrderMismatch, explain: order_mismatch, rule_out: never_ruled_out };

fn order_mismatch(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let PatternCheck::Finding(found) =
        check_pattern(case, suspect, &[PatternBreak::NewCollective, PatternBreak::Order])
    {
        return Some(found);
    }
    let Suspect::Cycle(events) = suspect else { return None };
    let waited: Vec<_> = events.iter().copied().filter(|event| !case.graph.waiters_of(*event).is_empty()).collect();
    let count = |event| case.graph.waiters_of(event).len();
    let fewest = waited.iter().map(|event| count(*event)).min()?;
    let most = waited.iter().map(|event| count(*event)).max()?;
    let odd: Vec<_> = waited.iter().copied().filter(|event| fewest == most || count(*event) == fewest).collect();
    let (usual, unusual): (Vec<_>, Vec<_>) = odd.iter().copied().partition(|event| has_precedent(case, *event));
    if let ([event], true) = (&usual[..], unusual.is_empty() && fewest < most)
        && let Some(found) = left_out(case, &waited, *event)
    {
        return Some(found);
    }
    let odd = if usual.is_empty() || unusual.is_empty() { odd } else { unusual };
    let mut culprits: Vec<usize> = odd.iter().flat_map(|event| case.graph.waiters_of(*event).to_vec()).collect();
    culprits.sort_unstable();
    culprits.dedup();
    let one = in_all_cycles(case, events);
    if let Some(one) = one {
        culprits = vec![one];
    }
    let mut evidence: Vec<_> = waited.iter().take(8).map(|event| Fact::Inside(*event)).collect();
    evidence.extend(Fact::positions(&culprits));
    Some(Finding {
        explanation: Explanation::Cycle(CycleFault::OtherOrder { culprits: culprits.clone(), waited }),
        confidence: if fewest == most && one.is_none() { Confidence::Low } else { Confidence::Medium },
        culprits,
        evidence,
    })
}

/// The few ranks in a collective did what others have done among themselves. A member that is in
/// another collective of the cycle left this one out.
fn left_out(case: &Case<'_>, waited: &[Event], event: Event) -> Option<Finding> {
    let elsewhere = |rank_index: &usize| {
        let other = waited.iter().find(|other| **other != event && case.graph.waiters_of(**other).contains(rank_index));
        other.map(|other| (*rank_index, *other))
    };
    let missing: Vec<(usize, Event)> = awaited_members(case, event).iter().filter_map(elsewhere).collect();
    let &(_, own) = missing.first()?;
    let culprits: Vec<usize> = missing.iter().map(|(rank_index, _)| *rank_index).collect();
    let counters = |rank_index: &usize| Fact::Counters { rank_index: *rank_index, event };
    let mut evidence: Vec<_> = culprits.iter().take(4).map(counters).collect();
    evidence.extend(Fact::positions(&culprits));
    let fault = CycleFault::LeftOut { culprits: culprits.clone(), own, left_out: event };
    Some(Finding { culprits, explanation: Explanation::Cycle(fault), confidence: Confidence::Medium, evidence })
}

/// Whether other ranks have completed this collective among themselves: in a communicator of the
/// same size that shares no rank with this one.
fn has_precedent(case: &Case<'_>, event: Event) -> bool {
    let Event::Collective { comm, seq } = event else { return false };
    let own = &case.comms[comm];
    let apart = |other: &&Comm<'_>| {
        other.size == own.size && other.members.iter().all(|member| own.member(member.rank_index).is_none())
    };
    let made = |other: &Comm<'_>| other.members.iter().all(|member| member.completed >= seq);
    case.comms.iter().filter(apart).any(|other| !other.members.is_empty() && made(other))
}

/// The members for which the ranks inside an event wait.
pub(super) fn awaited_members(case: &Case<'_>, event: Event) -> Vec<usize> {
    match event {
        Event::Collective { comm, seq } => {
            let late = |member: &&Member<'_>| member.started.max(member.completed) < seq;
            case.comms[comm].members.iter().filter(late).map(|member| member.rank_index).collect()
        }
        Event::PointToPoint { comm, peer, .. } => case.comms[comm].rank_index_of(peer).into_iter().collect(),
        Event::Init { .. } | Event::Split { .. } => Vec::new(),
    }
}

/// The only rank through which every wait cycle passes: without it, all chains of waiting would
/// end. `None` if there are several such ranks or none.
pub(super) fn in_all_cycles(case: &Case<'_>, events: &[Event]) -> Option<usize> {
    let known = |event: &Event| !matches!(event, Event::Init { .. } | Event::Split { .. });
    if !events.iter().all(known) {
        return None;
    }
    // From a waiting rank to the index of its event, and from there to the ranks that the event
    // waits for.
    let mut waits: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, event) in events.iter().enumerate() {
        case.graph.waiters_of(*event).iter().for_each(|rank_index| waits.entry(*rank_index).or_default().push(index));
    }
    if waits.len() > MOST {
        return None;
    }
    let waiting = |event: &Event| {
        awaited_members(case, *event).into_iter().filter(|rank_index| waits.contains_key(rank_index)).collect()
    };
    let to: Vec<Vec<usize>> = events.iter().map(waiting).collect();
    let candidates = cycle_without(&waits, &to, None)?;
    if candidates.len() > MOST_TRIED {
        return None;
    }
    let mut found = candidates.into_iter().filter(|rank_index| cycle_without(&waits, &to, Some(*rank_index)).is_none());
    found.next().filter(|_| found.next().is_none())
}

/// The ranks of some wait cycle that does not pass through `without`. `None` if there is no such
/// cycle.
fn cycle_without(waits: &BTreeMap<usize, Vec<usize>>, to: &[Vec<usize>], without: Option<usize>) -> Option<Vec<usize>> {
    let next = |rank_index: usize| -> Vec<usize> {
        let events = waits.get(&rank_index).filter(|_| Some(rank_index) != without);
        events
            .into_iter()
            .flatten()
            .flat_map(|event| &to[*event])
            .copied()
            .filter(|other| *other != rank_index)
            .collect()
    };
    let mut done: BTreeSet<usize> = BTreeSet::new();
    for &root in waits.keys() {
        // The path from the root. Each entry holds a rank and its successors that are still to be
        // visited.
        let mut way: Vec<(usize, Vec<usize>)> = Vec::new();
        let mut on_way: BTreeSet<usize> = BTreeSet::new();
        if done.insert(root) {
            on_way.insert(root);
            way.push((root, next(root)));
        }
        while let Some((rank_index, rest)) = way.last_mut() {
            match rest.pop() {
                Some(other) if on_way.contains(&other) => {
                    return Some(
                        way.iter()
                            .map(|(rank_index, _)| *rank_index)
                            .skip_while(|rank_index| *rank_index != other)
                            .collect(),
                    );
                }
                Some(other) if done.insert(other) => {
                    on_way.insert(other);
                    way.push((other, next(other)));
                }
                Some(_) => {}
                None => {
                    on_way.remove(rank_index);
                    way.pop();
                }
            }
        }
    }
    None
}

/// How a rank left its pattern.
fn break_of(view: &RankView<'_>, deviation: &Deviation) -> PatternBreak {
    // A pending transfer that the rank had never made before is one too many.
    let new = |operation: &Operation| deviation.actual.is(operation) && !made_before(view, operation);
    if deviation.actual.is_p2p() && view.pending().any(new) {
        return PatternBreak::NewTransfer;
    }
    match (deviation.swapped, deviation.expected.is_p2p() || deviation.swapped && deviation.actual.is_p2p()) {
        (true, true) => PatternBreak::TransferOrder,
        (true, false) => PatternBreak::Order,
        (false, true) => PatternBreak::Transfer,
        (false, false) if deviation.repeated && deviation.actual.is_p2p() => PatternBreak::RepeatedTransfer,
        (false, false) if !made_token_before(view, deviation.actual) => PatternBreak::NewCollective,
        (false, false) => PatternBreak::Collective,
    }
}

/// The ranks of a cycle that left their pattern, as indices, with the kind of their break. `None`
/// if no rank did, or more than half of them: what most ranks do is the program, and a past of a
/// few steps shows patterns that do not exist.
fn deviants(case: &Case<'_>, suspect: &Suspect) -> Option<(PatternBreak, Vec<(usize, Deviation)>)> {
    let Suspect::Cycle(events) = suspect else { return None };
    let mut inside: Vec<usize> = events.iter().flat_map(|event| case.graph.waiters_of(*event).to_vec()).collect();
    inside.sort_unstable();
    inside.dedup();
    if inside.len() > MOST {
        return None;
    }
    let mut found: Vec<(usize, Deviation)> =
        inside.iter().filter_map(|rank_index| Some((*rank_index, deviation(case.view(*rank_index))?))).collect();
    if found.len() * 2 > inside.len() {
        return None;
    }
    // The others wait for a rank that left out a collective, in its communicator. Ranks for which
    // no rank waits continued without it, as they may.
    let missed = |(rank_index, deviation): &(usize, Deviation)| {
        events.iter().any(|event| {
            let of = |comm: usize| case.comms[comm].id == deviation.expected.communicator;
            matches!(*event, Event::Collective { comm, .. } if of(comm))
                && awaited_members(case, *event).contains(rank_index)
        })
    };
    let left_out = |(rank_index, deviation): &(usize, Deviation)| {
        matches!(break_of(case.view(*rank_index), deviation), PatternBreak::Collective | PatternBreak::NewCollective)
    };
    if found.iter().any(missed) {
        found.retain(|one| !left_out(one) || missed(one));
    }
    let kind = |(rank_index, deviation): &(usize, Deviation)| break_of(case.view(*rank_index), deviation);
    let first = found.iter().map(kind).min()?;
    Some((first, found))
}

/// The meaning of the past of the ranks in a cycle, for a rule.
pub(super) enum PatternCheck {
    /// A rank left its pattern in a way that this rule explains.
    Finding(Finding),
    /// A rank left its pattern in a way that another rule explains.
    OtherBreak,
    /// No rank left its pattern, or the past does not show it.
    Kept,
}

/// Checks the past of the ranks in a cycle, for a rule that explains these kinds of breaks.
pub(super) fn check_pattern(case: &Case<'_>, suspect: &Suspect, explains: &[PatternBreak]) -> PatternCheck {
    let Suspect::Cycle(events) = suspect else { return PatternCheck::Kept };
    match deviants(case, suspect) {
        None => PatternCheck::Kept,
        Some((kind, found)) if explains.contains(&kind) => {
            PatternCheck::Finding(left_pattern(case, events, kind, &found))
        }
        Some(_) => PatternCheck::OtherBreak,
    }
}

/// In a cycle every rank waits and no rank is behind, so only the past shows the culprit: some
/// ranks left the pattern of their operations, and the others kept theirs. This is not a proof,
/// because the change of plan may be right and the others may have missed it. So the confidence is
/// never high.
fn left_pattern(case: &Case<'_>, events: &[Event], kind: PatternBreak, found: &[(usize, Deviation)]) -> Finding {
    let culprits: Vec<usize> = found.iter().map(|(rank_index, _)| *rank_index).collect();
    let of_kind = |(rank_index, deviation): &&(usize, Deviation)| break_of(case.view(*rank_index), deviation) == kind;
    let (first, deviation) = found.iter().find(of_kind).unwrap_or(&found[0]);
    // The event in which most of the others wait. The sentence already says where the culprits are.
    let waited: Vec<Event> = events.iter().copied().filter(|event| !case.graph.waiters_of(*event).is_empty()).collect();
    let own = |event: &Event| case.graph.waiters_of(*event).iter().all(|rank_index| culprits.contains(rank_index));
    let most = |event: &&Event| (case.graph.waiters_of(**event).len(), is_transfer_with(case, **event, &culprits));
    let others: Vec<Event> = waited.iter().copied().filter(|event| !own(event)).collect();
    // `max_by_key` returns the last maximum, so the reversed order prefers the first event.
    let main = others.iter().rev().max_by_key(most).or(waited.first()).copied();
    let mut evidence = Vec::new();
    for (rank_index, deviation) in found.iter().take(4) {
        evidence.push(RankFact::LeftPattern(*deviation).of(*rank_index));
        evidence.push(Fact::Position(*rank_index));
    }
    evidence.extend(events.iter().take(8).map(|event| Fact::Inside(*event)));
    let (shown_by, waited) = ((*first, *deviation), main);
    let fault = CycleFault::LeftPattern { culprits: culprits.clone(), kind, shown_by, waited };
    Finding { culprits, explanation: Explanation::Cycle(fault), confidence: Confidence::Medium, evidence }
}

/// Whether an event is a transfer with one of these ranks.
fn is_transfer_with(case: &Case<'_>, event: Event, culprits: &[usize]) -> bool {
    let Event::PointToPoint { comm, peer, .. } = event else { return false };
    case.comms[comm].rank_index_of(peer).is_some_and(|rank_index| culprits.contains(&rank_index))
}
