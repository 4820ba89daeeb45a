//! The English of a verdict: its sentence ([`verdict`]), its lines of evidence, and the reasons why
//! a cause is ruled out ([`evidence`]). The rules and the judge return values of `explanation` and
//! `finding`, which consist of ranks, events and operations. The judge renders them at its end; no
//! other module of it imports this one.

mod collectives;
mod creations;
mod cycles;
pub(crate) mod evidence;
mod hosts;
mod phrases;
mod processes;
mod transfers;
pub(crate) mod verdict;

use xpu_timer_proto::v1::Operation;

use crate::{case::Case, stacks, text, verdict::EvidenceLine};

/// How a finding becomes a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Statement {
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

/// `the key "ready"`, or `the keys "done.0", "done.1" and 5 more`, of `count` keys.
fn keys<'k>(keys: impl IntoIterator<Item = &'k str>, count: usize) -> String {
    const MOST: usize = 3;
    let shown: Vec<String> = keys.into_iter().take(MOST).map(|key| format!("\"{}\"", stacks::shortened(key))).collect();
    let rest = count.saturating_sub(shown.len());
    let (word, list) = (Number::of(count).word("key", "keys"), shown.join(", "));
    if rest > 0 { format!("the {word} {list} and {rest} more") } else { format!("the {word} {list}") }
}

/// The keys that a call waits for.
fn awaited_keys(call: &Operation) -> String {
    keys(call.store_keys.iter().map(String::as_str), call.store_key_count as usize)
}

/// The keys that these ranks wait for in the store and that nobody has set, if they are known.
fn missing_keys(case: &Case<'_>, of: &[usize]) -> Option<String> {
    let missing = case.missing_keys(of);
    let text = || keys(missing.iter().map(|missing| missing.key.as_str()), missing.len());
    (!missing.is_empty()).then(text)
}

/// The place of a rank, or of several. If their places differ, it names that of the first rank.
fn place_of(case: &Case<'_>, rank_indices: &[usize]) -> String {
    let [first, others @ ..] = rank_indices else { return String::new() };
    if others.is_empty() {
        return case.place(*first);
    }
    let place = case.short_place(*first);
    if place.is_empty() || others.iter().all(|other| case.short_place(*other) == place) {
        return place;
    }
    format!(" (rank {}{place})", case.view(*first).rank)
}

/// The place of a rank as a clause, `; it is at train.py:41 in load`, or the places of several.
fn location_of(case: &Case<'_>, rank_indices: &[usize]) -> String {
    match rank_indices {
        [rank_index] => case.location_clause(*rank_index, Number::One),
        many => locations(case, many),
    }
}

/// The places of ranks, as far as they are known, as a clause that names the ranks:
/// `; rank 2 is at train.py:41 in load`.
fn named_location(case: &Case<'_>, rank_indices: &[usize]) -> String {
    match rank_indices {
        [rank_index] => match case.place(*rank_index) {
            place if place.is_empty() => place,
            place => format!("; {} is{place}", Ranks::of(case, rank_indices).text()),
        },
        many => locations(case, many),
    }
}

/// The places of ranks, as a clause: `; rank 1 is at train.py:41 in load, and rank 2 at …`. It
/// names only the first two places. The C functions are left out, because the evidence has them.
fn locations(case: &Case<'_>, rank_indices: &[usize]) -> String {
    let mut places: Vec<(String, Vec<usize>)> = Vec::new();
    for &rank_index in rank_indices {
        let place = case.short_place(rank_index);
        match places.iter_mut().find(|(known, _)| *known == place) {
            Some((_, ranks)) => ranks.push(rank_index),
            None => places.push((place, vec![rank_index])),
        }
    }
    places.retain(|(place, _)| !place.is_empty());
    let all = places.len();
    let clause = |(index, (place, ranks)): (usize, &(String, Vec<usize>))| {
        let who = Ranks::of(case, ranks);
        let verb = if index == 0 { format!(" {}", who.number().is()) } else { String::new() };
        format!("{}{verb}{place}", who.text())
    };
    match all {
        0 => String::new(),
        _ => {
            let shown: Vec<String> = places.iter().take(2).enumerate().map(clause).collect();
            let for_example = if all > shown.len() { "for example, " } else { "" };
            format!("; {for_example}{}", shown.join(", and "))
        }
    }
}
