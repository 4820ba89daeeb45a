//! The flight recorder: the only writer of the ring.
//!
//! Everything here is called from launching threads and takes no lock, allocates nothing and makes no system call; what does
//! not fit is counted. A slot is written by the thread that launched, then handed to the watcher; only the watcher frees it, so a
//! pending operation is never overwritten. Threads that launch in different communicators write no cache line in common.

pub(crate) mod communicator_id;
pub(crate) mod communicator_table;
pub(crate) mod communicators;
pub(crate) mod host_operations;
pub(crate) mod lanes;
#[allow(unsafe_code)]
pub(crate) mod names;
pub(crate) mod open_calls;
pub(crate) mod operations;
pub(crate) mod polled_operations;
#[allow(unsafe_code)]
pub(crate) mod ring;
pub(crate) mod slot_chain;
pub(crate) mod streams;

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use xpu_timer_proto::{
    ring::{lane, name, op},
    v1::{DataType, Op, OpKind},
};

use crate::runtime::{
    lock_free::{event_pools::EventPools, handoff::Handoff, slot::Slot},
    os::{descriptor::Descriptor, process::PROCESS},
    recorder::{communicator_table::CommunicatorTable, open_calls::OpenCalls, ring::Ring},
};

const _: () = assert!(size_of::<Slot>() == 64);

/// The shape of a matrix product, as [`xpu_timer_proto::v1::Matmul`] has it.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MatmulShape {
    pub batch: u32,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub trans_a: u32,
    pub trans_b: u32,
}

/// What is known of an operation when it begins.
pub struct NewOperation {
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
    /// Elements.
    pub count: u64,
    /// Root or peer, -1 for none.
    pub peer: i32,
    /// Tag of a send or receive, -1 for any; `None` where there are no tags.
    pub tag: Option<i32>,
    /// Stream as the library was given it.
    pub stream: usize,
    /// Key into the name table.
    pub function: u64,
    /// Of a matrix product, which has no communicator, number and count.
    pub matmul: Option<MatmulShape>,
}

impl NewOperation {
    /// An operation without communicator.
    pub fn new(kind: OpKind, op: Op) -> Self {
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
}

/// Kernels whose name has been asked for; twice the name table, so that a look-up ends soon.
const SEEN: usize = name::SLOTS * 2;

/// The recorder of this process.
pub struct Recorder {
    /// Shared with the collector.
    pub ring: Ring,
    /// Private side of the operation slots.
    pub slots: Box<[Slot]>,
    /// What passes between each lane's thread and the watcher; the last one is for threads without a lane.
    pub handoffs: Box<[Handoff]>,
    /// Communicators.
    pub comms: CommunicatorTable,
    /// What host threads are inside of.
    pub open_calls: OpenCalls,
    /// Spare events.
    pub pools: EventPools,
    /// A test asked for panics; see [`crate::runtime::lifecycle::panic_injection`].
    pub inject: AtomicBool,
    /// What is bracketed; see [`crate::runtime::lifecycle::config::Bracket`].
    pub bracket: AtomicU32,
    seen: Box<[AtomicU64]>,
    shared: Shared,
}

/// Numbers that all threads write, each seldom, apart from what they read at every launch.
#[derive(Default)]
#[repr(align(128))]
struct Shared {
    names: AtomicUsize,
    groups: AtomicU64,
    host_calls: AtomicU64,
    /// No lane from here on was ever taken.
    lanes: AtomicUsize,
    /// The watcher's heartbeat when its lateness was looked at last.
    heartbeat: AtomicU64,
}

impl Recorder {
    /// A recorder with an empty ring. On the heap at once: the first device call may be made on the smallest stack.
    ///
    /// # Errors
    /// When there is no memory or descriptor for the ring.
    #[inline(never)]
    pub fn boxed(descriptor: &'static Descriptor) -> io::Result<Box<Self>> {
        Ok(Box::new(Recorder {
            ring: Ring::create(descriptor)?,
            slots: (0..op::SLOTS).map(|_| Slot::default()).collect(),
            handoffs: (0..=lane::SLOTS).map(|_| Handoff::new()).collect(),
            comms: CommunicatorTable::new(),
            open_calls: OpenCalls::new(),
            pools: EventPools::new(),
            inject: AtomicBool::new(false),
            bracket: AtomicU32::new(0),
            seen: (0..SEEN).map(|_| AtomicU64::new(0)).collect(),
            shared: Shared::default(),
        }))
    }

    /// The same, not on the heap.
    ///
    /// # Errors
    /// As above.
    #[cfg(test)]
    pub fn create(descriptor: &'static Descriptor) -> io::Result<Self> {
        Self::boxed(descriptor).map(|recorder| *recorder)
    }

    /// Adds one to a word of the header.
    #[inline]
    pub fn count(&self, header: usize) {
        self.ring.header(header).fetch_add(1, Ordering::Relaxed);
    }
}

/// The process's recorder if it has started.
#[inline]
pub fn running() -> Option<&'static Recorder> {
    let recorder = PROCESS.recorder.load(Ordering::Acquire).cast::<Recorder>();
    // SAFETY: null, or a recorder that is never freed.
    unsafe { recorder.as_ref() }
}
