//! The chain of frames of a thread, and the Python stack that is read from it.

use std::time::Instant;

use xpu_timer_proto::{
    ring::FrameLayout,
    server::{PyException, PySpyFrame, PySuspended},
};

use crate::{
    cpython::Layout,
    memory::{ReadError, Snapshot},
};

use super::threads::ThreadState;

/// Maximum number of frames of one thread. A longer chain has a cycle.
const MAX_FRAMES: usize = 200_000;
/// Maximum number of chunks (memory for frames) of one thread to copy in advance, and of bytes of
/// each.
const MAX_CHUNKS: usize = 4096;
const MAX_CHUNK_BYTES: u64 = 1 << 20;

const THREAD: &str = "the state of a thread";
const FRAME: &str = "a frame";
const ROOT: &str = "the root of a chain of frames";

/// A frame whose code is not read yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InterpreterFrame {
    pub address: u64,
    pub code: u64,
    /// The last instruction, as stored in the frame.
    pub instruction: u64,
    /// The frame that called it, which may belong to C code.
    pub previous: u64,
    /// Whether C code entered the interpreter with this frame.
    pub entry: bool,
}

/// The words of a frame that lead to its code and to the next frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameWords {
    pub code: u64,
    pub instruction: u64,
    pub previous: u64,
    /// Whether the frame belongs to C code, which keeps it on its stack, instead of Python code.
    pub is_from_c: bool,
    entry: bool,
}

impl FrameWords {
    /// Parses the first [`Layout::frame_size`] bytes of a frame.
    pub(super) fn parse(layout: &Layout, bytes: &[u8]) -> Self {
        let entry = match (layout.frame_is_entry, layout.minor) {
            (Some(offset), _) => number(bytes, offset, 1) != 0,
            (None, minor) => minor < 12,
        };
        FrameWords {
            // The lowest bits of a reference encode its ownership.
            code: number(bytes, layout.frame_code, 8) & !7,
            instruction: number(bytes, layout.frame_instruction, layout.instruction_bytes()),
            previous: number(bytes, layout.frame_previous, 8),
            is_from_c: is_from_c(layout, bytes),
            entry,
        }
    }
}

/// The frames of a thread, leaf first, as far as they can be followed.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain {
    pub frames: Vec<InterpreterFrame>,
    /// The address in the state of the thread: that of the innermost frame, or of the _PyCFrame
    /// that points to it.
    pub top: u64,
    /// The innermost frame, which may belong to C code.
    pub first: u64,
    /// Why the chain may be longer.
    pub problem: Option<ReadError>,
}

/// Copies what the chains of these threads need, as far as that is known in advance.
pub(super) fn fetch<'a>(
    memory: &mut Snapshot,
    layout: &Layout,
    threads: impl Iterator<Item = &'a ThreadState> + Clone,
) {
    memory.fetch(threads.clone().map(|thread| (thread.address, layout.thread_size)));
    if let Some(offset) = layout.cframe_frame {
        let cframes: Vec<u64> = threads
            .clone()
            .filter_map(|thread| memory.read_u64(THREAD, thread.address.wrapping_add(layout.thread_frame)).ok())
            .collect();
        memory.fetch(cframes.into_iter().map(|cframe| (cframe.wrapping_add(offset), 8)));
    }
    let Some(chunk_at) = layout.thread_chunk else { return };
    let first = threads.filter_map(|thread| memory.read_u64(THREAD, thread.address.wrapping_add(chunk_at)).ok());
    let mut chunks: Vec<u64> = first.filter(|chunk| *chunk != 0).collect();
    // A chunk starts with a pointer to the previous chunk and its size. The chunks of all threads
    // are followed at once.
    for _ in 0..MAX_CHUNKS {
        memory.fetch(chunks.iter().map(|chunk| (*chunk, 16)));
        let mut before = Vec::new();
        let mut pieces = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let size = memory.read_u64(THREAD, chunk.wrapping_add(8)).unwrap_or(0);
            pieces.push((chunk, size.min(MAX_CHUNK_BYTES)));
            before.extend(memory.read_u64(THREAD, chunk).ok().filter(|before| *before != 0));
        }
        memory.fetch(pieces.into_iter());
        chunks = before;
        if chunks.is_empty() {
            return;
        }
    }
}

/// Follows the chain of one thread.
pub(super) fn chain(memory: &mut Snapshot, layout: &Layout, thread: &ThreadState) -> Chain {
    let mut chain = Chain::default();
    let followed = first_frame(memory, layout, thread, &mut chain).and_then(|()| follow(memory, layout, &mut chain));
    chain.problem = match (followed, chain.frames.last()) {
        // From 3.12 on, a frame of C code is the root. A chain that ends before it was followed
        // into a generator that has yielded meanwhile.
        (Ok(false), Some(last)) if layout.minor >= 12 => Some(ReadError { what: ROOT, address: last.address }),
        (followed, _) => followed.err(),
    };
    finish(layout, chain)
}

/// Follows the chain that begins with this frame.
pub(super) fn chain_from(memory: &mut Snapshot, layout: &Layout, first: u64) -> Chain {
    let mut chain = Chain { top: first, first, ..Chain::default() };
    chain.problem = follow(memory, layout, &mut chain).err();
    finish(layout, chain)
}

fn finish(layout: &Layout, mut chain: Chain) -> Chain {
    // C code entered the root frame.
    if layout.minor >= 12
        && let Some(root) = chain.frames.last_mut()
    {
        root.entry = true;
    }
    chain
}

fn first_frame(
    memory: &mut Snapshot,
    layout: &Layout,
    thread: &ThreadState,
    chain: &mut Chain,
) -> Result<(), ReadError> {
    chain.top = memory.read_u64(THREAD, thread.address.wrapping_add(layout.thread_frame))?;
    chain.first = match layout.cframe_frame {
        Some(offset) => memory.read_u64(THREAD, chain.top.wrapping_add(offset))?,
        None => chain.top,
    };
    Ok(())
}

/// Follows a chain to its end. Returns whether the last frame is one of C code.
fn follow(memory: &mut Snapshot, layout: &Layout, chain: &mut Chain) -> Result<bool, ReadError> {
    let mut frame = chain.first;
    let mut is_from_c = false;
    let mut bytes = vec![0; layout.frame_size as usize];
    for _ in 0..MAX_FRAMES {
        if frame == 0 {
            return Ok(is_from_c);
        }
        if !memory.copy(frame, &mut bytes) {
            return Err(ReadError { what: FRAME, address: frame });
        }
        let words = FrameWords::parse(layout, &bytes);
        is_from_c = words.is_from_c;
        if is_from_c {
            // From 3.12 on, C code that enters the interpreter leaves a frame of its own below.
            if let Some(called) = chain.frames.last_mut() {
                called.entry = true;
            }
        } else {
            let FrameWords { code, instruction, previous, entry, .. } = words;
            chain.frames.push(InterpreterFrame { address: frame, code, instruction, previous, entry });
        }
        frame = words.previous;
    }
    Err(ReadError { what: "the end of a chain of frames", address: frame })
}

/// Whether a frame belongs to C code, which keeps it on its stack, instead of Python code.
fn is_from_c(layout: &Layout, frame: &[u8]) -> bool {
    // Owners with higher numbers run no Python code either.
    match layout.frame_owner {
        Some(offset) => number(frame, offset, 1) >= FrameLayout::FIRST_C_OWNER.into(),
        None => false,
    }
}

fn number(bytes: &[u8], offset: u64, width: usize) -> u64 {
    let mut number = [0; 8];
    if let Some(found) = bytes.get(offset as usize..offset as usize + width) {
        number[..width].copy_from_slice(found);
    }
    u64::from_le_bytes(number)
}

/// The Python frames of a thread.
#[derive(Default)]
pub(crate) struct Stack {
    pub(super) frames: Vec<PySpyFrame>,
    /// The same frames as they were read from memory.
    pub(super) raw_frames: Vec<InterpreterFrame>,
    /// For each frame, whether C code entered the interpreter with it.
    pub(super) entries: Vec<bool>,
    /// The GIL that the thread holds, and when this was read.
    pub(super) held_gil: Option<(u64, Instant)>,
    /// Whether the garbage collector was running at that time.
    pub(super) collects: bool,
    /// The exceptions that the thread is handling, innermost first.
    pub(super) exceptions: Vec<PyException>,
    /// Its tasks and greenlets that wait.
    pub(super) suspended: Vec<PySuspended>,
    /// Whether it waits for an object to which only its frames refer.
    pub(super) awaits_alone: bool,
    /// Why the stack is incomplete.
    pub problem: Option<String>,
    /// Whether inner frames are missing because they changed during the read.
    pub is_cut: bool,
}

impl Stack {
    pub(super) fn entered(&self) -> usize {
        self.entries.iter().filter(|entry| **entry).count()
    }

    /// An empty stack, for this reason.
    pub(crate) fn unknown(reason: &str) -> Self {
        Stack { problem: Some(reason.into()), ..Stack::default() }
    }

    /// The frames that two reads of a running thread agree on: from the root on, up to the first
    /// frame that differs or has a different current instruction. `None` if one of the reads does
    /// not reach the root.
    pub(crate) fn common_frames(before: &Stack, mut after: Stack) -> Option<Stack> {
        if before.problem.is_some() || after.problem.is_some() {
            return None;
        }
        let mut kept = 0;
        for (before, after) in before.raw_frames.iter().rev().zip(after.raw_frames.iter().rev()) {
            if (before.address, before.code) != (after.address, after.code) {
                break;
            }
            kept += 1;
            // The frame now makes another call than before.
            if before.instruction != after.instruction {
                break;
            }
        }
        let left_out = after.frames.len() - kept;
        after.frames.drain(..left_out);
        after.raw_frames.drain(..left_out);
        after.entries.drain(..left_out);
        after.is_cut = left_out > 0 || kept < before.raw_frames.len();
        // A thread that has left its block handles another exception, or none.
        after.exceptions.retain(|exception| before.exceptions.contains(exception));
        after.suspended.retain(|suspended| before.suspended.contains(suspended));
        after.awaits_alone &= before.awaits_alone;
        (after.held_gil, after.collects) = match after.held_gil {
            Some(_) => (after.held_gil, after.collects),
            None => (before.held_gil, before.collects),
        };
        Some(after)
    }

    /// Number of reported frames.
    pub(crate) fn frame_count(&self) -> usize {
        self.frames.len()
    }
}
