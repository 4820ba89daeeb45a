//! Counts of the interpreters of living processes, read repeatedly for metrics: garbage
//! collections, and batches that PyTorch's data loaders have yielded. The counts are numbers in the
//! memory of the process, so reading them runs nothing in it and stops nothing. A process whose
//! memory the kernel locks is skipped until it answers.
//!
//! No list of the iterators of data loaders exists. A search starts from the frames of all threads:
//! from their variables, through suspended generators, and a few steps through objects,
//! dictionaries and lists. The program runs during the search, so a step counts only if it leads to
//! a living object of a class with a name.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use xpu_timer_proto::{
    procfs,
    ring::{FrameLayout, RawStack},
    server::PySpyFrame,
};

use crate::{
    cpython::Layout,
    memory::{ReadError, Snapshot},
    native::address_space::AddressSpace,
    objects::Images,
    pool::{self, PoolConfig},
};

use super::{
    builtins::{
        MIN_ADDRESS, attribute_values, attributes, class_of, items, items_from, pairs_up_to, read_integer, type_name,
    },
    code::{self, CodeCache},
    frames::{self, InterpreterFrame},
    reader::PythonReader,
    threads::{self, InterpreterState},
};

const POOL: PoolConfig = PoolConfig { name: "xpu_count", parallel: 1, jobs_per_thread: usize::MAX };
/// Delay before the next search after a search found no interpreter. Most such processes never
/// start one.
const SEARCH_DELAY: Duration = Duration::from_secs(5);
const MAX_SEARCH_DELAY: Duration = Duration::from_secs(60);

/// The counters of the interpreters of one process since they started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Garbage collections of all generations.
    pub collections: u64,
    /// Batches that PyTorch's data loaders have yielded; `None` until a data loader is found. An
    /// iterator is found only if it lives during a search. Batches that it yields between the last
    /// read and its end are not counted.
    pub batches: Option<u64>,
    /// Where the interpreter keeps its frames.
    pub frames: Option<FrameLayout>,
}

/// The frames of a launch, innermost first.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedStack {
    /// Ticket of the operation.
    pub ticket: u64,
    /// Its frames. Code that no longer exists is `??`.
    pub frames: Vec<PySpyFrame>,
}

/// Reads the counts of processes again and again.
#[derive(Default)]
pub struct Counter {
    images: Arc<Images>,
    processes: HashMap<i32, Arc<Mutex<Process>>>,
}

/// State of one process.
#[derive(Default)]
struct Process {
    /// Start time of the process. It distinguishes the process from a later one with the same pid.
    started: u64,
    python: Option<CountReader>,
    /// When to search for an interpreter again, and the delay that led to this time.
    next_search: Option<(Instant, Duration)>,
}

impl Counter {
    /// Reads the counts of each of these processes. The result is `None` for a process that runs no
    /// readable CPython or does not answer by the deadline. `search` also looks for new iterators
    /// of data loaders, which takes some milliseconds. Processes that are not in the list are
    /// forgotten.
    pub fn read(&mut self, pids: &[i32], search: bool, deadline: Duration) -> Vec<Option<Counts>> {
        self.processes.retain(|pid, _| pids.contains(pid));
        let jobs: Vec<(i32, Arc<Mutex<Process>>)> =
            pids.iter().map(|pid| (*pid, Arc::clone(self.processes.entry(*pid).or_default()))).collect();
        let mut counts_of = vec![None; pids.len()];
        let images = Arc::clone(&self.images);
        // A locked process is one for which an earlier read still waits for the kernel.
        let work =
            move |(pid, process): (i32, Arc<Mutex<Process>>)| process.try_lock().ok()?.read(pid, &images, search);
        let started_workers =
            pool::run(jobs, &POOL, Instant::now() + deadline, work, |index, counts| counts_of[index] = counts);
        if let Err(error) = started_workers {
            tracing::debug!("cannot start a thread to count with: {error}");
        }
        counts_of
    }

    /// Names the frames of stacks that a process of the last [`Counter::read`] has stored. Empty if
    /// it does not answer by the deadline. The code of functions lives as long as their module, so
    /// it can be named a moment later.
    pub fn name_stacks(&mut self, pid: i32, stacks: Vec<RawStack>, deadline: Duration) -> Vec<NamedStack> {
        let Some(process) = self.processes.get(&pid).map(Arc::clone) else { return Vec::new() };
        let mut named = Vec::new();
        let work = |(process, stacks): (Arc<Mutex<Process>>, Vec<RawStack>)| -> Option<Vec<NamedStack>> {
            Some(process.try_lock().ok()?.python.as_ref()?.name_stacks(&stacks))
        };
        let jobs = vec![(process, stacks)];
        let started = pool::run(jobs, &POOL, Instant::now() + deadline, work, |_, stacks| {
            named = stacks.unwrap_or_default();
        });
        if let Err(error) = started {
            tracing::debug!("cannot start a thread to name stacks with: {error}");
        }
        named
    }
}

impl Process {
    fn read(&mut self, pid: i32, images: &Images, search: bool) -> Option<Counts> {
        let started = procfs::stat(pid).ok()?.start_time;
        if self.started != started {
            *self = Process { started, ..Process::default() };
        }
        if self.python.is_none() {
            let now = Instant::now();
            if self.next_search.is_some_and(|(next_search, _)| now < next_search) {
                return None;
            }
            let delay = self.next_search.map_or(SEARCH_DELAY, |(_, before)| (before * 2).min(MAX_SEARCH_DELAY));
            self.next_search = Some((now + delay, delay));
            let space = AddressSpace::open(images, pid, pid).ok()?;
            self.python = PythonReader::find(pid, &space, std::iter::empty()).ok()?.map(CountReader::new);
        }
        let counts = self.python.as_mut()?.read(search);
        if counts.is_none() {
            // The interpreter is starting or ending, or the process has executed another program.
            self.python = None;
        }
        let frames = self.python.as_ref().and_then(|python| frame_layout(&python.layout, python.runtime));
        counts.map(|(collections, batches)| Counts { collections, batches, frames })
    }
}

/// Reads the counts of one interpreter again and again.
struct CountReader {
    live_tid: i32,
    runtime: u64,
    layout: Arc<Layout>,
    loaders: DataLoaders,
}

impl CountReader {
    /// Prepares to read the counts of an interpreter.
    pub(crate) fn new(python: PythonReader) -> Self {
        CountReader {
            live_tid: python.live_tid,
            runtime: python.location.address,
            layout: python.location.layout,
            loaders: DataLoaders::default(),
        }
    }

    /// The number of garbage collections, and the number of batches that data loaders have yielded,
    /// if there are any. `None` if the interpreter is no longer readable. Unknown data loaders are
    /// found only by a search.
    pub(crate) fn read(&mut self, search: bool) -> Option<(u64, Option<u64>)> {
        let interpreters = threads::interpreters(self.live_tid, &self.layout, self.runtime).ok()?;
        let collections = threads::collections(self.live_tid, &self.layout, self.runtime, &interpreters)?;
        self.loaders.update(self.live_tid, &self.layout);
        if search {
            self.loaders.search(self.live_tid, &self.layout, &interpreters);
        }
        Some((collections, self.loaders.yielded()))
    }

    /// Names the frames of stacks that the hook has recorded as addresses. A frame whose code is
    /// gone is shown as `??`.
    fn name_stacks(&self, stacks: &[RawStack]) -> Vec<NamedStack> {
        let layout = &*self.layout;
        let memory = &mut Snapshot::new(self.live_tid);
        let frame = |(code, instruction): &(u64, u64)| InterpreterFrame {
            address: 0,
            code: *code,
            instruction: *instruction,
            previous: 0,
            entry: false,
        };
        let all: Vec<InterpreterFrame> = stacks.iter().flat_map(|stack| &stack.frames).map(frame).collect();
        code::fetch(memory, layout, &all);
        let mut codes = CodeCache::default();
        let mut named = |(code, instruction): &(u64, u64)| match codes.get(memory, layout, *code) {
            Ok(found) => found.frame(layout, *instruction),
            Err(_) => Some(PySpyFrame { func_name: "??".into(), file_name: "??".into(), module: String::new() }),
        };
        let stack = |stack: &RawStack| NamedStack {
            ticket: stack.ticket,
            frames: stack.frames.iter().filter_map(&mut named).collect(),
        };
        stacks.iter().map(stack).collect()
    }
}

/// The offsets that the hook needs to follow its own frames. `None` if an offset is unusually
/// large.
fn frame_layout(layout: &Layout, runtime: u64) -> Option<FrameLayout> {
    let offset = |offset: u64| u16::try_from(offset).ok().filter(|offset| *offset < u16::MAX);
    let optional = |optional: Option<u64>| optional.map_or(Some(None), |known| offset(known).map(Some));
    Some(FrameLayout {
        runtime,
        interpreters: offset(layout.runtime_interpreters)?,
        interpreter_next: offset(layout.interpreter_next)?,
        threads: offset(layout.interpreter_threads)?,
        thread_next: offset(layout.thread_next)?,
        thread_id: offset(layout.thread_id)?,
        thread_frame: offset(layout.thread_frame)?,
        cframe_frame: optional(layout.cframe_frame)?,
        frame_previous: offset(layout.frame_previous)?,
        frame_code: offset(layout.frame_code)?,
        frame_instruction: offset(layout.frame_instruction)?,
        instruction_bytes: layout.instruction_bytes() as u16,
        frame_owner: optional(layout.frame_owner)?,
    })
}

/// End of the class name of a base of PyTorch's iterators and of those derived from them elsewhere.
const ITERATOR_SUFFIX: &[u8] = b"BaseDataLoaderIter";
/// The attribute with the number of batches, and the one with a random number that distinguishes
/// iterators at the same address.
const YIELDED_ATTRIBUTE: &str = "_num_yielded";
const SEED_ATTRIBUTE: &str = "_base_seed";
/// Maximum number of objects in one search, and of steps from a frame.
const MAX_OBJECTS: usize = 4000;
const MAX_STEPS: usize = 6;
/// Maximum number of variables of one frame to follow.
const MAX_VARIABLES: u64 = 192;
/// Number of words after the header of a wrapper that may refer to another iterator. Some of them
/// are numbers.
const WRAPPER_WORDS: u64 = 3;
/// A list or dictionary with more entries is a model or a data set and is not followed. It is also
/// the maximum number of attributes of an object to follow.
const MAX_REFERENCES: u64 = 96;
/// Maximum number of cached classes, and of classes in a chain of bases.
const MAX_CLASSES: usize = 1 << 14;
const MAX_BASES: usize = 16;

/// The iterators of a process's data loaders that were found, and the number of their batches.
#[derive(Debug, Default)]
struct DataLoaders {
    /// Last count of each iterator, by its address.
    known: HashMap<u64, Count>,
    /// Whether an iterator was ever found.
    found: bool,
    yielded: u64,
    classes: Classes,
}

/// The fields of an iterator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Count {
    yielded: u64,
    seed: Option<u64>,
}

/// Kinds of classes by their addresses.
type Classes = HashMap<u64, ObjectKind>;

/// How to follow an object of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObjectKind {
    Iterator,
    Generator,
    List,
    Tuple,
    Dict,
    /// An iterator written in C that contains other iterators.
    Wrapper,
    /// An object whose attributes may lead to an iterator.
    Object,
    Other,
}

impl DataLoaders {
    /// The number of batches of all iterators that were found. `None` if there was none.
    pub(crate) fn yielded(&self) -> Option<u64> {
        self.found.then_some(self.yielded)
    }

    /// Reads the known iterators. Forgets those that were freed or have become something else.
    pub(crate) fn update(&mut self, tid: i32, layout: &Layout) {
        let memory = &mut Snapshot::new(tid);
        let (classes, yielded) = (&mut self.classes, &mut self.yielded);
        self.known.retain(|address, last| {
            let count = (kind(memory, layout, classes, *address) == Some(ObjectKind::Iterator))
                .then(|| count(memory, layout, *address))
                .flatten();
            let Some(count) = count else { return false };
            // For the next epoch, an iterator starts again at 0. A new iterator may have the
            // address of an old one.
            let before = if count.seed == last.seed { last.yielded } else { 0 };
            *yielded += count.yielded.checked_sub(before).unwrap_or(count.yielded);
            *last = count;
            true
        });
    }

    /// Searches for unknown iterators.
    pub(crate) fn search(&mut self, tid: i32, layout: &Layout, interpreters: &[InterpreterState]) {
        let memory = &mut Snapshot::new(tid);
        let threads = interpreters.iter().flat_map(|interpreter| &interpreter.threads);
        frames::fetch(memory, layout, threads.clone());
        let mut level: Vec<u64> = Vec::new();
        for thread in threads {
            let chain = frames::chain(memory, layout, thread);
            for frame in chain.frames.iter().rev() {
                variables(memory, layout, frame.address, &mut level);
            }
        }
        let mut seen: HashSet<u64> = HashSet::new();
        for _ in 0..MAX_STEPS {
            level.retain(|object| seen.len() < MAX_OBJECTS && *object >= MIN_ADDRESS && seen.insert(*object));
            memory.fetch(level.iter().map(|object| (*object, layout.object_size)));
            let mut next = Vec::new();
            for object in level {
                match kind(memory, layout, &mut self.classes, object) {
                    Some(ObjectKind::Iterator) if !self.known.contains_key(&object) => {
                        if let Some(count) = count(memory, layout, object) {
                            self.known.insert(object, count);
                            self.yielded += count.yielded;
                            self.found = true;
                        }
                    }
                    Some(kind) => references(memory, layout, kind, object, &mut next),
                    None => {}
                }
            }
            level = next;
        }
    }
}

fn count(memory: &mut Snapshot, layout: &Layout, iterator: u64) -> Option<Count> {
    let [yielded, seed] = attributes(memory, layout, iterator, [YIELDED_ATTRIBUTE, SEED_ATTRIBUTE]).ok()?;
    let seed = seed.and_then(|seed| read_integer(memory, layout, seed));
    Some(Count { yielded: read_integer(memory, layout, yielded?)?, seed })
}

/// The objects that the variables of a frame refer to. From 3.14 on, the lowest bits of a reference
/// encode its ownership.
fn variables(memory: &mut Snapshot, layout: &Layout, frame: u64, found: &mut Vec<u64>) {
    let words = match layout.code_bytes {
        Some(_) => MAX_VARIABLES,
        // Up to 3.10 a frame is an object that has the number of its variables.
        None => memory.read_u64("a frame", frame.wrapping_add(layout.bytes_length)).unwrap_or(0).min(MAX_VARIABLES),
    };
    for index in 0..words {
        // The memory after the last frame may end before the maximum number of variables.
        let Ok(word) = memory.read_u64("a frame", frame.wrapping_add(layout.frame_locals + index * 8)) else { return };
        found.push(word & !7);
    }
}

/// The objects that an object refers to.
fn references(memory: &mut Snapshot, layout: &Layout, kind: ObjectKind, object: u64, found: &mut Vec<u64>) {
    match kind {
        ObjectKind::List => found.extend(items(memory, layout, object, MAX_REFERENCES)),
        ObjectKind::Tuple => {
            let first = object.wrapping_add(layout.tuple_items);
            found.extend(items_from(memory, layout, object, first, MAX_REFERENCES));
        }
        ObjectKind::Wrapper => {
            let words = (0..WRAPPER_WORDS).map(|index| object.wrapping_add(layout.object_size + index * 8));
            found.extend(words.filter_map(|address| memory.read_u64("an iterator", address).ok()));
        }
        ObjectKind::Dict => {
            let pairs = pairs_up_to(memory, layout, object, MAX_REFERENCES).unwrap_or_default();
            found.extend(pairs.into_iter().map(|(_, value)| value));
        }
        ObjectKind::Object => {
            found.extend(attribute_values(memory, layout, object, MAX_REFERENCES).unwrap_or_default());
        }
        ObjectKind::Generator => {
            let frame = object.wrapping_add(layout.generator_frame);
            let frame = if layout.code_bytes.is_some() { Ok(frame) } else { memory.read_u64("a generator", frame) };
            if let Ok(frame) = frame {
                variables(memory, layout, frame, found);
            }
        }
        ObjectKind::Iterator | ObjectKind::Other => {}
    }
}

/// The kind of an object. `None` if there is no living object at the address.
fn kind(memory: &mut Snapshot, layout: &Layout, classes: &mut Classes, object: u64) -> Option<ObjectKind> {
    let class = class_of(memory, layout, object)?;
    if let Some(kind) = classes.get(&class) {
        return Some(*kind);
    }
    let kind = kind_of_class(memory, layout, class).ok()?;
    if classes.len() >= MAX_CLASSES {
        classes.clear();
    }
    classes.insert(class, kind);
    Some(kind)
}

fn kind_of_class(memory: &mut Snapshot, layout: &Layout, class: u64) -> Result<ObjectKind, ReadError> {
    const CLASS: &str = "a class";
    let mut found = ObjectKind::Object;
    let mut one = class;
    for _ in 0..MAX_BASES {
        if one == 0 {
            return Ok(found);
        }
        let text = type_name(memory, layout, one)?;
        match &text[..] {
            name if name.ends_with(ITERATOR_SUFFIX) => return Ok(ObjectKind::Iterator),
            b"generator" => return Ok(ObjectKind::Generator),
            b"list" => return Ok(ObjectKind::List),
            b"tuple" => return Ok(ObjectKind::Tuple),
            b"dict" => return Ok(ObjectKind::Dict),
            b"enumerate" | b"zip" | b"map" | b"filter" | b"itertools.islice" | b"itertools.chain" => {
                return Ok(ObjectKind::Wrapper);
            }
            // The parts of a model or a program refer to almost everything.
            b"Module" | b"TensorBase" | b"Tensor" | b"Optimizer" | b"Dataset" | b"module" | b"type" | b"function"
            | b"code" | b"method" => found = ObjectKind::Other,
            _ => {}
        }
        one = memory.read_u64(CLASS, one.wrapping_add(layout.type_base))?;
    }
    Err(ReadError { what: "the bases of a class", address: class })
}
