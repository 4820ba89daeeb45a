//! `network_stall`: all ranks agree, all have entered, and nothing moves.
//!
//! Every member of the communicator has launched the same operation with the same number, size and
//! type. Every device has started it, and it does not complete. No rank is behind and none differs,
//! so no rank is the culprit: the data does not move. The confidence is high only if the records of
//! all members are there. It is medium if a rank completed while others did not, or if the sizes of
//! the operation cannot be compared, as in all-to-all.

use xpu_timer_proto::v1::{Op, Operation};

use super::collective::{Collective, equal_sizes};
use crate::{
    case::Case,
    explanation::{CollectiveFault, Explanation, TransferFault},
    finding::{CollectiveFact, Exclusion, Fact, Finding, Rule},
    graph::{Event, Suspect},
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::NetworkStall, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Complete(event) = suspect else { return None };
    match *event {
        // No record has the arguments of a kernel, so they may differ.
        Event::Collective { comm, .. } if case.comms[comm].kernel.is_some() => None,
        Event::Collective { comm, .. } => Some(of_collective(case, &Collective::of(case, suspect)?, comm)),
        Event::PointToPoint { .. } => Some(Finding {
            culprits: Vec::new(),
            explanation: Explanation::Transfer(TransferFault::Stalled { event: *event }),
            confidence: Confidence::Medium,
            evidence: vec![Fact::Explained],
        }),
        Event::Init { .. } | Event::Split { .. } => None,
    }
}

fn of_collective(case: &Case<'_>, collective: &Collective<'_>, comm: usize) -> Finding {
    let (event, comm) = (collective.event, &case.comms[comm]);
    let unnamed = comm.unnamed;
    let stale = collective.inside.iter().any(|rank_index| case.view(*rank_index).watcher_stale());
    let equal = |(_, operation): &(usize, &Operation)| equal_sizes(operation.op()) || operation.op() == Op::Barrier;
    let comparable = collective.operations.iter().all(equal);
    let alone = comm.size < 2;
    // Some ranks have completed a reduce and others have not, as happens when they pass different
    // roots. These records do not contain the root.
    let rootless = |(_, operation): &(usize, &Operation)| operation.op() == Op::Reduce && operation.peer < 0;
    let roots_may_differ = !collective.completed_by.is_empty() && collective.operations.iter().any(rootless);
    let completed_by = &collective.completed_by;
    let mut evidence = vec![Fact::Explained];
    if !completed_by.is_empty() {
        evidence.push(Fact::Collective(CollectiveFact::Completed { event, completed_by: completed_by.clone() }));
    }
    if unnamed > 0 {
        evidence.push(Fact::Collective(CollectiveFact::UnknownMembers(unnamed)));
    }
    if roots_may_differ {
        evidence.push(Fact::Collective(CollectiveFact::RootsMayDiffer));
    }
    let confidence = match () {
        () if unnamed > 0 || alone || roots_may_differ => Confidence::Low,
        () if stale || !comparable || !completed_by.is_empty() || collective.operations.len() < comm.members.len() => {
            Confidence::Medium
        }
        () => case.members_confidence(&[event]),
    };
    Finding {
        culprits: Vec::new(),
        explanation: Explanation::Collective(CollectiveFault::Stalled {
            event,
            certain: confidence == Confidence::High,
        }),
        confidence,
        evidence,
    }
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<Exclusion> {
    let culprit = *culprits.first()?;
    let behind = case.graph.suspects.iter().any(|suspect| matches!(suspect, Suspect::Host { rank_index, events, .. } | Suspect::Device { rank_index, events } if *rank_index == culprit && !events.is_empty()));
    behind.then_some(Exclusion::IsBehind(culprit))
}
