//! The outcome if no rule explains the incident.

use xpu_timer_proto::v1::TriggerKind;

use super::outcome::{Outcome, ended_in_order, is_idle, not_a_hang, unknown};
use crate::{
    causes::Case,
    text::ranks,
    verdict::{Activity, Confidence},
    world::RankView,
};

/// The outcome if no rule explains the incident: what is known.
pub(super) fn unexplained(case: &Case<'_>) -> Outcome {
    let views = &case.world.views;
    let kind = case.evidence.trigger.as_ref().map_or(TriggerKind::Unspecified, |trigger| trigger.kind());
    let dumps = views.iter().filter(|view| view.host.stack).count();
    let moving = views.iter().filter(|view| view.host.moved.is_some_and(|moved| moved.is_progress())).count();
    let nothing_pending = case.graph.events.is_empty();
    if !views.is_empty()
        && nothing_pending
        && dumps == views.len()
        && (kind == TriggerKind::Manual || moving == views.len())
    {
        let why = if moving == views.len() {
            "no operation is pending, and every rank moves".to_owned()
        } else {
            "no operation is pending on any rank".to_owned()
        };
        let confidence = if moving == views.len() { Confidence::Medium } else { Confidence::Low };
        return not_a_hang(why, confidence);
    }
    let done: Vec<usize> = (0..views.len()).filter(|rank_index| ended_in_order(case, *rank_index)).collect();
    let comes = |view: &RankView<'_>| !view.halted() && view.host.observed.activity == Activity::CommInit;
    if !done.is_empty() && nothing_pending && !views.iter().any(|view| view.unseen() || comes(view)) {
        let left = ranks(&case.world.ranks(done));
        return not_a_hang(format!("no operation is pending, and {left} left in order"), Confidence::Medium);
    }
    if nothing_pending && is_idle(case) {
        let stand = match same_place(case) {
            Some(place) => format!("all {} ranks stand{place}", views.len()),
            None => "every rank sleeps, or waits for a message, a person or a signal".to_owned(),
        };
        return unknown(format!(
            "No operation is pending, so nothing is stuck on any device: {stand}; the job may just be idle."
        ));
    }
    let known = match (views.len(), nothing_pending) {
        (0, _) => "nothing is known of any rank".to_owned(),
        (_, true) if dumps == 0 => "there is no stack of any rank, and no record of a pending operation".to_owned(),
        (all, true) => match same_place(case) {
            Some(place) => format!("no operation is pending on any rank, and all {all} ranks stand{place}"),
            None => format!("no operation is pending on any rank, and {dumps} of {all} ranks have stacks"),
        },
        (_, false) => {
            let unseen = case.world.ranks((0..views.len()).filter(|rank_index| views[*rank_index].unseen()));
            let whom = match unseen.len() {
                0 => "no rank is seen to hold it up".to_owned(),
                _ => format!("the reason lies with {}, of which nothing is known here", ranks(&unseen)),
            };
            let busiest = case.graph.events.iter().copied().max_by_key(|event| case.graph.waiters_of(*event).len());
            let waits = busiest.map_or("operations are pending".to_owned(), |event| {
                let inside = case.world.ranks(case.graph.waiters_of(event).iter().copied());
                let verb = if inside.len() == 1 { "waits" } else { "wait" };
                format!("{} {verb} in {}", ranks(&inside), case.describe(event))
            });
            format!("{waits}, and {whom}")
        }
    };
    unknown(format!("It is not known why the job stopped: {known}."))
}

/// The place of the ranks, if it is the same for all.
fn same_place(case: &Case<'_>) -> Option<String> {
    let first = case.place(0);
    let same = (1..case.world.views.len()).all(|rank_index| case.place(rank_index) == first);
    (same && !first.is_empty() && case.world.views.len() > 1).then_some(first)
}
