//! `process_dead`, `process_stopped` and `d_state`: others wait for a rank that cannot run.

use xpu_timer_proto::v1::Presence;

use super::{collective::Collective, comm_init, missing_rank};
use crate::{
    case::Case,
    explanation::{Explanation, HostState},
    finding::{Exclusion, Fact, Finding, RankFact, Rule},
    graph::{Event, Suspect},
    verdict::{Activity, Cause, Confidence},
    world::{Exit, RankView},
};

/// `process_dead`: others wait for a rank whose process is gone.
///
/// The process vanished without a `Goodbye`, left with one, or is a zombie. A collective, a
/// point-to-point operation or the creation of a communicator waits for the rank; or no rank waits
/// yet and it did not leave in order. Death comes before every other explanation of the same rank.
///
/// If several ranks are gone, those that SIGTERM ended from outside are not the culprits if others
/// ended by themselves: an agent ends the other ranks of a job that has lost one. Ranks that ended
/// with an error when another one was killed are not the culprits either: they may have noticed the
/// death, and the confidence is medium.
///
/// The confidence is also medium in these cases:
///
/// - The rank left in order right after it launched the collective itself. Its watcher ended with
///   it, so nothing shows whether its call took part.
/// - The rank left with success, and the waiting ranks are not a majority, or wait in a send or
///   receive, which involves only two ranks: they may have made one operation too many.
/// - The rank is a member of the communicator only by the layout of the other members, and another
///   rank is unknown.
/// - The rank completed the collective and was killed while others are still inside. A rank that
///   ended by itself there did not take part in the collective; that is `missing_rank`.
pub(super) const DEAD: Rule = Rule { cause: Cause::ProcessDead, explain: dead, rule_out: all_alive };

/// `process_stopped`: others wait for a rank whose process is stopped.
///
/// In the last sample, the state of the process is `T` (a signal such as SIGSTOP, or a job control
/// key) or `t` (a debugger holds it), or it is in the freezer of its control group (`F`), as in a
/// paused container. Newer kernels show the freezer as `D` in a function where a signal would wake
/// the thread. The process runs no code, neither its training loop nor the threads that move its
/// data, so it is the culprit wherever it is.
pub(super) const STOPPED: Rule = Rule { cause: Cause::ProcessStopped, explain: stopped, rule_out: none_stopped };

/// `d_state`: others wait for a rank whose main thread sleeps uninterruptibly in the kernel.
///
/// The main thread is in state `D` in both samples, in the same kernel function, and did not run in
/// between. The kernel waits for a disk, a network file system or a driver. No signal reaches the
/// process, not even SIGKILL. The rule comes before `storage_io`, which is the same wait where a
/// signal would end it.
pub(super) const D_STATE: Rule = Rule { cause: Cause::DState, explain: in_d_state, rule_out: none_in_d_state };

fn dead(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let has_other_size = |rank_index: usize| comm_init::other_size(case, suspect, rank_index).is_some();
    let dead = |rank_index: &usize| {
        case.view(*rank_index).dead() && !is_in_teardown(case, *rank_index) && !has_other_size(*rank_index)
    };
    let Some(rank_index) = case.host_rank(suspect).filter(dead) else { return killed_after(case, suspect) };
    let event = case.main_event(suspect);
    let mut evidence = vec![Fact::Explained];
    evidence.extend(event.map(|event| Fact::Counters { rank_index, event }));
    let mut confidence =
        if waiters_may_be_at_fault(case, rank_index, event) { Confidence::Medium } else { Confidence::High };
    if case.view(rank_index).presence == Presence::Left && had_launched(case, rank_index, event) {
        confidence = Confidence::Medium;
        evidence.push(RankFact::EndedAfterLaunch.of(rank_index));
    }
    if may_be_no_member(case, rank_index, event) {
        confidence = Confidence::Medium;
    }
    Some(Finding {
        culprits: vec![rank_index],
        explanation: Explanation::Host { rank_index, state: HostState::Ended },
        confidence,
        evidence,
    })
}

/// Whether the rank is a member of the communicator only by the layout of the others, while there
/// is an unknown rank. That rank may be the member in its place.
fn may_be_no_member(case: &Case<'_>, rank_index: usize, event: Option<Event>) -> bool {
    let Some(Event::Collective { comm, .. }) = event else { return false };
    let (comm, views) = (&case.comms[comm], &case.world.views);
    // All ranks are members of a communicator of the whole job.
    (comm.size as usize) < views.len() && comm.silent.contains(&rank_index) && views.iter().any(|view| view.unseen())
}

/// Ranks were killed after they completed the collective that the others are still in.
fn killed_after(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let collective = Collective::of(case, suspect)?;
    let killed = |rank_index: &usize| {
        case.view(*rank_index).presence == Presence::Dead && !missing_rank::proves_skip(case, &collective, *rank_index)
    };
    if collective.completed_by.is_empty() || !collective.completed_by.iter().all(killed) {
        return None;
    }
    Some(Finding {
        explanation: Explanation::GoneAfter { gone: collective.completed_by.clone(), event: collective.event },
        confidence: Confidence::Medium,
        evidence: vec![Fact::Explained],
        culprits: collective.completed_by,
    })
}

/// Whether the rank left with success and the ranks that wait for it may have made an operation too
/// many: as many ranks left with success, or may have left, as wait in the collective, or it is a
/// transfer between two ranks.
fn waiters_may_be_at_fault(case: &Case<'_>, rank_index: usize, event: Option<Event>) -> bool {
    let success = |rank_index: usize| {
        let view = case.view(rank_index);
        view.presence == Presence::Left && view.exit().succeeded()
    };
    let Some(event) = event.filter(|_| success(rank_index)) else { return false };
    let Event::Collective { comm, .. } = event else { return matches!(event, Event::PointToPoint { .. }) };
    let (comm, inside) = (&case.comms[comm], case.graph.waiters_of(event).len());
    // An unknown member may have left as well.
    let unseen = comm.silent.iter().filter(|rank_index| case.view(**rank_index).unseen()).take(inside).count();
    let left = comm.members.iter().filter(|member| success(member.rank_index)).take(inside).count();
    left + unseen + comm.unnamed as usize >= inside
}

/// Whether the process of a rank that has left still exists and is shutting down. That is
/// `teardown`.
fn is_in_teardown(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    view.presence == Presence::Left && view.host.stack && !view.host.gone() && case.does(rank_index, Activity::Teardown)
}

/// Whether a rank had launched the collective that the others wait in.
fn had_launched(case: &Case<'_>, rank_index: usize, event: Option<Event>) -> bool {
    let Some(Event::Collective { comm, seq }) = event else { return false };
    case.comms[comm].member(rank_index).is_some_and(|member| member.launched >= seq)
}

/// Whether an agent ended a dead rank in an orderly way, by SIGTERM.
pub(crate) fn ended_by_agent(case: &Case<'_>, rank_index: usize) -> bool {
    case.view(rank_index).exit() == Exit::Signal("SIGTERM")
}

/// Whether a signal other than SIGTERM ended a dead rank.
pub(crate) fn ended_by_signal(case: &Case<'_>, rank_index: usize) -> bool {
    matches!(case.view(rank_index).exit(), Exit::Signal(_)) && !ended_by_agent(case, rank_index)
}

fn all_alive(case: &Case<'_>, _: &[usize]) -> Option<Exclusion> {
    let views = &case.world.views;
    let alive = views.iter().all(|view| view.presence == Presence::Present && !view.dead());
    (alive && !views.is_empty()).then_some(Exclusion::AllAlive)
}

fn stopped(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.suspect_rank(suspect).filter(|rank_index| case.view(*rank_index).host.stopped())?;
    let mut evidence = vec![Fact::Explained];
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let explanation = Explanation::Host { rank_index, state: HostState::Stopped };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::High, evidence })
}

fn none_stopped(case: &Case<'_>, _: &[usize]) -> Option<Exclusion> {
    let views = &case.world.views;
    let runs = |view: &RankView<'_>| view.dead() || !view.host.state.is_empty() && !view.host.stopped();
    (!views.is_empty() && views.iter().all(runs)).then_some(Exclusion::NoProcessStopped)
}

fn in_d_state(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.suspect_rank(suspect)?;
    let sleep = case.view(rank_index).host.d_sleep.as_ref().filter(|sleep| sleep.main)?;
    let mut evidence = vec![Fact::Explained];
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let state = HostState::SleepsUninterruptibly { wchan: sleep.wchan.clone() };
    let explanation = Explanation::Host { rank_index, state };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::High, evidence })
}

fn none_in_d_state(case: &Case<'_>, culprits: &[usize]) -> Option<Exclusion> {
    let is_awake = |rank_index: &usize| {
        let host = &case.view(*rank_index).host;
        !host.state.is_empty() && host.moved.is_some() && host.d_sleep.is_none()
    };
    (!culprits.is_empty() && culprits.iter().all(is_awake)).then_some(Exclusion::NoUninterruptibleSleep)
}
