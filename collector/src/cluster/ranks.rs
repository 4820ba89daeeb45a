//! The evidence of each rank of an incident, kept encoded: in a large job this is most of the
//! memory, and decoded it takes several times as much.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    iter, thread,
};

use xpu_timer_analysis::{EncodedOperations, Splitter};
use xpu_timer_proto::{
    Message as _, lenient,
    v1::{Evidence, RankEvidence, RankPresence},
};

/// The evidence of ranks, at most one entry per rank.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    encoded: BTreeMap<u32, Box<[u8]>>,
}

impl Ranks {
    /// Whether a rank has an entry.
    #[must_use]
    pub(crate) fn holds(&self, rank: u32) -> bool {
        self.encoded.contains_key(&rank)
    }

    /// Number of ranks.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.encoded.len()
    }

    /// Adds ranks and replaces existing entries.
    pub(crate) fn extend(&mut self, ranks: impl IntoIterator<Item = RankEvidence>) {
        self.encoded.extend(ranks.into_iter().map(|rank| (rank.rank, rank.encode_to_vec().into())));
    }

    /// Adds ranks as their nodes sent them and replaces existing entries. The bytes are copied, so
    /// that they are in the arena of this thread, which decodes them and can then use their memory.
    pub(crate) fn extend_encoded(&mut self, ranks: impl IntoIterator<Item = (u32, Vec<u8>)>) {
        self.encoded.extend(ranks.into_iter().map(|(rank, bytes)| (rank, bytes.as_slice().into())));
    }

    /// Moves all ranks to `decoded`, and writes its evidence to `to` as one message. Some entries
    /// at a time are decoded, written and freed, so that few ranks are in memory twice. After an
    /// error of `to`, the remaining ranks stay here.
    ///
    /// # Errors
    /// Errors of `to`.
    pub(crate) fn write_into(&mut self, decoded: &mut Decoded, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&decoded.evidence.encode_to_vec())?;
        decoded.reserve(self.len());
        let mut head = Vec::new();
        while let Some(part) = self.decode_part(decoded) {
            for Entry { bytes, .. } in part {
                head.clear();
                for number in [(Evidence::RANKS_FIELD << 3 | EMBEDDED) as usize, bytes.len()] {
                    xpu_timer_proto::encode_length_delimiter(number, &mut head).expect("a vector grows");
                }
                to.write_all(&head)?;
                to.write_all(&bytes)?;
            }
        }
        Ok(())
    }

    /// Moves all ranks to `decoded`.
    pub(crate) fn decode_into(&mut self, decoded: &mut Decoded) {
        decoded.reserve(self.len());
        while self.decode_part(decoded).is_some() {}
    }

    /// Moves the lowest ranks to `decoded`. Returns their bytes, which can be decoded, or `None` if
    /// no rank remains. Two threads decode, which takes most of the time.
    fn decode_part(&mut self, decoded: &mut Decoded) -> Option<Vec<Entry>> {
        let mut part: Vec<Entry> = iter::from_fn(|| self.encoded.pop_first())
            .take(RANKS_OF_A_PART)
            .map(|(rank, bytes)| Entry { rank, bytes, decoded: None })
            .collect();
        let middle = part.len() / 2;
        thread::scope(|scope| {
            let (one, other) = part.split_at_mut(middle);
            let beside = thread::Builder::new().name("decode".into());
            // Without a thread, these ranks are decoded below.
            let _ = beside.spawn_scoped(scope, || decode(one));
            decode(other);
        });
        decode(&mut part);
        for entry in &mut part {
            decoded.push(entry.decoded.take().expect("it was decoded"));
        }
        Some(part).filter(|part| !part.is_empty())
    }
}

/// A rank while it is decoded.
struct Entry {
    rank: u32,
    bytes: Box<[u8]>,
    decoded: Option<(RankEvidence, EncodedOperations)>,
}

/// Decodes those that are not. Bytes that cannot be decoded are repaired.
fn decode(entries: &mut [Entry]) {
    let mut splitter = Splitter::default();
    for Entry { rank, bytes, decoded } in entries.iter_mut().filter(|entry| entry.decoded.is_none()) {
        *decoded = Some(splitter.split(bytes).unwrap_or_else(|_| {
            let repaired = repaired(*rank, bytes);
            *bytes = repaired.encode_to_vec().into();
            (repaired, EncodedOperations::default())
        }));
    }
}

/// Number of ranks that are decoded at once. They are in memory twice.
const RANKS_OF_A_PART: usize = 512;

/// The evidence of a job, decoded except for the operations of its ranks.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    /// The evidence. The flight records contain only pending operations.
    pub evidence: Evidence,
    /// All operations of each rank.
    pub operations: Vec<EncodedOperations>,
}

impl Decoded {
    fn reserve(&mut self, ranks: usize) {
        self.evidence.ranks.reserve_exact(ranks);
        self.operations.reserve_exact(ranks);
    }

    fn push(&mut self, (rank, operations): (RankEvidence, EncodedOperations)) {
        self.evidence.ranks.push(rank);
        self.operations.push(operations);
    }

    /// Takes the ranks with all their operations.
    pub(crate) fn take_ranks(&mut self) -> impl Iterator<Item = RankEvidence> + use<> {
        let operations = std::mem::take(&mut self.operations);
        std::mem::take(&mut self.evidence.ranks).into_iter().zip(operations).map(|(mut rank, operations)| {
            operations.restore(&mut rank);
            rank
        })
    }
}

/// The readable fields of an entry that is not a valid message.
fn repaired(rank: u32, bytes: &[u8]) -> RankEvidence {
    lenient::decode(bytes).unwrap_or_else(|error| {
        let presence = RankPresence::decode(bytes).map_or(0, |known| known.presence);
        let errors = vec![format!("its evidence cannot be decoded: {error}")];
        RankEvidence { rank, presence, errors, ..Default::default() }
    })
}

/// Wire type of a message within another one.
const EMBEDDED: u32 = 2;

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{FlightRecord, OpStatus, Operation, Presence};

    use super::*;

    fn rank(rank: u32, node: &str) -> RankEvidence {
        RankEvidence { rank, node: node.into(), ..Default::default() }
    }

    fn head() -> Decoded {
        Decoded { evidence: head_evidence(), operations: Vec::new() }
    }

    /// The evidence with all operations.
    fn whole(mut decoded: Decoded) -> Evidence {
        let ranks = decoded.take_ranks().collect();
        Evidence { ranks, ..decoded.evidence }
    }

    fn head_evidence() -> Evidence {
        Evidence { incident: "1".into(), world_size: 301, hang_timeout_ns: 5, ..Default::default() }
    }

    #[test]
    fn evidence_is_written_in_rank_order() {
        let mut ranks = Ranks::default();
        ranks.extend([rank(7, "a"), rank(0, ""), rank(300, &"long".repeat(100_000))]);
        ranks.extend([rank(7, "b"), rank(2, "c")]);
        assert!(ranks.len() == 4 && ranks.holds(300) && !ranks.holds(1));
        let mut bytes = Vec::new();
        let mut decoded = head();
        ranks.write_into(&mut decoded, &mut bytes).unwrap();
        let evidence = whole(decoded);
        let expected = vec![rank(0, ""), rank(2, "c"), rank(7, "b"), rank(300, &"long".repeat(100_000))];
        assert_eq!(evidence, Evidence { ranks: expected, ..head_evidence() });
        assert_eq!(Evidence::decode(&bytes[..]).unwrap(), evidence);
        assert_eq!(ranks.len(), 0);
    }

    #[test]
    fn an_invalid_entry_harms_no_other_rank() {
        let mut ranks = Ranks::default();
        let operations = vec![Operation { function: "name".into(), ..Default::default() }];
        let flight = Some(FlightRecord { operations, ..Default::default() });
        let dead = RankEvidence { rank: 4, presence: Presence::Dead.into(), flight, ..Default::default() };
        let mut text = dead.encode_to_vec();
        let at = text.windows(4).position(|part| part == b"name").unwrap();
        text[at] = 0xff;
        // A flight record with a field that is cut off.
        let cut =
            [&RankEvidence { flight: None, rank: 5, ..dead.clone() }.encode_to_vec()[..], &[0x22, 1, 0x0a]].concat();
        ranks.extend([rank(3, "a"), rank(6, "b")]);
        ranks.extend_encoded([(4, text), (5, cut)]);
        let (mut decoded, mut bytes) = (head(), Vec::new());
        ranks.write_into(&mut decoded, &mut bytes).unwrap();
        let evidence = whole(decoded);
        assert_eq!(Evidence::decode(&bytes[..]).unwrap(), evidence);
        let [_, repaired, lost, last] = &evidence.ranks[..] else { panic!("{evidence:?}") };
        assert_eq!(repaired.flight.as_ref().unwrap().operations[0].function, "\u{fffd}ame");
        assert_eq!((lost.rank, lost.presence(), &lost.flight), (5, Presence::Dead, &None));
        assert!(lost.errors[0].starts_with("its evidence cannot be decoded: "), "{lost:?}");
        assert_eq!(*last, rank(6, "b"));
    }

    #[test]
    fn a_full_disk_loses_no_rank() {
        let mut ranks = Ranks::default();
        let expected: Vec<_> = (0..2000).map(|number| rank(number, "node")).collect();
        ranks.extend(expected.clone());
        let (mut decoded, mut disk) = (head(), [0; 100]);
        ranks.write_into(&mut decoded, &mut &mut disk[..]).unwrap_err();
        let taken = decoded.operations.len();
        assert!(taken > 0 && ranks.len() > 0, "{taken} ranks were taken");
        ranks.decode_into(&mut decoded);
        assert_eq!(whole(decoded).ranks, expected);
    }

    #[test]
    fn the_operations_of_a_rank_stay_encoded_except_for_pending_ones() {
        let operation = |ticket, status: OpStatus| Operation { ticket, status: status.into(), ..Default::default() };
        let operations = vec![operation(1, OpStatus::Completed), operation(2, OpStatus::Pending)];
        let flight = Some(FlightRecord { operations, read_ns: 9, ..Default::default() });
        let expected = RankEvidence { rank: 4, flight, ..Default::default() };
        let mut ranks = Ranks::default();
        ranks.extend([expected.clone(), rank(5, "without a record")]);
        let mut decoded = head();
        ranks.decode_into(&mut decoded);
        let flight = decoded.evidence.ranks[0].flight.as_ref().unwrap();
        assert_eq!((flight.read_ns, flight.operations.len(), flight.operations[0].ticket), (9, 1, 2));
        assert_eq!(whole(decoded).ranks, [expected, rank(5, "without a record")]);
    }
}
