//! Where a rank stands and what it does, by the words on its stacks, its process state, and what moved between its two
//! samples. Names of frames come as `proto/server.proto` says; nothing here compares one rank with another.

mod classify;
mod helpers;
mod location;
mod training;
mod words;

use xpu_timer_proto::server::{
    Awaited, AwaitedKind, ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace,
};

use classify::{classify_without, receives};
pub(crate) use helpers::{GilHolder, StuckHelper, compiler_child, gil_holder, stuck_helper};
use location::{file, is_library, locate, own_frame, program};
pub(crate) use training::training_thread;
use training::{Telling, telling_threads};
pub use words::FREEZER_WCHAN;

use crate::verdict::{Activity, Location};

/// A process counts as moving when it used at least this share of a processor between its samples.
const BUSY_SHARE: f64 = 0.2;
/// With less than this share of a processor a process computes nothing.
const IDLE_SHARE: f64 = 0.05;
/// Less than so many bytes a second is the noise of logs and of watchers' pipes, not progress of input or output.
const MOVING_BYTES_PER_SECOND: f64 = 16_384.0;

/// The kernel shows a process whose control group is frozen as one that sleeps, so it gets a state of its own here.
const FROZEN: &str = "F (frozen)";

/// What the kernel calls a process that waits.
const SLEEPING: &str = "S (sleeping)";

/// The stacks of one moment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample<'a> {
    /// Native threads.
    pub native: &'a [PstackStacktrace],
    /// Python threads.
    pub python: &'a [PySpyStacktrace],
    /// `S (sleeping)` and the like.
    pub state: &'a str,
}

impl Sample<'_> {
    /// False for a process of which nothing but its state could be had.
    fn has_stacks(&self) -> bool {
        !(self.native.is_empty() && self.python.is_empty())
    }
}

/// What one thread does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Doing {
    /// What it is.
    pub activity: Activity,
    /// The frame or fact that tells it.
    pub witness: String,
}

/// What changed between the two samples of a process.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Moved {
    /// Processors used, on the average.
    pub cpu_share: f64,
    /// Bytes read and written.
    pub io_bytes: u64,
    /// Reading and writing makes progress.
    pub io: bool,
    /// The user's own innermost Python frame of the main thread is another one.
    pub own_frame: bool,
    /// The main thread ran.
    pub main_ran: bool,
    /// A thread or child process that the main thread may wait for used a processor.
    pub helper_busy: bool,
    /// One of those went on: bytes flowed, or it reached another line.
    pub helper_went_on: bool,
    /// The main thread is busy, and went on within a library that the user's own line calls: `trainer.evaluate()`.
    pub library_went_on: bool,
}

impl Moved {
    /// Something makes progress: the process computes, or bytes flow, or the program went on.
    pub fn any(self) -> bool {
        self.cpu_share >= BUSY_SHARE || self.io || self.own_frame
    }
}

/// A thread in uninterruptible sleep, at the same place in both samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DSleep {
    /// It is the main thread, or the process has but one.
    pub main: bool,
    /// Its name.
    pub thread: String,
    /// Kernel function.
    pub wchan: String,
}

/// One process, as far as its dump tells.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host {
    /// There is at least one stack of the main thread.
    pub stack: bool,
    /// State in the last sample.
    pub state: String,
    /// What the main thread does in the last sample.
    pub doing: Doing,
    /// It did the same in the first sample; true when there is no first sample.
    pub same_in_both: bool,
    /// Where the main thread stands.
    pub location: Location,
    /// What moved; absent without two samples.
    pub moved: Option<Moved>,
    /// A thread in uninterruptible sleep.
    pub d_sleep: Option<DSleep>,
    /// What the system call of the main thread waits for.
    pub awaited: Option<Awaited>,
}

impl Host {
    /// Stopped by a signal (`T`), by a tracer (`t`), or with its control group (`F`).
    pub fn stopped(&self) -> bool {
        self.state.starts_with(['T', 't', 'F'])
    }

    /// A zombie, or gone.
    pub fn gone(&self) -> bool {
        self.state.starts_with(['Z', 'X', 'x'])
    }

    /// Nothing proves that it makes progress.
    pub fn frozen(&self) -> bool {
        !self.moved.is_some_and(Moved::any)
    }
}

/// Both samples of a dump: the first one when it was taken, and the last.
pub(crate) fn samples(dump: &Stacktrace) -> (Option<Sample<'_>>, Sample<'_>) {
    let last = Sample { native: &dump.stacktrace, python: &dump.py_stacktrace, state: &dump.process_state };
    (dump.first_sample.as_ref().map(of_process), last)
}

fn of_process(sample: &ProcessSample) -> Sample<'_> {
    Sample { native: &sample.stacktrace, python: &sample.py_stacktrace, state: &sample.process_state }
}

/// Reads a dump: what its main thread does, or the one that trains in its place.
pub(crate) fn read(dump: &Stacktrace, training: Option<u32>) -> Host {
    let (first, last) = samples(dump);
    let pid = training.unwrap_or(u32::try_from(dump.pid).unwrap_or(0));
    // A process that vanished or could not be read the second time still has the stacks of the first.
    let shown = match first {
        Some(first) if !last.has_stacks() => first,
        _ => last,
    };
    // One look tells nothing of what moves: a sample that came too late, on a busy machine, is no proof of standing still.
    let seen_before = first.filter(|first| first.has_stacks() && last.has_stacks());
    let main = telling_threads(shown, dump.pid, training);
    let before = seen_before.map(|first| telling_threads(first, dump.pid, training));
    let moved = movement(dump, before, main);
    // Who collects garbage computes; one that does not stands in a finalizer, at whatever that does.
    let idle = moved.is_some_and(|moved| moved.cpu_share < IDLE_SHARE);
    let excluded = if idle { Activity::Gc } else { Activity::Unknown };
    let does = |(native, python)| classify_without(excluded, native, python);
    let doing = does(main);
    let frozen = main.0.is_some_and(|thread| {
        let wakeable = || words::WAKEABLE_WCHAN.iter().any(|start| thread.wchan.starts_with(start));
        FREEZER_WCHAN.contains(&thread.wchan.as_str()) || thread.state.starts_with('D') && wakeable()
    });
    let state = match (frozen, last.state, first) {
        (true, state, _) if !state.starts_with(['T', 't']) => FROZEN,
        (_, "", _) => shown.state,
        (_, state, first) if state.starts_with('t') => traced_state(state, first, moved),
        (_, state, _) => state,
    };
    let did = before.map(|before| does(before).activity);
    let same_in_both = did.is_none_or(|did| did == doing.activity);
    let doing = from_stuck_worker(dump, main, &doing).unwrap_or(doing);
    // What other threads read and write is nothing to a main thread that slept, or stood in one call, all the time.
    let seen_twice = main.0.is_some() && before.is_some_and(|before| before.0.is_some());
    let in_one_call = matches!(doing.activity, Activity::Sleep | Activity::Io) && same_in_both && seen_twice;
    let stood = |moved: Moved| in_one_call && !moved.main_ran && !state.starts_with('R');
    // Who sleeps between looks at something may be caught looking, in the same function: that is no progress.
    let sleeps = doing.activity == Activity::Sleep || did == Some(Activity::Sleep);
    let looks = idle && sleeps && before.is_some_and(|before| in_same_function(before, main));
    let work =
        if may_wait_for_helpers(doing.activity) { helpers::work(dump, pid, main) } else { helpers::Work::default() };
    // On a busy machine who computes gets little, but wants to run at every look.
    let runnable = first.is_some_and(|first| first.state.starts_with('R') && last.state.starts_with('R'));
    let flows = before.is_some_and(|before| serves_socket(before, main));
    let moved = moved.map(|moved| Moved {
        io: moved.io && !stood(moved) || flows,
        own_frame: moved.own_frame && !looks,
        helper_busy: work.busy,
        helper_went_on: work.went_on,
        library_went_on: (runnable || moved.cpu_share >= BUSY_SHARE)
            && !matches!(doing.activity, Activity::DeviceWait | Activity::CommInit)
            && before.is_some_and(|before| within_library(before, main)),
        ..moved
    });
    Host {
        stack: main.0.is_some_and(|thread| !thread.frames.is_empty())
            || main.1.is_some_and(|thread| !thread.frames.is_empty()),
        state: state.to_owned(),
        same_in_both,
        location: locate(main.0, main.1, &doing, program(shown.native)),
        moved,
        d_sleep: first.and_then(|first| d_sleep(first, last, pid)),
        awaited: main.0.and_then(|thread| thread.awaited.clone()),
        doing,
    }
}

/// A process that is traced in the last sample: a debugger holds it only when it did so in the first one and the main thread did not run
/// in between. Else it was a stop of the capture itself, which lasts for microseconds and is long enough to be seen on a busy machine.
fn traced_state<'a>(state: &'a str, first: Option<Sample<'a>>, moved: Option<Moved>) -> &'a str {
    let ran = moved.is_none_or(|moved| moved.main_ran || moved.cpu_share > 0.0);
    match first {
        Some(first) if !first.state.starts_with('t') && !first.state.is_empty() => first.state,
        Some(_) if !ran => state,
        _ => SLEEPING,
    }
}

/// Who receives from a queue of worker processes that are stuck, or from any pipe of theirs when one of them is dead or when nobody else has the
/// other end open, waits for a loader.
fn from_stuck_worker(dump: &Stacktrace, (native, python): Telling<'_>, doing: &Doing) -> Option<Doing> {
    if !matches!(doing.activity, Activity::Lock | Activity::Unknown) {
        return None;
    }
    let frame = receives(&python?.frames)?;
    let abandoned = native.and_then(|thread| thread.awaited.as_ref()).is_some_and(|awaited| {
        awaited.kind() == AwaitedKind::Pipe
            && !awaited.holders.is_empty()
            && awaited.holders.iter().all(|holder| holder.pid == dump.pid)
    });
    let queue = frame.file_name.contains(words::QUEUE_OF_PROCESSES);
    let stuck = helpers::worst_child(dump).is_some_and(|child| child.is_dead() || queue && child.is_stuck());
    (abandoned || stuck).then(|| Doing { activity: Activity::DataLoader, witness: classify::shown(frame) })
}

fn movement(dump: &Stacktrace, before: Option<Telling<'_>>, after: Telling<'_>) -> Option<Moved> {
    let first = dump.first_sample.as_ref()?;
    let last = dump.last_sample.as_ref()?;
    let before = before?;
    let between_ns = last.captured_unix_ns.saturating_sub(first.captured_unix_ns);
    if between_ns == 0 {
        return None;
    }
    let seconds = between_ns as f64 / 1e9;
    let io_bytes = bytes_between(first, last);
    Some(Moved {
        cpu_share: last.cpu_time_ns.saturating_sub(first.cpu_time_ns) as f64 / between_ns as f64,
        io_bytes,
        io: io_bytes as f64 / seconds >= MOVING_BYTES_PER_SECOND,
        // Frames that could not be read in one of the samples are no proof of a move.
        own_frame: own_frames(before, after).is_some_and(|[before, after]| {
            (&before.func_name, &before.file_name) != (&after.func_name, &after.file_name)
        }),
        main_ran: before
            .0
            .zip(after.0)
            .is_some_and(|(before, after)| before.context_switches != after.context_switches),
        ..Moved::default()
    })
}

/// Bytes that a process read and wrote between two samples, over TCP connections too. One that could not be read counts as none.
fn bytes_between(first: &ProcessSample, last: &ProcessSample) -> u64 {
    let grown = |before: u64, after: u64| if before == 0 { 0 } else { after.saturating_sub(before) };
    grown(first.io_bytes, last.io_bytes).saturating_add(grown(first.tcp_bytes, last.tcp_bytes))
}

/// The main thread stands in a read or write of the same socket in both samples, and woke up in between: bytes came or went. The
/// kernel does not count those of `recv` and `send`.
fn serves_socket((before, _): Telling<'_>, (after, _): Telling<'_>) -> bool {
    let socket = |thread: &PstackStacktrace| {
        let awaited = thread.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Socket)?;
        let moves = thread.syscall.is_some_and(|number| words::SOCKET_SYSCALLS.contains(&number));
        moves.then(|| (thread.syscall, awaited.name.clone()))
    };
    before.zip(after).is_some_and(|(before, after)| {
        before.context_switches != after.context_switches && socket(before).is_some() && socket(before) == socket(after)
    })
}

/// Whether the innermost Python frames of two samples are of libraries, and at different lines.
fn within_library((_, before): Telling<'_>, (_, after): Telling<'_>) -> bool {
    let leaf = |python: Option<&PySpyStacktrace>| {
        let frame = python?.frames.first().filter(|frame| is_library(&frame.file_name))?;
        Some((frame.func_name.clone(), frame.file_name.clone()))
    };
    leaf(before).zip(leaf(after)).is_some_and(|(before, after)| before != after)
}

/// Whether a main thread that does this may wait for the work of a thread or child process of its own.
fn may_wait_for_helpers(activity: Activity) -> bool {
    use Activity::{DataLoader, Io, Lock, Sleep, Unknown};
    matches!(activity, DataLoader | Io | Lock | Sleep | Unknown)
}

/// The user's own innermost Python frames in two samples.
fn own_frames<'a>(before: Telling<'a>, after: Telling<'a>) -> Option<[&'a PySpyFrame; 2]> {
    let own = |(_, python): Telling<'a>| own_frame(&python?.frames);
    Some([own(before)?, own(after)?])
}

/// Whether those are of one function, at whatever lines.
fn in_same_function(before: Telling<'_>, after: Telling<'_>) -> bool {
    own_frames(before, after).is_some_and(|[before, after]| {
        before.func_name == after.func_name && file(before).is_some() && file(before) == file(after)
    })
}

fn d_sleep(first: Sample<'_>, last: Sample<'_>, pid: u32) -> Option<DSleep> {
    let before: std::collections::HashMap<u32, &PstackStacktrace> =
        first.native.iter().map(|thread| (thread.pid, thread)).collect();
    let mut found: Vec<DSleep> = last
        .native
        .iter()
        .filter(|thread| thread.state.starts_with('D'))
        .filter(|thread| {
            before.get(&thread.pid).is_some_and(|before| {
                before.state.starts_with('D')
                    && before.wchan == thread.wchan
                    && before.context_switches == thread.context_switches
            })
        })
        .map(|thread| DSleep {
            main: thread.pid == pid,
            thread: thread.thread_name.clone(),
            wchan: thread.wchan.clone(),
        })
        .collect();
    found.sort_by_key(|thread| !thread.main);
    if !found.is_empty() {
        return found.into_iter().next();
    }
    // A process whose threads could not be read at all still tells its state.
    let alone = last.native.is_empty() && first.state.starts_with('D') && last.state.starts_with('D');
    alone.then(|| DSleep { main: true, thread: String::new(), wchan: String::new() })
}

fn named(function: &str) -> bool {
    !function.is_empty() && function != "??"
}

fn contains_any(text: &str, parts: &[&str]) -> bool {
    parts.iter().any(|part| text.contains(part))
}

/// Whether a witness of [`Activity::Io`] waits for a lock on a file rather than for its bytes.
pub(crate) fn is_file_lock(witness: &str) -> bool {
    words::FILE_LOCKS.contains(&witness)
}

/// Whether a witness of [`Activity::Lock`] is a lock that processes share.
pub(crate) fn is_shared_lock(witness: &str) -> bool {
    witness == classify::SHARED_LOCK
}

/// Whether a witness of [`Activity::CommInit`] is a connection to the store that does not come about.
pub(crate) fn is_store_connect(witness: &str) -> bool {
    witness == classify::STORE_CONNECT
}

/// Whether a function of the C library waits for what comes over a socket.
pub(crate) fn is_network(function: &str) -> bool {
    words::NETWORK_NATIVE.contains(&classify::plain(function))
}

/// Whether a function of the C library waits for a signal.
pub(crate) fn is_signal_wait(function: &str) -> bool {
    words::SIGNAL_NATIVE.contains(&classify::plain(function))
}

/// Whether a function of the C library sleeps for a time.
pub(crate) fn is_sleep(function: &str) -> bool {
    words::SLEEP_NATIVE.contains(&classify::plain(function))
}

fn in_c_library(frame: &PstackFrame) -> bool {
    contains_any(&frame.module, words::C_LIBRARY)
}

/// The last component of a path, which keeps its line number.
pub(crate) fn short(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
