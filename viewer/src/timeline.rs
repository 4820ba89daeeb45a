//! Reads the timelines of a folder: the operations that each rank completed before the dump
//! (`RRRRR-WWWWW.ops`). A timeline may have millions of operations, so it is never in memory as a
//! whole.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use xpu_timer_proto::timeline::{self, Reader, Times};
use xpu_timer_proto::v1::{Operation, TimelineBlock, TimelineHead};

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
