//! The Python stacks of one process, read many times a second. The reader keeps parts that do not
//! change from one sample to the next: the interpreter, the list of threads, the chains of frames,
//! and the names of code.
//!
//! One system call copies the known frames of all threads. A thread whose chain is unchanged is
//! done then. The chain of any other thread is followed anew, and the new chain counts only if it
//! is still there afterwards: the thread runs during the read, so what was read may never have
//! existed.
//!
//! In a process of many threads, most of them wait. While the GIL says that only one thread has
//! held it since the last sample, the others are not read at all.

use std::{collections::HashMap, sync::Arc};

use xpu_timer_proto::{procfs, server::PySpyFrame};

use crate::{
    cpython::{InterpreterError, Layout},
    error::Error,
    memory::{self, Snapshot},
    native::address_space::AddressSpace,
    objects::Images,
};

use super::{
    code::{self, Code, CodeCache},
    frames::{self, Chain, FrameWords, InterpreterFrame},
    reader::{self, PythonReader},
    threads::{self, InterpreterState, ThreadState},
};

/// How often to read a stack that changes during the read.
const ATTEMPTS: usize = 3;
/// How often to read the list of threads while it changes.
const LIST_ATTEMPTS: usize = 3;
/// Frames that are nearer to each other than this are copied together, with what is between them.
const GAP_BYTES: u64 = 1024;
/// More known code objects than this are forgotten.
const MAX_CODES: usize = 1 << 15;

/// After this number of samples of only some threads, all are read, whatever the GIL says.
const MAX_PARTIAL_SAMPLES: usize = 25;
/// Where fewer threads are sampled, all are always read.
const MIN_THREADS_TO_SKIP: usize = 5;

/// In the state of a thread whose chain is not known.
const UNKNOWN: u64 = u64::MAX;

/// The quality of a sample of one thread, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// The stack existed at one moment.
    Complete,
    /// The outer frames existed. The inner ones changed during each read.
    Cut,
    /// Nothing is known.
    Discarded,
}

/// A thread of the process.
pub(crate) struct SampledThread {
    /// The kernel's thread id; 0 if unknown.
    pub tid: i32,
    /// Name of the thread; empty if unknown.
    pub name: String,
    /// Whether it is the main thread of the interpreter.
    pub is_main: bool,
    /// Its last sample.
    pub outcome: Outcome,
    /// A number of the caller for its stack. `None` after the stack has changed.
    pub number: Option<u32>,
    pthread: u64,
    states: Vec<KnownState>,
}

/// The state of a thread in one interpreter, and its frames in the last sample.
struct KnownState {
    state: ThreadState,
    /// Its neighbours in the list of threads, and its interpreter.
    links: [u64; 3],
    chain: Chain,
    /// The address ranges that are copied for it, and the offsets of the frames in the copy.
    ranges: Vec<(u64, usize)>,
    frame_offsets: Vec<usize>,
    /// Number of bytes that are copied.
    length: usize,
}

/// A code object whose names are known.
struct KnownCode {
    identity: Vec<u8>,
    code: Arc<Code>,
    /// The frames of its instructions. `None` for code that is not shown.
    frames: HashMap<u64, Option<u32>>,
}

/// The last holder of a GIL, and the number of its switches to another thread. As long as neither
/// changes, only that thread runs Python code, and the frames of all others stay as they are.
#[derive(Clone, Copy, PartialEq, Eq)]
struct GilUse {
    holder: u64,
    switches: u64,
}

/// The threads that a sample reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    /// Those that held a GIL last, and their neighbours in the list, which show whether they ended.
    Holders,
}

/// Result of a second look at a chain.
enum Check {
    IsThere,
    HasChanged,
    /// One of its code objects is not the one that was at this address before.
    OtherCode,
}

/// Reads the stacks of one process again and again.
pub(crate) struct StackReader {
    pid: i32,
    live_tid: i32,
    /// Whether the process is in another PID namespace.
    is_namespaced: bool,
    layout: Arc<Layout>,
    runtime: u64,
    main_only: bool,
    /// Address of the pointer to the newest thread of each interpreter, and the pointer.
    heads: Vec<(u64, u64)>,
    /// Where each GIL says who held it last, and what it said before the last sample. Empty if a
    /// thread can run Python code without one.
    gils: Vec<(u64, GilUse)>,
    /// Samples since all threads were read.
    partial_samples: usize,
    /// The threads, main thread last.
    pub threads: Vec<SampledThread>,
    codes: HashMap<u64, KnownCode>,
    cache: CodeCache,
    buffer: Vec<u8>,
    ranges: Vec<(u64, usize)>,
}

impl StackReader {
    /// Finds the interpreter of a process through one of its live threads. `None` if it runs no
    /// Python.
    ///
    /// # Errors
    /// The interpreter cannot be read.
    pub(crate) fn find(
        images: &Images,
        pid: i32,
        live_tid: i32,
        main_only: bool,
    ) -> Result<Option<Self>, InterpreterError> {
        let space = AddressSpace::open(images, pid, live_tid)?;
        let Some(python) = PythonReader::find(live_tid, &space, std::iter::empty())? else { return Ok(None) };
        let status = procfs::status(pid, live_tid).map_err(Error::from)?;
        let mut reader = StackReader {
            pid,
            live_tid,
            is_namespaced: status.namespaced_tid != live_tid,
            layout: python.location.layout,
            runtime: python.location.address,
            main_only,
            heads: Vec::new(),
            gils: Vec::new(),
            partial_samples: 0,
            threads: Vec::new(),
            codes: HashMap::new(),
            cache: CodeCache::default(),
            buffer: Vec::new(),
            ranges: Vec::new(),
        };
        reader.list_threads()?;
        Ok(Some(reader))
    }

    /// Reads the list of threads. Keeps the state of threads that are still there.
    ///
    /// # Errors
    /// The interpreter can no longer be read: it ended, or the process executed another program.
    pub(crate) fn list_threads(&mut self) -> Result<(), InterpreterError> {
        for _ in 0..LIST_ATTEMPTS {
            let interpreters = self.interpreters()?;
            self.take_threads(&interpreters);
            // The links are read after the list, and the list once more after the links.
            self.read_links()?;
            if self.interpreters()? == interpreters {
                break;
            }
        }
        Ok(())
    }

    fn interpreters(&self) -> Result<Vec<InterpreterState>, InterpreterError> {
        let found = threads::interpreters(self.live_tid, &self.layout, self.runtime)?;
        if found.is_empty() { Err(InterpreterError::NotRunning) } else { Ok(found) }
    }

    fn take_threads(&mut self, interpreters: &[InterpreterState]) {
        let mut known: HashMap<u64, KnownState> = HashMap::new();
        let mut names: HashMap<u64, String> = HashMap::new();
        for thread in self.threads.drain(..) {
            names.insert(thread.pthread, thread.name);
            known.extend(thread.states.into_iter().map(|state| (state.state.address, state)));
        }
        let main_tid = self.pid;
        let by_namespaced = if self.is_namespaced { reader::tids_by_namespaced_tid(self.pid) } else { HashMap::new() };
        let map_tid = |tid: i32| if self.is_namespaced { by_namespaced.get(&tid).copied().unwrap_or(0) } else { tid };
        let oldest = interpreters.last().and_then(|first| first.threads.last()).map(|thread| thread.pthread);
        let all = || interpreters.iter().flat_map(|interpreter| &interpreter.threads);
        let main = all().find(|thread| map_tid(thread.tid) == main_tid).map(|thread| thread.pthread).or(oldest);
        let layout = &self.layout;
        self.heads = interpreters
            .iter()
            .map(|interpreter| (interpreter.address.wrapping_add(layout.interpreter_threads), 0))
            .collect();
        self.gils.clear();
        if !layout.free_threaded && interpreters.iter().all(|interpreter| interpreter.gil != 0) {
            let nobody = GilUse { holder: 0, switches: 0 };
            self.gils.extend(interpreters.iter().map(|interpreter| (interpreter.gil, nobody)));
        }
        for interpreter in interpreters {
            let wanted = |thread: &&ThreadState| !self.main_only || Some(thread.pthread) == main;
            let is_unnamed = |thread: &ThreadState| names.get(&thread.pthread).is_none_or(String::is_empty);
            if interpreter.threads.iter().filter(wanted).any(is_unnamed) {
                names.extend(threads::thread_names(self.live_tid, layout, interpreter));
            }
            for state in interpreter.threads.iter().filter(wanted) {
                let fresh = || KnownState::new(layout, *state);
                let known = known.remove(&state.address).filter(|known| known.state == *state).unwrap_or_else(fresh);
                if let Some(thread) = self.threads.iter_mut().find(|thread| thread.pthread == state.pthread) {
                    thread.states.push(known);
                    continue;
                }
                self.threads.push(SampledThread {
                    tid: map_tid(state.tid),
                    name: names.get(&state.pthread).cloned().unwrap_or_default(),
                    is_main: Some(state.pthread) == main,
                    outcome: Outcome::Discarded,
                    number: None,
                    pthread: state.pthread,
                    states: vec![known],
                });
            }
        }
    }

    /// Reads the links of the listed threads, which are compared with later ones.
    fn read_links(&mut self) -> Result<(), InterpreterError> {
        self.copy(Scope::All)?;
        let mut at = self.threads_at();
        let (layout, buffer) = (&self.layout, &self.buffer);
        for (index, (_, head)) in self.heads.iter_mut().enumerate() {
            *head = word(buffer, index * 8);
        }
        for state in self.threads.iter_mut().flat_map(|thread| &mut thread.states) {
            state.links = links(layout, &buffer[at..]);
            at += state.length;
        }
        Ok(())
    }

    /// Copies what is known to `buffer`: the pointers to the newest threads, the GILs, the threads.
    /// Returns how much of it could be read.
    fn copy(&mut self, scope: Scope) -> Result<usize, Error> {
        self.ranges.clear();
        self.ranges.extend(self.heads.iter().map(|(address, _)| (*address, 8)));
        let (start, length) = gil_range(&self.layout);
        self.ranges.extend(self.gils.iter().map(|(gil, _)| (gil.wrapping_add(start), length)));
        let states = self.threads.iter().flat_map(|thread| &thread.states);
        let states = states.filter(|state| is_read(scope, &self.gils, state));
        self.ranges.extend(states.flat_map(|state| &state.ranges));
        memory::read_scattered(self.live_tid, &self.ranges, &mut self.buffer)
    }

    /// Where the first thread is in a copy.
    fn threads_at(&self) -> usize {
        self.heads.len() * 8 + self.gils.len() * gil_range(&self.layout).1
    }

    /// The threads whose frames may have changed since the last sample.
    fn scope(&self) -> Scope {
        let all_known = self.threads.iter().all(|thread| thread.outcome == Outcome::Complete);
        let can_skip = !self.gils.is_empty() && self.threads.len() >= MIN_THREADS_TO_SKIP;
        if can_skip && all_known && self.partial_samples < MAX_PARTIAL_SAMPLES { Scope::Holders } else { Scope::All }
    }

    /// Like [`Self::copy`], and takes the use of each GIL from the copy. Also returns whether one
    /// has changed.
    fn copy_with_gil_use(&mut self, scope: Scope) -> Result<(usize, bool), Error> {
        let copied = self.copy(scope)?;
        let (start, length) = gil_range(&self.layout);
        let mut at = self.heads.len() * 8;
        let mut has_changed = false;
        for (_, last) in &mut self.gils {
            let part = |offset: u64| word(&self.buffer, at + (offset - start) as usize);
            let now = GilUse { holder: part(self.layout.gil_holder), switches: part(self.layout.gil_switches) };
            has_changed |= std::mem::replace(last, now) != now;
            at += length;
        }
        Ok((copied, has_changed))
    }

    /// Takes a sample of all threads.
    ///
    /// # Errors
    /// The interpreter can no longer be read: it ended, or the process executed another program.
    pub(crate) fn sample(&mut self) -> Result<(), InterpreterError> {
        let mut scope = self.scope();
        let (mut copied, has_changed) = self.copy_with_gil_use(scope)?;
        if has_changed && scope == Scope::Holders {
            scope = Scope::All;
            (copied, _) = self.copy_with_gil_use(scope)?;
        }
        if !self.is_list_unchanged(scope, copied) {
            scope = Scope::All;
            self.list_threads()?;
            (copied, _) = self.copy_with_gil_use(scope)?;
        }
        self.partial_samples = if scope == Scope::All { 0 } else { self.partial_samples + 1 };
        let mut at = self.threads_at();
        let mut threads = std::mem::take(&mut self.threads);
        let gils = std::mem::take(&mut self.gils);
        for thread in &mut threads {
            // The frames of an incomplete stack are not those of the next sample.
            let was_complete = std::mem::replace(&mut thread.outcome, Outcome::Complete) == Outcome::Complete;
            thread.number = thread.number.filter(|_| was_complete);
            for state in thread.states.iter_mut().filter(|state| is_read(scope, &gils, state)) {
                let bytes = self.buffer.get(at..copied.min(at + state.length)).unwrap_or_default();
                at += state.length;
                if state.agrees(&self.layout, bytes) {
                    if !state.take_instructions(&self.layout, bytes) {
                        continue;
                    }
                    thread.number = None;
                    if self.layout.code_copies.is_none()
                        || state.chain.frames.iter().all(|frame| locates(&self.codes, &self.layout, frame))
                    {
                        continue;
                    }
                }
                thread.number = None;
                // The copy of the other threads is still needed.
                let buffer = std::mem::take(&mut self.buffer);
                thread.outcome = thread.outcome.max(self.follow(state));
                self.buffer = buffer;
            }
        }
        self.threads = threads;
        self.gils = gils;
        Ok(())
    }

    /// Whether no thread has started or ended since the list was read.
    fn is_list_unchanged(&self, scope: Scope, copied: usize) -> bool {
        let mut at = self.threads_at();
        for (index, (_, head)) in self.heads.iter().enumerate() {
            if at > copied || word(&self.buffer, index * 8) != *head {
                return false;
            }
        }
        let states = self.threads.iter().flat_map(|thread| &thread.states);
        for state in states.filter(|state| is_read(scope, &self.gils, state)) {
            if at < copied && links(&self.layout, &self.buffer[at..]) != state.links {
                return false;
            }
            at += state.length;
        }
        true
    }

    /// Follows the chain of one thread anew until the result is known to have existed.
    fn follow(&mut self, state: &mut KnownState) -> Outcome {
        let layout = Arc::clone(&self.layout);
        let before: Vec<u64> = state.chain.frames.iter().map(|frame| frame.code).collect();
        let mut outcome = Outcome::Discarded;
        for _ in 0..ATTEMPTS {
            let memory = &mut Snapshot::new(self.live_tid);
            let chain = frames::chain(memory, &layout, &state.state);
            if chain.problem.is_some() || !self.name(memory, &chain.frames) {
                outcome = Outcome::Discarded;
                continue;
            }
            state.set_chain(&layout, chain);
            match self.check(state, &before) {
                Check::IsThere => return Outcome::Complete,
                Check::OtherCode => {
                    outcome = Outcome::Discarded;
                    continue;
                }
                Check::HasChanged => {}
            }
            let again = frames::chain(&mut Snapshot::new(self.live_tid), &layout, &state.state);
            let kept = if again.problem.is_none() { common(&state.chain.frames, &again.frames) } else { 0 };
            // One call or one return between the two reads explains the difference, so the first
            // chain existed.
            if again.problem.is_none() && state.chain.frames.len() <= kept + 1 && again.frames.len() <= kept + 1 {
                return Outcome::Complete;
            }
            let left_out = state.chain.frames.len() - kept;
            state.chain.frames.drain(..left_out);
            outcome = if kept > 0 { Outcome::Cut } else { Outcome::Discarded };
        }
        // The next sample follows the chain anew.
        let frames = std::mem::take(&mut state.chain.frames);
        state.set_chain(&layout, Chain { frames, top: UNKNOWN, ..Chain::default() });
        outcome
    }

    /// Reads the names of code that is not known. Code whose copy of the instructions is not known
    /// is read again: the thread has just made it. Returns whether all of it is known then.
    fn name(&mut self, memory: &mut Snapshot, frames: &[InterpreterFrame]) -> bool {
        let (offset, length) = code::identity(&self.layout);
        if self.codes.len() > MAX_CODES {
            self.codes.clear();
        }
        for frame in frames {
            if locates(&self.codes, &self.layout, frame) {
                continue;
            }
            let start = frame.code.wrapping_add(offset);
            let Ok(identity) = memory.bytes("a code object", start, length) else { return false };
            let Ok(code) = self.cache.read(memory, &self.layout, frame.code) else { return false };
            if !code.locates(&self.layout, frame.instruction) {
                return false;
            }
            self.codes.insert(frame.code, KnownCode { identity, code: Arc::new(code), frames: HashMap::new() });
        }
        true
    }

    /// Whether a chain that was just followed is still there, with the code that its frames are
    /// thought to run. Code in `before` was compared earlier, and its frames have kept it alive.
    fn check(&mut self, state: &KnownState, before: &[u64]) -> Check {
        let (offset, length) = code::identity(&self.layout);
        self.ranges.clear();
        let mut compared: Vec<u64> = Vec::new();
        for code in state.chain.frames.iter().map(|frame| frame.code) {
            if !before.contains(&code) && !compared.contains(&code) {
                compared.push(code);
                self.ranges.push((code.wrapping_add(offset), length));
            }
        }
        self.ranges.extend(&state.ranges);
        let copied = memory::read_scattered(self.live_tid, &self.ranges, &mut self.buffer).unwrap_or(0);
        let bytes = &self.buffer[..copied];
        for (index, code) in compared.iter().enumerate() {
            let identity = bytes.get(index * length..(index + 1) * length);
            if self.codes.get(code).map(|known| &known.identity[..]) != identity {
                self.codes.remove(code);
                return Check::OtherCode;
            }
        }
        let rest = bytes.get(compared.len() * length..).unwrap_or_default();
        if state.agrees(&self.layout, rest) { Check::IsThere } else { Check::HasChanged }
    }

    /// The frames of a thread, innermost first, as numbers that `number` gives to them.
    pub(crate) fn frames(&mut self, thread: usize, mut number: impl FnMut(PySpyFrame) -> u32, out: &mut Vec<u32>) {
        out.clear();
        let chains = self.threads[thread].states.iter().flat_map(|state| &state.chain.frames);
        for frame in chains {
            let Some(known) = self.codes.get_mut(&frame.code) else { continue };
            let shown = known
                .frames
                .entry(frame.instruction)
                .or_insert_with(|| known.code.frame(&self.layout, frame.instruction).map(&mut number));
            out.extend(*shown);
        }
    }

    /// Forgets the numbers of frames and stacks.
    pub(crate) fn forget_numbers(&mut self) {
        self.codes.values_mut().for_each(|known| known.frames.clear());
        self.threads.iter_mut().for_each(|thread| thread.number = None);
    }
}

impl SampledThread {
    /// What distinguishes the thread from others and from later ones.
    pub(crate) fn key(&self) -> (i32, u64) {
        (self.tid, self.pthread)
    }
}

impl KnownState {
    fn new(layout: &Layout, state: ThreadState) -> Self {
        let (chain, ranges, frame_offsets) = (Chain::default(), Vec::new(), Vec::new());
        let mut known = KnownState { state, links: [0; 3], chain, ranges, frame_offsets, length: 0 };
        known.set_chain(layout, Chain { top: UNKNOWN, ..Chain::default() });
        known
    }

    /// Sets the chain, and what is to be copied to compare it with a later one.
    fn set_chain(&mut self, layout: &Layout, chain: Chain) {
        self.chain = chain;
        self.ranges.clear();
        self.frame_offsets.clear();
        let (first, length) = state_range(layout);
        self.ranges.push((self.state.address.wrapping_add(first), length));
        self.length = length;
        if self.chain.top == UNKNOWN {
            return;
        }
        if let Some(offset) = layout.cframe_frame {
            self.ranges.push((self.chain.top.wrapping_add(offset), 8));
            self.length += 8;
        }
        let frames = &self.chain.frames;
        let mut by_address: Vec<usize> = (0..frames.len()).collect();
        by_address.sort_unstable_by_key(|index| frames[*index].address);
        self.frame_offsets.resize(frames.len(), 0);
        // Start of the range that grows, and where it is in the copy.
        let mut open: Option<(u64, usize)> = None;
        for index in by_address {
            let address = frames[index].address;
            let end = self.ranges.last().map_or(0, |(start, length)| start + *length as u64);
            let (start, at) = match open {
                Some((start, at)) if address.saturating_sub(end) <= GAP_BYTES => (start, at),
                _ => {
                    self.ranges.push((address, 0));
                    (address, self.length)
                }
            };
            open = Some((start, at));
            let offset = (address - start) as usize;
            if let Some((_, length)) = self.ranges.last_mut() {
                *length = offset + layout.frame_size as usize;
                self.length = at + *length;
            }
            self.frame_offsets[index] = at + offset;
        }
    }

    /// Whether a copy has the same frames. Their current instructions may differ.
    fn agrees(&self, layout: &Layout, bytes: &[u8]) -> bool {
        if bytes.len() < self.length || self.chain.top == UNKNOWN {
            return false;
        }
        let (first, length) = state_range(layout);
        let has_top = word(bytes, (layout.thread_frame - first) as usize) == self.chain.top;
        let has_first = layout.cframe_frame.is_none() || word(bytes, length) == self.chain.first;
        has_top
            && has_first
            && self.chain.frames.iter().zip(&self.frame_offsets).all(|(frame, at)| {
                let words = FrameWords::parse(layout, &bytes[*at..]);
                !words.is_from_c && (words.code, words.previous) == (frame.code, frame.previous)
            })
    }

    /// Takes the current instructions from a copy that agrees. Returns whether one has changed.
    fn take_instructions(&mut self, layout: &Layout, bytes: &[u8]) -> bool {
        let mut has_changed = false;
        for (frame, at) in self.chain.frames.iter_mut().zip(&self.frame_offsets) {
            let instruction = FrameWords::parse(layout, &bytes[*at..]).instruction;
            has_changed |= std::mem::replace(&mut frame.instruction, instruction) != instruction;
        }
        has_changed
    }
}

/// Whether a sample reads a thread.
fn is_read(scope: Scope, gils: &[(u64, GilUse)], state: &KnownState) -> bool {
    let [previous, next, _] = state.links;
    scope == Scope::All || gils.iter().any(|(_, gil)| [state.state.address, previous, next].contains(&gil.holder))
}

/// The part of a GIL that is copied: offset and length.
fn gil_range(layout: &Layout) -> (u64, usize) {
    (layout.gil_holder, (layout.gil_switches + 8 - layout.gil_holder) as usize)
}

/// Whether the code of a frame and the copy of the instructions that it executes are known.
fn locates(codes: &HashMap<u64, KnownCode>, layout: &Layout, frame: &InterpreterFrame) -> bool {
    codes.get(&frame.code).is_some_and(|known| known.code.locates(layout, frame.instruction))
}

/// Number of frames, from the root on, that two chains have in common.
fn common(one: &[InterpreterFrame], other: &[InterpreterFrame]) -> usize {
    let pairs = one.iter().rev().zip(other.iter().rev());
    pairs.take_while(|(one, other)| (one.address, one.code) == (other.address, other.code)).count()
}

/// The part of the state of a thread that is copied: offset and length.
fn state_range(layout: &Layout) -> (u64, usize) {
    let fields = [layout.thread_previous, layout.thread_next, layout.thread_interpreter, layout.thread_frame];
    let first = fields.into_iter().min().unwrap_or(0);
    (first, (fields.into_iter().max().unwrap_or(0) + 8 - first) as usize)
}

/// The neighbours and the interpreter of a thread, from a copy of that part.
fn links(layout: &Layout, bytes: &[u8]) -> [u64; 3] {
    let (first, _) = state_range(layout);
    [layout.thread_previous, layout.thread_next, layout.thread_interpreter]
        .map(|offset| word(bytes, (offset - first) as usize))
}

/// A word of a copy; 0 if it was not copied.
fn word(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u64::from_le_bytes)
}
