//! The interface of a rule, and the finding that it returns.

use crate::{
    case::Case,
    explanation::Explanation,
    graph::Suspect,
    verdict::{Cause, Confidence, EvidenceLine},
};

/// One cause and how to recognize it.
pub(crate) struct Rule {
    /// The cause that this rule finds.
    pub cause: Cause,
    /// Explains a suspect, or returns `None` to leave it to the next rule.
    pub explain: fn(&Case<'_>, &Suspect) -> Option<Finding>,
    /// The reason why it is not this cause, if the evidence excludes the cause and a reader could
    /// suspect it.
    pub rule_out: fn(&Case<'_>, &[usize]) -> Option<String>,
}

/// What a rule found about a suspect.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    /// The culprits, as rank indices.
    pub culprits: Vec<usize>,
    /// Why they hold up the others.
    pub explanation: Explanation,
    /// How far the finding can be trusted.
    pub confidence: Confidence,
    /// The facts that support the finding.
    pub evidence: Vec<EvidenceLine>,
}

/// For rules whose cause no reader confuses with another.
pub(super) fn never_ruled_out(_: &Case<'_>, _: &[usize]) -> Option<String> {
    None
}
