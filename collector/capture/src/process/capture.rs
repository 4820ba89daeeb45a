//! Captures one process: its state, its threads and its interpreter.
//!
//! Sleeping threads are read while they sleep. The kernel samples running threads (`running.rs`).
//! Where sampling is forbidden, a thread is reported as running, with the Python frames that memory
//! has. Threads are stopped only with [`Options::force_ptrace`].

use std::{
    cell::OnceCell,
    collections::{HashMap, HashSet},
    fmt::Display,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use gimli::UnwindContext;
use xpu_timer_proto::{
    printable::MOST_COMMAND_BYTES,
    procfs::{self, state_text},
    secrets,
    server::{CaptureMethod, PstackStacktrace},
};

use crate::{
    error::Error,
    kernel::{
        Tables,
        awaited::{self, Sleeper, Waits},
    },
    native::{
        address_space::AddressSpace,
        stop::stop_all,
        thread::{ReadResult, Thread},
    },
    objects::Images,
    python::{
        consistency::{self, Agreement, StoppedCopy},
        reader::{self, PythonReader, PythonThread},
    },
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
                let error = if error.is_denied() { Error::denied(pid, uid) } else { error };
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
        let found = found.unwrap_or_else(|error| {
            self.python_error(&error);
            None
        });
        if found.as_ref().is_some_and(|(python, _)| python.is_finalizing()) {
            self.python_error(&"its interpreter is shutting down");
        }
        found
    }

    fn python_error(&mut self, reason: &dyn Display) {
        let reason = reason.to_string();
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
            match threads[*index].still_sleeps(pid) {
                Ok(sleeps) => thread.is_consistent = sleeps,
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
            let is_complete = stack.problem.is_none();
            thread.stack = stack;
            missed = missing_pages;
            let agreement = consistency::agreement(python, thread, native, space);
            // The stacks never agree if the code of the loop is unknown or C code switches stacks.
            // Then both are reported.
            thread.is_consistent = is_complete && agreement != Agreement::Between;
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
        thread.is_consistent = now.still_sleeps(self.pid)? && matches!(read, ReadResult::Done);
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
                self.python_error(&format_args!("thread {}: {incomplete_reason}", thread.tid));
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
        let mut waits = HashMap::new();
        if self.options.causes {
            let sleepers: Vec<Sleeper<'_>> = threads.iter().map(Thread::sleeper).collect();
            waits = awaited::of_process(self.pid, &sleepers, self.tables, self.deadline);
        }
        for thread in threads {
            self.process.frames.push(places.of(&thread.frames, space));
            let Waits { awaited, timed, sharers } = waits.remove(&thread.tid).unwrap_or_default();
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
                sharers,
            });
        }
        if self.options.causes && space.is_some() && Instant::now() < self.deadline {
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
    let complete = both.filter(|(_, native)| native.incomplete.is_empty() && !native.frames.is_empty());
    consistency::find_unnamed_part(python, complete.map(|(thread, native)| (thread, &*native.frames)), space);
}
