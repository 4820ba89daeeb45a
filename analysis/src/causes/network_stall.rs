//! `network_stall`: all ranks agree, all have entered, and nothing moves.
//!
//! Every member of the communicator has launched the same operation with the same number, size and
//! type. Every device has begun it, and it does not complete. No rank is behind and none differs,
//! so no rank is to blame: the data does not move. The confidence is high only if the records of
//! all members are there. It is medium if a rank completed while others did not, or if the sizes of
//! the operation cannot be compared, as in all-to-all.

use xpu_timer_proto::v1::{Op, Operation};

use super::{
    case::Case,
    collective::{Collective, equal_sizes},
    rule::{Finding, Rule, Statement},
    wording::line,
};
use crate::{
    graph::{Event, Suspect},
    text::{capital, ranks},
    verdict::{Cause, Confidence},
};

pub(super) const RULE: Rule = Rule { cause: Cause::NetworkStall, explain, rule_out };

fn explain(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let Suspect::Complete(event) = suspect else { return None };
    let waiters = case.world.ranks(case.graph.waiters_of(*event).iter().copied());
    let what = case.describe(*event);
    match event {
        Event::Collective { comm, .. } => {
            let collective = Collective::of(case, suspect)?;
            let unnamed = case.comms[*comm].unnamed;
            let stale = collective.inside.iter().any(|rank_index| case.view(*rank_index).watcher_stale());
            let equal =
                |(_, operation): &(usize, &Operation)| equal_sizes(operation.op()) || operation.op() == Op::Barrier;
            let comparable = collective.operations.iter().all(equal);
            let alone = case.comms[*comm].size < 2;
            // Some ranks have completed a reduce and others have not, as happens when they pass
            // different roots. These records do not contain the root.
            let rootless = |(_, operation): &(usize, &Operation)| operation.op() == Op::Reduce && operation.peer < 0;
            let roots = !collective.completed_by.is_empty() && collective.operations.iter().any(rootless);
            let confidence = match () {
                () if unnamed > 0 || alone || roots => Confidence::Low,
                () if stale
                    || !comparable
                    || !collective.completed_by.is_empty()
                    || collective.operations.len() < case.comms[*comm].members.len() =>
                {
                    Confidence::Medium
                }
                () => case.members_confidence(&[*event]),
            };
            let mut evidence =
                vec![line(format!("{}: {what} has begun and has not completed", ranks(&waiters)), waiters.clone())];
            if !collective.completed_by.is_empty() {
                let completed_by = case.world.ranks(collective.completed_by.iter().copied());
                evidence.push(line(format!("{}: {what} has completed", ranks(&completed_by)), completed_by));
            }
            if unnamed > 0 {
                evidence.push(line(
                    format!("{unnamed} of its members are not known; one of them may be to blame"),
                    Vec::new(),
                ));
            }
            if roots {
                evidence.push(line(
                    "the records do not tell the root: the ranks may have named different ones",
                    Vec::new(),
                ));
            }
            let verb = if waiters.len() == 1 { "is" } else { "are" };
            Some(Finding {
                culprits: Vec::new(),
                statement: Statement::Sentence(format!(
                    "{} {verb} in the same {what}, all have begun it and it does not move: no rank is behind and none differs, so look at the network.",
                    capital(&ranks(&waiters)),
                )),
                confidence,
                evidence,
            })
        }
        Event::PointToPoint { .. } => Some(Finding {
            culprits: Vec::new(),
            statement: Statement::Sentence(format!(
                "{} is in {what}, its peer is in the counterpart, and nothing moves between them: look at the network.",
                capital(&ranks(&waiters))
            )),
            confidence: Confidence::Medium,
            evidence: vec![line(format!("{}: {what} and its counterpart have begun", ranks(&waiters)), waiters)],
        }),
        Event::Init { .. } | Event::Split { .. } => None,
    }
}

fn rule_out(case: &Case<'_>, culprits: &[usize]) -> Option<String> {
    let culprit = *culprits.first()?;
    let behind = case.graph.suspects.iter().any(|suspect| matches!(suspect, Suspect::Host { rank_index, events, .. } | Suspect::Device { rank_index, events } if *rank_index == culprit && !events.is_empty()));
    behind.then(|| format!("rank {} is not in the operation that the others wait in", case.view(culprit).rank))
}
