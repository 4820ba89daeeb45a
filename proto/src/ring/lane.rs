//! Lanes: what a launching thread counts for itself, so that launches of several threads do not fight for a cache line.
//!
//! A lane has one writer, the thread that owns it, which needs no atomic read-modify-write; the lane of a thread that ended
//! goes to another thread and counts on. A reader adds the lanes up. A thread that finds none free uses the words of
//! [`super::header`] and the table of [`super::stream`] instead, which all threads share.

use std::{collections::HashMap, io};

use super::{coverage, offset, read_words, stream};

/// Kernel id of the thread that owns the lane; 0 is a free one.
pub const OWNER: usize = 0;
/// Its last launch, copy, memset or return from a synchronization.
pub const LAST_LAUNCH_NS: usize = 1;
/// Kernels launched.
pub const KERNELS: usize = 2;
/// Graphs launched.
pub const GRAPHS: usize = 3;
/// First of [`COPY_KINDS`] words: memory copies by direction.
pub const COPIES: usize = 4;
/// First of [`COPY_KINDS`] words: their bytes.
pub const COPY_BYTES: usize = 9;
/// Bytes asked for of functions that allocate device memory or pinned host memory.
pub const ALLOCATED_BYTES: usize = 14;
/// Launches whose own cost was measured, and what they cost in nanoseconds.
pub const LAUNCH_SAMPLES: usize = 15;
/// As above.
pub const LAUNCH_COST_NS: usize = 16;
/// The same for calls of the collective library, their two event records included.
pub const COLLECTIVE_SAMPLES: usize = 17;
/// As above.
pub const COLLECTIVE_COST_NS: usize = 18;
/// Samples of both kinds that took more than [`LONG_NS`] and are not in the ones above: the thread was interrupted in them, or
/// the hook did something for the first time. Their number and nanoseconds.
pub const LONG_SAMPLES: usize = 19;
/// As above.
pub const LONG_COST_NS: usize = 20;
/// Collectives launched.
pub const COLLECTIVES: usize = 21;
/// Words of a lane; whole cache lines.
pub const WORDS: usize = 24;
/// Number of lanes.
pub const SLOTS: usize = 64;

/// Stream entries of a lane, laid out as [`super::stream`]; a thread that launches on more uses the shared table.
pub const STREAMS: usize = 14;
/// Words of a lane's stream entries; whole cache lines.
pub const STREAM_WORDS: usize = 64;
/// Words of a lane's calls of each hooked function, by the index of its coverage entry.
pub const CALL_WORDS: usize = coverage::SLOTS;

/// A sample of the hook's own cost that is longer tells of something else than the hook.
pub const LONG_NS: u64 = 20_000;

/// Names of the directions of a copy: cudaMemcpyKind 0 to 3, and all others.
pub const COPY_KINDS: [&str; 5] = ["H2H", "H2D", "D2H", "D2D", "Unknown"];

/// All lanes of a process, added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Last launch of anything.
    pub last_launch_ns: u64,
    /// Kernels launched.
    pub kernels: u64,
    /// Graphs launched.
    pub graphs: u64,
    /// Collectives launched.
    pub collectives: u64,
    /// Copies by [`COPY_KINDS`].
    pub copies: [u64; COPY_KINDS.len()],
    /// Their bytes.
    pub copy_bytes: [u64; COPY_KINDS.len()],
    /// Bytes asked for.
    pub allocated_bytes: u64,
    /// Number and nanoseconds of the launches whose own cost was measured.
    pub launch_cost: (u64, u64),
    /// The same of the collectives.
    pub collective_cost: (u64, u64),
    /// The same of the long samples of both.
    pub long_cost: (u64, u64),
}

/// Adds up what the lanes say. Any process may have written them, so the sums saturate.
///
/// # Errors
/// What `read_at` returned.
pub fn totals(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Totals> {
    let words = read_words(read_at, offset::LANES, SLOTS * WORDS)?;
    let mut totals = Totals::default();
    for lane in words.chunks_exact(WORDS).filter(|lane| lane[OWNER] != 0) {
        totals.last_launch_ns = totals.last_launch_ns.max(lane[LAST_LAUNCH_NS]);
        let add = |sum: &mut u64, word: usize| *sum = sum.saturating_add(lane[word]);
        add(&mut totals.kernels, KERNELS);
        add(&mut totals.graphs, GRAPHS);
        add(&mut totals.collectives, COLLECTIVES);
        for kind in 0..COPY_KINDS.len() {
            add(&mut totals.copies[kind], COPIES + kind);
            add(&mut totals.copy_bytes[kind], COPY_BYTES + kind);
        }
        add(&mut totals.allocated_bytes, ALLOCATED_BYTES);
        for (sum, samples) in [
            (&mut totals.launch_cost, LAUNCH_SAMPLES),
            (&mut totals.collective_cost, COLLECTIVE_SAMPLES),
            (&mut totals.long_cost, LONG_SAMPLES),
        ] {
            add(&mut sum.0, samples);
            // The nanoseconds are the word behind the number.
            add(&mut sum.1, samples + 1);
        }
    }
    Ok(totals)
}

/// Kernel ids of the threads that own a lane, or did when they ended.
///
/// # Errors
/// What `read_at` returned.
pub fn owners(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<u64>> {
    let words = read_words(read_at, offset::LANES, SLOTS * WORDS)?;
    Ok(words.chunks_exact(WORDS).map(|lane| lane[OWNER]).filter(|owner| *owner != 0).collect())
}

/// Calls of each hooked function, by the index of its coverage entry, over all lanes.
///
/// # Errors
/// What `read_at` returned.
pub fn calls(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<u64>> {
    let words = read_words(read_at, offset::LANE_CALLS, SLOTS * CALL_WORDS)?;
    let mut calls = vec![0_u64; CALL_WORDS];
    for lane in words.chunks_exact(CALL_WORDS) {
        calls.iter_mut().zip(lane).for_each(|(sum, lane)| *sum = sum.saturating_add(*lane));
    }
    Ok(calls)
}

/// Stream entries of the lanes and of the shared table, one a stream: the launches of all, the last kernel of the latest.
///
/// # Errors
/// What `read_at` returned.
pub fn streams(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<[u64; stream::WORDS]>> {
    let mut words = read_words(read_at, offset::STREAMS, stream::SLOTS * stream::WORDS)?;
    for lane in read_words(read_at, offset::LANE_STREAMS, SLOTS * STREAM_WORDS)?.chunks_exact(STREAM_WORDS) {
        words.extend(&lane[..STREAMS * stream::WORDS]);
    }
    let mut order = Vec::new();
    let mut merged: HashMap<u64, [u64; stream::WORDS]> = HashMap::new();
    for entry in words.chunks_exact(stream::WORDS).filter(|entry| entry[stream::HANDLE] != 0) {
        let entry: [u64; stream::WORDS] = entry.try_into().expect("chunks have WORDS words");
        let sum = merged.entry(entry[stream::HANDLE]).or_insert_with(|| {
            order.push(entry[stream::HANDLE]);
            [entry[stream::HANDLE], 0, 0, 0]
        });
        sum[stream::LAUNCHES] = sum[stream::LAUNCHES].saturating_add(entry[stream::LAUNCHES]);
        if entry[stream::LAST_NS] >= sum[stream::LAST_NS] {
            sum[stream::LAST_NS] = entry[stream::LAST_NS];
            sum[stream::LAST_FUNCTION] = entry[stream::LAST_FUNCTION];
        }
    }
    Ok(order.into_iter().filter_map(|handle| merged.remove(&handle)).collect())
}
