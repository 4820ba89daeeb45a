//! `comm_init`: a communicator is being created, and not all of its ranks take part.
//!
//! Ranks are inside the call that creates or splits a communicator (or, by their stacks, in the store behind it); a member has not
//! made that call, or its call returned without the others, who wait for it there while it uses the communicator already. When all members are inside, nobody is to blame: the network between
//! them is. A member that is dead, stopped, in its data loader or in input or output is that first.

use super::{Case, Cause, Confidence, Finding, Rule, Says, line, never_mistaken};
use crate::{
    graph::{Event, Suspect},
    text::{capital, ranks},
    verdict::Activity,
};
use xpu_timer_proto::v1::Presence;

pub(super) const RULE: Rule = Rule { cause: Cause::CommInit, explain, rule_out: never_mistaken };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Suspect::Complete(event @ (Event::Init { .. } | Event::Split { .. })) = suspect {
        let inside = case.world.ranks(case.graph.waiters_of(*event).iter().copied());
        let unnamed = match *event {
            Event::Init { comm } | Event::Split { comm } => case.comms[comm].unnamed,
            _ => 0,
        };
        let rest = if unnamed > 0 {
            format!("; {unnamed} of its members are not known")
        } else {
            " and it does not end: look at the network between them".to_owned()
        };
        let what = case.describe(*event);
        return Some(Finding {
            culprits: Vec::new(),
            says: Says::Whole(format!(
                "{} {} in {what}{rest}.",
                capital(&ranks(&inside)),
                if inside.len() == 1 { "is" } else { "are" }
            )),
            confidence: if unnamed > 0 { Confidence::Low } else { Confidence::Medium },
            evidence: vec![line(format!("{} in {what}", ranks(&inside)), inside)],
        });
    }
    if let Suspect::Cycle(events) = suspect {
        return apart(case, events).or_else(|| ahead(case, events));
    }
    let view = case.host(suspect)?;
    let event = case.main_event(suspect);
    let by_stacks = event.is_none()
        && !case.stack_waiters.is_empty()
        && case.stack_waiters.iter().all(|view| case.does(*view, Activity::CommInit));
    if !by_stacks && !matches!(event, Some(Event::Init { .. } | Event::Split { .. })) {
        return None;
    }
    let content = case.view(view);
    let returned = match event {
        Some(Event::Init { comm }) => case.comms[comm].member(view).is_some(),
        _ => false,
    };
    let store =
        by_stacks && case.stack_waiters.iter().all(|view| case.view(*view).host.doing.witness.contains("Store::"));
    let says = if store {
        format!("has not set the key that the others wait for in the store; it is{}", or_unknown(case.place(view)))
    } else if returned {
        format!(
            "has left the creation of a communicator that the others are still in; it is{}",
            or_unknown(case.place(view))
        )
    } else if content.presence == Presence::Unregistered {
        format!(
            "has made no device call yet and has not joined the communicator; it is{}",
            or_unknown(case.place(view))
        )
    } else {
        format!("has not joined the communicator; it is{}", or_unknown(case.place(view)))
    };
    // A process that computes and has no communicator at all has only just begun.
    let starts = content.host.moved.is_some_and(|moved| moved.any())
        && content.flight.is_none_or(|flight| flight.communicators.is_empty());
    let says = if starts { format!("{says}; it moves, so it is probably still starting") } else { says };
    let confidence = match () {
        () if starts => Confidence::Low,
        () if returned || by_stacks => Confidence::Medium,
        () => case.host_confidence(suspect),
    };
    let rank = content.rank;
    let inside = |event| {
        line(format!("{} in {}; rank {rank} is not", case.waiters_text(event), case.describe(event)), vec![rank])
    };
    let mut evidence: Vec<_> = event.map(inside).into_iter().collect();
    evidence.extend(case.standing(view));
    Some(Finding { culprits: vec![view], says: Says::Rank(says), confidence, evidence })
}

/// Ranks create a communicator of the same size by different unique ids, so that none of them is ever complete.
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
    for &view in culprits.iter().take(2) {
        evidence.extend(case.standing(view));
    }
    let confidence = if certain { Confidence::Medium } else { Confidence::Low };
    Some(Finding { culprits, says: Says::Whole(sentence), confidence, evidence })
}

/// Ranks that use the communicator already wait for those that are still in its creation, who wait for them: the creation of the
/// former returned without the others.
fn ahead(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let (event, comm) = events.iter().find_map(|event| match event {
        Event::Init { comm } => Some((*event, *comm)),
        _ => None,
    })?;
    let of_comm = |event: &&Event| matches!(event, Event::Collective { comm: other, .. } | Event::PointToPoint { comm: other, .. } if *other == comm);
    let used = *events.iter().find(of_comm)?;
    let outside: Vec<usize> =
        case.comms[comm].members.iter().filter(|member| !member.initializing).map(|member| member.view).collect();
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
    for &view in outside.iter().take(2) {
        evidence.extend(case.standing(view));
    }
    let confidence = case.members_confidence(&[event]);
    Some(Finding { culprits: outside, says: Says::Whole(sentence), confidence, evidence })
}

fn or_unknown(place: String) -> String {
    if place.is_empty() { " at an unknown place".to_owned() } else { place }
}
