//! Merges the two identities of a communicator that has grown. Its old ranks know the parent, the
//! joined ranks know the new id, and one rank knows and reports both. A communicator derived from a
//! grown communicator has two identities as well, and so on; the identities of the parents connect
//! them.

use std::{borrow::Cow, collections::HashMap};

use xpu_timer_proto::{
    ring::{child_id, key_of_child},
    v1::{Communicator, Evidence, FlightRecord},
};

use crate::world::EncodedOperations;

/// Maximum number of generations to follow. Evidence may contain anything, even a communicator that
/// is its own ancestor.
const GENERATIONS: u32 = 64;

/// The evidence with one identity for each communicator, and the operations that are encoded.
/// Borrowed if no rank reports an alias. Else no operations are encoded any more.
pub(crate) fn resolved<'a>(
    evidence: &'a Evidence,
    operations: &'a [EncodedOperations],
) -> (Cow<'a, Evidence>, &'a [EncodedOperations]) {
    let identities = Identities::of(evidence);
    if identities.aliases.is_empty() {
        return (Cow::Borrowed(evidence), operations);
    }
    let names = identities.canonical_ids();
    let mut evidence = evidence.clone();
    evidence.ranks.iter_mut().zip(operations).for_each(|(rank, operations)| operations.restore(rank));
    for rank in &mut evidence.ranks {
        let of_dump = rank.dump.iter_mut().flat_map(|dump| dump.flight_record.iter_mut());
        rank.flight.iter_mut().chain(of_dump).for_each(|record| rename(record, &names));
    }
    (Cow::Owned(evidence), &[])
}

/// The identities that the ranks report for their communicators.
#[derive(Default)]
struct Identities {
    /// From an alias to the identity.
    aliases: HashMap<u64, u64>,
    /// From a child to its parent.
    parents: HashMap<u64, u64>,
}

impl Identities {
    fn of(evidence: &Evidence) -> Self {
        let records = evidence
            .ranks
            .iter()
            .flat_map(|rank| rank.flight.iter().chain(rank.dump.iter().flat_map(|dump| dump.flight_record.iter())));
        let mut identities = Identities::default();
        for comm in records.flat_map(|record| &record.communicators) {
            let Communicator { id, alias, parent, .. } = *comm;
            if alias != 0 {
                identities.aliases.insert(alias, id);
            }
            if parent != 0 {
                identities.parents.insert(id, parent);
            }
        }
        identities
    }

    /// From each identity that must be replaced to its replacement.
    fn canonical_ids(&self) -> HashMap<u64, u64> {
        let known = self.aliases.keys().chain(self.parents.keys());
        known.map(|id| (*id, self.canonical(*id, GENERATIONS))).filter(|(id, first)| id != first).collect()
    }

    /// The identity by which a communicator is known after the merge.
    fn canonical(&self, id: u64, generations: u32) -> u64 {
        let Some(generations) = generations.checked_sub(1) else { return id };
        if let Some(aliases) = self.aliases.get(&id) {
            return self.canonical(*aliases, generations);
        }
        let Some(parent) = self.parents.get(&id) else { return id };
        child_id(self.canonical(*parent, generations), key_of_child(*parent, id))
    }
}

fn rename(record: &mut FlightRecord, names: &HashMap<u64, u64>) {
    let of_comms = record.communicators.iter_mut().flat_map(|comm| [&mut comm.id, &mut comm.parent]);
    for id in of_comms.chain(record.operations.iter_mut().map(|operation| &mut operation.communicator)) {
        *id = names.get(id).copied().unwrap_or(*id);
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{Operation, RankEvidence};

    use super::*;

    /// A rank and its communicators, each with identity, alias and parent.
    fn rank(rank: u32, comms: &[(u64, u64, u64)]) -> RankEvidence {
        let comm = |(id, alias, parent): &(u64, u64, u64)| Communicator {
            id: *id,
            alias: *alias,
            parent: *parent,
            ..Default::default()
        };
        let operation = |(id, ..): &(u64, u64, u64)| Operation { communicator: *id, ..Default::default() };
        let flight = FlightRecord {
            communicators: comms.iter().map(comm).collect(),
            operations: comms.iter().map(operation).collect(),
            ..Default::default()
        };
        RankEvidence { rank, flight: Some(flight), ..Default::default() }
    }

    /// The identities of each rank's communicators and their parents after the merge. Asserts that
    /// the operations have the same identities.
    fn after(ranks: Vec<RankEvidence>) -> Vec<Vec<(u64, u64)>> {
        let evidence = Evidence { ranks, ..Default::default() };
        let (resolved, _) = resolved(&evidence, &[]);
        let of = |rank: &RankEvidence| {
            let record = rank.flight.as_ref().unwrap();
            let comms: Vec<_> = record.communicators.iter().map(|comm| (comm.id, comm.parent)).collect();
            let operations = record.operations.iter().map(|operation| operation.communicator);
            assert!(operations.eq(comms.iter().map(|(id, _)| *id)), "rank {}", rank.rank);
            comms
        };
        resolved.ranks.iter().map(of).collect()
    }

    #[test]
    fn joined_ranks_share_the_communicator_with_old_ranks() {
        let grown = after(vec![rank(0, &[(7, 9, 0)]), rank(1, &[(7, 0, 0)]), rank(2, &[(9, 0, 0)])]);
        assert_eq!(grown, vec![[(7, 0)]; 3]);
    }

    #[test]
    fn children_of_a_grown_communicator_have_one_identity() {
        // A split by colors 3 and 4. Only the first rank knows both identities, and it is in the
        // first child only.
        let (old, new) = (|key| child_id(7, key), |key| child_id(9, key));
        let ranks = vec![
            rank(0, &[(7, 9, 5), (old(3), 0, 7)]),
            rank(1, &[(7, 0, 5), (old(4), 0, 7)]),
            rank(2, &[(9, 0, 0), (new(3), 0, 9)]),
            rank(3, &[(9, 0, 0), (new(4), 0, 9), (child_id(new(4), 1), 0, new(4))]),
        ];
        let mut after = after(ranks);
        assert_eq!(after[3].pop(), Some((child_id(old(4), 1), old(4))), "a child's child");
        let children: Vec<_> = after.iter().map(|comms| comms[1]).collect();
        assert_eq!(children, [(old(3), 7), (old(4), 7), (old(3), 7), (old(4), 7)]);
    }

    #[test]
    fn a_joined_rank_may_let_others_join() {
        let (old, new) = (child_id(7, 2), child_id(9, 2));
        let ranks = vec![
            rank(0, &[(7, 9, 0), (old, 0, 7)]),
            rank(1, &[(9, 0, 0), (new, 11, 9)]),
            rank(2, &[(11, 0, 0), (child_id(11, 4), 0, 11)]),
        ];
        let after = after(ranks);
        assert_eq!((after[0][1], after[1][1], after[2][0]), ((old, 7), (old, 7), (old, 0)));
        assert_eq!(after[2][1], (child_id(old, 4), old));
    }

    #[test]
    fn identities_in_a_cycle_terminate() {
        let first = after(vec![rank(0, &[(7, 9, 0), (9, 7, 0)]), rank(1, &[(3, 0, 4), (4, 0, 3)])]);
        assert_eq!(first.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn without_a_second_identity_nothing_is_copied() {
        let plain = Evidence { ranks: vec![rank(0, &[(7, 0, 1)]), rank(1, &[(9, 0, 0)])], ..Default::default() };
        assert!(matches!(resolved(&plain, &[]).0, Cow::Borrowed(_)));
    }
}
