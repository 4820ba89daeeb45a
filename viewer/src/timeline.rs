//! The timelines of a folder, read once for all that shows them; and the last operations of a
//! culprit beside those of a healthy peer, as text.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::thread;

use xpu_timer_analysis::{Verdict, operation_shape};
use xpu_timer_proto::v1::{Op, OpStatus, Operation};
use xpu_timer_proto::{printable, timeline};
use xpu_timer_timeline::cli;
use xpu_timer_timeline::clocks::ClockMap;
use xpu_timer_timeline::input::{Format, RankFile};
use xpu_timer_timeline::job::{Job, Rank, Settings};

/// Threads that read timelines, at most: the ranks of the job may need the processors.
const MOST_THREADS: usize = 8;
/// Operations of each rank.
const SHOWN: usize = 10;
/// Width of the text if the terminal has none.
const WIDTH: usize = 120;
/// Columns between the two ranks.
const GAP: usize = 3;
/// In a narrower column nothing can be read, so the ranks are below each other.
const NARROWEST: usize = 46;

/// Number of threads that read timelines.
#[must_use]
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, |threads| threads.get().min(MOST_THREADS))
}

/// The timelines of the folder, with aligned clocks: of all ranks for the report, else only of the
/// culprit and the peer whose operations are printed. `None` if there are none.
#[must_use]
pub fn read(
    path: &Path,
    verdict: Option<&Verdict>,
    (for_report, for_operations): (bool, bool),
    notes: &mut Vec<String>,
) -> Option<(Job, Option<Pair>)> {
    let mut files = cli::files(path).ok()?;
    files.sort_by_key(|file| file.rank);
    let has_operations = |file: &&RankFile| !matches!(file.format, Format::Samples);
    let ranks: Vec<u32> = files.iter().filter(has_operations).map(|file| file.rank).collect();
    let pair = verdict.filter(|_| for_operations).and_then(|verdict| Pair::of(verdict, &ranks));
    if !for_report {
        files.retain(|file| pair.is_some_and(|pair| pair.has(file.rank)));
    }
    if files.is_empty() {
        return None;
    }
    let mut job = Job::read(files, None, Settings { threads: threads(), ..Settings::default() });
    notes.append(&mut job.notes);
    Some((job, pair))
}

/// A culprit that has a timeline, and a healthy peer of it, if one has a timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The culprit.
    pub culprit: u32,
    /// A rank that waits for it, if there is one, else any other.
    pub peer: Option<u32>,
}

impl Pair {
    /// Chooses among the ranks that have a timeline, ascending. The folder of a large job has the
    /// files of its culprits and of one rank of each group. `None` if no culprit has one.
    #[must_use]
    pub fn of(verdict: &Verdict, ranks: &[u32]) -> Option<Pair> {
        let is_here = |rank: &u32| ranks.binary_search(rank).is_ok();
        let culprit = verdict.culprits.iter().copied().find(is_here)?;
        let groups = verdict.communicators.iter().flat_map(|report| &report.groups);
        let waiting = groups.filter(|group| group.waits_in.is_some()).flat_map(|group| &group.ranks);
        let mut peers = waiting.chain(&verdict.victims).chain(ranks).copied();
        let peer = peers.find(|rank| !verdict.culprits.contains(rank) && is_here(rank));
        Some(Pair { culprit, peer })
    }

    /// Whether a rank is one of them.
    #[must_use]
    pub fn has(&self, rank: u32) -> bool {
        rank == self.culprit || Some(rank) == self.peer
    }
}

/// The last operations of the two as text, with lines of at most `width` columns. `None` if the job
/// has no timeline of the culprit.
#[must_use]
pub fn last_operations(job: &Job, pair: Pair, width: Option<usize>) -> Option<String> {
    let find = |number: u32| job.ranks.iter().find(|rank| rank.rank == number);
    let culprit = find(pair.culprit)?;
    let shown: Vec<&Rank> = [Some(culprit), pair.peer.and_then(find)].into_iter().flatten().collect();
    let map = |rank: &Rank| job.clocks[rank.node].map;
    let end = shown.iter().map(|rank| map(rank).apply(rank.head.until_ns)).max()?;
    let width = width.unwrap_or(WIDTH).max(NARROWEST);
    let side_by_side = shown.len() == 2 && (width - GAP) / 2 >= NARROWEST;
    let column = if side_by_side { (width - GAP) / 2 } else { width };
    let columns: Vec<Vec<String>> = shown
        .iter()
        .map(|rank| {
            let role = if rank.rank == culprit.rank { "culprit" } else { "peer" };
            let mut lines = vec![format!("rank {} ({role})", rank.rank)];
            match last_of(rank, SHOWN) {
                Ok(operations) if operations.is_empty() => lines.push("no operation".into()),
                Ok(operations) => {
                    lines.extend(operations.iter().map(|operation| line(map(rank), operation, end, column)))
                }
                Err(error) => lines.push(fitted(&format!("its timeline cannot be read: {error}"), column)),
            }
            lines
        })
        .collect();
    let mut text = String::from("Last operations, by the time before the dump\n");
    let is_one_node = shown.iter().all(|rank| rank.node == culprit.node);
    if !is_one_node && shown.iter().any(|rank| !job.clocks[rank.node].refused.is_empty()) {
        text.push_str("(The clocks of the two nodes are not aligned: no collective is common to them.)\n");
    }
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

/// The operations that completed last, and those that are pending, by the time at which they were
/// called: at most `count`. Calls of traced Python functions are left out: there may be very many.
fn last_of(rank: &Rank, count: usize) -> io::Result<Vec<Operation>> {
    let (mut last, mut blocks) = (VecDeque::new(), rank.file.blocks()?);
    while let Some(block) = blocks.next_block()? {
        let of_job = timeline::operations(&block)?.filter(|operation| operation.op() != Op::PythonCall);
        last.extend(of_job);
        last.drain(..last.len().saturating_sub(timeline::BLOCK_OPERATIONS.max(count)));
    }
    let mut operations = rank.head.pending.clone();
    operations.extend(last);
    operations.sort_by_key(|operation| operation.entered_ns);
    operations.drain(..operations.len().saturating_sub(count));
    Ok(operations)
}

/// `-12.40 s all_reduce of 1024 x float32 (30)    2.1 ms`
fn line(clock: ClockMap, operation: &Operation, end: u64, width: usize) -> String {
    let before = end.saturating_sub(clock.apply(operation.entered_ns));
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
