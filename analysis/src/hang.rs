//! The evidence that a job hangs. `XPU_TIMER_HANG_KILL` ends ranks and `XPU_TIMER_COMMON_HANG`
//! rises only on a verdict with such evidence. The cause and its confidence alone are not enough.

use xpu_timer_proto::v1::TriggerKind;

use crate::{
    causes::Case,
    stacks::Movement,
    verdict::{Cause, Confidence, HangEvidence},
};

/// The evidence behind an outcome of the judge. `culprits` are rank indices; `victims` is the
/// number of ranks that wait for them.
pub(crate) fn evidence(
    case: &Case<'_>,
    (cause, confidence): (Cause, Confidence),
    culprits: &[usize],
    victims: usize,
) -> HangEvidence {
    let is_progress = matches!(cause, Cause::NotAHang | Cause::LongStep | Cause::Compile | Cause::PythonGc);
    if is_progress || culprits.iter().any(|rank_index| makes_progress(case, *rank_index)) {
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
    let inside = matches!(cause, Cause::DataLoader | Cause::DState | Cause::GilDeadlock | Cause::HostLock)
        && confidence == Confidence::High;
    let ends = !culprits.is_empty() && culprits.iter().all(|rank_index| stands_still(case, *rank_index));
    if ends && (victims > 0 || inside) { HangEvidence::WaitChain } else { HangEvidence::None }
}

/// The program of this rank went on between the samples (it reached another line, bytes flowed, or
/// a thread or child process that it may wait for went on), or its device worked within the
/// timeout.
fn makes_progress(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    let went_on = |moved: Movement| moved.own_frame || moved.io || moved.helper_went_on || moved.library_went_on;
    let moved = view.host.moved.is_some_and(went_on);
    !view.halted() && (moved || uses_device(case, rank_index))
}

/// This rank has called its device, or the device has completed an operation, within the last
/// timeout. A rank that waits for it longer than that waits for a rank that is slow or elsewhere,
/// but not for one that stands still.
fn uses_device(case: &Case<'_>, rank_index: usize) -> bool {
    let Some(flight) = case.view(rank_index).flight else { return false };
    let completed = flight.operations.iter().map(|operation| operation.completed_ns);
    let last_ns = completed.chain([flight.last_launch_ns]).max().unwrap_or(0);
    last_ns != 0 && flight.read_ns.saturating_sub(last_ns) < case.evidence.hang_timeout_ns
}

/// The main thread of each culprit waits for a thread or child process that is busy. That proves a
/// hang as little as a busy main thread.
pub(crate) fn helpers_busy(case: &Case<'_>, culprits: &[usize]) -> bool {
    let busy = |rank_index: &usize| case.view(*rank_index).host.moved.is_some_and(|moved| moved.helper_busy);
    !culprits.is_empty() && culprits.iter().all(|rank_index| !case.view(*rank_index).halted() && busy(rank_index))
}

/// Its process is gone or stopped, or the two samples show that nothing moved.
fn stands_still(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    view.halted() || view.host.moved.is_some_and(|moved| !moved.is_progress())
}
