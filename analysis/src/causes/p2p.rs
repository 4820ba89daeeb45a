//! `p2p_unmatched` and `p2p_cycle`: sends and receives that lack their counterpart, or that wait
//! for each other.

use xpu_timer_proto::v1::{Op, OpStatus, Operation};

use super::wait_cycle::{self, PatternCheck};
use crate::{
    case::Case,
    explanation::{CycleFault, Explanation, GroupCounts, OpenEnd, PatternBreak, TransferFault},
    finding::{Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::{Event, Suspect, tags_meet},
    history::made_before,
    verdict::{Cause, Confidence},
    world::is_p2p,
};

/// `p2p_unmatched`: a receive without its send, or a send without its receive.
///
/// A rank's send or receive has started on its device, and its peer has no counterpart pending. The
/// peer waits for nothing, and nothing else explains it. The sentence includes what the peer itself
/// waits for, such as a child process. If the peer polls for something, it has not reached its
/// counterpart: `missing_rank`. Other forms:
///
/// - The peer waits in a collective for the very rank that waits for it: the two made different
///   plans. If all other members, at least two, have launched that collective, and the rank in the
///   transfer had made only collectives before, that rank is named. Else the peer is named, with
///   medium confidence, because the other rank could have made a call too many. The same holds for
///   the one rank of a cycle of transfers that is in none of them.
/// - Groups of transfers match and do not complete: the members that have made fewer transfers in
///   as many groups as most members are named.
/// - The tags of two ranks do not match: both are named, or only the rank whose tag has changed.
/// - In a cycle, the rank is named that is at an end of all transfers without a counterpart, or
///   that left out a transfer which it had always made at this point, or that made a new one, or
///   one once more in place of a collective. If the past shows nothing, the rank is named that
///   lacks the only counterpart, such as a rank that receives from itself.
pub(super) const UNMATCHED: Rule = Rule { cause: Cause::P2pUnmatched, explain: unmatched, rule_out: never_ruled_out };

/// `p2p_cycle`: sends and receives wait for each other in a cycle.
///
/// The wait-for graph has a cycle over at least two sends or receives, and every host in it is
/// known to wait: two ranks that both send before they receive, or a pipeline whose stages disagree
/// on the order. All ranks that wait in such a send or receive are named, because their common plan
/// is at fault. If only some of them made their operations in another order than ever before, only
/// these are named. The confidence is high only for a plan that never worked. If the ranks have
/// made the same transfers before, one of them has left the plan, and the record does not show
/// which.
pub(super) const CYCLE: Rule = Rule { cause: Cause::P2pCycle, explain: cycle, rule_out: never_ruled_out };

const BREAKS_OF_TRANSFERS: &[PatternBreak] =
    &[PatternBreak::Transfer, PatternBreak::NewTransfer, PatternBreak::RepeatedTransfer];

fn unmatched(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    match suspect {
        Suspect::Complete(event) => fewer_in_groups(case, *event),
        Suspect::Host { rank_index, .. } if case.polls(*rank_index) => None,
        Suspect::Host { .. } => of_absent_peer(case, suspect),
        Suspect::Cycle(events) => {
            if let Some(found) = at_all_open_ends(case, events) {
                return Some(found);
            }
            match wait_cycle::check_pattern(case, suspect, BREAKS_OF_TRANSFERS) {
                PatternCheck::Finding(found) => return Some(found),
                PatternCheck::OtherBreak => return None,
                PatternCheck::Kept => {}
            }
            if let Some(found) = from_anybody(events).or_else(|| other_tags(case, events)) {
                return Some(found);
            }
            match elsewhere(case, events) {
                Some(event) => instead_of_collective(case, event).or_else(|| no_counterpart(case, suspect, event)),
                None => only_open_end(case, events),
            }
        }
        Suspect::Device { .. } => None,
    }
}

/// Others wait for a host in transfers only.
pub(super) fn of_absent_peer(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Host { events, .. } = suspect else { return None };
    let only = !events.is_empty() && events.iter().all(|event| matches!(event, Event::PointToPoint { .. }));
    case.main_event(suspect).filter(|_| only).and_then(|event| no_counterpart(case, suspect, event))
}

/// The peer of a transfer has no counterpart pending: the suspected host, or the one rank of a
/// cycle that is in no transfer.
fn no_counterpart(case: &Case<'_>, suspect: &Suspect, event: Event) -> Option<Finding> {
    let Event::PointToPoint { comm, rank_index: waiter, peer, recv } = event else { return None };
    let (culprit, waits_itself, confidence) = match suspect {
        Suspect::Host { rank_index, .. } => (*rank_index, false, case.host_confidence(suspect)),
        _ => (case.comms[comm].rank_index_of(peer)?, true, Confidence::Medium),
    };
    let evidence = vec![Fact::Explained, RankFact::StuckHelper.of(culprit), Fact::Position(culprit)];
    let fault = TransferFault::NoCounterpart { culprit, waiter, recv, event, waits_itself };
    let explanation = Explanation::Transfer(fault);
    Some(Finding { culprits: vec![culprit], explanation, confidence, evidence })
}

/// The first transfer of a rank that has made some collectives, and has not launched one which all
/// other members, at least two, have launched.
fn instead_of_collective(case: &Case<'_>, event: Event) -> Option<Finding> {
    const SOME: u64 = 3;
    let Event::PointToPoint { comm, rank_index, .. } = event else { return None };
    let launched = case.comms[comm].member(rank_index)?.launched;
    let is_first = case.view(rank_index).operations().filter(|operation| is_p2p(operation)).count() == 1;
    if !is_first || launched < SOME {
        return None;
    }
    let members = &case.comms[comm].members;
    let mut others = members.iter().filter(|member| member.rank_index != rank_index);
    if members.len() < 3 || members.len() != case.comms[comm].size as usize {
        return None;
    }
    let collective = Event::Collective { comm, seq: launched + 1 };
    let is_inside = others.all(|member| member.launched > launched) && !case.graph.waiters_of(collective).is_empty();
    let explanation = Explanation::Transfer(TransferFault::InsteadOfCollective { rank_index, event, collective });
    let evidence = vec![Fact::Explained, Fact::Position(rank_index)];
    is_inside.then(|| Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}

/// Members that have made fewer transfers than most others, although all are in their group of the
/// same number. Each of them left out a transfer in an earlier group, and a later transfer took its
/// place.
fn fewer_in_groups(case: &Case<'_>, event: Event) -> Option<Finding> {
    let Event::PointToPoint { comm, .. } = event else { return None };
    let index = comm;
    let comm = &case.comms[index];
    let group = |rank_index: usize| {
        let of_comm = |operation: &&Operation| is_p2p(operation) && operation.communicator == comm.id;
        case.view(rank_index)
            .pending()
            .filter(of_comm)
            .map(|operation| operation.group)
            .max()
            .filter(|group| *group != 0)
    };
    let newest = comm.members.iter().filter_map(|member| group(member.rank_index)).max()?;
    let made = |rank_index: usize| {
        let known = case.view(rank_index).flight.into_iter().flat_map(|flight| &flight.communicators);
        known.into_iter().find(|known| known.id == comm.id).map_or(0, |known| known.point_to_point)
    };
    let there: Vec<(usize, u64)> = comm
        .members
        .iter()
        .filter(|member| group(member.rank_index) == Some(newest))
        .map(|member| (member.rank_index, made(member.rank_index)))
        .collect();
    let most = there.iter().map(|(_, made)| *made).max()?;
    let fewer: Vec<usize> = there.iter().filter(|(_, made)| *made < most).map(|(rank_index, _)| *rank_index).collect();
    if fewer.is_empty() || 2 * fewer.len() >= there.len() {
        return None;
    }
    let is_fewer = |rank_index: &usize| fewer.contains(rank_index);
    let others: Vec<usize> =
        there.iter().map(|(rank_index, _)| *rank_index).filter(|rank_index| !is_fewer(rank_index)).collect();
    let number = there.iter().find(|(rank_index, _)| is_fewer(rank_index)).map_or(0, |(_, made)| *made);
    let counts = GroupCounts { comm: index, groups: newest, fewer: number, most };
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&fewer));
    let fault = TransferFault::FewerInGroups { fewer: fewer.clone(), others, counts };
    let explanation = Explanation::Transfer(fault);
    Some(Finding { culprits: fewer, explanation, confidence: Confidence::Medium, evidence })
}

/// One rank of a cycle receives from any rank, and all others wait for it in other operations.
fn from_anybody(events: &[Event]) -> Option<Finding> {
    let open = |event: &Event| match *event {
        Event::PointToPoint { rank_index, peer, recv: true, .. } if peer < 0 => Some((rank_index, *event)),
        _ => None,
    };
    let mut open = events.iter().filter_map(open);
    let (rank_index, event) = open.next().filter(|_| open.next().is_none())?;
    let evidence = vec![Fact::Explained, Fact::Position(rank_index)];
    let explanation = Explanation::Transfer(TransferFault::NobodySends { rank_index, event });
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}

/// A send and its receive are pending, and their tags differ.
fn other_tags(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let counterpart = |event: Event| {
        let Event::PointToPoint { comm, rank_index, peer, recv } = event else { return None };
        let (own, other) = (case.comms[comm].member(rank_index)?.comm_rank, case.comms[comm].rank_index_of(peer)?);
        let there = Event::PointToPoint { comm, rank_index: other, peer: own, recv: !recv };
        let apart = events.contains(&there)
            && !tags_meet(&case.world, case.comms[comm].id, (rank_index, event), (other, there));
        apart.then_some((event, rank_index, there, other))
    };
    let (event, rank_index, there, other) = events.iter().find_map(|event| counterpart(*event))?;
    let changed = |rank_index: usize, event: Event| {
        let operation = case.operation(event)?;
        let alike = |past: &&Operation| {
            past.status() == OpStatus::Completed
                && (past.communicator, past.op, past.peer) == (operation.communicator, operation.op, operation.peer)
        };
        let mut past = case.view(rank_index).operations().filter(alike).peekable();
        past.peek()?;
        let first = past.next()?.tag;
        Some(first != operation.tag && past.all(|past| past.tag == first))
    };
    let blamed = match (changed(rank_index, event) == Some(true), changed(other, there) == Some(true)) {
        (true, false) => vec![rank_index],
        (false, true) => vec![other],
        _ => vec![rank_index, other],
    };
    let ends = [(rank_index, event), (other, there)];
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&blamed));
    let explanation = Explanation::Transfer(TransferFault::TagsDiffer { ends, blamed: blamed.clone() });
    Some(Finding { culprits: blamed, explanation, confidence: Confidence::Medium, evidence })
}

/// A transfer of a cycle whose peer is in no transfer, but in a collective. `None` if there are
/// several such peers.
fn elsewhere(case: &Case<'_>, events: &[Event]) -> Option<Event> {
    let peer_of = |event: &Event| match *event {
        Event::PointToPoint { comm, peer, .. } => case.comms[comm].rank_index_of(peer),
        _ => None,
    };
    let transfers = || events.iter().filter(|event| matches!(event, Event::PointToPoint { .. }));
    let in_transfer: Vec<usize> = transfers().flat_map(|event| case.graph.waiters_of(*event)).copied().collect();
    let mut towards = transfers().filter(|event| peer_of(event).is_some_and(|peer| !in_transfer.contains(&peer)));
    let first = towards.next()?;
    towards.all(|event| peer_of(event) == peer_of(first)).then_some(*first)
}

/// The transfers of a cycle without a counterpart. `None` if an operation of the cycle has not
/// started: then it is behind another operation, which may be the only fault.
fn without_counterpart(case: &Case<'_>, events: &[Event]) -> Option<Vec<OpenEnd>> {
    let started = |event: Event| case.operation(event).is_none_or(|operation| operation.started_ns != 0);
    let mut open = Vec::new();
    for &event in events {
        let Event::PointToPoint { comm, rank_index, peer, recv } = event else { continue };
        let (own, awaited) = (case.comms[comm].member(rank_index)?.comm_rank, case.comms[comm].rank_index_of(peer)?);
        let there = Event::PointToPoint { comm, rank_index: awaited, peer: own, recv: !recv };
        match case.graph.events.binary_search(&there) {
            Ok(_) if !started(there) => return None,
            Ok(_) => {}
            Err(_) if served_by_count(case, event, awaited) => {}
            Err(_) => open.push(OpenEnd { event, waiter: rank_index, awaited }),
        }
    }
    events.iter().all(|event| started(*event)).then_some(open)
}

/// Whether the peer of a transfer has made as many counterparts as there are transfers, by complete
/// records.
fn served_by_count(case: &Case<'_>, event: Event, other: usize) -> bool {
    let Event::PointToPoint { comm, rank_index, peer, recv } = event else { return false };
    let Some(own) = case.comms[comm].member(rank_index).map(|member| member.comm_rank) else { return false };
    let count = |rank_index: usize, peer: i32, op: Op| {
        let alike = |operation: &&Operation| {
            operation.communicator == case.comms[comm].id && operation.op() == op && operation.peer == peer
        };
        case.view(rank_index).operations().filter(|operation| is_p2p(operation)).filter(alike).count()
    };
    let (op, counterpart) = if recv { (Op::Recv, Op::Send) } else { (Op::Send, Op::Recv) };
    let complete = case.view(rank_index).has_full_history() && case.view(other).has_full_history();
    complete && count(other, own, counterpart) >= count(rank_index, peer, op)
}

/// The one rank that is at an end of all transfers without a counterpart, if there are several and
/// a rank waits for it: it made other transfers than its peers. A rank that only waits itself may
/// have been served in one of them, because several transfers are often awaited together.
fn at_all_open_ends(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let open = without_counterpart(case, events).filter(|open| open.len() > 1)?;
    let first = open.first()?;
    let mut common = [first.waiter, first.awaited]
        .into_iter()
        .filter(|rank_index| open.iter().all(|end| end.waiter == *rank_index || end.awaited == *rank_index));
    let culprit = common.next().filter(|_| common.next().is_none())?;
    open.iter().any(|end| end.awaited == culprit).then(|| open_ends(open, culprit))
}

/// The only transfer of a cycle without a counterpart is the fault of the rank that does not make
/// the counterpart.
fn only_open_end(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let open = without_counterpart(case, events).filter(|open| open.len() == 1)?;
    let transfers = events.iter().filter(|event| matches!(event, Event::PointToPoint { .. })).count();
    let with_itself = open[0].waiter == open[0].awaited;
    let culprit = open[0].awaited;
    (transfers > 1 || with_itself).then(|| open_ends(open, culprit))
}

fn open_ends(open: Vec<OpenEnd>, culprit: usize) -> Finding {
    let evidence = vec![Fact::Explained, Fact::Position(culprit)];
    let explanation = Explanation::Transfer(TransferFault::OtherTransfers { culprit, open });
    Finding { culprits: vec![culprit], explanation, confidence: Confidence::Medium, evidence }
}

fn cycle(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    match wait_cycle::check_pattern(case, suspect, &[PatternBreak::TransferOrder]) {
        PatternCheck::Finding(found) => return Some(found),
        PatternCheck::OtherBreak => return None,
        PatternCheck::Kept => {}
    }
    let Suspect::Cycle(events) = suspect else { return None };
    let transfers: Vec<Event> =
        events.iter().copied().filter(|event| matches!(event, Event::PointToPoint { .. })).collect();
    if transfers.len() < 2 {
        return None;
    }
    let mut culprits: Vec<usize> = transfers.iter().flat_map(|event| case.graph.waiters_of(*event).to_vec()).collect();
    culprits.sort_unstable();
    culprits.dedup();
    if culprits.len() < 2 {
        return None;
    }
    let mut evidence: Vec<Fact> = transfers.iter().take(8).map(|event| Fact::Inside(*event)).collect();
    evidence.extend(Fact::positions(&culprits));
    let confidence = case.members_confidence(&transfers).min(plan_confidence(case, &transfers, &culprits));
    Some(Finding {
        explanation: Explanation::Cycle(CycleFault::Transfers { culprits: culprits.clone(), transfers }),
        confidence,
        culprits,
        evidence,
    })
}

/// A cycle is certain only if the stacks of its ranks are known. The plan is at fault only if it
/// never worked.
fn plan_confidence(case: &Case<'_>, transfers: &[Event], views: &[usize]) -> Confidence {
    let worked = |event: &Event| match (event, case.operation(*event)) {
        (Event::PointToPoint { rank_index, .. }, Some(operation)) => made_before(case.view(*rank_index), operation),
        _ => false,
    };
    let stacks = views.iter().all(|rank_index| case.view(*rank_index).host.stack);
    if stacks && !transfers.iter().any(worked) { Confidence::High } else { Confidence::Medium }
}
