//! The ranks that an event waits for, and the rank through which every wait cycle passes.

use std::collections::{BTreeMap, BTreeSet};

use super::case::Case;
use crate::{graph::Event, matching::Member};

/// Cycles of more ranks are not searched.
const MOST: usize = 4096;

/// Longer cycles are not searched for a rank through which all cycles pass.
const MOST_TRIED: usize = 64;

/// The members for which the ranks inside an event wait.
pub(super) fn awaited_members(case: &Case<'_>, event: Event) -> Vec<usize> {
    match event {
        Event::Collective { comm, seq } => {
            let late = |member: &&Member<'_>| member.started.max(member.completed) < seq;
            case.comms[comm].members.iter().filter(late).map(|member| member.rank_index).collect()
        }
        Event::PointToPoint { comm, peer, .. } => case.comms[comm].rank_index_of(peer).into_iter().collect(),
        Event::Init { .. } | Event::Split { .. } => Vec::new(),
    }
}

/// The only rank through which every wait cycle passes: without it, all chains of waiting would
/// end. `None` if there are several such ranks or none.
pub(super) fn in_all_cycles(case: &Case<'_>, events: &[Event]) -> Option<usize> {
    let known = |event: &Event| !matches!(event, Event::Init { .. } | Event::Split { .. });
    if !events.iter().all(known) {
        return None;
    }
    // From a waiting rank to the index of its event, and from there to the ranks that the event
    // waits for.
    let mut waits: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, event) in events.iter().enumerate() {
        case.graph.waiters_of(*event).iter().for_each(|rank_index| waits.entry(*rank_index).or_default().push(index));
    }
    if waits.len() > MOST {
        return None;
    }
    let waiting = |event: &Event| {
        awaited_members(case, *event).into_iter().filter(|rank_index| waits.contains_key(rank_index)).collect()
    };
    let to: Vec<Vec<usize>> = events.iter().map(waiting).collect();
    let candidates = cycle_without(&waits, &to, None)?;
    if candidates.len() > MOST_TRIED {
        return None;
    }
    let mut found = candidates.into_iter().filter(|rank_index| cycle_without(&waits, &to, Some(*rank_index)).is_none());
    found.next().filter(|_| found.next().is_none())
}

/// The ranks of some wait cycle that does not pass through `without`. `None` if there is no such
/// cycle.
fn cycle_without(waits: &BTreeMap<usize, Vec<usize>>, to: &[Vec<usize>], without: Option<usize>) -> Option<Vec<usize>> {
    let next = |rank_index: usize| -> Vec<usize> {
        let events = waits.get(&rank_index).filter(|_| Some(rank_index) != without);
        events
            .into_iter()
            .flatten()
            .flat_map(|event| &to[*event])
            .copied()
            .filter(|other| *other != rank_index)
            .collect()
    };
    let mut done: BTreeSet<usize> = BTreeSet::new();
    for &root in waits.keys() {
        // The path from the root. Each entry holds a rank and its successors that are still to be
        // visited.
        let mut way: Vec<(usize, Vec<usize>)> = Vec::new();
        let mut on_way: BTreeSet<usize> = BTreeSet::new();
        if done.insert(root) {
            on_way.insert(root);
            way.push((root, next(root)));
        }
        while let Some((rank_index, rest)) = way.last_mut() {
            match rest.pop() {
                Some(other) if on_way.contains(&other) => {
                    return Some(
                        way.iter()
                            .map(|(rank_index, _)| *rank_index)
                            .skip_while(|rank_index| *rank_index != other)
                            .collect(),
                    );
                }
                Some(other) if done.insert(other) => {
                    on_way.insert(other);
                    way.push((other, next(other)));
                }
                Some(_) => {}
                None => {
                    on_way.remove(rank_index);
                    way.pop();
                }
            }
        }
    }
    None
}
