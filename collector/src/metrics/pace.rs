//! The speed of a rank in its collectives, condensed for the comparison in
//! `xpu_timer_analysis::stragglers`: blocks of consecutive sequence numbers, sized so that a block
//! takes about a second.

use std::collections::BTreeMap;

use xpu_timer_analysis::stragglers::{Pace, SILENCE_NS};
use xpu_timer_proto::v1::{Communicator, CommunicatorPace, Op, OpKind, OpStatus, Operation, PaceBlock};

/// The blocks of one rank.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    /// The finished blocks.
    pub pace: Pace,
    open: BTreeMap<(u64, bool), Open>,
    // Blocks since the last report to the cluster.
    unreported: BTreeMap<(u64, bool), CommunicatorPace>,
}

/// The block in progress.
#[derive(Debug, Default)]
struct Open {
    level: u32,
    wanted: u32,
    index: u64,
    count: u64,
    inside_ns: u64,
    last_ns: u64,
    // End of the previous block; 0 if unknown.
    begun_ns: u64,
}

const SECOND: u64 = 1_000_000_000;
const LONGEST_BLOCK_NS: u64 = 10 * SECOND;
/// A large world has longer blocks, which limits the data that its nodes send to the cluster
/// collector.
const RANKS_PER_SECOND: u64 = 1024;
const HIGHEST_LEVEL: u32 = 20;
/// Maximum number of unreported blocks of one communicator.
const MAX_UNREPORTED: usize = 64;

impl Recorder {
    /// Adds operations of one launch, which share its time.
    pub(crate) fn add(&mut self, together: &[(&Operation, &Communicator)], world_size: u32, now_ns: u64) {
        for (index, (operation, communicator)) in together.iter().enumerate() {
            let point_to_point = matches!(operation.op(), Op::Send | Op::Recv);
            let counts = operation.kind() == OpKind::Collective
                && operation.status() == OpStatus::Completed
                && communicator.size > 1
                && operation.completed_ns > 0;
            if !counts {
                continue;
            }
            let key = (communicator.id, point_to_point);
            let inside_ns = if index == 0 { time_inside(operation) } else { 0 };
            let target_ns = (u64::from(world_size) * SECOND / RANKS_PER_SECOND).clamp(SECOND, LONGEST_BLOCK_NS);
            let open = self.open.entry(key).or_default();
            let Some(block) = open.add(operation.seq, inside_ns, operation.completed_ns, target_ns) else { continue };
            let series = self.pace.series(key.0, key.1);
            series.size = communicator.size;
            series.push(block, now_ns);
            let (id, size) = (communicator.id, communicator.size);
            let news =
                self.unreported.entry(key).or_insert(CommunicatorPace { id, size, point_to_point, blocks: Vec::new() });
            if news.blocks.len() < MAX_UNREPORTED {
                news.blocks.push(block);
            }
        }
    }

    /// Forgets inactive communicators.
    pub(crate) fn forget(&mut self, now_ns: u64) {
        self.pace.forget(now_ns);
        self.open.retain(|_, open| now_ns.saturating_sub(open.last_ns) < SILENCE_NS);
        // Without a cluster collector, nobody takes the news.
        self.unreported.retain(|key, _| self.open.contains_key(key));
    }

    /// Takes the blocks since the last call, for the cluster collector.
    pub(crate) fn take_unreported(&mut self) -> Vec<CommunicatorPace> {
        std::mem::take(&mut self.unreported).into_values().collect()
    }
}

/// Time on the device between its two events. A host call has no events; its time is from begin to
/// end.
fn time_inside(operation: &Operation) -> u64 {
    match operation.device_ns {
        0 => operation.completed_ns.saturating_sub(operation.started_ns.max(operation.entered_ns)),
        device_ns => device_ns,
    }
}

impl Open {
    /// Adds an operation. Returns the previous block if this operation begins another one.
    fn add(&mut self, seq: u64, inside_ns: u64, completed_ns: u64, target_ns: u64) -> Option<PaceBlock> {
        let index = seq >> self.level;
        if self.count > 0 && index < self.index {
            // It completed long after its neighbors; their block is closed.
            return None;
        }
        let finished = if self.count > 0 && index > self.index { self.close(seq, target_ns) } else { None };
        if self.count == 0 {
            self.index = seq >> self.level;
        }
        self.count += 1;
        self.inside_ns += inside_ns;
        self.last_ns = self.last_ns.max(completed_ns);
        finished
    }

    /// Ends the block because sequence number `next` is beyond it, and chooses the size of the next
    /// block.
    fn close(&mut self, next: u64, target_ns: u64) -> Option<PaceBlock> {
        let is_complete = self.count == 1 << self.level;
        let span_ns = self.last_ns.saturating_sub(self.begun_ns);
        // Without the end of the previous block, the duration is unknown. An incomplete block is
        // not comparable, and a short one is not worth its memory.
        let is_comparable = is_complete && self.begun_ns > 0 && span_ns >= target_ns / 4;
        let block = is_comparable.then(|| PaceBlock {
            level: self.level,
            index: u32::try_from(self.index).unwrap_or(u32::MAX),
            inside_us: microseconds(self.inside_ns),
            span_us: microseconds(span_ns),
        });
        if self.begun_ns > 0 && is_complete {
            if span_ns < target_ns / 2 {
                self.wanted = (self.level + 1).min(HIGHEST_LEVEL);
            } else if span_ns > target_ns * 2 {
                self.wanted = self.level.saturating_sub(1);
            }
        }
        // This block ends where the next one begins only if nothing is between them.
        self.begun_ns = if next >> self.level == self.index + 1 { self.last_ns } else { 0 };
        // Blocks begin at multiples of their size.
        if next.trailing_zeros() >= self.wanted {
            self.level = self.wanted;
        }
        (self.count, self.inside_ns) = (0, 0);
        block
    }
}

fn microseconds(ns: u64) -> u32 {
    u32::try_from(ns / 1000).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn all_reduce(seq: u64, completed_ms: u64, device_ms: u64) -> Operation {
        Operation {
            kind: OpKind::Collective.into(),
            op: Op::AllReduce.into(),
            communicator: 7,
            seq,
            status: OpStatus::Completed.into(),
            completed_ns: completed_ms * MS,
            device_ns: device_ms * MS,
            ..Default::default()
        }
    }

    fn record(recorder: &mut Recorder, operations: impl IntoIterator<Item = Operation>) {
        let communicator = Communicator { id: 7, size: 8, ..Default::default() };
        for operation in operations {
            recorder.add(&[(&operation, &communicator)], 8, 0);
        }
    }

    fn blocks(recorder: &Recorder) -> Vec<(u32, u32, u32, u32)> {
        let all = recorder.pace.iter().flat_map(|(_, _, series)| series.blocks.iter());
        all.map(|block| (block.level, block.index, block.inside_us / 1000, block.span_us / 1000)).collect()
    }

    #[test]
    fn fast_collectives_fill_blocks_of_about_a_second() {
        let mut recorder = Recorder::default();
        record(&mut recorder, (1..=64).map(|seq| all_reduce(seq, 1000 + seq * 100, 30)));
        // 100 ms each: eight of them take 800 ms.
        let all = blocks(&recorder);
        assert_eq!(all.last(), Some(&(3, 7, 240, 800)), "{all:?}");
        assert!(all.iter().all(|(level, _, inside, span)| inside * 10 == span * 3 && *level >= 2), "{all:?}");
    }

    #[test]
    fn slow_collectives_are_a_block_each() {
        let mut recorder = Recorder::default();
        record(&mut recorder, (1..=10).map(|seq| all_reduce(seq, seq * 5000, 700)));
        let all = blocks(&recorder);
        assert_eq!(all, (2..10).map(|seq| (0, seq, 700, 5000)).collect::<Vec<_>>());
    }

    #[test]
    fn incomplete_blocks_and_their_successors_are_skipped() {
        let mut recorder = Recorder::default();
        record(&mut recorder, (1..=20).filter(|seq| *seq != 9).map(|seq| all_reduce(seq, seq * 1000, 100)));
        let indices: Vec<u32> = blocks(&recorder).iter().map(|block| block.1).collect();
        assert!(!indices.contains(&9) && !indices.contains(&10), "{indices:?}");
        assert!(indices.contains(&8) && indices.contains(&11), "{indices:?}");
        let late = all_reduce(3, 30_000, 100);
        record(&mut recorder, [late]);
        assert_eq!(blocks(&recorder).len(), indices.len(), "one that comes long after its block");
    }

    #[test]
    fn members_of_a_group_share_their_time_and_failures_do_not_count() {
        let mut recorder = Recorder::default();
        let communicator = Communicator { id: 7, size: 8, ..Default::default() };
        for step in 0..10u64 {
            let pair = [all_reduce(2 * step, step * 1000, 300), all_reduce(2 * step + 1, step * 1000, 300)];
            recorder.add(&[(&pair[0], &communicator), (&pair[1], &communicator)], 8, 0);
        }
        let all = blocks(&recorder);
        assert!(all.iter().all(|(level, _, inside, span)| (*level, *inside, *span) == (1, 300, 1000)), "{all:?}");
        assert!(!all.is_empty());

        let mut recorder = Recorder::default();
        let alone = Communicator { id: 7, size: 1, ..Default::default() };
        let failed = Operation { status: OpStatus::Failed.into(), ..all_reduce(1, 1000, 1) };
        recorder.add(&[(&failed, &communicator)], 8, 0);
        recorder.add(&[(&all_reduce(1, 1000, 1), &alone)], 8, 0);
        assert!(recorder.open.is_empty());
    }

    #[test]
    fn a_host_call_lasts_from_its_begin_to_its_end() {
        let call = Operation { entered_ns: 400 * MS, ..all_reduce(1, 1000, 0) };
        assert_eq!(time_inside(&call), 600 * MS);
        assert_eq!(time_inside(&Operation { started_ns: 900 * MS, ..call }), 100 * MS);
    }

    #[test]
    fn new_blocks_are_reported_once() {
        let mut recorder = Recorder::default();
        record(&mut recorder, (1..=10).map(|seq| all_reduce(seq, seq * 5000, 700)));
        let news = recorder.take_unreported();
        assert_eq!((news.len(), news[0].id, news[0].size, news[0].blocks.len()), (1, 7, 8, 8));
        assert!(recorder.take_unreported().is_empty());
        record(&mut recorder, [all_reduce(11, 55_000, 700)]);
        assert_eq!(recorder.take_unreported()[0].blocks.len(), 1);
        recorder.forget(u64::MAX);
        assert!(recorder.pace == Pace::default() && recorder.open.is_empty());
    }
}
