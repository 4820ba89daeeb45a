//! Ranks cannot connect to the store at which the others meet.

use std::cmp::Ordering;

use super::super::{
    case::Case,
    rule::{Finding, Statement},
    wording::line,
};
use crate::{
    stacks,
    text::{capital, ranks},
    verdict::{Activity, Confidence},
};

/// Larger jobs are not searched.
const MOST: usize = 1024;

/// Finds ranks that cannot connect to the store at which the others are: they use another address,
/// or the network does not lead there.
pub(super) fn explain(case: &Case<'_>) -> Option<Finding> {
    let creates = |rank_index: &usize| case.does(*rank_index, Activity::CommInit);
    if case.world.views.len() > MOST || case.world.views.iter().any(|view| view.dead() || view.halted()) {
        return None;
    }
    let connects = |rank_index: &usize| stacks::is_store_connect(&case.view(*rank_index).host.observed.witness);
    let (outside, inside): (Vec<usize>, Vec<usize>) = (0..case.world.views.len()).filter(creates).partition(connects);
    if outside.is_empty() || inside.is_empty() {
        return None;
    }
    let (who, others) = (case.world.ranks(outside.iter().copied()), case.world.ranks(inside.iter().copied()));
    let place = if outside.len() == 1 { case.place(outside[0]) } else { String::new() };
    let sentence = format!(
        "{} cannot connect to the store at which {} {}{place}: compare {} MASTER_ADDR and MASTER_PORT, and look at the network between them.",
        capital(&ranks(&who)),
        ranks(&others),
        if others.len() == 1 { "is" } else { "are" },
        if who.len() == 1 { "its" } else { "their" },
    );
    let mut evidence = vec![
        line(format!("{} in the creation of a communicator", ranks(&others)), others),
        line(format!("{} at the connection to its store", ranks(&who)), who),
    ];
    for &rank_index in outside.iter().take(2) {
        evidence.extend(case.position_lines(rank_index));
    }
    let (confidence, culprits) = match outside.len().cmp(&inside.len()) {
        Ordering::Less => (Confidence::Medium, outside),
        Ordering::Equal => (Confidence::Low, outside),
        Ordering::Greater => (Confidence::Low, inside),
    };
    Some(Finding { culprits, statement: Statement::Sentence(sentence), confidence, evidence })
}
