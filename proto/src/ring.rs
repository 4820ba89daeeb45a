//! Layout of the hook's flight recorder: a memfd that the hook writes with atomics and the collector reads with `pread`.
//!
//! The memfd is an array of little-endian 64-bit words: a header, then fixed tables. Every field is one word, so a
//! reader never sees half of one. An entry is published by storing its first word last (release); an operation slot that
//! is reused has its first word cleared before anything else is overwritten, and a reader that finds the first word changed
//! after reading the rest drops the entry. Words that are filled in later (returned, started, completed, status) only ever
//! go from 0 to their value.
//!
//! This module must not know how the words got there: the writer is `hook/src/runtime/recorder/`.

pub mod lane;

use std::{collections::HashMap, io};

use crate::v1::{
    Communicator, CommunicatorState, DataType, FlightRecord, HookHealth, HookedFunction, Matmul, Op, OpKind, OpStatus,
    Operation, RankInfo, Stream,
};

/// Version of the layout; any change of a constant below changes it.
pub const VERSION: u32 = 6;
/// First word of every ring: `XPURING1` in ASCII.
pub const MAGIC: u64 = u64::from_le_bytes(*b"XPURING1");

/// Indices of the header's words. What the watcher writes, what threads without a lane share, and the tickets are on cache lines of
/// their own, two apart because processors fetch lines in pairs.
pub mod header {
    /// [`super::MAGIC`], stored last when the ring is set up.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`].
    pub const VERSION: usize = 1;
    /// Last turn of the watcher thread, CLOCK_MONOTONIC nanoseconds; 0 before its first turn.
    pub const HEARTBEAT_NS: usize = 2;
    /// Driver call that the watcher is inside of: an index into [`super::WATCHER_CALLS`], 0 for none.
    pub const WATCHER_CALL: usize = 3;
    /// When the watcher entered that call.
    pub const WATCHER_SINCE_NS: usize = 4;
    /// Events that the hook keeps for reuse.
    pub const SPARE_EVENTS: usize = 5;
    /// Filters of system calls that the process had when the hook was loaded.
    pub const FILTERS_AT_LOAD: usize = 6;
    /// Bits of [`super::filtered`] that the hook has seen itself.
    pub const FILTERS_SEEN: usize = 7;
    /// Thread id of the watcher; 0 before its first turn.
    pub const WATCHER_TID: usize = 8;
    /// 1 when the process ends as it means to. A process under a filter cannot send [`crate::v1::Goodbye`].
    pub const GOODBYE: usize = 9;
    /// Last launch, copy, memset or return from a synchronization of a thread without a [`super::lane`].
    pub const LAST_LAUNCH_NS: usize = 16;
    /// Operations that found no free slot.
    pub const DROPPED: usize = 17;
    /// Kernels launched by threads without a [`super::lane`].
    pub const KERNELS: usize = 18;
    /// Graphs launched by threads without a [`super::lane`].
    pub const GRAPHS: usize = 19;
    /// Collectives launched by threads without a [`super::lane`], and those that host threads run.
    pub const COLLECTIVES: usize = 20;
    /// Panics caught in the hook.
    pub const PANICS: usize = 21;
    /// Entries that did not fit the communicator, stream, name or coverage table.
    pub const OVERFLOWS: usize = 22;
    /// The next ticket that nobody has taken. Threads that launch at the same time take several at once, and leave some unused.
    pub const OPS: usize = 32;
    /// The one part that the collector writes: when it looked last, CLOCK_MONOTONIC nanoseconds.
    pub const COLLECTOR_NS: usize = 48;
    /// Written by the collector: bits of [`super::filtered`].
    pub const FILTERED: usize = 49;
    /// Words of the header.
    pub const WORDS: usize = 64;
}

/// Which threads have got filters of system calls since the hook was loaded.
pub mod filtered {
    /// Threads of the program.
    pub const PROGRAM: u32 = 1;
    /// The watcher.
    pub const WATCHER: u32 = 2;
}

/// The file that tells the boots of machines apart.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// How many filters of system calls a thread is under, by the bytes of its `/proc/PID/status`.
#[must_use]
pub fn filters(status: &[u8]) -> u32 {
    let field = |name: &[u8]| {
        let value = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))?;
        std::str::from_utf8(value).ok()?.trim().parse::<u32>().ok()
    };
    // Kernels before 5.9 do not say how many.
    field(b"Seccomp_filters:").or_else(|| field(b"Seccomp:")).unwrap_or(0)
}

/// Names of the driver calls that a watcher stamps, by [`header::WATCHER_CALL`].
pub const WATCHER_CALLS: [&str; 9] = [
    "",
    "cuCtxSetCurrent",
    "cuEventQuery",
    "cuEventElapsedTime",
    "ncclCommGetAsyncError",
    "cuFuncGetName",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy",
];

/// Words of an operation slot.
pub mod op {
    /// Ticket plus one; 0 while the slot is free or being rewritten.
    pub const TICKET: usize = 0;
    /// Bits 0-7 [`crate::v1::OpKind`], 8-15 [`crate::v1::Op`], 16-23 [`crate::v1::DataType`], 24-31 reduce op, 32-63 thread id.
    pub const WHAT: usize = 1;
    /// Identity of the communicator, 0 for none. A host call that creates one stores it when it is known.
    pub const COMMUNICATOR: usize = 2;
    /// Sequence number within the communicator.
    pub const SEQ: usize = 3;
    /// Elements.
    pub const COUNT: usize = 4;
    /// Root or peer as i32 in the low half (-1 none).
    pub const PEER: usize = 5;
    /// Stream handle.
    pub const STREAM: usize = 6;
    /// Host entry, CLOCK_MONOTONIC nanoseconds.
    pub const ENTERED_NS: usize = 7;
    /// Host return.
    pub const RETURNED_NS: usize = 8;
    /// When the start event was seen complete.
    pub const STARTED_NS: usize = 9;
    /// When the end event was seen complete.
    pub const COMPLETED_NS: usize = 10;
    /// Low half [`crate::v1::OpStatus`], high half the driver's error code.
    pub const STATUS: usize = 11;
    /// Device time between the events.
    pub const DEVICE_NS: usize = 12;
    /// Function handle of a kernel, key into the name table; 0 for none.
    pub const FUNCTION: usize = 13;
    /// NCCL group it was launched in; 0 for none.
    pub const GROUP: usize = 14;
    /// Tag of a send or receive as i32 in the low half, and 1 in the high half when it has one.
    pub const TAG: usize = 15;
    /// Words of a slot.
    pub const WORDS: usize = 16;
    /// Number of slots. A slot whose operation is still pending is never overwritten: the new one is dropped and counted.
    pub const SLOTS: usize = 8192;
}

/// Words of a slot whose operation is a matrix product. It has no communicator, so those words hold its shape.
pub mod matmul {
    use super::op;
    /// Low half m, high half n.
    pub const M_N: usize = op::COMMUNICATOR;
    /// Low half k, high half the batch.
    pub const K_BATCH: usize = op::SEQ;
    /// Low half how A is transposed, high half how B is (cublasOperation_t).
    pub const TRANSPOSES: usize = op::COUNT;
}

/// Words of a communicator entry.
pub mod comm {
    /// Identity, published last; 0 is a free entry.
    pub const ID: usize = 0;
    /// Library handle.
    pub const HANDLE: usize = 1;
    /// Low half size, high half this process's rank in it as i32.
    pub const SIZE_RANK: usize = 2;
    /// Low half [`crate::v1::CommunicatorState`], high half the device as i32.
    pub const STATE_DEVICE: usize = 3;
    /// Identity of the parent; 0 for none.
    pub const PARENT: usize = 4;
    /// When its init call was entered.
    pub const CREATED_NS: usize = 5;
    /// Collectives launched on the host.
    pub const LAUNCHED: usize = 6;
    /// Sends and receives launched.
    pub const POINT_TO_POINT: usize = 7;
    /// Highest sequence number seen started on the device; on the cache line that the watcher writes.
    pub const STARTED: usize = 8;
    /// Highest sequence number seen completed on the device.
    pub const COMPLETED: usize = 9;
    /// Another identity of it, that other ranks have; 0 for none. Its children are then [`super::child_id`] of either.
    pub const ALIAS: usize = 10;
    /// 1 when the identity comes from a drawn id, which no other job has; else other jobs may have communicators of this identity.
    pub const UNIQUE: usize = 11;
    /// Words of an entry.
    pub const WORDS: usize = 16;
    /// Number of entries.
    pub const SLOTS: usize = 1024;
}

/// Words of a stream entry.
pub mod stream {
    /// Stream handle plus one, published last; 0 is a free entry.
    pub const HANDLE: usize = 0;
    /// Kernels and graphs launched on it.
    pub const LAUNCHES: usize = 1;
    /// Function handle of the last kernel.
    pub const LAST_FUNCTION: usize = 2;
    /// When that was launched.
    pub const LAST_NS: usize = 3;
    /// Words of an entry.
    pub const WORDS: usize = 4;
    /// Number of entries.
    pub const SLOTS: usize = 256;
}

/// Words of a name entry: the name of a kernel by its function handle.
pub mod name {
    /// Function handle, published last; 0 is a free entry.
    pub const FUNCTION: usize = 0;
    /// First word of the name: UTF-8 bytes, zero filled, cut at 8 x 31 bytes.
    pub const TEXT: usize = 1;
    /// Words of an entry.
    pub const WORDS: usize = 32;
    /// Number of entries.
    pub const SLOTS: usize = 2048;
}

/// Words of a coverage entry: one function that the hook knows.
pub mod coverage {
    /// Layer in the low byte ([`LAYERS`], from 1), status in the next ([`STATUSES`]); published last, 0 is a free entry.
    pub const STATUS: usize = 0;
    /// Calls seen.
    pub const CALLS: usize = 1;
    /// First word of the name: ASCII bytes, zero filled, cut at 8 x 6 bytes.
    pub const NAME: usize = 2;
    /// Words of an entry.
    pub const WORDS: usize = 8;
    /// Number of entries.
    pub const SLOTS: usize = 1280;
    /// Names of the layers.
    pub const LAYERS: [&str; 6] = ["", "nccl", "driver", "runtime", "cublas", "host"];
    /// Reasons for not being hooked; the empty one means that it is.
    pub const STATUSES: [&str; 7] = [
        "",
        "the library is not loaded",
        "the library does not have it",
        "nobody asked for it",
        "calls inside a library that holds a copy of its own are not seen, because its code cannot be replaced",
        "its kernels run and no call of it is seen: linked statically without symbols, or called past the linker",
        "the library is not loaded; one that is loaded later and bound to itself is not seen, because the linker does not tell of it",
    ];
}

/// Byte offsets of the tables.
pub mod offset {
    use super::{comm, coverage, header, lane, name, op, stream};
    /// Lanes.
    pub const LANES: usize = header::WORDS * 8;
    /// Operations.
    pub const OPS: usize = LANES + lane::SLOTS * lane::WORDS * 8;
    /// Communicators.
    pub const COMMS: usize = OPS + op::SLOTS * op::WORDS * 8;
    /// Streams.
    pub const STREAMS: usize = COMMS + comm::SLOTS * comm::WORDS * 8;
    /// Kernel names.
    pub const NAMES: usize = STREAMS + stream::SLOTS * stream::WORDS * 8;
    /// Coverage.
    pub const COVERAGE: usize = NAMES + name::SLOTS * name::WORDS * 8;
    /// Stream entries of the lanes.
    pub const LANE_STREAMS: usize = COVERAGE + coverage::SLOTS * coverage::WORDS * 8;
    /// Calls counted by the lanes.
    pub const LANE_CALLS: usize = LANE_STREAMS + lane::SLOTS * lane::STREAM_WORDS * 8;
    /// Size of the memfd in bytes.
    pub const END: usize = LANE_CALLS + lane::SLOTS * lane::CALL_WORDS * 8;
}

/// How many completed operations a flight record keeps behind the pending ones.
pub const RECENT_OPERATIONS: usize = 256;

/// The header alone, for a reader that only watches progress; the counters of the lanes are added to its own.
///
/// # Errors
/// `InvalidData` when the bytes are not a ring of this version, or what `read_at` returned.
pub fn read_header(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<[u64; header::WORDS]> {
    read_head(&read_at).map(|(words, _)| words)
}

/// The header, and the lanes that are already added to it.
fn read_head(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<([u64; header::WORDS], lane::Totals)> {
    let mut words = [0; header::WORDS];
    words.copy_from_slice(&read_words(read_at, 0, header::WORDS)?);
    if words[header::MAGIC] != MAGIC || words[header::VERSION] != u64::from(VERSION) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("not a flight ring of layout version {VERSION}"),
        ));
    }
    let totals = lane::totals(read_at)?;
    words[header::LAST_LAUNCH_NS] = words[header::LAST_LAUNCH_NS].max(totals.last_launch_ns);
    let sums =
        [(header::KERNELS, totals.kernels), (header::GRAPHS, totals.graphs), (header::COLLECTIVES, totals.collectives)];
    sums.into_iter().for_each(|(word, sum)| words[word] = words[word].saturating_add(sum));
    Ok((words, totals))
}

/// When a process last made progress on its device, CLOCK_MONOTONIC nanoseconds, 0 for never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// The last launch, copy, memset or return from a synchronization.
    pub called_ns: u64,
    /// The last operation that was seen complete, successfully or not.
    pub completed_ns: u64,
}

/// Reads when the process last made progress: the header, the lanes and all operation slots.
///
/// # Errors
/// As [`read_header`].
pub fn read_progress(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Progress> {
    let (head, _) = read_head(&read_at)?;
    let slots = entries::<{ op::WORDS }>(&read_at, offset::OPS, op::SLOTS)?;
    let completed_ns = slots.iter().map(|words| words[op::COMPLETED_NS]).max().unwrap_or(0);
    Ok(Progress { called_ns: head[header::LAST_LAUNCH_NS], completed_ns })
}

/// The slots of the tickets `from..from + count`, in the order of the tickets. A slot may hold another ticket: it is not
/// published yet, was never used (its slot was still in use, or its thread launched no more), or has been used again since. Slots that change while they are
/// read are left out.
///
/// # Errors
/// What `read_at` returned.
pub fn read_slots(
    read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    from: u64,
    count: usize,
) -> io::Result<Vec<[u64; op::WORDS]>> {
    let first = from as usize % op::SLOTS;
    let count = count.min(op::SLOTS);
    let until_end = count.min(op::SLOTS - first);
    let mut slots = entries::<{ op::WORDS }>(&read_at, offset::OPS + first * op::WORDS * 8, until_end)?;
    slots.extend(entries::<{ op::WORDS }>(&read_at, offset::OPS, count - until_end)?);
    Ok(slots)
}

/// Names of kernels and functions by their key.
///
/// # Errors
/// What `read_at` returned.
pub fn read_names(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<HashMap<u64, String>> {
    let names = entries::<{ name::WORDS }>(&read_at, offset::NAMES, name::SLOTS)?;
    Ok(names.into_iter().map(|words| (words[name::FUNCTION], text(&words[name::TEXT..]))).collect())
}

/// All communicators.
///
/// # Errors
/// What `read_at` returned.
pub fn read_communicators(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<Communicator>> {
    let entries = entries::<{ comm::WORDS }>(&read_at, offset::COMMS, comm::SLOTS)?;
    Ok(entries.iter().map(communicator).collect())
}

/// Reads a whole ring. `read_at(offset, buffer)` fills the buffer from the memfd; `now_ns` is CLOCK_MONOTONIC.
///
/// # Errors
/// As [`read_header`].
pub fn read(
    read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    rank: RankInfo,
    now_ns: u64,
) -> io::Result<FlightRecord> {
    let (head, lanes) = read_head(&read_at)?;
    let names = read_names(&read_at)?;
    let name_of = |function: u64| names.get(&function).cloned().unwrap_or_default();

    let mut operations: Vec<Operation> = entries::<{ op::WORDS }>(&read_at, offset::OPS, op::SLOTS)?
        .iter()
        .map(|words| operation(words, name_of(words[op::FUNCTION])))
        .collect();
    // Tickets are in the order of time within a thread only.
    operations.sort_by_key(|operation| (operation.entered_ns, operation.ticket));
    let finished = operations.iter().filter(|operation| operation.status() != OpStatus::Pending).count();
    let mut too_many = finished.saturating_sub(RECENT_OPERATIONS);
    operations.retain(|operation| {
        let drop = too_many > 0 && operation.status() != OpStatus::Pending;
        too_many -= usize::from(drop);
        !drop
    });

    Ok(FlightRecord {
        rank: Some(rank),
        communicators: read_communicators(&read_at)?,
        operations,
        streams: lane::streams(&read_at)?
            .iter()
            .map(|words| Stream {
                handle: words[stream::HANDLE] - 1,
                launches: words[stream::LAUNCHES],
                last_kernel: name_of(words[stream::LAST_FUNCTION]),
                last_launch_ns: words[stream::LAST_NS],
            })
            .collect(),
        kernels_launched: head[header::KERNELS],
        graphs_launched: head[header::GRAPHS],
        collectives_launched: head[header::COLLECTIVES],
        last_launch_ns: head[header::LAST_LAUNCH_NS],
        read_ns: now_ns,
        health: Some(HookHealth {
            heartbeat_ns: head[header::HEARTBEAT_NS],
            watcher_inside: WATCHER_CALLS.get(head[header::WATCHER_CALL] as usize).unwrap_or(&"?").to_string(),
            watcher_inside_since_ns: head[header::WATCHER_SINCE_NS],
            dropped: head[header::DROPPED],
            panics: head[header::PANICS],
            overflows: head[header::OVERFLOWS],
            launch_samples: lanes.launch_cost.0,
            launch_cost_ns: lanes.launch_cost.1,
            collective_samples: lanes.collective_cost.0,
            collective_cost_ns: lanes.collective_cost.1,
            long_samples: lanes.long_cost.0,
            long_cost_ns: lanes.long_cost.1,
        }),
        coverage: read_functions(&read_at)?,
    })
}

/// All functions that the hook knows. An entry never moves and is never freed, and its name never changes: one read will do.
///
/// # Errors
/// What `read_at` returned.
pub fn read_functions(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<HookedFunction>> {
    let calls = lane::calls(&read_at)?;
    let table = read_words(&read_at, offset::COVERAGE, coverage::SLOTS * coverage::WORDS)?;
    let entries = table.chunks_exact(coverage::WORDS).zip(calls).filter(|(words, _)| words[coverage::STATUS] != 0);
    let function = |(words, by_lanes): (&[u64], u64)| {
        let [layer, status, ..] = words[coverage::STATUS].to_le_bytes();
        let reason = coverage::STATUSES.get(usize::from(status)).unwrap_or(&"?");
        HookedFunction {
            name: text(&words[coverage::NAME..]),
            layer: coverage::LAYERS.get(usize::from(layer)).unwrap_or(&"?").to_string(),
            hooked: reason.is_empty(),
            reason: reason.to_string(),
            calls: words[coverage::CALLS].saturating_add(by_lanes),
        }
    };
    Ok(entries.map(function).collect())
}

/// Packs [`op::WHAT`].
#[must_use]
pub fn pack_what(kind: OpKind, op: Op, dtype: DataType, reduce_op: u8, tid: u32) -> u64 {
    kind as u64 | (op as u64) << 8 | (dtype as u64) << 16 | u64::from(reduce_op) << 24 | u64::from(tid) << 32
}

/// Packs two halves into a word, as [`comm::SIZE_RANK`], [`comm::STATE_DEVICE`] and [`op::STATUS`] want it.
#[must_use]
pub fn pack_halves(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Odd, so that a product with it can be undone.
const CHILD_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// The identity of a communicator that is made of another one. `key` tells it from the parent's other children and is the same on all
/// ranks. Where a parent has two identities, so has a child, and [`key_of_child`] tells that they are the same child.
#[must_use]
pub fn child_id(parent: u64, key: u64) -> u64 {
    parent.wrapping_mul(CHILD_FACTOR).wrapping_add(key)
}

/// What [`child_id`] was given beside the parent.
#[must_use]
pub fn key_of_child(parent: u64, child: u64) -> u64 {
    child.wrapping_sub(parent.wrapping_mul(CHILD_FACTOR))
}

/// The message of one published slot; `function` is the name of [`op::FUNCTION`].
#[must_use]
pub fn operation(words: &[u64; op::WORDS], function: String) -> Operation {
    let [kind, op_code, dtype, reduce_op, ..] = words[op::WHAT].to_le_bytes();
    let op = Op::try_from(i32::from(op_code)).unwrap_or_default();
    let shape = || Matmul {
        batch: high(words[matmul::K_BATCH]),
        m: low(words[matmul::M_N]),
        n: high(words[matmul::M_N]),
        k: low(words[matmul::K_BATCH]),
        trans_a: low(words[matmul::TRANSPOSES]),
        trans_b: high(words[matmul::TRANSPOSES]),
    };
    // The shape of a matrix product lies where a collective has these three; all are 0 when it is not known.
    let is_product = op == Op::Matmul;
    let is_told = [matmul::M_N, matmul::K_BATCH, matmul::TRANSPOSES].iter().any(|word| words[*word] != 0);
    let matmul = (is_product && is_told).then(shape);
    let of_collective = |word: usize| if is_product { 0 } else { words[word] };
    Operation {
        ticket: words[op::TICKET] - 1,
        kind: OpKind::try_from(i32::from(kind)).unwrap_or_default().into(),
        op: op.into(),
        communicator: of_collective(op::COMMUNICATOR),
        seq: of_collective(op::SEQ),
        count: of_collective(op::COUNT),
        dtype: DataType::try_from(i32::from(dtype)).unwrap_or_default().into(),
        reduce_op: u32::from(reduce_op),
        peer: low(words[op::PEER]) as i32,
        stream: words[op::STREAM],
        tid: high(words[op::WHAT]),
        entered_ns: words[op::ENTERED_NS],
        returned_ns: words[op::RETURNED_NS],
        started_ns: words[op::STARTED_NS],
        completed_ns: words[op::COMPLETED_NS],
        status: OpStatus::try_from(low(words[op::STATUS]) as i32).unwrap_or_default().into(),
        error: high(words[op::STATUS]),
        device_ns: words[op::DEVICE_NS],
        function,
        group: words[op::GROUP],
        matmul,
        tag: (high(words[op::TAG]) != 0).then_some(low(words[op::TAG]) as i32),
    }
}

fn communicator(words: &[u64; comm::WORDS]) -> Communicator {
    Communicator {
        id: words[comm::ID],
        handle: words[comm::HANDLE],
        size: low(words[comm::SIZE_RANK]),
        rank: high(words[comm::SIZE_RANK]) as i32,
        device: high(words[comm::STATE_DEVICE]) as i32,
        state: CommunicatorState::try_from(low(words[comm::STATE_DEVICE]) as i32).unwrap_or_default().into(),
        parent: words[comm::PARENT],
        launched: words[comm::LAUNCHED],
        started: words[comm::STARTED],
        completed: words[comm::COMPLETED],
        point_to_point: words[comm::POINT_TO_POINT],
        created_ns: words[comm::CREATED_NS],
        alias: words[comm::ALIAS],
        unique: words[comm::UNIQUE] == 1,
    }
}

/// The published entries of one table. The table is read twice; an entry whose first word changed in between is left out.
fn entries<const WORDS: usize>(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    slots: usize,
) -> io::Result<Vec<[u64; WORDS]>> {
    let table = read_words(read_at, start, slots * WORDS)?;
    let again = read_words(read_at, start, slots * WORDS)?;
    Ok(table
        .chunks_exact(WORDS)
        .zip(again.chunks_exact(WORDS))
        .filter(|(entry, again)| entry[0] != 0 && entry[0] == again[0])
        .map(|(entry, _)| entry.try_into().expect("chunks have WORDS words"))
        .collect())
}

fn read_words(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>, start: usize, words: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; words * 8];
    read_at(start as u64, &mut bytes)?;
    Ok(bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().expect("chunks have 8 bytes"))).collect())
}

fn text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn low(word: u64) -> u32 {
    word as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring in a plain vector, written the way the hook does.
    struct Ring(Vec<u64>);

    impl Ring {
        fn new() -> Self {
            let mut words = vec![0; offset::END / 8];
            words[header::MAGIC] = MAGIC;
            words[header::VERSION] = u64::from(VERSION);
            Ring(words)
        }
        fn put(&mut self, start: usize, slot: usize, entry: &[u64]) {
            let first = start / 8 + slot * entry.len();
            self.0[first..first + entry.len()].copy_from_slice(entry);
        }
        fn read(&self) -> io::Result<FlightRecord> {
            read(
                |start, buffer| {
                    let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
                    let start = start as usize;
                    buffer.copy_from_slice(bytes.get(start..start + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
                    Ok(())
                },
                RankInfo { rank: 3, ..Default::default() },
                77,
            )
        }
    }

    #[test]
    fn filters_are_counted_where_the_kernel_says_how_many() {
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t3\nSpeculation:\t1\n"), 3);
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t2\nSpeculation:\t1\n"), 2);
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\n"), 0);
        assert_eq!((filters(b"Seccomp_filters:\tmany"), filters(b"")), (0, 0));
    }

    #[test]
    fn an_operation_comes_out_as_it_went_in() {
        let mut ring = Ring::new();
        let mut words = [0; op::WORDS];
        words[op::TICKET] = 42 + 1;
        words[op::WHAT] = pack_what(OpKind::Collective, Op::AllReduce, DataType::Float32, 2, 4321);
        words[op::COMMUNICATOR] = 0xfeed;
        words[op::SEQ] = 7;
        words[op::PEER] = u64::from(-1i32 as u32);
        words[op::STATUS] = pack_halves(OpStatus::Failed as u32, 700);
        words[op::FUNCTION] = 0x1000;
        words[op::TAG] = pack_halves(-1i32 as u32, 1);
        ring.put(offset::OPS, 5, &words);
        let mut name_words = [0; name::WORDS];
        name_words[name::FUNCTION] = 0x1000;
        name_words[name::TEXT] = u64::from_le_bytes(*b"kernel\0\0");
        ring.put(offset::NAMES, 0, &name_words);

        let record = ring.read().unwrap();
        let [operation] = &record.operations[..] else { panic!("one operation, not {}", record.operations.len()) };
        assert_eq!((operation.ticket, operation.tid, operation.seq), (42, 4321, 7));
        assert_eq!((operation.op(), operation.dtype()), (Op::AllReduce, DataType::Float32));
        assert_eq!((operation.status(), operation.error, operation.peer), (OpStatus::Failed, 700, -1));
        assert_eq!((operation.function.as_str(), operation.tag), ("kernel", Some(-1)));
        assert_eq!((record.rank.unwrap().rank, record.read_ns), (3, 77));
    }

    #[test]
    fn a_matrix_product_has_a_shape_and_no_communicator() {
        let mut words = [0; op::WORDS];
        words[op::TICKET] = 1;
        words[op::WHAT] = pack_what(OpKind::Kernel, Op::Matmul, DataType::Bfloat16, 0, 1);
        words[matmul::M_N] = pack_halves(4096, 1024);
        words[matmul::K_BATCH] = pack_halves(512, 8);
        words[matmul::TRANSPOSES] = pack_halves(1, 0);
        let operation = operation(&words, "cublasGemmEx".into());
        assert_eq!((operation.communicator, operation.seq, operation.count), (0, 0, 0));
        let shape = Matmul { batch: 8, m: 4096, n: 1024, k: 512, trans_a: 1, trans_b: 0 };
        assert_eq!((operation.matmul, operation.dtype(), operation.tag), (Some(shape), DataType::Bfloat16, None));
    }

    #[test]
    fn the_key_of_a_child_is_had_again_from_the_two_identities() {
        let keys = [0, 1, 0xfeed_beef_0000_0001, u64::MAX];
        let parents = [1, 7, 0x1234_5678_9abc_def0, u64::MAX];
        for (parent, key) in parents.into_iter().flat_map(|parent| keys.map(|key| (parent, key))) {
            assert_eq!(key_of_child(parent, child_id(parent, key)), key);
        }
        // A child's child tells in which order its keys were.
        assert_ne!(child_id(child_id(7, 3), 5), child_id(child_id(7, 5), 3));
    }

    #[test]
    fn pending_operations_are_never_cut() {
        let mut ring = Ring::new();
        for ticket in 0..op::SLOTS {
            let mut words = [0; op::WORDS];
            words[op::TICKET] = ticket as u64 + 1;
            words[op::STATUS] = u64::from(ticket != 3);
            ring.put(offset::OPS, ticket, &words);
        }
        let operations = ring.read().unwrap().operations;
        assert_eq!(operations.len(), RECENT_OPERATIONS + 1);
        assert_eq!(operations[0].ticket, 3);
        assert_eq!(operations.last().unwrap().ticket, op::SLOTS as u64 - 1);
    }

    #[test]
    fn foreign_and_truncated_bytes_are_errors() {
        let mut ring = Ring::new();
        ring.0[header::MAGIC] = 1;
        assert_eq!(ring.read().unwrap_err().kind(), io::ErrorKind::InvalidData);
        let mut ring = Ring::new();
        ring.0.truncate(header::WORDS + 9);
        assert_eq!(ring.read().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
