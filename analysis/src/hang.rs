//! What shows that a job hangs. `XPU_TIMER_HANG_KILL` ends ranks and `XPU_TIMER_COMMON_HANG` rises only on a verdict with such
//! evidence; the cause and its confidence alone are not enough.

use xpu_timer_proto::v1::TriggerKind;

use crate::{
    causes::Case,
    verdict::{Cause, Confidence, HangEvidence},
};

/// The evidence behind an outcome of the judge: `culprits` are views, `victims` is the number of ranks that wait for them.
pub(crate) fn evidence(
    case: &Case<'_>,
    (cause, confidence): (Cause, Confidence),
    culprits: &[usize],
    victims: usize,
) -> HangEvidence {
    let is_progress = matches!(cause, Cause::NotAHang | Cause::LongStep | Cause::Compile | Cause::PythonGc);
    if is_progress || culprits.iter().any(|view| makes_progress(case, *view)) {
        return HangEvidence::None;
    }
    let timeout_ns = case.evidence.hang_timeout_ns.max(1);
    if case.world.views.iter().any(|view| !view.dead() && view.pending_ns() >= timeout_ns) {
        return HangEvidence::PendingOperation;
    }
    // A dump by hand may be of a healthy job, whose ranks wait for each other all the time.
    if case.evidence.trigger.as_ref().is_some_and(|trigger| trigger.kind() == TriggerKind::Manual) {
        return HangEvidence::None;
    }
    // Within one rank the chain leads to a thread, a worker process or the kernel.
    let inside = matches!(cause, Cause::DataLoader | Cause::DState | Cause::GilDeadlock | Cause::HostLock)
        && confidence == Confidence::High;
    let ends = !culprits.is_empty() && culprits.iter().all(|view| stands_still(case, *view));
    if ends && (victims > 0 || inside) { HangEvidence::WaitChain } else { HangEvidence::None }
}

/// The program of this rank went on between the samples: it reached another line, or bytes flowed.
fn makes_progress(case: &Case<'_>, view: usize) -> bool {
    let content = case.view(view);
    !content.halted() && content.host.moved.is_some_and(|moved| moved.own_frame || moved.io)
}

/// Its process is gone or stopped, or both samples show that nothing moved.
fn stands_still(case: &Case<'_>, view: usize) -> bool {
    let content = case.view(view);
    content.halted() || content.host.moved.is_some_and(|moved| !moved.any())
}
