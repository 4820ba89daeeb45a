//! Records the stacks of processes over time, without stopping them. Each process has a thread of
//! its own here, so a process that the kernel does not answer for does not delay the others.
//!
//! Each period has one sample, at a random moment: otherwise a program that repeats itself in the
//! same rhythm would always be seen in the same place.

mod recorded;

use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::time::ClockId;
use xpu_timer_proto::{
    procfs,
    server::{PstackFrame, PstackStacktrace, PySpyFrame},
    v1::{ClockReading, StackSamples},
};

use crate::{
    Capturer,
    objects::Images,
    process::{Options, live_thread},
    python::sampling::{Outcome, StackReader},
    stacks::{Frame, ProcessCapture, merge},
};

use recorded::Recorded;

/// Time between two looks at what changes rarely: names of threads, children, the pid itself.
const LOOK: Duration = Duration::from_secs(2);
/// Delay before the next search for an interpreter; it doubles up to the longest one.
const SEARCH_DELAY: Duration = Duration::from_millis(250);
const MAX_SEARCH_DELAY: Duration = Duration::from_secs(30);
/// How long the capture of one sample with C frames may take.
const LONGEST_CAPTURE: Duration = Duration::from_secs(2);
/// Time slice of the threads that take samples: the shortest that the kernel grants.
const SLICE: Duration = Duration::from_micros(100);

/// The threads that are sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The main thread of the interpreter.
    Main,
    /// All threads of the interpreter.
    All,
}

/// How a process is recorded.
#[derive(Debug, Clone, Copy)]
pub struct RecordOptions {
    /// Time between two samples.
    pub period: Duration,
    /// The threads that are sampled.
    pub threads: Threads,
    /// Whether C frames are sampled as well, which takes a capture for each sample.
    pub native: bool,
    /// Whether children that the process starts are noted, which takes a read for each thread.
    pub children: bool,
    /// Older samples are forgotten, except for as many changes of a stack as the window has
    /// samples.
    pub window: Duration,
}

/// Records the stacks of several processes. It keeps its findings about the objects that they map
/// for the next process.
#[derive(Default)]
pub struct StackRecorder {
    images: Arc<Images>,
}

/// The recording of one process. It ends when this is dropped.
pub struct ProcessRecording {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    options: RecordOptions,
    recorded: Mutex<Recorded>,
    stop: AtomicBool,
    has_ended: AtomicBool,
}

/// CLOCK_MONOTONIC in nanoseconds.
fn now_ns() -> u64 {
    read_clock(ClockId::CLOCK_MONOTONIC)
}

fn read_clock(clock: ClockId) -> u64 {
    clock.now().map_or(0, |time| (time.tv_sec() as u64).saturating_mul(1_000_000_000) + time.tv_nsec() as u64)
}

/// Reads the clocks of this machine.
pub(crate) fn clock_reading() -> ClockReading {
    let realtime_ns = read_clock(ClockId::CLOCK_REALTIME);
    ClockReading { monotonic_ns: now_ns(), realtime_ns }
}

impl StackRecorder {
    /// Starts to record a process.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(&self, pid: i32, options: RecordOptions) -> io::Result<ProcessRecording> {
        let shared = Arc::new(Shared {
            options,
            recorded: Mutex::default(),
            stop: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        });
        let (images, of_thread) = (Arc::clone(&self.images), Arc::clone(&shared));
        let thread = thread::Builder::new().name("xpu_sample".into()).spawn(move || {
            request_short_slice();
            Loop::new(pid, &images, &of_thread).run();
            of_thread.has_ended.store(true, Ordering::Release);
        })?;
        Ok(ProcessRecording { shared, thread: Some(thread) })
    }
}

impl ProcessRecording {
    /// Whether nothing more is recorded, because the process has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.shared.has_ended.load(Ordering::Acquire)
    }

    /// The samples taken at or after a time (CLOCK_MONOTONIC). The fields about the rank and the
    /// clocks are not set.
    #[must_use]
    pub fn samples(&self, from_ns: u64) -> StackSamples {
        let period_ns = self.shared.options.period.as_nanos() as u64;
        self.shared.lock().message(from_ns, period_ns)
    }

    /// Makes the recording end soon.
    pub fn request_stop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Ends the recording. Returns whether its thread ended in time: the kernel may not answer for
    /// the process.
    pub fn stop(&mut self, patience: Duration) -> bool {
        self.request_stop();
        let Some(thread) = self.thread.take() else { return true };
        let until = Instant::now() + patience;
        while !thread.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        // A thread that does not end is abandoned.
        thread.is_finished()
    }
}

impl Drop for ProcessRecording {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the scheduler to run this thread as soon as a sample is due, which takes microseconds.
/// Where all processors are busy, it would otherwise run when the process that it samples goes to
/// sleep, and its samples would show that too often. Before Linux 6.12 this has no effect.
#[allow(unsafe_code)]
fn request_short_slice() {
    // SAFETY: integers may be 0.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>();
    // SAFETY: the kernel writes at most `size` bytes to the attributes of this thread.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if result == 0 && attributes.sched_policy == libc::SCHED_OTHER as u32 {
        attributes.sched_runtime = SLICE.as_nanos() as u64;
        // SAFETY: the kernel reads as many bytes as the attributes say that they have.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    }
}

/// The name of a thread and its frames, innermost first: the Python frames at their places among
/// the C frames. If the two stacks do not match, the Python stack alone, or else the native one.
fn merged<'a>(process: &'a ProcessCapture, thread: &'a PstackStacktrace) -> (&'a str, Vec<PySpyFrame>) {
    let python = process.sample.py_stacktrace.iter().zip(&process.python_entries);
    let python = python.into_iter().find(|(python, _)| python.os_thread_id == thread.pid);
    let of_native = |frame: &PstackFrame| PySpyFrame {
        func_name: frame.func_name.clone(),
        file_name: frame.file_name.clone(),
        module: String::new(),
    };
    let native = || thread.frames.iter().map(of_native).collect();
    let Some((python, entries)) = python else { return (&thread.thread_name, native()) };
    let frame = |frame: Frame<'_>| match frame {
        Frame::Native(frame) => of_native(frame),
        Frame::Python(frame) => frame.clone(),
    };
    let frames = match merge(&thread.frames, &python.frames, entries) {
        Ok(frames) => frames.into_iter().map(frame).collect(),
        Err(_) if python.frames.is_empty() => native(),
        Err(_) => python.frames.clone(),
    };
    let name = if python.thread_name.is_empty() { &thread.thread_name } else { &python.thread_name };
    (name, frames)
}

/// The work of the thread of one process.
struct Loop<'a> {
    pid: i32,
    images: &'a Arc<Images>,
    shared: &'a Shared,
    /// Start time of the process, which distinguishes it from a later one with this pid.
    started: u64,
    reader: Option<StackReader>,
    /// Captures the native stacks, if they are wanted.
    capturer: Option<Capturer>,
    /// Whether an interpreter was read before.
    had_reader: bool,
    next_search: Instant,
    search_delay: Duration,
    next_look: Instant,
    children: Vec<i32>,
    /// The frames of one stack.
    frames: Vec<u32>,
    random: u64,
}

impl<'a> Loop<'a> {
    fn new(pid: i32, images: &'a Arc<Images>, shared: &'a Shared) -> Self {
        Loop {
            pid,
            images,
            shared,
            started: procfs::stat(pid).map_or(0, |stat| stat.start_time),
            reader: None,
            capturer: shared.options.native.then(|| Capturer::with_images(Arc::clone(images))),
            had_reader: false,
            next_search: Instant::now(),
            search_delay: SEARCH_DELAY,
            next_look: Instant::now() + LOOK,
            children: if shared.options.children {
                procfs::children(pid, usize::MAX).unwrap_or_default()
            } else {
                Vec::new()
            },
            frames: Vec::new(),
            random: now_ns() ^ u64::from(pid.unsigned_abs()) << 32 | 1,
        }
    }

    fn run(&mut self) {
        let period = self.shared.options.period;
        let begin = Instant::now();
        {
            let mut recorded = self.shared.lock();
            recorded.from_ns = now_ns();
            recorded.until_ns = recorded.from_ns;
        }
        let mut index = 0_u32;
        loop {
            // One sample in each period, at a random moment.
            let due = begin + period * index + period.mul_f64(self.next_random());
            if !self.wait(due) {
                self.look_at_children();
                return;
            }
            if !self.tick() {
                return;
            }
            let now_index = (begin.elapsed().as_nanos() / period.as_nanos().max(1)) as u32;
            let missed = now_index.saturating_sub(index + 1);
            if missed > 0 {
                self.shared.lock().missed += u64::from(missed);
            }
            index = now_index.max(index + 1);
        }
    }

    /// A number from 0 to below 1 (xorshift).
    fn next_random(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Waits until a moment. Returns false if the recording is over.
    fn wait(&self, due: Instant) -> bool {
        loop {
            if self.shared.stop.load(Ordering::Acquire) {
                return false;
            }
            let now = Instant::now();
            if now >= due {
                return true;
            }
            thread::park_timeout(due - now);
        }
    }

    /// Takes a sample. Returns false if the process has ended.
    fn tick(&mut self) -> bool {
        let now = Instant::now();
        if now >= self.next_look {
            self.next_look = now + LOOK;
            if self.is_gone() {
                return self.end();
            }
            self.look_at_children();
            // Threads may have got their names since. A change of the list itself is seen anyway.
            if self.shared.options.threads == Threads::All
                && let Some(reader) = &mut self.reader
                && reader.list_threads().is_err()
            {
                return self.lose_interpreter();
            }
        }
        if self.capturer.is_some() {
            return self.capture();
        }
        if self.reader.is_none() {
            if now < self.next_search {
                return true;
            }
            self.search(now);
        }
        let at_ns = now_ns();
        let Some(reader) = &mut self.reader else { return !self.is_gone() || self.end() };
        if reader.sample().is_err() {
            return self.lose_interpreter();
        }
        self.store(at_ns);
        true
    }

    /// Takes a sample of Python and C frames. Returns false if the process has ended.
    fn capture(&mut self) -> bool {
        let options = &self.shared.options;
        let (deadline, lines_budget) = (LONGEST_CAPTURE, Duration::ZERO);
        let of_capture = Options { deadline, lines_budget, causes: false, ..Options::default() };
        let Some(capturer) = &mut self.capturer else { return false };
        let at_ns = now_ns();
        let Some(process) = capturer.capture(&[self.pid], &of_capture).pop() else { return false };
        if process.sample.stacktrace.is_empty() && self.is_gone() {
            return self.end();
        }
        let period_ns = options.period.as_nanos() as u64;
        let mut recorded = self.shared.lock();
        recorded.until_ns = at_ns;
        process.sample.errors.iter().for_each(|error| recorded.note(error.clone()));
        for thread in &process.sample.stacktrace {
            let tid = thread.pid.cast_signed();
            if options.threads == Threads::Main && tid != self.pid {
                continue;
            }
            let (name, frames) = merged(&process, thread);
            if frames.is_empty() {
                recorded.discarded += 1;
                continue;
            }
            recorded.cut += u64::from(!thread.incomplete.is_empty());
            let numbers: Vec<u32> = frames.into_iter().map(|frame| recorded.frame(frame)).collect();
            let stack = recorded.stack(&numbers);
            recorded.add((tid, 0), (name, tid == self.pid), stack, at_ns, period_ns);
        }
        true
    }

    /// Stores the sample that was just taken.
    fn store(&mut self, at_ns: u64) {
        let Some(reader) = &mut self.reader else { return };
        let options = &self.shared.options;
        let mut recorded = self.shared.lock();
        let window_ns = u64::try_from(options.window.as_nanos()).unwrap_or(u64::MAX);
        let in_window = window_ns / (options.period.as_nanos() as u64).max(1);
        let least = usize::try_from(in_window).unwrap_or(usize::MAX);
        if recorded.forget_before(at_ns.saturating_sub(window_ns), least) {
            reader.forget_numbers();
        }
        recorded.until_ns = at_ns;
        let period_ns = options.period.as_nanos() as u64;
        for index in 0..reader.threads.len() {
            match reader.threads[index].outcome {
                Outcome::Complete => {}
                Outcome::Cut => recorded.cut += 1,
                Outcome::Discarded => {
                    recorded.discarded += 1;
                    continue;
                }
            }
            let stack = match reader.threads[index].number {
                Some(number) => number,
                None => {
                    reader.frames(index, |frame| recorded.frame(frame), &mut self.frames);
                    recorded.stack(&self.frames)
                }
            };
            let thread = &mut reader.threads[index];
            thread.number = Some(stack);
            recorded.add(thread.key(), (&thread.name, thread.is_main), stack, at_ns, period_ns);
        }
    }

    fn is_gone(&self) -> bool {
        !procfs::stat(self.pid).is_ok_and(|stat| stat.start_time == self.started && !stat.is_dead())
    }

    /// Notes the end of the process.
    fn end(&self) -> bool {
        self.shared.lock().note(format!("process {} has ended", self.pid));
        false
    }

    /// The interpreter cannot be read any more. Returns false if the process has ended.
    fn lose_interpreter(&mut self) -> bool {
        self.reader = None;
        (self.next_search, self.search_delay) = (Instant::now(), SEARCH_DELAY);
        !self.is_gone() || self.end()
    }

    fn search(&mut self, now: Instant) {
        // A program that has just been executed has no interpreter yet.
        let is_first = self.search_delay == SEARCH_DELAY;
        self.next_search = now + self.search_delay;
        self.search_delay = (self.search_delay * 2).min(MAX_SEARCH_DELAY);
        let pid = self.pid;
        let tids = procfs::threads(pid).unwrap_or_default();
        let Some(live_tid) = live_thread(pid, &tids) else { return };
        let main_only = self.shared.options.threads == Threads::Main;
        match StackReader::find(self.images, pid, live_tid, main_only) {
            Ok(Some(reader)) => {
                if std::mem::replace(&mut self.had_reader, true) {
                    let text = format!("process {pid} has executed another program, which is recorded from then on");
                    self.shared.lock().note(text);
                }
                self.reader = Some(reader);
            }
            _ if is_first => {}
            Ok(None) => self.shared.lock().note(format!("process {pid} runs no CPython")),
            Err(reason) => self.shared.lock().note(format!("process {pid}: {reason}")),
        }
    }

    /// Notes children that were started since the last look.
    fn look_at_children(&mut self) {
        if !self.shared.options.children {
            return;
        }
        let children = procfs::children(self.pid, usize::MAX).unwrap_or_default();
        let new: Vec<String> =
            children.iter().filter(|child| !self.children.contains(child)).map(ToString::to_string).collect();
        if !new.is_empty() {
            let text = format!("process {} has started {}, which is not recorded", self.pid, new.join(", "));
            self.shared.lock().note(text);
        }
        self.children = children;
    }
}
