//! Finds the interpreter of a process, and reads its threads and their Python stacks.

use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::Arc,
    time::Instant,
};

use xpu_timer_proto::{
    procfs,
    server::{PySpyFrame, PySpyStacktrace, PySuspended, PySuspendedKind},
};

use crate::{
    cpython::{
        InterpreterError, Layout,
        runtime::{Runtime, file_name},
    },
    memory::{ReadError, Snapshot},
    native::{
        RawFrame,
        address_space::{AddressSpace, MappedObject},
    },
};

use super::{
    code::{self, CodeCache},
    exceptions,
    frames::{self, Chain, InterpreterFrame, Stack},
    greenlets, tasks,
    threads::{self, ThreadState},
};

/// The interpreter of one process.
pub(crate) struct PythonReader {
    /// A live thread of the process.
    pub(super) live_tid: i32,
    pub(super) location: InterpreterLocation,
}

/// The Python side of one kernel thread. It may run code of several interpreters, where one calls
/// the other.
pub(crate) struct PythonThread {
    /// The kernel's id, as this process sees it; 0 if unknown.
    pub tid: i32,
    /// The GIL and the state of each interpreter that the thread runs, innermost interpreter first.
    states: Vec<(u64, ThreadState)>,
    name: String,
    pub stack: Stack,
    /// Whether the stack is known to have existed at one moment.
    pub is_consistent: bool,
}

impl PythonReader {
    /// Finds the interpreter. `None` if the process runs no Python.
    pub(crate) fn find<'a>(
        live_tid: i32,
        space: &AddressSpace<'_>,
        seen: impl Iterator<Item = &'a RawFrame>,
    ) -> Result<Option<Self>, InterpreterError> {
        Ok(locate(live_tid, space, seen)?.map(|location| PythonReader { live_tid, location }))
    }

    /// The threads of all interpreters of the process. `map_tid` maps a thread id in the PID
    /// namespace of the process to the id in ours.
    pub(crate) fn threads(&self, map_tid: impl Fn(i32) -> Option<i32>) -> Result<Vec<PythonThread>, InterpreterError> {
        let layout = &self.location.layout;
        let interpreters = threads::interpreters(self.live_tid, layout, self.location.address)?;
        if interpreters.is_empty() {
            return Err(InterpreterError::NotRunning);
        }
        let mut found: Vec<PythonThread> = Vec::new();
        let mut thread_indices = HashMap::new();
        for interpreter in &interpreters {
            let mut names = threads::thread_names(self.live_tid, layout, interpreter);
            for thread in &interpreter.threads {
                let name = names.remove(&thread.pthread).unwrap_or_default();
                let state = (interpreter.gil, *thread);
                if let Some(known) = thread_indices.get(&thread.pthread) {
                    let known: &mut PythonThread = &mut found[*known];
                    known.states.push(state);
                    // The interpreter that the thread was started in has the best name.
                    if !name.is_empty() {
                        known.name = name;
                    }
                    continue;
                }
                thread_indices.insert(thread.pthread, found.len());
                found.push(PythonThread {
                    tid: map_tid(thread.tid).unwrap_or(0),
                    states: vec![state],
                    name,
                    stack: Stack::default(),
                    is_consistent: false,
                });
            }
        }
        Ok(found)
    }

    /// Whether the interpreter is shutting down. Threads that wait for the GIL then never get it.
    pub(crate) fn is_finalizing(&self) -> bool {
        let at = self.location.address.wrapping_add(self.location.layout.runtime_finalizing);
        Snapshot::new(self.live_tid).read_u64("_PyRuntime", at).is_ok_and(|thread| thread != 0)
    }

    /// Reads the current stacks of all threads.
    pub(crate) fn read(&self, threads: &mut [PythonThread]) {
        let layout = &self.location.layout;
        let mut memory = Snapshot::new(self.live_tid);
        frames::fetch(&mut memory, layout, threads.iter().flat_map(PythonThread::states));
        let chains: Vec<Vec<Chain>> = threads.iter().map(|thread| self.chains(&mut memory, thread)).collect();
        let all: Vec<InterpreterFrame> = chains.iter().flatten().flat_map(|chain| &chain.frames).copied().collect();
        code::fetch(&mut memory, layout, &all);
        let mut codes = CodeCache::default();
        for (thread, chains) in threads.iter_mut().zip(chains) {
            thread.stack = self.build_stack(&mut memory, &mut codes, thread, &chains);
        }
    }

    pub(super) fn chains(&self, memory: &mut Snapshot, thread: &PythonThread) -> Vec<Chain> {
        thread.states().map(|state| frames::chain(memory, &self.location.layout, state)).collect()
    }

    pub(super) fn build_stack(
        &self,
        memory: &mut Snapshot,
        codes: &mut CodeCache,
        thread: &PythonThread,
        chains: &[Chain],
    ) -> Stack {
        let layout = &self.location.layout;
        let mut stack = Stack::default();
        let mut problem: Option<ReadError> = None;
        for chain in chains {
            let first = stack.frames.len();
            // From the root to the leaf, so that the mark of an entry moves from a hidden frame to
            // the frame that it called.
            let mut entry = false;
            for frame in chain.frames.iter().rev() {
                entry |= frame.entry;
                match codes.frame(memory, layout, (frame.code, frame.instruction)) {
                    Ok(Some(shown)) => {
                        stack.frames.push(shown);
                        stack.raw_frames.push(*frame);
                        stack.entries.push(std::mem::take(&mut entry));
                    }
                    Ok(None) => {}
                    Err(error) => problem = problem.or(Some(error)),
                }
            }
            stack.frames[first..].reverse();
            stack.raw_frames[first..].reverse();
            stack.entries[first..].reverse();
            problem = problem.or(chain.problem);
        }
        stack.suspended = thread.states().flat_map(|state| self.pending_tasks(memory, codes, state, &stack)).collect();
        stack.awaits_alone = tasks::awaits_alone(memory, layout, &stack.frames, &stack.raw_frames);
        self.add_awaits(memory, codes, &mut stack);
        let states = thread.states();
        stack.exceptions = states.flat_map(|state| exceptions::handled(memory, layout, codes, state)).collect();
        let now = Instant::now();
        for (gil, state) in &thread.states {
            // Also read for threads that do not hold the GIL, so that a copy has the memory of
            // every possible holder.
            let collects = threads::collects(memory, layout, self.location.address, state);
            if stack.held_gil.is_none() && threads::holds(memory, layout, *gil, state) {
                (stack.held_gil, stack.collects) = (Some((*gil, now)), collects);
            }
        }
        stack.problem = problem.map(|error| error.to_string());
        stack
    }

    /// Adds the coroutines that wait for each other to the stack of an event loop that waits.
    fn add_awaits(&self, memory: &mut Snapshot, codes: &mut CodeCache, stack: &mut Stack) {
        let layout = &self.location.layout;
        let awaits = tasks::awaits(memory, layout, codes, &stack.frames, &stack.raw_frames);
        let (frames, raw_frames): (Vec<_>, Vec<_>) =
            awaits.into_iter().filter_map(|frame| Some((shown(memory, layout, codes, frame)?, frame))).unzip();
        stack.entries.splice(..0, frames.iter().map(|_| false));
        stack.frames.splice(..0, frames);
        stack.raw_frames.splice(..0, raw_frames);
    }

    /// The tasks that wait in the event loops of a thread with this stack.
    fn pending_tasks(
        &self,
        memory: &mut Snapshot,
        codes: &mut CodeCache,
        thread: &ThreadState,
        stack: &Stack,
    ) -> Vec<PySuspended> {
        let layout = &self.location.layout;
        let tasks = tasks::pending(memory, layout, codes, thread, &stack.frames, &stack.raw_frames);
        let message = |task: tasks::PendingTask| PySuspended {
            kind: PySuspendedKind::Task.into(),
            name: task.name,
            frames: task.frames.into_iter().filter_map(|frame| shown(memory, layout, codes, frame)).collect(),
            awaits: task.awaits,
        };
        tasks.into_iter().map(message).collect()
    }
}

/// Parts of the paths of the libraries that switch between greenlets. A thread that does has one of
/// them on its stack.
const GREENLET_FILES: [&str; 3] = ["/gevent/", "/eventlet/", "/greenlet/"];
/// The name of the greenlet in which a thread started, and the class of such a greenlet.
const MAIN_GREENLET: &str = "main";
const GREENLET_CLASS: &str = "greenlet";

impl PythonReader {
    /// Adds the suspended greenlets of the process to the first thread that switches between
    /// greenlets. If its hub waits, the code for which it waits is added to its stack.
    pub(crate) fn add_greenlets(&self, threads: &mut [PythonThread], deadline: Instant) {
        let layout = &self.location.layout;
        // Deep stacks repeat a few functions.
        let mut seen = HashSet::new();
        let mut switches = |thread: &&mut PythonThread| {
            let Stack { frames, raw_frames, .. } = &thread.stack;
            let mut new = frames.iter().zip(raw_frames).filter(|(_, raw)| seen.insert(raw.code));
            new.any(|(frame, _)| GREENLET_FILES.iter().any(|file| frame.file_name.contains(file)))
        };
        let Some(thread) = threads.iter_mut().find(&mut switches) else { return };
        let mut memory = Snapshot::new(self.live_tid);
        let Some(collector) = thread
            .states()
            .next()
            .and_then(|state| threads::collector_of(&mut memory, layout, self.location.address, state))
        else {
            return;
        };
        let mut codes = CodeCache::default();
        let mut mains = Vec::new();
        for greenlet in greenlets::suspended(self.live_tid, layout, collector, deadline) {
            let frames = greenlet.frames.into_iter();
            let (frames, raw_frames): (Vec<_>, Vec<_>) =
                frames.filter_map(|frame| Some((shown(&mut memory, layout, &mut codes, frame)?, frame))).unzip();
            let is_main = greenlet.class == GREENLET_CLASS
                && frames.last().is_some_and(|root: &PySpyFrame| root.func_name == "<module>");
            if is_main {
                mains.push((frames.clone(), raw_frames));
            }
            let name = if is_main { MAIN_GREENLET.into() } else { greenlet.class };
            let kind = PySuspendedKind::Greenlet.into();
            thread.stack.suspended.push(PySuspended { kind, name, frames, awaits: String::new() });
        }
        let root = thread.stack.frames.last().map_or("", |root| &root.file_name);
        if root.contains("hub")
            && GREENLET_FILES.iter().any(|file| root.contains(file))
            && let [(frames, raw_frames)] = &mut mains[..]
        {
            thread.stack.entries.extend(raw_frames.iter().map(|frame: &InterpreterFrame| frame.entry));
            thread.stack.frames.append(frames);
            thread.stack.raw_frames.append(raw_frames);
        }
    }
}

/// A frame of a coroutine or greenlet. `None` if its code cannot be read or is in no file.
fn shown(memory: &mut Snapshot, layout: &Layout, codes: &mut CodeCache, frame: InterpreterFrame) -> Option<PySpyFrame> {
    codes.frame(memory, layout, (frame.code, frame.instruction)).ok()?
}

/// The threads of a process by their ids in its PID namespace.
pub(crate) fn tids_by_namespaced_tid(pid: i32) -> HashMap<i32, i32> {
    let tids = procfs::threads(pid).unwrap_or_default();
    tids.into_iter().filter_map(|tid| Some((procfs::status(pid, tid).ok()?.namespaced_tid, tid))).collect()
}

impl PythonThread {
    pub(super) fn states(&self) -> impl Iterator<Item = &ThreadState> + Clone {
        self.states.iter().map(|(_, state)| state)
    }

    /// Why the stack may be wrong or incomplete.
    pub(crate) fn incomplete_reason(&self) -> Option<String> {
        const MOVED: &str = "the inner frames changed while they were read; only the outer ones are shown";
        let is_cut = || self.stack.is_cut.then(|| MOVED.into());
        let ran = || (!self.is_consistent).then(|| "read while the thread ran, so it may be wrong".into());
        self.stack.problem.clone().or_else(is_cut).or_else(ran)
    }

    /// The message for the thread, and for each of its frames whether C code entered the
    /// interpreter with it.
    pub(crate) fn finish(self, pid: i32, active: bool) -> (PySpyStacktrace, Vec<bool>) {
        let trace = PySpyStacktrace {
            incomplete: self.incomplete_reason().unwrap_or_default(),
            pid: pid as u32,
            thread_id: self.states.first().map_or(0, |(_, state)| state.pthread),
            thread_name: self.name,
            os_thread_id: u32::try_from(self.tid).unwrap_or(0),
            active,
            owns_gil: self.stack.held_gil.is_some(),
            collects_garbage: self.stack.held_gil.is_some() && self.stack.collects,
            frames: self.stack.frames,
            exceptions: self.stack.exceptions,
            suspended: self.stack.suspended,
            awaits_alone: self.stack.awaits_alone,
        };
        (trace, self.stack.entries)
    }
}

/// Keeps only the last holder of each GIL. The GIL may have moved from one thread to another during
/// the capture.
pub(crate) fn keep_last_holder(threads: &mut [PythonThread]) {
    let mut last: HashMap<u64, Instant> = HashMap::new();
    for (gil, at) in threads.iter().filter_map(|thread| thread.stack.held_gil) {
        let latest = last.entry(gil).or_insert(at);
        *latest = at.max(*latest);
    }
    for thread in threads {
        thread.stack.held_gil = thread.stack.held_gil.filter(|(gil, at)| last.get(gil) == Some(at));
    }
}

/// Where the interpreter of one process is, and its version. Facts about an object apply to all
/// processes of the node that have it mapped.
pub(super) struct InterpreterLocation {
    pub object: Rc<MappedObject>,
    pub runtime: Arc<Runtime>,
    pub layout: Arc<Layout>,
    /// Address of `_PyRuntime` in the process.
    pub address: u64,
}

/// Finds the interpreter. `None` if the process runs no Python. The search includes the objects on
/// the native stacks: if the process runs Python code, the interpreter is one of them, whatever its
/// name.
fn locate<'a>(
    live_tid: i32,
    space: &AddressSpace<'_>,
    seen: impl Iterator<Item = &'a RawFrame>,
) -> Result<Option<InterpreterLocation>, InterpreterError> {
    let exe = std::fs::read_link(format!("/proc/{live_tid}/exe")).unwrap_or_default();
    let exe = exe.to_string_lossy();
    let is_library = |path: &str| file_name(path).starts_with("libpython") && file_name(path).contains(".so");
    let mut claims = file_name(&exe).starts_with("python");
    let mut known = Vec::new();
    let mut idle: Option<InterpreterLocation> = None;
    // The candidates are evaluated lazily: each kind costs more than the one before, and the first
    // one usually suffices.
    let executable = space.first_executable().filter(|mapping| mapping.path == exe).map(|mapping| mapping.start);
    let libraries = std::iter::once_with(|| {
        let code = space.executables();
        let named = code.iter().filter(|mapping| mapping.path == exe || is_library(&mapping.path));
        named.inspect(|mapping| claims |= is_library(&mapping.path)).map(|mapping| mapping.start).collect::<Vec<_>>()
    });
    let addresses = executable.into_iter().chain(seen.map(RawFrame::lookup)).chain(libraries.flatten());
    for address in addresses {
        let Some(object) = space.object_at(address) else { continue };
        if known.contains(&object.image.id) {
            continue;
        }
        known.push(object.image.id);
        if let Some(runtime) = object.image.python() {
            let address = runtime.address.wrapping_add(object.bias);
            let layout = runtime.layout(live_tid, || object.image.elf(), &object.image.path, object.bias)?;
            let started =
                Snapshot::new(live_tid).read_u64("_PyRuntime", address.wrapping_add(layout.runtime_interpreters));
            let location = InterpreterLocation { object, runtime, layout, address };
            if started != Ok(0) {
                return Ok(Some(location));
            }
            // A program may contain an interpreter and use that of a library.
            idle.get_or_insert(location);
        }
    }
    if idle.is_some() {
        return Ok(idle);
    }
    if claims {
        return Err(InterpreterError::NoRuntime);
    }
    Ok(None)
}
