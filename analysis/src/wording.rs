//! The English of a verdict: its sentence, its lines of evidence, and the reasons why a cause is
//! ruled out. Rules return an `Explanation`, which consists of ranks, events and operations, and
//! [`verdict::explained`] renders it. No other module of the judge writes a sentence.

pub(crate) mod collectives;
pub(crate) mod creations;
pub(crate) mod cycles;
pub(crate) mod hosts;
mod phrases;
pub(crate) mod transfers;
pub(crate) mod verdict;

use crate::{case::Case, text, verdict::EvidenceLine};

/// How a finding becomes a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Statement {
    /// The predicate after `rank 2` or `ranks 2, 5`. The judge adds which ranks wait, and where.
    OfRanks {
        /// For one rank.
        one: String,
        /// For several ranks with the same predicate.
        many: String,
    },
    /// A complete sentence.
    Sentence(String),
}

impl Statement {
    /// A predicate whose words agree with the number of ranks.
    fn of_ranks(text: impl Fn(Number) -> String) -> Self {
        Statement::OfRanks { one: text(Number::One), many: text(Number::Many) }
    }
}

/// Whether a sentence is about one rank or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    One,
    Many,
}

impl Number {
    /// The number for this many ranks.
    fn of(count: usize) -> Self {
        if count == 1 { Number::One } else { Number::Many }
    }

    /// Selects the word for one rank or for several.
    fn word(self, one: &'static str, many: &'static str) -> &'static str {
        match self {
            Number::One => one,
            Number::Many => many,
        }
    }

    fn is(self) -> &'static str {
        self.word("is", "are")
    }

    fn has(self) -> &'static str {
        self.word("has", "have")
    }

    fn does(self) -> &'static str {
        self.word("does", "do")
    }

    fn it(self) -> &'static str {
        self.word("it", "they")
    }

    fn its(self) -> &'static str {
        self.word("its", "their")
    }

    fn it_has(self) -> &'static str {
        self.word("it has", "they have")
    }

    /// A call of one rank, or the calls of several: `its call returned`.
    fn its_call(self) -> &'static str {
        self.word("its call", "their calls")
    }

    /// The verb `to wait`.
    fn waits(self) -> &'static str {
        self.word("waits", "wait")
    }
}

/// Ranks of a sentence.
struct Ranks(Vec<u32>);

impl Ranks {
    /// The ranks with these indices.
    fn of(case: &Case<'_>, rank_indices: &[usize]) -> Self {
        Ranks(case.world.ranks(rank_indices.iter().copied()))
    }

    fn number(&self) -> Number {
        Number::of(self.0.len())
    }

    /// `rank 2`, `ranks 0-1, 3`, or `no rank`.
    fn text(&self) -> String {
        text::ranks(&self.0)
    }

    /// Like [`Ranks::text`], at the beginning of a sentence.
    fn capital(&self) -> String {
        text::capital(&self.text())
    }

    /// A line of evidence about these ranks.
    fn line(self, text: impl Into<String>) -> EvidenceLine {
        line(text, self.0)
    }
}

/// A line of evidence about some ranks.
fn line(text: impl Into<String>, ranks: Vec<u32>) -> EvidenceLine {
    EvidenceLine { text: text.into(), ranks }
}

/// A line of evidence about one rank: `rank 2 ` and the predicate.
fn about(case: &Case<'_>, rank_index: usize, predicate: &str) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    line(format!("rank {rank} {predicate}"), vec![rank])
}

/// A line of evidence about something on one rank: `rank 2: ` and the sentence.
fn detail(case: &Case<'_>, rank_index: usize, sentence: &str) -> EvidenceLine {
    let rank = case.view(rank_index).rank;
    line(format!("rank {rank}: {sentence}"), vec![rank])
}

/// `2 of its members are unknown`.
fn unknown_members(members: u32) -> String {
    format!("{members} of its members {} unknown", Number::of(members as usize).is())
}

/// The place of a rank, if it is alone.
fn place_of_one(case: &Case<'_>, rank_indices: &[usize]) -> String {
    match rank_indices {
        [rank_index] => case.place(*rank_index),
        _ => String::new(),
    }
}

/// Like [`place_of_one`], as a clause: `; it is at train.py:41 in load`.
fn location_of_one(case: &Case<'_>, rank_indices: &[usize]) -> String {
    match rank_indices {
        [rank_index] => case.location_clause(*rank_index, Number::One),
        _ => String::new(),
    }
}

/// The place of a rank, if it is alone and its place is known, as a clause that names the rank:
/// `; rank 2 is at train.py:41 in load`.
fn named_location(case: &Case<'_>, rank_indices: &[usize]) -> String {
    match place_of_one(case, rank_indices) {
        place if place.is_empty() => place,
        place => format!("; {} is{place}", Ranks::of(case, rank_indices).text()),
    }
}

/// The reasons why the evidence excludes a cause.
pub(crate) mod ruled_out {
    use super::Ranks;
    use crate::{case::Case, graph::Event};

    pub(crate) const OPERATIONS_AGREE: &str =
        "all ranks that wait in one collective of a communicator run the same operation";
    pub(crate) const NOT_STOPPED: &str = "no process is stopped or frozen";
    pub(crate) const NO_BLOCKED_DEVICE: &str =
        "no kernel or other device work keeps a launched collective from starting";

    /// No thread of the culprits sleeps uninterruptibly.
    pub(crate) fn no_uninterruptible_sleep(case: &Case<'_>, culprits: &[usize]) -> String {
        let who = Ranks::of(case, culprits).text();
        format!("no thread of {who} sleeps uninterruptibly (state D) in both samples")
    }

    /// The main threads of the culprits do not do this, such as `wait for the GIL`.
    pub(crate) fn main_thread_does_not(case: &Case<'_>, culprits: &[usize], what: &str) -> String {
        let who = Ranks::of(case, culprits);
        let (number, ranks) = (who.number(), who.text());
        let threads = number.word("the main thread", "the main threads");
        format!("{threads} of {ranks} {} not {what}", number.does())
    }

    /// The processes of this many ranks are alive.
    pub(crate) fn all_alive(ranks: usize) -> String {
        match ranks {
            1 => "the process of the only rank is alive".to_owned(),
            _ => format!("the processes of all {ranks} ranks are alive"),
        }
    }

    /// The culprits did not make progress between the samples.
    pub(crate) fn stands_still(case: &Case<'_>, culprits: &[usize]) -> String {
        let who = Ranks::of(case, culprits).text();
        format!("between the two samples, {who} reached no other line, used little CPU time and moved few bytes")
    }

    /// All ranks have entered a collective.
    pub(crate) fn all_entered(case: &Case<'_>, event: Event) -> String {
        format!("all ranks have entered {}", case.describe(event))
    }

    /// A rank is behind the others.
    pub(crate) fn not_in_operation(case: &Case<'_>, rank_index: usize) -> String {
        format!("rank {} has not started the operation that the others wait in", case.view(rank_index).rank)
    }
}
