//! One process: its state, its threads and its interpreter, in the order that needs the fewest and shortest stops.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use gimli::UnwindContext;
use py_spy::PythonSpy;
use read_process_memory::{Pages, through};
use xpu_timer_proto::server::{CaptureMethod, ProcessSample, PstackStacktrace};

use crate::{
    Error, Options,
    address_space::AddressSpace,
    image::{Image, Images},
    native::{Look, Thread},
    procfs,
    ptrace::Stop,
    python,
    unwind::RawFrame,
    worker::{Answer, Job},
};

/// How long all threads together may take to stop for the interpreter to be read.
const ALL_STOP_PATIENCE: Duration = Duration::from_millis(500);

/// A process whose native frames have no names yet.
#[derive(Default)]
pub(crate) struct RawProcess {
    pub pid: i32,
    pub parent_pid: i32,
    pub command: String,
    pub sample: ProcessSample,
    pub python_entries: Vec<Vec<bool>>,
    /// Frames of the threads in `sample.stacktrace`, in the same order.
    pub frames: Vec<Vec<PlacedFrame>>,
}

/// A frame and the object that its code belongs to.
pub(crate) struct PlacedFrame {
    pub frame: RawFrame,
    pub image: Option<Arc<Image>>,
    pub bias: u64,
    /// Path of the mapping when there is no image for it.
    pub path: String,
}

/// Where the interpreter of a known process lies.
pub(crate) struct Interpreter {
    pub spy: PythonSpy,
    pub start_time: u64,
}

impl Interpreter {
    /// Whether `pid` is still the process that was looked at.
    pub fn is_alive(&self, pid: i32) -> bool {
        procfs::stat(pid).is_ok_and(|stat| stat.start_time == self.start_time)
    }
}

/// `S (sleeping)` for `S`.
pub(crate) fn state_text(letter: char) -> String {
    let word = match letter {
        'R' => "running",
        'S' => "sleeping",
        'D' => "disk sleep",
        'T' => "stopped",
        't' => "tracing stop",
        'Z' => "zombie",
        'X' => "dead",
        'I' => "idle",
        'P' => "parked",
        _ => "unknown",
    };
    format!("{letter} ({word})")
}

pub(crate) fn unix_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Captures one process.
pub(crate) fn capture(job: Job, images: &Images) -> Answer {
    let Job { pid, interpreter, options, deadline } = job;
    let begin = Instant::now();
    let mut process = RawProcess { pid, ..RawProcess::default() };
    process.sample.captured_unix_ns = unix_ns();
    let mut capture = Capture {
        pid,
        options: &options,
        deadline,
        images,
        process: &mut process,
        interpreter,
        context: Box::default(),
    };
    if let Err(error) = capture.run() {
        capture.process.sample.errors.push(error.to_string());
        if procfs::is_gone(&error) {
            capture.process.sample.process_state = state_text('X');
        }
    }
    let interpreter = capture.interpreter.take();
    process.sample.capture_ns = begin.elapsed().as_nanos() as u64;
    Answer { pid, process, interpreter }
}

struct Capture<'a> {
    pid: i32,
    options: &'a Options,
    deadline: Instant,
    images: &'a Images,
    process: &'a mut RawProcess,
    interpreter: Option<Interpreter>,
    context: Box<UnwindContext<usize>>,
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
        self.process.command = procfs::command(pid);
        let tids = procfs::threads(pid)?;
        let mut threads: Vec<Thread> = tids.iter().filter_map(|tid| Thread::describe(pid, *tid).ok()).collect();
        if threads.is_empty() {
            return Err(Error::Gone(pid));
        }
        // The address space of a leader that has ended is to be had from the threads that live on.
        let live = threads.iter().find(|thread| !matches!(thread.status.letter(), b'Z' | b'X'));
        let Some(live) = live.map(|thread| thread.tid) else {
            self.process.sample.errors.push(format!("process {pid} has ended: {}", state_text(stat.state)));
            self.keep(threads, None);
            return Ok(());
        };
        let mappings = procfs::maps(pid, live).map_err(|error| {
            if procfs::is_denied(&error) { Error::Permission { pid, uid: threads[0].status.uid } } else { error }
        });
        let mappings = match mappings {
            Ok(mappings) => mappings,
            Err(error) => {
                for thread in &mut threads {
                    thread.incomplete = error.to_string();
                }
                self.keep(threads, None);
                return Err(error);
            }
        };
        let space = AddressSpace::new(self.images, pid, live, mappings);
        if self.options.native {
            self.native(&mut threads, &space);
        }
        if self.options.python {
            self.python(live, &mut threads, &space, stat.start_time);
        }
        self.keep(threads, Some(&space));
        Ok(())
    }

    fn native(&mut self, threads: &mut Vec<Thread>, space: &AddressSpace<'_>) {
        let pid = self.pid;
        let mut gone = HashSet::new();
        let mut rest = Vec::new();
        for (index, thread) in threads.iter_mut().enumerate() {
            match thread.look(pid, space, &mut self.context) {
                Look::Done => {}
                Look::Stop => rest.push(index),
                Look::Gone => {
                    gone.insert(thread.tid);
                }
            }
        }
        if self.options.force_ptrace {
            rest = (0..threads.len()).filter(|index| !matches!(threads[*index].status.letter(), b'Z' | b'X')).collect();
        }
        for index in rest {
            let thread = &mut threads[index];
            if Instant::now() >= self.deadline {
                thread.incomplete = "not stopped: the deadline passed".into();
                continue;
            }
            if thread.stop(pid, space, &mut self.context, self.deadline).is_err() {
                gone.insert(thread.tid);
            }
            let sample = &mut self.process.sample;
            sample.longest_stop_ns = sample.longest_stop_ns.max(thread.stopped.as_nanos() as u64);
        }
        threads.retain(|thread| !gone.contains(&thread.tid));
    }

    fn python(&mut self, live: i32, threads: &mut [Thread], space: &AddressSpace<'_>, start_time: u64) {
        let pid = self.pid;
        if !python::is_python(live, space) {
            return;
        }
        if self.interpreter.as_ref().is_none_or(|interpreter| interpreter.start_time != start_time) {
            let (attached, _) = through(Pages::new(live), || python::attach(live));
            self.interpreter = match attached {
                Ok(spy) => Some(Interpreter { spy, start_time }),
                Err(reason) => {
                    self.process.sample.errors.push(Error::Python { pid, reason }.to_string());
                    None
                }
            };
        }
        let Some(mut interpreter) = self.interpreter.take() else { return };
        let spy = &mut interpreter.spy;
        let before = python::switches(pid, threads);
        let (mut walked, pages) = through(Pages::new(live), || python::walk(spy, pid, threads));
        let after = python::switches(pid, threads);
        let moved = match &walked {
            Ok(walk) => python::moved(&walk.traces, &before, &after),
            Err(_) => true,
        };
        if moved {
            // What the first walk touched is fetched at once while all stand still, and walked when they run again. Only
            // when that leads to other pages, the walk itself has to be done during a stop.
            let (pages, mut problem) = self.while_stopped(threads, || Pages::fetch(live, &pages.addresses()));
            let (second, pages) = through(pages, || python::walk(spy, pid, threads));
            walked = second;
            if walked.is_err() || pages.misses() > 0 {
                let known = pages.addresses();
                let work = || through(Pages::fetch(live, &known), || python::walk(spy, pid, threads)).0;
                (walked, problem) = self.while_stopped(threads, work);
            }
            if let (Ok(_), Some(problem)) = (&walked, problem) {
                let reason = format!("read while threads ran, so they may be wrong: {problem}");
                self.process.sample.errors.push(Error::Python { pid, reason }.to_string());
            }
        }
        match walked {
            Ok(walk) => {
                self.process.sample.py_stacktrace = walk.traces;
                self.process.python_entries = walk.entries;
                self.interpreter = Some(interpreter);
            }
            Err(reason) => {
                // What is known of this interpreter may be what is wrong, so it is not kept.
                self.process.sample.errors.push(Error::Python { pid, reason }.to_string());
            }
        }
    }

    /// Does something while all threads stand still that can be made to.
    fn while_stopped<T>(&mut self, threads: &[Thread], work: impl FnOnce() -> T) -> (T, Option<Error>) {
        let (stops, problem) = stop_all(self.pid, threads, self.deadline);
        let result = work();
        let longest = stops.into_iter().map(Stop::release).max().unwrap_or_default().as_nanos() as u64;
        let sample = &mut self.process.sample;
        sample.longest_stop_ns = sample.longest_stop_ns.max(longest);
        (result, problem)
    }

    fn keep(&mut self, threads: Vec<Thread>, space: Option<&AddressSpace<'_>>) {
        if let Some(leader) = threads.iter().find(|thread| thread.tid == self.pid) {
            self.process.sample.process_state.clone_from(&leader.status.state);
        }
        if !self.options.native {
            return;
        }
        for thread in threads {
            let place = |frame: &RawFrame| {
                let located = space.and_then(|space| space.located(frame.lookup()));
                let mapping = space.and_then(|space| space.mapping(frame.lookup()));
                PlacedFrame {
                    frame: *frame,
                    image: located.map(|located| Arc::clone(&located.image)),
                    bias: located.map_or(0, |located| located.bias),
                    path: mapping.map(|mapping| mapping.path.clone()).unwrap_or_default(),
                }
            };
            self.process.frames.push(thread.frames.iter().map(place).collect());
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
            });
        }
    }
}

/// Stops every thread that can be stopped; threads that sleep uninterruptibly do not run anyway.
fn stop_all(pid: i32, threads: &[Thread], deadline: Instant) -> (Vec<Stop>, Option<Error>) {
    let deadline = deadline.min(Instant::now() + ALL_STOP_PATIENCE);
    let mut stops = Vec::with_capacity(threads.len());
    let mut problem = None;
    for thread in threads {
        let letter = procfs::status(pid, thread.tid).map_or(b'X', |status| status.letter());
        if matches!(letter, b'D' | b'Z' | b'X' | b't') {
            continue;
        }
        match Stop::request(pid, thread.tid) {
            Ok(stop) => stops.push(stop),
            Err(error) if procfs::is_gone(&error) => {}
            Err(error) => problem = Some(error),
        }
    }
    for stop in &mut stops {
        if let Err(error) = stop.wait(pid, deadline)
            && !procfs::is_gone(&error)
        {
            problem = Some(error);
        }
    }
    (stops, problem)
}
