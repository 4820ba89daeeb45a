//! `comm_init`: a communicator is being created, and not all of its ranks take part.
//!
//! Ranks are inside the call that creates or splits a communicator (or, by their stacks, in the store behind it); a member has not
//! made that call, or its call returned without the others, who wait for it there while it uses the communicator already. When all members are inside, nobody is to blame: the network between
//! them is. When they give different numbers of ranks, those that differ from the most are named; when some create it and the others wait for
//! those in a collective, the fewer of the two. When some cannot connect to the store at which the others meet, the fewer of the two are looking for
//! another one. A member that is dead, stopped, in its data loader or in input or output is that first.

use std::cmp::Ordering;

use super::{Case, Cause, Confidence, Finding, Number, Rule, Says, line, never_mistaken};
use crate::{
    graph::{Event, Suspect},
    stacks,
    text::{capital, ranks},
    verdict::Activity,
};
use xpu_timer_proto::v1::Presence;

/// Of more suspects nobody asks whether all of them are in the creation of a communicator.
const MOST: usize = 1024;

pub(super) const RULE: Rule = Rule { cause: Cause::CommInit, explain, rule_out: never_mistaken };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Some(found) = of_another_size(case, suspect).or_else(|| of_another_store(case)) {
        return Some(found);
    }
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
        return apart(case, events).or_else(|| ahead(case, events)).or_else(|| elsewhere(case, events));
    }
    let view = case.host(suspect)?;
    let none_yet = |view: &crate::world::RankView<'_>| view.flight.is_none_or(|flight| flight.communicators.is_empty());
    if case.world.views.iter().all(none_yet)
        && let Some(found) = super::missing_rank::apart(case, suspect)
    {
        return Some(found);
    }
    let event = case.main_event(suspect);
    // Asked of few only, because each asks about all members.
    let asks = case.does(view, Activity::CommInit) && case.graph.suspects.len() <= MOST;
    if let Some(found) = event.filter(|_| asks).and_then(|event| few_inside(case, event)) {
        return Some(found);
    }
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
    let what = if store {
        "not set the key that the others wait for in the store"
    } else if returned {
        "left the creation of a communicator that the others are still in"
    } else if content.presence == Presence::Unregistered {
        "not joined the communicator, nor made any device call"
    } else {
        "not joined the communicator"
    };
    // A process that computes and has no communicator at all has only just begun.
    let starts = content.host.moved.is_some_and(|moved| moved.any())
        && content.flight.is_none_or(|flight| flight.communicators.is_empty());
    let moves = |number: Number| match starts {
        true => number
            .word("; it moves, so it is probably still starting", "; they move, so they are probably still starting"),
        false => "",
    };
    let says = Says::rank(|number| format!("{} {what}{}{}", number.has(), case.stands(view, number), moves(number)));
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
    Some(Finding { culprits: vec![view], says, confidence, evidence })
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

/// Few ranks wait in a collective for the others, who by their stacks are all in the creation of a communicator, which those few left out.
fn few_inside(case: &Case<'_>, event: Event) -> Option<Finding> {
    let Event::Collective { comm, .. } = event else { return None };
    let inside = case.graph.waiters_of(event);
    let members = case.comms[comm].members.iter().map(|member| member.view);
    let outside: Vec<usize> = members.filter(|view| inside.binary_search(view).is_err()).collect();
    let creates = |view: &usize| case.does(*view, Activity::CommInit) && !case.view(*view).halted();
    if inside.is_empty() || inside.len() >= outside.len() || !outside.iter().all(creates) {
        return None;
    }
    let (few, most) = (case.world.ranks(inside.iter().copied()), case.world.ranks(outside.iter().copied()));
    let place = if inside.len() == 1 { case.place(inside[0]) } else { String::new() };
    let (have, wait) = if few.len() == 1 { ("has", "waits") } else { ("have", "wait") };
    let sentence = format!(
        "{} {have} not come to the creation of a communicator that {} are in, and {wait} in {}{place}.",
        capital(&ranks(&few)),
        ranks(&most),
        case.describe(event),
    );
    let mut evidence = vec![line(format!("{} are in the creation of a communicator", ranks(&most)), most)];
    for &view in inside.iter().chain(&outside).take(2) {
        evidence.extend(case.standing(view));
    }
    Some(Finding { culprits: inside.to_vec(), says: Says::Whole(sentence), confidence: Confidence::Medium, evidence })
}

/// The number of ranks with which a rank creates the communicator of a suspect, and that of most others, when they differ.
pub(super) fn other_size(case: &Case<'_>, suspect: &Suspect, view: usize) -> Option<(u32, u32)> {
    let events = match suspect {
        Suspect::Host { events, .. } => events.as_slice(),
        Suspect::Complete(event) => std::slice::from_ref(event),
        _ => return None,
    };
    events.iter().find_map(|event| {
        let Event::Init { comm } = *event else { return None };
        let comm = &case.comms[comm];
        let claim = |claimed: u32| comm.members.iter().filter(|member| member.claimed == claimed).count();
        let own = comm.member(view)?.claimed;
        // More ranks have come than this one says, however many say so.
        let too_few = comm.members.len() > own as usize && claim(comm.size) > 0;
        (own > 0 && own != comm.size && (too_few || claim(comm.size) > claim(own))).then_some((own, comm.size))
    })
}

/// Ranks that cannot connect to the store at which the others are: it has another address for them, or the network does not lead there.
fn of_another_store(case: &Case<'_>) -> Option<Finding> {
    let creates = |view: &usize| case.does(*view, Activity::CommInit);
    if case.world.views.len() > MOST || case.world.views.iter().any(|view| view.dead() || view.halted()) {
        return None;
    }
    let connects = |view: &usize| stacks::is_store_connect(&case.view(*view).host.doing.witness);
    let (outside, inside): (Vec<usize>, Vec<usize>) = (0..case.world.views.len()).filter(creates).partition(connects);
    if outside.is_empty() || inside.is_empty() {
        return None;
    }
    let (who, others) = (case.world.ranks(outside.iter().copied()), case.world.ranks(inside.iter().copied()));
    let place = if outside.len() == 1 { case.place(outside[0]) } else { String::new() };
    let sentence = format!(
        "{} cannot connect to the store at which {} {}{place}: compare {} MASTER_ADDR and MASTER_PORT, and look at the network between them.",
        capital(&ranks(&who)),
        ranks(&others),
        if others.len() == 1 { "is" } else { "are" },
        if who.len() == 1 { "its" } else { "their" },
    );
    let mut evidence = vec![
        line(format!("{} in the creation of a communicator", ranks(&others)), others),
        line(format!("{} at the connection to its store", ranks(&who)), who),
    ];
    for &view in outside.iter().take(2) {
        evidence.extend(case.standing(view));
    }
    let (confidence, culprits) = match outside.len().cmp(&inside.len()) {
        Ordering::Less => (Confidence::Medium, outside),
        Ordering::Equal => (Confidence::Low, outside),
        Ordering::Greater => (Confidence::Low, inside),
    };
    Some(Finding { culprits, says: Says::Whole(sentence), confidence, evidence })
}

/// A rank creates the communicator with another number of ranks than the others.
fn of_another_size(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let views: Vec<usize> = match suspect {
        Suspect::Host { view, .. } => vec![*view],
        Suspect::Complete(Event::Init { comm }) => case.comms[*comm].members.iter().map(|member| member.view).collect(),
        _ => return None,
    };
    let sizes: Vec<(usize, (u32, u32))> =
        views.into_iter().filter_map(|view| Some((view, other_size(case, suspect, view)?))).collect();
    let &(first, (own, right)) = sizes.first()?;
    let event = case.main_event(suspect)?;
    let culprits: Vec<usize> = sizes.iter().map(|(view, _)| *view).collect();
    let who = case.world.ranks(culprits.iter().copied());
    let verb = if who.len() == 1 { "creates" } else { "create" };
    let inside = case.world.ranks(case.graph.waiters_of(event).iter().copied().filter(|view| !culprits.contains(view)));
    let mut evidence = vec![line(
        format!("{} {verb} a communicator as one of {own} ranks, {} as one of {right}", ranks(&who), ranks(&inside)),
        who.clone(),
    )];
    for &view in culprits.iter().take(2) {
        evidence.extend(case.standing(view));
    }
    Some(Finding {
        says: Says::Whole(format!(
            "{} {verb} the communicator as one of {own} ranks, {} as one of {right}{}.",
            capital(&ranks(&who)),
            ranks(&inside),
            match (who.as_slice(), case.view(first).dead()) {
                ([rank], true) => format!("; rank {rank} {}", super::process_dead::how(case, first, Number::One)),
                ([rank], false) if !case.place(first).is_empty() =>
                    format!("; rank {rank} stands{}", case.place(first)),
                _ => String::new(),
            },
        )),
        // It is the majority of those who have come; who says as many as the job has may be right against it.
        confidence: if culprits.len() > inside.len() || own == case.world.size {
            Confidence::Medium
        } else {
            case.members_confidence(&[event])
        },
        culprits,
        evidence,
    })
}

/// Some ranks create a communicator, the others are in a collective and wait for them: fewer of them are wrong.
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
        .map(|(view, _)| view)
        .filter(|view| others.contains(view) && !inside.contains(view))
        .collect();
    // Where it is known who is missing in the creation, the rest of those who wait elsewhere wait for its members.
    let missing: Vec<usize> = match event {
        Event::Init { comm } => late.iter().copied().filter(|view| case.comms[comm].silent.contains(view)).collect(),
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
    for &view in culprits.iter().take(2) {
        evidence.extend(case.standing(view));
    }
    let confidence = if inside.len() == late.len() { Confidence::Low } else { Confidence::Medium };
    Some(Finding { culprits, says: Says::Whole(sentence), confidence, evidence })
}
