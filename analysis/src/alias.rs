//! Communicators that ranks know by two identities become one: of a grown communicator, its old ranks know their parent, those
//! that joined know the id, and one rank knows both and says so.

use std::{borrow::Cow, collections::HashMap};

use xpu_timer_proto::v1::{Evidence, FlightRecord, RankEvidence};

/// The evidence with one identity for each communicator; as it is when no rank speaks of two.
pub(crate) fn resolved(evidence: &Evidence) -> Cow<'_, Evidence> {
    let mut names: HashMap<u64, u64> = HashMap::new();
    let record = |rank: &RankEvidence| -> Vec<(u64, u64)> {
        let own = rank.flight.iter().chain(rank.dump.iter().flat_map(|dump| dump.flight_record.iter()));
        let comms = own.flat_map(|record| record.communicators.iter());
        comms.filter(|comm| comm.alias != 0).map(|comm| (comm.alias, comm.id)).collect()
    };
    names.extend(evidence.ranks.iter().flat_map(record));
    if names.is_empty() {
        return Cow::Borrowed(evidence);
    }
    let mut evidence = evidence.clone();
    for rank in &mut evidence.ranks {
        let of_dump = rank.dump.iter_mut().flat_map(|dump| dump.flight_record.iter_mut());
        rank.flight.iter_mut().chain(of_dump).for_each(|record| rename(record, &names));
    }
    Cow::Owned(evidence)
}

fn rename(record: &mut FlightRecord, names: &HashMap<u64, u64>) {
    let of_comms = record.communicators.iter_mut().flat_map(|comm| [&mut comm.id, &mut comm.parent]);
    for id in of_comms.chain(record.operations.iter_mut().map(|operation| &mut operation.communicator)) {
        *id = names.get(id).copied().unwrap_or(*id);
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{Communicator, Operation};

    use super::*;

    fn rank(rank: u32, id: u64, alias: u64) -> RankEvidence {
        let flight = FlightRecord {
            communicators: vec![Communicator { id, alias, ..Default::default() }],
            operations: vec![Operation { communicator: id, ..Default::default() }],
            ..Default::default()
        };
        RankEvidence { rank, flight: Some(flight), ..Default::default() }
    }

    #[test]
    fn who_joined_is_in_the_communicator_of_those_who_were_there() {
        let grown = Evidence { ranks: vec![rank(0, 7, 9), rank(1, 7, 0), rank(2, 9, 0)], ..Default::default() };
        let resolved = resolved(&grown);
        for rank in &resolved.ranks {
            let record = rank.flight.as_ref().unwrap();
            assert_eq!((record.communicators[0].id, record.operations[0].communicator), (7, 7), "rank {}", rank.rank);
        }
    }

    #[test]
    fn without_a_second_identity_nothing_is_copied() {
        let plain = Evidence { ranks: vec![rank(0, 7, 0), rank(1, 9, 0)], ..Default::default() };
        assert!(matches!(resolved(&plain), Cow::Borrowed(_)));
    }
}
