//! Python stacks, read from the interpreter's own structures without its help and without stopping anything.
//!
//! The frames of a thread change only while that thread runs, and keep their code alive. So the frames of a thread that slept all
//! the time are right as they are, whatever the others do meanwhile. The frames of a thread that ran are read before and after
//! its native stack is sampled: what both looks have in common, from the root on, is shown, and a frame that differs is not. No
//! two threads ever need to stand still together: a stack consists of nothing that threads share.
//!
//! A thread may be caught in the middle of announcing a frame. It shows: the frames that C code entered are then not as many as
//! the frames of the interpreter's loop on its native stack. It is looked at again.

mod code;
mod counts;
mod frames;
mod layout;
mod layouts;
mod lines;
mod locate;
mod memory;
mod names;
mod objects;
mod threads;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Instant,
};

use xpu_timer_proto::server::{PySpyFrame, PySpyStacktrace};

use crate::{address_space::AddressSpace, native, procfs, unwind::RawFrame};

use code::Codes;
use frames::Chain;
use layout::Layout;
use locate::Place;
use memory::{Snapshot, Torn};
use threads::Thread;

pub(crate) use locate::Runtime;

/// Frames that are followed during a stop; deeper chains are followed afterwards, when everything they need was copied.
const SHALLOW: usize = 300;
/// Pages that are fetched one by one during a stop, at most.
const FETCHES: usize = 48;
/// Bytes of a function that may be the interpreter's loop, which is greater than almost all others.
const LOOP_BYTES: u64 = 8 << 10;

/// The interpreter of one process.
pub(crate) struct Python {
    /// A live thread.
    live: i32,
    place: Place,
}

/// The Python side of one kernel thread. It may run code of more than one interpreter, one called from the other.
pub(crate) struct PythonThread {
    /// The kernel's id, as this process sees it; 0 when it is not known.
    pub tid: i32,
    /// With the lock of its interpreter, the innermost interpreter first.
    states: Vec<(u64, Thread)>,
    name: String,
    pub stack: Stack,
    /// Whether the stack is known to be what it was at one moment.
    pub right: bool,
}

/// The Python frames of a thread.
#[derive(Default)]
pub(crate) struct Stack {
    frames: Vec<PySpyFrame>,
    /// The same frames as they were read.
    raw: Vec<frames::RawFrame>,
    /// For each frame, whether C code entered the interpreter with it.
    entries: Vec<bool>,
    /// The lock that it holds, and since when that is known.
    holds: Option<(u64, Instant)>,
    /// Garbage was collected at that moment.
    collects: bool,
    /// Why it is not whole.
    pub problem: Option<String>,
    /// Inner frames are left out because they changed while they were read.
    pub moved: bool,
}

impl Stack {
    fn entered(&self) -> usize {
        self.entries.iter().filter(|entry| **entry).count()
    }

    /// No frames, for this reason.
    pub fn unknown(reason: &str) -> Self {
        Stack { problem: Some(reason.into()), ..Stack::default() }
    }

    /// What two looks at a running thread have in common: the frames from the root on, up to the first one that was called from
    /// another place or is another frame. `None` when one of them does not reach the root.
    pub fn common(before: &Stack, mut after: Stack) -> Option<Stack> {
        if before.problem.is_some() || after.problem.is_some() {
            return None;
        }
        let mut kept = 0;
        for (before, after) in before.raw.iter().rev().zip(after.raw.iter().rev()) {
            if (before.address, before.code) != (after.address, after.code) {
                break;
            }
            kept += 1;
            // What it calls now is not what it called then.
            if before.instruction != after.instruction {
                break;
            }
        }
        let left_out = after.frames.len() - kept;
        after.frames.drain(..left_out);
        after.raw.drain(..left_out);
        after.entries.drain(..left_out);
        after.moved = left_out > 0 || kept < before.raw.len();
        (after.holds, after.collects) = match after.holds {
            Some(_) => (after.holds, after.collects),
            None => (before.holds, before.collects),
        };
        Some(after)
    }

    /// Frames that are shown.
    pub fn length(&self) -> usize {
        self.frames.len()
    }
}

/// Whether the Python and the native stack of a thread fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agreement {
    Yes,
    No,
    /// It cannot be told.
    Unknown,
    /// The thread was about to announce a frame.
    Between,
}

impl Python {
    /// Finds the interpreter; `None` when the process runs no Python.
    pub fn find<'a>(
        live: i32,
        space: &AddressSpace<'_>,
        seen: impl Iterator<Item = &'a RawFrame>,
    ) -> Result<Option<Self>, String> {
        Ok(locate::find(live, space, seen)?.map(|place| Python { live, place }))
    }

    /// The threads that the interpreters know. `outer` tells the id of a thread for its id in the PID namespace of the process.
    pub fn threads(&self, outer: impl Fn(i32) -> Option<i32>) -> Result<Vec<PythonThread>, String> {
        let layout = &self.place.layout;
        let interpreters =
            threads::interpreters(self.live, layout, self.place.address).map_err(|torn| torn.to_string())?;
        if interpreters.is_empty() {
            return Err("its interpreter has not been started yet, or has ended".into());
        }
        let mut found: Vec<PythonThread> = Vec::new();
        let mut places = HashMap::new();
        for interpreter in &interpreters {
            let mut names = names::names(self.live, layout, interpreter);
            for thread in &interpreter.threads {
                let name = names.remove(&thread.pthread).unwrap_or_default();
                let state = (interpreter.gil, *thread);
                if let Some(known) = places.get(&thread.pthread) {
                    let known: &mut PythonThread = &mut found[*known];
                    known.states.push(state);
                    // The interpreter that the thread was started in knows it best.
                    if !name.is_empty() {
                        known.name = name;
                    }
                    continue;
                }
                places.insert(thread.pthread, found.len());
                found.push(PythonThread {
                    tid: outer(thread.tid).unwrap_or(0),
                    states: vec![state],
                    name,
                    stack: Stack::default(),
                    right: false,
                });
            }
        }
        Ok(found)
    }

    /// What is needed to follow what it counts, from one look to the next.
    pub fn counting(self) -> Counting {
        Counting {
            live: self.live,
            runtime: self.place.address,
            layout: Arc::clone(&self.place.layout),
            loaders: counts::Loaders::default(),
        }
    }

    /// Whether the interpreter is on its way out: threads that want its lock then never get it.
    pub fn is_ending(&self) -> bool {
        let at = self.place.address.wrapping_add(self.place.layout.runtime_finalizing);
        Snapshot::new(self.live).word("_PyRuntime", at).is_ok_and(|thread| thread != 0)
    }

    /// Reads the stacks of all threads as they are.
    pub fn read(&self, threads: &mut [PythonThread]) {
        let layout = &self.place.layout;
        let mut memory = Snapshot::new(self.live);
        frames::fetch(&mut memory, layout, threads.iter().flat_map(PythonThread::states));
        let chains: Vec<Vec<Chain>> = threads.iter().map(|thread| self.chains(&mut memory, thread)).collect();
        let all: Vec<frames::RawFrame> = chains.iter().flatten().flat_map(|chain| &chain.frames).copied().collect();
        code::fetch(&mut memory, layout, &all);
        let mut codes = Codes::default();
        for (thread, chains) in threads.iter_mut().zip(chains) {
            thread.stack = self.spell(&mut memory, &mut codes, thread, &chains);
        }
    }

    fn chains(&self, memory: &mut Snapshot, thread: &PythonThread) -> Vec<Chain> {
        thread.states().map(|state| frames::chain(memory, &self.place.layout, state)).collect()
    }

    fn spell(&self, memory: &mut Snapshot, codes: &mut Codes, thread: &PythonThread, chains: &[Chain]) -> Stack {
        let layout = &self.place.layout;
        let mut stack = Stack::default();
        let mut problem: Option<Torn> = None;
        for chain in chains {
            let first = stack.frames.len();
            // From the root to the leaf, so that the mark of an entry moves on from a frame that is not shown to the one that
            // it called.
            let mut entry = false;
            for frame in chain.frames.iter().rev() {
                entry |= frame.entry;
                match codes.get(memory, layout, frame.code) {
                    Ok(code) => {
                        let Some(shown) = code.frame(layout, frame.code, frame.instruction) else { continue };
                        stack.frames.push(shown);
                        stack.raw.push(*frame);
                        stack.entries.push(std::mem::take(&mut entry));
                    }
                    Err(torn) => problem = problem.or(Some(torn)),
                }
            }
            stack.frames[first..].reverse();
            stack.raw[first..].reverse();
            stack.entries[first..].reverse();
            problem = problem.or(chain.problem);
        }
        let now = Instant::now();
        for (gil, state) in &thread.states {
            // Asked of those that do not hold it as well, so that a copy has the memory of all that may.
            let collects = threads::collects(memory, layout, self.place.address, state);
            if stack.holds.is_none() && threads::holds(memory, layout, *gil, state) {
                (stack.holds, stack.collects) = (Some((*gil, now)), collects);
            }
        }
        stack.problem = problem.map(|torn| torn.to_string());
        stack
    }

    /// Makes ready for copying, during a stop, what the stack of a thread consists of.
    pub fn prepare<'a>(&'a self, thread: &'a PythonThread, missed: &[u64]) -> StoppedCopy<'a> {
        let layout = &self.place.layout;
        // As long as it runs, it mostly goes through the same memory.
        let mut memory = Snapshot::new(self.live);
        frames::fetch(&mut memory, layout, thread.states());
        let chains = self.chains(&mut memory, thread);
        let all: Vec<frames::RawFrame> = chains.iter().flat_map(|chain| &chain.frames).copied().collect();
        code::fetch(&mut memory, layout, &all);
        self.spell(&mut memory, &mut Codes::default(), thread, &chains);
        let mut pages: BTreeSet<u64> = memory.pages().into_iter().collect();
        pages.extend(missed);
        let memory = Snapshot::with_room(self.live, pages.into_iter().collect(), FETCHES);
        StoppedCopy { python: self, thread, shallow: all.len() <= SHALLOW, memory, taken: false, chains: None }
    }

    /// Reads the stack of a thread that may run meanwhile, as nearly at one moment as that can be. `missed` are pages that an
    /// earlier look lacked; it is set to what this one lacked.
    pub fn glance(&self, thread: &PythonThread, missed: &mut Vec<u64>) -> Stack {
        let mut copy = self.prepare(thread, missed);
        copy.take();
        let Some((stack, lacking)) = copy.finish() else { return Stack::default() };
        *missed = lacking;
        stack
    }

    /// Whether the stack of a thread fits to its native frames, which were taken at the same time.
    pub fn agreement(&self, thread: &PythonThread, native: &native::Thread, space: &AddressSpace<'_>) -> Agreement {
        let runtime = &self.place.runtime;
        let within = |frame: &RawFrame| self.address(frame, space);
        if native.frames.first().and_then(within).is_some_and(|address| runtime.is_announcing(address)) {
            return Agreement::Between;
        }
        if !native.incomplete.is_empty() || !runtime.knows_eval() {
            return Agreement::Unknown;
        }
        let run = native.frames.iter().filter_map(within).filter(|address| runtime.is_eval(*address)).count();
        if run == thread.stack.entered() { Agreement::Yes } else { Agreement::No }
    }

    /// The address of a frame in the file of the interpreter, when it belongs to it.
    fn address(&self, frame: &RawFrame, space: &AddressSpace<'_>) -> Option<u64> {
        let located = space.located(frame.lookup())?;
        (located.image.id == self.place.located.image.id).then(|| frame.lookup().wrapping_sub(located.bias))
    }

    /// Compilers put parts of the loop elsewhere, whose names distributions strip. When there is exactly one function without a
    /// name whose frames make the two stacks of all these threads agree, it is such a part.
    pub fn find_unnamed<'a>(
        &self,
        stacks: impl Iterator<Item = (&'a PythonThread, &'a [RawFrame])>,
        space: &AddressSpace<'_>,
    ) {
        let runtime = &self.place.runtime;
        if runtime.has_unnamed() || !runtime.knows_eval() {
            return;
        }
        let image = &*self.place.located.image;
        let stacks: Vec<(&PythonThread, Vec<u64>)> = stacks
            .map(|(thread, native)| {
                let addresses = native.iter().filter_map(|frame| self.address(frame, space));
                (thread, addresses.collect())
            })
            .collect();
        let lacking: Vec<Option<usize>> = stacks
            .iter()
            .map(|(thread, addresses)| {
                let run = addresses.iter().filter(|address| runtime.is_eval(**address)).count();
                thread.stack.entered().checked_sub(run)
            })
            .collect();
        // Mostly nothing is lacking, and looking functions up takes longer than counting.
        if lacking.iter().all(|lack| *lack == Some(0)) {
            return;
        }
        let mut counts: HashMap<(u64, u64), HashMap<usize, usize>> = HashMap::new();
        for (index, (_, addresses)) in stacks.iter().enumerate() {
            for address in addresses.iter().filter(|address| !runtime.is_eval(**address)) {
                if let Some(function) = image.function(*address).filter(|range| range.end - range.start >= LOOP_BYTES) {
                    *counts.entry((function.start, function.end)).or_default().entry(index).or_default() += 1;
                }
            }
        }
        let fits = |counts: &HashMap<usize, usize>| {
            lacking.iter().enumerate().all(|(index, lack)| *lack == Some(counts.get(&index).copied().unwrap_or(0)))
        };
        let mut found = counts.iter().filter(|(_, counts)| fits(counts)).map(|((start, end), _)| *start..*end);
        if let (Some(part), None) = (found.next(), found.next())
            && image.symbol(part.start).is_none()
        {
            runtime.set_unnamed(part);
        }
    }
}

/// What the interpreter of one process counts.
pub(crate) struct Counting {
    live: i32,
    runtime: u64,
    layout: Arc<Layout>,
    loaders: counts::Loaders,
}

impl Counting {
    /// Collections of garbage, and batches that data loaders have yielded when there are any; `None` when the interpreter cannot
    /// be read any more. Loaders that are not known yet are found by a search.
    pub fn look(&mut self, search: bool) -> Option<(u64, Option<u64>)> {
        let interpreters = threads::interpreters(self.live, &self.layout, self.runtime).ok()?;
        let collections = counts::collections(self.live, &self.layout, self.runtime, &interpreters)?;
        self.loaders.look(self.live, &self.layout);
        if search {
            self.loaders.search(self.live, &self.layout, &interpreters);
        }
        Some((collections, self.loaders.yielded()))
    }
}

/// The threads of a process by their ids in its PID namespace.
pub(crate) fn namespaced(pid: i32) -> HashMap<i32, i32> {
    let tids = procfs::threads(pid).unwrap_or_default();
    tids.into_iter().filter_map(|tid| Some((procfs::status(pid, tid).ok()?.namespaced_tid, tid))).collect()
}

/// Memory of one thread, copied during a stop.
pub(crate) struct StoppedCopy<'a> {
    python: &'a Python,
    thread: &'a PythonThread,
    shallow: bool,
    memory: Snapshot,
    taken: bool,
    chains: Option<Vec<Chain>>,
}

impl StoppedCopy<'_> {
    /// To be called while the thread is stopped, again when it is stopped again.
    pub fn take(&mut self) {
        self.memory.fill();
        self.taken = true;
        self.chains = None;
        if self.shallow {
            // Pages that it had not touched before are found out by following the pointers.
            let chains = self.python.chains(&mut self.memory, self.thread);
            for chain in &chains {
                code::fetch(&mut self.memory, &self.python.place.layout, &chain.frames);
            }
            self.chains = Some(chains);
        }
    }

    /// The stack, once the thread runs again, and the pages that were lacking; `None` when it was not stopped.
    pub fn finish(mut self) -> Option<(Stack, Vec<u64>)> {
        if !self.taken {
            return None;
        }
        self.memory.freeze();
        let chains = match self.chains.take() {
            Some(chains) => chains,
            None => self.python.chains(&mut self.memory, self.thread),
        };
        let stack = self.python.spell(&mut self.memory, &mut Codes::default(), self.thread, &chains);
        Some((stack, self.memory.missed().to_vec()))
    }
}

impl PythonThread {
    fn states(&self) -> impl Iterator<Item = &Thread> + Clone {
        self.states.iter().map(|(_, state)| state)
    }

    /// Why its stack may not be right, or not whole.
    pub fn doubt(&self) -> Option<String> {
        const MOVED: &str = "the inner frames changed while they were read; only the outer ones are shown";
        let moved = || self.stack.moved.then(|| MOVED.into());
        let ran = || (!self.right).then(|| "read while the thread ran, so it may be wrong".into());
        self.stack.problem.clone().or_else(moved).or_else(ran)
    }

    /// What is told of it, and the marks of its frames.
    pub fn finish(self, pid: i32, active: bool) -> (PySpyStacktrace, Vec<bool>) {
        let trace = PySpyStacktrace {
            incomplete: self.doubt().unwrap_or_default(),
            pid: pid as u32,
            thread_id: self.states.first().map_or(0, |(_, state)| state.pthread),
            thread_name: self.name,
            os_thread_id: u32::try_from(self.tid).unwrap_or(0),
            active,
            owns_gil: self.stack.holds.is_some(),
            collects_garbage: self.stack.holds.is_some() && self.stack.collects,
            frames: self.stack.frames,
        };
        (trace, self.stack.entries)
    }
}

/// A lock has one holder: when it went from one thread to another during the capture, the later one counts.
pub(crate) fn one_holder(threads: &mut [PythonThread]) {
    let mut last: HashMap<u64, Instant> = HashMap::new();
    for (gil, at) in threads.iter().filter_map(|thread| thread.stack.holds) {
        let latest = last.entry(gil).or_insert(at);
        *latest = at.max(*latest);
    }
    for thread in threads {
        thread.stack.holds = thread.stack.holds.filter(|(gil, at)| last.get(gil) == Some(at));
    }
}
