//! The evidence of each rank of an incident, kept encoded: in a large job this is most of the
//! memory, and decoded it takes several times as much.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use xpu_timer_proto::{
    Message as _, lenient,
    v1::{Evidence, RankEvidence, RankPresence},
};

/// The evidence of ranks, at most one entry per rank.
#[derive(Debug, Default)]
pub struct Ranks {
    encoded: BTreeMap<u32, Vec<u8>>,
}

impl Ranks {
    /// Whether a rank has an entry.
    #[must_use]
    pub fn holds(&self, rank: u32) -> bool {
        self.encoded.contains_key(&rank)
    }

    /// Number of ranks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.encoded.len()
    }

    /// Adds ranks and replaces existing entries.
    pub fn extend(&mut self, ranks: impl IntoIterator<Item = RankEvidence>) {
        self.extend_encoded(ranks.into_iter().map(|rank| (rank.rank, rank.encode_to_vec())));
    }

    /// Adds ranks as their nodes sent them and replaces existing entries.
    pub fn extend_encoded(&mut self, ranks: impl IntoIterator<Item = (u32, Vec<u8>)>) {
        self.encoded.extend(ranks);
    }

    /// Moves all ranks to `evidence`, and writes the evidence to `to` as one message. Each entry is
    /// freed when it is decoded and written, so that few ranks are in memory twice. After an error
    /// of `to`, the remaining ranks stay here.
    ///
    /// # Errors
    /// Errors of `to`.
    pub fn write_into(&mut self, evidence: &mut Evidence, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&evidence.encode_to_vec())?;
        evidence.ranks.reserve_exact(self.len());
        let mut head = Vec::new();
        while let Some((rank, bytes)) = self.pop_first() {
            evidence.ranks.push(rank);
            head.clear();
            head.push(RANKS_KEY);
            xpu_timer_proto::encode_length_delimiter(bytes.len(), &mut head).expect("a vector grows");
            to.write_all(&head)?;
            to.write_all(&bytes)?;
        }
        Ok(())
    }

    /// Moves all ranks to `evidence`.
    pub fn decode_into(&mut self, evidence: &mut Evidence) {
        evidence.ranks.extend(std::iter::from_fn(|| self.pop_first()).map(|(rank, _)| rank));
    }

    /// Removes the lowest rank. Also returns its bytes, which can be decoded.
    fn pop_first(&mut self) -> Option<(RankEvidence, Vec<u8>)> {
        let (rank, mut bytes) = self.encoded.pop_first()?;
        let mut evidence = RankEvidence::decode(&bytes[..]).unwrap_or_else(|_| {
            let repaired = repaired(rank, &bytes);
            bytes = repaired.encode_to_vec();
            repaired
        });
        // A decoded list may have up to twice the capacity that it needs.
        if let Some(flight) = &mut evidence.flight {
            flight.operations.shrink_to_fit();
        }
        Some((evidence, bytes))
    }
}

/// What is known from an entry that is no valid message.
fn repaired(rank: u32, bytes: &[u8]) -> RankEvidence {
    lenient::decode(bytes).unwrap_or_else(|error| {
        let presence = RankPresence::decode(bytes).map_or(0, |known| known.presence);
        let errors = vec![format!("its evidence cannot be decoded: {error}")];
        RankEvidence { rank, presence, errors, ..Default::default() }
    })
}

/// Field 6 of `Evidence`, wire type 2. A test below fails if this changes.
const RANKS_KEY: u8 = 6 << 3 | 2;

#[cfg(test)]
mod tests {
    use xpu_timer_proto::v1::{FlightRecord, Operation, Presence};

    use super::*;

    fn rank(rank: u32, node: &str) -> RankEvidence {
        RankEvidence { rank, node: node.into(), ..Default::default() }
    }

    fn head() -> Evidence {
        Evidence { incident: "1".into(), world_size: 301, hang_timeout_ns: 5, ..Default::default() }
    }

    #[test]
    fn evidence_is_written_in_rank_order() {
        let mut ranks = Ranks::default();
        ranks.extend([rank(7, "a"), rank(0, ""), rank(300, &"long".repeat(100_000))]);
        ranks.extend([rank(7, "b"), rank(2, "c")]);
        assert!(ranks.len() == 4 && ranks.holds(300) && !ranks.holds(1));
        let mut bytes = Vec::new();
        let mut evidence = head();
        ranks.write_into(&mut evidence, &mut bytes).unwrap();
        let expected = vec![rank(0, ""), rank(2, "c"), rank(7, "b"), rank(300, &"long".repeat(100_000))];
        assert_eq!(evidence, Evidence { ranks: expected, ..head() });
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
        let (mut evidence, mut bytes) = (head(), Vec::new());
        ranks.write_into(&mut evidence, &mut bytes).unwrap();
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
        let expected: Vec<_> = (0..40).map(|number| rank(number, "node")).collect();
        ranks.extend(expected.clone());
        let (mut evidence, mut disk) = (head(), [0; 100]);
        ranks.write_into(&mut evidence, &mut &mut disk[..]).unwrap_err();
        assert!(!evidence.ranks.is_empty() && ranks.len() > 0, "{} ranks were written", evidence.ranks.len());
        ranks.decode_into(&mut evidence);
        assert_eq!(evidence.ranks, expected);
    }
}
