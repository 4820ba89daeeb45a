//! Reads the timelines of a folder: the operations that each rank completed before the dump
//! (`RRRRR-WWWWW.ops`). A timeline may have millions of operations, so it is never in memory as a
//! whole.
//!
//! And the last operations of a culprit beside those of a healthy peer, as text.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use xpu_timer_analysis::{Verdict, operation_shape};
use xpu_timer_proto::printable;
use xpu_timer_proto::timeline::{self, Reader, Times};
use xpu_timer_proto::v1::{OpStatus, Operation, TimelineBlock, TimelineHead};

/// The timeline of one rank.
#[derive(Debug)]
pub struct RankTimeline {
    /// Rank, from the name of the file.
    pub rank: u32,
    /// What the file says of the rank and its clock.
    pub head: TimelineHead,
    /// When the first operation was called, CLOCK_MONOTONIC; `None` if it has none.
    pub first_ns: Option<u64>,
    path: PathBuf,
}

impl RankTimeline {
    /// The timelines of a folder, by rank. A file that cannot be read is passed to `left_out`.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn all(folder: &Path, mut left_out: impl FnMut(&Path, io::Error)) -> io::Result<Vec<RankTimeline>> {
        let mut timelines = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let Some((rank, _)) = timeline::rank_of_file(&path) else { continue };
            match begin(&path) {
                Ok((head, first_ns)) => timelines.push(RankTimeline { rank, head, first_ns, path }),
                Err(error) => left_out(&path, error),
            }
        }
        timelines.sort_by_key(|timeline| timeline.rank);
        Ok(timelines)
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Wall clock at a reading of the node's monotonic clock, both in nanoseconds. Timelines
    /// without a reading of the clocks keep the monotonic clock.
    #[must_use]
    pub fn wall_ns(&self, monotonic_ns: u64) -> u64 {
        let Some(reading) = self.head.clock.last() else { return monotonic_ns };
        reading.realtime_ns.wrapping_sub(reading.monotonic_ns).wrapping_add(monotonic_ns)
    }

    /// Passes each operation to `each`, with the block that has its shape.
    ///
    /// # Errors
    /// The file cannot be read to its end. The operations before the fault have been passed.
    pub fn for_each(&self, mut each: impl FnMut(&TimelineBlock, &Times)) -> io::Result<()> {
        let mut reader = open(&self.path)?;
        while let Some(block) = reader.next_block()? {
            timeline::times(&block)?.for_each(|times| each(&block, &times));
        }
        Ok(())
    }

    /// The operations that completed last, and those that are pending, by the time at which they
    /// were called: at most `count`.
    ///
    /// # Errors
    /// Those of [`for_each`](Self::for_each).
    pub fn last_operations(&self, count: usize) -> io::Result<Vec<Operation>> {
        let mut blocks = VecDeque::new();
        let mut reader = open(&self.path)?;
        while let Some(block) = reader.next_block()? {
            blocks.push_back(block);
            while blocks.iter().skip(1).map(|block| block.operations as usize).sum::<usize>() >= count {
                blocks.pop_front();
            }
        }
        let mut operations = self.head.pending.clone();
        for block in &blocks {
            operations.extend(timeline::operations(block)?);
        }
        operations.sort_by_key(|operation| operation.entered_ns);
        operations.drain(..operations.len().saturating_sub(count));
        Ok(operations)
    }
}

/// The head of a file, and when its first operation was called.
fn begin(path: &Path) -> io::Result<(TimelineHead, Option<u64>)> {
    let mut reader = open(path)?;
    let block = reader.next_block()?;
    let first_ns = match &block {
        Some(block) => timeline::times(block)?.next().map(|times| times.entered_ns),
        None => None,
    };
    Ok((reader.head, first_ns))
}

fn open(path: &Path) -> io::Result<Reader<BufReader<File>>> {
    // Opening a pipe blocks until it has a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Reader::new(BufReader::with_capacity(1 << 20, File::open(path)?))
}

/// Operations of each rank.
const SHOWN: usize = 10;
/// Width of the text if the terminal has none.
const WIDTH: usize = 120;
/// Columns between the two ranks.
const GAP: usize = 3;
/// In a narrower column nothing can be read, so the ranks are below each other.
const NARROWEST: usize = 46;

/// The text, with lines of at most `width` columns. `None` if the verdict names no rank, or if the
/// folder has no timeline of it.
#[must_use]
pub fn last_operations(folder: &Path, verdict: &Verdict, width: Option<usize>) -> Option<String> {
    // Files that cannot be read are reported with the swim lanes.
    let timelines = RankTimeline::all(folder, |_, _| {}).ok()?;
    let find = |rank: &u32| timelines.iter().find(|timeline| timeline.rank == *rank);
    let culprit = verdict.culprits.iter().find_map(find)?;
    let peers = verdict.communicators.iter().flat_map(|report| &report.groups).filter(|group| group.waits_in.is_some());
    let peers = peers.flat_map(|group| &group.ranks).chain(&verdict.victims);
    let peer = peers.filter(|rank| !verdict.culprits.contains(rank)).find_map(find);
    let shown: Vec<&RankTimeline> = [Some(culprit), peer].into_iter().flatten().collect();
    let end = shown.iter().map(|timeline| timeline.wall_ns(timeline.head.until_ns)).max()?;
    let width = width.unwrap_or(WIDTH).max(NARROWEST);
    let side_by_side = shown.len() == 2 && (width - GAP) / 2 >= NARROWEST;
    let column = if side_by_side { (width - GAP) / 2 } else { width };
    let columns: Vec<Vec<String>> = shown
        .iter()
        .map(|timeline| {
            let role = if timeline.rank == culprit.rank { "culprit" } else { "peer" };
            let mut lines = vec![format!("rank {} ({role})", timeline.rank)];
            match timeline.last_operations(SHOWN) {
                Ok(operations) if operations.is_empty() => lines.push("no operation".into()),
                Ok(operations) => {
                    lines.extend(operations.iter().map(|operation| line(timeline, operation, end, column)))
                }
                Err(error) => lines.push(fitted(&format!("its timeline cannot be read: {error}"), column)),
            }
            lines
        })
        .collect();
    let mut text = String::from("Last operations, by the time before the dump\n");
    if let ([left, right], true) = (&columns[..], side_by_side) {
        for at in 0..left.len().max(right.len()) {
            let part = |lines: &[String]| lines.get(at).cloned().unwrap_or_default();
            text.push_str(format!("{:column$}{:GAP$}{}", part(left), "", part(right)).trim_end());
            text.push('\n');
        }
    } else {
        columns.iter().flatten().for_each(|line| {
            text.push_str(line);
            text.push('\n');
        });
    }
    Some(text)
}

/// `-12.40 s all_reduce of 1024 x float32 (30)    2.1 ms`
fn line(timeline: &RankTimeline, operation: &Operation, end: u64, width: usize) -> String {
    let before = end.saturating_sub(timeline.wall_ns(operation.entered_ns));
    let begin = if operation.started_ns == 0 { operation.entered_ns } else { operation.started_ns };
    let took = match operation.status() {
        OpStatus::Pending => "pending".to_owned(),
        OpStatus::Completed => duration(operation.completed_ns.saturating_sub(begin)),
        OpStatus::Failed => format!("failed ({})", operation.error),
        OpStatus::Aborted => "aborted".to_owned(),
    };
    let number = if operation.seq == 0 { String::new() } else { format!(" ({})", operation.seq) };
    let head = format!("{:>10} ", format!("-{}", duration(before)));
    let tail = format!("{number} {took:>9}");
    let room = width.saturating_sub(head.chars().count() + tail.chars().count());
    let name = fitted(&operation_shape(operation), room);
    format!("{head}{name}{tail}{:pad$}", "", pad = room.saturating_sub(name.chars().count()))
}

fn duration(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{} us", ns / 1000),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

/// The text, cut to a number of columns.
fn fitted(text: &str, columns: usize) -> String {
    let text = printable::line(text);
    if text.chars().count() <= columns {
        return text.into_owned();
    }
    text.chars().take(columns.saturating_sub(1)).chain(['…']).collect()
}
