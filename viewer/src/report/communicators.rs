//! The operation of each rank, from flight records alone, in the form of the verdict. It serves
//! folders without a verdict, and communicators that the verdict omits because nothing is pending
//! on them.

use std::collections::BTreeMap;
use xpu_timer_analysis::verdict::{CommunicatorReport, OperationState};
use xpu_timer_analysis::{communicator_groups, communicator_name, operation_state};
use xpu_timer_proto::v1::{FlightRecord, OpKind, OpStatus, Operation};

/// Completed, started and launched collectives.
type Counts = [u64; 3];

/// The flight records of one communicator.
#[derive(Debug, Default)]
struct Recorded {
    size: u32,
    ranks: BTreeMap<u32, (Counts, Option<OperationState>)>,
}

/// Adds flight records one by one.
#[derive(Debug, Default)]
pub(super) struct Communicators {
    recorded: BTreeMap<u64, Recorded>,
}

impl Communicators {
    /// Adds the flight record of one rank.
    pub(super) fn add(&mut self, rank: u32, flight: &FlightRecord) {
        for communicator in &flight.communicators {
            let recorded = self.recorded.entry(communicator.id).or_default();
            recorded.size = recorded.size.max(communicator.size);
            let counts = [communicator.completed, communicator.started, communicator.launched];
            recorded.ranks.insert(rank, (counts, oldest_pending(flight, communicator.id)));
        }
    }

    /// The communicators that the verdict does not list, those with pending operations first.
    pub(super) fn finish(self, listed: &[CommunicatorReport]) -> Vec<CommunicatorReport> {
        let mut reports: Vec<CommunicatorReport> = self
            .recorded
            .into_iter()
            .map(|(id, recorded)| (communicator_name(id), recorded))
            .filter(|(id, _)| listed.iter().all(|report| report.id != *id))
            .map(|(id, recorded)| report(id, recorded))
            .collect();
        reports.sort_by_key(|report| report.groups.iter().all(|group| group.waits_in.is_none()));
        reports
    }
}

fn report(id: String, recorded: Recorded) -> CommunicatorReport {
    let known = u32::try_from(recorded.ranks.len()).unwrap_or(u32::MAX);
    let groups = communicator_groups(recorded.ranks.into_iter().map(|(rank, (counts, state))| (rank, counts, state)));
    CommunicatorReport {
        id,
        size: recorded.size,
        groups,
        silent: Vec::new(),
        unnamed: recorded.size.saturating_sub(known),
    }
}

fn oldest_pending(flight: &FlightRecord, communicator: u64) -> Option<OperationState> {
    let of_this = |operation: &&Operation| {
        operation.communicator == communicator
            && operation.kind() != OpKind::HostCall
            && operation.status() == OpStatus::Pending
    };
    flight.operations.iter().filter(of_this).min_by_key(|operation| operation.ticket).map(operation_state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xpu_timer_proto::v1::{Communicator, DataType, Op};

    fn flight(launched: u64, pending: Option<u64>) -> FlightRecord {
        let operation = |seq| Operation {
            kind: OpKind::Collective.into(),
            op: Op::AllReduce.into(),
            communicator: 0xab,
            seq,
            count: 4,
            dtype: DataType::Float32.into(),
            peer: -1,
            ..Default::default()
        };
        FlightRecord {
            communicators: vec![Communicator {
                id: 0xab,
                size: 4,
                launched,
                completed: launched,
                ..Default::default()
            }],
            operations: pending.map(operation).into_iter().collect(),
            ..Default::default()
        }
    }

    #[test]
    fn ranks_in_one_state_are_one_line_and_those_behind_come_first() {
        let mut communicators = Communicators::default();
        communicators.add(0, &flight(11, Some(11)));
        communicators.add(1, &flight(10, None));
        communicators.add(3, &flight(11, Some(11)));
        let reports = communicators.finish(&[]);
        assert_eq!(reports.len(), 1);
        assert_eq!((reports[0].id.as_str(), reports[0].size, reports[0].unnamed), ("0xab", 4, 1));
        let lines: Vec<_> = reports[0].groups.iter().map(|group| (group.ranks.clone(), group.launched)).collect();
        assert_eq!(lines, [(vec![1], 10), (vec![0, 3], 11)]);
        let waits = reports[0].groups[1].waits_in.as_ref().unwrap();
        assert_eq!(
            (waits.op.as_str(), waits.seq, waits.dtype.as_str(), waits.peer),
            ("all_reduce", 11, "float32", None)
        );
    }

    #[test]
    fn communicators_of_the_verdict_are_not_listed_again() {
        let mut first = Communicators::default();
        first.add(0, &flight(1, None));
        let listed = first.finish(&[]);
        let mut second = Communicators::default();
        second.add(0, &flight(1, None));
        assert!(second.finish(&listed).is_empty());
    }
}
