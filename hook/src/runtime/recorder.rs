//! The flight recorder, the only writer of the ring.
//!
//! Launching threads call everything here, so nothing takes a lock, allocates or makes a system
//! call. Operations that do not fit are counted. The launching thread writes a slot and hands it to
//! the watcher. Only the watcher frees it, so a pending operation is never overwritten. Threads
//! that launch in different communicators write to different cache lines.

use std::{
    io,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

use xpu_timer_proto::{
    ring::{MAGIC, VERSION, coverage, detail, header, lane, matmul, name, offset, op, pack_halves, store_wait},
    v1::{CopyDirection, DataType, Op, OpKind},
};

use crate::runtime::{
    lifecycle::config::Bracket,
    lock_free::{event_pools::EventPools, handoff::Handoff, slot::Slot},
    os::{
        descriptor::{self, Descriptor},
        process::PROCESS,
    },
    recorder::communicator_table::CommunicatorTable,
};

pub(crate) mod communicator_table;
pub(crate) mod communicators;
pub(crate) mod host_operations;
pub(crate) mod lanes;
#[allow(unsafe_code)]
pub(crate) mod names;
pub(crate) mod operations;
#[allow(unsafe_code)]
pub(crate) mod stacks;

const _: () = assert!(size_of::<Slot>() == 64);

/// The shape of a matrix product or of an attention; see [`xpu_timer_proto::v1::Operation`].
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub(crate) struct MatmulShape {
    pub batch: u32,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub trans_a: u32,
    pub trans_b: u32,
    pub lds: [u32; 3],
    pub strides: [u32; 3],
    pub algorithm: Option<i32>,
}

impl MatmulShape {
    /// The words of [`matmul`].
    fn words(&self) -> Varying {
        let [lda, ldb, ldc] = self.lds;
        let [stride_a, stride_b, stride_c] = self.strides;
        let has_algorithm = if self.algorithm.is_some() { matmul::HAS_ALGORITHM } else { 0 };
        let transposes = self.trans_a & 0xff | (self.trans_b & 0xff) << 8 | has_algorithm;
        [
            (matmul::M_N, pack_halves(self.m, self.n)),
            (matmul::K_BATCH, pack_halves(self.k, self.batch)),
            (matmul::TRANSPOSES_ALGORITHM, pack_halves(transposes, self.algorithm.unwrap_or(0) as u32)),
            (matmul::LDA_LDB, pack_halves(lda, ldb)),
            (matmul::LDC_STRIDE_C, pack_halves(ldc, stride_c)),
            (matmul::STRIDES_A_B, pack_halves(stride_a, stride_b)),
        ]
    }
}

/// The words of a slot whose meaning depends on the operation, with their indexes.
type Varying = [(usize, u64); 6];

/// An operation as it begins.
pub(crate) struct NewOperation {
    /// Kind.
    pub kind: OpKind,
    /// Operation.
    pub op: Op,
    /// Element type.
    pub dtype: DataType,
    /// Reduce operation.
    pub reduce: u8,
    /// Index in the communicator table.
    pub comm: Option<usize>,
    /// Identity of the communicator.
    pub communicator: u64,
    /// Sequence number.
    pub seq: u64,
    /// Number of elements.
    pub count: u64,
    /// Root or peer, -1 for none.
    pub peer: i32,
    /// Tag, -1 for any. `None` if the operation has no tag.
    pub tag: Option<i32>,
    /// Stream, as the caller passed it.
    pub stream: usize,
    /// Key into the name table.
    pub function: u64,
    /// Only for a matrix product or an attention, which have no communicator, sequence number,
    /// count, peer or tag.
    pub matmul: Option<MatmulShape>,
}

impl NewOperation {
    /// An operation without a communicator.
    pub(crate) fn new(kind: OpKind, op: Op) -> Self {
        NewOperation {
            kind,
            op,
            dtype: DataType::Unspecified,
            reduce: 0,
            comm: None,
            communicator: 0,
            seq: 0,
            count: 0,
            peer: -1,
            tag: None,
            stream: 0,
            function: 0,
            matmul: None,
        }
    }

    /// The words that depend on the operation. `group` is the NCCL group that it is launched in.
    #[inline]
    fn words(&self, group: u64) -> Varying {
        if let Some(shape) = &self.matmul {
            return shape.words();
        }
        [
            (op::COMMUNICATOR, self.communicator),
            (op::SEQ, self.seq),
            (op::COUNT, self.count),
            (op::PEER, u64::from(self.peer as u32)),
            (op::GROUP, group),
            (op::TAG, self.tag.map_or(0, |tag| pack_halves(tag as u32, 1))),
        ]
    }

    /// A copy or memset. Its direction has the place of a sequence number; see
    /// [`xpu_timer_proto::ring::copy`].
    pub(crate) fn copy(direction: CopyDirection, bytes: u64) -> Self {
        NewOperation { seq: direction as u64, count: bytes, ..Self::new(OpKind::Kernel, Op::Copy) }
    }
}

/// Size of the table of kernels whose name was requested: twice the name table, so that a lookup
/// ends soon.
const SEEN: usize = name::SLOTS * 2;

/// The recorder of this process.
pub(crate) struct Recorder {
    /// Shared with the collector.
    pub ring: Ring,
    /// Private side of the operation slots.
    pub slots: Box<[Slot]>,
    /// The exchange between each lane's thread and the watcher. The last one is shared by threads
    /// without a lane.
    pub handoffs: Box<[Handoff]>,
    /// Communicators.
    pub comms: CommunicatorTable,
    /// Operations that host threads are executing.
    pub open_calls: OpenCalls,
    /// Spare events.
    pub pools: EventPools,
    /// Number of host threads that are destroying a context; see `runtime::contexts`.
    pub destroying: AtomicU32,
    /// A test injects panics; see `lifecycle::panics`.
    pub injects_panics: AtomicBool,
    /// The calls that get events.
    pub bracketed: Bracketed,
    /// The launches whose Python stacks are read.
    pub stacks: LaunchStacks,
    seen: Box<[AtomicU64]>,
    shared: Shared,
}

/// The calls that get events besides collectives. Every launch reads this word, and writes are
/// rare.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Bracketed {
    /// The kinds, and until when: a word of [`detail`].
    wanted: AtomicU64,
    /// The user's setting, a [`Bracket`].
    mode: AtomicU32,
}

impl Bracketed {
    /// Sets what the user asks for.
    pub(crate) fn set_mode(&self, mode: Bracket) {
        self.mode.store(mode as u32, Ordering::Relaxed);
        self.set_detail(0, 0);
    }

    /// Sets what the collector asks for, a word of [`detail`].
    pub(crate) fn set_detail(&self, asked: u64, now_ns: u64) {
        let is_mode = |mode: Bracket| self.mode.load(Ordering::Relaxed) == mode as u32;
        let always = if is_mode(Bracket::All) {
            detail::KERNELS | detail::MATMULS
        } else if is_mode(Bracket::Matmuls) {
            detail::MATMULS
        } else {
            0
        };
        // When it has expired, a word of 0 is cheaper to read.
        let asked = if !self.is_off() && detail::is_wanted(asked, detail::ALL, now_ns) { asked } else { 0 };
        let wanted = if always == 0 { asked } else { detail::word(u64::MAX, always | asked as u8) };
        self.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Whether a kind of [`detail`] is wanted now.
    #[inline(always)]
    pub(crate) fn is_wanted(&self, kind: u8, now_ns: impl FnOnce() -> u64) -> bool {
        let word = self.wanted.load(Ordering::Relaxed);
        word != 0 && detail::is_wanted(word, kind, now_ns())
    }

    /// Whether nothing gets events, not even a collective.
    #[inline]
    pub(crate) fn is_off(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == Bracket::None as u32
    }
}

/// The launches whose Python stacks are read, and the kinds of operations among them.
#[derive(Default)]
pub(crate) struct LaunchStacks {
    /// Number of launches whose stacks are still to be read. Every operation reads this word.
    left: AtomicU32,
    is_started: AtomicBool,
    seen: OnceLock<Box<[AtomicU64]>>,
}

impl LaunchStacks {
    /// Whether the stack of the next launch is read.
    #[inline(always)]
    pub(crate) fn are_wanted(&self) -> bool {
        self.left.load(Ordering::Relaxed) != 0
    }

    /// Counts a launch. False if enough stacks were read.
    fn count(&self) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

/// Counters that every thread writes, but rarely. They are apart from the data that every launch
/// reads.
#[derive(Default)]
#[repr(align(128))]
struct Shared {
    names: AtomicUsize,
    groups: AtomicU64,
    host_calls: AtomicU64,
    /// Lanes from this index on were never taken.
    lanes: AtomicUsize,
    /// The watcher's heartbeat at the last check whether it is late.
    heartbeat: AtomicU64,
}

#[cfg(test)]
impl Recorder {
    /// A recorder for one test.
    pub(crate) fn for_test() -> &'static Recorder {
        let descriptor: &'static Descriptor = Box::leak(Box::new(Descriptor::none()));
        Box::leak(Box::new(Recorder::create(descriptor).expect("a test can make a ring")))
    }
}

#[cfg(test)]
impl NewOperation {
    /// A barrier on one communicator, for a test.
    pub(crate) fn barrier_for_test(seq: u64) -> NewOperation {
        let barrier = NewOperation::new(OpKind::Collective, Op::Barrier);
        NewOperation { seq, communicator: 5, ..barrier }
    }
}

impl Recorder {
    /// A recorder with an empty ring. It is created on the heap, because the thread of the first
    /// device call may have a very small stack.
    ///
    /// # Errors
    /// When the system has no memory or descriptor for the ring.
    #[inline(never)]
    pub(crate) fn boxed(descriptor: &'static Descriptor) -> io::Result<Box<Self>> {
        Ok(Box::new(Recorder {
            ring: Ring::create(descriptor)?,
            slots: (0..op::SLOTS).map(|_| Slot::default()).collect(),
            handoffs: (0..=lane::SLOTS).map(|_| Handoff::new()).collect(),
            comms: CommunicatorTable::new(),
            open_calls: OpenCalls::new(),
            pools: EventPools::new(),
            destroying: AtomicU32::new(0),
            injects_panics: AtomicBool::new(false),
            bracketed: Bracketed::default(),
            stacks: LaunchStacks::default(),
            seen: (0..SEEN).map(|_| AtomicU64::new(0)).collect(),
            shared: Shared::default(),
        }))
    }

    /// A recorder that is not boxed.
    ///
    /// # Errors
    /// See [`Recorder::boxed`].
    #[cfg(test)]
    pub(crate) fn create(descriptor: &'static Descriptor) -> io::Result<Self> {
        Self::boxed(descriptor).map(|recorder| *recorder)
    }

    /// Increments a word of the header.
    #[inline]
    pub(crate) fn count(&self, header: usize) {
        self.ring.header(header).fetch_add(1, Ordering::Relaxed);
    }
}

/// The process's recorder, if it has started.
#[inline]
pub(crate) fn running() -> Option<&'static Recorder> {
    let recorder = PROCESS.recorder.load(Ordering::Acquire).cast::<Recorder>();
    // SAFETY: null, or a recorder that is never freed.
    unsafe { recorder.as_ref() }
}

/// The words of the ring: a memfd, laid out by `xpu_timer_proto::ring`. They are mapped for the
/// rest of the process's life, because another thread may be writing at any time, and a forked
/// child may still hold a reference.
pub(crate) struct Ring {
    words: &'static [AtomicU64],
    /// The descriptor that the collector receives.
    pub descriptor: &'static Descriptor,
}

/// Bytes of text in a coverage entry.
pub(crate) const COVERAGE_NAME_BYTES: usize = (coverage::WORDS - coverage::NAME) * 8;

/// Bytes of text in a name entry.
pub(crate) const NAME_BYTES: usize = (name::WORDS - name::TEXT) * 8;

impl Ring {
    /// Creates a ring in shared memory, and stores its descriptor in `descriptor`.
    ///
    /// # Errors
    /// When the system has no descriptor or no memory for it.
    pub(crate) fn create(descriptor: &'static Descriptor) -> io::Result<Self> {
        let (fd, memory) = descriptor::shared_memory(offset::END)?;
        descriptor.set(fd)?;
        // SAFETY: the mapping is END bytes, page-aligned, zero, and never unmapped; AtomicU64 has
        // the layout of u64.
        let words = unsafe { std::slice::from_raw_parts(memory.cast::<AtomicU64>(), offset::END / 8) };
        let ring = Ring { words, descriptor };
        ring.header(header::VERSION).store(u64::from(VERSION), Ordering::Relaxed);
        ring.header(header::MAGIC).store(MAGIC, Ordering::Release);
        Ok(ring)
    }

    /// Address of the first word.
    pub(crate) fn words(&self) -> *mut AtomicU64 {
        self.words.as_ptr().cast_mut()
    }

    /// A word of the header.
    #[inline]
    pub(crate) fn header(&self, index: usize) -> &'static AtomicU64 {
        &self.words[index]
    }

    /// Entry `index` of the table at `offset`.
    #[inline]
    pub(crate) fn entry(&self, offset: usize, index: usize, words: usize) -> &'static [AtomicU64] {
        let first = offset / 8 + index * words;
        &self.words[first..first + words]
    }

    /// The words of an operation slot.
    #[inline]
    pub(crate) fn op(&self, slot: usize) -> &'static [AtomicU64; op::WORDS] {
        self.entry(offset::OPS, slot, op::WORDS).try_into().expect("an entry has WORDS words")
    }
}

/// Stores text as words, truncated or padded with zeros.
pub(crate) fn store_text(words: &[AtomicU64], text: &[u8]) {
    let chunks = text.chunks(8).map(|chunk| {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(bytes)
    });
    for (word, value) in words.iter().zip(chunks.chain(std::iter::repeat(0))) {
        word.store(value, Ordering::Relaxed);
    }
}

/// Operations that can be open and watched at the same time. Further ones are only recorded.
pub(crate) const OPEN_CALL_CELLS: usize = store_wait::SLOTS;

/// The open operations of the process. A cell contains a slot plus one, 0 for none.
pub(crate) struct OpenCalls {
    cells: [AtomicU32; OPEN_CALL_CELLS],
}

impl OpenCalls {
    /// An empty table.
    pub(crate) fn new() -> Self {
        OpenCalls { cells: [const { AtomicU32::new(0) }; OPEN_CALL_CELLS] }
    }

    /// The slots of all open operations.
    pub(crate) fn slots(&self) -> impl Iterator<Item = usize> {
        let held = self.cells.iter().map(|cell| cell.load(Ordering::Acquire));
        held.filter_map(|link| Some(link.checked_sub(1)? as usize))
    }

    /// Takes a cell for a slot and returns its number plus one, 0 when there is none. Each thread
    /// begins the search at a different cell.
    pub(crate) fn put(&self, slot: usize, tid: u32) -> usize {
        let link = slot as u32 + 1;
        let order = (0..OPEN_CALL_CELLS).map(|step| (tid as usize + step) % OPEN_CALL_CELLS);
        let free = |cell: &usize| {
            let cell = &self.cells[*cell];
            cell.load(Ordering::Relaxed) == 0
                && cell.compare_exchange(0, link, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        order.into_iter().find(free).map_or(0, |cell| cell + 1)
    }

    /// Frees a cell, by its number plus one.
    pub(crate) fn clear(&self, cell: usize) {
        if let Some(cell) = cell.checked_sub(1).and_then(|cell| self.cells.get(cell)) {
            cell.store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_and_the_collector_decide_which_calls_get_events() {
        const UNTIL_NS: u64 = 1 << 20;
        let bracketed = Bracketed::default();
        let wanted = |now_ns: u64| {
            [detail::KERNELS, detail::COPIES, detail::MATMULS].map(|kind| bracketed.is_wanted(kind, || now_ns))
        };
        bracketed.set_mode(Bracket::Collectives);
        assert_eq!((wanted(0), bracketed.is_off()), ([false; 3], false));
        bracketed.set_detail(detail::word(UNTIL_NS, detail::KERNELS | detail::COPIES), 0);
        assert_eq!((wanted(0), wanted(UNTIL_NS)), ([true, true, false], [false; 3]), "it ends by itself");
        for (mode, always) in [(Bracket::All, [true, false, true]), (Bracket::Matmuls, [false, false, true])] {
            bracketed.set_mode(mode);
            assert_eq!(wanted(UNTIL_NS), always);
            bracketed.set_detail(detail::word(UNTIL_NS, detail::COPIES), 0);
            assert_eq!(wanted(0), [always[0], true, always[2]]);
            bracketed.set_detail(detail::word(UNTIL_NS, detail::COPIES), UNTIL_NS);
            assert_eq!(wanted(UNTIL_NS), always);
        }
        bracketed.set_mode(Bracket::None);
        bracketed.set_detail(detail::word(UNTIL_NS, detail::ALL), 0);
        assert_eq!((wanted(0), bracketed.is_off()), ([false; 3], true));
    }
}
