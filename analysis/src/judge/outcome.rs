//! The conclusion of the judge before it becomes a verdict: also if no rule explains the incident.
//! The facts that several steps of the judge need, and the evidence that the job hangs.

use std::collections::BTreeSet;

use xpu_timer_proto::{
    server::AwaitedKind,
    v1::{OpKind, Presence, TriggerKind},
};

use crate::{
    case::Case,
    finding::{Conclusion, Finding, HealthyReason, KnownFacts},
    graph::{ProcessWait, Suspect},
    stacks::{self, Host, Movement, StuckHelper},
    verdict::{Activity, Cause, Confidence, HangEvidence},
    world::{RankView, is_collective},
};

/// The conclusion, before it becomes a [`Verdict`](crate::verdict::Verdict).
pub(super) struct Outcome {
    pub cause: Cause,
    pub culprits: Vec<usize>,
    pub confidence: Confidence,
    pub conclusion: Conclusion,
    /// The suspect of the cause for which most ranks wait.
    pub main: Option<Suspect>,
}

/// The outcome for a job that does not hang.
pub(super) fn not_a_hang(why: HealthyReason, confidence: Confidence) -> Outcome {
    let conclusion = Conclusion::NoHang(why);
    Outcome { cause: Cause::NotAHang, culprits: Vec::new(), confidence, conclusion, main: None }
}

fn unknown(conclusion: Conclusion) -> Outcome {
    Outcome { cause: Cause::Unknown, culprits: Vec::new(), confidence: Confidence::Low, conclusion, main: None }
}

/// The outcome if no rule explains the incident: what is known.
pub(super) fn unexplained(case: &Case<'_>) -> Outcome {
    let views = &case.world.views;
    let kind = case.evidence.trigger.as_ref().map_or(TriggerKind::Unspecified, |trigger| trigger.kind());
    let stacks = views.iter().filter(|view| view.host.stack).count();
    let nothing_pending = case.graph.events.is_empty();
    if !views.is_empty() && nothing_pending && stacks == views.len() {
        // A thread may wait for its device in a busy loop of the driver, which is not progress.
        let quiet = matches!(kind, TriggerKind::Idle | TriggerKind::Heartbeat);
        let spins = |view: &RankView<'_>| quiet && view.host.observed.activity == Activity::DeviceWait;
        let progresses = |view: &RankView<'_>| {
            view.host
                .moved
                .is_some_and(|moved| if spins(view) { moved.own_frame || moved.io } else { moved.is_progress() })
        };
        if views.iter().all(progresses) {
            return not_a_hang(HealthyReason::EveryRankMoves, Confidence::Medium);
        }
        if kind == TriggerKind::Manual {
            return not_a_hang(HealthyReason::NothingPending, Confidence::Low);
        }
    }
    let done: Vec<usize> = (0..views.len()).filter(|rank_index| ended_in_order(case, *rank_index)).collect();
    let comes = |view: &RankView<'_>| !view.halted() && view.host.observed.activity == Activity::CommInit;
    if !done.is_empty() && nothing_pending && !views.iter().any(|view| view.unseen() || comes(view)) {
        return not_a_hang(HealthyReason::Left(done), Confidence::Medium);
    }
    if nothing_pending && is_idle(case) {
        return unknown(Conclusion::MayBeIdle { together: all_at_one_place(case) });
    }
    let unseen: Vec<usize> = (0..views.len()).filter(|rank_index| views[*rank_index].unseen()).collect();
    let busiest = || case.graph.events.iter().copied().max_by_key(|event| case.graph.waiters_of(*event).len());
    let known = match (views.len(), nothing_pending) {
        (0, _) => KnownFacts::NoRank,
        (_, true) if stacks == 0 => KnownFacts::NoStack,
        (_, true) if all_at_one_place(case) => KnownFacts::Together,
        (_, true) => KnownFacts::Stacks(stacks),
        (_, false) => KnownFacts::Pending { busiest: busiest(), unseen },
    };
    unknown(Conclusion::Unexplained(known))
}

/// Whether all ranks of a job of several are at one known place.
fn all_at_one_place(case: &Case<'_>) -> bool {
    let all = case.world.views.len();
    all > 1
        && !case.position(0).is_unknown()
        && (1..all).all(|rank_index| case.position(rank_index) == case.position(0))
}

/// Whether a rank left in order, with or without a `Goodbye`. A rank that ended with an error of
/// its own did not.
pub(super) fn ended_in_order(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    match view.presence {
        Presence::Left => !view.exit().failed(),
        Presence::Dead => view.exit().succeeded(),
        _ => false,
    }
}

/// A job that has worked and whose ranks all do nothing now. A job that has not started yet waits
/// for something.
pub(super) fn is_idle(case: &Case<'_>) -> bool {
    let views = &case.world.views;
    let worked = views.iter().any(|view| view.any_operation(is_collective));
    let rests = |rank_index: usize| case.is_idle(rank_index) || is_served(case, rank_index);
    worked && (0..views.len()).all(|rank_index| views[rank_index].host.stack && rests(rank_index))
}

/// A rank waits for a process that may be at rest itself: a server waits like this for the next
/// request. Of an unknown process, nothing else is known, unless the rank has a stuck helper.
pub(super) fn is_served(case: &Case<'_>, rank_index: usize) -> bool {
    let is_helped = || case.stuck_helper(rank_index).is_some_and(|helper| helper.is_stuck());
    case.graph.is_at_rest(rank_index)
        || case.graph.waits_for_unknown(rank_index) && !is_helped()
        || case.graph.process_wait(rank_index).is_some_and(|wait| !wait.proves_hang())
}

/// Ranks inside an operation that needs others.
pub(super) fn waiting(case: &Case<'_>) -> BTreeSet<usize> {
    let pends = |rank_index: usize| {
        case.view(rank_index)
            .pending()
            .any(|operation| matches!(operation.kind(), OpKind::Collective | OpKind::HostCall))
            || !case.graph.events.is_empty() && case.does(rank_index, Activity::DeviceWait)
    };
    let mut waiting: BTreeSet<usize> = (0..case.world.views.len()).filter(|rank_index| pends(*rank_index)).collect();
    waiting.extend(case.graph.waiters.iter().flatten());
    waiting.extend(&case.stack_waiters);
    waiting.extend(case.graph.resource_waits.iter().map(|wait| wait.waiter));
    waiting.extend(case.graph.process_waits.iter().map(|wait| wait.waiter));
    waiting.retain(|rank_index| !case.view(*rank_index).dead());
    waiting
}

/// The evidence that the job hangs. `XPU_TIMER_HANG_KILL` ends ranks and `XPU_TIMER_COMMON_HANG`
/// rises only on a verdict with such evidence. The cause and its confidence alone are not enough.
///
/// `strength` is the confidence by the rules alone, and `victims` the number of ranks that wait for
/// the culprits.
pub(super) fn hang_evidence(case: &Case<'_>, outcome: &Outcome, strength: Confidence, victims: usize) -> HangEvidence {
    let (cause, culprits) = (outcome.cause, &outcome.culprits);
    let is_progress = matches!(cause, Cause::NotAHang | Cause::LongStep | Cause::Compile | Cause::PythonGc);
    let progresses = |rank_index: &usize| makes_progress(case, *rank_index);
    // The others wait for a culprit that is certain to stand still, whatever another culprit does.
    let is_certain = |finding: &Finding| {
        finding.confidence == Confidence::High
            && !finding.culprits.is_empty()
            && !finding.culprits.iter().any(progresses)
    };
    let stands = outcome.conclusion.findings().iter().any(is_certain);
    // Of a process that is in only one of the samples, nothing shows that it stands still.
    let processes = outcome.conclusion.culprit_processes();
    let is_seen_once = |process: &usize| {
        let host = &case.world.processes[*process].host;
        host.moved.is_none() && !host.halted()
    };
    if is_progress || !stands && culprits.iter().any(progresses) || processes.iter().any(is_seen_once) {
        return HangEvidence::None;
    }
    // Without an explanation, the operation must be in the wait-for graph. For example, a server
    // that waits for a key of a store may only wait for its next request.
    let is_explained = cause != Cause::Unknown || !case.graph.events.is_empty();
    let timeout_ns = case.evidence.hang_timeout_ns.max(1);
    if is_explained && case.world.views.iter().any(|view| !view.dead() && view.oldest_pending_ns() >= timeout_ns) {
        return HangEvidence::PendingOperation;
    }
    // A manual dump may be of a healthy job, whose ranks wait for each other all the time.
    if case.evidence.trigger.as_ref().is_some_and(|trigger| trigger.kind() == TriggerKind::Manual) {
        return HangEvidence::None;
    }
    // Within one rank the chain leads to a thread, a worker process or the kernel.
    let inside = cause == Cause::GilDeadlock
        || outcome.conclusion.is_cycle()
        || culprits.iter().any(|rank_index| stands_inside(case, *rank_index, cause))
        || matches!(cause, Cause::DataLoader | Cause::DState | Cause::HostLock) && strength == Confidence::High;
    let is_known = !culprits.is_empty() || !processes.is_empty();
    let ends = is_known
        && culprits.iter().all(|rank_index| stands_still(case, *rank_index))
        && processes.iter().all(|process| is_still(&case.world.processes[*process].host));
    if ends && (victims > 0 || inside) { HangEvidence::WaitChain } else { HangEvidence::None }
}

/// A silent rank waits for a process of its own that can never answer, for a lock that only its own
/// threads could release and none of them will, or for storage. A wait for its device proves
/// nothing by itself: a compiled training loop is one call of an hour.
fn stands_inside(case: &Case<'_>, rank_index: usize, cause: Cause) -> bool {
    let by_process = |wait: &ProcessWait| wait.is_own && wait.proves_hang();
    let writes = |helper: StuckHelper| helper.pid == 0 && helper.is_in_write();
    match cause {
        Cause::HostLock | Cause::Teardown if case.graph.is_locked_in(rank_index) => true,
        Cause::StorageIo => stands_in_storage(&case.view(rank_index).host),
        Cause::HostLock if case.stuck_helper(rank_index).is_some_and(writes) => true,
        _ => case.graph.process_wait(rank_index).is_some_and(by_process),
    }
}

/// Whether a process for which nobody is known to wait stands in storage. One that reads a FIFO may
/// be a server that reads its requests.
fn stands_in_storage(host: &Host) -> bool {
    let is_pipe = host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Pipe);
    host.stands_in_storage() && (!is_pipe || host.location.native.as_deref().is_some_and(stacks::is_send))
}

/// Whether the work of the threads and child processes for which a rank waits is progress: bytes
/// flowed, or one of them reached another line. A worker of a loader that computes, and a child
/// process that stays in one function, count until the others have waited for two hang timeouts. Up
/// to then it may be a large batch. After that, it may be an endless loop.
fn helpers_progress(case: &Case<'_>, rank_index: usize, moved: Movement) -> bool {
    let first = case.graph.waiters.iter().flatten().next();
    let waited_ns = first.map_or(0, |waiter| case.view(*waiter).oldest_pending_ns());
    let loads = moved.helper_busy && case.does(rank_index, Activity::DataLoader);
    let may_loop = moved.helper_may_loop || !moved.helper_progressed && loads;
    if may_loop { waited_ns < 2 * case.evidence.hang_timeout_ns } else { moved.helper_progressed }
}

/// The program of this rank made progress between the samples (it reached another line, bytes
/// flowed, or a thread or child process that it may wait for made progress), or its device worked
/// within the timeout.
fn makes_progress(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    let progressed = |moved: Movement| {
        moved.own_frame || moved.io || moved.library_progressed || helpers_progress(case, rank_index, moved)
    };
    !view.halted() && (view.host.moved.is_some_and(progressed) || uses_device(case, rank_index))
}

/// This rank has called its device, or the device has completed an operation, within the last
/// timeout. A rank that waits for it longer than that waits for a rank that is slow or elsewhere,
/// but not for one that stands still.
pub(super) fn uses_device(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    let Some(flight) = view.flight else { return false };
    let mut last_ns = flight.last_launch_ns;
    view.any_operation(|operation| {
        last_ns = last_ns.max(operation.completed_ns);
        false
    });
    last_ns != 0 && flight.read_ns.saturating_sub(last_ns) < case.evidence.hang_timeout_ns
}

/// The main thread of each culprit waits for a thread or child process that is busy, or the culprit
/// is a busy process that is not a rank. Like a busy main thread, that does not prove a hang.
pub(super) fn helpers_busy(case: &Case<'_>, outcome: &Outcome) -> bool {
    let waits = |host: &Host| host.moved.is_some_and(|moved| moved.helper_busy);
    let runs = |host: &Host| host.moved.is_some_and(Movement::is_progress);
    let processes = outcome.conclusion.culprit_processes();
    let hosts = processes.iter().map(|process| &case.world.processes[*process].host);
    let is_known = !outcome.culprits.is_empty() || !processes.is_empty();
    is_known
        && outcome.culprits.iter().all(|index| !case.view(*index).halted() && waits(&case.view(*index).host))
        && hosts.into_iter().all(|host| waits(host) || runs(host))
}

/// Its process is gone or stopped, or the two samples show that nothing moved.
fn stands_still(case: &Case<'_>, rank_index: usize) -> bool {
    case.view(rank_index).halted() || is_still(&case.view(rank_index).host)
}

fn is_still(host: &Host) -> bool {
    host.stopped() || host.gone() || host.moved.is_some_and(|moved| !moved.is_progress())
}
