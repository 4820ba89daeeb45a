//! Python stacks that existed at one moment: copies of the memory that the stack of one thread
//! consists of, and the check whether the Python and the native stack of a thread were taken at the
//! same moment.

use std::collections::{BTreeSet, HashMap};

use crate::{
    memory::Snapshot,
    native::{RawFrame, address_space::AddressSpace, thread::Thread},
};

use super::{
    code::{self, CodeCache},
    frames::{self, Chain, InterpreterFrame, Stack},
    reader::{PythonReader, PythonThread},
};

/// Maximum number of frames of a chain to follow during a stop. A deeper chain is followed
/// afterwards in the copied memory.
const MAX_FRAMES_DURING_STOP: usize = 300;
/// Maximum number of pages to fetch one by one during a stop.
const MAX_FETCHES: usize = 48;
/// The memory of one thread's stack, copied during a stop.
pub(crate) struct StoppedCopy<'a> {
    python: &'a PythonReader,
    thread: &'a PythonThread,
    follow_during_stop: bool,
    memory: Snapshot,
    taken: bool,
    chains: Option<Vec<Chain>>,
}

impl<'a> StoppedCopy<'a> {
    /// Reads the current stack of a thread to learn which pages to copy during the stop. `missing`
    /// are pages that an earlier copy lacked.
    pub(crate) fn prepare(python: &'a PythonReader, thread: &'a PythonThread, missing: &[u64]) -> Self {
        let layout = &python.location.layout;
        // A running thread mostly keeps using the same memory.
        let mut memory = Snapshot::new(python.live_tid);
        frames::fetch(&mut memory, layout, thread.states());
        let chains = python.chains(&mut memory, thread);
        let all: Vec<InterpreterFrame> = chains.iter().flat_map(|chain| &chain.frames).copied().collect();
        code::fetch(&mut memory, layout, &all);
        python.build_stack(&mut memory, &mut CodeCache::default(), thread, &chains);
        let mut pages: BTreeSet<u64> = memory.pages().into_iter().collect();
        pages.extend(missing);
        let memory = Snapshot::with_buffer(python.live_tid, pages.into_iter().collect(), MAX_FETCHES);
        StoppedCopy {
            python,
            thread,
            follow_during_stop: all.len() <= MAX_FRAMES_DURING_STOP,
            memory,
            taken: false,
            chains: None,
        }
    }

    /// Copies the pages. Call this while the thread is stopped, and again whenever it is stopped
    /// again.
    pub(crate) fn take(&mut self) {
        self.memory.fill();
        self.taken = true;
        self.chains = None;
        if self.follow_during_stop {
            // Following the pointers fetches pages that the stack did not use before.
            let chains = self.python.chains(&mut self.memory, self.thread);
            for chain in &chains {
                code::fetch(&mut self.memory, &self.python.location.layout, &chain.frames);
            }
            self.chains = Some(chains);
        }
    }

    /// The stack, and the pages that the copy lacked. Call this when the thread runs again. `None`
    /// if it was never stopped.
    pub(crate) fn finish(mut self) -> Option<(Stack, Vec<u64>)> {
        if !self.taken {
            return None;
        }
        self.memory.freeze();
        let chains = match self.chains.take() {
            Some(chains) => chains,
            None => self.python.chains(&mut self.memory, self.thread),
        };
        let stack = self.python.build_stack(&mut self.memory, &mut CodeCache::default(), self.thread, &chains);
        Some((stack, self.memory.missing().to_vec()))
    }
}

/// Reads the stack of a thread that may run during the read, in as short a time as possible.
/// `missing` are pages that an earlier read lacked; it is set to those that this one lacks.
pub(crate) fn read_running(python: &PythonReader, thread: &PythonThread, missing: &mut Vec<u64>) -> Stack {
    let mut copy = StoppedCopy::prepare(python, thread, missing);
    copy.take();
    let Some((stack, missing_pages)) = copy.finish() else { return Stack::default() };
    *missing = missing_pages;
    stack
}

/// Minimum size in bytes of a part of the interpreter's loop. The loop is larger than almost all
/// other functions.
const MIN_LOOP_BYTES: u64 = 8 << 10;

/// Whether the Python and the native stack of a thread match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agreement {
    Yes,
    No,
    /// Unknown, because the native stack is incomplete or the code of the loop is unknown.
    Unknown,
    /// The thread was about to publish a frame.
    Between,
}

/// Compares the Python stack of a thread with its native frames, which were taken at the same time.
pub(crate) fn agreement(
    python: &PythonReader,
    thread: &PythonThread,
    native: &Thread,
    space: &AddressSpace<'_>,
) -> Agreement {
    let runtime = &python.location.runtime;
    let within = |frame: &RawFrame| address(python, frame, space);
    if native.frames.first().and_then(within).is_some_and(|address| runtime.is_publishing_frame(address)) {
        return Agreement::Between;
    }
    if !native.incomplete.is_empty() || !runtime.has_eval_loop() {
        return Agreement::Unknown;
    }
    let run = native.frames.iter().filter_map(within).filter(|address| runtime.is_eval_loop(*address)).count();
    if run == thread.stack.entered() { Agreement::Yes } else { Agreement::No }
}

/// The address of a frame in the file of the interpreter. `None` for a frame of another object.
fn address(python: &PythonReader, frame: &RawFrame, space: &AddressSpace<'_>) -> Option<u64> {
    let object = space.object_at(frame.lookup())?;
    (object.image.id == python.location.object.image.id).then(|| frame.lookup().wrapping_sub(object.bias))
}

/// Finds a part of the loop without a name. Compilers move parts of the loop elsewhere, and
/// distributions strip their names. If exactly one unnamed function, counted as part of the loop,
/// makes the two stacks of all these threads match, it is such a part.
pub(crate) fn find_unnamed_part<'a>(
    python: &PythonReader,
    stacks: impl Iterator<Item = (&'a PythonThread, &'a [RawFrame])>,
    space: &AddressSpace<'_>,
) {
    let runtime = &python.location.runtime;
    if runtime.has_unnamed_part() || !runtime.has_eval_loop() {
        return;
    }
    let image = &*python.location.object.image;
    let stacks: Vec<(&PythonThread, Vec<u64>)> = stacks
        .map(|(thread, native)| {
            let addresses = native.iter().filter_map(|frame| address(python, frame, space));
            (thread, addresses.collect())
        })
        .collect();
    let missing_frames: Vec<Option<usize>> = stacks
        .iter()
        .map(|(thread, addresses)| {
            let run = addresses.iter().filter(|address| runtime.is_eval_loop(**address)).count();
            thread.stack.entered().checked_sub(run)
        })
        .collect();
    // Usually nothing is missing, and looking up functions takes longer than counting.
    if missing_frames.iter().all(|missing| *missing == Some(0)) {
        return;
    }
    let mut counts: HashMap<(u64, u64), HashMap<usize, usize>> = HashMap::new();
    for (index, (_, addresses)) in stacks.iter().enumerate() {
        for address in addresses.iter().filter(|address| !runtime.is_eval_loop(**address)) {
            if let Some(function) = image.function(*address).filter(|range| range.end - range.start >= MIN_LOOP_BYTES) {
                *counts.entry((function.start, function.end)).or_default().entry(index).or_default() += 1;
            }
        }
    }
    let fits = |counts: &HashMap<usize, usize>| {
        missing_frames
            .iter()
            .enumerate()
            .all(|(index, missing)| *missing == Some(counts.get(&index).copied().unwrap_or(0)))
    };
    let mut found = counts.iter().filter(|(_, counts)| fits(counts)).map(|((start, end), _)| *start..*end);
    if let (Some(part), None) = (found.next(), found.next())
        && image.symbol(part.start).is_none()
    {
        runtime.set_unnamed_part(part);
    }
}
