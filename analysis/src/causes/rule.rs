//! The interface of a rule.

use crate::{
    case::Case,
    finding::{Exclusion, Finding},
    graph::Suspect,
    verdict::Cause,
};

/// One cause and how to recognize it.
pub(crate) struct Rule {
    /// The cause that this rule finds.
    pub cause: Cause,
    /// Explains a suspect, or returns `None` to leave it to the next rule.
    pub explain: fn(&Case<'_>, &Suspect) -> Option<Finding>,
    /// The reason why it is not this cause, if the evidence excludes the cause and a reader could
    /// suspect it. The list has the culprits of the verdict.
    pub rule_out: fn(&Case<'_>, &[usize]) -> Option<Exclusion>,
}

/// For rules whose cause no reader confuses with another.
pub(super) fn never_ruled_out(_: &Case<'_>, _: &[usize]) -> Option<Exclusion> {
    None
}
