//! `comm_init`: a communicator is being created, and not all of its ranks take part.
//!
//! Ranks are inside the call that creates or splits a communicator, or, by their stacks, in the
//! store behind it. A member has not made that call. Or its call returned without the others: they
//! still wait for it there, and it already uses the communicator.
//!
//! - If all members are inside, no rank is the culprit, but the network between them.
//! - If they pass different numbers of ranks, the ranks that differ from the majority are the
//!   culprits.
//! - If some create the communicator and the others wait for them in a collective, the smaller
//!   group is the culprit.
//! - If some cannot connect to the store at which the others meet, the smaller group probably uses
//!   the wrong address.
//!
//! If a member is dead, stopped, in its data loader or in I/O, that cause comes first.

use std::cmp::Ordering;

use xpu_timer_proto::v1::Presence;

use super::missing_rank;
use crate::{
    case::Case,
    explanation::{CreationFault, Explanation, MissedStep, OtherSize, SplitCreation},
    finding::{Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::{Event, Suspect},
    stacks,
    verdict::{Activity, Cause, Confidence},
    world::RankView,
};

/// In larger jobs, and with more suspects, the checks that visit all ranks are skipped.
const MOST: usize = 1024;

pub(super) const RULE: Rule = Rule { cause: Cause::CommInit, explain, rule_out: never_ruled_out };

/// `missing_rank`, in PyTorch's store: ranks wait for a key, and another rank has not set it.
///
/// All ranks that wait are in a call of the store, after they have created a communicator and
/// outside the creation of another one. In a creation, it is `comm_init`. The key may name the rank
/// that has to set it. The confidence is medium, because a program may use its store in any way.
pub(super) const STORE_KEY: Rule = Rule { cause: Cause::MissingRank, explain: store_key, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Some(found) = other_size_passed(case, suspect).or_else(|| store_unreachable(case)) {
        return Some(found);
    }
    match suspect {
        Suspect::Complete(event @ (Event::Init { .. } | Event::Split { .. })) => Some(all_inside(case, *event)),
        Suspect::Cycle(events) => different_ids(case, events)
            .or_else(|| returned_alone(case, events))
            .or_else(|| wait_for_each_other(case, events)),
        Suspect::Host { rank_index, .. } => before_communicators(case, suspect)
            .or_else(|| few_inside(case, suspect, *rank_index, false))
            .or_else(|| missing_in_creation(case, suspect, *rank_index)),
        _ => None,
    }
}

/// A rank that is at another place than the others before any rank has a communicator.
fn before_communicators(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    case.world.views.iter().all(has_no_communicator).then(|| missing_rank::is_elsewhere(case, suspect))?
}

fn has_no_communicator(view: &RankView<'_>) -> bool {
    view.flight.is_none_or(|flight| flight.communicators.is_empty())
}

/// A rank that is not in the creation or the split in which others are, by their records or by
/// their stacks.
fn missing_in_creation(case: &Case<'_>, suspect: &Suspect, rank_index: usize) -> Option<Finding> {
    let event = case.main_event(suspect);
    let creates = |rank_index: &usize| case.does(*rank_index, Activity::CommInit);
    let by_stacks = event.is_none() && !case.stack_waiters.is_empty() && case.stack_waiters.iter().all(creates);
    if !by_stacks && !matches!(event, Some(Event::Init { .. } | Event::Split { .. })) {
        return None;
    }
    let view = case.view(rank_index);
    let returned = matches!(event, Some(Event::Init { comm }) if case.comms[comm].member(rank_index).is_some());
    let in_store = |rank_index: &usize| case.view(*rank_index).host.observed.witness.contains("Store::");
    let missed = if by_stacks && case.stack_waiters.iter().all(in_store) {
        MissedStep::Key
    } else if returned {
        MissedStep::Left
    } else if view.presence == Presence::Unregistered {
        MissedStep::JoinAndDevice
    } else {
        MissedStep::Join
    };
    // A process that computes and has no communicator at all has only just started.
    let still_starting = view.host.moved.is_some_and(|moved| moved.is_progress()) && has_no_communicator(view);
    let confidence = match () {
        () if still_starting => Confidence::Low,
        () if returned || by_stacks => Confidence::Medium,
        () => case.host_confidence(suspect),
    };
    let mut evidence: Vec<_> = event.map(|event| RankFact::NotInCreation(event).of(rank_index)).into_iter().collect();
    evidence.push(Fact::Position(rank_index));
    let fault = CreationFault::Missing { rank_index, missed, still_starting };
    let explanation = Explanation::Creation(fault);
    Some(Finding { culprits: vec![rank_index], explanation, confidence, evidence })
}

/// All known members are inside the creation or the split.
fn all_inside(case: &Case<'_>, event: Event) -> Finding {
    let unnamed = match event {
        Event::Init { comm } | Event::Split { comm } => case.comms[comm].unnamed,
        _ => 0,
    };
    Finding {
        culprits: Vec::new(),
        explanation: Explanation::Creation(CreationFault::AllInside { event, unnamed }),
        confidence: if unnamed > 0 { Confidence::Low } else { Confidence::Medium },
        evidence: vec![Fact::Inside(event)],
    }
}

/// Few ranks wait in a collective for the others. By their stacks, the others are all in the
/// creation of a communicator, which the few have left out. Or, with `in_store`, they all wait in
/// the store for something else.
pub(super) fn few_inside(case: &Case<'_>, suspect: &Suspect, rank_index: usize, in_store: bool) -> Option<Finding> {
    if !case.does(rank_index, Activity::CommInit) || case.graph.suspects.len() > MOST {
        return None;
    }
    let event @ Event::Collective { comm, .. } = case.main_event(suspect)? else { return None };
    let inside = case.graph.waiters_of(event);
    let members = case.comms[comm].members.iter().map(|member| member.rank_index);
    let outside: Vec<usize> = members.filter(|rank_index| inside.binary_search(rank_index).is_err()).collect();
    let creates = |rank_index: &usize| case.does(*rank_index, Activity::CommInit) && !case.view(*rank_index).halted();
    if inside.is_empty() || inside.len() >= outside.len() || !outside.iter().all(creates) {
        return None;
    }
    if outside.iter().all(|rank_index| case.uses_store(*rank_index)) != in_store {
        return None;
    }
    let both: Vec<usize> = inside.iter().chain(&outside).copied().collect();
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&both));
    let fault = CreationFault::FewElsewhere { few: inside.to_vec(), creating: outside, event };
    Some(Finding {
        culprits: inside.to_vec(),
        explanation: Explanation::Creation(fault),
        confidence: Confidence::Medium,
        evidence,
    })
}

/// The number of ranks that a rank passes to the creation of a suspect's communicator, and the
/// number that most others pass, if the two differ.
pub(crate) fn other_size(case: &Case<'_>, suspect: &Suspect, rank_index: usize) -> Option<(u32, u32)> {
    let events = match suspect {
        Suspect::Host { events, .. } => events.as_slice(),
        Suspect::Complete(event) => std::slice::from_ref(event),
        _ => return None,
    };
    events.iter().find_map(|event| {
        let Event::Init { comm } = *event else { return None };
        let comm = &case.comms[comm];
        let claim =
            |claimed_size: u32| comm.members.iter().filter(|member| member.claimed_size == claimed_size).count();
        let own = comm.member(rank_index)?.claimed_size;
        // More ranks have come than this rank expects, whatever number the majority passes.
        let too_few = comm.members.len() > own as usize && claim(comm.size) > 0;
        (own > 0 && own != comm.size && (too_few || claim(comm.size) > claim(own))).then_some((own, comm.size))
    })
}

/// Ranks create the communicator with another number of ranks than the others.
fn other_size_passed(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let members: Vec<usize> = match suspect {
        Suspect::Host { rank_index, .. } => vec![*rank_index],
        Suspect::Complete(Event::Init { comm }) => {
            case.comms[*comm].members.iter().map(|member| member.rank_index).collect()
        }
        _ => return None,
    };
    let size_of = |rank_index: usize| Some((rank_index, other_size(case, suspect, rank_index)?));
    let sizes: Vec<(usize, (u32, u32))> = members.into_iter().filter_map(size_of).collect();
    let &(_, (claimed, size)) = sizes.first()?;
    let event = case.main_event(suspect)?;
    let culprits: Vec<usize> = sizes.iter().map(|(rank_index, _)| *rank_index).collect();
    let inside = case.graph.waiters_of(event).iter().copied();
    let others: Vec<usize> = inside.filter(|rank_index| !culprits.contains(rank_index)).collect();
    let (is_majority, passed) =
        (culprits.len() > others.len(), OtherSize { culprits: culprits.clone(), claimed, others, size });
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&culprits));
    // The majority counts only ranks that have come. A rank that passes the world size may be
    // right against it.
    let confidence =
        if is_majority || claimed == case.world.size { Confidence::Medium } else { case.members_confidence(&[event]) };
    let explanation = Explanation::Creation(CreationFault::OtherSize(passed));
    Some(Finding { explanation, confidence, culprits, evidence })
}

/// Ranks cannot connect to the store at which the others are: they use another address, or the
/// network does not lead there.
fn store_unreachable(case: &Case<'_>) -> Option<Finding> {
    let creates = |rank_index: &usize| case.does(*rank_index, Activity::CommInit);
    if case.world.views.len() > MOST || case.world.views.iter().any(|view| view.dead() || view.halted()) {
        return None;
    }
    let connects = |rank_index: &usize| stacks::is_store_connect(&case.view(*rank_index).host.observed.witness);
    let (outside, inside): (Vec<usize>, Vec<usize>) = (0..case.world.views.len()).filter(creates).partition(connects);
    if outside.is_empty() || inside.is_empty() {
        return None;
    }
    let fault = CreationFault::NoStore { outside: outside.clone(), inside: inside.clone() };
    let explanation = Explanation::Creation(fault);
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&outside));
    let (confidence, culprits) = match outside.len().cmp(&inside.len()) {
        Ordering::Less => (Confidence::Medium, outside),
        Ordering::Equal => (Confidence::Low, outside),
        Ordering::Greater => (Confidence::Low, inside),
    };
    Some(Finding { culprits, explanation, confidence, evidence })
}

/// Ranks create a communicator of the same size with different unique ids, so no such communicator
/// ever completes.
fn different_ids(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
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
    let mut evidence: Vec<_> = events.iter().map(|event| Fact::Inside(*event)).collect();
    evidence.extend(Fact::positions(&culprits));
    let confidence = if certain { Confidence::Medium } else { Confidence::Low };
    let fault = CreationFault::DifferentIds { size: first, creations: events.to_vec() };
    let explanation = Explanation::Creation(fault);
    Some(Finding { culprits, explanation, confidence, evidence })
}

/// Ranks that already use the communicator wait for ranks that are still in its creation, and these
/// wait for them: the creation returned on the former without the latter.
fn returned_alone(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let (creation, comm) = events.iter().find_map(|event| match event {
        Event::Init { comm } => Some((*event, *comm)),
        _ => None,
    })?;
    let of_comm = |event: &&Event| {
        matches!(event, Event::Collective { comm: other, .. } | Event::PointToPoint { comm: other, .. }
            if *other == comm)
    };
    let used = *events.iter().find(of_comm)?;
    let members = case.comms[comm].members.iter();
    let returned: Vec<usize> = members.filter(|member| !member.initializing).map(|member| member.rank_index).collect();
    if returned.is_empty() {
        return None;
    }
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&returned));
    let fault = CreationFault::CreatedAlone { returned: returned.clone(), creation, used };
    Some(Finding {
        explanation: Explanation::Creation(fault),
        confidence: case.members_confidence(&[creation]),
        culprits: returned,
        evidence,
    })
}

/// Some ranks create a communicator, and the others are in a collective and wait for them. The
/// smaller group is the culprit.
fn wait_for_each_other(case: &Case<'_>, events: &[Event]) -> Option<Finding> {
    let is_creation = |event: &&Event| matches!(event, Event::Init { .. } | Event::Split { .. });
    let creation = *events.iter().find(is_creation)?;
    let used = *events.iter().find(|event| matches!(event, Event::Collective { .. } | Event::PointToPoint { .. }))?;
    let creating = case.graph.waiters_of(creation);
    let mut absent: Vec<usize> = events
        .iter()
        .filter(|event| !is_creation(event))
        .flat_map(|event| case.graph.waiters_of(*event))
        .copied()
        .filter(|rank_index| !creating.contains(rank_index))
        .collect();
    absent.sort_unstable();
    absent.dedup();
    // If it is known who is missing in the creation, the other ranks in collectives only wait for
    // its members.
    if let Event::Init { comm } = creation {
        let missing = absent.iter().copied().filter(|rank_index| case.comms[comm].silent.contains(rank_index));
        let missing: Vec<usize> = missing.collect();
        absent = if missing.is_empty() { absent } else { missing };
    }
    if creating.is_empty() || absent.is_empty() {
        return None;
    }
    let blames_creating = creating.len() < absent.len();
    let culprits = if blames_creating { creating.to_vec() } else { absent.clone() };
    let confidence = if creating.len() == absent.len() { Confidence::Low } else { Confidence::Medium };
    let split = SplitCreation { creating: creating.to_vec(), absent, creation, used };
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(&culprits));
    let explanation = Explanation::Creation(CreationFault::Split { split, blames_creating });
    Some(Finding { culprits, explanation, confidence, evidence })
}

fn store_key(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Host { rank_index, events, .. } = suspect else { return None };
    if !events.is_empty() {
        return few_inside(case, suspect, *rank_index, true);
    }
    if case.stack_waiters.is_empty() || !case.stack_waiters.iter().all(|waiter| case.uses_store(*waiter)) {
        return None;
    }
    let fault = CreationFault::Missing { rank_index: *rank_index, missed: MissedStep::Key, still_starting: false };
    Some(Finding {
        culprits: vec![*rank_index],
        explanation: Explanation::Creation(fault),
        confidence: Confidence::Medium,
        evidence: vec![Fact::Position(*rank_index)],
    })
}
