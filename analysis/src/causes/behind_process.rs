//! A rank waits for a process that is not a rank, and that process holds up the job.

use xpu_timer_proto::server::AwaitedKind;

use crate::{
    case::Case,
    explanation::{Explanation, ProcessFault},
    finding::{Fact, Finding, Rule, never_ruled_out},
    graph::{Event, MutualFault, Suspect, ToCome},
    stacks::{ProcessState, StuckHelper},
    verdict::{Activity, Cause, Confidence},
};

/// `process_dead`: ranks wait for a process that is not a rank, directly or through others, and it
/// has ended.
pub(super) const DEAD: Rule = rule(Cause::ProcessDead, |case, suspect| explain(case, suspect, Cause::ProcessDead));

/// `process_stopped`: like [`DEAD`], of a process that a signal, a debugger or the freezer has
/// stopped.
pub(super) const STOPPED: Rule =
    rule(Cause::ProcessStopped, |case, suspect| explain(case, suspect, Cause::ProcessStopped));

/// `d_state`: like [`DEAD`], of a process whose main thread sleeps uninterruptibly.
pub(super) const D_STATE: Rule = rule(Cause::DState, |case, suspect| explain(case, suspect, Cause::DState));

/// `gil_deadlock`: like [`DEAD`], of a process in which a blocked thread holds the GIL.
pub(super) const GIL_DEADLOCK: Rule =
    rule(Cause::GilDeadlock, |case, suspect| explain(case, suspect, Cause::GilDeadlock));

/// `storage_io`: like [`DEAD`], of a process whose main thread is in a read, write or sync that
/// does not progress, or waits for a lock on a file. The confidence is at most medium.
pub(super) const STORAGE_IO: Rule = rule(Cause::StorageIo, |case, suspect| explain(case, suspect, Cause::StorageIo));

/// `long_step`: like [`DEAD`], of a process that makes progress.
pub(super) const LONG_STEP: Rule = rule(Cause::LongStep, |case, suspect| explain(case, suspect, Cause::LongStep));

/// `host_lock`: like [`DEAD`], of a process whose main thread waits for a lock, or in which the
/// thread of a request waits for an object to which nobody else refers. The confidence is at most
/// medium.
pub(super) const HOST_LOCK: Rule = rule(Cause::HostLock, |case, suspect| explain(case, suspect, Cause::HostLock));

/// `missing_rank`: like [`DEAD`], of a process that is at another place: it sleeps, computes, or
/// waits for something unknown. The confidence is at most medium.
///
/// Without a rank that waits in an operation, a process counts only if it can never answer; see
/// [`ProcessWait::proves_hang`](crate::graph::ProcessWait::proves_hang). Else it may be a server at
/// rest.
pub(super) const ELSEWHERE: Rule = rule(Cause::MissingRank, |case, suspect| explain(case, suspect, Cause::MissingRank));

/// `missing_rank`: ranks of a silent job wait for messages of each other, and nothing outside wakes
/// any of them. The confidence is medium.
pub(super) const RANK_CYCLE: Rule = rule(Cause::MissingRank, rank_cycle);

fn rank_cycle(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect).filter(|_| case.graph.events.is_empty())?;
    let cycle = case.graph.rank_cycles.iter().find(|cycle| cycle.contains(&rank_index))?;
    Some(Finding {
        culprits: cycle.clone(),
        explanation: Explanation::HoldEachOther(cycle.clone()),
        confidence: Confidence::Medium,
        evidence: std::iter::once(Fact::Explained).chain(cycle.iter().map(|index| Fact::Position(*index))).collect(),
    })
}

const fn rule(cause: Cause, explain: fn(&Case<'_>, &Suspect) -> Option<Finding>) -> Rule {
    Rule { cause, explain, rule_out: never_ruled_out }
}

fn cause(state: &ProcessState) -> Cause {
    match state {
        ProcessState::Ended => Cause::ProcessDead,
        ProcessState::Stopped => Cause::ProcessStopped,
        ProcessState::SleepsUninterruptibly { .. } => Cause::DState,
        ProcessState::DeadlockedOnGil(_) => Cause::GilDeadlock,
        ProcessState::MakesProgress => Cause::LongStep,
        ProcessState::LostRequest { .. } | ProcessState::WaitsForLock => Cause::HostLock,
        ProcessState::StuckInIo => Cause::StorageIo,
        ProcessState::Elsewhere => Cause::MissingRank,
    }
}

fn explain(case: &Case<'_>, suspect: &Suspect, wanted: Cause) -> Option<Finding> {
    let rank_index = case.host_rank(suspect)?;
    if case.view(rank_index).unseen() {
        return not_yet_a_rank(case, suspect, rank_index, wanted);
    }
    let wait = case.graph.process_wait(rank_index)?;
    let moved = case.view(rank_index).host.moved.is_some_and(|moved| moved.own_frame);
    let hard = wait.state.cannot_continue();
    if moved || case.graph.events.is_empty() && !wait.proves_hang() {
        return None;
    }
    let state = wait.state.clone();
    // The activity of a rank that waits for its own process says more than the activity of that
    // process. The exceptions: that process cannot run, or the rank waits for its end.
    let is_in_chain = |pid: i32| wait.chain.iter().any(|index| case.world.processes[*index].host.pid == pid);
    let is_other = |helper: &StuckHelper| helper.is_stuck() && !is_in_chain(helper.pid);
    let other_is_stuck = || case.stuck_helper(rank_index).is_some_and(|helper| is_other(&helper));
    let is_mutual = wait.mutual.is_some() && !other_is_stuck();
    let waits_for_end = case.awaited(rank_index).is_some_and(|awaited| awaited.kind() == AwaitedKind::Child);
    // In a silent job, no rule says more about a rank that only reads.
    let is_silent = case.graph.events.is_empty()
        && !case.does(rank_index, Activity::DataLoader)
        && !case.does(rank_index, Activity::Lock);
    let says_more = if waits_for_end || is_silent { state.is_stuck() } else { hard };
    let is_explained_by_rank = wait.is_own && !is_mutual && (!says_more || matches!(state, ProcessState::Ended));
    // A rank that waits for the end of a process which needs the rank, or that does not receive
    // what the process sends, is the cause, whatever that process is in. So is a process that keeps
    // a lock.
    let is_named = wait
        .mutual
        .as_ref()
        .is_some_and(|mutual| matches!(mutual.fault, MutualFault::LeavesUnread | MutualFault::KeepsLock { .. }));
    let found = if is_mutual && (waits_for_end || is_named) { Cause::MissingRank } else { cause(&state) };
    if found != wanted || is_explained_by_rank {
        return None;
    }
    let confidence = match suspect {
        Suspect::Host { events, guess: false, .. } if hard && wait.is_certain && !events.is_empty() => {
            case.members_confidence(events)
        }
        _ => Confidence::Medium,
    };
    let mut evidence = vec![Fact::Explained];
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index, event }));
    evidence.push(Fact::Position(rank_index));
    let (end, before) = wait.chain.split_last()?;
    let event = case.main_event(suspect);
    let mutual = wait.mutual.clone();
    let is_rank = mutual.as_ref().map_or(wait.is_own, |mutual| mutual.rank);
    let fault =
        ProcessFault { rank_index, before: before.to_vec(), end: *end, state, mutual, is_to_come: false, event };
    Some(Finding {
        culprits: if is_rank { vec![rank_index] } else { Vec::new() },
        explanation: Explanation::Process(Box::new(fault)),
        confidence,
        evidence,
    })
}

/// A missing rank, for which others wait in the creation of a communicator: a process with the same
/// parent as the other ranks is not yet a rank, or that parent cannot start it.
fn not_yet_a_rank(case: &Case<'_>, suspect: &Suspect, rank_index: usize, wanted: Cause) -> Option<Finding> {
    let event = case.main_event(suspect).filter(|event| matches!(event, Event::Init { .. } | Event::Split { .. }))?;
    let ToCome { process: end, state, is_that_rank, .. } = case.graph.to_come(rank_index)?;
    if cause(state) != wanted {
        return None;
    }
    let fault = ProcessFault {
        rank_index,
        before: Vec::new(),
        end: *end,
        state: state.clone(),
        mutual: None,
        is_to_come: true,
        event: Some(event),
    };
    Some(Finding {
        culprits: is_that_rank.then_some(rank_index).into_iter().collect(),
        explanation: Explanation::Process(Box::new(fault)),
        confidence: Confidence::Medium,
        evidence: vec![Fact::Explained],
    })
}
