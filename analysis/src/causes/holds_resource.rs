//! `storage_io` and `missing_rank`: a rank holds a resource that another rank waits for outside of
//! all collectives.
//!
//! The main thread of a rank waits for a file lock, a pipe or a socket, and the process of exactly
//! one other rank has that lock or the other end. The wait-for graph continues at that rank. If
//! that rank is dead, stopped or stuck by itself, that is the cause. Otherwise this rule names it,
//! with medium confidence: it is somewhere else, or it is in a collective that waits for the rank
//! that it holds up (it kept a lock, or did not send what was due). A lock is `storage_io`;
//! everything else is `missing_rank`.

use xpu_timer_proto::server::AwaitedKind;

use super::{
    case::Case,
    rule::{Finding, Rule, Statement, never_ruled_out},
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    verdict::{Cause, Confidence},
};

pub(super) const LOCK: Rule = Rule { cause: Cause::StorageIo, explain: of_lock, rule_out: never_ruled_out };
pub(super) const PEER: Rule = Rule { cause: Cause::MissingRank, explain: of_peer, rule_out: never_ruled_out };

fn of_lock(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    explain(case, suspect, true)
}

fn of_peer(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    explain(case, suspect, false)
}

fn explain(case: &Case<'_>, suspect: &Suspect, lock: bool) -> Option<Finding> {
    let holder = case.host_rank(suspect)?;
    let waiter = case.graph.resource_waits.iter().find(|wait| wait.holder == holder)?.waiter;
    let awaited = case.view(waiter).host.awaited.as_ref()?;
    if (awaited.kind() == AwaitedKind::Lock) != lock || has_not_entered(case, holder, case.main_event(suspect)) {
        return None;
    }
    let (rank, other) = (case.view(holder).rank, case.view(waiter).rank);
    let what = case.awaited_text(waiter)?;
    let inside = case.graph.events.iter().find(|event| case.graph.waiters_of(**event).contains(&holder));
    let itself = match (inside, case.place(holder)) {
        (Some(event), _) => format!("; rank {rank} is itself in {}", case.describe(*event)),
        (None, place) if place.is_empty() => String::new(),
        (None, place) => format!("; rank {rank} stands{place}"),
    };
    let sentence = format!("Rank {rank} holds up rank {other}, which waits for {what}{}{itself}.", case.place(waiter));
    let mut evidence = vec![line(format!("rank {other}: its system call waits for {what}"), vec![other])];
    evidence.extend(case.position_lines(holder));
    evidence.extend(case.position_lines(waiter));
    Some(Finding {
        culprits: vec![holder],
        statement: Statement::Sentence(sentence),
        confidence: case.host_confidence(suspect).min(Confidence::Medium),
        evidence,
    })
}

/// Whether the rank has not entered the collective either. That tells more than the resource.
fn has_not_entered(case: &Case<'_>, rank_index: usize, event: Option<Event>) -> bool {
    let Some(Event::Collective { comm, seq }) = event else { return false };
    match case.comms[comm].member(rank_index) {
        Some(member) => member.launched < seq,
        None => case.comms[comm].silent.contains(&rank_index),
    }
}
