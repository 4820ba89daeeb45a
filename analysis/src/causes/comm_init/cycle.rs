//! Wait cycles that contain the creation of a communicator.

use super::super::{
    case::Case,
    rule::{Finding, Statement},
    wording::line,
};
use crate::{
    graph::Event,
    text::{capital, ranks},
    verdict::Confidence,
};

pub(super) fn explain(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    apart(case, events).or_else(|| ahead(case, events)).or_else(|| elsewhere(case, events))
}

/// Ranks create a communicator of the same size with different unique ids, so no such communicator
/// ever completes.
fn apart(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let size = |event: &Event| match *event {
        Event::Init { comm } => Some(case.comms[comm].size),
        _ => None,
    };
    let first = size(events.first()?)?;
    if events.len() < 2 || events.iter().any(|event| size(event) != Some(first)) {
        return None;
    }
    let count = |event: &Event| case.graph.waiters_of(*event).len();
    let (most, largest) = (events.iter().map(count).max()?, events.iter().max_by_key(|event| count(event))?);
    let certain = events.iter().filter(|event| count(event) == most).count() == 1;
    let odd = events.iter().filter(|event| !certain || *event != largest);
    let culprits: Vec<usize> = odd.flat_map(|event| case.graph.waiters_of(*event).to_vec()).collect();
    let each: Vec<String> =
        events.iter().map(|event| format!("{} in {}", case.waiters_text(*event), case.describe(*event))).collect();
    let sentence = format!(
        "The ranks create communicators of {first} ranks that none of them can complete, because they have different unique ids: {}; an id of an earlier attempt may have been left in the store.",
        each.join(", ")
    );
    let mut evidence: Vec<_> = events
        .iter()
        .zip(&each)
        .map(|(event, text)| line(text, case.world.ranks(case.graph.waiters_of(*event).iter().copied())))
        .collect();
    for &rank_index in culprits.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let confidence = if certain { Confidence::Medium } else { Confidence::Low };
    Some(Finding { culprits, statement: Statement::Sentence(sentence), confidence, evidence })
}

/// Ranks that already use the communicator wait for ranks that are still in its creation, and these
/// wait for them: the creation returned on the former without the latter.
fn ahead(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let (event, comm) = events.iter().find_map(|event| match event {
        Event::Init { comm } => Some((*event, *comm)),
        _ => None,
    })?;
    let of_comm = |event: &&Event| matches!(event, Event::Collective { comm: other, .. } | Event::PointToPoint { comm: other, .. } if *other == comm);
    let used = *events.iter().find(of_comm)?;
    let outside: Vec<usize> =
        case.comms[comm].members.iter().filter(|member| !member.initializing).map(|member| member.rank_index).collect();
    let (culprits, inside) =
        (case.world.ranks(outside.iter().copied()), case.world.ranks(case.graph.waiters_of(event).iter().copied()));
    if culprits.is_empty() {
        return None;
    }
    let (what, next) = (case.describe(event), case.describe(used));
    let (it, are, their) = if culprits.len() == 1 { ("it", "is", "its") } else { ("they", "are", "their") };
    let place = if outside.len() == 1 { case.place(outside[0]) } else { String::new() };
    let sentence = format!(
        "{} did not take part in {what}: {their} call returned without {}, and {it} {are} now in {next}{place}.",
        capital(&ranks(&culprits)),
        ranks(&inside),
    );
    let mut evidence = vec![
        line(format!("{} in {what}", ranks(&inside)), inside),
        line(format!("{} in {next}", ranks(&culprits)), culprits),
    ];
    for &rank_index in outside.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let confidence = case.members_confidence(&[event]);
    Some(Finding { culprits: outside, statement: Statement::Sentence(sentence), confidence, evidence })
}

/// Some ranks create a communicator, and the others are in a collective and wait for them. The
/// smaller group is to blame.
fn elsewhere(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let creation = |event: &&Event| matches!(event, Event::Init { .. } | Event::Split { .. });
    let event = *events.iter().find(creation)?;
    let used = *events.iter().find(|event| matches!(event, Event::Collective { .. } | Event::PointToPoint { .. }))?;
    let inside = case.graph.waiters_of(event).to_vec();
    let others: Vec<usize> = events
        .iter()
        .filter(|event| !creation(event))
        .flat_map(|event| case.graph.waiters_of(*event))
        .copied()
        .collect();
    let late: Vec<usize> = case
        .world
        .views
        .iter()
        .enumerate()
        .map(|(rank_index, _)| rank_index)
        .filter(|rank_index| others.contains(rank_index) && !inside.contains(rank_index))
        .collect();
    // If it is known who is missing in the creation, the other ranks in collectives only wait for
    // its members.
    let missing: Vec<usize> = match event {
        Event::Init { comm } => {
            late.iter().copied().filter(|rank_index| case.comms[comm].silent.contains(rank_index)).collect()
        }
        _ => Vec::new(),
    };
    let late = if missing.is_empty() { late } else { missing };
    if inside.is_empty() || late.is_empty() {
        return None;
    }
    let (culprits, early) = if inside.len() < late.len() { (inside.clone(), true) } else { (late.clone(), false) };
    let (what, next) = (case.describe(event), case.describe(used));
    let who = case.world.ranks(culprits.iter().copied());
    let (is, has) = if who.len() == 1 { ("is", "has") } else { ("are", "have") };
    let (inside, late) = (case.world.ranks(inside), case.world.ranks(late));
    let place = if who.len() == 1 { case.place(culprits[0]) } else { String::new() };
    let sentence = if early {
        format!(
            "{} {is} in {what}{place}, which {} {} not come to: they wait in {next}.",
            capital(&ranks(&who)),
            ranks(&late),
            if late.len() == 1 { "does" } else { "do" }
        )
    } else {
        format!(
            "{} {has} not come to {what} and {is} in {next}{place}; {} {} there.",
            capital(&ranks(&who)),
            ranks(&inside),
            if inside.len() == 1 { "waits" } else { "wait" }
        )
    };
    let mut evidence = vec![
        line(format!("{} in {what}", ranks(&inside)), inside.clone()),
        line(format!("{} in {next}", ranks(&late)), late.clone()),
    ];
    for &rank_index in culprits.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let confidence = if inside.len() == late.len() { Confidence::Low } else { Confidence::Medium };
    Some(Finding { culprits, statement: Statement::Sentence(sentence), confidence, evidence })
}
