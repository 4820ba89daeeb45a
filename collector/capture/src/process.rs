//! One process: its state, its threads and its interpreter, in the order that needs the fewest and shortest stops.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use gimli::UnwindContext;
use py_spy::PythonSpy;
use read_process_memory::{Pages, Room, through};
use xpu_timer_proto::server::{CaptureMethod, ProcessSample, PstackStacktrace, PySpyStacktrace};

use crate::{
    Error, Options,
    address_space::AddressSpace,
    images::Images,
    native::{Look, Thread},
    places::{Places, RawPlace},
    procfs,
    ptrace::Stop,
    python,
    worker::{Answer, Job},
};

/// How long all threads together may take to stop for the interpreter to be read.
const ALL_STOP_PATIENCE: Duration = Duration::from_millis(200);
/// How often an interpreter is searched for when it is not found.
const ATTEMPTS: usize = 4;
/// Captures in a row without a single Python stack, after which the interpreter is searched for again.
const MOST_FAILURES: u32 = 3;

/// A process whose native frames have no names yet.
#[derive(Default)]
pub(crate) struct RawProcess {
    pub pid: i32,
    pub parent_pid: i32,
    pub command: String,
    pub sample: ProcessSample,
    pub python_entries: Vec<Vec<bool>>,
    /// The places that the frames are at.
    pub places: Vec<RawPlace>,
    /// Frames of the threads in `sample.stacktrace`, in the same order, by the numbers of their places.
    pub frames: Vec<Vec<u32>>,
}

/// Where the interpreter of a known process lies.
pub(crate) struct Interpreter {
    pub spy: PythonSpy,
    pub start_time: u64,
    pub failures: u32,
}

/// How Python threads are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// As they are.
    Asleep,
    /// What was read before is copied during a stop and walked afterwards.
    Fetch,
    /// The walk itself is done during a stop.
    Walk,
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
        // Threads may end meanwhile, so the leader is the one to ask when it lives, whatever the order of the ids is.
        let alive = |thread: &&Thread| !matches!(thread.status.letter(), b'Z' | b'X');
        let leader = threads.iter().find(|thread| thread.tid == pid).filter(alive);
        let live = leader.or_else(|| threads.iter().find(alive));
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
            self.python(live, &space, stat.start_time);
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

    fn python(&mut self, live: i32, space: &AddressSpace<'_>, start_time: u64) {
        let pid = self.pid;
        if !python::is_python(live, space) {
            return;
        }
        if self.interpreter.as_ref().is_none_or(|interpreter| interpreter.start_time != start_time) {
            self.interpreter = match self.attach(live) {
                Ok(spy) => Some(Interpreter { spy, start_time, failures: 0 }),
                Err(reason) => {
                    self.process.sample.errors.push(Error::Python { pid, reason }.to_string());
                    None
                }
            };
        }
        let Some(mut interpreter) = self.interpreter.take() else { return };
        interpreter.spy.pid = live;
        interpreter.spy.process.pid = live;
        // Thread ids are used again, and then belong to another name.
        interpreter.spy.python_thread_names.clear();
        let (traces, problem) = self.python_threads(live, &mut interpreter.spy);
        interpreter.failures = if traces.is_empty() { interpreter.failures + 1 } else { 0 };
        (self.process.sample.py_stacktrace, self.process.python_entries) = traces.into_iter().unzip();
        if let Some(reason) = problem {
            self.process.sample.errors.push(Error::Python { pid, reason }.to_string());
        }
        // What is known of an interpreter that cannot be read again and again may be what is wrong.
        if interpreter.failures < MOST_FAILURES {
            self.interpreter = Some(interpreter);
        }
    }

    /// Finds the interpreter. Where it has to be guessed, the guess is tried on structures that may change meanwhile.
    fn attach(&mut self, live: i32) -> Result<PythonSpy, String> {
        let mut attached = Err(String::new());
        for _ in 0..ATTEMPTS {
            attached = through(Pages::new(live), || python::attach(live)).0;
            if attached.is_ok() || Instant::now() >= self.deadline {
                return attached;
            }
        }
        attached
    }

    /// The stacks of all Python threads. Those that sleep are right when they have slept all the time; the others are read
    /// again while they stand still. A thread without a whole stack never costs the stacks of others.
    fn python_threads(
        &mut self,
        live: i32,
        spy: &mut PythonSpy,
    ) -> (Vec<(PySpyStacktrace, Vec<bool>)>, Option<String>) {
        let pid = self.pid;
        let mut right = Vec::new();
        let mut done = HashSet::new();
        let mut left: Vec<(PySpyStacktrace, Vec<bool>)> = Vec::new();
        let mut problem = None;
        let mut addresses = Vec::new();
        let mut whole = false;
        for round in [Round::Asleep, Round::Fetch, Round::Fetch, Round::Walk, Round::Walk, Round::Walk] {
            if round != Round::Asleep && Instant::now() >= self.deadline {
                problem = Some("the deadline passed".to_string());
                break;
            }
            let before = python::look(pid);
            // When all that is missing is known, only that has to stand still.
            let rest: HashSet<i32> = left.iter().map(|(trace, _)| trace.os_thread_id as i32).collect();
            let few = (whole && round == Round::Fetch && !rest.contains(&0)).then_some(&rest);
            let (walked, pages, stopped, stop_problem) = match round {
                Round::Asleep => {
                    let (walked, pages) = through(Pages::lenient(live), || python::walk(spy, pid));
                    (walked, pages, HashSet::new(), None)
                }
                Round::Fetch => {
                    let mut room = Room::new(live, std::mem::take(&mut addresses));
                    let ((), stopped, stop_problem) = self.while_stopped(few, || room.fill());
                    let (walked, pages) = through(room.into_pages(), || python::walk(spy, pid));
                    (walked, pages, stopped, stop_problem)
                }
                Round::Walk => {
                    let mut room = Room::new(live, std::mem::take(&mut addresses));
                    let work = || {
                        room.fill();
                        through(room.into_pages(), || python::walk(spy, pid))
                    };
                    let ((walked, pages), stopped, stop_problem) = self.while_stopped(None, work);
                    (walked, pages, stopped, stop_problem)
                }
            };
            problem = stop_problem.map(|error| error.to_string());
            addresses = pages.addresses();
            let after = python::look(pid);
            let mut walk = match walked {
                Ok(walk) => walk,
                Err(reason) => {
                    problem = Some(reason);
                    whole = false;
                    continue;
                }
            };
            // What was not among the pages fetched has been read when the threads ran again.
            let late = round == Round::Fetch && pages.misses() > 0;
            whole = pages.failures() == 0;
            let mut seen = before.clone();
            seen.extend(after.iter().map(|(tid, status)| (*tid, status.clone())));
            walk.place(pid, &seen);
            left.clear();
            for (trace, entries) in walk.traces.into_iter().zip(walk.entries) {
                let tid = trace.os_thread_id as i32;
                let still = !late && stopped.contains(&tid) || python::slept(tid, &before, &after);
                if done.contains(&tid) {
                    continue;
                }
                if tid != 0 && still {
                    done.insert(tid);
                    right.push((trace, entries));
                } else {
                    left.push((trace, entries));
                }
            }
            // Whom the interpreter still lists without a thread of that id has just ended, when all others stood still.
            let listed = !stopped.is_empty() && few.is_none() && !late && problem.is_none() && !done.is_empty();
            if whole && (left.is_empty() || listed && left.iter().all(|(trace, _)| trace.os_thread_id == 0)) {
                return (right, None);
            }
        }
        // Threads that exist but could not be stopped are shown as they seemed to be; so is everything when the ids of
        // threads cannot be told at all.
        left.retain(|(trace, _)| trace.os_thread_id != 0 || done.is_empty());
        if left.is_empty() && !right.is_empty() {
            return (right, None);
        }
        let reason = problem.unwrap_or_else(|| "its threads do not stand still".into());
        if left.is_empty() {
            return (right, Some(reason));
        }
        right.append(&mut left);
        (right, Some(format!("read while threads ran, so they may be wrong: {reason}")))
    }

    /// Does something while these threads, or all that can be made to, stand still. Says which of them did.
    fn while_stopped<T>(
        &mut self,
        few: Option<&HashSet<i32>>,
        work: impl FnOnce() -> T,
    ) -> (T, HashSet<i32>, Option<Error>) {
        let (stops, problem) = stop_all(self.pid, few, self.deadline);
        let result = work();
        let stopped = stops.keys().copied().collect();
        let longest = stops.into_values().map(Stop::release).max().unwrap_or_default().as_nanos() as u64;
        let sample = &mut self.process.sample;
        sample.longest_stop_ns = sample.longest_stop_ns.max(longest);
        (result, stopped, problem)
    }

    fn keep(&mut self, threads: Vec<Thread>, space: Option<&AddressSpace<'_>>) {
        if let Some(leader) = threads.iter().find(|thread| thread.tid == self.pid) {
            self.process.sample.process_state.clone_from(&leader.status.state);
        }
        if !self.options.native {
            return;
        }
        let mut places = Places::default();
        for thread in threads {
            self.process.frames.push(places.of(&thread.frames, space));
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
        self.process.places = places.list;
    }
}

/// Stops these threads, or all; threads that sleep uninterruptibly do not run anyway. Threads that are started meanwhile are
/// stopped too: only one that still runs can start another, so this ends.
fn stop_all(pid: i32, few: Option<&HashSet<i32>>, deadline: Instant) -> (HashMap<i32, Stop>, Option<Error>) {
    let deadline = deadline.min(Instant::now() + ALL_STOP_PATIENCE);
    let mut stops: HashMap<i32, Stop> = HashMap::new();
    let mut others = HashSet::new();
    let mut problem = None;
    while Instant::now() < deadline {
        let tids = match few {
            Some(few) => few.iter().copied().collect(),
            None => procfs::threads(pid).unwrap_or_default(),
        };
        let mut asked = Vec::new();
        for tid in tids {
            if stops.contains_key(&tid) || !others.insert(tid) {
                continue;
            }
            let letter = procfs::status(pid, tid).map_or(b'X', |status| status.letter());
            if matches!(letter, b'D' | b'Z' | b'X' | b't') {
                continue;
            }
            match Stop::request(pid, tid) {
                Ok(stop) => asked.push((tid, stop)),
                Err(error) if procfs::is_gone(&error) => {}
                Err(error) => problem = Some(error),
            }
        }
        if asked.is_empty() {
            break;
        }
        for (tid, mut stop) in asked {
            match stop.wait(pid, deadline) {
                Ok(()) => {
                    stops.insert(tid, stop);
                }
                Err(error) if procfs::is_gone(&error) => {}
                Err(error) => problem = Some(error),
            }
        }
    }
    (stops, problem)
}
