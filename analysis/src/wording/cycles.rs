//! Ranks that wait for each other in a cycle.

use super::{Number, Ranks, Statement, about, line, named_location, place_of_one};
use crate::{
    case::Case,
    graph::Event,
    history::{Deviation, Token},
    text::{communicator, op_name},
    verdict::EvidenceLine,
};

/// What the ranks that left their pattern did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PatternBreak {
    /// They left out a collective.
    Collective,
    /// They left out a send or a receive.
    Transfer,
    /// They made a send or a receive that they had never made before.
    NewTransfer,
    /// They made a collective of a communicator in which they had never made it before.
    NewCollective,
    /// They exchanged two collectives.
    Order,
    /// They exchanged two operations, at least one of them a send or a receive.
    TransferOrder,
}

/// An operation of a rank's past: `send to rank 3`, `all_reduce of communicator 0x1f`.
fn past_operation(case: &Case<'_>, rank_index: usize, token: Token) -> String {
    let name = op_name(token.op);
    if !token.is_p2p() {
        return format!("{name} of communicator {}", communicator(token.communicator));
    }
    let comm = case.comms.iter().find(|comm| comm.id == token.communicator && comm.member(rank_index).is_some());
    let peer = comm.and_then(|comm| comm.rank_index_of(token.peer)).map(|peer| case.view(peer).rank);
    if token.peer < 0 {
        return format!("{name} from any rank");
    }
    let towards = if name == "send" { "to" } else { "from" };
    match peer {
        Some(rank) => format!("{name} {towards} rank {rank}"),
        None => format!("{name} {towards} member {} of communicator {}", token.peer, communicator(token.communicator)),
    }
}

/// Ranks that left the pattern of their operations, shown by one of them. `waited` is an event in
/// which the others wait.
pub(crate) fn left_pattern(
    case: &Case<'_>,
    culprits: &[usize],
    kind: PatternBreak,
    (rank_index, deviation): (usize, &Deviation),
    waited: Option<Event>,
) -> Statement {
    let who = Ranks::of(case, culprits);
    let number = Number::of(culprits.len());
    let (it, its) = (number.it(), number.its());
    let expected = past_operation(case, rank_index, deviation.expected);
    let actual = past_operation(case, rank_index, deviation.actual);
    let did = match kind {
        PatternBreak::Collective | PatternBreak::Transfer => {
            format!("skipped the {expected} that {it} had always called before the {actual}")
        }
        PatternBreak::NewCollective => {
            format!("called the {actual} for the first time, in place of {its} usual {expected}")
        }
        PatternBreak::NewTransfer => {
            format!("called a {actual} for the first time, in place of {its} usual {expected}")
        }
        PatternBreak::Order | PatternBreak::TransferOrder => {
            format!(
                "called the {actual} before the {expected}, although {it} had always called them in the other order"
            )
        }
    };
    let waits = waited.map_or_else(String::new, |event| format!(": {}", case.waiters_in(event)));
    Statement::Sentence(format!("{} {did}, and now the ranks wait for each other{waits}.", who.capital()))
}

pub(crate) fn left_pattern_line(case: &Case<'_>, rank_index: usize, deviation: &Deviation) -> EvidenceLine {
    let text = format!(
        "called the {} in place of the {}, which it had called at this point all {} times before",
        past_operation(case, rank_index, deviation.actual),
        past_operation(case, rank_index, deviation.expected),
        deviation.times
    );
    about(case, rank_index, &text)
}

/// Ranks that entered the communicators in another order than the ranks that wait in these events.
pub(crate) fn other_order(case: &Case<'_>, culprits: &[usize], waited: &[Event]) -> Statement {
    let parts: Vec<String> = waited.iter().take(2).map(|event| case.waiters_in(*event)).collect();
    Statement::Sentence(format!(
        "{} entered the communicators in another order than the others, and now the ranks wait for each other: {}.",
        Ranks::of(case, culprits).capital(),
        parts.join(", and ")
    ))
}

/// Ranks that are in event `own` instead of `left_out`, which other ranks have completed among
/// themselves.
pub(crate) fn left_out(case: &Case<'_>, culprits: &[usize], own: Event, left_out: Event) -> Statement {
    let (who, inside) = (Ranks::of(case, culprits), Ranks::of(case, case.graph.waiters_of(left_out)));
    Statement::Sentence(format!(
        "{} left out {}, in which {} {}, and {} in {}{}; another communicator of the same size completed its own.",
        who.capital(),
        case.describe(left_out),
        inside.text(),
        inside.number().waits(),
        who.number().is(),
        case.describe(own),
        case.place(culprits[0]),
    ))
}

/// A rank that is in event `own`, while others wait for it in several others.
pub(crate) fn out_of_step(case: &Case<'_>, rank_index: usize, own: Event, owed: &[Event]) -> Statement {
    Statement::Sentence(format!(
        "Rank {} is out of step: it is in {}{}, and others wait for it in {} and in {} more {}.",
        case.view(rank_index).rank,
        case.describe(own),
        case.place(rank_index),
        case.describe(owed[0]),
        owed.len() - 1,
        if owed.len() == 2 { "collective" } else { "collectives" },
    ))
}

pub(crate) fn in_all_cycles_line(case: &Case<'_>, rank_index: usize) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    line(format!("rank {rank} is the only rank in all wait cycles"), vec![rank])
}

/// Ranks whose sends and receives wait for each other.
pub(crate) fn cycle_of_transfers(case: &Case<'_>, culprits: &[usize], transfers: &[Event]) -> Statement {
    Statement::Sentence(format!(
        "{} wait for each other in a cycle of sends and receives; for example, {} is in {}.",
        Ranks::of(case, culprits).capital(),
        case.waiters_text(transfers[0]),
        case.describe(transfers[0])
    ))
}

/// Ranks that create communicators of one size with different unique ids.
pub(crate) fn different_ids(case: &Case<'_>, size: u32, creations: &[Event]) -> Statement {
    let each: Vec<String> = creations.iter().map(|event| case.waiters_in(*event)).collect();
    Statement::Sentence(format!(
        "The ranks cannot create their communicator of {size} ranks, because they use different unique ids: {}; the store may still have the id of an earlier attempt.",
        each.join(", and ")
    ))
}

/// The creation of a communicator returned on some ranks, which use it already, without the others.
pub(crate) fn created_alone(case: &Case<'_>, returned: &[usize], creation: Event, used: Event) -> Statement {
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
        place_of_one(case, returned)
    ))
}

/// Some ranks are in the creation of a communicator, and the others wait for them in `used`. The
/// culprits are the ranks of one side.
pub(crate) struct SplitCreation<'a> {
    /// Ranks in the creation.
    pub creating: &'a [usize],
    /// Ranks that have not joined it.
    pub absent: &'a [usize],
    pub creation: Event,
    pub used: Event,
}

impl SplitCreation<'_> {
    /// The statement in which the creating ranks are the culprits, or the absent ones.
    pub fn statement(&self, case: &Case<'_>, blames_creating: bool) -> Statement {
        let (creating, absent) = (Ranks::of(case, self.creating), Ranks::of(case, self.absent));
        let number = absent.number();
        let (what, next) = (case.describe(self.creation), case.describe(self.used));
        Statement::Sentence(if blames_creating {
            format!(
                "{} {} in {what}, which {absent} {} not join: {absent} {} in {next}{}.",
                creating.capital(),
                creating.number().is(),
                number.does(),
                number.waits(),
                named_location(case, self.creating),
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
                place_of_one(case, self.absent),
            )
        })
    }

    /// The ranks in the creation, and those in the operation.
    pub fn lines(&self, case: &Case<'_>) -> Vec<EvidenceLine> {
        let of = |rank_indices: &[usize], event: Event| {
            let who = Ranks::of(case, rank_indices);
            let text = format!("{} {} in {}", who.text(), who.number().is(), case.describe(event));
            who.line(text)
        };
        vec![of(self.creating, self.creation), of(self.absent, self.used)]
    }
}
