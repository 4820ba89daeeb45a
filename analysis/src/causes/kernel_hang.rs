//! `kernel_hang`: something else than a collective does not end on the device of a rank.
//!
//! The rank has launched the collective that its peers wait in, and its device has not begun it although no other collective
//! of this rank is under way: what stands before it in its stream does not end. Or its host waits for the device while no collective
//! of it is pending. The kernel is named when it was recorded; else the last kernel of the stream is. When the host goes on
//! between the samples, the device may only be slow, and the confidence is low.

use super::{Case, Cause, Confidence, Finding, Rule, Says, line};
use crate::{graph::Suspect, text::shape, verdict::Activity};
use xpu_timer_proto::v1::OpKind;

pub(super) const RULE: Rule = Rule { cause: Cause::KernelHang, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Device { view, events } = suspect else { return None };
    let content = case.view(*view);
    let rank = content.rank;
    let blocked =
        content.pending().find(|operation| operation.kind() == OpKind::Collective && operation.started_ns == 0);
    let kernel = content.pending().find(|operation| matches!(operation.kind(), OpKind::Kernel | OpKind::GraphLaunch));
    // The stream of the collective that does not begin, or else the stream that was used last.
    let stream = content.flight.and_then(|flight| {
        let of_blocked =
            blocked.and_then(|blocked| flight.streams.iter().find(|stream| stream.handle == blocked.stream));
        of_blocked.or_else(|| flight.streams.iter().max_by_key(|stream| stream.last_launch_ns))
    });
    let last =
        stream.map(|stream| stream.last_kernel.as_str()).filter(|name| !name.is_empty() && !name.starts_with("nccl"));
    let culprit = match (kernel, last) {
        (Some(kernel), _) => format!("{} does not end", shape(kernel)),
        (None, Some(last)) => format!("something does not end; the kernel launched last is {last}"),
        (None, None) => "something that is not a collective does not end".to_owned(),
    };
    let mut evidence = Vec::new();
    if let Some(blocked) = blocked {
        evidence.push(line(
            format!(
                "rank {rank}: {} {} is launched, and the device has not begun it",
                crate::text::op_name(blocked.op()),
                blocked.seq
            ),
            vec![rank],
        ));
    } else if case.does(*view, Activity::DeviceWait) {
        evidence.push(line(
            format!(
                "rank {rank}: waits for its device in {}, and no collective of it is pending",
                content.host.doing.witness
            ),
            vec![rank],
        ));
    }
    if let Some(kernel) = kernel {
        evidence.push(line(format!("rank {rank}: {} is pending", shape(kernel)), vec![rank]));
    }
    evidence.extend(case.main_event(suspect).and_then(|event| case.counters(*view, event)));
    evidence.extend(case.standing(*view));
    let confidence = if content.watcher_stale() {
        evidence
            .push(line(format!("rank {rank}: its watcher has not turned for a while, so this may be old"), vec![rank]));
        Confidence::Low
    } else if content.host.moved.is_some_and(|moved| moved.own_frame) {
        evidence.push(line(format!("rank {rank}: its host goes on, so its device may only be slow"), vec![rank]));
        Confidence::Low
    } else if events.is_empty() || blocked.is_none() && kernel.is_none() && !content.host.same_in_both {
        Confidence::Medium
    } else {
        case.members_confidence(events)
    };
    Some(Finding {
        culprits: vec![*view],
        says: Says::Rank(format!("is stuck on its device: {culprit}; its host stands{}", stands(case.place(*view)))),
        confidence,
        evidence,
    })
}

fn stands(place: String) -> String {
    if place.is_empty() { " at an unknown place".to_owned() } else { place }
}

fn rule_out(case: &Case<'_>, _: &[usize]) -> Option<String> {
    let device = case.graph.suspects.iter().any(|suspect| matches!(suspect, Suspect::Device { .. }));
    (!device && !case.graph.events.is_empty())
        .then(|| "no device is blocked by something else than a collective".to_owned())
}
