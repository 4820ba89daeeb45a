//! Finds the ranks of a wait cycle that did something else than they had always done.
//!
//! In a cycle every rank waits and no rank is behind, so only the past shows the culprit: some
//! ranks left the pattern of their operations, and the others kept theirs. This is no proof,
//! because the change of plan may be right and the others may have missed it. So the confidence is
//! never high.

use xpu_timer_proto::v1::Operation;

use super::{
    case::Case,
    rule::{Finding, Statement},
    wait_cycle::awaited_members,
    wording::{Number, line},
};
use crate::{
    graph::{Event, Suspect},
    history::{Deviation, Token, deviation, made_before, made_token_before},
    text::{capital, communicator, op_name, ranks},
    verdict::Confidence,
    world::RankView,
};

/// The past of larger cycles is not searched.
const MOST: usize = 4096;

/// What the ranks that left their pattern did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Break {
    /// They left out a collective.
    Collective,
    /// They left out a send or a receive.
    Transfer,
    /// They made a send or a receive that they had never made before.
    NewTransfer,
    /// They made a collective of a communicator in which they had never made it before.
    NewCollective,
    /// They exchanged two collectives.
    Order,
    /// They exchanged two operations, at least one of them a send or a receive.
    TransferOrder,
}

impl Break {
    fn of(view: &RankView<'_>, deviation: &Deviation) -> Self {
        // A pending transfer that the rank had never made before is one too many.
        let new = |operation: &Operation| deviation.actual.is(operation) && !made_before(view, operation);
        if deviation.actual.is_p2p() && view.pending().any(new) {
            return Break::NewTransfer;
        }
        match (deviation.swapped, deviation.expected.is_p2p() || deviation.swapped && deviation.actual.is_p2p()) {
            (true, true) => Break::TransferOrder,
            (true, false) => Break::Order,
            (false, true) => Break::Transfer,
            (false, false) if !made_token_before(view, deviation.actual) => Break::NewCollective,
            (false, false) => Break::Collective,
        }
    }
}

/// The ranks of a cycle that left their pattern, as indices, with the kind of their break. `None`
/// if no rank did, or more than half of them: what most ranks do is the program, and a past of a
/// few steps shows patterns that do not exist.
fn deviants(case: &Case<'_>, suspect: &Suspect) -> Option<(Break, Vec<(usize, Deviation)>)> {
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
    // nobody waits went on without it, as they may.
    let missed = |(rank_index, deviation): &(usize, Deviation)| {
        events.iter().any(|event| {
            let of = |comm: usize| case.comms[comm].id == deviation.expected.communicator;
            matches!(*event, Event::Collective { comm, .. } if of(comm))
                && awaited_members(case, *event).contains(rank_index)
        })
    };
    let left_out = |(rank_index, deviation): &(usize, Deviation)| {
        matches!(Break::of(case.view(*rank_index), deviation), Break::Collective | Break::NewCollective)
    };
    if found.iter().any(missed) {
        found.retain(|one| !left_out(one) || missed(one));
    }
    let kind = |(rank_index, deviation): &(usize, Deviation)| Break::of(case.view(*rank_index), deviation);
    let first = found.iter().map(kind).min()?;
    Some((first, found))
}

/// What the past of the ranks in a cycle means for a rule.
pub(super) enum PatternCheck {
    /// A rank left its pattern in a way that this rule explains.
    Finding(Finding),
    /// A rank left its pattern in a way that another rule explains.
    OtherBreak,
    /// No rank left its pattern, or the past does not show it.
    Kept,
}

/// Checks the past of the ranks in a cycle, for a rule that explains these kinds of breaks.
pub(super) fn check(case: &Case<'_>, suspect: &Suspect, explains: &[Break]) -> PatternCheck {
    let Suspect::Cycle(events) = suspect else { return PatternCheck::Kept };
    match deviants(case, suspect) {
        None => PatternCheck::Kept,
        Some((kind, found)) if explains.contains(&kind) => PatternCheck::Finding(finding(case, events, kind, &found)),
        Some(_) => PatternCheck::OtherBreak,
    }
}

fn finding(case: &Case<'_>, events: &[Event], kind: Break, found: &[(usize, Deviation)]) -> Finding {
    let culprits: Vec<usize> = found.iter().map(|(rank_index, _)| *rank_index).collect();
    let who = case.world.ranks(culprits.iter().copied());
    let of_kind = |(rank_index, deviation): &&(usize, Deviation)| Break::of(case.view(*rank_index), deviation) == kind;
    let (first, deviation) = found.iter().find(of_kind).unwrap_or(&found[0]);
    let it = Number::of(culprits.len()).word("it", "they");
    let did = match kind {
        Break::Collective | Break::Transfer => format!(
            "did not make the {} that {it} had always made before the {}",
            describe(case, *first, deviation.expected),
            describe(case, *first, deviation.actual)
        ),
        Break::NewCollective => format!(
            "made the {} for the first time, where the {} had always come",
            describe(case, *first, deviation.actual),
            describe(case, *first, deviation.expected)
        ),
        Break::NewTransfer => format!(
            "made a {} that {it} had never made before, where the {} had always come",
            describe(case, *first, deviation.actual),
            describe(case, *first, deviation.expected)
        ),
        Break::Order | Break::TransferOrder => format!(
            "made the {} before the {}, and had always made them the other way round",
            describe(case, *first, deviation.actual),
            describe(case, *first, deviation.expected)
        ),
    };
    // The event in which most of the others wait. The sentence already says where the culprits are.
    let waited: Vec<Event> = events.iter().copied().filter(|event| !case.graph.waiters_of(*event).is_empty()).collect();
    let own = |event: &Event| case.graph.waiters_of(*event).iter().all(|rank_index| culprits.contains(rank_index));
    let most = |event: &&Event| (case.graph.waiters_of(**event).len(), is_transfer_with(case, **event, &culprits));
    let others: Vec<Event> = waited.iter().copied().filter(|event| !own(event)).collect();
    // `max_by_key` returns the last maximum, so the reversed order prefers the first event.
    let main = others.iter().rev().max_by_key(most);
    let waits = main.or(waited.first()).map_or_else(String::new, |event| format!(": {}", waiters_in(case, *event)));
    let mut evidence = Vec::new();
    for (rank_index, deviation) in found.iter().take(4) {
        let rank = case.view(*rank_index).rank;
        evidence.push(line(
            format!(
                "rank {rank}: {} came where it had been the {} all {} times before",
                describe(case, *rank_index, deviation.actual),
                describe(case, *rank_index, deviation.expected),
                deviation.times
            ),
            vec![rank],
        ));
        evidence.extend(case.position_lines(*rank_index));
    }
    evidence.extend(events.iter().take(8).map(|event| {
        let inside = case.world.ranks(case.graph.waiters_of(*event).iter().copied());
        line(waiters_in(case, *event), inside)
    }));
    Finding {
        culprits,
        statement: Statement::Sentence(format!(
            "{} {did}, and now the ranks wait for each other{waits}.",
            capital(&ranks(&who)),
        )),
        confidence: Confidence::Medium,
        evidence,
    }
}

/// Whether an event is a transfer with one of these ranks.
fn is_transfer_with(case: &Case<'_>, event: Event, culprits: &[usize]) -> bool {
    let Event::PointToPoint { comm, peer, .. } = event else { return false };
    case.comms[comm].rank_index_of(peer).is_some_and(|rank_index| culprits.contains(&rank_index))
}

fn waiters_in(case: &Case<'_>, event: Event) -> String {
    format!("{} in {}", case.waiters_text(event), case.describe(event))
}

fn describe(case: &Case<'_>, rank_index: usize, token: Token) -> String {
    let name = op_name(token.op);
    if !token.is_p2p() {
        return format!("{name} of communicator {}", communicator(token.communicator));
    }
    let comm = case.comms.iter().find(|comm| comm.id == token.communicator && comm.member(rank_index).is_some());
    let peer = comm.and_then(|comm| comm.rank_index_of(token.peer)).map(|peer| case.view(peer).rank);
    if token.peer < 0 {
        return format!("{name} from any rank");
    }
    let towards = if name == "send" { "to" } else { "from" };
    match peer {
        Some(rank) => format!("{name} {towards} rank {rank}"),
        None => format!("{name} {towards} member {} of communicator {}", token.peer, communicator(token.communicator)),
    }
}
