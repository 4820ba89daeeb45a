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

use crate::{
    error::Error,
    kernel::procfs::{self, Schedule},
    native::{
        address_space::AddressSpace,
        perf::{self, Event, Reach},
        thread::{Look, Thread},
    },
    python::{
        agreement::{Agreement, agreement},
        reader::{Python, PythonThread},
        stack::Stack,
        stopped_copy::{StoppedCopy, glance},
    },
};

/// Maximum number of open events of one process. Each locks 68 KB of memory.
const AT_ONCE: usize = 8;
/// Time between two polls of threads that are not sampled yet.
const PAUSE: Duration = Duration::from_millis(1);
/// Time limit for one thread. On a busy machine, a thread may wait that long for a CPU.
const PATIENCE: Duration = Duration::from_millis(250);
/// Time limit for one thread if threads may not be sampled.
const SHORT_PATIENCE: Duration = Duration::from_millis(4);
/// A thread that used the CPU for this long without a sample was inside the kernel, where it may
/// not be sampled.
const BUSY: Duration = Duration::from_millis(5);
/// After this number of polls without a sample, a thread seems to stay in a system call, and is
/// sampled inside system calls too.
const USER_LOOKS: usize = 2;
/// Minimum number of polls before [`BUSY`] counts, because this process itself may have had no CPU
/// for that long.
const BUSY_LOOKS: usize = 5;
/// How often to sample a thread until its Python stack agrees with its native stack.
const ATTEMPTS: usize = 4;

/// State that is shared by the running threads of one process.
pub(crate) struct Running<'a> {
    pub pid: i32,
    pub space: &'a AddressSpace<'a>,
    pub python: Option<&'a Python>,
    pub context: &'a mut UnwindContext<usize>,
    pub deadline: Instant,
    /// Why the threads of this process cannot be sampled.
    pub refusal: Option<String>,
    /// Whether threads may be sampled inside system calls too, as far as known.
    pub kernel: bool,
}

/// The state of one thread.
struct Watch<'t> {
    native: &'t mut Thread,
    python: Option<&'t mut PythonThread>,
    event: Option<Event>,
    reach: Reach,
    since: Instant,
    /// CPU time of the thread at `since`.
    cpu_ns: u64,
    /// Its Python stack before the sample, and the best one so far.
    before: Option<Stack>,
    best: Option<Stack>,
    missed: Vec<u64>,
    attempts: usize,
    /// Number of polls without a sample.
    looks: usize,
    started: bool,
    done: bool,
    gone: bool,
}

impl Running<'_> {
    /// Takes the stacks of the threads with these ids. Returns the ids of those that have ended.
    pub fn take(&mut self, tids: &[i32], threads: &mut [Thread], python_threads: &mut [PythonThread]) -> Vec<i32> {
        let mut python_of: HashMap<i32, &mut PythonThread> =
            python_threads.iter_mut().map(|thread| (thread.tid, thread)).collect();
        let mut watches: Vec<Watch<'_>> = threads
            .iter_mut()
            .filter(|thread| tids.contains(&thread.tid))
            .map(|native| Watch::new(python_of.remove(&native.tid), native))
            .collect();
        let mut looked = Instant::now();
        loop {
            let active = watches.iter().filter(|watch| watch.is_active()).count();
            let next = watches.iter_mut().filter(|watch| !watch.started).take(AT_ONCE.saturating_sub(active));
            next.for_each(|watch| self.start(watch));
            if watches.iter().all(|watch| watch.done) {
                break;
            }
            if watches.iter().any(Watch::is_active) {
                wait(&watches);
            }
            let look = looked.elapsed() >= PAUSE;
            self.look(&mut watches, look);
            if look {
                looked = Instant::now();
            }
        }
        watches.iter().filter(|watch| watch.gone).map(|watch| watch.native.tid).collect()
    }

    fn start(&mut self, watch: &mut Watch<'_>) {
        (watch.started, watch.since) = (true, Instant::now());
        watch.cpu_ns = Schedule::of(self.pid, watch.native.tid).cpu_ns;
        self.step(watch, Self::catch);
        watch.done |= !self.sample_soon(watch);
    }

    /// Takes the available samples. With `also_asleep`, also reads the threads that have none.
    fn look(&mut self, watches: &mut [Watch<'_>], also_asleep: bool) {
        let mut events = watches.iter().filter(|watch| watch.event.is_some()).count();
        for watch in watches.iter_mut().filter(|watch| watch.is_active()) {
            events -= usize::from(watch.event.is_some());
            self.step(watch, |running, watch| Ok(running.take_sample(watch)));
            if also_asleep && !watch.done {
                self.step(watch, Self::catch);
                self.widen(watch);
                // If other events of this process are open, their descriptors and memory may become
                // available later.
                if !watch.done && events == 0 {
                    watch.done |= !self.sample_soon(watch);
                }
                self.give_up(watch);
            }
            events += usize::from(watch.event.is_some());
        }
    }

    /// Tries something that may complete the thread or find that it has ended.
    fn step(&mut self, watch: &mut Watch<'_>, look: impl FnOnce(&mut Self, &mut Watch<'_>) -> Result<bool, Error>) {
        if watch.done {
            return;
        }
        match look(self, watch) {
            Ok(done) => watch.done = done,
            Err(error) => {
                watch.done = true;
                watch.gone = error.is_gone();
                if !watch.gone {
                    watch.native.note(&error.to_string());
                }
            }
        }
        if watch.done {
            // The descriptor and the memory of the ring become available to other threads.
            watch.event = None;
        }
    }

    /// Reads both stacks of a thread if it sleeps now. Returns whether the thread is complete.
    fn catch(&mut self, watch: &mut Watch<'_>) -> Result<bool, Error> {
        let (pid, space) = (self.pid, self.space);
        if procfs::status(pid, watch.native.tid)?.letter() == b'R' {
            return Ok(false);
        }
        let Some((python, thread)) = self.python.zip(watch.python.as_deref_mut()) else {
            return Ok(watch.native.catch(pid, space, self.context, &mut || {})? == Look::Done);
        };
        let mut copy = StoppedCopy::prepare(python, thread, &watch.missed);
        let look = watch.native.catch(pid, space, self.context, &mut || copy.take())?;
        let (Look::Done, Some((stack, lacking))) = (look, copy.finish()) else { return Ok(false) };
        watch.missed = lacking;
        watch.attempts += 1;
        let whole = stack.problem.is_none();
        thread.stack = stack;
        thread.right = whole && agreement(python, thread, watch.native, space) != Agreement::Between;
        Ok(thread.right || watch.attempts >= ATTEMPTS)
    }

    /// Requests a sample for when the thread next runs. Returns false if the thread has ended.
    fn sample_soon(&mut self, watch: &mut Watch<'_>) -> bool {
        if watch.done || self.refusal.is_some() || watch.event.is_some() {
            return true;
        }
        if let Some((python, thread)) = self.python.zip(watch.python.as_deref()) {
            watch.before = Some(glance(python, thread, &mut watch.missed));
        }
        match Event::open(watch.native.tid, watch.reach).and_then(|event| event.arm().map(|()| event)) {
            Ok(event) => watch.event = Some(event),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => watch.gone = true,
            // Earlier threads of the list, or other processes, will soon release theirs.
            Err(error) if perf::is_shortage(&error) && watch.since.elapsed() < PATIENCE / 2 => {}
            Err(error) => self.refusal = Some(perf::explain(&error)),
        }
        !watch.gone
    }

    /// Samples a thread inside system calls too, once it seems to stay in one.
    fn widen(&mut self, watch: &mut Watch<'_>) {
        let stays = watch.looks >= USER_LOOKS && watch.reach == Reach::User && watch.attempts == 0;
        if watch.done || !self.kernel || !stays || watch.event.is_none() {
            return;
        }
        match Event::open(watch.native.tid, Reach::Kernel).and_then(|event| event.arm().map(|()| event)) {
            Ok(event) => (watch.event, watch.reach) = (Some(event), Reach::Kernel),
            Err(error) => self.kernel &= !perf::is_forbidden(&error),
        }
    }

    /// Takes both stacks of a thread that was sampled. Returns whether the thread is complete.
    fn take_sample(&mut self, watch: &mut Watch<'_>) -> bool {
        let Some(sample) = watch.event.as_ref().and_then(Event::take) else { return false };
        let after =
            self.python.zip(watch.python.as_deref()).map(|(python, thread)| glance(python, thread, &mut watch.missed));
        watch.native.sampled(self.pid, sample, self.space, self.context);
        let Some(((python, thread), after)) = self.python.zip(watch.python.as_deref_mut()).zip(after) else {
            return true;
        };
        watch.attempts += 1;
        let common = watch.before.take().and_then(|before| Stack::common(&before, after));
        if let Some(stack) = common {
            let still = !stack.moved;
            thread.stack = stack;
            let agreement = agreement(python, thread, watch.native, self.space);
            thread.right = still && agreement != Agreement::Between;
            // The stacks never agree if the code of the loop is unknown or C code switches stacks.
            // Then both are reported.
            if thread.right && agreement != Agreement::No {
                return true;
            }
            if agreement != Agreement::Between {
                watch.keep_best();
            }
        }
        if watch.attempts >= ATTEMPTS {
            watch.settle();
            return true;
        }
        let thread = watch.python.as_deref().expect("it has a Python side");
        watch.before = Some(glance(python, thread, &mut watch.missed));
        // This fails if the thread has ended.
        watch.event.as_ref().is_none_or(|event| event.arm().is_err())
    }

    /// Stops waiting for a thread whose time is over.
    fn give_up(&mut self, watch: &mut Watch<'_>) {
        let waited = watch.since.elapsed();
        let used = Schedule::of(self.pid, watch.native.tid).cpu_ns.saturating_sub(watch.cpu_ns);
        watch.looks += 1;
        let busy = watch.looks >= BUSY_LOOKS && u128::from(used) >= BUSY.as_nanos();
        let patience = if self.refusal.is_some() { SHORT_PATIENCE } else { PATIENCE };
        let late = Instant::now() >= self.deadline;
        if watch.done || !(busy || late || waited >= patience) {
            return;
        }
        watch.done = true;
        watch.event = None;
        if watch.attempts > 0 {
            // The thread was sampled; only its Python stack could be better.
            return watch.settle();
        }
        let reason = match (&self.refusal, watch.reach) {
            _ if late => "the deadline passed before the thread was sampled".into(),
            (Some(_), _) => "the thread runs and may not be sampled".into(),
            (None, Reach::User) if busy => {
                "the thread is busy inside a system call, where a user without CAP_PERFMON may sample \
                                            it only if /proc/sys/kernel/perf_event_paranoid is below 2"
                    .into()
            }
            (None, Reach::Kernel) if busy => "the thread is busy inside the kernel".into(),
            _ if used == 0 => format!("the thread got no CPU for {} ms", waited.as_millis()),
            _ => format!("the thread ran for {} us in {} ms and was not sampled", used / 1000, waited.as_millis()),
        };
        watch.native.note(&reason);
        if let Some((python, thread)) = self.python.zip(watch.python.as_deref_mut()) {
            let before = glance(python, thread, &mut watch.missed);
            let after = glance(python, thread, &mut watch.missed);
            watch.best = Stack::common(&before, after);
            watch.settle();
        }
    }
}

impl<'t> Watch<'t> {
    fn new(python: Option<&'t mut PythonThread>, native: &'t mut Thread) -> Self {
        Watch {
            native,
            python,
            event: None,
            reach: Reach::User,
            since: Instant::now(),
            cpu_ns: 0,
            before: None,
            best: None,
            missed: Vec::new(),
            attempts: 0,
            looks: 0,
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
        let value = |stack: &Stack| (!stack.moved, stack.length());
        if self.best.as_ref().is_none_or(|best| value(best) <= value(&thread.stack)) {
            self.best = Some(std::mem::take(&mut thread.stack));
        }
    }

    /// Reports the best Python stack. If no two reads agreed on any frames, the stack is reported
    /// as unknown.
    fn settle(&mut self) {
        let Some(thread) = self.python.as_deref_mut() else { return };
        thread.stack = self.best.take().unwrap_or_else(|| Stack::unknown("it changed too fast to be read"));
        thread.right = thread.stack.problem.is_none() && !thread.stack.moved;
    }
}

/// Waits until one of the threads is sampled, at most for [`POLL_INTERVAL`].
fn wait(watches: &[Watch<'_>]) {
    let events = watches.iter().filter(|watch| watch.is_active()).filter_map(|watch| watch.event.as_ref());
    let mut descriptors: Vec<PollFd<'_>> = events.map(|event| PollFd::new(event.as_fd(), PollFlags::POLLIN)).collect();
    // A signal may interrupt the wait. Then the caller polls a little earlier.
    let _ = nix::poll::poll(&mut descriptors, PollTimeout::from(PAUSE.as_millis() as u16));
}
