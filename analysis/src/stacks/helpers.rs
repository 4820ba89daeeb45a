//! Threads and child processes that the main thread of a rank depends on: which of them is stuck,
//! which of them works, and which of them holds the GIL.

use std::collections::HashMap;

use xpu_timer_proto::{
    FUTURE, WAKEUP,
    server::{AwaitedKind, ChildProcess, ProcessSample, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace},
};

use super::{
    classify::{TASK_LOCK, classify, in_files, in_queue, is_mutex, is_send, waits_for_child, waits_for_network},
    host::{
        BUSY_SHARE, MOVING_BYTES_PER_SECOND, Sample, ThreadStacks, bytes_between, of_process, reporting_threads,
        samples,
    },
    location::{most_specific_frame, own_native_place, program},
    names::{base_name, file, frame_label, is_library, is_named, own_frame, plain, shortened, stored_command},
    patterns,
    services::{executed, serves, workers},
};
use crate::verdict::Activity;

/// The states of a helper that cannot continue. They begin [`StuckHelper::state`].
const DEAD: &str = "is dead";
const STOPPED: &str = "is stopped";
const INSIDE: &str = "is inside";

/// A thread of a rank, or of one of its child processes, that is stuck in the same I/O in both
/// samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StuckHelper {
    /// `thread shard-reader-0` or `child process 4242`.
    pub name: String,
    /// Its state, as a predicate: `is dead`, or `is inside read at …`.
    pub state: String,
    /// Process id of a child process; 0 for a thread.
    pub pid: i32,
    /// The command line of a child process, shortened.
    pub command: String,
}

impl StuckHelper {
    fn thread(name: &str, state: String) -> Self {
        StuckHelper { name: format!("thread {name}"), state, pid: 0, command: String::new() }
    }

    fn child(child: &ChildProcess, state: String) -> Self {
        StuckHelper { name: child_name(child), state, pid: child.pid, command: stored_command(&child.command) }
    }

    /// Whether its process is dead.
    pub(crate) fn is_dead(&self) -> bool {
        self.state == DEAD
    }

    /// Whether it hands over bytes that nobody takes.
    pub(crate) fn is_in_write(&self) -> bool {
        let function = self.state.strip_prefix(INSIDE).and_then(|words| words.split_whitespace().next());
        function.is_some_and(is_send)
    }

    /// Whether it cannot continue by itself: dead, stopped, or inside I/O. A helper in other code
    /// may be at work.
    pub(crate) fn is_stuck(&self) -> bool {
        [DEAD, STOPPED, INSIDE].iter().any(|words| self.state.starts_with(words))
    }
}

/// Finds a stuck helper of the main thread: a child process that is dead, stopped or in I/O; else a
/// thread in I/O; else the child process that the main thread waits for; else a busy child process.
pub(crate) fn stuck_helper(dump: &Stacktrace, training: Option<u32>) -> Option<StuckHelper> {
    let (first, last) = samples(dump);
    let main = training.unwrap_or(u32::try_from(dump.pid).unwrap_or(0));
    worst_child(dump)
        .or_else(|| stuck_thread(first, last, main).map(|(name, state)| StuckHelper::thread(&name, state)))
        .or_else(|| awaited_child(dump, last, training))
        .or_else(|| workers(dump).find_map(busy_child))
}

/// The result of [`other_thread`] for a process that has only one Python thread.
pub(crate) const NO_OTHER_THREAD: &str = "no other Python thread";

/// The thread that holds the mutex for which a thread waits.
pub(super) fn mutex_owner(thread: &PstackStacktrace) -> Option<u32> {
    let mutex = thread.awaited.as_ref().filter(|awaited| awaited.kind() == AwaitedKind::Mutex)?;
    mutex.object.parse().ok()
}

/// Where the thread `owner` of a mutex is: `thread uploader waits for a lock at put (s3.py:30)`.
fn owner_of_mutex(sample: Sample<'_>, owner: u32) -> Option<String> {
    let native = sample.native_of(owner)?;
    let python = sample.python_of(owner);
    let does = match classify(Some(native), python).activity {
        Activity::Lock => "waits for a lock",
        Activity::Io => "reads or writes",
        Activity::Sleep => "sleeps",
        _ => "is",
    };
    let in_python = python.and_then(|thread| own_frame(&thread.frames)).map(frame_label);
    let place = in_python.or_else(|| own_native_place(&native.frames, program(sample.native)?))?;
    Some(format!("thread {} {does} at {place}", native.thread_name))
}

/// The activity of another thread of the process, which holds the mutex that the main thread waits
/// for, or may hold its lock: `thread uploader waits for the network at put (s3.py:30)`, or
/// [`NO_OTHER_THREAD`].
pub(crate) fn other_thread(dump: &Stacktrace, training: Option<u32>) -> Option<String> {
    let (_, last) = samples(dump);
    let main = training.unwrap_or(u32::try_from(dump.pid).unwrap_or(0));
    let (native, python) = reporting_threads(last, dump.pid, training);
    let locks = |thread: &&PstackStacktrace| thread.frames.iter().take(4).any(|frame| is_mutex(&frame.func_name));
    if let Some(owner) = native.filter(locks).and_then(mutex_owner) {
        return owner_of_mutex(last, owner);
    }
    if classify(native, python).witness == TASK_LOCK {
        return Some("tasks of asyncio wait only for each other".to_owned());
    }
    let python = |thread: &PySpyStacktrace| {
        let native = last.native_of(thread.os_thread_id)?;
        let has_own = |frames: &[PySpyFrame]| frames.iter().any(|frame| !is_library(&frame.file_name));
        let is_own = has_own(&thread.frames);
        // The activity that says most about the lock comes first.
        let (order, does) = match classify(Some(native), Some(thread)).activity {
            _ if waits_for_network(native) && !thread.suspended.is_empty() => (0, "waits in an event loop"),
            _ if waits_for_network(native) => (0, "waits for the network"),
            Activity::Io => (0, "reads or writes"),
            Activity::Running => (0, "runs"),
            Activity::Lock if is_own => (1, "waits for a lock"),
            Activity::Sleep if is_own => (2, "sleeps"),
            _ => return None,
        };
        // A loop that only a library runs is where its tasks wait.
        let tasks = thread.suspended.iter().filter(|task| !is_own && [FUTURE, WAKEUP].contains(&&*task.awaits));
        let task = tasks.map(|task| &task.frames).find(|frames| has_own(frames));
        let place = own_frame(task.unwrap_or(&thread.frames)).map(frame_label)?;
        // A thread of a library that serves the process waits for the network all the time.
        let of_library = !is_own && task.is_none();
        Some(((of_library, order), format!("thread {} {does} at {place}", thread.thread_name)))
    };
    let others = last.python.iter().filter(|thread| thread.os_thread_id != 0 && thread.os_thread_id != main);
    // A thread in a queue waits for its tasks.
    let known = others.filter(|thread| !in_queue(&thread.frames)).filter_map(python);
    let named = known.min_by_key(|(rank, _)| *rank).map(|(_, text)| text).or_else(|| {
        let natives = last.native.iter().filter(|thread| thread.pid != main);
        natives.into_iter().find_map(|thread| {
            let mut frames = thread.frames.iter().map(|frame| plain(&frame.func_name));
            let reader = frames.find(|function| patterns::READERS.iter().any(|start| function.starts_with(start)))?;
            let idle = patterns::IDLE_WORKERS.iter().any(|part| reader.contains(part));
            let name = reader.split(['(', '<']).next().unwrap_or(&reader);
            (!idle).then(|| format!("thread {} is in {name}", thread.thread_name))
        })
    });
    let is_alone = matches!(last.python, [only] if only.os_thread_id == main);
    named.or_else(|| is_alone.then(|| NO_OTHER_THREAD.to_owned()))
}

/// A child process that computed between its samples.
fn busy_child(child: &ChildProcess) -> Option<StuckHelper> {
    let (first, last) = (child.samples.first()?, child.samples.last()?);
    let between_ns = last.captured_unix_ns.saturating_sub(first.captured_unix_ns);
    let busy = is_busy(last.cpu_time_ns.saturating_sub(first.cpu_time_ns), between_ns);
    busy.then(|| StuckHelper::child(child, "is busy on a CPU".to_owned()))
}

/// The work between the samples of the threads and child processes that the main thread may wait
/// for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct HelperWork {
    /// One of them used a processor. That may be an endless loop.
    pub busy: bool,
    /// One of them made progress: bytes flowed, a busy thread reached another line, or a busy child
    /// process another function of the program.
    pub progressed: bool,
    /// A busy child process reached another line in one function. That may be an endless loop.
    pub reached_line: bool,
}

impl HelperWork {
    fn and(self, other: Self) -> Self {
        HelperWork {
            busy: self.busy || other.busy,
            progressed: self.progressed || other.progressed,
            reached_line: self.reached_line || other.reached_line,
        }
    }
}

/// Summarizes the work of the helpers while the main thread `(native, python)` waits for them. A
/// child process counts only if the main thread waits for child processes: others may only run
/// beside the rank, such as a monitor.
pub(super) fn work(dump: &Stacktrace, main: u32, (native, python): ThreadStacks<'_>) -> HelperWork {
    let (Some(first), last) = samples(dump) else { return HelperWork::default() };
    let (Some(begin), Some(end)) = (&dump.first_sample, &dump.last_sample) else { return HelperWork::default() };
    let between_ns = end.captured_unix_ns.saturating_sub(begin.captured_unix_ns);
    let threads = last.native.iter().filter(|thread| thread.pid != main).map(|after| {
        let of = |sample: Sample<'_>| sample.python_of(after.pid).cloned();
        // Library threads may poll all the time, so only the program's own threads count.
        let (line_before, line_after) = (of(first), of(last));
        let is_own = line_after.is_some() || last.python.is_empty();
        let Some(before) = first.native.iter().find(|before| before.pid == after.pid).filter(|_| is_own) else {
            return HelperWork::default();
        };
        // On a busy machine, a computing thread gets little processor time, but is runnable in
        // every sample.
        let runnable = before.state.starts_with('R') && after.state.starts_with('R');
        let busy = runnable || is_busy(after.cpu_time_ns.saturating_sub(before.cpu_time_ns), between_ns);
        let moved = line_before.zip(line_after).is_some_and(|(before, after)| before.frames != after.frames);
        HelperWork { busy, progressed: busy && moved, reached_line: false }
    });
    let awaits_children = waits_for_child(native, python)
        || python.is_some_and(|thread| in_files(&thread.frames, patterns::WORKER_FILES))
        || native
            .and_then(|thread| thread.awaited.as_ref())
            .is_some_and(|awaited| awaited.holders.iter().any(|holder| holder.child));
    let children = workers(dump).filter(|_| awaits_children).map(child_work);
    threads.chain(children).fold(HelperWork::default(), HelperWork::and)
}

fn child_work(child: &ChildProcess) -> HelperWork {
    let (Some(first), Some(last)) = (child.samples.first(), child.samples.last()) else { return HelperWork::default() };
    let between_ns = last.captured_unix_ns.saturating_sub(first.captured_unix_ns);
    let runnable = [first, last].iter().all(|sample| sample.process_state.starts_with('R')) && between_ns > 0;
    let busy = runnable || is_busy(last.cpu_time_ns.saturating_sub(first.cpu_time_ns), between_ns);
    let bytes = bytes_between(first, last);
    let flows = between_ns > 0 && bytes as f64 >= MOVING_BYTES_PER_SECOND * between_ns as f64 / 1e9;
    let frames = |sample: &ProcessSample| {
        sample.py_stacktrace.iter().map(|thread| (thread.os_thread_id, thread.frames.clone())).collect::<Vec<_>>()
    };
    let functions = |sample: &ProcessSample| {
        let function = |thread: &PySpyStacktrace| {
            let frame = own_frame(&thread.frames)?;
            Some((thread.os_thread_id, frame.func_name.clone(), file(frame).map(str::to_owned)))
        };
        sample.py_stacktrace.iter().filter_map(function).collect::<Vec<_>>()
    };
    // A worker that computes hands over few bytes, but more than none.
    let progressed = flows || busy && (bytes > 0 || functions(first) != functions(last));
    HelperWork { busy, progressed, reached_line: busy && frames(first) != frames(last) }
}

fn is_busy(used_ns: u64, between_ns: u64) -> bool {
    between_ns > 0 && used_ns as f64 >= BUSY_SHARE * between_ns as f64
}

/// The child process that the main thread waits for. If there are several, the one that was started
/// last.
fn awaited_child(dump: &Stacktrace, last: Sample<'_>, training: Option<u32>) -> Option<StuckHelper> {
    let (native, python) = reporting_threads(last, dump.pid, training);
    if !waits_for_child(native, python) {
        return None;
    }
    let child = workers(dump).rfind(|child| child.parent_pid == dump.pid)?;
    Some(StuckHelper::child(child, "has not ended".to_owned()))
}

/// A stuck child process. A dead one comes first, because it explains what the others wait for.
pub(super) fn worst_child(dump: &Stacktrace) -> Option<StuckHelper> {
    let stuck: Vec<StuckHelper> = workers(dump).filter_map(stuck_child).collect();
    let dead = stuck.iter().position(StuckHelper::is_dead).unwrap_or(0);
    stuck.into_iter().nth(dead)
}

/// The name of a child process. A child forked by Python's multiprocessing has the command line of
/// its parent, which says nothing.
fn child_name(child: &ChildProcess) -> String {
    let command = shortened(&child.command);
    let frames = child.samples.iter().flat_map(|sample| &sample.py_stacktrace).flat_map(|thread| &thread.frames);
    let worker = frames.into_iter().any(|frame| frame.file_name.contains("/multiprocessing/"));
    if worker {
        format!("worker process {}", child.pid)
    } else if command.is_empty() {
        format!("child process {}", child.pid)
    } else {
        format!("child process {} ({command})", child.pid)
    }
}

fn stuck_child(child: &ChildProcess) -> Option<StuckHelper> {
    let last = child.samples.last()?;
    if last.process_state.starts_with(['Z', 'X', 'x']) {
        return Some(StuckHelper::child(child, DEAD.to_owned()));
    }
    // A tracer in only one sample is the capture itself.
    let traced = child.samples.iter().all(|sample| sample.process_state.starts_with('t')) && child.samples.len() > 1;
    if last.process_state.starts_with('T') || traced {
        return Some(StuckHelper::child(child, STOPPED.to_owned()));
    }
    let first = (child.samples.len() > 1).then(|| of_process(&child.samples[0]));
    let last = of_process(last);
    let (_, state) = stuck_thread(first, last, 0)
        .or_else(|| waiting_thread(first, last))
        .or_else(|| standing_thread(first, last))
        .or_else(|| locked_thread(first, last))?;
    Some(StuckHelper::child(child, state))
}

/// A thread of a worker that is in the user's own code, inside the worker's task, at the same
/// line in both samples.
fn standing_thread(first: Option<Sample<'_>>, last: Sample<'_>) -> Option<(String, String)> {
    const WORKERS: &str = "/multiprocessing/";
    last.python.iter().filter(|thread| thread.os_thread_id != 0).find_map(|thread| {
        let given = thread.frames.iter().position(|frame| frame.file_name.contains(WORKERS))?;
        let own = |frames: &[PySpyFrame]| frames.iter().find(|frame| !is_library(&frame.file_name)).cloned();
        let frame = own(&thread.frames[..given])?;
        let before = first.map(|first| first.python_of(thread.os_thread_id));
        let same = before.is_none_or(|before| before.and_then(|before| own(&before.frames)).as_ref() == Some(&frame));
        same.then(|| (thread.thread_name.clone(), format!("is at {}", frame_label(&frame))))
    })
}

/// The first thread of a worker whose threads all wait without a timeout for locks of their own
/// process: none of them will release one.
fn locked_thread(first: Option<Sample<'_>>, last: Sample<'_>) -> Option<(String, String)> {
    let before = |tid: u32| first.and_then(|first| first.native_of(tid));
    let is_locked = |thread: &PstackStacktrace| {
        let is_own = thread.awaited.as_ref().is_none_or(|awaited| awaited.kind() == AwaitedKind::Mutex);
        let is_same = before(thread.pid).is_some_and(|before| before.context_switches == thread.context_switches);
        is_own && is_same && thread.timed == Some(false) && classify(Some(thread), None).activity == Activity::Lock
    };
    if !last.native.iter().all(is_locked) {
        return None;
    }
    let python = last.python_of(last.native.first().map_or(0, |main| main.pid))?;
    // A worker may wait for its tasks so.
    if in_queue(&python.frames) {
        return None;
    }
    let place = own_frame(&python.frames).map(frame_label)?;
    Some((python.thread_name.clone(), format!("waits for a lock at {place}")))
}

/// A thread of a worker that waits for another machine in the user's own code. Batches and tasks
/// come through queues and do not count.
fn waiting_thread(first: Option<Sample<'_>>, last: Sample<'_>) -> Option<(String, String)> {
    last.python.iter().filter(|thread| thread.os_thread_id != 0 && !in_queue(&thread.frames)).find_map(|python| {
        let of = |sample: Sample<'_>| sample.native_of(python.os_thread_id).cloned();
        let native = of(last).filter(waits_for_network)?;
        let same = first.and_then(of).is_none_or(|before| before.context_switches == native.context_switches);
        let place = own_frame(&python.frames).filter(|_| same).map(frame_label)?;
        Some((python.thread_name.clone(), format!("waits for the network at {place}")))
    })
}

/// A thread other than `not` that is in I/O in both samples and did not run in between.
fn stuck_thread(first: Option<Sample<'_>>, last: Sample<'_>, not: u32) -> Option<(String, String)> {
    let python: HashMap<u32, &PySpyStacktrace> = last
        .python
        .iter()
        .filter(|thread| thread.os_thread_id != 0)
        .map(|thread| (thread.os_thread_id, thread))
        .collect();
    let before: Option<HashMap<u32, &PstackStacktrace>> =
        first.map(|first| first.native.iter().map(|thread| (thread.pid, thread)).collect());
    let program = program(last.native);
    last.native.iter().filter(|thread| thread.pid != not).find_map(|thread| {
        let same = before.as_ref().is_none_or(|before| {
            before.get(&thread.pid).is_some_and(|before| before.context_switches == thread.context_switches)
        });
        let doing = classify(Some(thread), None);
        if doing.activity != Activity::Io || !same {
            return None;
        }
        // Library threads (watchers, network threads) read sockets and pipes all the time, so only
        // the program's own threads count. A thread in a queue waits for its tasks or hands over
        // its results, so it waits for others. A thread that serves does the same.
        let frames = python.get(&thread.pid).map(|thread| &thread.frames).filter(|frames| !frames.is_empty());
        if frames.is_some_and(|frames| in_queue(frames) || serves(frames)) {
            return None;
        }
        let place = match frames {
            Some(frames) => most_specific_frame(frames).map(frame_label),
            None if last.python.is_empty() => Some(own_native_place(&thread.frames, program?)?),
            None => return None,
        };
        let place = place.map_or(String::new(), |place| format!(" at {place}"));
        let name = python.get(&thread.pid).map(|thread| thread.thread_name.clone()).filter(|name| !name.is_empty());
        Some((name.unwrap_or_else(|| thread.thread_name.clone()), format!("{INSIDE} {}{place}", plain(&doing.witness))))
    })
}

/// The name of a child process that is a compiler, if it makes progress as far as its samples show.
pub(crate) fn compiler_child(dump: &Stacktrace) -> Option<String> {
    dump.children.iter().filter(|child| may_progress(child)).find_map(|child| {
        if child.command.contains(patterns::COMPILE_WORKER) {
            return Some("a compile worker".to_owned());
        }
        let program = base_name(executed(&child.command).split_whitespace().next()?);
        patterns::COMPILERS.contains(&program).then(|| program.to_owned())
    })
}

/// Whether a child process is alive, and its samples do not show that it stands still.
fn may_progress(child: &ChildProcess) -> bool {
    let (Some(first), Some(last)) = (child.samples.first(), child.samples.last()) else { return true };
    let work = child_work(child);
    let alive = !last.process_state.starts_with(['Z', 'X', 'x', 'T', 't']);
    alive && (first.captured_unix_ns == last.captured_unix_ns || work.busy || work.progressed)
}

/// A capture may stop and release a thread. A thread that used more processor time than this
/// between the samples ran by itself.
const MAX_CAPTURE_RUN_NS: u64 = 5_000_000;

/// The holder of the GIL, blocked at the same place in both samples while other threads need the
/// GIL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GilHolder {
    /// Name of the thread.
    pub thread: String,
    /// The native function that blocks it.
    pub function: String,
    /// Its location in Python code.
    pub location: Option<String>,
    /// Number of threads that wait for the GIL. If none does, the holder waits without an end, and
    /// the other threads of the program need the GIL as soon as their own calls end.
    pub waiting: usize,
}

impl GilHolder {
    /// Whether threads wait for the GIL, so that it is known to hold them up.
    pub(crate) fn has_waiters(&self) -> bool {
        self.waiting > 0
    }
}

/// Finds a deadlock on the GIL. If no thread waits for the GIL, a holder other than the main thread
/// counts too: the main thread cannot continue its Python code, whatever it waits for.
pub(crate) fn gil_holder(dump: &Stacktrace) -> Option<GilHolder> {
    let (first, last) = samples(dump);
    let first = first?;
    let holder = |sample: Sample<'_>| {
        sample
            .python
            .iter()
            .find(|thread| thread.owns_gil && thread.os_thread_id != 0)
            .map(|thread| thread.os_thread_id)
    };
    let tid = holder(last)?;
    if holder(first)? != tid {
        return None;
    }
    let find = |sample: Sample<'_>| sample.native_of(tid).cloned();
    let (before, after) = (find(first)?, find(last)?);
    // A capture may have stopped the thread for a moment, which counts as running.
    let blocked = after.cpu_time_ns.saturating_sub(before.cpu_time_ns) < MAX_CAPTURE_RUN_NS
        && !after.state.starts_with('R')
        && !after.frames.is_empty()
        && after.frames.iter().map(|frame| frame.pc).eq(before.frames.iter().map(|frame| frame.pc));
    let waiting = last
        .native
        .iter()
        .filter(|thread| classify(Some(thread), None).activity == Activity::Gil)
        .filter(|thread| {
            first
                .native
                .iter()
                .any(|before| before.pid == thread.pid && classify(Some(before), None).activity == Activity::Gil)
        })
        .count();
    let python = last.python_of(tid);
    // Devices and storage answer late, but they answer.
    let may_end = || {
        use Activity::{CommInit, DeviceWait, Io};
        after.timed != Some(false) || matches!(classify(Some(&after), None).activity, CommInit | DeviceWait | Io)
    };
    let is_alone = || last.python.iter().all(|thread| [0, tid].contains(&thread.os_thread_id));
    if !blocked || waiting == 0 && (tid == u32::try_from(dump.pid).unwrap_or(0) || may_end() || is_alone()) {
        return None;
    }
    Some(GilHolder {
        thread: python.map(|thread| thread.thread_name.clone()).unwrap_or_else(|| after.thread_name.clone()),
        function: after
            .frames
            .iter()
            .map(|frame| &frame.func_name)
            .find(|name| is_named(name))
            .map(|name| plain(name).into_owned())
            .unwrap_or_default(),
        location: python.and_then(|thread| own_frame(&thread.frames)).map(frame_label),
        waiting,
    })
}
