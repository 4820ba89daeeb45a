//! The completed operations of all ranks of a node, in encoded blocks. Pure: no clock, no ring, no
//! file.
//!
//! The window of a job counts back from its newest operation: a hang is reported long after it
//! began, and the operations before it must still be here then. The limit in bytes always holds.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use xpu_timer_proto::{
    timeline::BlockBuilder,
    v1::{Communicator, MemoryReading, Operation},
};

use crate::{
    job::{JobKey, RankId},
    os::clock::Now,
    timeline::stacks::Stacks,
};

/// Memory of a finished block besides its bytes.
const BLOCK_BYTES: usize = 128;
/// A block spans at most this fraction of the window, so that ranks with few operations also lose
/// their oldest operations in small steps.
const BLOCKS_IN_WINDOW: u64 = 8;
/// Time between two readings of the clocks that are kept.
const CLOCK_INTERVAL_NS: u64 = 10_000_000_000;

/// An encoded block of operations.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    /// A length and a `TimelineChunk`, as in a file.
    pub bytes: Arc<[u8]>,
    /// Number of operations.
    pub operations: u64,
    /// When the first and the last of them ended, CLOCK_MONOTONIC.
    pub ended_ns: (u64, u64),
}

/// The recorded operations of one rank.
#[derive(Debug, Default)]
struct Recorded {
    job: Option<JobKey>,
    open: BlockBuilder,
    // Its memory, as counted for the limit.
    open_bytes: usize,
    // When the first and the last operation in `open` ended.
    open_ended_ns: (u64, u64),
    blocks: VecDeque<Block>,
    // When the newest operation ended, without calls of traced functions.
    newest_ns: u64,
    // When operations were found missing, and how many.
    lost: VecDeque<(u64, u64)>,
    // All operations that ended up to this time have left.
    gone_until_ns: u64,
    communicators: Arc<[Communicator]>,
    stacks: Arc<Stacks>,
    // Readings of its device memory, oldest first.
    memory: VecDeque<MemoryReading>,
}

/// The recorded operations of a rank in a window.
#[derive(Debug, Clone, Default)]
pub(crate) struct Window {
    /// Its blocks, oldest first. The first ones may also have operations before the window.
    pub blocks: Vec<Block>,
    /// The window that they cover. It is shorter than the wanted one if operations have left.
    pub from_ns: u64,
    /// Missing operations.
    pub lost: u64,
    /// The communicators of the process.
    pub communicators: Arc<[Communicator]>,
    /// The Python stacks of its launches.
    pub stacks: Arc<Stacks>,
    /// Readings of its device memory in the window.
    pub memory: Vec<MemoryReading>,
}

/// The operations of all ranks.
#[derive(Debug)]
pub(crate) struct Store {
    window_ns: u64,
    limit_bytes: usize,
    bytes: usize,
    ranks: BTreeMap<RankId, Recorded>,
    clock: VecDeque<Now>,
}

impl Store {
    /// Keeps operations for `window_ns`, in at most `limit_bytes`.
    #[must_use]
    pub(crate) fn new(window_ns: u64, limit_bytes: usize) -> Self {
        Store { window_ns, limit_bytes, bytes: 0, ranks: BTreeMap::new(), clock: VecDeque::new() }
    }

    /// Whether it keeps anything.
    #[must_use]
    pub(crate) fn is_on(&self) -> bool {
        self.window_ns > 0
    }

    /// Memory in use, in bytes.
    #[must_use]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds completed operations of a rank, in the order in which they were read.
    pub(crate) fn add(&mut self, id: RankId, job: &JobKey, operations: &[Operation]) {
        if !self.is_on() || operations.is_empty() {
            return;
        }
        let rank = self.ranks.entry(id).or_default();
        rank.newest_ns = operations.iter().map(end_ns).fold(rank.newest_ns, u64::max);
        self.push(id, job, operations);
    }

    /// Adds calls of traced functions. They do not move the window: in a hang, they may go on. When
    /// they do and need much memory, they are not kept, so that the operations before the hang
    /// stay.
    pub(crate) fn add_calls(&mut self, id: RankId, job: &JobKey, calls: &[Operation]) {
        if !self.is_on() || calls.is_empty() {
            return;
        }
        let newest_ns = self.ranks.get(&id).map_or(0, |rank| rank.newest_ns);
        let end = newest_ns.saturating_add(self.window_ns);
        if newest_ns != 0 && self.bytes > self.limit_bytes / 2 && calls.iter().any(|call| end_ns(call) > end) {
            self.add_lost(id, calls.len() as u64, end);
            return;
        }
        self.push(id, job, calls);
    }

    fn push(&mut self, id: RankId, job: &JobKey, operations: &[Operation]) {
        let longest_ns = self.window_ns / BLOCKS_IN_WINDOW;
        let rank = self.ranks.entry(id).or_default();
        if rank.job.as_ref() != Some(job) {
            rank.job = Some(job.clone());
        }
        for operation in operations {
            let ended_ns = end_ns(operation);
            let (first_ns, last_ns) = rank.open_ended_ns;
            if !rank.open.is_empty() && (rank.open.is_full() || ended_ns > first_ns.saturating_add(longest_ns)) {
                rank.seal(&mut self.bytes);
            }
            rank.open_ended_ns = match rank.open.is_empty() {
                true => (ended_ns, ended_ns),
                false => (first_ns.min(ended_ns), last_ns.max(ended_ns)),
            };
            rank.open.push(operation);
        }
        rank.count_open(&mut self.bytes);
        self.limit();
    }

    /// Notes that operations of a rank were missed.
    pub(crate) fn add_lost(&mut self, id: RankId, count: u64, now_ns: u64) {
        if self.is_on() && count > 0 {
            self.ranks.entry(id).or_default().lost.push_back((now_ns, count));
        }
    }

    /// Notes that the operations of a rank that ended before `first_ns` are not known.
    pub(crate) fn set_begin(&mut self, id: RankId, first_ns: u64) {
        if self.is_on() {
            let rank = self.ranks.entry(id).or_default();
            rank.gone_until_ns = rank.gone_until_ns.max(first_ns.saturating_sub(1));
        }
    }

    /// Keeps the communicators of a rank, for the time after its ring is gone.
    pub(crate) fn set_communicators(&mut self, id: RankId, communicators: Arc<[Communicator]>) {
        if self.is_on() {
            self.ranks.entry(id).or_default().communicators = communicators;
        }
    }

    /// Keeps the Python stacks of a rank's launches.
    pub(crate) fn set_stacks(&mut self, id: RankId, stacks: &Arc<Stacks>) {
        if self.is_on() && !stacks.stacks.is_empty() {
            self.ranks.entry(id).or_default().stacks = Arc::clone(stacks);
        }
    }

    /// Adds a reading of the device memory of a rank.
    pub(crate) fn add_memory(&mut self, id: RankId, reading: MemoryReading) {
        if self.is_on() {
            self.ranks.entry(id).or_default().memory.push_back(reading);
        }
    }

    /// Keeps a reading of the clocks if it is time, and removes what has left the window of its job
    /// and ranks that `exists` does not know.
    pub(crate) fn turn(&mut self, now: Now, exists: impl Fn(RankId) -> bool) {
        if !self.is_on() {
            return;
        }
        if self.clock.back().is_none_or(|last| now.mono_ns >= last.mono_ns + CLOCK_INTERVAL_NS) {
            self.clock.push_back(now);
        }
        let mut newest: BTreeMap<&JobKey, u64> = BTreeMap::new();
        for rank in self.ranks.values() {
            let Some(job) = &rank.job else { continue };
            let of_job = newest.entry(job).or_default();
            *of_job = rank.newest_ns().max(*of_job);
        }
        let ends: BTreeMap<RankId, u64> = self
            .ranks
            .iter()
            .filter_map(|(id, rank)| Some((*id, newest.get(rank.job.as_ref()?)?.saturating_sub(self.window_ns))))
            .collect();
        let bytes = &mut self.bytes;
        self.ranks.retain(|id, rank| {
            if !exists(*id) {
                rank.clear(bytes);
                return false;
            }
            if let Some(end) = ends.get(id) {
                rank.leave(*end, bytes);
            }
            true
        });
        let oldest_ns = ends.values().min().copied().unwrap_or(now.mono_ns);
        // One reading from before the oldest window stays.
        while self.clock.get(1).is_some_and(|second| second.mono_ns <= oldest_ns) {
            self.clock.pop_front();
        }
    }

    /// The readings of the clocks around a window, oldest first.
    #[must_use]
    pub(crate) fn clock(&self, from_ns: u64) -> Vec<Now> {
        let later = self.clock.iter().position(|reading| reading.mono_ns > from_ns).unwrap_or(self.clock.len());
        self.clock.iter().skip(later.saturating_sub(1)).copied().collect()
    }

    /// When the newest operation of these ranks ended; 0 for none.
    #[must_use]
    pub(crate) fn newest_ns(&self, ranks: impl Iterator<Item = RankId>) -> u64 {
        ranks.filter_map(|id| self.ranks.get(&id)).map(Recorded::newest_ns).max().unwrap_or(0)
    }

    /// The operations of a rank that ended at or after a time.
    pub(crate) fn window(&mut self, id: RankId, from_ns: u64) -> Window {
        let Some(rank) = self.ranks.get_mut(&id) else { return Window { from_ns, ..Window::default() } };
        rank.seal(&mut self.bytes);
        Window {
            blocks: rank.blocks.iter().filter(|block| block.ended_ns.1 >= from_ns).cloned().collect(),
            from_ns: if rank.gone_until_ns >= from_ns { rank.gone_until_ns + 1 } else { from_ns },
            lost: rank.lost.iter().filter(|(found_ns, _)| *found_ns >= from_ns).map(|(_, count)| count).sum(),
            communicators: Arc::clone(&rank.communicators),
            stacks: Arc::clone(&rank.stacks),
            memory: rank.memory.iter().filter(|reading| reading.monotonic_ns >= from_ns).copied().collect(),
        }
    }

    /// Removes the oldest blocks of all ranks until the limit holds.
    fn limit(&mut self) {
        while self.bytes > self.limit_bytes {
            let oldest = self.ranks.values_mut().filter(|rank| !rank.blocks.is_empty());
            if let Some(rank) = oldest.min_by_key(|rank| rank.blocks.front().map(|block| block.ended_ns.1)) {
                rank.pop(&mut self.bytes);
                continue;
            }
            // Only open blocks are left. A finished one can be removed.
            let Some(rank) = self.ranks.values_mut().max_by_key(|rank| rank.open.len()) else { return };
            if rank.open.is_empty() {
                return;
            }
            rank.seal(&mut self.bytes);
        }
    }
}

impl Recorded {
    fn newest_ns(&self) -> u64 {
        if self.newest_ns != 0 {
            return self.newest_ns;
        }
        let open_ns = if self.open.is_empty() { 0 } else { self.open_ended_ns.1 };
        self.blocks.iter().map(|block| block.ended_ns.1).max().unwrap_or(0).max(open_ns)
    }

    /// Counts the memory of the open block.
    fn count_open(&mut self, bytes: &mut usize) {
        let before = std::mem::replace(&mut self.open_bytes, self.open.bytes());
        *bytes = bytes.saturating_sub(before) + self.open_bytes;
    }

    /// Finishes the open block.
    fn seal(&mut self, bytes: &mut usize) {
        if self.open.is_empty() {
            return;
        }
        let operations = self.open.len() as u64;
        let encoded: Arc<[u8]> = self.open.finish_chunk().into();
        self.count_open(bytes);
        *bytes += encoded.len() + BLOCK_BYTES;
        self.blocks.push_back(Block { bytes: encoded, operations, ended_ns: self.open_ended_ns });
    }

    /// Removes the oldest block.
    fn pop(&mut self, bytes: &mut usize) {
        if let Some(block) = self.blocks.pop_front() {
            *bytes = bytes.saturating_sub(block.bytes.len() + BLOCK_BYTES);
            self.gone_until_ns = self.gone_until_ns.max(block.ended_ns.1);
        }
    }

    /// Removes the blocks that ended before `from_ns`.
    fn leave(&mut self, from_ns: u64, bytes: &mut usize) {
        if !self.open.is_empty() && self.open_ended_ns.1 < from_ns {
            self.seal(bytes);
        }
        while self.blocks.front().is_some_and(|block| block.ended_ns.1 < from_ns) {
            self.pop(bytes);
        }
        while self.lost.front().is_some_and(|(found_ns, _)| *found_ns < from_ns) {
            self.lost.pop_front();
        }
        while self.memory.front().is_some_and(|reading| reading.monotonic_ns < from_ns) {
            self.memory.pop_front();
        }
    }

    fn clear(&mut self, bytes: &mut usize) {
        self.seal(bytes);
        while !self.blocks.is_empty() {
            self.pop(bytes);
        }
    }
}

/// When an operation ended. A failed one may have no end.
#[must_use]
pub(crate) fn end_ns(operation: &Operation) -> u64 {
    match operation.completed_ns {
        0 => operation.started_ns.max(operation.returned_ns).max(operation.entered_ns),
        completed_ns => completed_ns,
    }
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{
        Message as _, timeline,
        v1::{OpStatus, TimelineChunk, timeline_chunk::Part},
    };

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn job(name: &str) -> JobKey {
        JobKey { name: name.into(), instance: String::new() }
    }

    /// Operations that ended at these seconds.
    fn ended(seconds: impl IntoIterator<Item = u64>) -> Vec<Operation> {
        let operation = |second: u64| Operation {
            ticket: second,
            entered_ns: second * SECOND - 1000,
            completed_ns: second * SECOND,
            status: OpStatus::Completed.into(),
            ..Default::default()
        };
        seconds.into_iter().map(operation).collect()
    }

    fn at(second: u64) -> Now {
        Now { mono_ns: second * SECOND, unix_ns: (1_000_000 + second) * SECOND }
    }

    /// The tickets in a window.
    fn tickets(window: &Window) -> Vec<u64> {
        let of_block = |block: &Block| -> Vec<u64> {
            let Some(Part::Block(decoded)) = TimelineChunk::decode_length_delimited(&*block.bytes).unwrap().part else {
                panic!("no block")
            };
            let tickets: Vec<u64> = timeline::operations(&decoded).unwrap().map(|operation| operation.ticket).collect();
            assert_eq!(tickets.len() as u64, block.operations);
            tickets
        };
        window.blocks.iter().flat_map(of_block).collect()
    }

    #[test]
    fn a_window_has_every_operation_in_order() {
        let mut store = Store::new(10_000 * SECOND, usize::MAX);
        let given: Vec<u64> = (1..10_000).collect();
        for part in given.chunks(333) {
            store.add(1, &job("a"), &ended(part.iter().copied()));
        }
        let window = store.window(1, 0);
        assert_eq!(tickets(&window), given);
        assert!(window.blocks.len() >= 8 && window.lost == 0);
        let later = tickets(&store.window(1, 9_000 * SECOND));
        assert!(later[0] <= 9_000 && later.len() < 3_000 && later.ends_with(&[9_998, 9_999]), "{}", later[0]);
        store.add(1, &job("a"), &ended([10_000]));
        assert_eq!(tickets(&store.window(1, 10_000 * SECOND)), [10_000]);
        assert_eq!(tickets(&store.window(2, 0)), [0; 0]);
    }

    #[test]
    fn the_window_of_a_job_counts_back_from_its_newest_operation() {
        let mut store = Store::new(100 * SECOND, usize::MAX);
        store.add(1, &job("a"), &ended(1..=200));
        store.add(2, &job("a"), &ended(1..=150));
        store.add(3, &job("b"), &ended(1..=20));
        store.turn(at(5_000), |_| true);
        // The store keeps all of a hung job, however long ago its last operation ended.
        let all = |store: &mut Store, id| tickets(&store.window(id, 0));
        for (id, last) in [(1, 200), (2, 150)] {
            let kept = all(&mut store, id);
            assert!((85..=100).contains(&kept[0]) && kept.ends_with(&[last]), "{kept:?}");
        }
        assert_eq!(all(&mut store, 3), (1..=20).collect::<Vec<_>>());
        let from_ns = store.window(1, 0).from_ns;
        assert!((85 * SECOND..=100 * SECOND).contains(&from_ns), "it says what it covers: {from_ns}");
        store.add(1, &job("a"), &ended([1_000]));
        store.turn(at(5_000), |_| true);
        assert_eq!(all(&mut store, 1), [1_000]);
        assert_eq!(all(&mut store, 2), [0; 0], "operations of the other rank are newer");
        store.turn(at(5_001), |id| id != 3);
        assert_eq!(all(&mut store, 3), [0; 0]);
    }

    #[test]
    fn the_oldest_blocks_of_all_ranks_leave_when_the_memory_is_used() {
        let mut store = Store::new(100_000 * SECOND, 200_000);
        for second in 1..=20_000 {
            for id in 1..=3 {
                store.add(id, &job("a"), &ended([second]));
                assert!(store.bytes() <= 200_000, "{} at {second}", store.bytes());
            }
        }
        let kept: Vec<Vec<u64>> = (1..=3).map(|id| tickets(&store.window(id, 0))).collect();
        for kept in &kept {
            assert!(kept.ends_with(&[20_000]) && kept[0] > 1, "{}", kept[0]);
        }
        let firsts: Vec<u64> = kept.iter().map(|kept| kept[0]).collect();
        assert!(firsts.iter().max().unwrap() - firsts.iter().min().unwrap() < 5_000, "{firsts:?}");
        assert_eq!(store.window(1, 0).from_ns, (kept[0][0] - 1) * SECOND + 1);
        store.turn(at(1), |_| false);
        assert_eq!(store.bytes(), 0);
    }

    #[test]
    fn lost_operations_count_for_the_window_in_which_they_were_missed() {
        let mut store = Store::new(100 * SECOND, usize::MAX);
        store.add(1, &job("a"), &ended([50]));
        store.add_lost(1, 7, 50 * SECOND);
        store.add_lost(1, 5, 140 * SECOND);
        assert_eq!(store.window(1, 0).lost, 12);
        assert_eq!(store.window(1, 100 * SECOND).lost, 5);
        store.add(1, &job("a"), &ended([200]));
        store.turn(at(200), |_| true);
        assert_eq!(store.window(1, 0).lost, 5);
    }

    #[test]
    fn a_window_does_not_cover_what_was_before_the_first_read() {
        let mut store = Store::new(100 * SECOND, usize::MAX);
        store.add(1, &job("a"), &ended(20..=30));
        assert_eq!(store.window(1, 10 * SECOND).from_ns, 10 * SECOND);
        store.set_begin(1, 20 * SECOND);
        assert_eq!(store.window(1, 10 * SECOND).from_ns, 20 * SECOND);
        assert_eq!(store.window(1, 25 * SECOND).from_ns, 25 * SECOND);
    }

    #[test]
    fn clock_readings_enclose_the_window() {
        let mut store = Store::new(100 * SECOND, usize::MAX);
        for second in 1..=300 {
            store.add(1, &job("a"), &ended([second]));
            store.turn(at(second), |_| true);
        }
        let seconds = |store: &Store, from| -> Vec<u64> {
            store.clock(from * SECOND).iter().map(|reading| reading.mono_ns / SECOND).collect()
        };
        assert_eq!(seconds(&store, 250)[..2], [241, 251]);
        assert_eq!(seconds(&store, 0)[0], 191, "one from before the oldest window");
        assert_eq!(seconds(&store, 400), [291]);
    }

    #[test]
    fn a_window_of_zero_keeps_nothing() {
        let mut store = Store::new(0, usize::MAX);
        store.add(1, &job("a"), &ended(1..100));
        store.add_lost(1, 7, 1);
        assert_eq!((store.bytes(), store.window(1, 0).lost, tickets(&store.window(1, 0)).len()), (0, 0, 0));
    }
}
