//! Follows the operations of one ring and returns each of them once, after it has completed.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use xpu_timer_proto::{
    ring::{self, op},
    v1::OpStatus,
};

/// The read position in a ring.
#[derive(Debug, Default)]
pub struct Cursor {
    /// The first ticket that was not read yet; `None` before the first read.
    next: Option<u64>,
    /// Incomplete tickets, and the number of reads in which each was not found.
    waiting: BTreeMap<u64, u32>,
    /// Operations that completed and were overwritten between two reads.
    pub missed: u64,
}

/// A ticket that was not found this many times has no slot: the hook has dropped and counted its
/// operation.
const LOOKS: u32 = 5;

impl Cursor {
    /// Returns what has completed since the last read. `tickets` is the next ticket of the ring.
    ///
    /// # Errors
    /// The errors of `read_at`.
    pub fn read_completed(
        &mut self,
        read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
        tickets: u64,
    ) -> io::Result<Vec<[u64; op::WORDS]>> {
        let oldest = tickets.saturating_sub(op::SLOTS as u64);
        let next = self.next.unwrap_or(oldest);
        self.missed += oldest.saturating_sub(next);
        self.waiting.extend((next.max(oldest)..tickets).map(|ticket| (ticket, 0)));
        self.next = Some(tickets);
        let Some(first) = self.waiting.keys().next().copied() else { return Ok(Vec::new()) };
        // If there are more than the table holds, the whole table is read from any start.
        let count = usize::try_from(tickets - first).unwrap_or(op::SLOTS);
        let slots = ring::read_slots(read_at, first, count)?;
        let by_place: HashMap<u64, &[u64; op::WORDS]> =
            slots.iter().map(|words| ((words[op::TICKET] - 1) % op::SLOTS as u64, words)).collect();
        let mut completed = Vec::new();
        let missed = &mut self.missed;
        self.waiting.retain(|ticket, unseen| {
            let words = by_place.get(&(ticket % op::SLOTS as u64));
            match words.map(|words| (words[op::TICKET] - 1, words)) {
                Some((found, words)) if found == *ticket => {
                    *unseen = 0;
                    let pending = words[op::STATUS] as u32 == OpStatus::Pending as u32;
                    if !pending {
                        completed.push(**words);
                    }
                    pending
                }
                Some((found, _)) if found > *ticket => {
                    *missed += 1;
                    false
                }
                _ => {
                    *unseen += 1;
                    *unseen < LOOKS
                }
            }
        });
        Ok(completed)
    }

    /// Operations that have not completed.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::ring::offset;

    use super::*;

    struct Ring(Vec<u64>);

    impl Ring {
        fn new() -> Self {
            Ring(vec![0; offset::END / 8])
        }
        fn put(&mut self, ticket: u64, status: OpStatus) {
            let first = offset::OPS / 8 + ticket as usize % op::SLOTS * op::WORDS;
            self.0[first + op::TICKET] = ticket + 1;
            self.0[first + op::STATUS] = status as u64;
        }
        fn look(&self, cursor: &mut Cursor, tickets: u64) -> Vec<u64> {
            let read = |at: u64, buffer: &mut [u8]| {
                for (index, chunk) in buffer.chunks_exact_mut(8).enumerate() {
                    chunk.copy_from_slice(&self.0[at as usize / 8 + index].to_le_bytes());
                }
                Ok(())
            };
            cursor.read_completed(read, tickets).unwrap().iter().map(|words| words[op::TICKET] - 1).collect()
        }
    }

    #[test]
    fn each_completed_operation_is_read_once() {
        let (mut ring, mut cursor) = (Ring::new(), Cursor::default());
        assert_eq!(ring.look(&mut cursor, 0), [0; 0]);
        ring.put(0, OpStatus::Completed);
        ring.put(1, OpStatus::Pending);
        ring.put(2, OpStatus::Failed);
        assert_eq!(ring.look(&mut cursor, 3), [0, 2]);
        assert_eq!(cursor.pending(), 1);
        assert_eq!(ring.look(&mut cursor, 3), [0; 0]);
        ring.put(1, OpStatus::Completed);
        assert_eq!(ring.look(&mut cursor, 3), [1]);
        assert_eq!((cursor.pending(), cursor.missed), (0, 0));
    }

    #[test]
    fn reads_wrap_around_the_table() {
        let (mut ring, mut cursor) = (Ring::new(), Cursor::default());
        let slots = op::SLOTS as u64;
        assert_eq!(ring.look(&mut cursor, slots - 1), [0; 0]);
        for ticket in slots - 1..slots + 3 {
            ring.put(ticket, OpStatus::Completed);
        }
        assert_eq!(ring.look(&mut cursor, slots + 3), [slots - 1, slots, slots + 1, slots + 2]);
    }

    #[test]
    fn a_pending_operation_is_awaited_while_the_ring_wraps() {
        let (mut ring, mut cursor) = (Ring::new(), Cursor::default());
        ring.look(&mut cursor, 0);
        ring.put(0, OpStatus::Pending);
        ring.look(&mut cursor, 1);
        let slots = op::SLOTS as u64;
        // Ticket `slots` finds its slot in use and is dropped; all other slots have been reused.
        for ticket in 1..slots * 2 {
            if ticket != slots {
                ring.put(ticket, OpStatus::Completed);
            }
        }
        let seen = ring.look(&mut cursor, slots * 2);
        assert_eq!((seen.len(), seen[0]), (op::SLOTS - 1, slots + 1));
        assert_eq!(cursor.missed, slots - 1);
        ring.put(0, OpStatus::Completed);
        assert_eq!(ring.look(&mut cursor, slots * 2), [0]);
        for _ in 0..LOOKS {
            ring.look(&mut cursor, slots * 2);
        }
        assert_eq!(cursor.pending(), 0, "the dropped one is not waited for any longer");
    }

    #[test]
    fn a_ticket_whose_slot_is_not_published_yet_is_not_lost() {
        let (mut ring, mut cursor) = (Ring::new(), Cursor::default());
        ring.look(&mut cursor, 0);
        assert_eq!(ring.look(&mut cursor, 2), [0; 0]);
        ring.put(0, OpStatus::Completed);
        ring.put(1, OpStatus::Completed);
        assert_eq!(ring.look(&mut cursor, 2), [0, 1]);
    }

    #[test]
    fn a_new_reader_reads_the_operations_that_the_ring_still_holds() {
        let (mut ring, mut cursor) = (Ring::new(), Cursor::default());
        let slots = op::SLOTS as u64;
        for ticket in slots..slots * 2 {
            ring.put(ticket, OpStatus::Completed);
        }
        assert_eq!(ring.look(&mut cursor, slots * 2).len(), op::SLOTS);
        assert_eq!(cursor.missed, 0);
    }
}
