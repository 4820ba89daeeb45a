//! Facts about one collective from the records of its members: the operation that each member runs,
//! and the members that have and have not completed it.

use std::collections::{BTreeMap, HashMap};

use xpu_timer_proto::v1::{Op, OpStatus, Operation};

use crate::{
    case::Case,
    graph::{Event, Suspect},
    world::is_collective,
};

/// One collective over its members.
pub(super) struct Collective<'a> {
    /// The event of the collective.
    pub event: Event,
    /// Rank index and recorded operation of every member whose record has it.
    pub operations: Vec<(usize, &'a Operation)>,
    /// Members that are inside.
    pub inside: Vec<usize>,
    /// Members that have completed it.
    pub completed_by: Vec<usize>,
}

impl<'a> Collective<'a> {
    /// The collective of a suspect that all members have entered.
    pub(super) fn of(case: &Case<'a>, suspect: &Suspect) -> Option<Self> {
        let Suspect::Complete(event @ Event::Collective { comm, seq }) = *suspect else { return None };
        let comm = &case.comms[comm];
        let operations = comm
            .members
            .iter()
            .filter_map(|member| {
                let at = |operation: &Operation| {
                    is_collective(operation) && operation.communicator == comm.id && operation.seq == seq
                };
                // The search starts with the newest operations, because they are the likeliest.
                Some((member.rank_index, case.view(member.rank_index).newest_operation(at)?))
            })
            .collect();
        let completed_by =
            comm.members.iter().filter(|member| member.completed >= seq).map(|member| member.rank_index).collect();
        let inside =
            comm.members.iter().filter(|member| member.completed < seq).map(|member| member.rank_index).collect();
        Some(Collective { event, operations, inside, completed_by })
    }

    /// Groups the members by a property of their operation. `None` if all members agree.
    pub(super) fn dissent<Key: Ord + Clone>(
        &self,
        case: &Case<'a>,
        key: impl Fn(&Operation) -> Key,
    ) -> Option<Dissent<Key>> {
        let mut groups: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
        for (rank_index, operation) in &self.operations {
            groups.entry(key(operation)).or_default().push(*rank_index);
        }
        if groups.len() < 2 {
            return None;
        }
        let largest = groups.values().map(Vec::len).max()?;
        let leaders: Vec<&Key> =
            groups.iter().filter(|(_, views)| views.len() == largest).map(|(key, _)| key).collect();
        let (right, certain) = match leaders[..] {
            [only] => (Some(only.clone()), true),
            // Without a majority, the history of the ranks may show which operation was due.
            _ => (self.expected(case, &key).filter(|expected| leaders.contains(&expected)), false),
        };
        let culprits =
            groups.iter().filter(|(key, _)| right.as_ref() != Some(*key)).flat_map(|(_, views)| views.clone());
        Some(Dissent { culprits: culprits.collect(), right, groups, certain })
    }

    /// Like [`Collective::dissent`], unless these ranks differed in the same way before and the
    /// operation completed: to MPI, an array equals its elements.
    pub(super) fn new_dissent<Key: Ord + Clone>(
        &self,
        case: &Case<'a>,
        key: impl Fn(&Operation) -> Key,
    ) -> Option<Dissent<Key>> {
        let Event::Collective { comm, seq } = self.event else { return None };
        let comm = &case.comms[comm];
        let dissent = self.dissent(case, &key)?;
        let mut before: HashMap<u64, HashMap<usize, Key>> = HashMap::new();
        for (rank_index, _) in &self.operations {
            for operation in case.view(*rank_index).operations().filter(|operation| {
                is_collective(operation)
                    && operation.communicator == comm.id
                    && operation.seq < seq
                    && operation.status() == OpStatus::Completed
            }) {
                before.entry(operation.seq).or_default().insert(*rank_index, key(operation));
            }
        }
        let same = |keys: &HashMap<usize, Key>| {
            dissent.groups.iter().all(|(key, views)| views.iter().all(|rank_index| keys.get(rank_index) == Some(key)))
        };
        (!before.values().any(same)).then_some(dissent)
    }

    /// The operation that was due by the common history of the ranks: the operations of this
    /// communicator repeat with some period. Only a history of at least two full periods that all
    /// ranks share counts.
    fn expected<Key: Ord + Clone>(&self, case: &Case<'a>, key: &impl Fn(&Operation) -> Key) -> Option<Key> {
        let Event::Collective { comm, seq } = self.event else { return None };
        let id = case.comms[comm].id;
        let history = |rank_index: usize| -> Option<Vec<Key>> {
            let mut known: BTreeMap<u64, Key> = BTreeMap::new();
            for operation in case.view(rank_index).operations() {
                if is_collective(operation) && operation.communicator == id && operation.seq < seq {
                    known.insert(operation.seq, key(operation));
                }
            }
            // Without gaps, the newest first.
            let keys: Vec<Key> = (1..seq).rev().map_while(|seq| known.get(&seq).cloned()).take(128).collect();
            (!keys.is_empty()).then_some(keys)
        };
        let histories: Vec<Vec<Key>> =
            self.operations.iter().filter_map(|(rank_index, _)| history(*rank_index)).collect();
        let shortest = histories.iter().min_by_key(|history| history.len())?.clone();
        if histories.iter().any(|history| history[..shortest.len()] != shortest[..]) {
            return None;
        }
        let period = (1..=shortest.len() / 2)
            .find(|period| shortest.iter().zip(&shortest[*period..]).all(|(newer, older)| newer == older))?;
        // The next operation equals the one a period ago. Index 0 is the newest.
        shortest.get(period - 1).cloned()
    }
}

/// How the members of a collective differ.
pub(super) struct Dissent<Key> {
    /// Members outside the right group; all members if no group is known to be right.
    pub culprits: Vec<usize>,
    /// The property of the right group. `None` if nothing shows which group is right.
    pub right: Option<Key>,
    /// Members (as rank indices) by property.
    pub groups: BTreeMap<Key, Vec<usize>>,
    /// A majority decided, not the history.
    pub certain: bool,
}

/// Whether all members pass the same number of elements in this operation. In all-to-all only the
/// sums have to match.
pub(super) fn equal_sizes(op: Op) -> bool {
    matches!(
        op,
        Op::AllReduce | Op::Reduce | Op::Broadcast | Op::AllGather | Op::ReduceScatter | Op::Gather | Op::Scatter
    )
}
