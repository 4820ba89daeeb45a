//! `order_mismatch`: ranks enter several communicators in different orders, and wait for each
//! other.
//!
//! The wait-for graph has a cycle over collectives of at least two communicators: some ranks are in
//! the first and wait for others, which are in the second and wait for them. The culprits are, in
//! this order of preference:
//!
//! - The ranks that exchanged two collectives which they had always made in the other order, or
//!   that made a new collective where another one had always come. The collective of the others
//!   comes later for them, or never.
//! - The only rank through which all cycles pass.
//! - The ranks in the collective with the fewest waiters. If all have the same number of waiters,
//!   all are named, with lower confidence.
//!
//! Other ranks may have completed such a collective among themselves, in a communicator of the same
//! size. Ranks in it are not named while another of these collectives lacks that precedent. If it
//! is the only collective with the fewest waiters, its ranks did what others did, and the ranks
//! that they wait for are named.

use super::{
    case::Case,
    pattern_break::{self, Break, PatternCheck},
    rule::{Finding, Rule, Statement, never_ruled_out},
    wait_cycle,
    wording::{Number, line},
};
use crate::{
    graph::{Event, Suspect},
    matching::Comm,
    text::{capital, ranks},
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::OrderMismatch, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let PatternCheck::Finding(found) = pattern_break::check(case, suspect, &[Break::NewCollective, Break::Order]) {
        return Some(found);
    }
    let Suspect::Cycle(events) = suspect else { return None };
    let waited: Vec<_> = events.iter().copied().filter(|event| !case.graph.waiters_of(*event).is_empty()).collect();
    let count = |event| case.graph.waiters_of(event).len();
    let fewest = waited.iter().map(|event| count(*event)).min()?;
    let most = waited.iter().map(|event| count(*event)).max()?;
    let odd: Vec<_> = waited.iter().copied().filter(|event| fewest == most || count(*event) == fewest).collect();
    let (usual, unusual): (Vec<_>, Vec<_>) = odd.iter().copied().partition(|event| has_precedent(case, *event));
    if let ([event], true) = (&usual[..], unusual.is_empty() && fewest < most)
        && let Some(found) = left_out(case, &waited, *event)
    {
        return Some(found);
    }
    let odd = if usual.is_empty() || unusual.is_empty() { odd } else { unusual };
    let mut culprits: Vec<usize> = odd.iter().flat_map(|event| case.graph.waiters_of(*event).to_vec()).collect();
    culprits.sort_unstable();
    culprits.dedup();
    let one = wait_cycle::in_all_cycles(case, events);
    if let Some(one) = one {
        culprits = vec![one];
    }
    let parts: Vec<String> = waited
        .iter()
        .take(2)
        .map(|event| {
            let inside = case.world.ranks(case.graph.waiters_of(*event).iter().copied());
            format!("{} in {}", ranks(&inside), case.describe(*event))
        })
        .collect();
    let evidence = waited.iter().take(8).map(|event| {
        let inside = case.world.ranks(case.graph.waiters_of(*event).iter().copied());
        line(format!("{} in {}", ranks(&inside), case.describe(*event)), inside)
    });
    let mut evidence: Vec<_> = evidence.collect();
    for &rank_index in culprits.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let who = case.world.ranks(culprits.iter().copied());
    Some(Finding {
        statement: Statement::Sentence(format!(
            "{} entered the communicators in another order than the others, and all wait for each other: {}.",
            capital(&ranks(&who)),
            parts.join(", ")
        )),
        confidence: if fewest == most && one.is_none() { Confidence::Low } else { Confidence::Medium },
        culprits,
        evidence,
    })
}

/// The few ranks in a collective did what others have done among themselves. A member that is in
/// another collective of the cycle left this one out.
fn left_out(case: &Case<'_>, waited: &[Event], event: Event) -> Option<Finding> {
    let inside = case.world.ranks(case.graph.waiters_of(event).iter().copied());
    let elsewhere = |rank_index: &usize| {
        let other = waited.iter().find(|other| **other != event && case.graph.waiters_of(**other).contains(rank_index));
        other.map(|other| (*rank_index, *other))
    };
    let missing: Vec<(usize, Event)> = wait_cycle::awaited_members(case, event).iter().filter_map(elsewhere).collect();
    let &(first, other) = missing.first()?;
    let culprits: Vec<usize> = missing.iter().map(|(rank_index, _)| *rank_index).collect();
    let who = case.world.ranks(culprits.iter().copied());
    let number = Number::of(who.len());
    let sentence = format!(
        "{} {} in {}{}, and not in {}: {} {} there, and communicators like it have completed as many.",
        capital(&ranks(&who)),
        number.is(),
        case.describe(other),
        case.place(first),
        case.describe(event),
        ranks(&inside),
        Number::of(inside.len()).waits(),
    );
    let mut evidence: Vec<_> =
        culprits.iter().take(4).filter_map(|rank_index| case.counters_line(*rank_index, event)).collect();
    culprits.iter().take(2).for_each(|rank_index| evidence.extend(case.position_lines(*rank_index)));
    Some(Finding { culprits, statement: Statement::Sentence(sentence), confidence: Confidence::Medium, evidence })
}

/// Whether other ranks have completed this collective among themselves: in a communicator of the
/// same size that shares no rank with this one.
fn has_precedent(case: &Case<'_>, event: Event) -> bool {
    let Event::Collective { comm, seq } = event else { return false };
    let own = &case.comms[comm];
    let apart = |other: &&Comm<'_>| {
        other.size == own.size && other.members.iter().all(|member| own.member(member.rank_index).is_none())
    };
    let made = |other: &Comm<'_>| other.members.iter().all(|member| member.completed >= seq);
    case.comms.iter().filter(apart).any(|other| !other.members.is_empty() && made(other))
}
