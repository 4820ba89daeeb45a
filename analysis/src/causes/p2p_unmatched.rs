//! `p2p_unmatched`: a receive without its send, or a send without its receive.
//!
//! A rank's send or receive has begun on its device, and its peer has no counterpart pending. The
//! peer waits for nothing, and nothing else explains it. The sentence includes what the peer itself
//! waits for, such as a child process. Other forms:
//!
//! - The peer waits in a collective for the very rank that waits for it: the two made different
//!   plans. The peer is named, with medium confidence, because the other rank could have made a
//!   call too many. The same holds for the one rank of a cycle of transfers that is in none of
//!   them.
//! - Groups of transfers match and do not complete: the members that have made fewer transfers in
//!   as many groups as most members are named.
//! - The tags of two ranks do not match: both are named, or only the rank whose tag has changed.
//! - In a cycle, the rank is named that is at an end of all transfers without a counterpart, or
//!   that left out a transfer which it had always made at this point, or that made a new one. If
//!   the past shows nothing, the rank is named that lacks the only counterpart, such as a rank that
//!   receives from itself.

use xpu_timer_proto::v1::{Op, OpStatus, Operation};

use super::{
    case::Case,
    pattern_break::{self, Break, PatternCheck},
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::{Number, line},
};
use crate::{
    graph::{Event, Suspect, tags_meet},
    text::{capital, communicator, ranks},
    verdict::{Cause, Confidence},
    world::is_p2p,
};

pub(super) const RULE: Rule = Rule { cause: Cause::P2pUnmatched, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Suspect::Complete(event) = suspect {
        return fewer_in_groups(case, *event);
    }
    if let Some(found) = at_all_open_ends(case, suspect) {
        return Some(found);
    }
    match pattern_break::check(case, suspect, &[Break::Transfer, Break::NewTransfer]) {
        PatternCheck::Finding(found) => return Some(found),
        PatternCheck::OtherBreak => return None,
        PatternCheck::Kept => {}
    }
    if let Some(found) = from_anybody(case, suspect).or_else(|| other_tags(case, suspect)) {
        return Some(found);
    }
    let event = match suspect {
        Suspect::Host { events, .. } if !events.is_empty() => {
            let only = events.iter().all(|event| matches!(event, Event::PointToPoint { .. }));
            case.main_event(suspect).filter(|_| only)?
        }
        Suspect::Cycle(events) => match elsewhere(case, events) {
            Some(event) => event,
            None => return only_open_end(case, events),
        },
        _ => return None,
    };
    let Event::PointToPoint { comm, rank_index: waiter, peer, recv } = event else { return None };
    let culprit = match suspect {
        Suspect::Host { rank_index, .. } => *rank_index,
        _ => case.comms[comm].rank_index_of(peer)?,
    };
    let waiting = case.view(waiter).rank;
    let missing = |number: Number| match recv {
        true => format!("{} not sent to rank {waiting}", number.has()),
        false => format!("{} not receive from rank {waiting}", number.word("does", "do")),
    };
    let confidence = match suspect {
        Suspect::Host { .. } => case.host_confidence(suspect),
        _ => Confidence::Medium,
    };
    let rank = case.view(culprit).rank;
    let mut evidence = vec![line(
        format!("rank {waiting}: {} has begun and rank {rank} has no counterpart pending", case.describe(event)),
        vec![waiting],
    )];
    evidence.extend(case.helper_fact(culprit).map(|(_, fact)| fact));
    evidence.extend(case.position_lines(culprit));
    let stands = |number: Number| case.stands_clause(culprit, number) + &case.own_wait_clause(culprit, number);
    let statement = match suspect {
        Suspect::Host { .. } => Statement::of_ranks(|number| missing(number) + &stands(number)),
        _ => Statement::Sentence(format!(
            "Rank {rank} {}, which waits in {}, and waits itself for rank {waiting}{}.",
            missing(Number::One),
            case.describe(event),
            stands(Number::One)
        )),
    };
    Some(Finding { culprits: vec![culprit], statement, confidence, evidence })
}

/// Members that have made fewer transfers than most others, although all are in their group of the
/// same number. Each of them left out a transfer in an earlier group, and a later transfer took its
/// place.
fn fewer_in_groups(case: &Case<'_>, event: Event) -> Option<Finding> {
    let Event::PointToPoint { comm, .. } = event else { return None };
    let comm = &case.comms[comm];
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
    let number = there.iter().find(|(rank_index, _)| fewer.contains(rank_index)).map_or(0, |(_, made)| *made);
    let who = case.world.ranks(fewer.iter().copied());
    let others = case
        .world
        .ranks(there.iter().map(|(rank_index, _)| *rank_index).filter(|rank_index| !fewer.contains(rank_index)));
    let have = if who.len() == 1 { "has" } else { "have" };
    let sentence = format!(
        "{} {have} left out a send or receive of a group on communicator {} ({} ranks): {number} made in {newest} groups, {most} by {}.",
        capital(&ranks(&who)),
        communicator(comm.id),
        comm.size,
        ranks(&others),
    );
    let mut evidence =
        vec![line(format!("{} {have} made {number} sends and receives, {} {most}", ranks(&who), ranks(&others)), who)];
    for &rank_index in fewer.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    Some(Finding {
        culprits: fewer,
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence,
    })
}

/// One rank of a cycle receives from any rank, and all others wait for it in other operations.
fn from_anybody(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Cycle(events) = suspect else { return None };
    let open = |event: &Event| match *event {
        Event::PointToPoint { rank_index, peer, recv: true, .. } if peer < 0 => Some((rank_index, *event)),
        _ => None,
    };
    let mut open = events.iter().filter_map(open);
    let (rank_index, event) = open.next().filter(|_| open.next().is_none())?;
    let rank = case.view(rank_index).rank;
    let sentence = format!(
        "Rank {rank} waits in {} and nobody sends to it, because all others wait for it{}.",
        case.describe(event),
        case.stands_clause(rank_index, Number::One)
    );
    let mut evidence =
        vec![line(format!("rank {rank}: {} has begun and no rank sends to it", case.describe(event)), vec![rank])];
    evidence.extend(case.position_lines(rank_index));
    Some(Finding {
        culprits: vec![rank_index],
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence,
    })
}

/// A send and its receive are pending, and their tags differ.
fn other_tags(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Cycle(events) = suspect else { return None };
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
    let with_tag = |rank_index: usize, event: Event| {
        let tag = case.operation(event).and_then(|operation| operation.tag).unwrap_or(-1);
        format!("rank {} is in {} with tag {tag}", case.view(rank_index).rank, case.describe(event))
    };
    let (one, two) = (with_tag(rank_index, event), with_tag(other, there));
    let new = match blamed[..] {
        [one] => format!("; that of rank {} is not what it had always been", case.view(one).rank),
        _ => String::new(),
    };
    let mut evidence =
        vec![line(one.clone(), vec![case.view(rank_index).rank]), line(two.clone(), vec![case.view(other).rank])];
    for &rank_index in &blamed {
        evidence.extend(case.position_lines(rank_index));
    }
    let statement = Statement::Sentence(format!("{} and {two}: the tags do not match{new}.", capital(&one)));
    Some(Finding { culprits: blamed, statement, confidence: Confidence::Medium, evidence })
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

/// The transfers of a cycle without a counterpart, each with the rank that waits in it and the rank
/// that it waits for. `None` if an operation of the cycle has not begun: then it is behind another
/// operation, which may be the only fault.
fn without_counterpart(case: &Case<'_>, events: &[Event]) -> Option<Vec<(Event, usize, usize)>> {
    let begun = |event: Event| case.operation(event).is_none_or(|operation| operation.started_ns != 0);
    let mut open = Vec::new();
    for &event in events {
        let Event::PointToPoint { comm, rank_index, peer, recv } = event else { continue };
        let (own, other) = (case.comms[comm].member(rank_index)?.comm_rank, case.comms[comm].rank_index_of(peer)?);
        let there = Event::PointToPoint { comm, rank_index: other, peer: own, recv: !recv };
        match case.graph.events.binary_search(&there) {
            Ok(_) if !begun(there) => return None,
            Ok(_) => {}
            Err(_) if served_by_count(case, event, other) => {}
            Err(_) => open.push((event, rank_index, other)),
        }
    }
    events.iter().all(|event| begun(*event)).then_some(open)
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
fn at_all_open_ends(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Cycle(events) = suspect else { return None };
    let open = without_counterpart(case, events).filter(|open| open.len() > 1)?;
    let (_, one, two) = *open.first()?;
    let mut common = [one, two]
        .into_iter()
        .filter(|rank_index| open.iter().all(|(_, one, two)| one == rank_index || two == rank_index));
    let culprit = common.next().filter(|_| common.next().is_none())?;
    open.iter().any(|(_, _, awaited)| *awaited == culprit).then(|| open_ends(case, &open, culprit))
}

/// The only transfer of a cycle without a counterpart is the fault of the rank that does not make
/// the counterpart.
fn only_open_end(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let open = without_counterpart(case, events).filter(|open| open.len() == 1)?;
    let transfers = events.iter().filter(|event| matches!(event, Event::PointToPoint { .. })).count();
    let with_itself = open[0].1 == open[0].2;
    (transfers > 1 || with_itself).then(|| open_ends(case, &open, open[0].2))
}

fn open_ends(case: &Case<'_>, open: &[(Event, usize, usize)], culprit: usize) -> Finding {
    let rank = case.view(culprit).rank;
    let each = |(event, rank_index, _): &(Event, usize, usize)| {
        format!("rank {} in {}", case.view(*rank_index).rank, case.describe(*event))
    };
    let without: Vec<String> = open.iter().take(2).map(each).collect();
    let mut evidence: Vec<_> = open
        .iter()
        .take(4)
        .map(|open| line(format!("{} has begun and has no counterpart", each(open)), vec![case.view(open.1).rank]))
        .collect();
    evidence.extend(case.position_lines(culprit));
    let have = if open.len() == 1 { "has" } else { "have" };
    Finding {
        culprits: vec![culprit],
        statement: Statement::Sentence(format!(
            "Rank {rank} does not send and receive as its peers do: {} {have} no counterpart{}.",
            without.join(" and "),
            case.stands_clause(culprit, Number::One)
        )),
        confidence: Confidence::Medium,
        evidence,
    }
}
