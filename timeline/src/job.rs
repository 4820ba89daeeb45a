//! A job as its files show it: ranks, nodes and their aligned clocks, communicators and their
//! groups, and what only all ranks together show. Reads each file once, after its head; memory does
//! not depend on their length. The caller reads the operations themselves in a second pass.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use hashbrown::{HashMap, HashSet};
use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::{
    timeline::{self, Times},
    v1::{Communicator, Operation, TimelineBlock, TimelineHead},
};

use crate::{
    clocks::{self, ClockMap, NodeClock},
    collectives::{
        Ends, MessageEnds, NodeStarts, Route, Starts, Ticks, is_completed, is_message, note_message, pair_messages,
        synchronizes,
    },
    input::{Format, RankFile},
};

/// One rank.
#[derive(Debug)]
pub struct Rank {
    /// Its file.
    pub file: RankFile,
    /// Its number.
    pub rank: u32,
    /// Index of its node.
    pub node: usize,
    /// The head of its file.
    pub head: TimelineHead,
    /// Number of operations that can be read.
    pub operations: u64,
    /// When the first of them was called, on the clock of its node. `None` if there is none.
    pub first_ns: Option<u64>,
    /// Its communicators by identity: index, and its rank there, -1 if unknown.
    communicators: HashMap<u64, (usize, i32)>,
}

impl Rank {
    /// That operations are missing, for people. `None` if none are.
    #[must_use]
    pub fn lost(&self) -> Option<String> {
        match self.head.lost {
            0 => None,
            1 => Some("1 operation of the window is missing".into()),
            lost => Some(format!("{lost} operations of the window are missing")),
        }
    }
}

/// A communicator.
#[derive(Debug)]
pub struct Group {
    /// Its identity.
    pub id: u64,
    /// Number of its ranks.
    pub size: u32,
    /// The ranks that have a file, in the job.
    pub members: RankSet,
    /// The group of the job that it is, such as `tp 0-3`, else its ranks.
    pub name: String,
    /// The nodes of these ranks, by their index.
    nodes: HashSet<usize>,
    /// Number of its nodes according to the files. `None` if the nodes of the ranks are counted.
    reported_nodes: Option<u32>,
    starts: Starts,
}

impl Group {
    /// Whether all its ranks have a file.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.members.len() == u64::from(self.size)
    }

    /// Number of its nodes. `None` if it is unknown.
    #[must_use]
    pub fn nodes(&self) -> Option<u32> {
        match self.reported_nodes {
            Some(nodes) => Some(nodes).filter(|nodes| *nodes > 0),
            None => self.is_complete().then_some(self.nodes.len() as u32),
        }
    }

    /// Whether its ranks are on several nodes.
    #[must_use]
    pub fn spans_nodes(&self) -> bool {
        self.nodes.len() > 1
    }
}

/// The ends and starts that all ranks note for the collectives of a communicator.
#[derive(Debug, Default)]
struct Together {
    ends: Mutex<Ends>,
    starts: Mutex<NodeStarts>,
}

impl Together {
    fn into_inner(self) -> (Ends, NodeStarts) {
        let ends = self.ends.into_inner().unwrap_or_else(PoisonError::into_inner);
        (ends, self.starts.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The result of the first pass over a rank.
#[derive(Debug, Default)]
struct Surveyed {
    operations: u64,
    first_ns: Option<u64>,
    messages: MessageEnds,
    /// Starts for which there was no memory.
    left_out: u64,
    error: Option<std::io::Error>,
}

/// Sequence numbers and times, by the shape of their operations.
type ByShape = Vec<Vec<(u64, u64)>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a job is read.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Number of threads.
    pub threads: usize,
    /// The dimensions of the groups and their sizes, that which varies fastest first.
    pub dimensions: Vec<(String, u32)>,
}

/// A job.
#[derive(Debug)]
pub struct Job {
    /// Its ranks, those of one node together.
    pub ranks: Vec<Rank>,
    /// The nodes, in the order of their lowest ranks, with their clocks.
    pub clocks: Vec<NodeClock>,
    /// All communicators.
    pub groups: Vec<Group>,
    /// The dimensions of the groups.
    pub dimensions: Vec<(String, u32)>,
    /// The missing and broken parts, for people.
    pub notes: Vec<String>,
    /// The verdict on the job, if it hung.
    pub verdict: Option<Verdict>,
    ticks: Ticks,
    messages: HashMap<Route, i64>,
}

/// Runs a function for each index on some threads, and returns the results in order of the index.
pub fn parallel<T: Send>(threads: usize, count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(count)));
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        break;
                    }
                    let result = run(index);
                    lock(&results).push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// A part of a text that is not the name and the size of a group.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a group: write for example tp4-dp2")]
pub struct NotAGroup(String);

/// Parses groups such as `tp4-cp2-dp4-pp2`.
///
/// # Errors
/// A dimension has no name or no size.
pub fn dimensions(text: &str) -> Result<Vec<(String, u32)>, NotAGroup> {
    let dimension = |part: &str| {
        let digits = part.find(|letter: char| letter.is_ascii_digit()).filter(|at| *at > 0);
        let parsed = digits.and_then(|at| Some((part[..at].to_string(), part[at..].parse().ok().filter(|n| *n > 0)?)));
        parsed.ok_or_else(|| NotAGroup(part.into()))
    };
    text.split('-').map(dimension).collect()
}

impl Job {
    /// Reads a job from its files.
    #[must_use]
    pub fn read(files: Vec<RankFile>, verdict: Option<Verdict>, settings: Settings) -> Job {
        let mut notes = Vec::new();
        let heads = parallel(settings.threads, files.len(), |index| files[index].head());
        let mut ranks: Vec<Rank> = Vec::new();
        let mut realtime: Vec<(String, ClockMap)> = Vec::new();
        let mut groups = Groups::default();
        for (file, head) in files.into_iter().zip(heads) {
            match head {
                Ok(head) => {
                    let node = node_of(&mut realtime, &head, file.rank);
                    let communicators = groups.add(&head.communicators, &file, node);
                    let (operations, first_ns) = (0, None);
                    ranks.push(Rank { rank: file.rank, file, node, head, operations, first_ns, communicators });
                }
                Err(error) => notes.push(format!("{} is left out: {error}", file.name)),
            }
        }
        let mut groups = groups.groups;
        for group in &mut groups {
            group.name = group_name(&group.members, &settings.dimensions);
        }
        ranks.sort_by_key(|rank| (rank.node, rank.rank));
        let mut job = Job {
            ranks,
            clocks: Vec::new(),
            groups,
            dimensions: settings.dimensions,
            notes,
            verdict,
            ticks: Ticks::new(0, 0),
            messages: HashMap::new(),
        };
        job.survey(settings.threads, &realtime);
        job
    }

    /// Passes all readable operations of a rank to a function, block by block. Returns an error of
    /// the file, if any.
    pub fn each_block(
        rank: &Rank,
        mut visit: impl FnMut(&TimelineBlock, &mut dyn Iterator<Item = Times>),
    ) -> Option<std::io::Error> {
        let mut read = || {
            let mut blocks = rank.file.blocks()?;
            while let Some(block) = blocks.next_block()? {
                visit(&block, &mut timeline::times(&block)?);
            }
            Ok(())
        };
        read().err()
    }

    /// Aligns the clocks of the nodes, pairs the messages, and finds when the last rank started
    /// each collective.
    fn survey(&mut self, threads: usize, realtime: &[(String, ClockMap)]) {
        let of_node: Vec<Ticks> = (0..realtime.len()).map(|node| self.axis(Some(node), |_, ns| ns)).collect();
        let together: Vec<Together> = self.groups.iter().map(|_| Together::default()).collect();
        let pages = Mutex::new(0);
        let surveyed = parallel(threads, self.ranks.len(), |index| {
            let rank = &self.ranks[index];
            self.survey_rank(rank, of_node[rank.node], &together, &pages)
        });
        let (ends, starts): (Vec<Ends>, Vec<NodeStarts>) = together.into_iter().map(Together::into_inner).unzip();
        self.clocks = clocks::align(realtime, |here, there| {
            let mut common = Vec::new();
            ends.iter().for_each(|ends| ends.common(here, there, &mut common));
            common
        });
        drop(ends);
        let clocks = &self.clocks;
        let on_trace = |node: usize, ns| clocks[node].map.apply(ns);
        self.ticks = self.axis(None, on_trace);
        for (group, starts) in self.groups.iter_mut().zip(starts) {
            group.starts = starts.align(self.ticks, &of_node, on_trace);
        }
        let (mut messages, mut left_out) = (MessageEnds::new(), 0);
        for (rank, of_rank) in self.ranks.iter_mut().zip(surveyed) {
            (rank.operations, rank.first_ns) = (of_rank.operations, of_rank.first_ns);
            left_out += of_rank.left_out;
            if let Some(error) = of_rank.error {
                let (name, read) = (&rank.file.name, rank.operations);
                self.notes.push(format!("{name}: only its first {read} operations can be read: {error}"));
            }
            for (key, ends) in of_rank.messages {
                messages.entry(key).or_default().extend(ends.into_iter().map(|ns| on_trace(rank.node, ns)));
            }
        }
        self.messages = pair_messages(&messages);
        if left_out > 0 {
            self.notes.push(format!("memory is bounded: {left_out} collectives do not show how long they waited"));
        }
    }

    /// The axis of the window of all ranks, or of those of a node, on the clock of `map`.
    fn axis(&self, node: Option<usize>, map: impl Fn(usize, u64) -> u64) -> Ticks {
        let ranks = || self.ranks.iter().filter(|rank| node.is_none_or(|node| rank.node == node));
        let from = ranks().map(|rank| map(rank.node, rank.head.from_ns)).min().unwrap_or(0);
        let until = ranks().map(|rank| map(rank.node, rank.head.until_ns)).max().unwrap_or(0);
        Ticks::new(from, until)
    }

    fn survey_rank(&self, rank: &Rank, ticks: Ticks, together: &[Together], pages: &Mutex<usize>) -> Surveyed {
        let mut surveyed = Surveyed::default();
        // Sequence numbers, ends and starts by shape.
        let (mut ends, mut starts) = (ByShape::new(), ByShape::new());
        let error = Job::each_block(rank, |block, times| {
            let of_shape = |shape: &Operation| {
                let (index, own) = self.group_of(rank, shape)?;
                let is_common = synchronizes(shape) && self.groups[index].spans_nodes();
                let is_compared = self.compared_group(rank, shape).is_some();
                let route = Route::of(shape, index, own).filter(|_| is_message(shape));
                Some((index, is_common, is_compared, route))
            };
            let shapes: Vec<_> = block.shapes.iter().map(of_shape).collect();
            for collected in [&mut ends, &mut starts] {
                collected.resize(collected.len().max(shapes.len()), Vec::new());
            }
            for time in times {
                surveyed.operations += 1;
                surveyed.first_ns = Some(surveyed.first_ns.map_or(time.entered_ns, |first| first.min(time.entered_ns)));
                let Some((_, is_common, is_compared, route)) = shapes[time.shape as usize] else { continue };
                if is_compared && time.started_ns != 0 {
                    starts[time.shape as usize].push((time.seq, time.started_ns));
                }
                if !is_completed(time.status, time.completed_ns) {
                    continue;
                }
                if is_common {
                    ends[time.shape as usize].push((time.seq, time.completed_ns));
                }
                if let Some(key) = route {
                    note_message(&mut surveyed.messages, key, time.completed_ns);
                }
            }
            for ((shape, ends), starts) in shapes.iter().zip(&mut ends).zip(&mut starts) {
                if let (Some((index, ..)), false) = (shape, ends.is_empty()) {
                    lock(&together[*index].ends).note(rank.node, rank.rank, ends);
                }
                if let (Some((index, ..)), false) = (shape, starts.is_empty()) {
                    surveyed.left_out += lock(&together[*index].starts).note(rank.node, ticks, starts, pages);
                }
                ends.clear();
                starts.clear();
            }
        });
        Surveyed { error, ..surveyed }
    }

    /// Index of the communicator of a synchronizing collective that several ranks have a file of.
    #[must_use]
    pub fn compared_group(&self, rank: &Rank, shape: &Operation) -> Option<usize> {
        let (index, _) = self.group_of(rank, shape).filter(|_| synchronizes(shape))?;
        (self.groups[index].members.len() > 1).then_some(index)
    }

    /// Index of the communicator of a synchronizing collective whose ranks all have a file.
    pub(crate) fn complete_group(&self, rank: &Rank, shape: &Operation) -> Option<usize> {
        self.compared_group(rank, shape).filter(|index| self.groups[*index].is_complete())
    }

    /// Index of the communicator of an operation, and the rank there, -1 if unknown.
    pub(crate) fn group_of(&self, rank: &Rank, shape: &Operation) -> Option<(usize, i32)> {
        rank.communicators.get(&shape.communicator).copied()
    }

    /// When the last rank that has a file started a collective, on the time of the trace.
    #[must_use]
    pub fn last_start(&self, group: usize, seq: u64) -> Option<u64> {
        self.groups[group].starts.last(self.ticks, seq)
    }

    /// The number of the send that the first receive of a route belongs to.
    pub(crate) fn first_send(&self, route: &Route) -> Option<i64> {
        self.messages.get(route).copied()
    }

    /// The world size: that of the files.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.ranks.iter().map(|rank| rank.file.world_size.max(rank.rank.saturating_add(1))).max().unwrap_or(0)
    }

    /// The coordinates of a rank in the dimensions, such as `tp1 dp0`; empty without dimensions.
    #[must_use]
    pub fn coordinates(&self, rank: u32) -> String {
        let mut stride = 1;
        let coordinate = |(name, size): &(String, u32)| {
            let text = format!("{name}{}", rank / stride % size);
            stride = stride.saturating_mul(*size);
            text
        };
        self.dimensions.iter().map(coordinate).collect::<Vec<_>>().join(" ")
    }
}

/// The index of the node of a rank. Files of the original tool name none, so each of their ranks
/// has a clock of its own.
fn node_of(nodes: &mut Vec<(String, ClockMap)>, head: &TimelineHead, rank: u32) -> usize {
    let info = head.rank.as_ref();
    let name = info.map(|info| info.node.clone()).filter(|node| !node.is_empty()).unwrap_or(format!("rank {rank}"));
    if let Some(index) = nodes.iter().position(|(known, _)| *known == name) {
        return index;
    }
    let reading = head.clock.last().copied().unwrap_or_default();
    let offset_ns = reading.realtime_ns.wrapping_sub(reading.monotonic_ns) as i64;
    nodes.push((name, ClockMap { offset_ns, drift: 0.0, pivot_ns: reading.monotonic_ns }));
    nodes.len() - 1
}

/// Communicators while the heads are read.
#[derive(Debug, Default)]
struct Groups {
    groups: Vec<Group>,
    by_id: HashMap<u64, usize>,
}

impl Groups {
    fn add(&mut self, communicators: &[Communicator], file: &RankFile, node: usize) -> HashMap<u64, (usize, i32)> {
        let mut own = HashMap::new();
        let is_of_original = matches!(file.format, Format::Original(_));
        for communicator in communicators.iter().filter(|communicator| communicator.id != 0) {
            let id = communicator.id;
            let index = *self.by_id.entry(id).or_insert_with(|| {
                self.groups.push(Group {
                    id,
                    size: communicator.size,
                    members: RankSet::new(),
                    name: String::new(),
                    nodes: HashSet::new(),
                    reported_nodes: is_of_original.then_some(communicator.nodes),
                    starts: Starts::default(),
                });
                self.groups.len() - 1
            });
            let group = &mut self.groups[index];
            group.members.insert(file.rank);
            group.nodes.insert(node);
            own.insert(id, (index, communicator.rank));
        }
        own
    }
}

/// `tp 0-3` if the ranks are one group of a dimension, else the ranks.
fn group_name(members: &RankSet, dimensions: &[(String, u32)]) -> String {
    let mut stride = 1_u32;
    for (name, size) in dimensions {
        let Some(first) = members.first() else { break };
        let base = first - first / stride % size * stride;
        let group: RankSet = (0..*size).map(|index| base.saturating_add(index.saturating_mul(stride))).collect();
        if *size > 1 && group == *members {
            return format!("{name} {members}");
        }
        stride = stride.saturating_mul(*size);
    }
    format!("ranks {members}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranks: &[u32]) -> RankSet {
        ranks.iter().copied().collect()
    }

    #[test]
    fn communicators_are_named_after_the_groups_of_the_job() {
        let dimensions = dimensions("tp2-cp1-dp4").unwrap();
        assert_eq!(dimensions[2], ("dp".into(), 4));
        assert_eq!(group_name(&set(&[2, 3]), &dimensions), "tp 2-3");
        assert_eq!(group_name(&set(&[1, 3, 5, 7]), &dimensions), format!("dp {}", set(&[1, 3, 5, 7])));
        assert_eq!(group_name(&set(&[0, 3]), &dimensions), format!("ranks {}", set(&[0, 3])));
        assert!(
            super::dimensions("4tp").is_err() && super::dimensions("tp0").is_err() && super::dimensions("").is_err()
        );
    }
}
