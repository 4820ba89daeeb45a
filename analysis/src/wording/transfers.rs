//! Sends and receives: one lacks its counterpart, or the two ends of a pair differ.

use xpu_timer_proto::v1::Operation;

use super::{Number, Ranks, Statement, line, locations};
use crate::{
    case::Case,
    explanation::{GroupCounts, OpenEnd, Property, TransferFault},
    graph::Event,
    text::{capital, communicator, rank_count, shape},
    verdict::EvidenceLine,
};

/// The text about what is wrong with a send or a receive.
pub(super) fn statement(case: &Case<'_>, fault: &TransferFault) -> Statement {
    match fault {
        TransferFault::NoCounterpart { culprit, waiter, recv, waits_itself: false, .. } => {
            no_counterpart(case, *culprit, *waiter, *recv)
        }
        TransferFault::NoCounterpart { culprit, waiter, recv, event, waits_itself: true } => {
            no_counterpart_and_waits(case, *culprit, *waiter, *recv, *event)
        }
        TransferFault::FewerInGroups { fewer, others, counts } => fewer_in_groups(case, fewer, others, *counts),
        TransferFault::NobodySends { rank_index, event } => nobody_sends(case, *rank_index, *event),
        TransferFault::InsteadOfCollective { rank_index, event, collective } => {
            instead_of_collective(case, *rank_index, *event, *collective)
        }
        TransferFault::TagsDiffer { ends, blamed } => tags_differ(case, *ends, blamed),
        TransferFault::EndsDiffer { ends, property, blamed } => {
            let [one, two] = &**ends;
            ends_differ(case, [(one.0, &one.1), (two.0, &two.1)], *property, blamed)
        }
        TransferFault::OtherTransfers { culprit, open } => other_transfers(case, *culprit, open),
        TransferFault::Stalled { event } => stalled(case, *event),
    }
}

/// The lines of evidence about what is wrong with a send or a receive.
pub(super) fn lines(case: &Case<'_>, fault: &TransferFault) -> Vec<EvidenceLine> {
    match fault {
        TransferFault::NoCounterpart { culprit, waiter, event, .. } => {
            vec![no_counterpart_line(case, *culprit, *waiter, *event)]
        }
        TransferFault::FewerInGroups { fewer, others, counts } => {
            vec![fewer_in_groups_line(case, fewer, others, *counts)]
        }
        TransferFault::NobodySends { rank_index, event } => vec![nobody_sends_line(case, *rank_index, *event)],
        TransferFault::InsteadOfCollective { .. } => Vec::new(),
        TransferFault::TagsDiffer { ends, .. } => tags_differ_lines(case, *ends),
        TransferFault::EndsDiffer { ends, property, .. } => {
            vec![ends_differ_line(case, [ends[0].0, ends[1].0], *property)]
        }
        TransferFault::OtherTransfers { open, .. } => {
            open.iter().take(4).map(|open| open_end_line(case, open)).collect()
        }
        TransferFault::Stalled { event } => vec![stalled_line(case, *event)],
    }
}

impl Property {
    fn text(self) -> &'static str {
        match self {
            Property::Size => "size",
            Property::Type => "type",
        }
    }
}

fn missing_counterpart(case: &Case<'_>, waiter: usize, recv: bool, number: Number) -> String {
    let waiting = case.view(waiter).rank;
    match recv {
        true => format!("{} not sent to rank {waiting}", number.has()),
        false => format!("{} not receive from rank {waiting}", number.does()),
    }
}

fn location_and_wait(case: &Case<'_>, rank_index: usize, number: Number) -> String {
    case.location_clause(rank_index, number) + &case.own_wait_clause(rank_index, number)
}

/// A rank has not made the counterpart of a receive or a send of `waiter`.
fn no_counterpart(case: &Case<'_>, culprit: usize, waiter: usize, recv: bool) -> Statement {
    Statement::of_ranks(|number| {
        missing_counterpart(case, waiter, recv, number) + &location_and_wait(case, culprit, number)
    })
}

/// Like [`no_counterpart`], of a rank that itself waits for `waiter`.
fn no_counterpart_and_waits(case: &Case<'_>, culprit: usize, waiter: usize, recv: bool, event: Event) -> Statement {
    let (rank, waiting) = (case.view(culprit).rank, case.view(waiter).rank);
    Statement::Sentence(format!(
        "Rank {rank} {}, which waits in {}, and rank {rank} itself waits for rank {waiting}{}.",
        missing_counterpart(case, waiter, recv, Number::One),
        case.describe(event),
        location_and_wait(case, culprit, Number::One)
    ))
}

fn no_counterpart_line(case: &Case<'_>, culprit: usize, waiter: usize, event: Event) -> EvidenceLine {
    let (rank, waiting, what) = (case.view(culprit).rank, case.view(waiter).rank, case.describe(event));
    let text = format!("rank {waiting} has started {what}, and rank {rank} has no counterpart pending");
    line(text, vec![waiting])
}

/// `80`, or `80 each` for several ranks.
fn each(count: u64, number: Number) -> String {
    format!("{count}{}", number.word("", " each"))
}

/// Ranks that left out a transfer of a group.
fn fewer_in_groups(case: &Case<'_>, fewer: &[usize], others: &[usize], counts: GroupCounts) -> Statement {
    let (who, others) = (Ranks::of(case, fewer), Ranks::of(case, others));
    let comm = &case.comms[counts.comm];
    Statement::Sentence(format!(
        "{} {} left out a send or receive of a group on communicator {} ({}): in {} groups, {} made {}, and {} made {}{}.",
        who.capital(),
        who.number().has(),
        communicator(comm.id),
        rank_count(comm.size),
        counts.groups,
        who.text(),
        each(counts.fewer, who.number()),
        others.text(),
        each(counts.most, others.number()),
        locations(case, fewer),
    ))
}

fn fewer_in_groups_line(case: &Case<'_>, fewer: &[usize], others: &[usize], counts: GroupCounts) -> EvidenceLine {
    let (who, others) = (Ranks::of(case, fewer), Ranks::of(case, others));
    let text = format!(
        "in {} groups, {} made {} sends and receives, and {} made {}",
        counts.groups,
        who.text(),
        each(counts.fewer, who.number()),
        others.text(),
        each(counts.most, others.number()),
    );
    who.line(text)
}

/// `Rank 1 is in a recv from rank 0 at a.py:7, where all other ranks have called all_reduce 31 of
/// …`.
fn instead_of_collective(case: &Case<'_>, rank_index: usize, event: Event, collective: Event) -> Statement {
    let rank = case.view(rank_index).rank;
    let (transfer, called, place) = (case.describe(event), case.describe(collective), case.place(rank_index));
    let waiting = Ranks::of(case, case.graph.waiters_of(collective));
    let verb = waiting.number().waits();
    Statement::Sentence(format!(
        "Rank {rank} is in {transfer}{place}, where all other ranks have called {called}; {} {verb} for it there",
        waiting.text()
    ))
}

/// A rank receives from any rank, and no rank can send to it.
fn nobody_sends(case: &Case<'_>, rank_index: usize, event: Event) -> Statement {
    Statement::Sentence(format!(
        "Rank {} waits in {}, and no rank sends to it, because all others wait for it{}.",
        case.view(rank_index).rank,
        case.describe(event),
        case.location_clause(rank_index, Number::One)
    ))
}

fn nobody_sends_line(case: &Case<'_>, rank_index: usize, event: Event) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    line(format!("rank {rank} has started {}, and no rank sends to it", case.describe(event)), vec![rank])
}

fn with_tag(case: &Case<'_>, (rank_index, event): (usize, Event)) -> String {
    let tag = case.operation(event).and_then(|operation| operation.tag).unwrap_or(-1);
    format!("rank {} is in {} with tag {tag}", case.view(rank_index).rank, case.describe(event))
}

/// A single culprit is the end whose property changed.
fn changed_clause(case: &Case<'_>, blamed: &[usize], property: &str) -> String {
    match blamed[..] {
        [one] => format!("; rank {} had always used another {property} before", case.view(one).rank),
        _ => String::new(),
    }
}

/// The tags of a send and its receive differ.
fn tags_differ(case: &Case<'_>, ends: [(usize, Event); 2], blamed: &[usize]) -> Statement {
    let [one, two] = ends.map(|end| with_tag(case, end));
    let changed = changed_clause(case, blamed, "tag");
    let places = locations(case, blamed);
    Statement::Sentence(format!("{}, and {two}: the tags do not match{changed}{places}.", capital(&one)))
}

fn tags_differ_lines(case: &Case<'_>, ends: [(usize, Event); 2]) -> Vec<EvidenceLine> {
    ends.map(|end| line(with_tag(case, end), vec![case.view(end.0).rank])).to_vec()
}

/// A send and its receive differ in a property.
fn ends_differ(case: &Case<'_>, ends: [(usize, &Operation); 2], property: Property, blamed: &[usize]) -> Statement {
    // Both ends are suspects of their own. Either gives the same sentence.
    let mut ends = ends.map(|(rank_index, operation)| (case.view(rank_index).rank, operation));
    ends.sort_by_key(|end| end.0);
    Statement::Sentence(format!(
        "Rank {} runs {}, and its peer, rank {}, runs {}: the {}s differ{}{}.",
        ends[0].0,
        shape(ends[0].1),
        ends[1].0,
        shape(ends[1].1),
        property.text(),
        changed_clause(case, blamed, property.text()),
        locations(case, blamed)
    ))
}

fn ends_differ_line(case: &Case<'_>, ends: [usize; 2], property: Property) -> EvidenceLine {
    let both = Ranks::of(case, &ends);
    let text = format!("{} have started the send and the receive, and the {}s differ", both.text(), property.text());
    both.line(text)
}

fn open_end(case: &Case<'_>, open: &OpenEnd) -> String {
    format!("rank {} is in {}", case.view(open.waiter).rank, case.describe(open.event))
}

/// A rank is at an end of all transfers without a counterpart.
fn other_transfers(case: &Case<'_>, culprit: usize, open: &[OpenEnd]) -> Statement {
    let without: Vec<String> = open.iter().take(2).map(|open| open_end(case, open)).collect();
    Statement::Sentence(format!(
        "Rank {} does not send and receive as its peers do: {}, without a counterpart{}.",
        case.view(culprit).rank,
        without.join(", and "),
        case.location_clause(culprit, Number::One)
    ))
}

fn open_end_line(case: &Case<'_>, open: &OpenEnd) -> EvidenceLine {
    let rank = case.view(open.waiter).rank;
    line(format!("rank {rank} has started {}, which has no counterpart", case.describe(open.event)), vec![rank])
}

/// All members are in the counterparts of each other's transfers, and the data does not move.
fn stalled(case: &Case<'_>, event: Event) -> Statement {
    let who = Ranks::of(case, case.graph.waiters_of(event));
    Statement::Sentence(format!(
        "{} is in {}, its peer is in the counterpart, and no data moves between them: check the network.",
        who.capital(),
        case.describe(event)
    ))
}

fn stalled_line(case: &Case<'_>, event: Event) -> EvidenceLine {
    let who = Ranks::of(case, case.graph.waiters_of(event));
    let text = format!("{} has started {}, and its peer the counterpart", who.text(), case.describe(event));
    who.line(text)
}
