//! Lanes: counters of a launching thread, separate for each thread so that threads do not contend
//! for a cache line.
//!
//! A lane has one writer, the thread that owns it, so it needs no atomic read-modify-write. When
//! the thread ends, another thread takes over the lane and continues to count. A reader adds up all
//! lanes. A thread without a free lane uses the words of [`super::header`] and the table of
//! [`super::stream`], which all threads share.

use std::{
    collections::{BTreeMap, HashMap},
    io,
};

use super::layout::{entries, kernel, offset, read_words, stream};

pub use super::layout::lane::*;

/// The sums over all lanes of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Last launch of any kind.
    pub last_launch_ns: u64,
    /// Kernels launched.
    pub kernels: u64,
    /// Graphs launched.
    pub graphs: u64,
    /// Collectives launched.
    pub collectives: u64,
    /// Copies by [`COPY_KINDS`].
    pub copies: [u64; COPY_KINDS.len()],
    /// Copied bytes by [`COPY_KINDS`].
    pub copy_bytes: [u64; COPY_KINDS.len()],
    /// Bytes requested.
    pub allocated_bytes: u64,
    /// Bytes of device memory that are allocated.
    pub device_bytes: u64,
    /// Number and nanoseconds of the launches whose hook cost was measured.
    pub launch_cost: (u64, u64),
    /// Number and nanoseconds of the collective calls whose hook cost was measured.
    pub collective_cost: (u64, u64),
    /// Number and nanoseconds of the long samples of both kinds.
    pub long_cost: (u64, u64),
    /// Launches that are in no kernel entry.
    pub uncounted: u64,
    /// Number of lanes from the first to the last one in use.
    pub lanes: usize,
}

/// Number of lanes that are read first. Most processes launch from fewer threads.
const FIRST_LANES: usize = 8;

/// The words of the lanes up to the last one in use. Threads take free lanes in ascending order,
/// and a lane that was in use is never free again.
fn used(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<u64>> {
    let mut words = read_words(read_at, offset::LANES, FIRST_LANES * WORDS)?;
    if words[(FIRST_LANES - 1) * WORDS + OWNER] != 0 {
        words = read_words(read_at, offset::LANES, SLOTS * WORDS)?;
    }
    let used = words.chunks_exact(WORDS).rposition(|lane| lane[OWNER] != 0).map_or(0, |last| last + 1);
    words.truncate(used * WORDS);
    Ok(words)
}

/// Adds up the lanes. Most sums saturate, because any process may have written the lanes.
///
/// # Errors
/// The error of `read_at`.
pub fn totals(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Totals> {
    let words = used(read_at)?;
    let mut totals = Totals { lanes: words.len() / WORDS, ..Totals::default() };
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
        totals.device_bytes = totals.device_bytes.wrapping_add(lane[DEVICE_BYTES]);
        add(&mut totals.uncounted, UNCOUNTED);
        for (sum, samples) in [
            (&mut totals.launch_cost, LAUNCH_SAMPLES),
            (&mut totals.collective_cost, COLLECTIVE_SAMPLES),
            (&mut totals.long_cost, LONG_SAMPLES),
        ] {
            add(&mut sum.0, samples);
            // The nanoseconds are in the next word.
            add(&mut sum.1, samples + 1);
        }
    }
    Ok(totals)
}

/// Thread ids of the lanes' owners, including those that ended.
///
/// # Errors
/// The error of `read_at`.
pub fn owners(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<u64>> {
    Ok(used(read_at)?.chunks_exact(WORDS).map(|lane| lane[OWNER]).filter(|owner| *owner != 0).collect())
}

/// Calls of each hooked function over all lanes, by the index of its coverage entry.
///
/// # Errors
/// The error of `read_at`.
pub fn calls(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<u64>> {
    // A process uses few lanes, and the counters of all have half a megabyte.
    let lanes = used(read_at)?.len() / WORDS;
    let words = read_words(read_at, offset::LANE_CALLS, lanes * CALL_WORDS)?;
    let mut calls = vec![0_u64; CALL_WORDS];
    for lane in words.chunks_exact(CALL_WORDS) {
        calls.iter_mut().zip(lane).for_each(|(sum, lane)| *sum = sum.saturating_add(*lane));
    }
    Ok(calls)
}

/// Stream entries of the lanes and the shared table, merged by stream: the sum of launches, and the
/// last kernel of the latest entry.
///
/// # Errors
/// The error of `read_at`.
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

/// Launches of one kernel on one stream, by all threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelCount {
    /// Function handle.
    pub function: u64,
    /// Stream handle.
    pub stream: u64,
    /// Number of launches.
    pub launches: u64,
    /// It communicates with other ranks by itself.
    pub communicates: bool,
}

/// Kernel entries of the first `lanes` lanes, merged by kernel and stream.
///
/// # Errors
/// The error of `read_at`.
pub fn kernels(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>, lanes: usize) -> io::Result<Vec<KernelCount>> {
    let slots = lanes.min(SLOTS) * KERNEL_SETS * KERNEL_WAYS;
    let mut merged: BTreeMap<(u64, u64), KernelCount> = BTreeMap::new();
    for words in entries::<{ kernel::WORDS }>(read_at, offset::LANE_KERNELS, slots)? {
        let (function, stream) = (words[kernel::FUNCTION], words[kernel::STREAM].wrapping_sub(1));
        let none = KernelCount { function, stream, launches: 0, communicates: false };
        let sum = merged.entry((function, stream)).or_insert(none);
        sum.launches = sum.launches.saturating_add(words[kernel::LAUNCHES]);
        sum.communicates |= words[kernel::COMMUNICATES] == 1;
    }
    Ok(merged.into_values().collect())
}
