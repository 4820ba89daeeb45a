//! The conclusion of the judge before it becomes a verdict, and the facts that several steps of the
//! judge need.

use std::collections::BTreeSet;

use xpu_timer_proto::v1::{OpKind, Presence};

use crate::{
    causes::Case,
    graph::Suspect,
    verdict::{Activity, Cause, Confidence, EvidenceLine},
    world::is_collective,
};

/// The conclusion, before it becomes a [`Verdict`](crate::verdict::Verdict).
pub(super) struct Outcome {
    pub cause: Cause,
    pub culprits: Vec<usize>,
    pub confidence: Confidence,
    pub sentence: String,
    pub evidence: Vec<EvidenceLine>,
    pub main: Option<Suspect>,
}

pub(super) fn not_a_hang(why: String, confidence: Confidence) -> Outcome {
    Outcome {
        cause: Cause::NotAHang,
        culprits: Vec::new(),
        confidence,
        sentence: format!("No hang is visible: {why}."),
        evidence: Vec::new(),
        main: None,
    }
}

pub(super) fn unknown(sentence: String) -> Outcome {
    Outcome {
        cause: Cause::Unknown,
        culprits: Vec::new(),
        confidence: Confidence::Low,
        sentence,
        evidence: Vec::new(),
        main: None,
    }
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

/// A job that has worked and whose ranks all do nothing now. A job that has not begun yet waits for
/// something.
pub(super) fn is_idle(case: &Case<'_>) -> bool {
    let views = &case.world.views;
    let worked = views.iter().any(|view| view.operations().any(is_collective));
    worked && (0..views.len()).all(|rank_index| views[rank_index].host.stack && case.is_idle(rank_index))
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
    waiting.retain(|rank_index| !case.view(*rank_index).dead());
    waiting
}
