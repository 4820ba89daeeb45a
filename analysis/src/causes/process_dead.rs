//! `process_dead`: others wait for a rank whose process is gone.
//!
//! The rank's process vanished without a goodbye, said goodbye and left, or is a zombie; and a collective, a point-to-point
//! operation or the creation of a communicator waits for it, or nobody waits yet and it did not leave in order. Death beats
//! every other explanation of the same rank. When several ranks are gone, those that were ended from outside by SIGTERM are
//! not to blame if others ended by themselves: an agent ends the rest of a job that has lost a rank. Nor are those that ended with an
//! error when another one was killed: they may have noticed that, and the confidence is medium.
//!
//! A rank that left in order right after it launched the collective itself is blamed with medium confidence: its watcher ended with
//! it, so nobody saw whether its call took part. So is one that left with success when those that wait are no majority, or when they wait
//! in a send or receive, which only two know of: it may be they who made one too many. A rank that completed the collective and was killed while others are still inside it is blamed with medium confidence. One
//! that ended by itself there did not take part in it; that is `missing_rank`.

use xpu_timer_proto::v1::Presence;

use super::{
    case::Case,
    collective::Collective,
    comm_init,
    death::describe_end,
    missing_rank,
    rule::{Finding, Rule, Statement},
    wording::{Number, line},
};
use crate::{
    graph::{Event, Suspect},
    text::ranks,
    verdict::{Activity, Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::ProcessDead, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let has_other_size = |view: usize| comm_init::other_size(case, suspect, view).is_some();
    let dead = |view: &usize| case.view(*view).dead() && !still_ends(case, *view) && !has_other_size(*view);
    if let Some(view) = case.host(suspect).filter(dead) {
        let mut evidence = vec![line(
            format!("rank {} {}", case.view(view).rank, describe_end(case, view, Number::One)),
            vec![case.view(view).rank],
        )];
        evidence.extend(case.main_event(suspect).and_then(|event| case.counters(view, event)));
        let mut confidence =
            if outnumbered(case, view, case.main_event(suspect)) { Confidence::Medium } else { Confidence::High };
        if case.view(view).presence == Presence::Left && had_launched(case, view, case.main_event(suspect)) {
            confidence = Confidence::Medium;
            let text = format!(
                "rank {}: it had launched that collective itself and ended in order before its end was seen; it may have skipped it",
                case.view(view).rank
            );
            evidence.push(line(text, vec![case.view(view).rank]));
        }
        return Some(Finding {
            culprits: vec![view],
            statement: Statement::of_ranks(|number| describe_end(case, view, number)),
            confidence,
            evidence,
        });
    }
    // Killed after it completed what the others are still in.
    let collective = Collective::of(case, suspect)?;
    let killed = |view: &usize| {
        case.view(*view).presence == Presence::Dead && !missing_rank::shows_skip(case, &collective, *view)
    };
    if collective.passed.is_empty() || !collective.passed.iter().all(killed) {
        return None;
    }
    let dead = case.world.ranks(collective.passed.iter().copied());
    let sentence = format!(
        "{} {} gone; the others are still inside {}.",
        crate::text::capital(&ranks(&dead)),
        if dead.len() == 1 { "is" } else { "are" },
        case.describe(collective.event)
    );
    let evidence = collective.passed.iter().map(|view| {
        let rank = case.view(*view).rank;
        line(format!("rank {rank} {}", describe_end(case, *view, Number::One)), vec![rank])
    });
    Some(Finding {
        culprits: collective.passed.clone(),
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence: evidence.collect(),
    })
}

/// Whether the rank left with success, and those that wait for it may as well have made an operation too many: as many left with it
/// as wait in the collective, or it is a transfer between two.
fn outnumbered(case: &Case<'_>, view: usize, event: Option<Event>) -> bool {
    let success = |view: usize| {
        let content = case.view(view);
        content.presence == Presence::Left && content.exit().succeeded()
    };
    let Some(event) = event.filter(|_| success(view)) else { return false };
    let Event::Collective { comm, .. } = event else { return matches!(event, Event::PointToPoint { .. }) };
    let inside = case.graph.waiters_of(event).len();
    let members = case.comms[comm].members.iter();
    members.filter(|member| success(member.view)).take(inside).count() == inside
}

/// Whether the process of a rank that has left is still there, in its own end: that is `teardown`.
fn still_ends(case: &Case<'_>, view: usize) -> bool {
    let content = case.view(view);
    content.presence == Presence::Left
        && content.host.stack
        && !content.host.gone()
        && case.does(view, Activity::Teardown)
}

/// Whether a rank had launched what the others wait in.
fn had_launched(case: &Case<'_>, view: usize, event: Option<Event>) -> bool {
    let Some(Event::Collective { comm, seq }) = event else { return false };
    case.comms[comm].member(view).is_some_and(|member| member.launched >= seq)
}

fn rule_out(case: &Case<'_>, _: &[usize]) -> Option<String> {
    let views = &case.world.views;
    let alive = views.iter().all(|view| view.presence == Presence::Present && !view.dead());
    (alive && !views.is_empty()).then(|| format!("the processes of all {} ranks are alive", views.len()))
}
