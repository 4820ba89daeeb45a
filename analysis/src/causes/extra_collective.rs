//! `missing_rank`, from the other side: a few ranks are in a collective that no other rank enters.
//!
//! The ranks inside are fewer than those that have not entered. Each of the latter ended in order
//! (it left with status 0, or it is shutting down), so they had completed their work. The few made
//! one collective too many: an epoch with one more batch, or a barrier that only one rank calls.
//! The confidence is medium, because the others may have ended too early for the same reason.

use xpu_timer_proto::v1::Presence;

use super::{
    case::Case,
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::line,
};
use crate::{
    exit::Exit,
    graph::{Event, Suspect},
    text::{capital, ranks},
    verdict::{Activity, Cause, Confidence},
};

/// Larger communicators are not searched, because the search visits all members for each suspect.
const MOST: usize = 1024;

pub(super) const RULE: Rule = Rule { cause: Cause::MissingRank, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    case.host_rank(suspect).filter(|rank_index| ended(case, *rank_index))?;
    let event = case.main_event(suspect)?;
    let Event::Collective { comm, .. } = event else { return None };
    let (inside, members) = (case.graph.waiters_of(event), &case.comms[comm].members);
    if inside.is_empty() || 2 * inside.len() >= members.len() || members.len() > MOST {
        return None;
    }
    // Both lists are ascending.
    let outside = |rank_index: &usize| inside.binary_search(rank_index).is_err();
    let others: Vec<usize> = members.iter().map(|member| member.rank_index).filter(outside).collect();
    let all_known = members.len() == case.comms[comm].size as usize;
    if !all_known || !others.iter().all(|rank_index| ended(case, *rank_index)) {
        return None;
    }
    let what = case.describe(event);
    let (few, rest) = (case.world.ranks(inside.iter().copied()), case.world.ranks(others));
    let (one, place) = match inside {
        [rank_index] => (true, case.place(*rank_index)),
        _ => (false, String::new()),
    };
    let sentence = format!(
        "{} {} in {what}{place}, and all others ({}) are done and have ended: {} made a collective too many.",
        capital(&ranks(&few)),
        if one { "waits" } else { "wait" },
        ranks(&rest),
        if one { "it" } else { "they" },
    );
    let mut evidence = vec![
        line(format!("{} in {what}", ranks(&few)), few),
        line(format!("{} ended in order without it", ranks(&rest)), rest),
    ];
    for &rank_index in inside.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let statement = Statement::Sentence(sentence);
    Some(Finding { culprits: inside.to_vec(), statement, confidence: Confidence::Medium, evidence })
}

fn ended(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    match view.presence {
        Presence::Left => matches!(view.exit(), Exit::Unknown | Exit::Code(0)),
        _ => !view.dead() && case.does(rank_index, Activity::Teardown),
    }
}
