//! Takes the stacks of threads that run, and of threads that repeatedly wake and sleep, without a
//! stop.
//!
//! The kernel samples a thread while it runs (`native/perf.rs`). Between two polls for the sample,
//! the thread is read as a sleeping thread in case it sleeps. Several threads wait for their
//! samples at the same time. If a thread yields no stack in its time, it is reported as running,
//! with the Python frames that two reads agree on, and with the reason.

use std::{
    collections::HashMap,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use gimli::UnwindContext;
use nix::poll::{PollFd, PollFlags, PollTimeout};

use xpu_timer_proto::procfs::{self, Schedule};

use crate::{
    error::Error,
    native::{
        address_space::AddressSpace,
        perf::{self, Event, SampleMode},
        thread::{ReadResult, Thread},
    },
    python::{
        consistency::{Agreement, StoppedCopy, agreement, read_running},
        frames::Stack,
        reader::{PythonReader, PythonThread},
    },
};

/// Maximum number of open events of one process. Each locks 68 KB of memory.
const MAX_EVENTS: usize = 8;
/// Time between two polls of threads that are not sampled yet.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Time limit for one thread. On a busy machine, a thread may wait that long for a CPU.
const TIMEOUT: Duration = Duration::from_millis(250);
/// Time limit for one thread if threads may not be sampled.
const SHORT_TIMEOUT: Duration = Duration::from_millis(4);
/// A thread that used the CPU for this long without a sample was inside the kernel, where it may
/// not be sampled.
const BUSY_CPU_TIME: Duration = Duration::from_millis(5);
/// After this number of polls without a sample, a thread seems to stay in a system call, and is
/// sampled inside system calls too.
const USER_POLLS: usize = 2;
/// Minimum number of polls before [`BUSY_CPU_TIME`] counts, because this process itself may have
/// had no CPU for that long.
const BUSY_POLLS: usize = 5;
/// How often to sample a thread until its Python stack agrees with its native stack.
const ATTEMPTS: usize = 4;
/// Why a thread that does not leave a system call was not sampled.
const BUSY_IN_SYSTEM_CALL: &str = "the thread is busy inside a system call, where a user without CAP_PERFMON may \
    sample it only if /proc/sys/kernel/perf_event_paranoid is below 2";

/// State that is shared by the running threads of one process.
pub(crate) struct RunningThreads<'a> {
    pub pid: i32,
    pub space: &'a AddressSpace<'a>,
    pub python: Option<&'a PythonReader>,
    pub context: &'a mut UnwindContext<usize>,
    pub deadline: Instant,
    /// Why the threads of this process cannot be sampled.
    pub refusal: Option<String>,
    /// Whether threads may be sampled inside system calls too, as far as known.
    pub may_sample_kernel: bool,
}

/// The state of one thread.
struct WatchedThread<'t> {
    native: &'t mut Thread,
    python: Option<&'t mut PythonThread>,
    event: Option<Event>,
    mode: SampleMode,
    since: Instant,
    /// CPU time of the thread at `since`.
    cpu_ns: u64,
    /// Its Python stack before the sample, and the best one so far.
    before: Option<Stack>,
    best: Option<Stack>,
    missed: Vec<u64>,
    attempts: usize,
    /// Number of polls without a sample.
    polls: usize,
    started: bool,
    done: bool,
    gone: bool,
}

impl RunningThreads<'_> {
    /// Takes the stacks of the threads with these ids. Returns the ids of those that have ended.
    pub(super) fn take(
        &mut self,
        tids: &[i32],
        threads: &mut [Thread],
        python_threads: &mut [PythonThread],
    ) -> Vec<i32> {
        let mut python_of: HashMap<i32, &mut PythonThread> =
            python_threads.iter_mut().map(|thread| (thread.tid, thread)).collect();
        let mut watched_threads: Vec<WatchedThread<'_>> = threads
            .iter_mut()
            .filter(|thread| tids.contains(&thread.tid))
            .map(|native| WatchedThread::new(python_of.remove(&native.tid), native))
            .collect();
        let mut last_poll = Instant::now();
        loop {
            let active = watched_threads.iter().filter(|watched| watched.is_active()).count();
            let next =
                watched_threads.iter_mut().filter(|watched| !watched.started).take(MAX_EVENTS.saturating_sub(active));
            next.for_each(|watched| self.start(watched));
            if watched_threads.iter().all(|watched| watched.done) {
                break;
            }
            if watched_threads.iter().any(WatchedThread::is_active) {
                wait(&watched_threads);
            }
            let poll = last_poll.elapsed() >= POLL_INTERVAL;
            self.poll(&mut watched_threads, poll);
            if poll {
                last_poll = Instant::now();
            }
        }
        watched_threads.iter().filter(|watched| watched.gone).map(|watched| watched.native.tid).collect()
    }

    fn start(&mut self, watched: &mut WatchedThread<'_>) {
        (watched.started, watched.since) = (true, Instant::now());
        watched.cpu_ns = Schedule::of(self.pid, watched.native.tid).cpu_ns;
        self.advance(watched, Self::read_if_asleep);
        watched.done |= !self.request_sample(watched);
    }

    /// Takes the available samples. With `also_asleep`, also reads the threads that have none.
    fn poll(&mut self, watched_threads: &mut [WatchedThread<'_>], also_asleep: bool) {
        let mut events = watched_threads.iter().filter(|watched| watched.event.is_some()).count();
        for watched in watched_threads.iter_mut().filter(|watched| watched.is_active()) {
            events -= usize::from(watched.event.is_some());
            self.advance(watched, |running, watched| Ok(running.take_sample(watched)));
            if also_asleep && !watched.done {
                self.advance(watched, Self::read_if_asleep);
                self.sample_in_kernel(watched);
                // If other events of this process are open, their descriptors and memory may become
                // available later.
                if !watched.done && events == 0 {
                    watched.done |= !self.request_sample(watched);
                }
                self.give_up(watched);
            }
            events += usize::from(watched.event.is_some());
        }
    }

    /// Tries something that may complete the thread or find that it has ended.
    fn advance(
        &mut self,
        watched: &mut WatchedThread<'_>,
        poll: impl FnOnce(&mut Self, &mut WatchedThread<'_>) -> Result<bool, Error>,
    ) {
        if watched.done {
            return;
        }
        match poll(self, watched) {
            Ok(done) => watched.done = done,
            Err(error) => {
                watched.done = true;
                watched.gone = error.is_gone();
                if !watched.gone {
                    watched.native.add_reason(&error.to_string());
                }
            }
        }
        if watched.done {
            // The descriptor and the memory of the ring become available to other threads.
            watched.event = None;
        }
    }

    /// Reads both stacks of a thread if it sleeps now. Returns whether the thread is complete.
    fn read_if_asleep(&mut self, watched: &mut WatchedThread<'_>) -> Result<bool, Error> {
        let (pid, space) = (self.pid, self.space);
        if procfs::status(pid, watched.native.tid)?.letter() == b'R' {
            return Ok(false);
        }
        let Some((python, thread)) = self.python.zip(watched.python.as_deref_mut()) else {
            return Ok(watched.native.read_short_sleep(pid, space, self.context, &mut || {})? == ReadResult::Done);
        };
        let mut copy = StoppedCopy::prepare(python, thread, &watched.missed);
        let result = watched.native.read_short_sleep(pid, space, self.context, &mut || copy.take())?;
        let (ReadResult::Done, Some((stack, missing_pages))) = (result, copy.finish()) else { return Ok(false) };
        watched.missed = missing_pages;
        watched.attempts += 1;
        let is_complete = stack.problem.is_none();
        thread.stack = stack;
        thread.is_consistent = is_complete && agreement(python, thread, watched.native, space) != Agreement::Between;
        Ok(thread.is_consistent || watched.attempts >= ATTEMPTS)
    }

    /// Requests a sample for when the thread next runs. Returns false if the thread has ended.
    fn request_sample(&mut self, watched: &mut WatchedThread<'_>) -> bool {
        if watched.done || self.refusal.is_some() || watched.event.is_some() {
            return true;
        }
        if let Some((python, thread)) = self.python.zip(watched.python.as_deref()) {
            watched.before = Some(read_running(python, thread, &mut watched.missed));
        }
        match Event::open(watched.native.tid, watched.mode).and_then(|event| event.arm().map(|()| event)) {
            Ok(event) => {
                watched.event = Some(event);
                watched.cpu_ns = Schedule::of(self.pid, watched.native.tid).cpu_ns;
            }
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => watched.gone = true,
            // Earlier threads of the list, or other processes, will soon release theirs.
            Err(error) if perf::is_shortage(&error) && watched.since.elapsed() < TIMEOUT / 2 => {}
            Err(error) => self.refusal = Some(perf::explain(&error)),
        }
        !watched.gone
    }

    /// Samples a thread inside system calls too, once it seems to stay in one.
    fn sample_in_kernel(&mut self, watched: &mut WatchedThread<'_>) {
        let stays = watched.polls >= USER_POLLS && watched.mode == SampleMode::User && watched.attempts == 0;
        if watched.done || !self.may_sample_kernel || !stays || watched.event.is_none() {
            return;
        }
        match Event::open(watched.native.tid, SampleMode::Kernel).and_then(|event| event.arm().map(|()| event)) {
            Ok(event) => {
                (watched.event, watched.mode) = (Some(event), SampleMode::Kernel);
                // Only what the thread uses from now on shows that it is busy in the kernel.
                watched.cpu_ns = Schedule::of(self.pid, watched.native.tid).cpu_ns;
                watched.polls = 0;
            }
            Err(error) => self.may_sample_kernel &= !perf::is_forbidden(&error),
        }
    }

    /// Takes both stacks of a thread that was sampled. Returns whether the thread is complete.
    fn take_sample(&mut self, watched: &mut WatchedThread<'_>) -> bool {
        let Some(sample) = watched.event.as_ref().and_then(Event::take) else { return false };
        let after = self
            .python
            .zip(watched.python.as_deref())
            .map(|(python, thread)| read_running(python, thread, &mut watched.missed));
        watched.native.store_sample(self.pid, sample, self.space, self.context);
        let Some(((python, thread), after)) = self.python.zip(watched.python.as_deref_mut()).zip(after) else {
            return true;
        };
        watched.attempts += 1;
        let common_frames = watched.before.take().and_then(|before| Stack::common_frames(&before, after));
        if let Some(stack) = common_frames {
            let still = !stack.is_cut;
            thread.stack = stack;
            let agreement = agreement(python, thread, watched.native, self.space);
            thread.is_consistent = still && agreement != Agreement::Between;
            // The stacks never agree if the code of the loop is unknown or C code switches stacks.
            // Then both are reported.
            if thread.is_consistent && agreement != Agreement::No {
                return true;
            }
            if agreement != Agreement::Between {
                watched.keep_best();
            }
        }
        if watched.attempts >= ATTEMPTS {
            watched.report_best();
            return true;
        }
        let thread = watched.python.as_deref().expect("it has a Python side");
        watched.before = Some(read_running(python, thread, &mut watched.missed));
        // This fails if the thread has ended.
        watched.event.as_ref().is_none_or(|event| event.arm().is_err())
    }

    /// Stops waiting for a thread whose time is over.
    fn give_up(&mut self, watched: &mut WatchedThread<'_>) {
        let waited = watched.since.elapsed();
        let used = Schedule::of(self.pid, watched.native.tid).cpu_ns.saturating_sub(watched.cpu_ns);
        watched.polls += 1;
        let busy = watched.polls >= BUSY_POLLS && u128::from(used) >= BUSY_CPU_TIME.as_nanos();
        let timeout = if self.refusal.is_some() { SHORT_TIMEOUT } else { TIMEOUT };
        let late = Instant::now() >= self.deadline;
        if watched.done || !(busy || late || waited >= timeout) {
            return;
        }
        // If this process had no CPU since the last poll, the thread was sampled in the meantime.
        self.advance(watched, |running, watched| Ok(running.take_sample(watched)));
        if watched.done {
            return;
        }
        watched.done = true;
        watched.event = None;
        if watched.attempts > 0 {
            // The thread was sampled; only its Python stack could be better.
            return watched.report_best();
        }
        let reason = match (&self.refusal, watched.mode) {
            _ if late => "the deadline passed before the thread was sampled".into(),
            (Some(_), _) => "the thread runs, and the kernel does not permit sampling it".into(),
            (None, SampleMode::User) if busy => BUSY_IN_SYSTEM_CALL.into(),
            (None, SampleMode::Kernel) if busy => "the thread is busy inside the kernel".into(),
            _ if used == 0 => format!("the thread got no CPU for {} ms", waited.as_millis()),
            _ => format!("the thread ran for {} us in {} ms and was not sampled", used / 1000, waited.as_millis()),
        };
        watched.native.add_reason(&reason);
        if let Some((python, thread)) = self.python.zip(watched.python.as_deref_mut()) {
            let before = read_running(python, thread, &mut watched.missed);
            let after = read_running(python, thread, &mut watched.missed);
            watched.best = Stack::common_frames(&before, after);
            watched.report_best();
        }
    }
}

impl<'t> WatchedThread<'t> {
    fn new(python: Option<&'t mut PythonThread>, native: &'t mut Thread) -> Self {
        WatchedThread {
            native,
            python,
            event: None,
            mode: SampleMode::User,
            since: Instant::now(),
            cpu_ns: 0,
            before: None,
            best: None,
            missed: Vec::new(),
            attempts: 0,
            polls: 0,
            started: false,
            done: false,
            gone: false,
        }
    }

    fn is_active(&self) -> bool {
        self.started && !self.done
    }

    /// Keeps the Python stack that was just read if it is better than the earlier ones.
    fn keep_best(&mut self) {
        let Some(thread) = self.python.as_deref_mut() else { return };
        let value = |stack: &Stack| (!stack.is_cut, stack.frame_count());
        if self.best.as_ref().is_none_or(|best| value(best) <= value(&thread.stack)) {
            self.best = Some(std::mem::take(&mut thread.stack));
        }
    }

    /// Reports the best Python stack. If no two reads agreed on any frames, the stack is reported
    /// as unknown.
    fn report_best(&mut self) {
        let Some(thread) = self.python.as_deref_mut() else { return };
        thread.stack = self.best.take().unwrap_or_else(|| Stack::unknown("it changed too fast to read it"));
        thread.is_consistent = thread.stack.problem.is_none() && !thread.stack.is_cut;
    }
}

/// Waits until one of the threads is sampled, at most for [`POLL_INTERVAL`].
fn wait(watched_threads: &[WatchedThread<'_>]) {
    let events =
        watched_threads.iter().filter(|watched| watched.is_active()).filter_map(|watched| watched.event.as_ref());
    let mut descriptors: Vec<PollFd<'_>> = events.map(|event| PollFd::new(event.as_fd(), PollFlags::POLLIN)).collect();
    // A signal may interrupt the wait. Then the caller polls a little earlier.
    let _ = nix::poll::poll(&mut descriptors, PollTimeout::from(POLL_INTERVAL.as_millis() as u16));
}
