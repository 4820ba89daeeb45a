//! `missing_rank`, in PyTorch's store: ranks wait for a key, and another rank has not set it.
//!
//! All ranks that wait are in a call of the store, after they have created a communicator and
//! outside the creation of another one. In a creation, it is `comm_init`. The key may name the rank
//! that has to set it. The confidence is medium, because a program may use its store in any way.

use super::{
    comm_init,
    rule::{Rule, never_ruled_out},
};
use crate::{
    case::Case,
    explanation::{CreationFault, Explanation, MissedStep},
    finding::{Fact, Finding},
    graph::Suspect,
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::MissingRank, explain, rule_out: never_ruled_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Host { rank_index, events, .. } = suspect else { return None };
    if !events.is_empty() {
        return comm_init::few_inside(case, suspect, *rank_index, true);
    }
    if case.stack_waiters.is_empty() || !case.stack_waiters.iter().all(|waiter| case.uses_store(*waiter)) {
        return None;
    }
    let fault = CreationFault::Missing { rank_index: *rank_index, missed: MissedStep::Key, still_starting: false };
    Some(Finding {
        culprits: vec![*rank_index],
        explanation: Explanation::Creation(fault),
        confidence: Confidence::Medium,
        evidence: vec![Fact::Position(*rank_index)],
    })
}
