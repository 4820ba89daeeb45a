//! `missing_rank`: a rank has not entered the collective that its peers wait in.
//!
//! Its sequence number in that communicator is lower than the one that its peers' devices have
//! begun, and nothing shows that it waits for another rank. Or its number is not known, and all
//! other ranks are in the collective. No more specific cause explains what it does.
//!
//! In the second form, a rank waits like the others and has run one collective fewer. All have
//! launched number N, the others are inside it, and this rank has completed it. An operation that
//! needs all ranks cannot complete on one of them, so the call of this rank returned without taking
//! part. The confidence is high if the clock or the time on the device proves it: the rank
//! completed before another rank of its node had entered, or in a fraction of the shortest time
//! that the same operation took before.
//!
//! In the third form, a rank in a wait cycle left out a collective that it had always made at this
//! point.
//!
//! These ranks are named with medium confidence:
//!
//! - A rank that computes or sleeps at one place, or waits for a child process that may be at work.
//!   This may be long and end by itself. Two samples cannot tell it from an endless loop.
//! - A rank that waits for data from a socket, or polls for something: the process that should have
//!   answered may be to blame. If another rank stands still, a rank that only polls is not named.
//! - The few ranks that have begun an MPI collective and do not wait for it while most do: the
//!   library runs the collective only inside the calls of its process.
//! - A rank whose record has not been written for a while and ends in a collective that most others
//!   have completed: its process runs something else.
//! - A rank that called the collective in a group that it has not closed, because it stands still
//!   elsewhere.
//!
//! If no record shows who waits, a rank that stands still elsewhere than most is named with low
//! confidence. So are the few ranks in a collective while most ranks are together at one other
//! place.

use xpu_timer_proto::v1::{OpStatus, Presence};

use super::{
    case::Case,
    collective::{Collective, synchronizes},
    kernel_hang::in_open_group,
    pattern_break::{self, Break, PatternCheck},
    rule::{Finding, Rule, Statement},
    wording::{Number, line},
};
use crate::{
    graph::{Event, Suspect},
    stacks::Movement,
    text::{capital, ranks},
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::MissingRank, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Some(collective) = Collective::of(case, suspect) {
        let found = fell_silent(case, &collective).or_else(|| skipped(case, &collective));
        return found.or_else(|| not_waited_for(case, &collective));
    }
    if matches!(suspect, Suspect::Cycle(_)) {
        return match pattern_break::check(case, suspect, &[Break::Collective]) {
            PatternCheck::Finding(found) => Some(found),
            PatternCheck::OtherBreak | PatternCheck::Kept => None,
        };
    }
    if let Suspect::Device { rank_index, events } = suspect {
        return open_group(case, *rank_index, events);
    }
    let Suspect::Host { rank_index, events, guess } = suspect else { return None };
    if events.is_empty() && case.stack_waiters.is_empty() {
        return None;
    }
    if let Some(found) = stands_apart(case, suspect) {
        return Some(found);
    }
    let view = case.view(*rank_index);
    let event = case.main_event(suspect);
    let known = !case.place(*rank_index).is_empty();
    let stands = |number: Number| match (view.presence, known) {
        (Presence::Missing, _) => {
            number.word(", and nothing is known of it", ", and nothing is known of them").to_owned()
        }
        (_, false) => {
            number.word(", and where it stands is not known", ", and where they stand is not known").to_owned()
        }
        (_, true) => case.stands_clause(*rank_index, number),
    };
    let what = event.map_or("the collective".to_owned(), |event| case.describe(event));
    let runs =
        |moved: Movement| moved.cpu_share >= 0.8 && (moved.main_ran || case.does(*rank_index, Activity::Running));
    let busy = view.host.moved.is_some_and(runs) && view.host.observed.activity != Activity::DeviceWait;
    let busy = if busy { ", busy on a processor" } else { "" };
    let helper = case.helper_fact(*rank_index);
    let launched = match event {
        Some(Event::Collective { comm, seq }) => {
            case.comms[comm].member(*rank_index).is_some_and(|member| member.launched >= seq)
        }
        _ => false,
    };
    let statement = Statement::of_ranks(|number| {
        let (has, stands, itself) = (number.has(), stands(number), case.own_wait_clause(*rank_index, number));
        if *guess {
            format!("{} probably not in {what}: all others are{stands}", number.is())
        } else if launched {
            let does = number.word("does", "do");
            format!("{has} launched {what} and {does} not wait for it, so nobody runs it{stands}{busy}{itself}")
        } else {
            format!("{has} not entered {what}{stands}{busy}{itself}")
        }
    });
    let confidence = match event {
        Some(_) if case.blocked(*rank_index) && !guess => case.members_confidence(events),
        Some(_) => case.host_confidence(suspect),
        None => Confidence::Low,
    };
    let confidence = if case.does(*rank_index, Activity::DeviceWait) || case.waits_for_peer(*rank_index) {
        confidence.min(Confidence::Medium)
    } else {
        confidence
    };
    let mut evidence: Vec<_> = event.and_then(|event| case.counters_line(*rank_index, event)).into_iter().collect();
    evidence.extend(helper.map(|(_, fact)| fact));
    if case.polls(*rank_index) {
        let looks = format!("rank {}: sleeps and looks again: what it looks for may be another's to do", view.rank);
        evidence.push(line(looks, vec![view.rank]));
    }
    evidence.extend(case.position_lines(*rank_index));
    Some(Finding { culprits: vec![*rank_index], statement, confidence, evidence })
}

/// A rank has called its collective in a group that it has not closed.
fn open_group(case: &Case<'_>, rank_index: usize, events: &[Event]) -> Option<Finding> {
    if !in_open_group(case, rank_index) {
        return None;
    }
    let suspect = Suspect::Device { rank_index, events: events.to_vec() };
    let event = case.main_event(&suspect)?;
    let statement = Statement::of_ranks(|number| {
        let (has, it_has) = (number.has(), number.word("it has", "they have"));
        format!(
            "{has} called {} in a group that {it_has} not closed{}",
            case.describe(event),
            case.stands_clause(rank_index, number)
        )
    });
    let mut evidence: Vec<_> = case.counters_line(rank_index, event).into_iter().collect();
    evidence.extend(case.position_lines(rank_index));
    Some(Finding { culprits: vec![rank_index], statement, confidence: Confidence::Medium, evidence })
}

/// Few ranks are still in a collective that most have completed, by records that have not been
/// written for a while: their processes run something else.
fn fell_silent(case: &Case<'_>, collective: &Collective<'_>) -> Option<Finding> {
    let (completed_by, inside) = (&collective.completed_by, &collective.inside);
    let silent =
        |rank_index: &usize| case.view(*rank_index).watcher_stale() && !case.does(*rank_index, Activity::DeviceWait);
    if inside.is_empty() || inside.len() >= completed_by.len() || !inside.iter().all(silent) {
        return None;
    }
    let (who, others) = (case.world.ranks(inside.iter().copied()), case.world.ranks(completed_by.iter().copied()));
    let what = case.describe(collective.event);
    let place = if inside.len() == 1 { case.place(inside[0]) } else { String::new() };
    let sentence = format!(
        "{} fell silent in {what}, which {} completed{}{place}.",
        capital(&ranks(&who)),
        ranks(&others),
        if place.is_empty() { "" } else { "; it stands" },
    );
    let mut evidence =
        vec![line(format!("the record of {} ends in {what}, and {} completed that", ranks(&who), ranks(&others)), who)];
    for &rank_index in inside.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    Some(Finding {
        culprits: inside.clone(),
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence,
    })
}

/// Few ranks have begun a collective of a host library and do not wait for it as the others do, so
/// nothing runs it for them.
fn not_waited_for(case: &Case<'_>, collective: &Collective<'_>) -> Option<Finding> {
    let waiting = case.graph.waiters_of(collective.event);
    let away: Vec<usize> =
        collective.inside.iter().copied().filter(|rank_index| waiting.binary_search(rank_index).is_err()).collect();
    let known = |rank_index: &usize| {
        !case.view(*rank_index).has_device() && !case.view(*rank_index).lossy() && !case.view(*rank_index).dead()
    };
    if away.is_empty() || away.len() >= waiting.len() || !away.iter().all(known) {
        return None;
    }
    let (who, others) = (case.world.ranks(away.iter().copied()), case.world.ranks(waiting.iter().copied()));
    let (has, does) = if who.len() == 1 { ("has", "does") } else { ("have", "do") };
    let place = if away.len() == 1 { case.place(away[0]) } else { String::new() };
    let sentence = format!(
        "{} {has} begun {} and {does} not wait for it as {} {does_others}{}{place}.",
        capital(&ranks(&who)),
        case.describe(collective.event),
        ranks(&others),
        if place.is_empty() { "" } else { "; it stands" },
        does_others = if others.len() == 1 { "does" } else { "do" },
    );
    let mut evidence: Vec<_> =
        away.iter().take(4).filter_map(|rank_index| case.counters_line(*rank_index, collective.event)).collect();
    for &rank_index in away.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    Some(Finding { culprits: away, statement: Statement::Sentence(sentence), confidence: Confidence::Medium, evidence })
}

/// A rank stands still elsewhere than most, and no record shows that any rank waits.
pub(super) fn stands_apart(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Host { rank_index, events, .. } = suspect else { return None };
    let waits = |rank_index: &usize| {
        matches!(case.view(*rank_index).host.observed.activity, Activity::DeviceWait | Activity::CommInit)
    };
    let first = *case.stack_waiters.first().filter(|_| events.is_empty())?;
    if case.stack_waiters.contains(rank_index) || case.stack_waiters.iter().any(waits) {
        return None;
    }
    let (rank, most) = (case.view(*rank_index).rank, case.world.ranks(case.stack_waiters.iter().copied()));
    let sentence =
        format!("Rank {rank} stands{}, while {} stand{}.", case.place(*rank_index), ranks(&most), case.place(first));
    let mut evidence = case.position_lines(*rank_index);
    evidence.push(line(format!("{} stand{}", ranks(&most), case.place(first)), most));
    Some(Finding {
        culprits: vec![*rank_index],
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Low,
        evidence,
    })
}

/// Few members are in a collective that most others have not entered, and those others stand still
/// together at one place. Either they wait for something that the few have not done, or the few
/// made a call that was not due. A guess.
pub(crate) fn alone_in(case: &Case<'_>, event: Event, outside: &[usize]) -> Option<Finding> {
    let Event::Collective { comm, .. } = event else { return None };
    let inside = case.graph.waiters_of(event);
    let place = case.place(*outside.first()?);
    let together = |rank_index: &usize| case.view(*rank_index).host.frozen() && case.place(*rank_index) == place;
    let all_known = inside.len() + outside.len() == case.comms[comm].size as usize;
    if outside.len() <= inside.len()
        || inside.is_empty()
        || !all_known
        || place.is_empty()
        || !outside.iter().all(together)
    {
        return None;
    }
    let (few, most) = (case.world.ranks(inside.iter().copied()), case.world.ranks(outside.iter().copied()));
    let what = case.describe(event);
    let (are, have) = if few.len() == 1 { ("is", "it has") } else { ("are", "they have") };
    let sentence = format!(
        "{} {are} alone in {what}; {} all stand{place}: they may wait for something that {have} not done.",
        capital(&ranks(&few)),
        ranks(&most),
    );
    let mut evidence =
        vec![line(format!("{} in {what}", ranks(&few)), few), line(format!("{} stand{place}", ranks(&most)), most)];
    evidence.extend(case.position_lines(inside[0]));
    Some(Finding {
        culprits: inside.to_vec(),
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Low,
        evidence,
    })
}

fn skipped(case: &Case<'_>, collective: &Collective<'_>) -> Option<Finding> {
    let synchronizing = !collective.operations.is_empty()
        && collective.operations.iter().all(|(_, operation)| synchronizes(operation.op()));
    let (completed_by, inside) = (&collective.completed_by, &collective.inside);
    // If most ranks have completed the collective, the others are slow or stalled.
    if completed_by.is_empty() || inside.is_empty() || completed_by.len() > inside.len() || !synchronizing {
        return None;
    }
    let proven = completed_by.iter().all(|rank_index| proves_skip(case, collective, *rank_index));
    let what = case.describe(collective.event);
    let culprits = case.world.ranks(completed_by.iter().copied());
    let others = case.world.ranks(inside.iter().copied());
    let one = culprits.len() == 1;
    let place = if one { case.place(completed_by[0]) } else { String::new() };
    let gone = completed_by.iter().all(|rank_index| case.view(*rank_index).dead());
    let stands = match (place.is_empty(), gone) {
        (_, true) => "; it has ended since".to_owned(),
        (true, false) => String::new(),
        (false, false) => format!("; it stands{place}"),
    };
    let sentence = format!(
        "{} skipped {what}: {} call returned without taking part, so {} {} one collective fewer than {}, {} still in it{stands}.",
        capital(&ranks(&culprits)),
        if one { "its" } else { "their" },
        if one { "it" } else { "they" },
        if one { "has run" } else { "have run" },
        ranks(&others),
        if others.len() == 1 { "which is" } else { "which are" },
    );
    let mut evidence = vec![line(
        format!("{} completed {what}, which needs all its ranks; {} did not", ranks(&culprits), ranks(&others)),
        culprits,
    )];
    if proven {
        evidence.push(line(
            "it completed too early or too fast to have taken part",
            case.world.ranks(completed_by.iter().copied()),
        ));
    }
    for &rank_index in completed_by.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let confidence = if proven { case.members_confidence(&[collective.event]) } else { Confidence::Medium };
    Some(Finding { culprits: completed_by.clone(), statement: Statement::Sentence(sentence), confidence, evidence })
}

/// Whether clocks or device times prove that a rank completed the collective without the others.
pub(super) fn proves_skip(case: &Case<'_>, collective: &Collective<'_>, rank_index: usize) -> bool {
    let of = |rank_index: usize| {
        collective.operations.iter().find(|(other, _)| *other == rank_index).map(|(_, operation)| *operation)
    };
    let Some(operation) = of(rank_index).filter(|operation| operation.status() == OpStatus::Completed) else {
        return false;
    };
    // Ranks of a node share its clock, so times are compared within one node only.
    let node = case.view(rank_index).node();
    let before_others = operation.completed_ns != 0
        && node.is_some()
        && collective
            .inside
            .iter()
            .filter(|other| case.view(**other).node() == node)
            .filter_map(|other| of(*other))
            .any(|other| other.entered_ns > operation.completed_ns);
    let measured = case
        .view(rank_index)
        .operations()
        .filter(|other| {
            other.status() == OpStatus::Completed
                && other.ticket != operation.ticket
                && (other.op, other.count, other.dtype, other.communicator)
                    == (operation.op, operation.count, operation.dtype, operation.communicator)
        })
        .map(|other| other.device_ns);
    let measured: Vec<u64> = measured.collect();
    // The shortest of too few measurements means nothing. A measurement of 0 was not taken, and
    // then the time of this operation may be missing as well.
    let too_fast =
        measured.len() >= 4 && measured.iter().min().is_some_and(|shortest| operation.device_ns < shortest / 4);
    before_others || too_fast
}

fn rule_out(case: &Case<'_>, _: &[usize]) -> Option<String> {
    let complete = case.graph.suspects.iter().find_map(|suspect| match suspect {
        Suspect::Complete(event @ Event::Collective { .. }) => Some(*event),
        _ => None,
    })?;
    Some(format!("all ranks have entered {}", case.describe(complete)))
}
