//! Reads the ring into messages.

use std::{collections::HashMap, io};

use super::lane;
use super::layout::{
    MAGIC, VERSION, WATCHER_CALLS, comm, copy, coverage, dimensions, entries, fault, header, high, launch,
    leading_entries, low, matmul, name, offset, op, read_into, read_word, read_words, stack, stderr, store_wait,
    stream, text, texts,
};
use crate::v1::{
    Communicator, CommunicatorState, CopyDirection, DataType, FlightRecord, HookHealth, HookedFunction, KernelLaunches,
    LaunchConfig, Matmul, Op, OpKind, OpStatus, Operation, RankInfo, Stream,
};

/// Number of completed operations that a flight record keeps besides the pending ones.
pub const RECENT_OPERATIONS: usize = 256;

/// Maximum number of kernels in a flight record. Those that communicate come first.
pub(super) const MOST_KERNELS: usize = 1024;

/// Reads only the header, for a reader that watches progress. The counters of the lanes are added
/// to those of the header.
///
/// # Errors
/// `InvalidData` if the bytes are not a ring of this version, or the error of `read_at`.
pub fn read_header(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<[u64; header::WORDS]> {
    read_head(&read_at).map(|(words, _)| words)
}

/// The header, and the lanes, which are already added to it.
fn read_head(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<([u64; header::WORDS], lane::Totals)> {
    let mut words = [0; header::WORDS];
    read_into(read_at, 0, &mut words)?;
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

/// When a process last made progress on its device: CLOCK_MONOTONIC nanoseconds, 0 for never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Last launch, copy, memset or return from a synchronization.
    pub called_ns: u64,
    /// Last operation seen complete, successfully or not.
    pub completed_ns: u64,
}

/// Reads when the process last made progress, from the header, the lanes and all operation slots.
///
/// # Errors
/// The errors of [`read_header`].
pub fn read_progress(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Progress> {
    let (head, _) = read_head(&read_at)?;
    let slots = entries::<{ op::WORDS }>(&read_at, offset::OPS, op::SLOTS)?;
    let completed_ns = slots.iter().map(|words| words[op::COMPLETED_NS]).max().unwrap_or(0);
    Ok(Progress { called_ns: head[header::LAST_LAUNCH_NS], completed_ns })
}

/// Appends the slots of the tickets `from..from + count` to `slots`, in ticket order and at most
/// all slots of the ring. A slot may contain another ticket: it is not published yet, was never
/// used (the slot was still in use, or the thread launched nothing more), or was reused. The ticket
/// word of a slot that is free, or that changed while it was read, is 0.
///
/// # Errors
/// The error of `read_at`.
pub fn read_slots(
    read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    from: u64,
    count: usize,
    slots: &mut Vec<[u64; op::WORDS]>,
) -> io::Result<()> {
    let begin = slots.len();
    let (first, count) = (from as usize % op::SLOTS, count.min(op::SLOTS));
    let until_end = count.min(op::SLOTS - first);
    slots.resize(begin + count, [0; op::WORDS]);
    let (before_end, from_begin) = slots[begin..].split_at_mut(until_end);
    read_into(&read_at, slot_offset(first), before_end)?;
    read_into(&read_at, slot_offset(0), from_begin)?;
    // A slot is reused only after the ticket that is a whole table later was taken. The other slots
    // cannot have changed.
    let tickets = read_word(&read_at, header::OPS * 8)?;
    for words in &mut slots[begin..] {
        let ticket = words[op::TICKET];
        if ticket != 0 && tickets.saturating_sub(ticket - 1) > op::SLOTS as u64 {
            let place = (ticket - 1) as usize % op::SLOTS;
            if read_word(&read_at, slot_offset(place) + op::TICKET * 8)? != ticket {
                words[op::TICKET] = 0;
            }
        }
    }
    Ok(())
}

fn slot_offset(place: usize) -> usize {
    offset::OPS + place * op::WORDS * 8
}

/// Reads the names of kernels and functions, by their key.
///
/// # Errors
/// The error of `read_at`.
pub fn read_names(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<HashMap<u64, String>> {
    let names = entries::<{ name::WORDS }>(&read_at, offset::NAMES, name::SLOTS)?;
    Ok(names.into_iter().map(|words| (words[name::FUNCTION], text(&words[name::TEXT..]))).collect())
}

/// Reads all communicators. The hook uses an entry again only when it has used all.
///
/// # Errors
/// The error of `read_at`.
pub fn read_communicators(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<Communicator>> {
    let entries = leading_entries::<{ comm::WORDS }>(&read_at, offset::COMMS, comm::SLOTS)?;
    Ok(entries.iter().map(communicator).collect())
}

/// The Python stack of a launch, as the hook stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawStack {
    /// Ticket of the operation.
    pub ticket: u64,
    /// For each frame, innermost first, the address of its code object and its last instruction.
    pub frames: Vec<(u64, u64)>,
}

/// Reads the stacks from entry `first` on, of `used` entries in use, up to the first one that is
/// not published yet.
///
/// # Errors
/// The error of `read_at`.
pub fn read_stacks(
    read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    first: usize,
    used: usize,
) -> io::Result<Vec<RawStack>> {
    let count = used.min(stack::SLOTS).saturating_sub(first);
    let words = read_words(&read_at, offset::STACKS + first * stack::WORDS * 8, stack::WORDS * count)?;
    let published = words.chunks_exact(stack::WORDS).take_while(|words| words[stack::TICKET] != 0);
    let stack = |words: &[u64]| {
        let frames = (words[stack::FRAMES] as usize).min(stack::MOST_FRAMES);
        let pairs = words[stack::FIRST..].chunks_exact(2).take(frames);
        RawStack { ticket: words[stack::TICKET] - 1, frames: pairs.map(|pair| (pair[0], pair[1])).collect() }
    };
    Ok(published.map(stack).collect())
}

/// Text that a process wrote last to its standard error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastText {
    /// At most [`stderr::TEXT_BYTES`] bytes. The first character may be cut.
    pub text: Vec<u8>,
    /// When the last part was written, CLOCK_MONOTONIC nanoseconds.
    pub last_ns: u64,
}

/// Reads what a process ([`stderr::OWN`]) or its forked children ([`stderr::CHILDREN`]) wrote last
/// to standard error, or its last uncaught exceptions ([`stderr::UNCAUGHT`]). `None` if there are
/// none.
///
/// # Errors
/// The error of `read_at`.
pub fn read_last_text(
    read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    entry: usize,
) -> io::Result<Option<LastText>> {
    let words = read_words(&read_at, offset::STDERR + entry * stderr::WORDS * 8, stderr::WORDS)?;
    let written = words[stderr::BYTES];
    if written == 0 {
        return Ok(None);
    }
    let mut text: Vec<u8> = words[stderr::TEXT..].iter().flat_map(|word| word.to_le_bytes()).collect();
    match usize::try_from(written) {
        Ok(written) if written < stderr::TEXT_BYTES => text.truncate(written),
        _ => text.rotate_left((written % stderr::TEXT_BYTES as u64) as usize),
    }
    Ok(Some(LastText { text, last_ns: words[stderr::LAST_NS] }))
}

/// A fatal signal that a thread has received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Number of this fault; the thread waits until [`fault::READ`] has it.
    pub count: u64,
    /// Number of the signal.
    pub signal: i32,
    /// `si_code`.
    pub code: i32,
    /// Thread id in the PID namespace of the process.
    pub tid: i32,
    /// `si_addr`.
    pub address: u64,
    /// The registers, in the order of [`fault::REGISTERS`].
    pub registers: [u64; fault::REGISTER_COUNT],
}

/// Reads the fatal signal that a process has received last.
///
/// # Errors
/// The error of `read_at`.
pub fn read_fault(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Option<Fault>> {
    let words = read_words(&read_at, offset::FAULT, fault::WORDS)?;
    let mut registers = [0; fault::REGISTER_COUNT];
    registers.copy_from_slice(&words[fault::REGISTERS..fault::REGISTERS + fault::REGISTER_COUNT]);
    Ok((words[fault::COUNT] != 0).then(|| Fault {
        count: words[fault::COUNT],
        signal: words[fault::SIGNAL] as i32,
        code: words[fault::CODE] as i32,
        tid: words[fault::TID] as i32,
        address: words[fault::ADDRESS],
        registers,
    }))
}

/// Reads a ring. `read_at(offset, buffer)` fills the buffer from the memfd; `now_ns` is
/// CLOCK_MONOTONIC.
///
/// # Errors
/// The errors of [`read_header`].
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
    let waits = entries::<{ store_wait::WORDS }>(&read_at, offset::STORE_WAITS, store_wait::SLOTS)?;
    let waits: HashMap<u64, _> = waits.iter().map(|words| (words[store_wait::TICKET] - 1, words)).collect();
    for operation in operations.iter_mut().filter(|operation| operation.kind() == OpKind::HostCall) {
        if let Some(words) = waits.get(&operation.ticket) {
            operation.store_keys = texts(&words[store_wait::TEXT..]);
            operation.store_key_count = words[store_wait::KEYS].min(u64::from(u32::MAX)) as u32;
        }
    }
    // Tickets are in chronological order only within a thread.
    operations.sort_by_key(|operation| (operation.entered_ns, operation.ticket));
    let finished = operations.iter().filter(|operation| operation.status() != OpStatus::Pending).count();
    let mut too_many = finished.saturating_sub(RECENT_OPERATIONS);
    operations.retain(|operation| {
        let drop = too_many > 0 && operation.status() != OpStatus::Pending;
        too_many -= usize::from(drop);
        !drop
    });

    Ok(FlightRecord {
        rank: Some(Box::new(rank)),
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
        kernels: kernels(&read_at, &names, lanes.lanes)?,
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
            uncounted_launches: lanes.uncounted,
        }),
        coverage: read_functions(&read_at)?,
    })
}

/// Reads all functions that the hook knows. An entry never moves, is never freed and keeps its
/// name, so one read is enough.
///
/// # Errors
/// The error of `read_at`.
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

/// The communicator of a published slot; `None` if its operation is not a collective.
#[must_use]
pub fn communicator_of(words: &[u64; op::WORDS]) -> Option<u64> {
    let [kind, ..] = words[op::WHAT].to_le_bytes();
    (i32::from(kind) == OpKind::Collective as i32).then_some(words[op::COMMUNICATOR])
}

/// The NCCL group of a published slot; 0 for none.
#[must_use]
pub fn group_of(words: &[u64; op::WORDS]) -> u64 {
    let [_, op, ..] = words[op::WHAT].to_le_bytes();
    if is_product(Op::try_from(i32::from(op)).unwrap_or_default()) { 0 } else { words[op::GROUP] }
}

/// Whether a slot has the words of [`matmul`].
fn is_product(op: Op) -> bool {
    matches!(op, Op::Matmul | Op::Attention)
}

/// The message of one published slot. `function` is the name of [`op::FUNCTION`].
#[must_use]
pub fn operation(words: &[u64; op::WORDS], function: String) -> Operation {
    let [kind, op_code, dtype, reduce_op, ..] = words[op::WHAT].to_le_bytes();
    let op = Op::try_from(i32::from(op_code)).unwrap_or_default();
    // The words of a collective contain other fields for other operations.
    let is_product = is_product(op);
    let is_collective = !is_product && !matches!(op, Op::Kernel | Op::Copy);
    let of_collective = |word: usize| if is_collective { words[word] } else { 0 };
    let direction = if op == Op::Copy { words[copy::DIRECTION] } else { 0 };
    Operation {
        ticket: words[op::TICKET] - 1,
        kind: OpKind::try_from(i32::from(kind)).unwrap_or_default().into(),
        op: op.into(),
        communicator: of_collective(op::COMMUNICATOR),
        seq: of_collective(op::SEQ),
        count: if is_product { 0 } else { words[op::COUNT] },
        dtype: DataType::try_from(i32::from(dtype)).unwrap_or_default().into(),
        reduce_op: u32::from(reduce_op),
        peer: if is_product { -1 } else { low(words[op::PEER]) as i32 },
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
        group: group_of(words),
        matmul: if is_product { matmul_of(words) } else { None },
        tag: (!is_product && high(words[op::TAG]) != 0).then_some(low(words[op::TAG]) as i32),
        store_keys: Vec::new(),
        store_key_count: 0,
        launch: match op {
            Op::Kernel => launch_of(words),
            _ if is_collective => channels_of(words),
            _ => None,
        },
        direction: CopyDirection::try_from(low(direction) as i32).unwrap_or_default().into(),
        collection: None,
    }
}

/// The shape of a matrix product. All its words are 0 if it is unknown.
fn matmul_of(words: &[u64; op::WORDS]) -> Option<Box<Matmul>> {
    let [m_n, k_batch, transposes] =
        [matmul::M_N, matmul::K_BATCH, matmul::TRANSPOSES_ALGORITHM].map(|word| words[word]);
    let [lds, of_c, strides] = [matmul::LDA_LDB, matmul::LDC_STRIDE_C, matmul::STRIDES_A_B].map(|word| words[word]);
    let [trans_a, trans_b, ..] = transposes.to_le_bytes();
    (m_n | k_batch | transposes != 0).then(|| {
        Box::new(Matmul {
            batch: high(k_batch),
            m: low(m_n),
            n: high(m_n),
            k: low(k_batch),
            trans_a: trans_a.into(),
            trans_b: trans_b.into(),
            lda: low(lds).into(),
            ldb: high(lds).into(),
            ldc: low(of_c).into(),
            stride_a: low(strides).into(),
            stride_b: high(strides).into(),
            stride_c: high(of_c).into(),
            algorithm: (low(transposes) & matmul::HAS_ALGORITHM != 0).then_some(high(transposes) as i32),
            members: Vec::new(),
        })
    })
}

/// The size of a collective's kernel.
fn channels_of(words: &[u64; op::WORDS]) -> Option<Box<LaunchConfig>> {
    let (blocks, threads) = (high(words[op::PEER]) & 0xffff, high(words[op::PEER]) >> 16);
    let config = LaunchConfig { grid_x: blocks, grid_y: 1, grid_z: 1, block_x: threads, block_y: 1, block_z: 1 };
    (blocks != 0).then(|| Box::new(config))
}

fn launch_of(words: &[u64; op::WORDS]) -> Option<Box<LaunchConfig>> {
    let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) =
        (dimensions(words[launch::GRID]), dimensions(words[launch::BLOCK]));
    let config = || Box::new(LaunchConfig { grid_x, grid_y, grid_z, block_x, block_y, block_z });
    (words[launch::GRID] != 0).then(config)
}

/// The named kernels and how often each was launched, those that communicate first.
fn kernels(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    names: &HashMap<u64, String>,
    lanes: usize,
) -> io::Result<Vec<KernelLaunches>> {
    let mut counts = lane::kernels(read_at, lanes)?;
    counts.retain(|count| names.contains_key(&count.function));
    counts.sort_by_key(|count| (!count.communicates, std::cmp::Reverse(count.launches), count.function, count.stream));
    counts.truncate(MOST_KERNELS);
    let launches = |count: &lane::KernelCount| KernelLaunches {
        stream: count.stream,
        name: names[&count.function].clone(),
        launches: count.launches,
        communicates: count.communicates,
    };
    Ok(counts.iter().map(launches).collect())
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
        async_error: words[comm::ASYNC_ERROR].min(u64::from(u32::MAX)) as u32,
        nodes: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::ring::layout::{pack_channels, pack_dimensions, pack_halves, pack_what};

    /// A ring in a vector, written as the hook does.
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
    fn an_operation_is_read_as_it_was_written() {
        let mut ring = Ring::new();
        let mut words = [0; op::WORDS];
        words[op::TICKET] = 42 + 1;
        words[op::WHAT] = pack_what(OpKind::Collective, Op::AllReduce, DataType::Float32, 2, 4321);
        words[op::COMMUNICATOR] = 0xfeed;
        words[op::SEQ] = 7;
        words[op::PEER] = pack_halves(-1i32 as u32, pack_channels(24, 544));
        words[op::GROUP] = 6;
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
        let size = operation.launch.as_ref().map(|of| [of.grid_x, of.grid_y, of.grid_z, of.block_x, of.block_y]);
        assert_eq!((size, operation.group, group_of(&words)), (Some([24, 1, 1, 544, 1]), 6, 6));
        assert_eq!((record.rank.unwrap().rank, record.read_ns), (3, 77));
    }

    #[test]
    fn a_store_wait_is_read_with_its_keys() {
        let mut ring = Ring::new();
        for ticket in [7, 8] {
            let mut words = [0; op::WORDS];
            words[op::TICKET] = ticket + 1;
            words[op::WHAT] = pack_what(OpKind::HostCall, Op::Unspecified, DataType::Unspecified, 0, 1);
            ring.put(offset::OPS, ticket as usize, &words);
        }
        let mut words = [0; store_wait::WORDS];
        (words[store_wait::TICKET], words[store_wait::KEYS]) = (8 + 1, 40);
        words[store_wait::TEXT] = u64::from_le_bytes(*b"done.0\0d");
        words[store_wait::TEXT + 1] = u64::from_le_bytes(*b"one.1\0\0\0");
        ring.put(offset::STORE_WAITS, 3, &words);
        let operations = ring.read().unwrap().operations;
        assert!(operations[0].store_keys.is_empty() && operations[0].store_key_count == 0);
        assert_eq!(
            (&operations[1].store_keys[..], operations[1].store_key_count),
            (&["done.0".into(), "done.1".into()][..], 40)
        );
    }

    #[test]
    fn stacks_are_read_up_to_the_first_that_is_not_published() {
        let mut ring = Ring::new();
        for (slot, frames) in [(0, 2), (1, stack::WORDS), (2, 1), (4, 1)] {
            let mut words: Vec<u64> = (0..stack::WORDS as u64).collect();
            (words[stack::TICKET], words[stack::FRAMES]) = (70 + slot as u64, frames as u64);
            ring.put(offset::STACKS, slot, &words);
        }
        let read = |first, used| {
            let read_at = |start: u64, buffer: &mut [u8]| {
                let bytes = ring.0[start as usize / 8..].iter().flat_map(|word| word.to_le_bytes());
                buffer.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
                Ok(())
            };
            read_stacks(read_at, first, used).unwrap()
        };
        let stacks = read(0, 5);
        assert_eq!(stacks.iter().map(|stack| stack.ticket).collect::<Vec<_>>(), [69, 70, 71]);
        assert_eq!(stacks[0].frames, [(2, 3), (4, 5)]);
        assert_eq!(stacks[1].frames.len(), stack::MOST_FRAMES);
        assert_eq!((read(2, 3).len(), read(3, 3).len(), read(4, usize::MAX).len()), (1, 0, 1));
    }

    #[test]
    fn a_matrix_product_has_a_shape_and_no_communicator() {
        let mut words = [0; op::WORDS];
        words[op::TICKET] = 1;
        words[op::WHAT] = pack_what(OpKind::Kernel, Op::Matmul, DataType::Bfloat16, 0, 1);
        words[matmul::M_N] = pack_halves(4096, 1024);
        words[matmul::K_BATCH] = pack_halves(512, 8);
        words[matmul::TRANSPOSES_ALGORITHM] = pack_halves(matmul::HAS_ALGORITHM | 1 << 8 | 2, -1i32 as u32);
        words[matmul::LDA_LDB] = pack_halves(512, 1025);
        words[matmul::LDC_STRIDE_C] = pack_halves(4097, 3);
        words[matmul::STRIDES_A_B] = pack_halves(1, u32::MAX);
        let operation = operation(&words, "cublasGemmEx".into());
        assert_eq!((operation.communicator, operation.seq, operation.count), (0, 0, 0));
        let shape = Matmul {
            batch: 8,
            m: 4096,
            n: 1024,
            k: 512,
            trans_a: 2,
            trans_b: 1,
            lda: 512,
            ldb: 1025,
            ldc: 4097,
            stride_a: 1,
            stride_b: u32::MAX.into(),
            stride_c: 3,
            algorithm: Some(-1),
            members: Vec::new(),
        };
        assert_eq!((&operation.matmul, operation.dtype()), (&Some(shape.into()), DataType::Bfloat16));
        assert_eq!((operation.peer, operation.group, operation.tag, group_of(&words)), (-1, 0, None, 0));
    }

    #[test]
    fn a_kernel_has_a_launch_configuration_and_a_copy_has_a_direction() {
        let words = |op: Op| {
            let mut words = [0; op::WORDS];
            words[op::TICKET] = 1;
            words[op::WHAT] = pack_what(OpKind::Kernel, op, DataType::Unspecified, 0, 1);
            words
        };
        let mut kernel = words(Op::Kernel);
        assert_eq!(operation(&kernel, String::new()).launch, None);
        kernel[launch::GRID] = pack_dimensions([u32::MAX, 70_000, 3]);
        kernel[launch::BLOCK] = pack_dimensions([1024, 2, 1]);
        let kernel = operation(&kernel, "gelu".into());
        let launch =
            LaunchConfig { grid_x: i32::MAX as u32, grid_y: 65_535, grid_z: 3, block_x: 1024, block_y: 2, block_z: 1 };
        assert_eq!((kernel.launch, kernel.communicator, kernel.seq), (Some(launch.into()), 0, 0));

        let mut copy = words(Op::Copy);
        copy[op::COUNT] = 1 << 33;
        copy[copy::DIRECTION] = CopyDirection::DeviceToHost as u64;
        let copy = operation(&copy, "cudaMemcpyAsync".into());
        assert_eq!((copy.count, copy.direction(), copy.seq), (1 << 33, CopyDirection::DeviceToHost, 0));
        assert_eq!((copy.launch, copy.matmul), (None, None));
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
    fn a_slot_that_is_reused_while_it_is_read_is_not_used() {
        let words = RefCell::new(Ring::new().0);
        let put = |ticket: u64| {
            let mut words = words.borrow_mut();
            words[offset::OPS / 8 + ticket as usize % op::SLOTS * op::WORDS + op::TICKET] = ticket + 1;
            words[header::OPS] = words[header::OPS].max(ticket + 1);
        };
        let slots = op::SLOTS as u64;
        (0..slots).for_each(&put);
        let reads = Cell::new(0);
        let read_at = |at: u64, buffer: &mut [u8]| {
            for (index, chunk) in buffer.chunks_exact_mut(8).enumerate() {
                chunk.copy_from_slice(&words.borrow()[at as usize / 8 + index].to_le_bytes());
            }
            // The process reuses slot 1 after it was read.
            if reads.replace(reads.get() + 1) == 0 {
                put(slots + 1);
            }
            Ok(())
        };
        let mut read = Vec::new();
        read_slots(read_at, 0, 4, &mut read).unwrap();
        let tickets: Vec<u64> = read.iter().map(|words| words[op::TICKET]).collect();
        assert_eq!(tickets, [1, 0, 3, 4], "slot 0 may have been reused, but was not");
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
