//! Captures one process: its state, its threads and its interpreter.
//!
//! Sleeping threads are read while they sleep. The kernel samples running threads (`running.rs`).
//! Where sampling is forbidden, a thread is reported as running, with the Python frames that memory
//! has. Threads are stopped only with [`Options::force_ptrace`].

use std::{
    cell::OnceCell,
    collections::{HashMap, HashSet},
    rc::Rc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use gimli::UnwindContext;
use xpu_timer_proto::{
    printable::MOST_COMMAND_BYTES,
    procfs::{self, Mapping, Status, state_text},
    secrets,
    server::{CaptureMethod, PstackStacktrace, PySpyStacktrace},
};

use crate::{
    error::Error,
    kernel::{
        Tables,
        awaited::{self, Sleeper, Waits},
        permission,
    },
    memory::{PAGE, Region, Snapshot},
    native::{
        Registers,
        address_space::AddressSpace,
        perf::Sample,
        stop::stop_all,
        thread::{ReadResult, Thread},
    },
    objects::{Images, bytes::exported_symbol},
    python::{
        consistency::{self, Agreement, StoppedCopy},
        reader::{self, PythonReader, PythonThread},
    },
    symbols::demangle,
};

use super::{CodeLocations, Job, Options, RawProcess, live_thread, running::RunningThreads};

/// How often to stop a thread until its Python stack and its native stack agree.
const ATTEMPTS: usize = 4;

pub(crate) fn unix_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Captures one process.
pub(crate) fn capture(job: Job, images: &Images) -> RawProcess {
    let Job { pid, options, deadline, tables } = job;
    let begin = Instant::now();
    let mut process = RawProcess { pid, ..RawProcess::default() };
    process.sample.captured_unix_ns = unix_ns();
    let mut capture = Capture {
        pid,
        options: &options,
        deadline,
        images,
        tables: &tables,
        process: &mut process,
        context: Box::default(),
    };
    if let Err(error) = capture.run() {
        capture.process.sample.errors.push(error.to_string());
        if error.is_gone() {
            capture.process.sample.process_state = state_text('X');
        }
    }
    process.sample.capture_ns = begin.elapsed().as_nanos() as u64;
    process
}

/// Bytes of the stack to copy at a fatal signal. Most stacks use a few KB, and of a stack that has
/// overflowed, the inner frames suffice.
const FAULT_STACK_BYTES: usize = 256 << 10;
/// Number of pages above the stack pointer that may be unmapped: a function with large variables
/// has overflowed its stack.
const MAX_OVERFLOW_PAGES: u64 = 1 << 12;

/// Takes the native and the Python stack of one thread that waits in a signal handler, the native
/// one from its registers at the signal. Calls `release` when the thread need not wait any longer.
/// Of a process that aborts, the second part is the reason.
pub(crate) fn capture_fault(
    pid: i32,
    tid: i32,
    signal: i32,
    registers: &[u64; 17],
    images: &Images,
    release: impl FnOnce(),
) -> (RawProcess, Option<String>) {
    let mut process = RawProcess { pid, ..RawProcess::default() };
    process.sample.captured_unix_ns = unix_ns();
    let own_tid = tid;
    let tid = reader::tids_by_namespaced_tid(pid).get(&own_tid).copied().unwrap_or(own_tid);
    let mut thread = Thread::default();
    (thread.tid, thread.status) = (tid, procfs::status(pid, tid).unwrap_or_default());
    let taken = AddressSpace::open(images, pid, tid).and_then(|space| {
        let first = interrupted(&space, tid, registers[SAMPLED_SP]);
        let registers = Registers::from_sample(first.as_ref().unwrap_or(registers));
        let sp = registers.sp();
        let is_readable = |address: &u64| space.mapping(*address).is_some_and(|mapping| mapping.readable);
        let pages = (1..MAX_OVERFLOW_PAGES).map(|page| (sp & !(PAGE - 1)) + page * PAGE);
        let start = std::iter::once(sp).chain(pages).find(is_readable).unwrap_or(sp);
        let mapping = space.mapping(start);
        let stack = Region::read_stack(tid, start, mapping.as_deref(), vec![1; FAULT_STACK_BYTES])?;
        let reason = if signal == libc::SIGABRT { abort_reason(&space, tid, &stack) } else { None };
        Ok((space, Sample { registers, stack, in_kernel: false }, reason))
    });
    let mut why = None;
    let mut places = CodeLocations::default();
    // The unwind tables and the code of a process that has ended cannot be read any more.
    let unwound = taken.map(|(space, sample, reason)| {
        why = reason;
        thread.store_sample(pid, sample, &space, &mut Box::default());
        process.frames.push(places.of(&thread.frames, Some(&space)));
        if let Some((stack, entries)) = waiting_python(pid, &thread, own_tid, &space) {
            process.sample.py_stacktrace.push(stack);
            process.python_entries.push(entries);
        }
    });
    release();
    match unwound {
        Ok(()) => {
            process.places = places.list;
            process.sample.stacktrace.push(PstackStacktrace {
                pid: tid as u32,
                thread_name: thread.status.name,
                capture: CaptureMethod::ZeroStop.into(),
                incomplete: thread.incomplete,
                ..PstackStacktrace::default()
            });
        }
        Err(error) => process.sample.errors.push(error.to_string()),
    }
    (process, why)
}

/// The Python stack of a thread that waits, whose id in the PID namespace of its process is
/// `own_tid`, and for each frame whether C code entered the interpreter with it. `None` if the
/// thread runs no Python or it cannot be read.
fn waiting_python(
    pid: i32,
    thread: &Thread,
    own_tid: i32,
    space: &AddressSpace<'_>,
) -> Option<(PySpyStacktrace, Vec<bool>)> {
    let python = PythonReader::find(thread.tid, space, thread.frames.iter()).ok()??;
    let mut found = python.threads(|tid| (tid == own_tid).then_some(thread.tid)).ok()?;
    found.retain(|one| one.tid != 0);
    python.read(&mut found);
    let mut waiting = found.pop()?;
    waiting.is_consistent = true;
    Some(waiting.finish(pid, true)).filter(|(stack, _)| !stack.frames.is_empty())
}

/// Bytes of an alternate stack that are searched for the registers that a handler has interrupted.
const HANDLER_STACK_BYTES: usize = 64 << 10;
/// Sizes of alternate stacks.
const HANDLER_STACKS: std::ops::Range<u64> = 1 << 10..64 << 20;
/// Place of the stack pointer in the registers of a sample.
const SAMPLED_SP: usize = 7;
/// Words of `ucontext_t`, which the kernel stores for a handler: its flags, a link, the start,
/// flags and size of the alternate stack, and the registers in the order of a sample.
const FRAME_REGISTERS: [usize; 17] = [18, 16, 19, 17, 14, 13, 15, 20, 21, 5, 6, 7, 8, 9, 10, 11, 12];
const FRAME_WORDS: usize = 22;
const MAX_FRAME_FLAGS: u64 = 7;

/// The registers at the first signal, if a handler has raised it again on its alternate stack, as
/// faulthandler does. The stack that it has interrupted is another one.
fn interrupted(space: &AddressSpace<'_>, tid: i32, sp: u64) -> Option<[u64; 17]> {
    let copied = Region::read_into(tid, sp & !7, vec![0; HANDLER_STACK_BYTES]).ok()?;
    let words: Vec<u64> =
        copied.bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect();
    words.windows(FRAME_WORDS).find_map(|frame| {
        let [flags, link, start, _, size, ..] = frame else { return None };
        let is_on_stack = |address| (*start..start.saturating_add(*size)).contains(&address);
        let is_frame = *flags <= MAX_FRAME_FLAGS && *link == 0 && HANDLER_STACKS.contains(size) && is_on_stack(sp);
        let registers = FRAME_REGISTERS.map(|register| frame[register]);
        (is_frame && !is_on_stack(registers[SAMPLED_SP]) && space.is_executable(registers[SAMPLED_SP + 1]))
            .then_some(registers)
    })
}

/// Maximum number of bytes of the reason of an abort.
const MAX_REASON_BYTES: usize = 1024;
/// glibc's text of a failed assertion or of a corrupted heap: a pointer to a number of four bytes,
/// and the text.
const LIBC_TEXT: &[u8] = b"__abort_msg";
const LIBC_TEXT_START: u64 = 4;
/// Bytes of the stack in which a C++ exception is looked for: `abort` is called a few frames below
/// `__cxa_throw`.
const EXCEPTION_STACK_BYTES: usize = 16 << 10;
/// First word of the header of a C++ exception of GCC: `GNUCC++` and 0, or 1 for a reference to
/// another exception. The thrown object follows the header.
const EXCEPTION_CLASS: u64 = 0x474e_5543_432b_2b00;
const EXCEPTION_HEADER: u64 = 32;
/// Bytes before the header: the pointer to the type, or of a reference the pointer to the object.
const EXCEPTION_TYPE: u64 = 80;
/// Bytes before the object: the number of references to it.
const EXCEPTION_REFERENCES: u64 = 128;
const MAX_REFERENCES: u32 = 1 << 16;
/// Bases of an exception whose text follows its virtual table as a pointer: the standard's, and
/// PyTorch's.
const TEXT_CLASSES: [&str; 3] = ["St13runtime_error", "St11logic_error", "N3c105ErrorE"];
const MAX_BASES: usize = 16;
const EXCEPTION: &str = "a C++ exception";

/// Why a process aborts: the text that the C library keeps, else the C++ exception that nobody has
/// caught. Both are written to standard error by the C library itself, which calls no function that
/// could be interposed.
fn abort_reason(space: &AddressSpace<'_>, tid: i32, stack: &Region) -> Option<String> {
    let mut memory = Snapshot::new(tid);
    libc_text(space, &mut memory).or_else(|| uncaught_exception(space, &mut memory, stack))
}

fn libc_text(space: &AddressSpace<'_>, memory: &mut Snapshot) -> Option<String> {
    let libc = |mapping: &Rc<Mapping>| {
        let name = mapping.path.rsplit('/').next().unwrap_or_default();
        name.starts_with("libc.so.6") || name.starts_with("libc-2.")
    };
    let object = space.executables().into_iter().find(libc).and_then(|mapping| space.object_at(mapping.start))?;
    let variable = object.bias.wrapping_add(exported_symbol(&object.image.elf()?, LIBC_TEXT)?);
    let kept = memory.read_u64("the text of the C library", variable).ok().filter(|kept| *kept != 0)?;
    text_at(memory, kept.wrapping_add(LIBC_TEXT_START))
}

/// A C++ exception that the inner frames of a stack refer to.
fn uncaught_exception(space: &AddressSpace<'_>, memory: &mut Snapshot, stack: &Region) -> Option<String> {
    let words = stack.bytes[..stack.bytes.len().min(EXCEPTION_STACK_BYTES)].chunks_exact(8);
    let addresses = words.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    let mut seen = HashSet::new();
    let is_data = |address: u64| space.mapping(address).is_some_and(|mapping| mapping.readable && !mapping.executable);
    let header =
        addresses.filter(|address| address % 16 == 0 && *address > PAGE && seen.insert(*address)).find_map(|address| {
            let class = is_data(address).then(|| memory.read_u64(EXCEPTION, address).ok()).flatten()?;
            (class & !1 == EXCEPTION_CLASS).then_some((address, class != EXCEPTION_CLASS))
        });
    let (header, is_reference) = header?;
    let mut word = |address: u64| memory.read_u64(EXCEPTION, address).ok();
    let mut object = header.wrapping_add(EXCEPTION_HEADER);
    let mut class = word(header.wrapping_sub(EXCEPTION_TYPE))?;
    if is_reference {
        object = class;
        class = word(object.wrapping_sub(EXCEPTION_HEADER + EXCEPTION_TYPE))?;
    }
    // The memory of an exception that was caught and freed may still be there.
    let references = memory.read_u32(EXCEPTION, object.wrapping_sub(EXCEPTION_REFERENCES)).ok()?;
    let name = (1..=MAX_REFERENCES).contains(&references).then(|| class_name(memory, class)).flatten()?;
    let mut has_text = false;
    let mut base = Some(class);
    for _ in 0..MAX_BASES {
        let Some(mangled) = base.and_then(|class| class_name(memory, class)) else { break };
        has_text |= TEXT_CLASSES.contains(&mangled.as_str());
        base = base.and_then(|class| memory.read_u64(EXCEPTION, class.wrapping_add(16)).ok());
    }
    let text = if has_text { memory.read_u64(EXCEPTION, object.wrapping_add(8)).ok() } else { None };
    let text = text.and_then(|text| text_at(memory, text));
    let name = demangle(format!("_ZTS{name}").as_bytes());
    let name = name.rsplit("typeinfo name for ").next().unwrap_or_default().to_string();
    Some(text.map_or_else(|| name.clone(), |text| format!("{name}: {text}")))
}

/// The mangled name of a C++ class, from its `type_info`. A star marks classes of one library.
fn class_name(memory: &mut Snapshot, class: u64) -> Option<String> {
    let name = memory.read_u64(EXCEPTION, class.wrapping_add(8)).ok()?;
    let name = text_at(memory, name)?;
    let name = name.trim_start_matches('*');
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.$".contains(&byte)).then(|| name.into())
}

/// A text that ends with a zero. `None` if it is empty or no text.
fn text_at(memory: &mut Snapshot, address: u64) -> Option<String> {
    let mut bytes = Vec::new();
    while bytes.len() < MAX_REASON_BYTES {
        match memory.read_u8("a text", address.wrapping_add(bytes.len() as u64)).ok()? {
            0 => break,
            byte => bytes.push(byte),
        }
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        // It may be cut within a character.
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            (valid + 4 > MAX_REASON_BYTES).then(|| String::from_utf8_lossy(&error.as_bytes()[..valid]).into_owned())?
        }
    };
    let text = text.trim();
    (!text.is_empty()).then(|| text.into())
}

struct Capture<'a> {
    pid: i32,
    options: &'a Options,
    deadline: Instant,
    images: &'a Images,
    tables: &'a Tables,
    process: &'a mut RawProcess,
    context: Box<UnwindContext<usize>>,
}

/// argv without its secrets, joined by spaces, at most [`MOST_COMMAND_BYTES`]. A process without
/// argv gets the kernel's name for it in brackets.
fn command(pid: i32) -> String {
    let mut command = secrets::cmdline(&procfs::program_cmdline(pid).unwrap_or_default()).trim().to_string();
    if command.is_empty() {
        return procfs::stat(pid).map(|stat| format!("[{}]", stat.name)).unwrap_or_default();
    }
    command.truncate(command.floor_char_boundary(MOST_COMMAND_BYTES));
    command
}

impl Capture<'_> {
    fn run(&mut self) -> Result<(), Error> {
        let pid = self.pid;
        let stat = procfs::stat(pid).map_err(|_| Error::Gone(pid))?;
        let sample = &mut self.process.sample;
        self.process.parent_pid = stat.parent;
        sample.process_state = state_text(stat.state);
        sample.cpu_time_ns = procfs::ticks_to_ns(stat.cpu_ticks);
        sample.io_bytes = procfs::io_bytes(pid);
        let connections = self.tables.tcp_sockets.of_process(pid, self.deadline).unwrap_or_default();
        (sample.tcp_bytes, sample.tcp_connections) = (connections.bytes, connections.remote);
        self.process.command = command(pid);
        let tids = procfs::threads(pid)?;
        let Some(live_tid) = live_thread(pid, &tids) else {
            let threads = describe(pid, &tids);
            if threads.is_empty() {
                return Err(Error::Gone(pid));
            }
            self.process.sample.errors.push(format!("process {pid} has ended: {}", state_text(stat.state)));
            self.store(threads, None);
            return Ok(());
        };
        let space = match AddressSpace::open(self.images, pid, live_tid) {
            Ok(space) => space,
            Err(error) => {
                let mut threads = describe(pid, &tids);
                let uid = threads.first().map_or(0, |thread| thread.status.uid);
                let error = if error.is_denied() { permission::denied(pid, uid) } else { error };
                for thread in &mut threads {
                    thread.incomplete = error.to_string();
                }
                self.store(threads, None);
                return Err(error);
            }
        };
        let (mut threads, mut moving) =
            if self.options.native { self.read_threads(&tids, &space) } else { (describe(pid, &tids), Vec::new()) };
        let python = if self.options.python { self.find_python(live_tid, &space, &threads) } else { None };
        let (python, mut python_threads) = python.unzip();
        if let (Some(python), Some(python_threads)) = (&python, &mut python_threads) {
            self.read_sleeping_python(python, python_threads, &mut threads, &space, &mut moving);
        }
        let python_threads_mut = python_threads.as_deref_mut().unwrap_or_default();
        if self.options.force_ptrace {
            self.stop(&mut threads, &moving, &space, python.as_ref(), python_threads_mut);
        } else if !moving.is_empty() {
            self.take_running(&mut threads, &moving, &space, python.as_ref(), python_threads_mut);
        }
        if threads.is_empty() {
            // Even the main thread has ended during the capture.
            return Err(Error::Gone(pid));
        }
        if let (Some(python), Some(python_threads), false) = (&python, &python_threads, moving.is_empty()) {
            find_unnamed_part(python, python_threads, &threads, &space);
        }
        if let (Some(python), Some(python_threads)) = (&python, &mut python_threads) {
            python.add_greenlets(python_threads, self.deadline);
        }
        self.store_python(&threads, python_threads.unwrap_or_default());
        self.store(threads, Some(&space));
        Ok(())
    }

    /// Reads the stacks of all sleeping threads. Also returns the threads that run, or that are to
    /// be stopped anyway.
    fn read_threads(&mut self, tids: &[i32], space: &AddressSpace<'_>) -> (Vec<Thread>, Vec<i32>) {
        let mut threads = Vec::with_capacity(tids.len());
        let mut moving = Vec::new();
        for tid in tids {
            let Some((thread, read)) = Thread::read(self.pid, *tid, space, &mut self.context) else { continue };
            let alive = !matches!(thread.status.letter(), b'Z' | b'X');
            if read != ReadResult::Done || (self.options.force_ptrace && alive) {
                moving.push(*tid);
            }
            threads.push(thread);
        }
        (threads, moving)
    }

    /// Finds the interpreter and its threads.
    fn find_python(
        &mut self,
        live_tid: i32,
        space: &AddressSpace<'_>,
        threads: &[Thread],
    ) -> Option<(PythonReader, Vec<PythonThread>)> {
        let found =
            PythonReader::find(live_tid, space, threads.iter().flat_map(|thread| &thread.frames)).and_then(|found| {
                let Some(python) = found else { return Ok(None) };
                let tids: HashMap<i32, i32> =
                    threads.iter().map(|thread| (thread.status.namespaced_tid, thread.tid)).collect();
                // Threads that were started during the capture are looked up only if there are any.
                let late_threads = OnceCell::new();
                let known = python.threads(|tid| {
                    let late_threads = || late_threads.get_or_init(|| reader::tids_by_namespaced_tid(self.pid));
                    tids.get(&tid).or_else(|| late_threads().get(&tid)).copied()
                })?;
                Ok(Some((python, known)))
            });
        let found = found.unwrap_or_else(|reason| {
            self.python_error(reason);
            None
        });
        if found.as_ref().is_some_and(|(python, _)| python.is_finalizing()) {
            self.python_error("its interpreter is shutting down".into());
        }
        found
    }

    fn python_error(&mut self, reason: String) {
        self.process.sample.errors.push(Error::Python { pid: self.pid, reason }.to_string());
    }

    /// Reads the current Python stacks. Stacks of threads that have slept since they were last read
    /// are correct. The other threads are added to `moving`.
    fn read_sleeping_python(
        &mut self,
        python: &PythonReader,
        python_threads: &mut Vec<PythonThread>,
        threads: &mut Vec<Thread>,
        space: &AddressSpace<'_>,
        moving: &mut Vec<i32>,
    ) {
        let pid = self.pid;
        python.read(python_threads);
        let mut indices: HashMap<i32, usize> =
            threads.iter().enumerate().map(|(index, thread)| (thread.tid, index)).collect();
        for thread in python_threads.iter_mut().filter(|thread| thread.tid != 0) {
            let Some(index) = indices.get(&thread.tid) else {
                // The thread was started after the list of threads was read.
                if let Ok(described) = Thread::describe(pid, thread.tid) {
                    indices.insert(thread.tid, threads.len());
                    threads.push(described);
                    moving.push(thread.tid);
                } else {
                    thread.tid = 0;
                }
                continue;
            };
            let before = &threads[*index].status;
            match procfs::status(pid, thread.tid) {
                Ok(after) => thread.is_consistent = slept(before, &after),
                Err(error) if error.is_gone() => thread.tid = 0,
                Err(_) => {}
            }
            if !thread.is_consistent && thread.tid != 0 && !moving.contains(&thread.tid) {
                moving.push(thread.tid);
            }
        }
        // A thread that the interpreter lists but that does not exist has just ended. If no ids are
        // known at all, keep everything as it was read.
        if python_threads.iter().any(|thread| thread.tid != 0) {
            python_threads.retain(|thread| thread.tid != 0);
        }
        find_unnamed_part(python, python_threads, threads, space);
    }

    /// Takes the stacks of threads that run, or that repeatedly wake and sleep.
    fn take_running(
        &mut self,
        threads: &mut Vec<Thread>,
        moving: &[i32],
        space: &AddressSpace<'_>,
        python: Option<&PythonReader>,
        python_threads: &mut [PythonThread],
    ) {
        let mut running = RunningThreads {
            pid: self.pid,
            space,
            python,
            context: &mut self.context,
            deadline: self.deadline,
            refusal: None,
            may_sample_kernel: true,
        };
        let gone = running.take(moving, threads, python_threads);
        let refusal = running.refusal;
        threads.retain(|thread| !gone.contains(&thread.tid));
        if let Some(reason) = refusal {
            self.process.sample.errors.push(Error::Sampling { pid: self.pid, reason }.to_string());
        }
    }

    /// Stops these threads and takes their stacks: those that need only their native stacks all at
    /// once, the others one after the other with their Python stacks.
    fn stop(
        &mut self,
        threads: &mut Vec<Thread>,
        stops: &[i32],
        space: &AddressSpace<'_>,
        python: Option<&PythonReader>,
        python_threads: &mut [PythonThread],
    ) {
        let mut python_of: HashMap<i32, &mut PythonThread> =
            python_threads.iter_mut().map(|thread| (thread.tid, thread)).collect();
        let indices: HashMap<i32, usize> =
            threads.iter().enumerate().map(|(index, thread)| (thread.tid, index)).collect();
        let needs_only_native = |tid: &i32| python_of.get(tid).is_none_or(|thread| thread.is_consistent);
        let stopped_together: HashSet<i32> = stops.iter().copied().filter(needs_only_native).collect();
        let native_only = threads.iter_mut().filter(|thread| stopped_together.contains(&thread.tid)).collect();
        let mut gone = stop_all(self.pid, native_only, space, &mut self.context, self.deadline);
        for tid in stops.iter().filter(|tid| !stopped_together.contains(tid)) {
            let Some(index) = indices.get(tid) else { continue };
            let native = &mut threads[*index];
            let taken = match python.zip(python_of.get_mut(tid)) {
                Some((python, thread)) => self.stop_with_python(native, space, python, thread),
                None => self.stop_one(native, space, &mut || {}),
            };
            if taken.is_err() {
                gone.push(*tid);
            }
        }
        threads.retain(|thread| !gone.contains(&thread.tid));
        let longest = threads.iter().map(|thread| thread.stopped.as_nanos() as u64).max().unwrap_or(0);
        self.process.sample.longest_stop_ns = self.process.sample.longest_stop_ns.max(longest);
    }

    fn stop_one(
        &mut self,
        thread: &mut Thread,
        space: &AddressSpace<'_>,
        action: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        if Instant::now() >= self.deadline {
            thread.incomplete = "not stopped: the deadline passed".into();
            return Ok(());
        }
        thread.stop(self.pid, space, &mut self.context, self.deadline, action)
    }

    /// Stops a thread until its Python stack is complete and agrees with its native stack, or until
    /// it is clear that they never agree.
    fn stop_with_python(
        &mut self,
        native: &mut Thread,
        space: &AddressSpace<'_>,
        python: &PythonReader,
        thread: &mut PythonThread,
    ) -> Result<(), Error> {
        let mut missed = Vec::new();
        for _ in 0..ATTEMPTS {
            let mut copy = StoppedCopy::prepare(python, thread, &missed);
            self.stop_one(native, space, &mut || copy.take())?;
            let Some((stack, missing_pages)) = copy.finish() else {
                if self.read_both_asleep(native, space, python, thread)? {
                    break;
                }
                continue;
            };
            let whole = stack.problem.is_none();
            thread.stack = stack;
            missed = missing_pages;
            let agreement = consistency::agreement(python, thread, native, space);
            // The stacks never agree if the code of the loop is unknown or C code switches stacks.
            // Then both are reported.
            thread.is_consistent = whole && agreement != Agreement::Between;
            if thread.is_consistent && agreement != Agreement::No {
                break;
            }
        }
        Ok(())
    }

    /// Reads both stacks of a thread that cannot be stopped because it sleeps. Returns whether it
    /// slept. A thread that waits for a kernel lock sleeps uninterruptibly, but usually not for
    /// long.
    fn read_both_asleep(
        &mut self,
        native: &mut Thread,
        space: &AddressSpace<'_>,
        python: &PythonReader,
        thread: &mut PythonThread,
    ) -> Result<bool, Error> {
        let gone = || Error::Gone(native.tid);
        let (now, read) = Thread::read(self.pid, native.tid, space, &mut self.context).ok_or_else(gone)?;
        python.read(std::slice::from_mut(thread));
        let after = procfs::status(self.pid, native.tid)?;
        thread.is_consistent = matches!(read, ReadResult::Done) && slept(&now.status, &after);
        if thread.is_consistent {
            let stopped = native.stopped;
            *native = now;
            native.stopped = stopped;
        }
        Ok(thread.is_consistent)
    }

    fn store_python(&mut self, threads: &[Thread], mut python_threads: Vec<PythonThread>) {
        let alive = |thread: &PythonThread| thread.tid == 0 || threads.iter().any(|native| native.tid == thread.tid);
        python_threads.retain(alive);
        reader::keep_last_holder(&mut python_threads);
        for thread in python_threads {
            // Changing inner frames of a running thread are not an error.
            if let Some(incomplete_reason) = thread.incomplete_reason().filter(|_| !thread.stack.is_cut) {
                self.python_error(format!("thread {}: {incomplete_reason}", thread.tid));
            }
            let status = threads.iter().find(|native| native.tid == thread.tid).map(|native| &native.status);
            let (trace, entries) = thread.finish(self.pid, status.is_some_and(|status| status.letter() == b'R'));
            self.process.sample.py_stacktrace.push(trace);
            self.process.python_entries.push(entries);
        }
    }

    fn store(&mut self, threads: Vec<Thread>, space: Option<&AddressSpace<'_>>) {
        if let Some(leader) = threads.iter().find(|thread| thread.tid == self.pid) {
            self.process.sample.process_state.clone_from(&leader.status.state);
        }
        if !self.options.native {
            return;
        }
        let mut places = CodeLocations::default();
        let sleepers: Vec<Sleeper<'_>> = threads.iter().map(Thread::sleeper).collect();
        let mut waits = awaited::of_process(self.pid, &sleepers, self.tables, self.deadline);
        for thread in threads {
            self.process.frames.push(places.of(&thread.frames, space));
            let Waits { awaited, timed } = waits.remove(&thread.tid).unwrap_or_default();
            self.process.sample.stacktrace.push(PstackStacktrace {
                pid: thread.tid as u32,
                thread_name: thread.status.name.clone(),
                frames: Vec::new(),
                state: thread.status.state.clone(),
                wchan: thread.wchan,
                kernel_stack: thread.kernel_stack,
                capture: if thread.frames.is_empty() { CaptureMethod::KernelOnly } else { thread.method } as i32,
                context_switches: thread.status.switches,
                cpu_time_ns: thread.cpu_time_ns,
                incomplete: thread.incomplete,
                syscall: thread.syscall,
                awaited,
                timed,
            });
        }
        if space.is_some() && Instant::now() < self.deadline {
            let objects = places.list.iter().filter_map(|place| place.image.as_ref());
            let files = self.process.sample.py_stacktrace.iter().flat_map(|thread| &thread.frames);
            let files = files.map(|frame| frame.file_name.as_str());
            self.process.sample.libraries = self.images.libraries(self.pid, objects, files);
        }
        self.process.places = places.list;
    }
}

/// The state of threads without their stacks.
fn describe(pid: i32, tids: &[i32]) -> Vec<Thread> {
    tids.iter().filter_map(|tid| Thread::describe(pid, *tid).ok()).collect()
}

/// Searches the complete stacks for a part of the interpreter's loop without a name.
fn find_unnamed_part(
    python: &PythonReader,
    python_threads: &[PythonThread],
    threads: &[Thread],
    space: &AddressSpace<'_>,
) {
    let natives: HashMap<i32, &Thread> = threads.iter().map(|thread| (thread.tid, thread)).collect();
    let both = python_threads.iter().filter(|thread| thread.is_consistent && thread.stack.problem.is_none());
    let both = both.filter_map(|thread| Some((thread, *natives.get(&thread.tid)?)));
    let whole = both.filter(|(_, native)| native.incomplete.is_empty() && !native.frames.is_empty());
    consistency::find_unnamed_part(python, whole.map(|(thread, native)| (thread, &*native.frames)), space);
}

/// Whether a thread has slept between two reads of its status. A thread that was woken and still
/// runs was not switched away from yet, so an equal count alone is no proof.
fn slept(before: &Status, after: &Status) -> bool {
    before.switches == after.switches && before.letter() != b'R' && after.letter() != b'R'
}
