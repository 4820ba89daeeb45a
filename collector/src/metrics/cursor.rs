//! Follows the operations of one ring and returns each of them once, after it has completed.

use std::{io, ops::Range};

use xpu_timer_proto::{
    ring::{self, op},
    v1::OpStatus,
};

/// The read position in a ring.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    /// The first ticket that was not read yet; `None` before the first read.
    next: Option<u64>,
    /// Incomplete tickets, in ascending order.
    waiting: Vec<(u64, Looks)>,
    /// Operations that completed and were overwritten between two reads.
    pub missed: u64,
    /// Operations were overwritten before the first read.
    pub began_late: bool,
}

/// The results of the reads so far for a ticket.
#[derive(Debug, Clone, Copy, Default)]
struct Looks {
    /// Its operation was pending.
    was_seen: bool,
    /// Number of reads in which it was not found, since it was found last.
    unseen: u32,
}

/// A ticket that was not found this many times has no slot: its thread has left it unused, or the
/// hook has dropped and counted its operation.
const LOOKS: u32 = 5;
/// Tickets that are this close together are read at once.
const GAP: u64 = 16;

impl Cursor {
    /// Reads what may have completed since the last read, and appends it to `slots`. Returns the
    /// places there of what has completed, in ascending order of their tickets. `tickets` is the
    /// next ticket of the ring.
    ///
    /// # Errors
    /// The errors of `read_at`.
    pub(crate) fn read_completed(
        &mut self,
        read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
        tickets: u64,
        slots: &mut Vec<[u64; op::WORDS]>,
    ) -> io::Result<Vec<usize>> {
        let oldest = tickets.saturating_sub(op::SLOTS as u64);
        self.began_late |= self.next.is_none() && oldest > 0;
        let next = self.next.unwrap_or(oldest);
        self.missed += oldest.saturating_sub(next);
        self.waiting.extend((next.max(oldest)..tickets).map(|ticket| (ticket, Looks::default())));
        self.next = Some(tickets);
        // The tickets of each run, and the place of its first slot.
        let mut read: Vec<(Range<u64>, usize)> = Vec::new();
        for (first, count) in runs(self.waiting.iter().map(|(ticket, _)| *ticket)) {
            read.push((first..first + count as u64, slots.len()));
            ring::read_slots(&read_at, first, count, slots)?;
        }
        let mut read = read.into_iter().peekable();
        let mut completed = Vec::new();
        let missed = &mut self.missed;
        self.waiting.retain_mut(|(ticket, looks)| {
            while read.next_if(|(run, _)| run.end <= *ticket).is_some() {}
            // A run may be longer than the table.
            let place = read.peek().map(|(run, begin)| begin + (*ticket - run.start) as usize % op::SLOTS);
            let found = place.and_then(|place| Some((place, slots.get(place)?)));
            match found.and_then(|(place, words)| Some((words[op::TICKET].checked_sub(1)?, place, words))) {
                Some((found, place, words)) if found == *ticket => {
                    *looks = Looks { was_seen: true, unseen: 0 };
                    let pending = words[op::STATUS] as u32 == OpStatus::Pending as u32;
                    if !pending {
                        completed.push(place);
                    }
                    pending
                }
                Some((found, ..)) if found > *ticket => {
                    // An earlier read has found its slot without it: its thread has left it unused.
                    let is_unused = !looks.was_seen && looks.unseen > 0;
                    *missed += u64::from(!is_unused);
                    false
                }
                _ => {
                    looks.unseen += 1;
                    looks.unseen < LOOKS
                }
            }
        });
        Ok(completed)
    }

    /// Number of tickets that have been taken since the last read.
    #[must_use]
    pub(crate) fn unread(&self, tickets: u64) -> u64 {
        tickets.saturating_sub(self.next.unwrap_or(0))
    }

    /// Operations that have not completed.
    #[must_use]
    pub(crate) fn pending(&self) -> usize {
        self.waiting.len()
    }
}

/// Groups tickets in ascending order into runs: the first ticket, and the number of slots.
fn runs(tickets: impl Iterator<Item = u64>) -> Vec<(u64, usize)> {
    let mut runs: Vec<(u64, usize)> = Vec::new();
    for ticket in tickets {
        match runs.last_mut() {
            Some((first, count)) if ticket - *first < *count as u64 + GAP => *count = (ticket - *first) as usize + 1,
            _ => runs.push((ticket, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::ring::{header, offset};

    use super::*;

    struct Ring(Vec<u64>);

    impl Ring {
        fn new() -> Self {
            Ring(vec![0; offset::END / 8])
        }
        fn put(&mut self, ticket: u64, status: OpStatus) {
            self.0[header::OPS] = self.0[header::OPS].max(ticket + 1);
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
            // Another ring was read before.
            let mut slots = vec![[7; op::WORDS]; 3];
            let completed = cursor.read_completed(read, tickets, &mut slots).unwrap();
            completed.into_iter().map(|place| slots[place][op::TICKET] - 1).collect()
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
        assert_eq!(cursor.pending(), 0, "the cursor no longer waits for the dropped one");
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
    fn an_unused_ticket_whose_slot_is_reused_is_not_missed() {
        let (mut ring, mut cursor) = (Ring::new(), Cursor::default());
        let slots = op::SLOTS as u64;
        ring.look(&mut cursor, 0);
        ring.put(1, OpStatus::Pending);
        // Ticket 0 was taken and is never used.
        assert_eq!(ring.look(&mut cursor, 2), [0; 0]);
        ring.put(1, OpStatus::Completed);
        for ticket in [slots, slots + 1] {
            ring.put(ticket, OpStatus::Completed);
        }
        // Ticket 1 has completed and its slot was reused before this read.
        let seen = ring.look(&mut cursor, slots + 2);
        assert_eq!((seen, cursor.missed), (vec![slots, slots + 1], 1));
    }

    #[test]
    fn tickets_far_apart_are_read_one_by_one() {
        assert_eq!(runs([3, 4, 9, 700, 8200].into_iter()), [(3, 7), (700, 1), (8200, 1)]);
        assert_eq!(runs(0..8192), [(0, 8192)]);
        assert_eq!(runs([].into_iter()), []);
    }

    #[test]
    fn a_new_reader_reads_the_operations_that_the_ring_still_holds() {
        let (mut ring, mut cursor) = (Ring::new(), Cursor::default());
        let slots = op::SLOTS as u64;
        for ticket in slots..slots * 2 {
            ring.put(ticket, OpStatus::Completed);
        }
        assert_eq!(ring.look(&mut cursor, slots * 2).len(), op::SLOTS);
        assert_eq!((cursor.missed, cursor.began_late), (0, true));
    }
}
