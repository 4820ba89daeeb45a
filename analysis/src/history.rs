//! The pattern of a rank's operations, and the last point where the rank left it.
//!
//! Training repeats itself: the same few operations are followed by the same next one. When ranks
//! wait for each other in a cycle, their counters agree and their stacks look alike. Only its own
//! past distinguishes the rank that did something else from the ranks that suffer. There are two
//! ways to compare with the past: what has always followed the operations just made, and what was
//! at this point one step ago, where a step is the period of the record. The first copes with
//! occasional evaluations. The second copes with a step that consists of many equal parts, such as
//! that of a pipeline.

use std::collections::HashMap;

use xpu_timer_proto::v1::{Op, OpKind, OpStatus, Operation};

use crate::world::RankView;

/// The longest context, in operations.
const MAX_CONTEXT: usize = 16;
/// A context must have had the same continuation at least this often before it counts as a rule.
const MIN_REPEATS: u32 = 3;

/// The identity of an operation for its rank: the corresponding operation of the next step is
/// equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Token {
    /// Identity of the communicator.
    pub communicator: u64,
    /// Operation.
    pub op: Op,
    /// Root or peer, -1 for none.
    pub peer: i32,
}

impl Token {
    fn of(operation: &Operation) -> Self {
        Token { communicator: operation.communicator, op: operation.op(), peer: operation.peer }
    }

    /// Whether an operation has this identity.
    pub(crate) fn is(self, operation: &Operation) -> bool {
        self == Token::of(operation)
    }

    /// Whether it is a send or a receive.
    pub(crate) fn is_p2p(self) -> bool {
        matches!(self.op, Op::Send | Op::Recv)
    }
}

/// How a rank left its pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deviation {
    /// The operation that had always come at this point.
    pub expected: Token,
    /// The operation that came.
    pub actual: Token,
    /// How often it had been `expected`.
    pub times: u32,
    /// The expected operation came right after: the two changed places.
    pub swapped: bool,
    /// The operation that came repeats the one before it.
    pub repeated: bool,
}

/// The operation that has followed one context so far.
struct Continuation {
    token: Token,
    times: u32,
    always: bool,
}

/// The last time that a rank did not do what it had always done at this point. `None` if there is
/// no such time, or if the record of its past is too short.
pub(crate) fn deviation(view: &RankView<'_>) -> Option<Deviation> {
    let tokens: Vec<Token> = view
        .operations()
        .filter(|operation| operation.kind() == OpKind::Collective && operation.communicator != 0)
        .map(Token::of)
        .collect();
    from_context(&tokens).or_else(|| from_period(&tokens))
}

/// Whether the rank has completed this operation before, with the same tag.
pub(crate) fn made_before(view: &RankView<'_>, operation: &Operation) -> bool {
    let same = |other: &Operation| {
        other.ticket != operation.ticket && other.tag == operation.tag && Token::of(other) == Token::of(operation)
    };
    view.operations().any(|other| other.status() == OpStatus::Completed && same(other))
}

/// Whether the rank has completed any operation with this identity.
pub(crate) fn made_token_before(view: &RankView<'_>, token: Token) -> bool {
    view.operations().any(|other| other.status() == OpStatus::Completed && token.is(other))
}

/// The first operation that differs from the one a period before it. Uses the period that holds
/// longest, and for at least three periods.
fn from_period(tokens: &[Token]) -> Option<Deviation> {
    let holds = |period: &usize| (*period..tokens.len()).find(|at| tokens[*at] != tokens[at - period]);
    let mut best: Option<(usize, usize)> = None;
    for period in 1..=tokens.len() / MIN_REPEATS as usize {
        // A period that holds to the end leaves nothing to explain.
        let until = holds(&period)?;
        if until >= MIN_REPEATS as usize * period && best.is_none_or(|(longest, _)| until > longest) {
            best = Some((until, period));
        }
    }
    let (at, period) = best.filter(|(at, _)| !recurs(tokens, *at))?;
    let expected = tokens[at - period];
    Some(Deviation {
        expected,
        actual: tokens[at],
        times: u32::try_from(at / period).unwrap_or(u32::MAX),
        swapped: swapped(tokens, at, expected),
        repeated: repeats(tokens, at),
    })
}

/// Whether the expected operation changed places with the one that came at `index`, as opposed to
/// being left out: it came right after, and the operations after it match what used to follow the
/// two better than what follows when one is missing.
fn swapped(tokens: &[Token], index: usize, expected: Token) -> bool {
    if tokens.get(index + 1) != Some(&expected) {
        return false;
    }
    let alike = |one: &mut dyn Iterator<Item = &Token>, two: &mut dyn Iterator<Item = &Token>| {
        one.zip(two).take(MAX_CONTEXT).take_while(|(one, two)| one == two).count()
    };
    // The latest place where the two came in their usual order after the longest equal run of
    // operations.
    let usual = (0..index.saturating_sub(1)).filter(|at| tokens[*at] == expected && tokens[at + 1] == tokens[index]);
    let before = |at: usize| alike(&mut tokens[..at].iter().rev(), &mut tokens[..index].iter().rev());
    let Some(usual) = usual.max_by_key(|at| before(*at)) else { return true };
    let followed = &tokens[usual + 2..index];
    let after_swap = 1 + alike(&mut tokens[index + 2..].iter(), &mut followed.iter());
    after_swap > alike(&mut tokens[index + 1..].iter(), &mut followed.iter())
}

fn from_context(tokens: &[Token]) -> Option<Deviation> {
    let mut continuations: HashMap<&[Token], Continuation> = HashMap::new();
    let mut last: Option<(usize, Deviation)> = None;
    for (index, token) in tokens.iter().enumerate() {
        let contexts = (1..=MAX_CONTEXT.min(index)).rev().map(|length| &tokens[index - length..index]);
        // The longest context that has been seen often enough decides.
        let known =
            contexts.clone().find_map(|context| continuations.get(context).filter(|known| known.times >= MIN_REPEATS));
        // A surprise soon after another one may only follow from it.
        let recovered = last.is_none_or(|(before, _)| index > before + MAX_CONTEXT);
        let surprise = known.filter(|known| known.always && known.token != *token && recovered);
        if let Some(known) = surprise.filter(|_| !recurs(tokens, index)) {
            let swapped = swapped(tokens, index, known.token);
            let (expected, actual, repeated) = (known.token, *token, repeats(tokens, index));
            last = Some((index, Deviation { expected, actual, times: known.times, swapped, repeated }));
        }
        for context in contexts {
            let continuation =
                continuations.entry(context).or_insert(Continuation { token: *token, times: 0, always: true });
            continuation.times += 1;
            continuation.always &= continuation.token == *token;
        }
    }
    last.map(|(_, deviation)| deviation)
}

fn repeats(tokens: &[Token], index: usize) -> bool {
    index > 0 && tokens[index - 1] == tokens[index]
}

/// Whether the operation at `index` comes again after the same operations. Then it is part of the
/// pattern, seen for the first time.
fn recurs(tokens: &[Token], index: usize) -> bool {
    let start = index.saturating_sub(MAX_CONTEXT / 4);
    let surprise = &tokens[start..=index];
    tokens[index + 1..].windows(surprise.len()).any(|later| later == surprise)
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{Evidence, FlightRecord, RankEvidence};

    use super::*;
    use crate::world::World;

    /// `a` to `z` are collectives of one communicator each; `S` and `R` are a send and a receive on
    /// one communicator.
    fn of(text: &str) -> Option<Deviation> {
        let operation = |letter: u8| {
            let op = match letter {
                b'S' => Op::Send,
                b'R' => Op::Recv,
                _ => Op::AllReduce,
            };
            Operation {
                kind: OpKind::Collective.into(),
                op: op.into(),
                communicator: if op == Op::AllReduce { letter.into() } else { 1 },
                peer: -1,
                ..Operation::default()
            }
        };
        let flight = FlightRecord { operations: text.bytes().map(operation).collect(), ..FlightRecord::default() };
        let rank = RankEvidence { flight: Some(flight), ..RankEvidence::default() };
        let evidence = Evidence { ranks: vec![rank], world_size: 1, ..Evidence::default() };
        deviation(&World::of(&evidence, &[]).views[0])
    }

    fn letters(text: &str) -> Option<(u8, u8, bool)> {
        let letter = |token: Token| match token.op {
            Op::Send => b'S',
            Op::Recv => b'R',
            _ => token.communicator as u8,
        };
        of(text).map(|found| (letter(found.expected), letter(found.actual), found.swapped))
    }

    #[test]
    fn the_last_break_of_a_pattern_is_found() {
        assert_eq!(letters("SRSRSRSRR"), Some((b'S', b'R', false)));
        assert_eq!(letters("ttdwttdwttdwttdwttw"), Some((b'd', b'w', false)), "left out");
        assert_eq!(letters("ttdwttdwttdwttdwttwd"), Some((b'd', b'w', true)), "changed places");
        assert_eq!(letters("tttdtttdtttdtttdttd"), Some((b't', b'd', false)), "one of a run");
        assert_eq!(letters("StRtSdStRtSdStRtSdStRtSdSRt"), Some((b't', b'R', false)), "the next of its kind follows");
        assert_eq!(letters("tRtStdtRtStdtRtStdtRtStdtRStd"), Some((b't', b'S', false)), "and is what is due next");
    }

    #[test]
    fn an_operation_that_repeats_the_one_before_it_is_known() {
        let repeated = |text: &str| of(text).map(|found| found.repeated);
        assert_eq!(repeated("StRStRStRStRR"), Some(true));
        assert_eq!(repeated("StRStRStRStRt"), Some(false), "the next step without its send");
    }

    #[test]
    fn a_step_of_many_equal_parts_that_is_cut_short() {
        let step = |parts: usize| format!("{}dw", "RSab".repeat(parts));
        let past = step(8).repeat(4);
        assert_eq!(letters(&format!("{past}{}", step(7))), Some((b'R', b'd', false)), "a part less");
        assert_eq!(letters(&format!("{past}{}", step(9))), Some((b'd', b'R', false)), "a part more");
        assert_eq!(letters(&format!("{past}{}", "RSab".repeat(5))), None, "in the middle of a step");
        assert_eq!(letters(&format!("{}{}", step(8), step(7))), None, "too short a past");
    }

    #[test]
    fn an_irregular_history_has_no_pattern() {
        assert_eq!(letters("SRSRSRSR"), None);
        assert_eq!(letters("RttttSRttttSRttttS"), None, "the end of the first run");
        assert_eq!(letters("SRR"), None, "too short a past");
        assert_eq!(letters("abcadbacbdcabdacdb"), None, "no rule");
        assert_eq!(letters(""), None);
    }
}
