//! The two samples of a dump, the facts about a process and its main thread, and the changes
//! between the samples.

use xpu_timer_proto::{
    LISTENS,
    server::{
        Awaited, AwaitedKind, Holder, ProcessSample, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace,
        TcpConnection,
    },
};

use super::{
    names::{file, is_library, is_poll, own_frame, strip_variant},
    patterns,
};
use crate::{
    main_thread::{self, Candidate},
    verdict::{Activity, Location},
};

/// A process moves if it used at least this share of a processor between its samples.
pub(super) const BUSY_SHARE: f64 = 0.2;
/// A process with less than this share of a processor computes nothing.
pub(super) const IDLE_SHARE: f64 = 0.05;
/// A thread that looks for the work of another process runs at least this often in a second. One
/// that tries again after a failure sleeps for longer.
const SELDOM: f64 = 4.0;
/// A lower rate, in bytes per second, is the noise of logs and of watchers' pipes, and not progress
/// of I/O.
pub(super) const MOVING_BYTES_PER_SECOND: f64 = 16_384.0;

/// The stacks of one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample<'a> {
    /// Native threads.
    pub native: &'a [PstackStacktrace],
    /// Python threads.
    pub python: &'a [PySpyStacktrace],
    /// Process state, such as `S (sleeping)`.
    pub state: &'a str,
}

impl<'a> Sample<'a> {
    /// The native stack of a thread.
    pub(crate) fn native_of(self, tid: u32) -> Option<&'a PstackStacktrace> {
        self.native.iter().find(|thread| thread.pid == tid)
    }

    /// The Python stack of a thread.
    pub(crate) fn python_of(self, tid: u32) -> Option<&'a PySpyStacktrace> {
        self.python.iter().find(|thread| thread.os_thread_id == tid)
    }

    /// False if only the state of the process could be read.
    pub(crate) fn has_stacks(&self) -> bool {
        !(self.native.is_empty() && self.python.is_empty())
    }
}

/// Both samples of a dump: the first, if it was taken, and the last.
pub(crate) fn samples(dump: &Stacktrace) -> (Option<Sample<'_>>, Sample<'_>) {
    let last = Sample { native: &dump.stacktrace, python: &dump.py_stacktrace, state: &dump.process_state };
    (dump.first_sample.as_ref().map(of_process), last)
}

pub(crate) fn of_process(sample: &ProcessSample) -> Sample<'_> {
    Sample { native: &sample.stacktrace, python: &sample.py_stacktrace, state: &sample.process_state }
}

/// The native and the Python stack of one thread.
pub(super) type ThreadStacks<'a> = (Option<&'a PstackStacktrace>, Option<&'a PySpyStacktrace>);

/// The stacks of the thread that represents a process: the training thread, else the main thread.
pub(super) fn reporting_threads(sample: Sample<'_>, pid: i32, training: Option<u32>) -> ThreadStacks<'_> {
    if let Some(tid) = training {
        return (sample.native_of(tid), sample.python_of(tid));
    }
    let native = main_thread::of(sample.native.iter().map(Candidate::from), pid);
    let python = main_thread::of(sample.python.iter().map(Candidate::from), pid);
    (native.map(|place| &sample.native[place]), python.map(|place| &sample.python[place]))
}

/// The activity of one thread, and what shows it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ObservedActivity {
    /// Kind of activity.
    pub activity: Activity,
    /// The frame or fact that shows the activity.
    pub witness: String,
}

/// The changes between the two samples of a process.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Movement {
    /// Processors used, on average.
    pub cpu_share: f64,
    /// Bytes read and written.
    pub io_bytes: u64,
    /// I/O makes progress.
    pub io: bool,
    /// The innermost frame of the user's own Python code on the main thread has changed.
    pub own_frame: bool,
    /// The main thread ran.
    pub main_ran: bool,
    /// The main thread ran less than [`SELDOM`] times a second: it slept for long each time.
    pub main_ran_seldom: bool,
    /// A thread or child process that the main thread may wait for used a processor.
    pub helper_busy: bool,
    /// One of these made progress: bytes flowed, or it reached another line.
    pub helper_progressed: bool,
    /// That progress is only that child processes reached other lines of one function, and
    /// transferred nothing. An endless loop looks the same.
    pub helper_may_loop: bool,
    /// The main thread is busy and made progress inside a library that the user's own line calls:
    /// `trainer.evaluate()`.
    pub library_progressed: bool,
    /// The main thread was runnable in both samples. On a busy machine, one that computes gets
    /// little processor time.
    pub runnable: bool,
}

impl Movement {
    /// Whether anything makes progress: the process computes, bytes flow, or the program reached
    /// another line.
    pub(crate) fn is_progress(self) -> bool {
        self.is_busy() || self.io || self.own_frame
    }

    /// Whether the process computes.
    pub(super) fn is_busy(self) -> bool {
        self.runnable || self.cpu_share >= BUSY_SHARE
    }
}

/// A thread in uninterruptible sleep, at the same place in both samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DSleep {
    /// It is the main thread, or the only thread of the process.
    pub main: bool,
    /// Name of the thread.
    pub thread: String,
    /// Kernel function in which it sleeps.
    pub wchan: String,
}

/// One process, by its dump.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host {
    /// Process id on its node; 0 if unknown.
    pub pid: i32,
    /// Process id of its parent; 0 if unknown.
    pub parent_pid: i32,
    /// Process id of the parent that started it, if that has ended; else 0.
    pub ended_parent_pid: i32,
    /// Its command line, shortened.
    pub command: String,
    /// There is at least one stack of the main thread.
    pub stack: bool,
    /// State in the last sample.
    pub state: String,
    /// Activity of the main thread in the last sample.
    pub observed: ObservedActivity,
    /// The activity in the first sample was the same. True without a first sample.
    pub same_in_both: bool,
    /// Location of the main thread.
    pub location: Location,
    /// The changes between the samples. `None` without two samples.
    pub moved: Option<Movement>,
    /// A thread in uninterruptible sleep.
    pub d_sleep: Option<DSleep>,
    /// The object that the system call of the main thread waits for.
    pub awaited: Option<Awaited>,
    /// The other threads that wait for another process, if the main thread waits for none.
    pub thread_waits: Vec<ThreadWait>,
    /// The main thread or another thread of the program waits with a timeout, or a thread went from
    /// one wait to another between the samples. `None` if unknown.
    pub timed: Option<bool>,
    /// The main thread waits for the result of a task that it gave to a pool or an executor.
    pub awaits_result: bool,
    /// It waits for clients, and other threads of the program wait for locks at different places,
    /// the same in both samples.
    pub has_locked_threads: bool,
    /// Another thread serves a request or works on a task, at this place in both samples, and waits
    /// for an object to which only that thread refers: nobody can wake it.
    pub lost_request: Option<String>,
    /// The memory that its main thread polls, if it polls any.
    pub polling: Option<Polling>,
    /// It serves other processes, or works on their tasks, and waits for the next request or task.
    pub rests: bool,
    /// Its TCP connections to other machines.
    pub connections: Vec<TcpConnection>,
}

/// Memory that a main thread polls: the thread wakes up again and again, and other processes share
/// writable memory with it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Polling {
    /// These processes.
    pub sharers: Vec<Holder>,
    /// The thread is in a function of a library that polls a ring in shared memory.
    pub in_ring: bool,
}

/// The wait of a thread other than the main thread.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ThreadWait {
    pub awaited: Awaited,
    /// The thread runs the program's own code.
    pub own: bool,
}

impl Host {
    /// Stopped by a signal (`T`) or a tracer (`t`), or frozen with its control group (`F`).
    pub(crate) fn stopped(&self) -> bool {
        self.state.starts_with(['T', 't', 'F'])
    }

    /// A zombie, or gone.
    pub(crate) fn gone(&self) -> bool {
        self.state.starts_with(['Z', 'X', 'x'])
    }

    /// It cannot run, whatever its stacks show.
    pub(crate) fn halted(&self) -> bool {
        self.gone() || self.stopped() || self.d_sleep.as_ref().is_some_and(|sleep| sleep.main)
    }

    /// A thread of the program moves bytes of a file or a FIFO that no other process has open.
    pub(crate) fn has_thread_in_storage(&self) -> bool {
        self.thread_waits.iter().any(|wait| wait.own && is_storage(&wait.awaited, self.pid))
    }

    /// The main thread, or a thread for which it may wait, moves bytes of a file or a FIFO that no
    /// other process has open, and did not run between the samples.
    pub(crate) fn stands_in_storage(&self) -> bool {
        let moves = self.observed.activity == Activity::Io && self.same_in_both;
        // A process that opens a FIFO may wait for a person.
        let opens = self.location.native.as_deref().is_some_and(|native| strip_variant(native).starts_with("open"));
        let in_file = |awaited: &Awaited| moves && !opens && is_storage(awaited, self.pid);
        let stands = self.moved.is_some_and(|moved| !moved.is_progress());
        stands && (self.awaited.as_ref().is_some_and(in_file) || self.has_thread_in_storage())
    }

    /// The main thread waits for a message that only its own threads can send. An event loop polls
    /// a pair of sockets of its own all the time.
    pub(crate) fn waits_for_itself(&self) -> bool {
        let polls = self.location.native.as_deref().is_none_or(is_poll);
        !polls && self.awaited.as_ref().is_some_and(|awaited| is_message_of(awaited, self.pid))
    }

    /// The main thread reads from one pipe or socket, and does not poll.
    pub(crate) fn reads_one_stream(&self) -> bool {
        let polls = self.location.native.as_deref().is_none_or(is_poll);
        let kind = self.awaited.as_ref().map(Awaited::kind);
        matches!(kind, Some(AwaitedKind::Pipe | AwaitedKind::Socket)) && !polls
    }

    /// The main thread waits for the end of a child, or polls pipes that only its children have.
    pub(crate) fn waits_for_children(&self) -> bool {
        let polls = self.location.native.as_deref().is_some_and(is_poll);
        let of_children = |awaited: &Awaited| match awaited.kind() {
            AwaitedKind::Child => true,
            AwaitedKind::Pipe | AwaitedKind::Socket | AwaitedKind::Several => {
                polls && awaited.holders.iter().all(|holder| holder.child)
            }
            _ => false,
        };
        self.awaited.as_ref().is_some_and(of_children)
    }

    /// It serves clients in threads other than the main one, and runs no code of the program: a
    /// manager of Python's multiprocessing.
    pub(crate) fn only_serves(&self) -> bool {
        self.location.python.is_none()
            && self.thread_waits.iter().any(|wait| wait.awaited.name.starts_with(LISTENS))
            && self.thread_waits.iter().all(|wait| !wait.own)
    }

    /// Nothing proves that it makes progress.
    pub(crate) fn frozen(&self) -> bool {
        !self.moved.is_some_and(Movement::is_progress)
    }
}

/// Whether only threads of a process can send the awaited message.
pub(super) fn is_message_of(awaited: &Awaited, pid: i32) -> bool {
    matches!(awaited.kind(), AwaitedKind::Socket | AwaitedKind::Pipe)
        && !awaited.name.starts_with(LISTENS)
        && !awaited.holders.is_empty()
        && awaited.holders.iter().all(|holder| holder.pid == pid)
}

/// Whether a process moves bytes of a file, or of a FIFO that no other process has open. A terminal
/// is not storage.
fn is_storage(awaited: &Awaited, pid: i32) -> bool {
    let is_special = ["/dev/", "/proc/", "/sys/"].iter().any(|folder| awaited.name.starts_with(folder));
    let is_path = awaited.name.starts_with('/') && !is_special;
    let is_alone = awaited.holders.iter().all(|holder| holder.pid == pid);
    is_path && is_alone && matches!(awaited.kind(), AwaitedKind::File | AwaitedKind::Pipe)
}

/// The file name of a standard input that is a pipe.
pub(crate) const STANDARD_INPUT: &str = "/dev/stdin";

/// Whether a call waits for keyboard input, or for a standard input that replaces it.
pub(crate) fn is_terminal(awaited: &Awaited) -> bool {
    let name = awaited.name.as_str();
    let typed = [STANDARD_INPUT, "/dev/console"].contains(&name);
    awaited.kind() == AwaitedKind::File && (typed || name.starts_with("/dev/pts/") || name.starts_with("/dev/tty"))
}

/// The changes between the two samples. `None` without two samples of the main thread.
pub(super) fn movement(
    dump: &Stacktrace,
    before: Option<ThreadStacks<'_>>,
    after: ThreadStacks<'_>,
) -> Option<Movement> {
    let first = dump.first_sample.as_ref()?;
    let last = dump.last_sample.as_ref()?;
    let before = before?;
    let between_ns = last.captured_unix_ns.saturating_sub(first.captured_unix_ns);
    if between_ns == 0 {
        return None;
    }
    let seconds = between_ns as f64 / 1e9;
    let io_bytes = bytes_between(first, last);
    let both = before.0.zip(after.0);
    let runs = both.map(|(before, after)| after.context_switches.abs_diff(before.context_switches));
    Some(Movement {
        cpu_share: last.cpu_time_ns.saturating_sub(first.cpu_time_ns) as f64 / between_ns as f64,
        io_bytes,
        io: io_bytes as f64 / seconds >= MOVING_BYTES_PER_SECOND,
        // Frames that could not be read in one of the samples prove no move.
        own_frame: own_frames(before, after).is_some_and(|[before, after]| {
            (&before.func_name, &before.file_name) != (&after.func_name, &after.file_name)
        }),
        main_ran: runs.is_some_and(|runs| runs > 0),
        main_ran_seldom: runs.is_some_and(|runs| (runs as f64) < SELDOM * seconds),
        runnable: [&first.process_state, &dump.process_state].iter().all(|state| state.starts_with('R')),
        ..Movement::default()
    })
}

/// Bytes that a process read and wrote between two samples, including TCP connections. A counter
/// that could not be read counts as zero.
pub(super) fn bytes_between(first: &ProcessSample, last: &ProcessSample) -> u64 {
    let grown = |before: u64, after: u64| if before == 0 { 0 } else { after.saturating_sub(before) };
    grown(first.io_bytes, last.io_bytes).saturating_add(grown(first.tcp_bytes, last.tcp_bytes))
}

/// Whether the main thread is in a read or write of the same socket in both samples and woke up in
/// between: bytes came or went. The kernel does not count the bytes of `recv` and `send`.
pub(super) fn serves_socket((before, _): ThreadStacks<'_>, (after, _): ThreadStacks<'_>) -> bool {
    let socket = |thread: &PstackStacktrace| {
        let awaited = thread.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Socket)?;
        let moves = thread.syscall.is_some_and(|number| patterns::SOCKET_SYSCALLS.contains(&number));
        moves.then(|| (thread.syscall, awaited.name.clone()))
    };
    before.zip(after).is_some_and(|(before, after)| {
        before.context_switches != after.context_switches && socket(before).is_some() && socket(before) == socket(after)
    })
}

/// Whether the innermost Python frames of two samples are in libraries, and at different lines.
pub(super) fn within_library((_, before): ThreadStacks<'_>, (_, after): ThreadStacks<'_>) -> bool {
    let leaf = |python: Option<&PySpyStacktrace>| {
        let frame = python?.frames.first().filter(|frame| is_library(&frame.file_name))?;
        Some((frame.func_name.clone(), frame.file_name.clone()))
    };
    leaf(before).zip(leaf(after)).is_some_and(|(before, after)| before != after)
}

/// The innermost Python frames of the user's own code in two samples.
pub(super) fn own_frames<'a>(before: ThreadStacks<'a>, after: ThreadStacks<'a>) -> Option<[&'a PySpyFrame; 2]> {
    let own = |(_, python): ThreadStacks<'a>| own_frame(&python?.frames);
    Some([own(before)?, own(after)?])
}

/// Whether the user's own frames of two samples are in one function, at any lines.
pub(super) fn in_same_function(before: ThreadStacks<'_>, after: ThreadStacks<'_>) -> bool {
    own_frames(before, after).is_some_and(|[before, after]| {
        before.func_name == after.func_name && file(before).is_some() && file(before) == file(after)
    })
}
