//! The evidence of each rank of an incident, kept encoded: in a large job this is most of the
//! memory, and decoded it takes four times as much.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use xpu_timer_proto::{
    Message as _,
    v1::{Evidence, RankEvidence},
};

/// The evidence of ranks, at most one entry per rank.
#[derive(Debug, Default)]
pub struct Ranks {
    // Length-delimited entries in chunks, so that the chunks can be freed one by one.
    chunks: Vec<Vec<u8>>,
    places: HashMap<u32, EvidenceRange>,
    // Bytes of replaced entries.
    replaced: usize,
}

/// The bytes of one rank's evidence within a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EvidenceRange {
    chunk: usize,
    offset: usize,
    bytes: usize,
}

const CHUNK_BYTES: usize = 1 << 20;

impl Ranks {
    /// Whether a rank has an entry.
    #[must_use]
    pub fn holds(&self, rank: u32) -> bool {
        self.places.contains_key(&rank)
    }

    /// Number of ranks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Adds ranks and replaces existing entries.
    pub fn extend(&mut self, ranks: impl IntoIterator<Item = RankEvidence>) {
        for rank in ranks {
            // A length takes ten bytes at most.
            self.append(rank.rank, rank.encoded_len() + 10, |into| {
                rank.encode_length_delimited(into).expect("a vector has room");
            });
        }
        let all: usize = self.chunks.iter().map(Vec::len).sum();
        if self.replaced > CHUNK_BYTES && self.replaced > all / 2 {
            self.compact();
        }
    }

    fn append(&mut self, rank: u32, room: usize, write: impl FnOnce(&mut Vec<u8>)) {
        if self.chunks.last().is_none_or(|chunk| chunk.capacity() - chunk.len() < room) {
            self.chunks.push(Vec::with_capacity(CHUNK_BYTES.max(room)));
        }
        let chunk = self.chunks.len() - 1;
        let into = &mut self.chunks[chunk];
        let offset = into.len();
        write(into);
        let place = EvidenceRange { chunk, offset, bytes: into.len() - offset };
        self.replaced += self.places.insert(rank, place).map_or(0, |old| old.bytes);
    }

    /// Frees the memory of replaced entries: a node whose delivery was cut off sends everything
    /// again.
    fn compact(&mut self) {
        self.replaced = 0;
        let mut places: Vec<(u32, EvidenceRange)> = self.places.drain().collect();
        places.sort_unstable_by_key(|(_, place)| (place.chunk, place.offset));
        let mut places = places.into_iter().peekable();
        for (chunk, bytes) in std::mem::take(&mut self.chunks).into_iter().enumerate() {
            while let Some((rank, place)) = places.next_if(|(_, place)| place.chunk == chunk) {
                let entry = &bytes[place.offset..place.offset + place.bytes];
                self.append(rank, entry.len(), |into| into.extend_from_slice(entry));
            }
        }
    }

    /// Writes the evidence of all ranks as one message.
    ///
    /// # Errors
    /// Errors of `to`.
    pub fn write(&self, head: &Evidence, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&head.encode_to_vec())?;
        let mut places: Vec<(&u32, &EvidenceRange)> = self.places.iter().collect();
        places.sort_unstable_by_key(|(rank, _)| **rank);
        for (_, place) in places {
            // The key of a message field; the length follows.
            to.write_all(&[RANKS_KEY])?;
            to.write_all(&self.chunks[place.chunk][place.offset..place.offset + place.bytes])?;
        }
        Ok(())
    }

    /// Decodes all entries, ascending by rank, and frees the bytes on the way.
    #[must_use]
    pub fn decode(self) -> Vec<RankEvidence> {
        let mut list = Vec::with_capacity(self.places.len());
        for (chunk, bytes) in self.chunks.into_iter().enumerate() {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let offset = bytes.len() - rest.len();
                let mut rank = RankEvidence::decode_length_delimited(&mut rest).expect("it was encoded here");
                // A decoded list may have up to twice the capacity that it needs.
                if let Some(flight) = &mut rank.flight {
                    flight.operations.shrink_to_fit();
                }
                // Skip replaced entries.
                if self.places.get(&rank.rank).is_some_and(|place| (place.chunk, place.offset) == (chunk, offset)) {
                    list.push(rank);
                }
            }
        }
        list.sort_unstable_by_key(|rank| rank.rank);
        list
    }
}

/// Field 6 of `Evidence`, wire type 2. A test below fails if this changes.
const RANKS_KEY: u8 = 6 << 3 | 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32, node: &str) -> RankEvidence {
        RankEvidence { rank, node: node.into(), ..Default::default() }
    }

    #[test]
    fn evidence_is_written_in_rank_order() {
        let mut ranks = Ranks::default();
        assert!(ranks.places.is_empty());
        ranks.extend([rank(7, "a"), rank(0, ""), rank(300, &"long".repeat(CHUNK_BYTES))]);
        ranks.extend([rank(7, "b"), rank(2, "c")]);
        assert!(ranks.len() == 4 && ranks.holds(300) && !ranks.holds(1));
        let head = Evidence { incident: "1".into(), world_size: 301, hang_timeout_ns: 5, ..Default::default() };
        let mut bytes = Vec::new();
        ranks.write(&head, &mut bytes).unwrap();
        let expected = vec![rank(0, ""), rank(2, "c"), rank(7, "b"), rank(300, &"long".repeat(CHUNK_BYTES))];
        assert_eq!(Evidence::decode(&bytes[..]).unwrap(), Evidence { ranks: expected.clone(), ..head });
        assert_eq!(ranks.decode(), expected);
    }

    #[test]
    fn replaced_entries_do_not_accumulate() {
        let mut ranks = Ranks::default();
        let text = "x".repeat(CHUNK_BYTES / 4);
        let times = 40;
        for time in 0..times {
            ranks.extend((0..8).map(|number| rank(number, &format!("{time}{text}"))));
            let bytes: usize = ranks.chunks.iter().map(Vec::len).sum();
            assert!(bytes < 6 * CHUNK_BYTES, "{bytes} bytes for two megabytes");
        }
        let last: Vec<_> = (0..8).map(|number| rank(number, &format!("{}{text}", times - 1))).collect();
        assert_eq!(ranks.decode(), last);
    }
}
