//! The creation of a communicator: some of its ranks do not take part.

use super::{Number, Ranks, Statement, hosts, location_of_one, place_of_one, unknown_members};
use crate::{case::Case, graph::Event, text::capital, verdict::EvidenceLine};

/// What a rank has not done while others create a communicator.
#[derive(Clone, Copy)]
pub(crate) enum MissedStep {
    /// It has not set the key for which the others wait in the store.
    Key,
    /// Its call returned without the others.
    Left,
    /// It has not joined, and it has made no device call at all.
    JoinAndDevice,
    /// It has not joined.
    Join,
}

/// A rank that is missing in the creation of a communicator. `still_starting` if it has probably
/// only just started.
pub(crate) fn missing(case: &Case<'_>, rank_index: usize, missed: MissedStep, still_starting: bool) -> Statement {
    let what = match missed {
        MissedStep::Key => "not set the key that the others wait for in the store",
        MissedStep::Left => "left the creation of a communicator that the others are still in",
        MissedStep::JoinAndDevice => "not joined the communicator or made any device call",
        MissedStep::Join => "not joined the communicator",
    };
    let progress = |number: Number| match still_starting {
        true => number.word(
            "; it makes progress, so it is probably still starting",
            "; they make progress, so they are probably still starting",
        ),
        false => "",
    };
    Statement::of_ranks(|number| {
        format!("{} {what}{}{}", number.has(), case.location_clause(rank_index, number), progress(number))
    })
}

pub(crate) fn missing_line(case: &Case<'_>, rank_index: usize, event: Event) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    super::line(format!("{}; rank {rank} is not", case.waiters_in(event)), vec![rank])
}

/// All known members are inside the creation. `unnamed` members are unknown.
pub(crate) fn all_inside(case: &Case<'_>, event: Event, unnamed: u32) -> Statement {
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
pub(crate) fn few_elsewhere(case: &Case<'_>, few: &[usize], creating: &[usize], event: Event) -> Statement {
    let (who, most) = (Ranks::of(case, few), Ranks::of(case, creating));
    let number = who.number();
    Statement::Sentence(format!(
        "{} {} not joined the creation of a communicator that {} are in, and {} in {}{}.",
        who.capital(),
        number.has(),
        most.text(),
        number.waits(),
        case.describe(event),
        place_of_one(case, few)
    ))
}

pub(crate) fn creating_line(case: &Case<'_>, creating: &[usize]) -> EvidenceLine {
    let who = Ranks::of(case, creating);
    let text = format!("{} are in the creation of a communicator", who.text());
    who.line(text)
}

/// Ranks that create a communicator of `claimed` ranks, while `others` create it with `size` ranks.
pub(crate) struct OtherSize<'a> {
    pub culprits: &'a [usize],
    pub claimed: u32,
    pub others: &'a [usize],
    pub size: u32,
}

fn creates(number: Number) -> &'static str {
    number.word("creates", "create")
}

impl OtherSize<'_> {
    fn clause(&self, case: &Case<'_>, communicator: &str) -> String {
        let (who, others) = (Ranks::of(case, self.culprits), Ranks::of(case, self.others));
        format!(
            "{} {} {communicator} with {} ranks, and {} {} it with {}",
            who.text(),
            creates(who.number()),
            self.claimed,
            others.text(),
            creates(others.number()),
            self.size
        )
    }

    /// The statement, with the end or the place of a single culprit.
    pub fn statement(&self, case: &Case<'_>) -> Statement {
        let single = match self.culprits {
            [culprit] => {
                let (view, place) = (case.view(*culprit), case.place(*culprit));
                match (view.dead(), place.is_empty()) {
                    (true, _) => format!("; rank {} {}", view.rank, hosts::end(case, *culprit, Number::One)),
                    (false, true) => String::new(),
                    (false, false) => format!("; rank {} is{place}", view.rank),
                }
            }
            _ => String::new(),
        };
        Statement::Sentence(format!("{}{single}.", capital(&self.clause(case, "the communicator"))))
    }

    pub fn line(&self, case: &Case<'_>) -> EvidenceLine {
        Ranks::of(case, self.culprits).line(self.clause(case, "a communicator"))
    }
}

/// Ranks that cannot connect to the store at which the others are.
pub(crate) fn no_store(case: &Case<'_>, outside: &[usize], inside: &[usize]) -> Statement {
    let (who, others) = (Ranks::of(case, outside), Ranks::of(case, inside));
    Statement::Sentence(format!(
        "{} cannot connect to the store that {} {}{}; check that MASTER_ADDR and MASTER_PORT are the same on all ranks, and that {} can reach that address.",
        who.capital(),
        others.text(),
        others.number().word("uses", "use"),
        location_of_one(case, outside),
        who.text(),
    ))
}

/// The ranks at the store, and those that cannot connect to it.
pub(crate) fn no_store_lines(case: &Case<'_>, outside: &[usize], inside: &[usize]) -> Vec<EvidenceLine> {
    let (who, others) = (Ranks::of(case, outside), Ranks::of(case, inside));
    let there = format!("{} {} in the creation of a communicator", others.text(), others.number().is());
    let outside = format!("{} {} connecting to the store", who.text(), who.number().is());
    vec![others.line(there), who.line(outside)]
}
