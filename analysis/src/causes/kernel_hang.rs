//! `kernel_hang`: an operation other than a collective does not complete on the device of a rank.
//!
//! The rank has launched the collective that its peers wait in. Its device has not started it,
//! although no other collective of this rank is under way: an operation before it in its stream
//! does not complete. Or the host waits for the device while none of its collectives is pending.
//! The sentence names the kernel if it was recorded, else the last kernel of the stream. If the
//! host makes progress between the samples, the device may only be slow, and the confidence is low.
//! In a wait cycle, the culprit is the one rank whose stream is blocked by nothing that was
//! recorded, with medium confidence.

use xpu_timer_proto::{
    ring::COARSE_TICK_NS,
    v1::{OpKind, OpStatus, Operation},
};

use crate::{
    case::Case,
    explanation::{Explanation, HostState},
    finding::{Exclusion, Fact, Finding, RankFact, Rule},
    graph::{Event, Suspect},
    history::made_before,
    kernels::communicates,
    verdict::{Activity, Cause, Confidence},
    world::RankView,
};

pub(super) const RULE: Rule = Rule { cause: Cause::KernelHang, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Suspect::Cycle(cycle) = suspect {
        let rank_index = blocked_in_cycle(case, cycle)?;
        let found = explain(case, &Suspect::Device { rank_index, events: cycle.clone() })?;
        return Some(Finding { confidence: found.confidence.min(Confidence::Medium), ..found });
    }
    let Suspect::Device { rank_index, events } = suspect else { return None };
    if in_open_group(case, *rank_index) {
        return None;
    }
    let view = case.view(*rank_index);
    let blocked = view.pending().find(|operation| operation.kind() == OpKind::Collective && operation.started_ns == 0);
    // A kernel that communicates is a collective. If it has not started, it is blocked itself.
    let is_blocked = |operation: &Operation| operation.started_ns == 0 && communicates(view, &operation.function);
    // The stream of the collective that has not started, else the stream that was used last.
    let stream = view.flight.and_then(|flight| {
        let of_blocked =
            blocked.and_then(|blocked| flight.streams.iter().find(|stream| stream.handle == blocked.stream));
        of_blocked.or_else(|| flight.streams.iter().max_by_key(|stream| stream.last_launch_ns))
    });
    let last = stream
        .map(|stream| stream.last_kernel.as_str())
        .filter(|name| !name.is_empty() && !name.contains("ncclDev") && !name.starts_with("nccl"))
        .filter(|name| !communicates(view, name));
    // A watcher that the driver blocks has not seen what completed since, so an operation that is
    // not the newest one may have. The launch time is that of the coarse clock.
    let newest = stream.filter(|_| last.is_some() && view.watcher_stale());
    let newest_ns = newest.map_or(0, |stream| stream.last_launch_ns + COARSE_TICK_NS);
    let kernel = view.pending().find(|operation| {
        matches!(operation.kind(), OpKind::Kernel | OpKind::GraphLaunch)
            && !is_blocked(operation)
            && operation.entered_ns >= newest_ns
    });
    let mut evidence = Vec::new();
    if let Some(blocked) = blocked {
        evidence.push(RankFact::NotStarted { op: blocked.op(), seq: blocked.seq }.of(*rank_index));
    } else if case.does(*rank_index, Activity::DeviceWait) {
        evidence.push(RankFact::WaitsForDevice.of(*rank_index));
    }
    evidence.push(Fact::Explained);
    evidence.extend(case.main_event(suspect).map(|event| Fact::Counters { rank_index: *rank_index, event }));
    evidence.push(Fact::Position(*rank_index));
    let confidence = if view.watcher_stale() {
        evidence.push(RankFact::StaleWatcher.of(*rank_index));
        Confidence::Low
    } else if view.host.moved.is_some_and(|moved| moved.own_frame) {
        evidence.push(RankFact::HostMakesProgress.of(*rank_index));
        Confidence::Low
    } else if events.is_empty() || blocked.is_none() && kernel.is_none() && !view.host.same_in_both {
        Confidence::Medium
    } else {
        case.members_confidence(events)
    };
    let state = HostState::StuckOnDevice { operation: kernel.cloned().map(Box::new), last: last.map(str::to_owned) };
    let explanation = Explanation::Host { rank_index: *rank_index, state };
    Some(Finding { culprits: vec![*rank_index], explanation, confidence, evidence })
}

/// Whether the rank may have called its collective without having launched it: its newest operation
/// is in a group, and its host stands still elsewhere, as it does while the group is open.
pub(super) fn in_open_group(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    let last = view.operations().last();
    let open = last.is_some_and(|last| last.group != 0 && last.started_ns == 0 && last.status() == OpStatus::Pending);
    let kernel = view.pending().any(|operation| matches!(operation.kind(), OpKind::Kernel | OpKind::GraphLaunch));
    open && !kernel && view.host.stack && view.host.frozen() && !case.does(rank_index, Activity::DeviceWait)
}

/// The only rank that closes a wait cycle with an operation that its device has not started,
/// although no collective or transfer is ahead of it in its stream. The same operations completed
/// before, so something else blocks the stream.
fn blocked_in_cycle(case: &Case<'_>, cycle: &[Event]) -> Option<usize> {
    let mut inside: Vec<usize> = cycle.iter().flat_map(|event| case.graph.waiters_of(*event)).copied().collect();
    inside.sort_unstable();
    inside.dedup();
    let of_comm = |operation: &&Operation| operation.kind() == OpKind::Collective;
    let blocked = |rank_index: &usize| {
        let started: Vec<u64> = case
            .view(*rank_index)
            .pending()
            .filter(of_comm)
            .filter(|operation| operation.started_ns != 0)
            .map(|operation| operation.stream)
            .collect();
        case.view(*rank_index)
            .pending()
            .filter(of_comm)
            .any(|operation| operation.started_ns == 0 && !started.contains(&operation.stream))
    };
    let worked = |rank_index: usize| {
        case.view(rank_index).pending().filter(of_comm).all(|operation| made_before(case.view(rank_index), operation))
    };
    let mut found = inside.iter().copied().filter(blocked);
    let rank_index = found.next().filter(|_| found.next().is_none())?;
    worked(rank_index).then_some(rank_index)
}

fn rule_out(case: &Case<'_>, _: &[usize]) -> Option<Exclusion> {
    let device = case.graph.suspects.iter().any(|suspect| matches!(suspect, Suspect::Device { .. }));
    let is_known = |view: &RankView<'_>| view.dead() || view.flight.is_some() && !view.watcher_stale();
    let known = case.world.views.iter().all(is_known);
    (known && !device && !case.graph.events.is_empty()).then_some(Exclusion::NoDeviceBlocked)
}
