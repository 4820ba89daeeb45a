//! `missing_rank`: a rank has not entered the collective that its peers wait in.

use xpu_timer_proto::v1::{OpStatus, Presence};

use super::{
    collective::Collective,
    kernel_hang::in_open_group,
    mismatch::operation_key,
    p2p,
    wait_cycle::{self, PatternCheck},
};
use crate::{
    case::Case,
    explanation::{Absence, CollectiveFault, CycleFault, Explanation, PatternBreak},
    finding::{CollectiveFact, Exclusion, Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::{Event, Suspect},
    kernels::{FewerLaunches, fewer_launches},
    matching,
    stacks::Movement,
    verdict::{Activity, Cause, Confidence},
    world::Exit,
};

/// Larger communicators are not searched for an extra collective, because the search visits all
/// members for each suspect.
const MOST_MEMBERS: usize = 1024;

/// `missing_rank`: a rank has not entered the collective that its peers wait in.
///
/// Its sequence number in that communicator is lower than the one that its peers' devices have
/// started, and nothing shows that it waits for another rank. Or its number is not known, and all
/// other ranks are in the collective. No more specific cause explains what it does.
///
/// In the second form, a rank waits like the others and has run one collective fewer. All have
/// launched number N, the others are inside it, and this rank has completed it. An operation that
/// needs all ranks cannot complete on one of them, so the call of this rank returned without taking
/// part. The confidence is high if the clock or the time on the device proves it: the rank
/// completed before another rank of its node had entered, or in a fraction of the shortest time
/// that the same operation took before.
///
/// In the third form, a rank in a wait cycle left out a collective that it had always made at this
/// point.
///
/// These ranks are named with medium confidence:
///
/// - A rank that computes or sleeps at one place, or waits for a child process that may be at work.
///   This may be long and end by itself. Two samples cannot tell it from an endless loop.
/// - A rank that waits for data from a socket, or polls for something: the process that should have
///   answered may be the culprit. If another rank stands still, a rank that only polls is not
///   named, unless it is the only one and polls seldom, as a loop does that tries again after a
///   failure.
/// - The few ranks that have started an MPI collective and do not wait for it while most do: the
///   library runs the collective only inside the calls of its process.
/// - A rank whose record has not been written for a while and ends in a collective that most others
///   have completed: its process runs something else.
/// - A rank that called the collective in a group that it has not closed, because it stands still
///   elsewhere.
///
/// If no record shows which ranks wait, a rank that stands still elsewhere than most is named with
/// low confidence. So are the few ranks in a collective while most ranks are together at one other
/// place.
pub(super) const ABSENT: Rule = Rule { cause: Cause::MissingRank, explain, rule_out: all_entered };

/// `missing_rank`, from the other side: a few ranks are in a collective that no other rank enters.
///
/// The ranks inside are fewer than those that have not entered. Each of the latter ended in order
/// (it left with status 0, or it is shutting down), so they had completed their work. The few made
/// one collective too many: an epoch with one more batch, or a barrier that only one rank calls.
/// The confidence is medium, because the others may have ended too early for the same reason.
pub(super) const EXTRA_COLLECTIVE: Rule =
    Rule { cause: Cause::MissingRank, explain: extra_collective, rule_out: never_ruled_out };

/// `missing_rank`, in a wait cycle: one rank has gone on to another collective than the others, and
/// they wait for it in several communicators.
///
/// The ranks wait for each other, and every wait cycle passes through one and the same rank, and
/// through no other. That rank has not entered the collectives of at least two communicators in
/// which others wait for it: it left out a step, or ended its epoch early. If it had exchanged two
/// collectives, it would be missing in only one of them; that is `order_mismatch`. The confidence
/// is medium, because the past of the ranks does not show what was due.
pub(super) const OUT_OF_STEP: Rule =
    Rule { cause: Cause::MissingRank, explain: out_of_step, rule_out: never_ruled_out };

/// `missing_rank`, by numbers of launches: few ranks have launched a kernel less often than all
/// others, who have launched it equally often.
///
/// Either all members are stuck in launch n of another kernel that communicates, or no record shows
/// what the ranks are stuck in, and the stacks show that the others wait for their devices. The
/// confidence is medium if the name of the kernel is known to be that of a kernel that
/// communicates, else low.
pub(super) const FEWER_LAUNCHES: Rule =
    Rule { cause: Cause::MissingRank, explain: launched_less, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Some(collective) = Collective::of(case, suspect) {
        let found = stale_records(case, &collective).or_else(|| skipped(case, &collective));
        return found.or_else(|| not_waited_for(case, &collective));
    }
    match suspect {
        Suspect::Cycle(_) => match wait_cycle::check_pattern(case, suspect, &[PatternBreak::Collective]) {
            PatternCheck::Finding(found) => Some(found),
            PatternCheck::OtherBreak | PatternCheck::Kept => None,
        },
        Suspect::Device { rank_index, .. } => open_group(case, suspect, *rank_index),
        Suspect::Host { events, .. } if events.is_empty() && case.stack_waiters.is_empty() => None,
        Suspect::Host { rank_index, events, guess } => {
            let polls = || p2p::of_absent_peer(case, suspect).filter(|_| case.polls(*rank_index));
            let found = is_elsewhere(case, suspect).or_else(polls);
            found.or_else(|| absent(case, suspect, (*rank_index, events, *guess)))
        }
        Suspect::Complete(_) => None,
    }
}

/// A rank that has not entered what its peers wait in.
fn absent(case: &Case<'_>, suspect: &Suspect, (rank_index, events, guess): (usize, &[Event], bool)) -> Option<Finding> {
    let view = case.view(rank_index);
    let event = case.main_event(suspect);
    let runs = |moved: Movement| moved.cpu_share >= 0.8 && (moved.main_ran || case.does(rank_index, Activity::Running));
    let busy = view.host.moved.is_some_and(runs) && view.host.observed.activity != Activity::DeviceWait;
    let launched = match event {
        Some(Event::Collective { comm, seq }) => {
            case.comms[comm].member(rank_index).is_some_and(|member| member.launched >= seq)
        }
        _ => false,
    };
    let absence = match (guess, launched) {
        (true, _) => Absence::Guess,
        (false, true) if view.busy_in_nccl() => Absence::InCall,
        (false, true) => Absence::NotWaiting,
        (false, false) => Absence::NotEntered,
    };
    let confidence = match event {
        Some(_) if case.blocked(rank_index) && !guess => case.members_confidence(events),
        Some(_) => case.host_confidence(suspect),
        None => Confidence::Low,
    };
    let may_wait =
        case.does(rank_index, Activity::DeviceWait) || view.busy_in_nccl() || case.waits_for_peer(rank_index);
    let confidence = if may_wait { confidence.min(Confidence::Medium) } else { confidence };
    let mut evidence: Vec<_> = event.map(|event| Fact::Counters { rank_index, event }).into_iter().collect();
    evidence.push(RankFact::StuckHelper.of(rank_index));
    if case.polls(rank_index) {
        evidence.push(RankFact::Polls.of(rank_index));
    }
    evidence.push(Fact::Position(rank_index));
    let explanation = Explanation::Collective(CollectiveFault::Absent { rank_index, event, absence, busy });
    Some(Finding { culprits: vec![rank_index], explanation, confidence, evidence })
}

fn launched_less(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let (launches, event) = match suspect {
        Suspect::Complete(event) => {
            let (kernel, _) = case.kernel_of(*event)?;
            (fewer_launches(&case.world, &kernel.peers)?, Some(*event))
        }
        Suspect::Host { rank_index, events, .. } if events.is_empty() => {
            let mut ranks = case.stack_waiters.clone();
            ranks.push(*rank_index);
            let is_it = |launches: &FewerLaunches| launches.fewer.iter().all(|(index, _)| index == rank_index);
            (fewer_launches(&case.world, &ranks).filter(is_it)?, None)
        }
        _ => return None,
    };
    let culprits: Vec<usize> = launches.fewer.iter().map(|(index, _)| *index).collect();
    let mut evidence = vec![Fact::Explained];
    evidence.extend(event.map(Fact::Inside));
    evidence.extend(Fact::positions(&culprits));
    let confidence = if launches.communicates { Confidence::Medium } else { Confidence::Low };
    let explanation = Explanation::Collective(CollectiveFault::FewerLaunches(launches));
    Some(Finding { culprits, explanation, confidence, evidence })
}

/// A rank has called its collective in a group that it has not closed.
fn open_group(case: &Case<'_>, suspect: &Suspect, rank_index: usize) -> Option<Finding> {
    if !in_open_group(case, rank_index) {
        return None;
    }
    let event = case.main_event(suspect)?;
    let evidence = vec![Fact::Counters { rank_index, event }, Fact::Position(rank_index)];
    let explanation = Explanation::Collective(CollectiveFault::OpenGroup { rank_index, event });
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}

/// Few ranks are still in a collective that most have completed, by records that have not been
/// written for a while: their processes run something else.
fn stale_records(case: &Case<'_>, collective: &Collective<'_>) -> Option<Finding> {
    let (completed_by, inside) = (&collective.completed_by, &collective.inside);
    let is_stale =
        |rank_index: &usize| case.view(*rank_index).watcher_stale() && !case.does(*rank_index, Activity::DeviceWait);
    if inside.is_empty() || inside.len() >= completed_by.len() || !inside.iter().all(is_stale) {
        return None;
    }
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(inside));
    let (stale, completed_by) = (inside.clone(), completed_by.clone());
    let fault = CollectiveFault::StaleRecords { stale, completed_by, event: collective.event };
    let explanation = Explanation::Collective(fault);
    Some(Finding { culprits: inside.clone(), explanation, confidence: Confidence::Medium, evidence })
}

/// Few ranks have started a collective of a host library and do not wait for it as the others do,
/// so nothing runs it for them.
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
    let counters = |rank_index: &usize| Fact::Counters { rank_index: *rank_index, event: collective.event };
    let mut evidence: Vec<_> = away.iter().take(4).map(counters).collect();
    evidence.extend(Fact::positions(&away));
    let waiting = waiting.to_vec();
    let fault = CollectiveFault::NotWaitedFor { away: away.clone(), waiting, event: collective.event };
    let explanation = Explanation::Collective(fault);
    Some(Finding { culprits: away, explanation, confidence: Confidence::Medium, evidence })
}

/// A rank stands still elsewhere than most, and no record shows that any rank waits.
pub(super) fn is_elsewhere(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Host { rank_index, events, .. } = suspect else { return None };
    let waits = |rank_index: &usize| {
        matches!(case.view(*rank_index).host.observed.activity, Activity::DeviceWait | Activity::CommInit)
    };
    let most = &case.stack_waiters;
    if !events.is_empty() || most.is_empty() || most.contains(rank_index) || most.iter().any(waits) {
        return None;
    }
    let evidence = vec![Fact::Position(*rank_index), Fact::Explained];
    let fault = CollectiveFault::IsElsewhere { rank_index: *rank_index, most: most.clone() };
    let explanation = Explanation::Collective(fault);
    Some(Finding { culprits: vec![*rank_index], explanation, confidence: Confidence::Low, evidence })
}

/// Few members are in a collective that most others have not entered, and those others stand still
/// together at one place. Either they wait for something that the few have not done, or the few
/// made a call that was not due. A guess.
pub(crate) fn alone_in(case: &Case<'_>, event: Event, outside: &[usize]) -> Option<Finding> {
    let Event::Collective { comm, .. } = event else { return None };
    let inside = case.graph.waiters_of(event);
    let position = case.position(*outside.first()?);
    let together = |rank_index: &usize| case.view(*rank_index).host.frozen() && case.position(*rank_index) == position;
    let all_known = inside.len() + outside.len() == case.comms[comm].size as usize;
    if outside.len() <= inside.len()
        || inside.is_empty()
        || !all_known
        || position.is_unknown()
        || !outside.iter().all(together)
    {
        return None;
    }
    let evidence = vec![Fact::Explained, Fact::Position(inside[0])];
    let fault = CollectiveFault::AloneIn { few: inside.to_vec(), together: outside.to_vec(), event };
    let explanation = Explanation::Collective(fault);
    Some(Finding { culprits: inside.to_vec(), explanation, confidence: Confidence::Low, evidence })
}

fn skipped(case: &Case<'_>, collective: &Collective<'_>) -> Option<Finding> {
    let synchronizing = !collective.operations.is_empty()
        && collective.operations.iter().all(|(_, operation)| matching::synchronizes(operation.op()));
    let (completed_by, inside, event) = (&collective.completed_by, &collective.inside, collective.event);
    // If most ranks have completed the collective, the others are slow or stalled.
    if completed_by.is_empty() || inside.is_empty() || completed_by.len() > inside.len() || !synchronizing {
        return None;
    }
    let proven = completed_by.iter().all(|rank_index| proves_skip(case, collective, *rank_index));
    let mut evidence = vec![Fact::Explained];
    if proven {
        evidence.push(Fact::Collective(CollectiveFact::TookNoPart { completed_by: completed_by.clone() }));
    }
    evidence.extend(Fact::positions(completed_by));
    let confidence = if proven { case.members_confidence(&[event]) } else { Confidence::Medium };
    let fault = CollectiveFault::Skipped { completed_by: completed_by.clone(), inside: inside.clone(), event };
    let explanation = Explanation::Collective(fault);
    Some(Finding { culprits: completed_by.clone(), explanation, confidence, evidence })
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

fn all_entered(case: &Case<'_>, _: &[usize]) -> Option<Exclusion> {
    let complete = case.graph.suspects.iter().find_map(|suspect| match suspect {
        Suspect::Complete(event @ Event::Collective { .. }) => Some(*event),
        _ => None,
    })?;
    // A rank that is in another operation has not entered that of the others.
    let collective = Collective::of(case, &Suspect::Complete(complete))?;
    let agree = collective.dissent(case, operation_key).is_none();
    (agree && case.members_confidence(&[complete]) == Confidence::High).then_some(Exclusion::AllEntered(complete))
}

fn extra_collective(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    case.host_rank(suspect).filter(|rank_index| ended(case, *rank_index))?;
    let event = case.main_event(suspect)?;
    let Event::Collective { comm, .. } = event else { return None };
    let (inside, members) = (case.graph.waiters_of(event), &case.comms[comm].members);
    if inside.is_empty() || 2 * inside.len() >= members.len() || members.len() > MOST_MEMBERS {
        return None;
    }
    // Both lists are ascending.
    let outside = |rank_index: &usize| inside.binary_search(rank_index).is_err();
    let others: Vec<usize> = members.iter().map(|member| member.rank_index).filter(outside).collect();
    let all_known = members.len() == case.comms[comm].size as usize;
    if !all_known || !others.iter().all(|rank_index| ended(case, *rank_index)) {
        return None;
    }
    let mut evidence = vec![Fact::Explained];
    evidence.extend(Fact::positions(inside));
    let fault = CollectiveFault::OneTooMany { inside: inside.to_vec(), ended: others, event };
    let explanation = Explanation::Collective(fault);
    Some(Finding { culprits: inside.to_vec(), explanation, confidence: Confidence::Medium, evidence })
}

fn ended(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    match view.presence {
        Presence::Left => matches!(view.exit(), Exit::Unknown | Exit::Code(0)),
        _ => !view.dead() && case.does(rank_index, Activity::Teardown),
    }
}

fn out_of_step(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Cycle(events) = suspect else { return None };
    if !matches!(wait_cycle::check_pattern(case, suspect, &[]), PatternCheck::Kept) {
        return None;
    }
    let rank_index = wait_cycle::in_all_cycles(case, events)?;
    let own = *events.iter().find(|event| case.graph.waiters_of(**event).contains(&rank_index))?;
    let owed: Vec<Event> = events
        .iter()
        .copied()
        .filter(|event| wait_cycle::awaited_members(case, *event).contains(&rank_index))
        .collect();
    let mut comms: Vec<usize> = owed
        .iter()
        .filter_map(|event| match *event {
            Event::Collective { comm, .. } => Some(comm),
            _ => None,
        })
        .collect();
    comms.dedup();
    if comms.len() < 2 || !matches!(own, Event::Collective { .. }) {
        return None;
    }
    let mut evidence: Vec<_> = owed.iter().take(8).map(|event| Fact::Counters { rank_index, event: *event }).collect();
    evidence.push(Fact::Explained);
    evidence.push(Fact::Position(rank_index));
    let explanation = Explanation::Cycle(CycleFault::OutOfStep { rank_index, own, owed });
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}
