//! What a rule is, and what it finds.

use super::{case::Case, wording::Number};
use crate::{
    graph::Suspect,
    verdict::{Cause, Confidence, EvidenceLine},
};

/// One cause and how it is recognized.
pub(crate) struct Rule {
    /// What it explains.
    pub cause: Cause,
    /// Explains a suspect, or leaves it to the next rule.
    pub explain: fn(&Case<'_>, &Suspect) -> Option<Finding>,
    /// Why it is not this cause, when the evidence excludes it and somebody could think that it is.
    pub rule_out: fn(&Case<'_>, &[usize]) -> Option<String>,
}

/// What a rule says of a suspect.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    /// The suspect's ranks, as views.
    pub culprits: Vec<usize>,
    /// The sentence, or its part about one rank.
    pub statement: Statement,
    /// How far it can be trusted.
    pub confidence: Confidence,
    /// The facts.
    pub evidence: Vec<EvidenceLine>,
}

/// How a finding becomes a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Statement {
    /// What follows after `rank 2`, and what follows after `ranks 2, 5`; who waits where is added.
    OfRanks {
        /// Of one rank.
        one: String,
        /// Of several of which the same is to be said.
        many: String,
    },
    /// The whole sentence.
    Sentence(String),
}

impl Statement {
    /// What is said of a rank, in words that agree with the number of ranks.
    pub fn of_ranks(text: impl Fn(Number) -> String) -> Self {
        Statement::OfRanks { one: text(Number::One), many: text(Number::Many) }
    }
}

/// For rules that nobody mistakes for another.
pub(super) fn never_ruled_out(_: &Case<'_>, _: &[usize]) -> Option<String> {
    None
}
