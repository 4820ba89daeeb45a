//! Layout of the ring: the words of the header and of each table, and the offsets of the tables.
//! The functions pack and read the words.

use std::io;

use crate::v1::{DataType, Op, OpKind};

/// Version of the layout. It changes with every change of a constant below.
pub const VERSION: u32 = 12;

/// Bytes of two cache lines, which processors fetch together. Words that one thread writes often
/// share no such pair with words of another thread: a collective costs 40 ns more otherwise.
pub(super) const LINE_PAIR: usize = 128;
/// First word of every ring: `XPURING1` in ASCII.
pub const MAGIC: u64 = u64::from_le_bytes(*b"XPURING1");

/// Indexes of the header's words. The watcher's words, those shared by threads without a lane, and
/// the tickets are on separate cache lines, two apart because processors fetch lines in pairs.
pub mod header {
    /// [`super::MAGIC`], stored last when the ring is initialized.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`].
    pub const VERSION: usize = 1;
    /// Last iteration of the watcher thread, CLOCK_MONOTONIC nanoseconds; 0 before the first.
    pub const HEARTBEAT_NS: usize = 2;
    /// Driver call that the watcher is executing: an index into [`super::WATCHER_CALLS`], 0 for
    /// none.
    pub const WATCHER_CALL: usize = 3;
    /// When the watcher entered that call.
    pub const WATCHER_SINCE_NS: usize = 4;
    /// Number of events that the hook keeps for reuse.
    pub const SPARE_EVENTS: usize = 5;
    /// Number of seccomp filters that the process had when the hook was loaded.
    pub const FILTERS_AT_LOAD: usize = 6;
    /// Bits of [`super::filtered`] that the hook has observed itself.
    pub const FILTERS_SEEN: usize = 7;
    /// Thread id of the watcher; 0 before its first iteration.
    pub const WATCHER_TID: usize = 8;
    /// 1 when the process ends normally. A process under a seccomp filter cannot send
    /// [`crate::v1::Goodbye`].
    pub const GOODBYE: usize = 9;
    /// When the watcher last read the clocks of host and device together, CLOCK_MONOTONIC
    /// nanoseconds. While it is 0, [`super::op::STARTED_NS`] and [`super::op::COMPLETED_NS`] are
    /// late by up to 0.1 s.
    pub const ALIGNED_NS: usize = 10;
    /// Number of launches whose Python stacks are read; 0 if no stacks are wanted.
    pub const STACKS_WANTED: usize = 11;
    /// Number of [`super::stack`] entries in use. The last ones may not be published yet.
    pub const STACKS: usize = 12;
    /// Last launch, copy, memset or return from a synchronization of a thread without a
    /// [`super::lane`].
    pub const LAST_LAUNCH_NS: usize = 16;
    /// Operations that found no free slot.
    pub const DROPPED: usize = 17;
    /// Kernels launched by threads without a [`super::lane`].
    pub const KERNELS: usize = 18;
    /// Graphs launched by threads without a [`super::lane`].
    pub const GRAPHS: usize = 19;
    /// Collectives launched by threads without a [`super::lane`], and those that run on host
    /// threads.
    pub const COLLECTIVES: usize = 20;
    /// Panics caught in the hook.
    pub const PANICS: usize = 21;
    /// Entries that did not fit into the communicator, stream, name or coverage table.
    pub const OVERFLOWS: usize = 22;
    /// The next ticket of the table of [`crate::ring::span`].
    pub const SPANS: usize = 24;
    /// The next free ticket. Threads that launch concurrently take several at once and leave some
    /// unused.
    pub const OPS: usize = 32;
    /// Written by the collector: when it last read the ring, CLOCK_MONOTONIC nanoseconds.
    pub const COLLECTOR_NS: usize = 48;
    /// Written by the collector: bits of [`super::filtered`].
    pub const FILTERED: usize = 49;
    /// Written by the collector: see [`crate::ring::detail`].
    pub const DETAIL: usize = 50;
    /// Written by the collector: first of the words of [`super::FrameLayout`], which is written
    /// last.
    pub const FRAME_LAYOUT: usize = 51;
    /// Number of words in the header.
    pub const WORDS: usize = 64;
}

/// Bits for the threads that got seccomp filters after the hook was loaded.
pub mod filtered {
    /// Threads of the program.
    pub const PROGRAM: u32 = 1;
    /// The watcher.
    pub const WATCHER: u32 = 2;
}

/// Names of the driver calls that the watcher records in [`header::WATCHER_CALL`].
pub const WATCHER_CALLS: [&str; 11] = [
    "",
    "cuCtxSetCurrent",
    "cuEventQuery",
    "cuEventElapsedTime",
    "ncclCommGetAsyncError",
    "cuFuncGetName",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuStreamCreate",
];

/// Words of an operation slot.
pub mod op {
    /// Ticket plus one; 0 while the slot is free or being overwritten.
    pub const TICKET: usize = 0;
    /// Bits 0-7 [`crate::v1::OpKind`], 8-15 [`crate::v1::Op`], 16-23 [`crate::v1::DataType`], 24-31
    /// reduce op, 32-63 thread id.
    pub const WHAT: usize = 1;
    /// Identity of the communicator, 0 for none. A host call that creates one stores it once it is
    /// known.
    pub const COMMUNICATOR: usize = 2;
    /// Sequence number within the communicator.
    pub const SEQ: usize = 3;
    /// Elements.
    pub const COUNT: usize = 4;
    /// Root or peer as i32 in the low half (-1 none), and the [`super::pack_channels`] of a
    /// collective in the high half.
    pub const PEER: usize = 5;
    /// Stream handle.
    pub const STREAM: usize = 6;
    /// Host entry, CLOCK_MONOTONIC nanoseconds.
    pub const ENTERED_NS: usize = 7;
    /// Host return.
    pub const RETURNED_NS: usize = 8;
    /// When the start event completed, or when it was seen complete: see
    /// [`super::header::ALIGNED_NS`].
    pub const STARTED_NS: usize = 9;
    /// When the end event completed, or when it was seen complete.
    pub const COMPLETED_NS: usize = 10;
    /// Low half [`crate::v1::OpStatus`], high half the driver's error code.
    pub const STATUS: usize = 11;
    /// Device time between the events.
    pub const DEVICE_NS: usize = 12;
    /// Function handle of a kernel, key into the name table; 0 for none.
    pub const FUNCTION: usize = 13;
    /// NCCL group it was launched in; 0 for none.
    pub const GROUP: usize = 14;
    /// Tag as i32 in the low half, and 1 in the high half when the operation has one.
    pub const TAG: usize = 15;
    /// Number of words in a slot.
    pub const WORDS: usize = 16;
    /// Number of slots. A slot of a pending operation is never overwritten: the new operation is
    /// dropped and counted.
    pub const SLOTS: usize = 8192;
}

/// Words of a slot whose operation is a matrix product. It has no communicator, peer, group or tag,
/// so these words contain its shape.
pub mod matmul {
    use super::op;
    /// Low half m, high half n.
    pub const M_N: usize = op::COMMUNICATOR;
    /// Low half k, high half the batch.
    pub const K_BATCH: usize = op::SEQ;
    /// Bits 0-7 transposition of A, 8-15 of B (cublasOperation_t), 16 whether the algorithm is
    /// known; high half the algorithm as i32.
    pub const TRANSPOSES_ALGORITHM: usize = op::COUNT;
    /// Leading dimension of A in the low half, of B in the high half.
    pub const LDA_LDB: usize = op::PEER;
    /// Leading dimension of C in the low half, its stride in the high half.
    pub const LDC_STRIDE_C: usize = op::GROUP;
    /// Stride of A in the low half, of B in the high half.
    pub const STRIDES_A_B: usize = op::TAG;
    /// The bit of [`TRANSPOSES_ALGORITHM`] for a known algorithm.
    pub const HAS_ALGORITHM: u32 = 1 << 16;
}

/// Words of a slot whose operation is a kernel.
pub mod launch {
    use super::op;
    /// Grid: x in the low half, y in the next 16 bits, z in the highest 16 bits. 0 if the launch
    /// configuration is unknown.
    pub const GRID: usize = op::COMMUNICATOR;
    /// Block, in the same way.
    pub const BLOCK: usize = op::SEQ;
}

/// Words of a slot whose operation is a copy. [`op::COUNT`] is its number of bytes.
pub mod copy {
    use super::op;
    /// [`crate::v1::CopyDirection`].
    pub const DIRECTION: usize = op::SEQ;
}

/// How far the coarse clock lags behind the exact one: one kernel tick, which is 1 to 10 ms.
pub const COARSE_TICK_NS: u64 = 10_000_000;

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
    /// Highest sequence number seen started on the device. It is on the cache line that the watcher
    /// writes.
    pub const STARTED: usize = 8;
    /// Highest sequence number seen completed on the device.
    pub const COMPLETED: usize = 9;
    /// Another identity that other ranks have for it; 0 for none. Its children are then
    /// [`child_id()`](crate::ring::child_id()) of either.
    pub const ALIAS: usize = 10;
    /// 1 if the identity comes from a random id, which no other job has. Otherwise other jobs may
    /// have communicators with this identity.
    pub const UNIQUE: usize = 11;
    /// The last asynchronous error that the library returned for it, an ncclResult_t; 0 for none.
    pub const ASYNC_ERROR: usize = 12;
    /// Number of words in an entry.
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
    /// Launch time of the last kernel on the coarse clock: see [`super::COARSE_TICK_NS`].
    pub const LAST_NS: usize = 3;
    /// Number of words in an entry.
    pub const WORDS: usize = 4;
    /// Number of entries.
    pub const SLOTS: usize = 256;
}

/// Words of a kernel entry: the launches of one kernel on one stream.
pub mod kernel {
    /// Function handle, key into the name table, published last; 0 is a free entry.
    pub const FUNCTION: usize = 0;
    /// Stream handle plus one.
    pub const STREAM: usize = 1;
    /// Number of launches, including captured ones.
    pub const LAUNCHES: usize = 2;
    /// 1 if the kernel communicates with other ranks by itself; see [`crate::kernels`].
    pub const COMMUNICATES: usize = 3;
    /// Number of words in an entry.
    pub const WORDS: usize = 4;
}

/// Words of a name entry: the name of a kernel by its function handle.
pub mod name {
    /// Function handle, published last; 0 is a free entry.
    pub const FUNCTION: usize = 0;
    /// First word of the name: UTF-8 bytes, zero-padded, cut at 8 x 31 bytes.
    pub const TEXT: usize = 1;
    /// Number of words in an entry.
    pub const WORDS: usize = 32;
    /// Number of entries.
    pub const SLOTS: usize = 2048;
}

/// Words of the entry with the keys that a call waits for in a store. An open call has an entry of
/// its own.
pub mod store_wait {
    /// Ticket of the call plus one, published last; 0 is a free entry.
    pub const TICKET: usize = 0;
    /// Number of keys.
    pub const KEYS: usize = 1;
    /// First word of the keys: UTF-8 bytes, each key ended by a zero byte, as many keys as fit into
    /// 8 x 30 bytes. The first one is cut if it does not fit.
    pub const TEXT: usize = 2;
    /// Number of words in an entry.
    pub const WORDS: usize = 32;
    /// Number of entries: one for each call that can be open and watched at the same time.
    pub const SLOTS: usize = 256;
}

/// Words of the Python stack of a launch. An entry is written once.
pub mod stack {
    /// Ticket of the operation plus one, published last; 0 is a free entry.
    pub const TICKET: usize = 0;
    /// Number of frames.
    pub const FRAMES: usize = 1;
    /// The frames, innermost first, with two words each: the address of the code object, and the
    /// last instruction as the frame stores it.
    pub const FIRST: usize = 2;
    /// Maximum number of frames.
    pub const MOST_FRAMES: usize = (WORDS - FIRST) / 2;
    /// Number of words in an entry.
    pub const WORDS: usize = 256;
    /// Number of entries.
    pub const SLOTS: usize = 512;
}

/// Words of the text that a process wrote last to its standard error. There is one for the process
/// itself and one for its forked children, which have no ring of their own. A third one has the
/// uncaught exceptions of Python.
pub mod stderr {
    /// Bytes of text so far, including those that were overwritten.
    pub const BYTES: usize = 0;
    /// When the last text was written, CLOCK_MONOTONIC nanoseconds.
    pub const LAST_NS: usize = 1;
    /// First word of the text. Byte number n of all text is at n modulo [`TEXT_BYTES`].
    pub const TEXT: usize = 8;
    /// Bytes of text that are kept.
    pub const TEXT_BYTES: usize = 8192;
    /// Number of words in an entry.
    pub const WORDS: usize = TEXT + TEXT_BYTES / 8;
    /// Entry of the process.
    pub const OWN: usize = 0;
    /// Entry of its forked children.
    pub const CHILDREN: usize = 1;
    /// Entry of the exceptions of the process that nobody caught, each as Python prints it. It is
    /// empty if the hook does not listen to them.
    pub const UNCAUGHT: usize = 2;
    /// Number of entries.
    pub const SLOTS: usize = 3;
}

/// Words of a fatal signal that a thread of the process has received.
pub mod fault {
    /// Number of faults so far, published last. A fault that a handler of the program survives is
    /// overwritten by the next one.
    pub const COUNT: usize = 0;
    /// Number of the signal.
    pub const SIGNAL: usize = 1;
    /// `si_code`.
    pub const CODE: usize = 2;
    /// Thread that received it, by its id in the PID namespace of the process.
    pub const TID: usize = 3;
    /// `si_addr`.
    pub const ADDRESS: usize = 4;
    /// Written by the collector: the [`COUNT`] whose stack it has read. The thread waits for it.
    pub const READ: usize = 5;
    /// First of the registers at the fault, in the kernel's order for samples: ax, bx, cx, dx, si,
    /// di, bp, sp, ip, r8 to r15.
    pub const REGISTERS: usize = 8;
    /// Number of registers.
    pub const REGISTER_COUNT: usize = 17;
    /// Number of words.
    pub const WORDS: usize = 32;
}

/// Words of a coverage entry: a function that the hook knows.
pub mod coverage {
    /// Layer in the low byte ([`LAYERS`], from 1), status in the next ([`STATUSES`]); published
    /// last, 0 is a free entry.
    pub const STATUS: usize = 0;
    /// Calls seen.
    pub const CALLS: usize = 1;
    /// First word of the name: ASCII bytes, zero-padded, cut at 8 x 6 bytes.
    pub const NAME: usize = 2;
    /// Number of words in an entry.
    pub const WORDS: usize = 8;
    /// Number of entries.
    pub const SLOTS: usize = 1280;
    /// Names of the layers.
    pub const LAYERS: [&str; 6] = ["", "nccl", "driver", "runtime", "cublas", "host"];
    /// Reasons why a function is not hooked; empty if it is hooked.
    pub const STATUSES: [&str; 7] = [
        "",
        "the library is not loaded",
        "the library does not have it",
        "the program never looked it up",
        "a library has its own copy, whose code cannot be replaced, so calls inside it are not seen",
        "its kernels run, but no call of it is seen: it is statically linked without symbols, or called without the linker",
        "the library is not loaded; if it is loaded later and is bound to itself, it is not seen, because the linker does not report it",
    ];
}

/// Words of a lane: see [`super::lane`].
pub(super) mod lane {
    use super::coverage;

    /// Thread id of the lane's owner; 0 for a free lane.
    pub const OWNER: usize = 0;
    /// Its last launch, copy, memset or return from a synchronization.
    pub const LAST_LAUNCH_NS: usize = 1;
    /// Kernels launched.
    pub const KERNELS: usize = 2;
    /// Graphs launched.
    pub const GRAPHS: usize = 3;
    /// First of [`COPY_KINDS`] words: memory copies by direction.
    pub const COPIES: usize = 4;
    /// First of [`COPY_KINDS`] words: copied bytes by direction.
    pub const COPY_BYTES: usize = 9;
    /// Bytes requested from functions that allocate device memory or pinned host memory.
    pub const ALLOCATED_BYTES: usize = 14;
    /// Number of launches whose hook cost was measured.
    pub const LAUNCH_SAMPLES: usize = 15;
    /// Nanoseconds of these samples.
    pub const LAUNCH_COST_NS: usize = 16;
    /// Number of collective library calls whose hook cost was measured, including their two event
    /// records.
    pub const COLLECTIVE_SAMPLES: usize = 17;
    /// Nanoseconds of these samples.
    pub const COLLECTIVE_COST_NS: usize = 18;
    /// Number of samples of both kinds that took more than [`LONG_NS`] and are not in the words
    /// above: the thread was interrupted, or the hook did something for the first time.
    pub const LONG_SAMPLES: usize = 19;
    /// Nanoseconds of these samples.
    pub const LONG_COST_NS: usize = 20;
    /// Collectives launched.
    pub const COLLECTIVES: usize = 21;
    /// Launches of kernels that found no space in the lane's table of kernels.
    pub const UNCOUNTED: usize = 22;
    /// Bytes of device memory that were allocated minus those that were freed. A thread may free
    /// what another one has allocated, so only the wrapping sum of all lanes has a meaning.
    pub const DEVICE_BYTES: usize = 23;
    /// Number of words in a lane. Like the other tables of a lane, it is a multiple of
    /// [`super::LINE_PAIR`].
    pub const WORDS: usize = 32;
    /// Number of lanes.
    pub const SLOTS: usize = 64;

    /// Number of stream entries of a lane, laid out as [`super::stream`]. A thread with more
    /// streams uses the shared table.
    pub const STREAMS: usize = 14;
    /// Number of words in a lane's stream entries.
    pub const STREAM_WORDS: usize = 64;
    /// Number of words in a lane's call counters: one for each hooked function, by the index of its
    /// coverage entry.
    pub const CALL_WORDS: usize = coverage::SLOTS;

    /// Number of sets in a lane's table of kernels. The stream and the kernel select the set.
    pub const KERNEL_SETS: usize = 256;
    /// Number of [`super::kernel`] entries in a set: one pair of cache lines.
    pub const KERNEL_WAYS: usize = 4;

    /// Longer samples of the hook's cost have another reason than the hook.
    pub const LONG_NS: u64 = 20_000;

    /// Names of the copy directions: cudaMemcpyKind 0 to 3, and all others.
    pub const COPY_KINDS: [&str; 5] = ["H2H", "H2D", "D2H", "D2D", "Unknown"];
}

/// Words of a call of a traced function, and of the function itself: see [`super::span`].
pub(super) mod span {
    /// Ticket plus one, published last; 0 while the slot is overwritten.
    pub const TICKET: usize = 0;
    /// Index of the function among those of [`function`] in the low half, thread id in the high
    /// half.
    pub const WHAT: usize = 1;
    /// When the call began, CLOCK_MONOTONIC nanoseconds.
    pub const BEGAN_NS: usize = 2;
    /// When it ended.
    pub const ENDED_NS: usize = 3;
    /// Generation of a garbage collection plus one; 0 for a function.
    pub const GENERATION: usize = 4;
    /// Objects of a garbage collection: collected ones in the low half, uncollectable ones in the
    /// high half.
    pub const OBJECTS: usize = 5;
    /// Number of words in a slot.
    pub const WORDS: usize = 8;
    /// Number of slots. The newest spans overwrite the oldest ones.
    pub const SLOTS: usize = 8192;

    /// Words of the entry of a traced function.
    pub mod function {
        /// Bytes of the name, published last; 0 is a free entry.
        pub const NAME_BYTES: usize = 0;
        /// Number of calls that have ended.
        pub const CALLS: usize = 1;
        /// Their time in nanoseconds.
        pub const TOTAL_NS: usize = 2;
        /// First word of the name: UTF-8 bytes, zero-padded, cut at 8 x 29 bytes.
        pub const NAME: usize = 3;
        /// Number of words in an entry.
        pub const WORDS: usize = 32;
        /// Number of entries.
        pub const SLOTS: usize = 128;
    }
}

/// Byte offsets of the tables.
pub mod offset {
    use super::{comm, coverage, fault, header, kernel, lane, name, op, span, stack, stderr, store_wait, stream};
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
    /// Keys that open calls wait for.
    pub const STORE_WAITS: usize = LANE_CALLS + lane::SLOTS * lane::CALL_WORDS * 8;
    /// Kernel entries of the lanes.
    pub const LANE_KERNELS: usize = STORE_WAITS + store_wait::SLOTS * store_wait::WORDS * 8;
    /// Python stacks of launches.
    pub const STACKS: usize = LANE_KERNELS + lane::SLOTS * lane::KERNEL_SETS * lane::KERNEL_WAYS * kernel::WORDS * 8;
    /// Last text on standard error.
    pub const STDERR: usize = STACKS + stack::SLOTS * stack::WORDS * 8;
    /// Fatal signal.
    pub const FAULT: usize = STDERR + stderr::SLOTS * stderr::WORDS * 8;
    /// Calls of traced Python functions.
    pub const SPANS: usize = FAULT + fault::WORDS * 8;
    /// Traced Python functions.
    pub const TRACED: usize = SPANS + span::SLOTS * span::WORDS * 8;
    /// Size of the memfd in bytes.
    pub const END: usize = TRACED + span::function::SLOTS * span::function::WORDS * 8;

    const _: () = {
        let tables = [
            (LANES, lane::WORDS),
            (OPS, op::WORDS),
            (COMMS, comm::WORDS),
            (LANE_STREAMS, lane::STREAM_WORDS),
            (LANE_CALLS, lane::CALL_WORDS),
            (LANE_KERNELS, lane::KERNEL_WAYS * kernel::WORDS),
        ];
        let mut index = 0;
        while index < tables.len() {
            let (offset, words) = tables[index];
            assert!(offset % super::LINE_PAIR == 0 && words * 8 % super::LINE_PAIR == 0);
            index += 1;
        }
    };
}

/// Where the interpreter of a process keeps its threads and their frames: an address and offsets in
/// bytes. The collector determines them, and the hook follows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameLayout {
    /// Address of `_PyRuntime`.
    pub runtime: u64,
    /// The list of interpreters in it.
    pub interpreters: u16,
    /// PyInterpreterState: the next interpreter, and the list of threads.
    pub interpreter_next: u16,
    /// As above.
    pub threads: u16,
    /// PyThreadState: the next thread, the result of pthread_self in it, and its innermost frame.
    pub thread_next: u16,
    /// As above.
    pub thread_id: u16,
    /// As above. If there is a `cframe_frame`, this is a pointer to the structure with the frame.
    pub thread_frame: u16,
    /// The frame in that structure.
    pub cframe_frame: Option<u16>,
    /// The frame that called a frame.
    pub frame_previous: u16,
    /// The code object of a frame. The lowest three bits of the pointer do not count.
    pub frame_code: u16,
    /// The last instruction of a frame.
    pub frame_instruction: u16,
    /// Size of the last instruction in bytes.
    pub instruction_bytes: u16,
    /// A byte of a frame. If it is [`FrameLayout::FIRST_C_OWNER`] or more, the frame has no code.
    pub frame_owner: Option<u16>,
}

impl FrameLayout {
    /// Number of words, from [`header::FRAME_LAYOUT`] on.
    pub const WORDS: usize = 4;
    /// `FRAME_OWNED_BY_CSTACK`; from 3.14 on, `FRAME_OWNED_BY_INTERPRETER`.
    pub const FIRST_C_OWNER: u8 = 3;

    /// Its words. The first one is 0 in a header without a layout, so it must be written last.
    #[must_use]
    pub fn words(&self) -> [u64; Self::WORDS] {
        let word = |parts: [u16; 4]| parts.into_iter().rev().fold(0, |word, part| word << 16 | u64::from(part));
        let optional = |offset: Option<u16>| offset.map_or(0, |offset| offset.saturating_add(1));
        [
            self.runtime,
            word([self.interpreters, self.interpreter_next, self.threads, self.thread_next]),
            word([self.thread_id, self.thread_frame, optional(self.cframe_frame), self.frame_previous]),
            word([self.frame_code, self.frame_instruction, self.instruction_bytes, optional(self.frame_owner)]),
        ]
    }

    /// The layout in these words, if they have one.
    #[must_use]
    pub fn new([runtime, first, second, third]: [u64; Self::WORDS]) -> Option<Self> {
        let part = |word: u64, index: u32| (word >> (16 * index)) as u16;
        (runtime != 0).then(|| FrameLayout {
            runtime,
            interpreters: part(first, 0),
            interpreter_next: part(first, 1),
            threads: part(first, 2),
            thread_next: part(first, 3),
            thread_id: part(second, 0),
            thread_frame: part(second, 1),
            cframe_frame: part(second, 2).checked_sub(1),
            frame_previous: part(second, 3),
            frame_code: part(third, 0),
            frame_instruction: part(third, 1),
            instruction_bytes: part(third, 2),
            frame_owner: part(third, 3).checked_sub(1),
        })
    }
}

/// Packs [`op::WHAT`].
#[must_use]
pub fn pack_what(kind: OpKind, op: Op, dtype: DataType, reduce_op: u8, tid: u32) -> u64 {
    kind as u64 | (op as u64) << 8 | (dtype as u64) << 16 | u64::from(reduce_op) << 24 | u64::from(tid) << 32
}

/// Packs two halves into a word, as in [`comm::SIZE_RANK`], [`comm::STATE_DEVICE`] and
/// [`op::STATUS`].
#[must_use]
pub fn pack_halves(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Bytes of a table that are read with one call: a part of the processor's nearest cache.
const PIECE_BYTES: usize = 8192;

/// The published entries of one table. Parts with such entries are read twice, and an entry whose
/// first word changed in between is omitted.
pub(super) fn entries<const WORDS: usize>(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    slots: usize,
) -> io::Result<Vec<[u64; WORDS]>> {
    read_entries(read_at, start, slots, false)
}

/// As [`entries`], for a table that is filled in order: behind a part without entries, there are
/// none.
pub(super) fn leading_entries<const WORDS: usize>(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    slots: usize,
) -> io::Result<Vec<[u64; WORDS]>> {
    read_entries(read_at, start, slots, true)
}

fn read_entries<const WORDS: usize>(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    slots: usize,
    is_filled_in_order: bool,
) -> io::Result<Vec<[u64; WORDS]>> {
    let at_once = PIECE_BYTES / 8 / WORDS;
    let mut piece = vec![[0; WORDS]; at_once.min(slots)];
    let mut again = piece.clone();
    let mut published = Vec::new();
    for first in (0..slots).step_by(at_once) {
        let count = at_once.min(slots - first);
        let (at, piece, again) = (start + first * WORDS * 8, &mut piece[..count], &mut again[..count]);
        read_into(read_at, at, piece)?;
        if piece.iter().all(|entry| entry[0] == 0) {
            if is_filled_in_order {
                break;
            }
            continue;
        }
        read_into(read_at, at, again)?;
        let both = piece.iter().zip(again.iter());
        published.extend(both.filter(|(entry, again)| entry[0] != 0 && entry[0] == again[0]).map(|(entry, _)| *entry));
    }
    Ok(published)
}

/// Fills words, or entries of several words, from a byte offset.
pub(super) fn read_into<T: bytemuck::Pod>(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    target: &mut [T],
) -> io::Result<()> {
    // A ring is read on the machine that writes it, so its words have the byte order of this one.
    read_at(start as u64, bytemuck::cast_slice_mut(target))
}

pub(super) fn read_word(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>, start: usize) -> io::Result<u64> {
    let mut word = [0];
    read_into(read_at, start, &mut word)?;
    Ok(word[0])
}

pub(super) fn read_words(
    read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>,
    start: usize,
    words: usize,
) -> io::Result<Vec<u64>> {
    let mut words = vec![0; words];
    read_into(read_at, start, &mut words)?;
    Ok(words)
}

/// The text in words, up to a zero byte.
pub(super) fn text(words: &[u64]) -> String {
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// The texts in words that end each text with a zero byte.
pub(super) fn texts(words: &[u64]) -> Vec<String> {
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let texts = bytes.split(|byte| *byte == 0).take_while(|text| !text.is_empty());
    texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect()
}

/// Packs a grid or a block, as in [`launch::GRID`] and [`launch::BLOCK`]. Larger dimensions are
/// clamped.
#[must_use]
pub fn pack_dimensions([x, y, z]: [u32; 3]) -> u64 {
    let clamped = |size: u32| u64::from(size.min(0xffff));
    u64::from(x.min(0x7fff_ffff)) | clamped(y) << 32 | clamped(z) << 48
}

/// Packs the size of a collective's kernel into 32 bits: the blocks of its grid, which are its
/// channels, in the low half, and the threads of a block in the high half. Larger sizes are
/// clamped.
#[must_use]
pub fn pack_channels(blocks: u32, threads: u32) -> u32 {
    blocks.min(0xffff) | threads.min(0xffff) << 16
}

/// The dimensions in a word of [`pack_dimensions`].
pub(super) fn dimensions(word: u64) -> [u32; 3] {
    [low(word), high(word) & 0xffff, high(word) >> 16]
}

pub(super) fn low(word: u64) -> u32 {
    word as u32
}

pub(super) fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Odd, so that multiplication by it can be inverted.
const CHILD_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// The identity of a communicator that is created from another one. `key` distinguishes it from
/// other children and is equal on all ranks. If a parent has two identities, so has its child;
/// [`key_of_child`] shows that both are the same child.
#[must_use]
pub fn child_id(parent: u64, key: u64) -> u64 {
    parent.wrapping_mul(CHILD_FACTOR).wrapping_add(key)
}

/// The key from which [`child_id`] made a child of this parent.
#[must_use]
pub fn key_of_child(parent: u64, child: u64) -> u64 {
    child.wrapping_sub(parent.wrapping_mul(CHILD_FACTOR))
}

/// The file with the random id of the machine's current boot.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The number of seccomp filters of a thread, from the bytes of its `/proc/PID/status`.
#[must_use]
pub fn filters(status: &[u8]) -> u32 {
    let field = |name: &[u8]| {
        let value = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))?;
        std::str::from_utf8(value).ok()?.trim().parse::<u32>().ok()
    };
    // Kernels before 5.9 do not report the number.
    field(b"Seccomp_filters:").or_else(|| field(b"Seccomp:")).unwrap_or(0)
}

/// Detail on demand: the collector asks the hook to record every kernel, copy or matrix product as
/// an operation with events, for a limited time.
///
/// The collector writes [`detail::word`] into [`header::DETAIL`]. The hook's watcher takes it over
/// within a third of a second. Detail ends at its time, also if the collector has ended meanwhile.
pub mod detail {
    use super::header;

    /// Kernels, with their launch configuration.
    pub const KERNELS: u8 = 1;
    /// Memory copies and memsets.
    pub const COPIES: u8 = 2;
    /// Matrix products and attentions with a known shape.
    pub const MATMULS: u8 = 4;
    /// All kinds.
    pub const ALL: u8 = KERNELS | COPIES | MATMULS;

    /// The bits of the word that contain the kinds. The other bits are those of the time.
    const KINDS: u64 = 0xff;

    /// Index of the header's word that [`word`] is written to.
    pub const HEADER: usize = header::DETAIL;

    /// The word that asks for detail of some kinds until a time: CLOCK_MONOTONIC nanoseconds, with
    /// a resolution of 256. A word of 0 ends it.
    #[must_use]
    pub fn word(until_ns: u64, kinds: u8) -> u64 {
        until_ns & !KINDS | u64::from(kinds & ALL)
    }

    /// Whether a word asks for detail of a kind at this time.
    #[inline]
    #[must_use]
    pub fn is_wanted(word: u64, kind: u8, now_ns: u64) -> bool {
        word & u64::from(kind) != 0 && now_ns < word & !KINDS
    }
}

#[cfg(test)]
mod tests {
    use super::{FrameLayout, child_id, filters, key_of_child};

    #[test]
    fn a_layout_is_read_as_it_was_written() {
        let layout = FrameLayout {
            runtime: 0x7f00_1234_5678,
            interpreters: 1,
            interpreter_next: 2,
            threads: 0xfff0,
            thread_next: 4,
            thread_id: 5,
            thread_frame: 6,
            cframe_frame: Some(0),
            frame_previous: 8,
            frame_code: 0,
            frame_instruction: 10,
            instruction_bytes: 8,
            frame_owner: None,
        };
        let other = FrameLayout { cframe_frame: None, frame_owner: Some(70), ..layout };
        for layout in [layout, other] {
            assert_eq!(FrameLayout::new(layout.words()), Some(layout));
        }
        assert_eq!(FrameLayout::new([0; FrameLayout::WORDS]), None);
    }

    #[test]
    fn the_key_of_a_child_follows_from_the_two_identities() {
        let keys = [0, 1, 0xfeed_beef_0000_0001, u64::MAX];
        let parents = [1, 7, 0x1234_5678_9abc_def0, u64::MAX];
        for (parent, key) in parents.into_iter().flat_map(|parent| keys.map(|key| (parent, key))) {
            assert_eq!(key_of_child(parent, child_id(parent, key)), key);
        }
        // The identity of a grandchild depends on the order of the keys.
        assert_ne!(child_id(child_id(7, 3), 5), child_id(child_id(7, 5), 3));
    }

    #[test]
    fn filters_are_counted_from_proc_status() {
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t3\nSpeculation:\t1\n"), 3);
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t2\nSpeculation:\t1\n"), 2);
        assert_eq!(filters(b"Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\n"), 0);
        assert_eq!((filters(b"Seccomp_filters:\tmany"), filters(b"")), (0, 0));
    }

    #[test]
    fn detail_is_wanted_of_its_kinds_until_its_time() {
        use super::detail::{COPIES, KERNELS, MATMULS, is_wanted, word};

        let until_ns = 5_000_000_000;
        let word = word(until_ns, KERNELS | MATMULS);
        assert!(is_wanted(word, KERNELS, until_ns - 256) && is_wanted(word, MATMULS, 0));
        assert!(!is_wanted(word, COPIES, 0) && !is_wanted(word, KERNELS, until_ns));
        assert!([KERNELS, COPIES, MATMULS].iter().all(|kind| !is_wanted(0, *kind, 0)));
        assert!(is_wanted(super::detail::word(u64::MAX, 0xff), COPIES, u64::MAX / 2));
    }
}
