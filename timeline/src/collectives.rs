//! Combines the collectives and messages of all ranks: the common ends for the alignment of clocks,
//! the time when the last rank started each collective, and the receive that belongs to each send.
//! Memory is bounded, whatever the files contain.

use std::sync::{Mutex, PoisonError};

use hashbrown::{HashMap, HashSet, hash_map::Entry};
use xpu_timer_proto::v1::{Op, OpKind, OpStatus, Operation};

use crate::clocks::CommonEnd;

/// Collectives of a communicator that the clocks are aligned on, at most.
const MOST_INSTANCES: usize = 512;
/// Number of sequence numbers of a page of starts.
const PAGE: u64 = 1024;
/// Pages of all communicators: 128 MB.
const MOST_PAGES: usize = 32 * 1024;
/// Ends of messages that are compared to pair sends with receives.
const COMPARED_MESSAGES: usize = 64;
/// Maximum number of messages of a pair by which the two ends of a window differ.
const MOST_SHIFT: i64 = 16;

/// Whether each rank needs the data of all others, so that all end together, and only after the
/// last has started.
#[must_use]
pub fn synchronizes(shape: &Operation) -> bool {
    let op = matches!(shape.op(), Op::AllReduce | Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Barrier);
    shape.kind() == OpKind::Collective && shape.communicator != 0 && op
}

/// Whether an operation is a send or a receive.
#[must_use]
pub fn is_message(shape: &Operation) -> bool {
    shape.kind() == OpKind::Collective && matches!(shape.op(), Op::Send | Op::Recv)
}

/// Whether an operation has completed, by its status and its end.
#[must_use]
pub fn is_completed(status: i32, completed_ns: u64) -> bool {
    status == OpStatus::Completed as i32 && completed_ns != 0
}

/// A number that looks random, for a choice that is the same on all ranks, and for flow ids.
#[must_use]
pub fn mixed(values: &[u64]) -> u64 {
    // The finalizer of MurmurHash3, over each value in turn.
    values.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, value| {
        let mut hash = (hash ^ value).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 33;
        hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        hash ^ hash >> 33
    })
}

/// The end of a collective on the lowest rank of a node.
#[derive(Debug, Clone, Copy)]
struct NodeEnd {
    node: usize,
    rank: u32,
    ns: u64,
}

/// The ends of a sample of the collectives of one communicator.
#[derive(Debug, Default)]
pub struct Ends {
    /// Only instances whose hash has this number of trailing zeros are kept. It grows with their
    /// number, so that all ranks end up with the same instances.
    zeros: u32,
    instances: HashMap<u64, Vec<NodeEnd>>,
}

impl Ends {
    /// Notes the ends of a rank: sequence numbers and times of its own clock.
    pub fn note(&mut self, node: usize, rank: u32, ends: &[(u64, u64)]) {
        for &(seq, ns) in ends {
            if mixed(&[seq]).trailing_zeros() < self.zeros {
                continue;
            }
            let ends = self.instances.entry(seq).or_default();
            match ends.iter_mut().find(|end| end.node == node) {
                Some(end) if rank < end.rank => *end = NodeEnd { node, rank, ns },
                Some(_) => {}
                None => ends.push(NodeEnd { node, rank, ns }),
            }
            while self.instances.len() > MOST_INSTANCES {
                self.zeros += 1;
                let zeros = self.zeros;
                self.instances.retain(|seq, _| mixed(&[*seq]).trailing_zeros() >= zeros);
            }
        }
    }

    /// Adds the ends that two nodes have in common.
    pub fn common(&self, here: usize, there: usize, common: &mut Vec<CommonEnd>) {
        for ends in self.instances.values() {
            let of = |node| ends.iter().find(|end| end.node == node);
            if let (Some(here), Some(there)) = (of(here), of(there)) {
                common.push(CommonEnd { here_ns: here.ns, there_ns: there.ns });
            }
        }
    }
}

/// A page of starts, in ticks; 0 is "unknown".
type Page = Box<[u32; PAGE as usize]>;

/// When the last rank started each collective of one communicator.
#[derive(Debug, Default)]
pub struct Starts(HashMap<u64, Page>);

/// When the last rank of each node started each collective of one communicator, on the clock of
/// that node: what is known before the clocks are aligned.
#[derive(Debug, Default)]
pub struct NodeStarts {
    pages: HashMap<(usize, u64), Page>,
    /// Pages for which a node had no memory: without it, nobody knows who was the last.
    incomplete: HashSet<u64>,
    is_full: bool,
}

/// The time axis of [`Starts`] and [`NodeStarts`]: 32 bits a start.
#[derive(Debug, Clone, Copy)]
pub struct Ticks {
    from_ns: u64,
    tick_ns: u64,
}

impl Ticks {
    /// Ticks that cover a window, and the collectives that started up to its length before it.
    #[must_use]
    pub fn new(from_ns: u64, until_ns: u64) -> Self {
        let window = until_ns.saturating_sub(from_ns).max(1_000_000_000);
        Ticks { from_ns: from_ns.saturating_sub(window), tick_ns: (window >> 30).max(1) }
    }

    /// The tick of a time, rounded down; 0 is kept for "unknown".
    fn of(self, ns: u64) -> u32 {
        u32::try_from(ns.saturating_sub(self.from_ns) / self.tick_ns + 1).unwrap_or(u32::MAX)
    }

    fn ns(self, tick: u32) -> u64 {
        self.from_ns.saturating_add(u64::from(tick - 1) * self.tick_ns)
    }
}

impl NodeStarts {
    /// Notes the starts of a rank: sequence numbers and times of its own clock. Takes as many new
    /// pages as `pages` has left, and returns the number of starts for which there was none.
    pub fn note(&mut self, node: usize, ticks: Ticks, starts: &[(u64, u64)], pages: &Mutex<usize>) -> u64 {
        let mut left_out = 0;
        for of_page in starts.chunk_by(|(a, _), (b, _)| a / PAGE == b / PAGE) {
            let number = of_page[0].0 / PAGE;
            let Some(page) = self.page(node, number, pages) else {
                left_out += of_page.len() as u64;
                continue;
            };
            for (seq, ns) in of_page {
                let start = &mut page[(seq % PAGE) as usize];
                *start = (*start).max(ticks.of(*ns));
            }
        }
        left_out
    }

    fn page(&mut self, node: usize, number: u64, pages: &Mutex<usize>) -> Option<&mut Page> {
        let place = match self.pages.entry((node, number)) {
            Entry::Occupied(page) => return Some(page.into_mut()),
            Entry::Vacant(place) => place,
        };
        let mut pages = pages.lock().unwrap_or_else(PoisonError::into_inner);
        if *pages >= MOST_PAGES {
            self.is_full |= self.incomplete.len() >= MOST_PAGES;
            if !self.is_full {
                self.incomplete.insert(number);
            }
            return None;
        }
        *pages += 1;
        Some(place.insert(Box::new([0; PAGE as usize])))
    }

    /// The starts on the time of the trace, which `ticks` divides. `of_node` has the ticks of each
    /// node, and `map` converts a time of a node.
    #[must_use]
    pub fn align(self, ticks: Ticks, of_node: &[Ticks], map: impl Fn(usize, u64) -> u64) -> Starts {
        let mut starts = Starts::default();
        if self.is_full {
            return starts;
        }
        for ((node, number), mut page) in self.pages {
            if self.incomplete.contains(&number) {
                continue;
            }
            for tick in page.iter_mut().filter(|tick| **tick != 0) {
                *tick = ticks.of(map(node, of_node[node].ns(*tick)));
            }
            match starts.0.entry(number) {
                Entry::Vacant(place) => drop(place.insert(page)),
                Entry::Occupied(mut last) => {
                    last.get_mut().iter_mut().zip(page.iter()).for_each(|(last, tick)| *last = (*last).max(*tick));
                }
            }
        }
        starts
    }
}

impl Starts {
    /// When the last rank started a collective.
    #[must_use]
    pub fn last(&self, ticks: Ticks, seq: u64) -> Option<u64> {
        let tick = self.0.get(&(seq / PAGE))?[(seq % PAGE) as usize];
        (tick != 0).then(|| ticks.ns(tick))
    }
}

/// The messages from one rank of a communicator to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Index of the communicator.
    pub communicator: usize,
    /// The sending rank within it.
    pub from: i32,
    /// The receiving rank within it.
    pub to: i32,
}

impl Route {
    /// The route of a message of a rank; and whether it receives. `None` if an end is unknown.
    #[must_use]
    pub fn of(shape: &Operation, communicator: usize, own: i32) -> Option<(Self, bool)> {
        let receives = shape.op() == Op::Recv;
        let (from, to) = if receives { (shape.peer, own) } else { (own, shape.peer) };
        (from >= 0 && to >= 0).then_some((Route { communicator, from, to }, receives))
    }
}

/// The first ends on both sides of each route, in times of the trace once they are aligned.
pub type MessageEnds = HashMap<(Route, bool), Vec<u64>>;

/// Notes an end if there is room. Returns the number of the message on its side.
pub fn note_message(ends: &mut MessageEnds, key: (Route, bool), ns: u64) {
    let ends = ends.entry(key).or_default();
    if ends.len() < COMPARED_MESSAGES {
        ends.push(ns);
    }
}

/// For each route, the number of the send that the first receive of the window belongs to. A window
/// cuts both sides at the same moment, so the number is small: it is the one with which the ends of
/// the pairs are closest.
#[must_use]
pub fn pair_messages(ends: &MessageEnds) -> HashMap<Route, i64> {
    let mut pairs = HashMap::new();
    for ((route, receives), received) in ends {
        let (true, Some(sent)) = (receives, ends.get(&(*route, false))) else { continue };
        let distance = |shift: i64| -> Option<(u64, i64)> {
            let pairs = received.iter().enumerate().filter_map(|(index, received)| {
                let sent = sent.get(usize::try_from(index as i64 + shift).ok()?)?;
                Some(sent.abs_diff(*received))
            });
            let mut distances: Vec<u64> = pairs.collect();
            let enough = distances.len() >= received.len().min(sent.len()).div_ceil(2).max(1);
            distances.sort_unstable();
            enough.then(|| (distances[distances.len() / 2], shift.abs()))
        };
        let best = (-MOST_SHIFT..=MOST_SHIFT).filter_map(|shift| Some((distance(shift)?, shift))).min();
        if let Some((_, shift)) = best {
            pairs.insert(*route, shift);
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_sample_the_same_collectives_in_any_order() {
        let (mut forward, mut backward) = (Ends::default(), Ends::default());
        let all: Vec<(u64, u64)> = (0..20_000).map(|seq| (seq, seq * 10)).collect();
        let reversed: Vec<(u64, u64)> = all.iter().rev().copied().collect();
        for (node, rank) in [(0, 0), (1, 4)] {
            forward.note(node, rank, &all);
            backward.note(node, rank, &reversed);
        }
        let common = |ends: &Ends| {
            let mut common = Vec::new();
            ends.common(0, 1, &mut common);
            common.sort_unstable_by_key(|end| end.here_ns);
            common
        };
        let common = (common(&forward), common(&backward));
        assert!((100..=MOST_INSTANCES).contains(&common.0.len()), "{}", common.0.len());
        assert_eq!(common.0, common.1);
    }

    #[test]
    fn the_last_start_is_kept_to_a_few_nanoseconds() {
        let at = 1_000_000_123_456;
        let ticks = Ticks::new(1_000_000_000_000, 1_060_000_000_000);
        // The clock of the second node is 5 s ahead.
        let of_node = [ticks, Ticks::new(1_005_000_000_000, 1_065_000_000_000)];
        let map = |node: usize, ns: u64| if node == 0 { ns } else { ns - 5_000_000_000 };
        let (mut starts, pages) = (NodeStarts::default(), Mutex::new(0));
        for (node, ns) in [(0, at - 500_000), (1, at + 5_000_000_000), (0, at - 7)] {
            assert_eq!(starts.note(node, of_node[node], &[(5000, ns)], &pages), 0);
        }
        let starts = starts.align(ticks, &of_node, map);
        let last = starts.last(ticks, 5000).unwrap();
        assert!(last <= at && at - last < 128, "{last}");
        assert_eq!((starts.last(ticks, 5001), starts.last(ticks, 9_999_999)), (None, None));
    }

    #[test]
    fn without_memory_for_a_node_nobody_was_the_last() {
        let ticks = Ticks::new(0, 1_000_000_000);
        let (mut starts, pages) = (NodeStarts::default(), Mutex::new(MOST_PAGES - 1));
        assert_eq!(starts.note(0, ticks, &[(5, 100), (7, 200)], &pages), 0);
        assert_eq!(starts.note(1, ticks, &[(5, 900), (1 << 40, 100)], &pages), 2);
        assert_eq!(starts.align(ticks, &[ticks, ticks], |_, ns| ns).last(ticks, 5), None);
    }

    #[test]
    fn receives_are_paired_with_the_sends_that_ended_with_them() {
        let route = Route { communicator: 0, from: 1, to: 2 };
        // The window of the sender begins three messages earlier.
        let sent: Vec<u64> = (0..40).map(|index| index * 1_000_000).collect();
        let received: Vec<u64> = (3..40).map(|index| index * 1_000_000 + 4_000).collect();
        let ends = MessageEnds::from_iter([((route, false), sent), ((route, true), received)]);
        assert_eq!(pair_messages(&ends).get(&route), Some(&3));
    }
}
