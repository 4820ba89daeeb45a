//! Collectives: a rank has not entered one, a rank skipped one, the members differ, or nothing
//! moves.

use std::collections::{BTreeMap, BTreeSet};

use xpu_timer_proto::v1::Presence;

use super::{Number, Ranks, Statement, line, location_of, place_of, unknown_members};
use crate::{
    case::Case,
    explanation::{Absence, CollectiveFault, Differ, OperationVariant},
    finding::CollectiveFact,
    graph::Event,
    kernels::{FewerLaunches, stream_of},
    text::{capital, dtype_name, op_name},
    verdict::EvidenceLine,
};

/// The text about what is wrong with a collective.
pub(super) fn statement(case: &Case<'_>, fault: &CollectiveFault) -> Statement {
    match fault {
        CollectiveFault::Absent { rank_index, event, absence, busy } => {
            absent(case, *rank_index, *event, *absence, *busy)
        }
        CollectiveFault::FewerLaunches(launches) => launched_less(case, launches),
        CollectiveFault::OpenGroup { rank_index, event } => open_group(case, *rank_index, *event),
        CollectiveFault::StaleRecords { stale, completed_by, event } => {
            stale_records(case, stale, completed_by, *event)
        }
        CollectiveFault::NotWaitedFor { away, waiting, event } => not_waited_for(case, away, waiting, *event),
        CollectiveFault::IsElsewhere { rank_index, most } => is_elsewhere(case, *rank_index, most),
        CollectiveFault::AloneIn { few, together, event } => alone_in(case, few, together, *event),
        CollectiveFault::Skipped { completed_by, inside, event } => skipped(case, completed_by, inside, *event),
        CollectiveFault::OneTooMany { inside, ended, event } => one_too_many(case, inside, ended, *event),
        CollectiveFault::Differ(differ) => Statement::Sentence(differ_text(case, differ)),
        CollectiveFault::OtherKernels { odd, most } => other_kernels(case, odd, most.as_ref()),
        CollectiveFault::Stalled { event, certain } => stalled(case, *event, *certain),
    }
}

/// The lines of evidence about what is wrong with a collective.
pub(super) fn lines(case: &Case<'_>, fault: &CollectiveFault) -> Vec<EvidenceLine> {
    match fault {
        CollectiveFault::FewerLaunches(launches) => launches
            .fewer
            .iter()
            .map(|(rank_index, count)| {
                let others = (&launches.others[..], launches.most);
                launches_line(case, &launches.name, (*rank_index, *count), &[others])
            })
            .collect(),
        CollectiveFault::StaleRecords { stale, completed_by, event } => {
            vec![stale_records_line(case, stale, completed_by, *event)]
        }
        CollectiveFault::IsElsewhere { most, .. } => vec![common_place_line(case, most)],
        CollectiveFault::AloneIn { few, together, event } => {
            vec![inside_line(case, few, *event), common_place_line(case, together)]
        }
        CollectiveFault::Skipped { completed_by, inside, event } => {
            vec![skipped_line(case, completed_by, inside, *event)]
        }
        CollectiveFault::OneTooMany { inside, ended, event } => {
            vec![inside_line(case, inside, *event), ended_without_line(case, ended)]
        }
        CollectiveFault::Differ(differ) => differ_lines(case, differ),
        CollectiveFault::OtherKernels { odd, most } => {
            odd.iter().chain(most).map(|(event, ranks)| inside_line(case, ranks, *event)).collect()
        }
        CollectiveFault::Stalled { event, .. } => vec![stalled_line(case, *event)],
        CollectiveFault::Absent { .. } | CollectiveFault::OpenGroup { .. } | CollectiveFault::NotWaitedFor { .. } => {
            Vec::new()
        }
    }
}

/// A rank is absent from the event in which its peers wait, if that is known. `busy` if it uses a
/// CPU all the time.
fn absent(case: &Case<'_>, rank_index: usize, event: Option<Event>, absence: Absence, busy: bool) -> Statement {
    let known = !case.place(rank_index).is_empty();
    let location = |number: Number| match (case.view(rank_index).presence, known) {
        (Presence::Missing, _) => {
            number.word(", and there is no data from it", ", and there is no data from them").to_owned()
        }
        (_, false) => number.word("; its place is unknown", "; their place is unknown").to_owned(),
        (_, true) => case.location_clause(rank_index, number),
    };
    let what = event.map_or("the collective".to_owned(), |event| case.describe(event));
    let kernel = event.and_then(|event| {
        let (Event::Collective { comm, .. }, (kernel, _)) = (event, case.kernel_of(event)?) else { return None };
        Some((&kernel.name, case.comms[comm].member(rank_index)?.launched))
    });
    let busy = if busy { ", busy on a CPU" } else { "" };
    Statement::of_ranks(|number| {
        let (has, location, own_wait) = (number.has(), location(number), case.own_wait_clause(rank_index, number));
        match absence {
            Absence::Guess => {
                format!("{has} probably not entered {what}, which all other ranks have entered{location}")
            }
            Absence::NotWaiting => {
                let does = number.does();
                format!(
                    "{has} launched {what} and {does} not wait for it, so the library does not run it{location}{busy}{own_wait}"
                )
            }
            Absence::InCall => {
                let call = number.word("the call has not returned", "the calls have not returned");
                format!("{has} called {what}, and {call}{location}{busy}{own_wait}")
            }
            Absence::NotEntered => match kernel {
                Some((name, launches)) => {
                    format!("{has} launched {name} {}{location}{busy}{own_wait}", times(launches))
                }
                None => format!("{has} not entered {what}{location}{busy}{own_wait}"),
            },
        }
    })
}

/// Ranks that have launched a kernel less often than the others.
fn launched_less(case: &Case<'_>, launches: &FewerLaunches) -> Statement {
    let culprits: Vec<usize> = launches.fewer.iter().map(|(rank_index, _)| *rank_index).collect();
    let (who, others) = (Ranks::of(case, &culprits), Ranks::of(case, &launches.others));
    let counts: BTreeSet<u64> = launches.fewer.iter().map(|(_, count)| *count).collect();
    let count = match (counts.first(), counts.last()) {
        (Some(first), Some(last)) if first < last => format!("{first} to {last} times"),
        (Some(count), _) => times(*count),
        _ => String::new(),
    };
    let stream = match culprits[..] {
        [rank_index] => stream_text(case, rank_index, &launches.name),
        _ => String::new(),
    };
    Statement::Sentence(format!(
        "{} {} launched {} {count}{stream}, {} {}{}.",
        who.capital(),
        who.number().has(),
        launches.name,
        others.text(),
        times(launches.most),
        location_of(case, &culprits),
    ))
}

/// `once`, `41 times`.
fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// The stream on which a rank launches a kernel: ` on stream 0x7f10`. Empty if there are several.
fn stream_text(case: &Case<'_>, rank_index: usize, name: &str) -> String {
    match stream_of(case.view(rank_index), name) {
        None => String::new(),
        Some(0) => " on the default stream".to_owned(),
        Some(stream) => format!(" on stream {stream:#x}"),
    }
}

/// How often a rank has launched a kernel, and how often each group of other ranks has: `rank 2 has
/// launched reduce 41 times on stream 0x7f10, ranks 0-1, 3 42 times`.
fn launches_line(
    case: &Case<'_>,
    name: &str,
    (rank_index, count): (usize, u64),
    others: &[(&[usize], u64)],
) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    let mut text = format!("rank {rank} has launched {name} {}{}", times(count), stream_text(case, rank_index, name));
    for (group, count) in others {
        text.push_str(&format!(", {} {}", Ranks::of(case, group).text(), times(*count)));
    }
    line(text, vec![rank])
}

/// The launches of the kernel of an event by a rank, beside those of the ranks inside.
pub(super) fn kernel_launches_line(case: &Case<'_>, rank_index: usize, event: Event) -> Option<EvidenceLine> {
    let (Event::Collective { comm, .. }, (kernel, _)) = (event, case.kernel_of(event)?) else { return None };
    let launched = |rank_index: usize| case.comms[comm].member(rank_index).map_or(0, |member| member.launched);
    let mut groups: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    let inside = case.graph.waiters_of(event).iter().filter(|other| **other != rank_index);
    inside.for_each(|other| groups.entry(launched(*other)).or_default().push(*other));
    let groups: Vec<(&[usize], u64)> = groups.iter().take(4).map(|(count, group)| (&group[..], *count)).collect();
    Some(launches_line(case, &kernel.name, (rank_index, launched(rank_index)), &groups))
}

/// A rank has called a collective in a group that it has not closed.
fn open_group(case: &Case<'_>, rank_index: usize, event: Event) -> Statement {
    Statement::of_ranks(|number| {
        let (has, it_has) = (number.has(), number.it_has());
        let (what, location) = (case.describe(event), case.location_clause(rank_index, number));
        format!("{has} called {what} in a group that {it_has} not closed{location}")
    })
}

/// Ranks whose records end in a collective that the others completed.
fn stale_records(case: &Case<'_>, stale: &[usize], completed_by: &[usize], event: Event) -> Statement {
    let (who, others) = (Ranks::of(case, stale), Ranks::of(case, completed_by));
    let (what, place) = (case.describe(event), location_of(case, stale));
    Statement::Sentence(format!(
        "{} recorded nothing after entering {what}, which {} completed{place}.",
        who.capital(),
        others.text()
    ))
}

fn stale_records_line(case: &Case<'_>, stale: &[usize], completed_by: &[usize], event: Event) -> EvidenceLine {
    let (who, others) = (Ranks::of(case, stale), Ranks::of(case, completed_by));
    let what = case.describe(event);
    let record = who.number().word("flight record", "flight records");
    let text =
        format!("{what} is the last operation in the {record} of {}; {} completed it", who.text(), others.text());
    who.line(text)
}

/// Ranks that have started a collective of a host library and do not wait for it as the others do.
fn not_waited_for(case: &Case<'_>, away: &[usize], waiting: &[usize], event: Event) -> Statement {
    let (who, others) = (Ranks::of(case, away), Ranks::of(case, waiting));
    let number = who.number();
    Statement::Sentence(format!(
        "{} {} started {} and {} not wait for it, unlike {}{}.",
        who.capital(),
        number.has(),
        case.describe(event),
        number.does(),
        others.text(),
        location_of(case, away),
    ))
}

/// A rank that is at another place than most ranks, which are at one place.
fn is_elsewhere(case: &Case<'_>, rank_index: usize, most: &[usize]) -> Statement {
    let (rank, place) = (case.view(rank_index).rank, case.place(rank_index));
    let (others, there) = (Ranks::of(case, most), case.place(most[0]));
    Statement::Sentence(format!("Rank {rank} is{place}, while {} {}{there}.", others.text(), others.number().is()))
}

/// The common place of ranks.
fn common_place_line(case: &Case<'_>, together: &[usize]) -> EvidenceLine {
    let who = Ranks::of(case, together);
    let text = format!("{} are{}", who.text(), case.place(together[0]));
    who.line(text)
}

/// Few ranks in a collective, while the others are together at another place.
fn alone_in(case: &Case<'_>, few: &[usize], together: &[usize], event: Event) -> Statement {
    let (who, others) = (Ranks::of(case, few), Ranks::of(case, together));
    Statement::Sentence(format!(
        "{} {} alone in {}; {} are all{} and may wait for something that {} {} not done.",
        who.capital(),
        who.number().is(),
        case.describe(event),
        others.text(),
        case.place(together[0]),
        who.text(),
        who.number().has(),
    ))
}

/// Ranks inside a collective.
pub(super) fn inside_line(case: &Case<'_>, inside: &[usize], event: Event) -> EvidenceLine {
    let who = Ranks::of(case, inside);
    let text = format!("{} {} in {}", who.text(), who.number().is(), case.describe(event));
    who.line(text)
}

/// Ranks whose call returned although the others are still in the collective.
fn skipped(case: &Case<'_>, completed_by: &[usize], inside: &[usize], event: Event) -> Statement {
    let (who, others) = (Ranks::of(case, completed_by), Ranks::of(case, inside));
    let number = who.number();
    let gone = completed_by.iter().all(|rank_index| case.view(*rank_index).dead());
    let now = if gone { format!("; {} exited since then", number.it_has()) } else { location_of(case, completed_by) };
    Statement::Sentence(format!(
        "{} skipped {}: {} returned while {} {} still inside, so {} {} run one collective fewer{now}.",
        who.capital(),
        case.describe(event),
        number.its_call(),
        others.text(),
        others.number().is(),
        who.text(),
        number.has(),
    ))
}

/// The ranks that completed a collective and those that did not.
fn skipped_line(case: &Case<'_>, completed_by: &[usize], inside: &[usize], event: Event) -> EvidenceLine {
    let (who, others) = (Ranks::of(case, completed_by), Ranks::of(case, inside));
    let text = format!(
        "{} completed {}, which needs all its ranks; {} {} not completed it",
        who.text(),
        case.describe(event),
        others.text(),
        others.number().has()
    );
    who.line(text)
}

/// Few ranks in a collective for which all others ended too early: they made one too many.
fn one_too_many(case: &Case<'_>, inside: &[usize], ended: &[usize], event: Event) -> Statement {
    let (who, others) = (Ranks::of(case, inside), Ranks::of(case, ended));
    let number = Number::of(inside.len());
    Statement::Sentence(format!(
        "{} {} in {}{}, and all others ({}) have finished: {} called one collective too many.",
        who.capital(),
        number.waits(),
        case.describe(event),
        place_of(case, inside),
        others.text(),
        who.text(),
    ))
}

fn ended_without_line(case: &Case<'_>, ended: &[usize]) -> EvidenceLine {
    let who = Ranks::of(case, ended);
    let text = format!("{} finished without calling it", who.text());
    who.line(text)
}

impl OperationVariant {
    fn text(&self) -> String {
        match self {
            OperationVariant::Operation { name, root: Some(root) } => format!("{name} with root {root}"),
            OperationVariant::Operation { name, root: None } => name.clone(),
            OperationVariant::Elements { op, count: 1 } => format!("{} of 1 element", op_name(*op)),
            OperationVariant::Elements { op, count } => format!("{} of {count} elements", op_name(*op)),
            OperationVariant::Type { op, dtype } => {
                let dtype = dtype_name(*dtype);
                format!("{} of {}", op_name(*op), if dtype.is_empty() { "an unknown type" } else { dtype })
            }
        }
    }
}

fn runs(case: &Case<'_>, (variant, members): &(OperationVariant, Vec<usize>)) -> String {
    let who = Ranks::of(case, members);
    format!("{} {} {}", who.text(), who.number().word("runs", "run"), variant.text())
}

/// `31 of communicator 0x1f (4 ranks)`: an event without the name of its operation.
fn numbered(case: &Case<'_>, event: Event) -> String {
    let what = case.describe(event);
    what.split_once(' ').map_or(what.clone(), |(_, number)| number.to_owned())
}

/// The members of a collective run different operations.
pub(super) fn differ_text(case: &Case<'_>, differ: &Differ) -> String {
    let Differ { event, groups, right } = differ;
    let number = numbered(case, *event);
    let odd: Vec<String> = groups
        .iter()
        .enumerate()
        .filter(|(index, _)| Some(*index) != *right)
        .map(|(_, group)| runs(case, group) + &place_of(case, &group.1))
        .collect();
    match right {
        Some(right) => {
            format!("In collective {number}, {}, while {}.", odd.join(" and "), runs(case, &groups[*right]))
        }
        None => format!("In collective {number}, the ranks differ: {}.", odd.join(", ")),
    }
}

/// One line for each group.
pub(super) fn differ_lines(case: &Case<'_>, differ: &Differ) -> Vec<EvidenceLine> {
    let number = numbered(case, differ.event);
    let of_group = |group: &(OperationVariant, Vec<usize>)| {
        Ranks::of(case, &group.1).line(format!("{} in collective {number}", runs(case, group)))
    };
    differ.groups.iter().map(of_group).collect()
}

/// Ranks that are stuck in other kernels than most ranks.
fn other_kernels(case: &Case<'_>, odd: &[(Event, Vec<usize>)], most: Option<&(Event, Vec<usize>)>) -> Statement {
    let inside = |(event, ranks): &(Event, Vec<usize>)| {
        let who = Ranks::of(case, ranks);
        format!("{} {} in {}", who.text(), who.number().is(), case.describe(*event))
    };
    let text: Vec<String> = odd.iter().map(|group| inside(group) + &place_of(case, &group.1)).collect();
    let most = most.map_or(String::new(), |group| format!(", while {}", inside(group)));
    Statement::Sentence(format!("{}{most}.", capital(&text.join(", and "))))
}

/// All members are in a collective that does not move.
fn stalled(case: &Case<'_>, event: Event, certain: bool) -> Statement {
    let who = Ranks::of(case, case.graph.waiters_of(event));
    let why = if certain {
        "no rank is behind and no arguments differ, so check the network"
    } else {
        "no rank is known to be behind, but not every member is known to be inside with the same arguments"
    };
    Statement::Sentence(format!(
        "{} {} started {}, which makes no progress: {why}.",
        who.capital(),
        who.number().has(),
        case.describe(event)
    ))
}

fn stalled_line(case: &Case<'_>, event: Event) -> EvidenceLine {
    let who = Ranks::of(case, case.graph.waiters_of(event));
    let text = format!("{}: {} has started and has not completed", who.text(), case.describe(event));
    who.line(text)
}

/// A fact about the collective beside the explanation.
pub(super) fn fact_line(case: &Case<'_>, fact: &CollectiveFact) -> EvidenceLine {
    match fact {
        CollectiveFact::Completed { event, completed_by } => {
            let who = Ranks::of(case, completed_by);
            let text = format!("{}: {} has completed", who.text(), case.describe(*event));
            who.line(text)
        }
        CollectiveFact::TookNoPart { completed_by } => {
            let who = Ranks::of(case, completed_by);
            let text = format!("{} completed it too early or too fast to have taken part", who.text());
            who.line(text)
        }
        CollectiveFact::DueByHistory => {
            line("no group is the largest; the earlier operations show which operation was due", Vec::new())
        }
        CollectiveFact::UnknownMembers(members) => {
            line(format!("{}, so the culprit may be an unknown rank", unknown_members(*members)), Vec::new())
        }
        CollectiveFact::RootsMayDiffer => {
            line("the flight records do not contain the root, so the ranks may have passed different roots", Vec::new())
        }
    }
}
