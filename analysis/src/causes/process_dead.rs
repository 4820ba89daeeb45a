//! `process_dead`: others wait for a rank whose process is gone.
//!
//! The process vanished without a `Goodbye`, left with one, or is a zombie. A collective, a
//! point-to-point operation or the creation of a communicator waits for the rank; or no rank waits
//! yet and it did not leave in order. Death comes before every other explanation of the same rank.
//!
//! If several ranks are gone, those that SIGTERM ended from outside are not to blame if others
//! ended by themselves: an agent ends the other ranks of a job that has lost one. Ranks that ended
//! with an error when another one was killed are not to blame either: they may have noticed the
//! death, and the confidence is medium.
//!
//! The confidence is also medium in these cases:
//!
//! - The rank left in order right after it launched the collective itself. Its watcher ended with
//!   it, so nothing shows whether its call took part.
//! - The rank left with success, and the ranks that wait are no majority or wait in a send or
//!   receive, which involves only two ranks: they may have made one operation too many.
//! - The rank completed the collective and was killed while others are still inside. A rank that
//!   ended by itself there did not take part in the collective; that is `missing_rank`.

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
    let has_other_size = |rank_index: usize| comm_init::other_size(case, suspect, rank_index).is_some();
    let dead = |rank_index: &usize| {
        case.view(*rank_index).dead() && !is_in_teardown(case, *rank_index) && !has_other_size(*rank_index)
    };
    if let Some(rank_index) = case.host_rank(suspect).filter(dead) {
        let mut evidence = vec![line(
            format!("rank {} {}", case.view(rank_index).rank, describe_end(case, rank_index, Number::One)),
            vec![case.view(rank_index).rank],
        )];
        evidence.extend(case.main_event(suspect).and_then(|event| case.counters_line(rank_index, event)));
        let mut confidence = if waiters_may_be_at_fault(case, rank_index, case.main_event(suspect)) {
            Confidence::Medium
        } else {
            Confidence::High
        };
        if case.view(rank_index).presence == Presence::Left && had_launched(case, rank_index, case.main_event(suspect))
        {
            confidence = Confidence::Medium;
            let text = format!(
                "rank {}: it had launched that collective itself and ended in order before its end was seen; it may have skipped it",
                case.view(rank_index).rank
            );
            evidence.push(line(text, vec![case.view(rank_index).rank]));
        }
        return Some(Finding {
            culprits: vec![rank_index],
            statement: Statement::of_ranks(|number| describe_end(case, rank_index, number)),
            confidence,
            evidence,
        });
    }
    // The rank was killed after it completed the collective that the others are still in.
    let collective = Collective::of(case, suspect)?;
    let killed = |rank_index: &usize| {
        case.view(*rank_index).presence == Presence::Dead && !missing_rank::proves_skip(case, &collective, *rank_index)
    };
    if collective.completed_by.is_empty() || !collective.completed_by.iter().all(killed) {
        return None;
    }
    let dead = case.world.ranks(collective.completed_by.iter().copied());
    let sentence = format!(
        "{} {} gone; the others are still inside {}.",
        crate::text::capital(&ranks(&dead)),
        if dead.len() == 1 { "is" } else { "are" },
        case.describe(collective.event)
    );
    let evidence = collective.completed_by.iter().map(|rank_index| {
        let rank = case.view(*rank_index).rank;
        line(format!("rank {rank} {}", describe_end(case, *rank_index, Number::One)), vec![rank])
    });
    Some(Finding {
        culprits: collective.completed_by.clone(),
        statement: Statement::Sentence(sentence),
        confidence: Confidence::Medium,
        evidence: evidence.collect(),
    })
}

/// Whether the rank left with success and the ranks that wait for it may have made an operation too
/// many: as many ranks left with success as wait in the collective, or it is a transfer between two
/// ranks.
fn waiters_may_be_at_fault(case: &Case<'_>, rank_index: usize, event: Option<Event>) -> bool {
    let success = |rank_index: usize| {
        let view = case.view(rank_index);
        view.presence == Presence::Left && view.exit().succeeded()
    };
    let Some(event) = event.filter(|_| success(rank_index)) else { return false };
    let Event::Collective { comm, .. } = event else { return matches!(event, Event::PointToPoint { .. }) };
    let inside = case.graph.waiters_of(event).len();
    let members = case.comms[comm].members.iter();
    members.filter(|member| success(member.rank_index)).take(inside).count() == inside
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

fn rule_out(case: &Case<'_>, _: &[usize]) -> Option<String> {
    let views = &case.world.views;
    let alive = views.iter().all(|view| view.presence == Presence::Present && !view.dead());
    (alive && !views.is_empty()).then(|| format!("the processes of all {} ranks are alive", views.len()))
}
