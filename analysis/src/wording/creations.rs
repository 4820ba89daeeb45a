//! The creation of a communicator: some of its ranks do not take part.

use super::{
    Number, Ranks, Statement, collectives::inside_line, hosts, location_of, locations, missing_keys, named_location,
    place_of, unknown_members,
};
use crate::{
    case::Case,
    explanation::{CreationFault, MissedStep, OtherSize, SplitCreation},
    graph::Event,
    text::capital,
    verdict::EvidenceLine,
};

/// The text about what is wrong with the creation of a communicator.
pub(super) fn statement(case: &Case<'_>, fault: &CreationFault) -> Statement {
    match fault {
        CreationFault::Missing { rank_index, missed, still_starting } => {
            missing(case, *rank_index, *missed, *still_starting)
        }
        CreationFault::AllInside { event, unnamed } => all_inside(case, *event, *unnamed),
        CreationFault::FewElsewhere { few, creating, event } => few_elsewhere(case, few, creating, *event),
        CreationFault::OtherSize(passed) => other_size(case, passed),
        CreationFault::NoStore { outside, inside } => no_store(case, outside, inside),
        CreationFault::DifferentIds { size, creations } => different_ids(case, *size, creations),
        CreationFault::CreatedAlone { returned, creation, used } => created_alone(case, returned, *creation, *used),
        CreationFault::Split { split: between, blames_creating } => split(case, between, *blames_creating),
    }
}

/// The lines of evidence about what is wrong with the creation of a communicator.
pub(super) fn lines(case: &Case<'_>, fault: &CreationFault) -> Vec<EvidenceLine> {
    match fault {
        CreationFault::FewElsewhere { creating, .. } => vec![creating_line(case, creating)],
        CreationFault::OtherSize(passed) => vec![other_size_line(case, passed)],
        CreationFault::NoStore { outside, inside } => no_store_lines(case, outside, inside),
        CreationFault::CreatedAlone { returned, creation, used } => {
            split_lines(case, (case.graph.waiters_of(*creation), *creation), (returned, *used))
        }
        CreationFault::Split { split, .. } => {
            split_lines(case, (&split.creating, split.creation), (&split.absent, split.used))
        }
        CreationFault::Missing { .. } | CreationFault::AllInside { .. } | CreationFault::DifferentIds { .. } => {
            Vec::new()
        }
    }
}

/// A rank that is missing in the creation of a communicator. `still_starting` if it has probably
/// only just started.
fn missing(case: &Case<'_>, rank_index: usize, missed: MissedStep, still_starting: bool) -> Statement {
    let what = match missed {
        MissedStep::Key => match missing_keys(case, &case.stack_waiters) {
            Some(keys) => format!("not set {keys} that the others wait for in the store"),
            None => "not set the key that the others wait for in the store".to_owned(),
        },
        MissedStep::Left => "left the creation of a communicator that the others are still in".to_owned(),
        MissedStep::JoinAndDevice => "not joined the communicator or made any device call".to_owned(),
        MissedStep::Join => "not joined the communicator".to_owned(),
    };
    let progress = |number: Number| match still_starting {
        true => number.word(
            "; it makes progress, so it is probably still starting",
            "; they make progress, so they are probably still starting",
        ),
        false => "",
    };
    Statement::of_ranks(|number| {
        let (place, own_wait) = (case.location_clause(rank_index, number), case.own_wait_clause(rank_index, number));
        format!("{} {what}{place}{own_wait}{}", number.has(), progress(number))
    })
}

/// All known members are inside the creation. `unnamed` members are unknown.
fn all_inside(case: &Case<'_>, event: Event, unnamed: u32) -> Statement {
    let rest = if unnamed > 0 {
        format!("; {}", unknown_members(unnamed))
    } else {
        ", which does not complete: check the network between them".to_owned()
    };
    let inside = Ranks::of(case, case.graph.waiters_of(event));
    let what = case.describe(event);
    Statement::Sentence(format!("{} {} in {what}{rest}.", inside.capital(), inside.number().is()))
}

/// Few ranks wait in `event` for ranks that are all in the creation of a communicator.
fn few_elsewhere(case: &Case<'_>, few: &[usize], creating: &[usize], event: Event) -> Statement {
    let (who, most) = (Ranks::of(case, few), Ranks::of(case, creating));
    let number = who.number();
    let step = if waits_in_store(case, creating) {
        let keys = missing_keys(case, creating).unwrap_or_else(|| "the key".to_owned());
        format!("set {keys} that {} wait for in the store", most.text())
    } else {
        format!("joined the creation of a communicator that {} are in", most.text())
    };
    Statement::Sentence(format!(
        "{} {} not {step}, and {} in {}{}.",
        who.capital(),
        number.has(),
        number.waits(),
        case.describe(event),
        place_of(case, few)
    ))
}

fn creating_line(case: &Case<'_>, creating: &[usize]) -> EvidenceLine {
    let who = Ranks::of(case, creating);
    let place =
        if waits_in_store(case, creating) { "wait in the store" } else { "are in the creation of a communicator" };
    let text = format!("{} {place}", who.text());
    who.line(text)
}

/// Whether ranks wait in the store, outside the creation of a communicator.
fn waits_in_store(case: &Case<'_>, rank_indices: &[usize]) -> bool {
    rank_indices.iter().all(|rank_index| case.uses_store(*rank_index))
}

fn creates(number: Number) -> &'static str {
    number.word("creates", "create")
}

fn other_size_clause(case: &Case<'_>, passed: &OtherSize, communicator: &str) -> String {
    let (who, others) = (Ranks::of(case, &passed.culprits), Ranks::of(case, &passed.others));
    format!(
        "{} {} {communicator} with {} ranks, and {} {} it with {}",
        who.text(),
        creates(who.number()),
        passed.claimed,
        others.text(),
        creates(others.number()),
        passed.size
    )
}

/// Ranks create the communicator with another number of ranks, with the end or the place of the
/// culprits.
fn other_size(case: &Case<'_>, passed: &OtherSize) -> Statement {
    let single = match passed.culprits[..] {
        [culprit] => {
            let (view, place) = (case.view(culprit), case.place(culprit));
            match (view.dead(), place.is_empty()) {
                (true, _) => format!("; rank {} {}", view.rank, hosts::end(case, culprit, Number::One)),
                (false, true) => String::new(),
                (false, false) => format!("; rank {} is{place}", view.rank),
            }
        }
        _ => locations(case, &passed.culprits),
    };
    Statement::Sentence(format!("{}{single}.", capital(&other_size_clause(case, passed, "the communicator"))))
}

fn other_size_line(case: &Case<'_>, passed: &OtherSize) -> EvidenceLine {
    Ranks::of(case, &passed.culprits).line(other_size_clause(case, passed, "a communicator"))
}

/// Ranks that cannot connect to the store at which the others are.
fn no_store(case: &Case<'_>, outside: &[usize], inside: &[usize]) -> Statement {
    let (who, others) = (Ranks::of(case, outside), Ranks::of(case, inside));
    Statement::Sentence(format!(
        "{} cannot connect to the store that {} {}{}; check that MASTER_ADDR and MASTER_PORT are the same on all ranks, and that {} can reach that address.",
        who.capital(),
        others.text(),
        others.number().word("uses", "use"),
        location_of(case, outside),
        who.text(),
    ))
}

/// The ranks at the store, and those that cannot connect to it.
fn no_store_lines(case: &Case<'_>, outside: &[usize], inside: &[usize]) -> Vec<EvidenceLine> {
    let (who, others) = (Ranks::of(case, outside), Ranks::of(case, inside));
    let there = format!("{} {} in the creation of a communicator", others.text(), others.number().is());
    let outside = format!("{} {} connecting to the store", who.text(), who.number().is());
    vec![others.line(there), who.line(outside)]
}

/// Ranks that create communicators of one size with different unique ids.
fn different_ids(case: &Case<'_>, size: u32, creations: &[Event]) -> Statement {
    let each: Vec<String> = creations.iter().map(|event| case.waiters_in(*event)).collect();
    Statement::Sentence(format!(
        "The ranks cannot create their communicator of {size} ranks, because they use different unique ids: {}; the store may still have the id of an earlier attempt.",
        each.join(", and ")
    ))
}

/// The creation of a communicator returned on some ranks, which use it already, without the others.
fn created_alone(case: &Case<'_>, returned: &[usize], creation: Event, used: Event) -> Statement {
    let (who, inside) = (Ranks::of(case, returned), Ranks::of(case, case.graph.waiters_of(creation)));
    let number = who.number();
    Statement::Sentence(format!(
        "{} did not take part in {}: {} returned without {}, and {} {} now in {}{}.",
        who.capital(),
        case.describe(creation),
        number.its_call(),
        inside.text(),
        who.text(),
        number.is(),
        case.describe(used),
        place_of(case, returned)
    ))
}

/// The statement in which the creating ranks are the culprits, or the absent ones.
fn split(case: &Case<'_>, between: &SplitCreation, blames_creating: bool) -> Statement {
    let (creating, absent) = (Ranks::of(case, &between.creating), Ranks::of(case, &between.absent));
    let number = absent.number();
    let (what, next) = (case.describe(between.creation), case.describe(between.used));
    Statement::Sentence(if blames_creating {
        format!(
            "{} {} in {what}, which {absent} {} not join: {absent} {} in {next}{}.",
            creating.capital(),
            creating.number().is(),
            number.does(),
            number.waits(),
            named_location(case, &between.creating),
            absent = absent.text(),
        )
    } else {
        format!(
            "{} {} not joined {what}, in which {} {}, and {} in {next}{}.",
            absent.capital(),
            number.has(),
            creating.text(),
            creating.number().waits(),
            number.is(),
            place_of(case, &between.absent),
        )
    })
}

/// The ranks in the creation, and those in the operation.
fn split_lines(
    case: &Case<'_>,
    (creating, creation): (&[usize], Event),
    (absent, used): (&[usize], Event),
) -> Vec<EvidenceLine> {
    vec![inside_line(case, creating, creation), inside_line(case, absent, used)]
}
