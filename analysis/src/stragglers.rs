//! Finds the ranks that slow down a job that does not hang.
//!
//! In a collective every rank waits for the last one, so a slow rank is the one that waits least. A
//! rank's time inside a collective is measured by its own clock alone. Its waiting time is its time
//! inside minus that of the quickest rank. Ranks are compared within one communicator and over the
//! same sequence numbers.
//!
//! A rank is slow if two conditions hold: it comes last in one of its communicators, in most blocks
//! and by a good part of the time; and it waits less than the others over all its communicators
//! together. The second condition clears ranks that come late only because they waited for another
//! rank, such as the tensor-parallel peers of a slow rank, for which the data-parallel group waits.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
};

use xpu_timer_proto::{decode_varint, encode_varint, v1::PaceBlock};

use crate::text;

/// Number of blocks kept for each communicator.
pub const KEPT_BLOCKS: usize = 16;
/// Minimum number of blocks that the members of a communicator must share.
const MIN_BLOCKS: u32 = 12;
/// A rank is late in a block if the others wait for it for at least this share of the time.
const MARGIN: f64 = 0.1;
/// A slow rank is late in at least this share of the blocks.
const MIN_LATE_SHARE: f64 = 0.8;
/// The mean lateness must be at least this many times its standard error: ranks that are late by
/// chance are late at some times and early at others.
const MIN_STANDARD_ERRORS: f64 = 5.0;
/// Peers of a slow rank that are named.
const MOST_PEERS: usize = 7;
/// A communicator without operations for this long is forgotten.
pub const SILENCE_NS: u64 = 1800 * 1_000_000_000;
/// Blocks above this level are ignored: they would take ages.
const MAX_LEVEL: u32 = 31;
/// A block counts if at least this share of the communicator's members has it: without the slow
/// rank the comparison means nothing.
const MIN_PRESENT_SHARE: f64 = 0.75;

/// The recent operations of one rank on one communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Series {
    /// Number of ranks of the communicator.
    pub size: u32,
    /// At most [`KEPT_BLOCKS`], oldest first.
    pub blocks: Blocks,
    /// When the last block came, on the clock of the caller.
    pub heard_ns: u64,
}

impl Series {
    /// Adds a block and drops the oldest beyond [`KEPT_BLOCKS`].
    pub fn push(&mut self, block: PaceBlock, now_ns: u64) {
        self.heard_ns = now_ns;
        let dropped = (self.blocks.iter().count() + 1).saturating_sub(KEPT_BLOCKS);
        self.blocks = self.blocks.iter().skip(dropped).chain([block]).collect();
    }
}

/// Blocks in few bytes, as variable-length integers: consecutive blocks have one level and
/// consecutive indices. A cluster collector has some million blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blocks(Box<[u8]>);

impl Blocks {
    /// The blocks, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = PaceBlock> + use<'_> {
        let (mut rest, mut index) = (&self.0[..], 0u32);
        std::iter::from_fn(move || {
            let mut next = || decode_varint(&mut rest).ok().map(|value| value as u32);
            let [level, distance, inside_us, span_us] = [next()?, next()?, next()?, next()?];
            index = index.wrapping_add(distance);
            Some(PaceBlock { level, index, inside_us, span_us })
        })
    }
}

impl FromIterator<PaceBlock> for Blocks {
    fn from_iter<I: IntoIterator<Item = PaceBlock>>(blocks: I) -> Self {
        let (mut bytes, mut last) = (Vec::new(), 0u32);
        for PaceBlock { level, index, inside_us, span_us } in blocks {
            for value in [level, index.wrapping_sub(last), inside_us, span_us] {
                encode_varint(value.into(), &mut bytes);
            }
            last = index;
        }
        Blocks(bytes.into())
    }
}

/// All series of one rank, by communicator, with sends and receives separate. A list without spare
/// capacity: a rank has a handful of series, and a cluster collector has a hundred thousand ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pace {
    // Ascending by communicator and kind.
    series: Vec<((u64, bool), Series)>,
}

impl Pace {
    /// The series of a communicator. Creates it if there is none.
    pub fn series(&mut self, communicator: u64, point_to_point: bool) -> &mut Series {
        let key = (communicator, point_to_point);
        let place = self.series.binary_search_by_key(&key, |(key, _)| *key).unwrap_or_else(|place| {
            self.series.reserve_exact(1);
            self.series.insert(place, (key, Series::default()));
            place
        });
        &mut self.series[place].1
    }

    /// All series, each with its communicator and whether it is of sends and receives.
    pub fn iter(&self) -> impl Iterator<Item = (u64, bool, &Series)> {
        self.series.iter().map(|((communicator, point_to_point), series)| (*communicator, *point_to_point, series))
    }

    /// Forgets communicators that have not been used for [`SILENCE_NS`]: they may be gone, and
    /// their data is out of date.
    pub fn forget(&mut self, now_ns: u64) {
        self.series.retain(|(_, series)| now_ns.saturating_sub(series.heard_ns) < SILENCE_NS);
    }

    /// Keeps the `count` most recently used communicators.
    pub fn keep(&mut self, count: usize) {
        while self.series.len() > count {
            let oldest = self.series.iter().enumerate().min_by_key(|(_, (_, series))| series.heard_ns);
            let Some((place, _)) = oldest else { return };
            self.series.remove(place);
        }
    }
}

/// A rank for which the others wait.
#[derive(Debug, Clone, PartialEq)]
pub struct SlowRank {
    /// Rank in the job.
    pub rank: u32,
    /// Share of the time that it waits for others, over all its communicators.
    pub waits: f64,
    /// The median of that share over the other ranks.
    pub others_wait: f64,
    /// The communicator in which it is latest.
    pub communicator: u64,
    /// Number of ranks of that communicator.
    pub size: u32,
    /// Share of that communicator's blocks in which it was late.
    pub late: f64,
    /// Some other ranks of that communicator, which it can be compared with: those that are not
    /// slow, if there are any.
    pub peers: Vec<u32>,
}

impl fmt::Display for SlowRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |part: f64| (part * 100.0).round();
        write!(
            f,
            "it waits for others {} % of the time, while they wait {} %; it is late {} % of the time on communicator {} ({})",
            percent(self.waits),
            percent(self.others_wait),
            percent(self.late),
            text::communicator(self.communicator),
            text::rank_count(self.size)
        )
    }
}

/// The result of comparing the ranks of a job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Comparison {
    /// Share of the time that each rank waits for others. Without ranks that cannot be compared.
    pub waits: BTreeMap<u32, f64>,
    /// The slow ranks, the slowest first.
    pub slow: Vec<SlowRank>,
}

/// One rank in one communicator, over the compared blocks.
#[derive(Debug, Clone, Copy, Default)]
struct MemberPace {
    blocks: u32,
    late_blocks: u32,
    waited_us: f64,
    span_us: f64,
    lateness: f64,
    squares: f64,
}

impl MemberPace {
    /// Adds a block: how long this rank waited, how long the others waited, and how long the block
    /// took.
    fn add(&mut self, waited_us: f64, others_us: f64, span_us: f64) {
        let lateness = (others_us - waited_us) / span_us;
        self.blocks += 1;
        self.late_blocks += u32::from(lateness >= MARGIN);
        self.waited_us += waited_us;
        self.span_us += span_us;
        self.lateness += lateness;
        self.squares += lateness * lateness;
    }

    fn late_share(&self) -> f64 {
        f64::from(self.late_blocks) / f64::from(self.blocks.max(1))
    }

    fn mean_lateness(&self) -> f64 {
        self.lateness / f64::from(self.blocks.max(1))
    }

    /// Whether it comes last, and not by chance.
    fn is_last(&self) -> bool {
        let count = f64::from(self.blocks);
        let variance = (self.squares / count - self.mean_lateness().powi(2)).max(0.0);
        let error = (variance / (count - 1.0).max(1.0)).sqrt();
        self.blocks >= MIN_BLOCKS
            && self.late_share() >= MIN_LATE_SHARE
            && self.mean_lateness() >= MARGIN
            && self.mean_lateness() >= MIN_STANDARD_ERRORS * error
    }
}

/// Compares the ranks of one job.
#[must_use]
pub fn compare<'a>(ranks: impl IntoIterator<Item = (u32, &'a Pace)>) -> Comparison {
    let mut by_communicator: BTreeMap<u64, Vec<(u32, &Series)>> = BTreeMap::new();
    let mut waits: BTreeMap<u32, f64> = BTreeMap::new();
    for (rank, pace) in ranks {
        for (communicator, point_to_point, series) in pace.iter() {
            if point_to_point {
                // Both ends of a transfer wait for each other. The data does not show which send
                // belongs to which receive.
                let (inside, span) = totals(&series.blocks);
                *waits.entry(rank).or_default() += share(inside, span);
            } else {
                by_communicator.entry(communicator).or_default().push((rank, series));
            }
        }
    }
    // The communicator in which a rank is latest.
    let mut latest: HashMap<u32, (u64, u32, MemberPace)> = HashMap::new();
    let mut compared = Vec::new();
    for (communicator, members) in &by_communicator {
        for ((rank, series), pace) in members.iter().zip(member_paces(members)) {
            if pace.blocks == 0 {
                continue;
            }
            compared.push(*rank);
            *waits.entry(*rank).or_default() += share(pace.waited_us, pace.span_us);
            let is_later = latest.get(rank).is_none_or(|(_, _, other)| pace.mean_lateness() > other.mean_lateness());
            if pace.is_last() && is_later {
                latest.insert(*rank, (*communicator, series.size, pace));
            }
        }
    }
    compared.sort_unstable();
    waits.retain(|rank, _| compared.binary_search(rank).is_ok());

    let all: Vec<f64> = waits.values().copied().collect();
    let mut sorted = all.clone();
    sorted.sort_by(f64::total_cmp);
    let mut slow: Vec<SlowRank> = waits
        .iter()
        .filter_map(|(rank, own)| {
            let (communicator, size, pace) = latest.get(rank)?;
            let others_wait = median_of_others(&sorted, *own)?;
            (others_wait - own >= MARGIN).then(|| SlowRank {
                rank: *rank,
                waits: *own,
                others_wait,
                communicator: *communicator,
                size: *size,
                late: pace.late_share(),
                peers: Vec::new(),
            })
        })
        .collect();
    slow.sort_by(|a, b| a.waits.total_cmp(&b.waits).then(a.rank.cmp(&b.rank)));
    let slow_ranks: BTreeSet<u32> = slow.iter().map(|one| one.rank).collect();
    for one in &mut slow {
        let members = || by_communicator.get(&one.communicator).into_iter().flatten().map(|(rank, _)| *rank);
        let is_slow = |rank: &u32| slow_ranks.contains(rank);
        let others = members().filter(|rank| is_slow(rank) && *rank != one.rank);
        let peers = members().filter(|rank| !is_slow(rank)).chain(others).take(MOST_PEERS).collect();
        one.peers = peers;
    }
    Comparison { waits, slow }
}

/// The pace of each member of a communicator over the blocks that they share.
fn member_paces(members: &[(u32, &Series)]) -> Vec<MemberPace> {
    let mut paces = vec![MemberPace::default(); members.len()];
    let levels = members.iter().flat_map(|(_, series)| series.blocks.iter()).map(|block| block.level);
    let level = levels.filter(|level| *level <= MAX_LEVEL).max().unwrap_or(0);
    // By block index: member, time inside and span.
    let mut shared: BTreeMap<u32, Vec<(u32, f64, f64)>> = BTreeMap::new();
    for (member, (_, series)) in (0..).zip(members) {
        merge_blocks(series.blocks.iter(), level, |index, inside, span| {
            let present = shared.entry(index).or_insert_with(|| Vec::with_capacity(members.len()));
            present.push((member, inside, span));
        });
    }
    let mut waited: Vec<f64> = Vec::with_capacity(members.len());
    for present in shared.values() {
        if present.len() < 2 || (present.len() as f64) < MIN_PRESENT_SHARE * members.len() as f64 {
            continue;
        }
        let quickest = present.iter().map(|(_, inside, _)| *inside).fold(f64::INFINITY, f64::min);
        waited.clear();
        waited.extend(present.iter().map(|(_, inside, _)| inside - quickest));
        waited.sort_unstable_by(f64::total_cmp);
        for (member, inside, span) in present {
            let own = inside - quickest;
            if let Some(others) = median_of_others(&waited, own).filter(|_| *span > 0.0) {
                paces[*member as usize].add(own, others, *span);
            }
        }
    }
    paces
}

/// Merges blocks to one level, so that they can be compared. Calls `merged` with index, time inside
/// and span of each complete block.
fn merge_blocks(blocks: impl Iterator<Item = PaceBlock>, level: u32, mut merged: impl FnMut(u32, f64, f64)) {
    // The block that is being merged: its index, its size so far in blocks of level 0, its time
    // inside and its span.
    let mut open: Option<(u32, u64, f64, f64)> = None;
    for block in blocks.filter(|block| block.level <= level) {
        let Some(index) = block.index.checked_shr(level - block.level) else { continue };
        let (inside, span) = (f64::from(block.inside_us), f64::from(block.span_us));
        open = match open {
            Some((same, part, sum, spans)) if same == index => {
                Some((same, part + (1 << block.level), sum + inside, spans + span))
            }
            _ => Some((index, 1 << block.level, inside, span)),
        };
        if let Some((index, part, inside, span)) = open
            && part == 1 << level
        {
            merged(index, inside, span);
            open = None;
        }
    }
}

/// The median of sorted values without one of them, `own`.
fn median_of_others(sorted: &[f64], own: f64) -> Option<f64> {
    let count = sorted.len().checked_sub(1).filter(|count| *count > 0)?;
    let place = sorted.partition_point(|value| *value < own);
    let other = |index: usize| sorted[if index < place { index } else { index + 1 }];
    Some((other((count - 1) / 2) + other(count / 2)) / 2.0)
}

fn totals(blocks: &Blocks) -> (f64, f64) {
    let sum = |part: fn(&PaceBlock) -> u32| blocks.iter().map(|block| f64::from(part(&block))).sum();
    (sum(|block| block.inside_us), sum(|block| block.span_us))
}

fn share(part: f64, total: f64) -> f64 {
    if total > 0.0 { part / total } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A deterministic pseudorandom generator.
    struct Random(u64);

    impl Random {
        /// The next number, between 0 and 1.
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    /// A job whose ranks pass through groups one after the other in each step, and wait in each
    /// group for the last member.
    struct Job {
        /// Identity and members of each communicator, in the order in which a step enters them.
        groups: Vec<(u64, Vec<u32>)>,
        world: u32,
        paces: BTreeMap<u32, Pace>,
    }

    impl Job {
        fn new(world: u32, groups: Vec<(u64, Vec<u32>)>) -> Self {
            Job { groups, world, paces: BTreeMap::new() }
        }

        /// Runs steps. `work` is what a rank computes in a step, in microseconds.
        fn run(mut self, steps: u32, mut work: impl FnMut(u32, u32) -> f64) -> Self {
            let mut clocks = vec![0.0f64; self.world as usize];
            let mut ends: HashMap<(u32, u64), f64> = HashMap::new();
            for step in 0..steps {
                for (rank, clock) in clocks.iter_mut().enumerate() {
                    *clock += work(rank as u32, step);
                }
                for (communicator, members) in &self.groups {
                    let all_there = members.iter().map(|rank| clocks[*rank as usize]).fold(0.0, f64::max);
                    for rank in members {
                        let clock = &mut clocks[*rank as usize];
                        let inside = all_there + 2_000.0 - *clock;
                        *clock = all_there + 2_000.0;
                        let before = ends.insert((*rank, *communicator), *clock).unwrap_or(0.0);
                        let series = self.paces.entry(*rank).or_default().series(*communicator, false);
                        series.size = members.len() as u32;
                        series.push(
                            PaceBlock {
                                level: 0,
                                index: step,
                                inside_us: inside as u32,
                                span_us: (*clock - before) as u32,
                            },
                            0,
                        );
                    }
                }
            }
            self
        }

        fn compare(&self) -> Comparison {
            compare(self.paces.iter().map(|(rank, pace)| (*rank, pace)))
        }

        fn slow(&self) -> Vec<u32> {
            let mut slow: Vec<u32> = self.compare().slow.iter().map(|one| one.rank).collect();
            slow.sort_unstable();
            slow
        }
    }

    fn one_group(world: u32) -> Job {
        Job::new(world, vec![(1, (0..world).collect())])
    }

    /// Two nodes of eight ranks: tensor parallelism within the node, data parallelism across nodes,
    /// then the world.
    fn grid() -> Job {
        let mut groups: Vec<(u64, Vec<u32>)> = vec![(10, (0..8).collect()), (11, (8..16).collect())];
        groups.extend((0..8).map(|local| (20 + u64::from(local), vec![local, local + 8])));
        groups.push((1, (0..16).collect()));
        Job::new(16, groups)
    }

    #[test]
    fn two_slow_ranks_of_eight_are_named_and_so_is_the_slower_one_first() {
        let job = one_group(8).run(30, |rank, _| match rank {
            2 => 130_000.0,
            5 => 150_000.0,
            _ => 100_000.0,
        });
        let comparison = job.compare();
        let slow: Vec<u32> = comparison.slow.iter().map(|one| one.rank).collect();
        assert_eq!(slow, [5, 2]);
        let slowest = &comparison.slow[0];
        assert_eq!(slowest.peers, [0, 1, 3, 4, 6, 7, 2], "the slow one comes last");
        assert_eq!((slowest.waits, slowest.late, slowest.communicator, slowest.size), (0.0, 1.0, 1, 8));
        assert!((0.3..0.35).contains(&slowest.others_wait), "50 of 152 ms: {slowest:?}");
        assert_eq!(comparison.waits.len(), 8);
        assert_eq!(
            slowest.to_string(),
            "it waits for others 0 % of the time, while they wait 33 %; it is late 100 % of the time on communicator 0x1 (8 ranks)"
        );
    }

    #[test]
    fn jitter_alone_names_no_straggler() {
        for seed in 0..200 {
            let mut random = Random(seed);
            let job = one_group(8).run(40, |_, _| 100_000.0 * (0.7 + 0.6 * random.next()));
            assert_eq!(job.slow(), [] as [u32; 0], "seed {seed}");
        }
    }

    #[test]
    fn a_slow_rank_shows_through_jitter() {
        let mut found = 0;
        for seed in 0..100 {
            let mut random = Random(seed);
            let job = one_group(8).run(40, |rank, _| {
                let jitter = 100_000.0 * (0.9 + 0.2 * random.next());
                if rank == 3 { jitter + 60_000.0 } else { jitter }
            });
            let slow = job.slow();
            assert!(slow.is_empty() || slow == [3], "seed {seed}: {slow:?}");
            found += usize::from(slow == [3]);
        }
        assert_eq!(found, 100);
    }

    #[test]
    fn one_long_step_of_a_rank_is_a_pause_and_no_slow_rank() {
        // Rank 0 writes a checkpoint of ten seconds, then one of twenty.
        let job = one_group(4).run(40, |rank, step| match (rank, step) {
            (0, 30) => 10_000_000.0,
            (0, 36) => 20_000_000.0,
            _ => 100_000.0,
        });
        assert_eq!(job.slow(), [] as [u32; 0]);
    }

    #[test]
    fn peers_of_a_slow_rank_are_not_slow() {
        let job = grid().run(30, |rank, _| if rank == 11 { 150_000.0 } else { 100_000.0 });
        assert_eq!(job.slow(), [11], "its tensor-parallel peers come late into their data-parallel groups");
        let job = grid().run(30, |rank, _| match rank {
            3 => 160_000.0,
            11 => 130_000.0,
            _ => 100_000.0,
        });
        assert_eq!(job.slow(), [3, 11]);
        let job = grid().run(30, |rank, _| if rank < 8 { 150_000.0 } else { 100_000.0 });
        assert_eq!(job.slow(), (0..8).collect::<Vec<_>>(), "a node that is slow as a whole");
    }

    #[test]
    fn a_pair_can_have_a_straggler_and_a_single_rank_cannot() {
        let job = one_group(2).run(30, |rank, _| if rank == 1 { 150_000.0 } else { 100_000.0 });
        assert_eq!(job.slow(), [1]);
        let job = one_group(1).run(30, |_, _| 100_000.0);
        assert_eq!(job.compare(), Comparison::default());
    }

    #[test]
    fn too_little_evidence_names_no_rank() {
        let job = one_group(4).run(MIN_BLOCKS - 1, |rank, _| if rank == 1 { 200_000.0 } else { 100_000.0 });
        assert_eq!(job.slow(), [] as [u32; 0]);
        let job = one_group(4).run(30, |rank, _| if rank == 1 { 105_000.0 } else { 100_000.0 });
        assert_eq!(job.slow(), [] as [u32; 0], "one twentieth is not worth a person's time");
    }

    #[test]
    fn blocks_of_different_sizes_are_compared_over_the_same_numbers() {
        let block = |level, index, inside_us| PaceBlock { level, index, inside_us, span_us: 100 << level };
        let fine = [block(0, 7, 9), block(0, 8, 10), block(0, 9, 11), block(1, 5, 50), block(0, 12, 7)];
        let merged = |blocks: &[PaceBlock], level| {
            let mut merged = Vec::new();
            merge_blocks(blocks.iter().copied(), level, |index, inside, span| merged.push((index, inside, span)));
            merged
        };
        assert_eq!(merged(&fine, 1), [(4, 21.0, 200.0), (5, 50.0, 200.0)], "7 and 12 are halves");
        assert_eq!(merged(&fine, 2), [(2, 71.0, 400.0)]);
        assert_eq!(merged(&[block(3, 1, 5)], 3), [(1, 5.0, 800.0)]);
    }

    #[test]
    fn a_silent_rank_does_not_disturb_the_comparison() {
        let mut job = one_group(8).run(30, |rank, _| if rank == 6 { 150_000.0 } else { 100_000.0 });
        job.paces.remove(&0);
        assert_eq!(job.slow(), [6]);
        for level in [31, 32, 64, u32::MAX] {
            let odd = PaceBlock { level, index: u32::MAX, inside_us: u32::MAX, span_us: 0 };
            let series = Series { size: 8, blocks: [odd; 3].into_iter().collect(), heard_ns: 0 };
            *job.paces.entry(0).or_default().series(2, false) = series.clone();
            *job.paces.entry(1).or_default().series(2, false) = series;
            assert_eq!(job.slow(), [6], "level {level}");
        }
    }

    #[test]
    fn waiting_in_transfers_counts() {
        // A pipeline of two stages with two replicas. Stage 0 of replica 0 is slow, so stage 1 of
        // that replica waits in its receive and comes late into its own data-parallel group.
        let mut job = Job::new(4, vec![(1, vec![0, 2]), (2, vec![1, 3])]).run(30, |rank, _| match rank {
            0 | 1 => 150_000.0,
            _ => 100_000.0,
        });
        let series = (0..16).map(|index| PaceBlock { level: 0, index, inside_us: 50_000, span_us: 152_000 });
        let series = Series { size: 2, blocks: series.collect(), heard_ns: 0 };
        *job.paces.entry(1).or_default().series(3, true) = series;
        assert_eq!(job.slow(), [0]);
    }

    #[test]
    fn blocks_are_kept_as_they_came() {
        let block = |level, index, inside_us| PaceBlock { level, index, inside_us, span_us: 10_000_000 };
        let blocks =
            [block(0, 7, 0), block(0, 8, 1), block(6, 3, u32::MAX), block(u32::MAX, u32::MAX, 9), block(0, 0, 1)];
        assert_eq!(blocks.into_iter().collect::<Blocks>().iter().collect::<Vec<_>>(), blocks);
        let mut series = Series::default();
        (0..40).for_each(|index| series.push(block(6, index, 3_000_000), u64::from(index)));
        let kept: Vec<u32> = series.blocks.iter().map(|block| block.index).collect();
        assert_eq!((kept, series.heard_ns), ((24..40).collect(), 39));
        assert!(series.blocks.0.len() < KEPT_BLOCKS * size_of::<PaceBlock>() * 2 / 3);
    }

    #[test]
    fn median_of_the_others() {
        assert_eq!(median_of_others(&[1.0, 2.0, 9.0], 1.0), Some(5.5));
        assert_eq!(median_of_others(&[1.0, 2.0, 9.0], 2.0), Some(5.0));
        assert_eq!(median_of_others(&[1.0, 2.0], 2.0), Some(1.0));
        assert_eq!(median_of_others(&[1.0, 1.0, 4.0, 4.0], 4.0), Some(1.0));
        assert_eq!(median_of_others(&[1.0], 1.0), None);
    }
}
