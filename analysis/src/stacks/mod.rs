//! Where a rank stands and what it does, by the words on its stacks, its process state, and what moved between its two
//! samples. Names of frames come as `proto/server.proto` says; nothing here compares one rank with another.

mod words;

use xpu_timer_proto::server::{
    ChildProcess, ProcessSample, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, Stacktrace,
};

use crate::main_thread::{self, Candidate};
use crate::verdict::{Activity, Location};

/// A process counts as moving when it used at least this share of a processor between its samples.
const BUSY_SHARE: f64 = 0.2;
/// More than a thread runs because it is stopped and released for the captures.
const STOPS_NS: u64 = 5_000_000;
/// Less than so many bytes a second is the noise of logs and of watchers' pipes, not progress of input or output.
const MOVING_BYTES_PER_SECOND: f64 = 16_384.0;

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
}

impl Host {
    /// Stopped by a signal (`T`) or by a tracer (`t`).
    pub fn stopped(&self) -> bool {
        self.state.starts_with(['T', 't'])
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

/// Reads a dump.
pub(crate) fn read(dump: &Stacktrace) -> Host {
    let (first, last) = samples(dump);
    let pid = u32::try_from(dump.pid).unwrap_or(0);
    // A process that vanished or could not be read the second time still has the stacks of the first.
    let shown = match first {
        Some(first) if last.native.is_empty() && last.python.is_empty() => first,
        _ => last,
    };
    let main = main_threads(shown, dump.pid);
    let doing = classify(main.0, main.1);
    let before = first.map(|first| main_threads(first, dump.pid));
    let state = if last.state.is_empty() { shown.state } else { last.state };
    Host {
        stack: main.0.is_some_and(|thread| !thread.frames.is_empty())
            || main.1.is_some_and(|thread| !thread.frames.is_empty()),
        state: state.to_owned(),
        same_in_both: before.is_none_or(|(native, python)| classify(native, python).activity == doing.activity),
        location: locate(main.0, main.1, &doing.witness),
        moved: movement(dump, before, main),
        d_sleep: first.and_then(|first| d_sleep(first, last, pid)),
        doing,
    }
}

/// The main thread of a process, native and Python.
fn main_threads<'a>(sample: Sample<'a>, pid: i32) -> (Option<&'a PstackStacktrace>, Option<&'a PySpyStacktrace>) {
    let native = main_thread::of(sample.native.iter().map(Candidate::from), pid);
    let python = main_thread::of(sample.python.iter().map(Candidate::from), pid);
    (native.map(|place| &sample.native[place]), python.map(|place| &sample.python[place]))
}

fn movement(
    dump: &Stacktrace,
    before: Option<(Option<&PstackStacktrace>, Option<&PySpyStacktrace>)>,
    after: (Option<&PstackStacktrace>, Option<&PySpyStacktrace>),
) -> Option<Moved> {
    let first = dump.first_sample.as_ref()?;
    let last = dump.last_sample.as_ref()?;
    let before = before?;
    let between_ns = last.captured_unix_ns.saturating_sub(first.captured_unix_ns);
    if between_ns == 0 {
        return None;
    }
    let seconds = between_ns as f64 / 1e9;
    let io_bytes = match (first.io_bytes, last.io_bytes) {
        (0, _) | (_, 0) => 0,
        (before, after) => after.saturating_sub(before),
    };
    let own = |threads: (Option<&PstackStacktrace>, Option<&PySpyStacktrace>)| {
        threads
            .1
            .and_then(|thread| own_frame(&thread.frames))
            .map(|frame| (frame.func_name.clone(), frame.file_name.clone()))
    };
    Some(Moved {
        cpu_share: last.cpu_time_ns.saturating_sub(first.cpu_time_ns) as f64 / between_ns as f64,
        io_bytes,
        io: io_bytes as f64 / seconds >= MOVING_BYTES_PER_SECOND,
        // Frames that could not be read in one of the samples are no proof of a move.
        own_frame: matches!((own(before), own(after)), (Some(before), Some(after)) if before != after),
        main_ran: before
            .0
            .zip(after.0)
            .is_some_and(|(before, after)| before.context_switches != after.context_switches),
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

/// The user's own innermost frame; when all frames belong to libraries, the outermost one that is a script's.
pub(crate) fn own_frame(frames: &[PySpyFrame]) -> Option<&PySpyFrame> {
    frames
        .iter()
        .find(|frame| !is_library(&frame.file_name))
        .or_else(|| frames.iter().rev().find(|frame| !contains_any(&frame.file_name, words::STARTERS)))
}

fn is_library(path: &str) -> bool {
    path.starts_with('<') || contains_any(path, words::LIBRARY_PATHS)
}

fn locate(native: Option<&PstackStacktrace>, python: Option<&PySpyStacktrace>, witness: &str) -> Location {
    let own = python.and_then(|thread| own_frame(&thread.frames));
    let told = native.and_then(|thread| telling_function(&thread.frames, witness));
    Location {
        python: own.map(|frame| frame.file_name.clone()),
        python_function: own.map(|frame| frame.func_name.clone()),
        native: told.map(str::to_owned).or_else(|| {
            native.filter(|thread| !thread.wchan.is_empty()).map(|thread| format!("{} (kernel)", thread.wchan))
        }),
    }
}

/// The native function that tells a person most of where a thread stands: the one that its classification rests on; else
/// the function of the C library that was called, without its insides; else what is called from there, without the
/// insides of a language's runtime; else whatever is innermost.
fn telling_function<'a>(frames: &'a [PstackFrame], witness: &str) -> Option<&'a str> {
    let frames: Vec<&PstackFrame> = frames.iter().filter(|frame| named(&frame.func_name)).collect();
    let innermost = frames.first()?;
    let by_witness = frames.iter().find(|frame| frame.func_name == witness);
    let library = frames.iter().take_while(|frame| contains_any(&frame.module, words::C_LIBRARY)).count();
    let public = |frame: &&&PstackFrame| {
        !frame.func_name.starts_with('_') && !frame.func_name.contains('.') && frame.func_name != "syscall"
    };
    let entry = frames[..library].iter().rfind(public).copied();
    let caller = frames[library..].iter().find(|frame| !contains_any(&frame.func_name, words::RUNTIME_INSIDES));
    Some(&by_witness.copied().or(entry).or(caller.copied()).unwrap_or(innermost).func_name)
}

fn named(function: &str) -> bool {
    !function.is_empty() && function != "??"
}

fn contains_any(text: &str, parts: &[&str]) -> bool {
    parts.iter().any(|part| text.contains(part))
}

/// A Python function without the class or function around it: `__next__` of `DataLoader.__next__`.
fn bare(function: &str) -> &str {
    function.rsplit('.').next().unwrap_or(function)
}

/// A function of the C library without the marks of its variants: `__libc_read` is `read`, `__GI___clock_nanosleep` is
/// `clock_nanosleep`, `read@plt` is `read`.
fn plain(function: &str) -> &str {
    let name = function.split(['@', '(']).next().unwrap_or(function);
    let name = name.trim_start_matches("__GI_").trim_start_matches('_');
    let name = name.strip_prefix("libc_").unwrap_or(name);
    name.strip_suffix("_nocancel").unwrap_or(name)
}

/// What a thread does, by its native and Python stacks. The order of the questions matters: what stands nearer to the
/// device or the lock comes before what merely surrounds it.
pub(crate) fn classify(native: Option<&PstackStacktrace>, python: Option<&PySpyStacktrace>) -> Doing {
    type Question = fn(&Thread<'_>) -> Option<String>;
    const QUESTIONS: &[(Activity, Question)] = &[
        (Activity::Gil, waits_for_gil),
        (Activity::CommInit, initializes),
        (Activity::DeviceWait, waits_for_device),
        (Activity::Teardown, tears_down),
        (Activity::Gc, collects),
        (Activity::Compile, compiles),
        (Activity::DataLoader, loads_data),
        (Activity::Io, reads_or_writes),
        (Activity::Sleep, sleeps),
        (Activity::Lock, locks),
        (Activity::Running, runs),
    ];
    let thread = Thread { native, python };
    QUESTIONS
        .iter()
        .find_map(|(activity, ask)| ask(&thread).map(|witness| Doing { activity: *activity, witness }))
        .unwrap_or_default()
}

struct Thread<'a> {
    native: Option<&'a PstackStacktrace>,
    python: Option<&'a PySpyStacktrace>,
}

impl<'a> Thread<'a> {
    fn functions(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.native.into_iter().flat_map(|thread| thread.frames.iter().map(|frame| frame.func_name.as_str()))
    }

    /// The innermost native functions: what the thread itself is in, not what called it.
    fn leaves(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.functions().filter(|function| named(function)).take(3)
    }

    fn python(&self) -> &'a [PySpyFrame] {
        self.python.map_or(&[], |thread| &thread.frames)
    }

    fn syscall(&self) -> Option<i64> {
        self.native.and_then(|thread| thread.syscall)
    }
}

fn shown(frame: &PySpyFrame) -> String {
    format!("{} ({})", frame.func_name, short(&frame.file_name))
}

/// The last component of a path, which keeps its line number.
pub(crate) fn short(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn waits_for_gil(thread: &Thread<'_>) -> Option<String> {
    thread.functions().take(8).find(|function| plain(function) == "take_gil").map(str::to_owned)
}

fn initializes(thread: &Thread<'_>) -> Option<String> {
    let native = thread.functions().find(|function| contains_any(function, words::INIT_NATIVE));
    native.map(str::to_owned).or_else(|| {
        let of_torch = |frame: &&PySpyFrame| {
            frame.file_name.contains("torch/distributed") && words::INIT_PYTHON.contains(&bare(&frame.func_name))
        };
        thread.python().iter().find(of_torch).map(shown)
    })
}

fn tears_down(thread: &Thread<'_>) -> Option<String> {
    let native = thread.functions().find(|function| contains_any(function, words::TEARDOWN_NATIVE));
    native.map(str::to_owned).or_else(|| {
        thread.python().iter().find(|frame| words::TEARDOWN_PYTHON.contains(&bare(&frame.func_name))).map(shown)
    })
}

fn waits_for_device(thread: &Thread<'_>) -> Option<String> {
    let waits = |function: &&str| {
        let lower = function.to_ascii_lowercase();
        contains_any(&lower, words::DEVICE_NATIVE)
            || words::COLLECTIVE_PREFIXES
                .iter()
                .any(|prefix| lower.strip_prefix(prefix).is_some() && !contains_any(function, words::TEARDOWN_NATIVE))
    };
    let all = || thread.functions().filter(waits);
    // A function of the public interface says more than a closure of its implementation.
    all().find(|function| !function.contains('{')).or_else(|| all().next()).map(str::to_owned).or_else(|| {
        // Without native frames the names of Python's wrappers must do.
        let of_wrapper = |frame: &&PySpyFrame| {
            words::DEVICE_PYTHON.contains(&bare(&frame.func_name))
                && (frame.file_name.contains("torch/") || short(&frame.file_name).starts_with("cuda."))
        };
        thread.python().iter().take(4).find(of_wrapper).map(shown)
    })
}

fn collects(thread: &Thread<'_>) -> Option<String> {
    thread
        .functions()
        .find(|function| words::GC_NATIVE.contains(&function.split('.').next().unwrap_or(function)))
        .map(str::to_owned)
}

fn compiles(thread: &Thread<'_>) -> Option<String> {
    let native = thread.functions().find(|function| contains_any(function, words::COMPILE_NATIVE));
    native.map(str::to_owned).or_else(|| {
        let compiler = |frame: &&PySpyFrame| {
            contains_any(&frame.file_name, words::COMPILE_PATHS)
                && !words::COMPILE_NOT.contains(&bare(&frame.func_name))
        };
        thread.python().iter().find(compiler).map(shown)
    })
}

fn loads_data(thread: &Thread<'_>) -> Option<String> {
    let frames = thread.python();
    let of_loader = |frame: &&PySpyFrame| {
        let file = frame.file_name.to_ascii_lowercase();
        words::LOADER_FUNCTIONS.contains(&bare(&frame.func_name))
            || ["next", "get"].iter().any(|part| bare(&frame.func_name).contains(part))
                && contains_any(&file, words::LOADER_FILES)
    };
    if let Some(frame) = frames.iter().find(of_loader) {
        return Some(shown(frame));
    }
    // A queue is a loader's when one of the frames around it speaks of data.
    let queue = frames.iter().take(5).find(|frame| {
        words::QUEUE_FUNCTIONS.contains(&bare(&frame.func_name))
            && words::QUEUE_FILES.iter().any(|file| frame.file_name.contains(file))
    })?;
    let hinted = frames
        .iter()
        .filter(|frame| !is_library(&frame.file_name))
        .any(|frame| contains_any(&frame.func_name.to_ascii_lowercase(), words::LOADER_HINTS));
    hinted.then(|| shown(queue))
}

fn reads_or_writes(thread: &Thread<'_>) -> Option<String> {
    let leaf = thread.leaves().find(|function| words::IO_NATIVE.contains(&plain(function)));
    let wchan = thread.native.map_or("", |thread| thread.wchan.as_str());
    // A socket is not storage: a thread that reads one waits for another process.
    if wchan.contains("sk_wait") || wchan.contains("unix_stream") || wchan.contains("tcp_") || wchan.contains("skb_") {
        return None;
    }
    if let Some(leaf) = leaf {
        return Some(plain(leaf).to_owned());
    }
    if thread.syscall().is_some_and(|number| words::IO_SYSCALLS.contains(&number)) {
        return Some(thread.leaves().next().unwrap_or("a file system call").to_owned());
    }
    contains_any(wchan, words::IO_WCHAN).then(|| wchan.to_owned())
}

fn sleeps(thread: &Thread<'_>) -> Option<String> {
    let leaf = thread.leaves().find(|function| words::SLEEP_NATIVE.contains(&plain(function)));
    leaf.map(|leaf| plain(leaf).to_owned()).or_else(|| {
        thread.syscall().filter(|number| words::SLEEP_SYSCALLS.contains(number)).map(|_| "sleep".to_owned())
    })
}

fn locks(thread: &Thread<'_>) -> Option<String> {
    let leaf = thread.leaves().find(|function| contains_any(function, words::LOCK_NATIVE));
    leaf.map(str::to_owned)
        .or_else(|| thread.syscall().filter(|number| *number == words::FUTEX_SYSCALL).map(|_| "futex".to_owned()))
}

fn runs(thread: &Thread<'_>) -> Option<String> {
    let native = thread.native?;
    (native.state.starts_with('R') || native.syscall == Some(-1)).then(|| native.state.clone())
}

/// A thread of a rank, or of one of its children, that is stuck in the same input or output in both samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StuckHelper {
    /// `thread shard-reader-0` or `child process 4242`.
    pub who: String,
    /// What it is inside of, and where.
    pub place: String,
}

/// Looks for a helper of the main thread that is stuck: a reader thread or a worker process in input or output, or a
/// worker that is dead or stopped.
pub(crate) fn stuck_helper(dump: &Stacktrace) -> Option<StuckHelper> {
    let (first, last) = samples(dump);
    let pid = u32::try_from(dump.pid).unwrap_or(0);
    dump.children.iter().find_map(stuck_child).or_else(|| {
        stuck_thread(first, last, pid).map(|(name, place)| StuckHelper { who: format!("thread {name}"), place })
    })
}

fn stuck_child(child: &ChildProcess) -> Option<StuckHelper> {
    let last = child.samples.last()?;
    let who = format!("worker process {}", child.pid);
    if last.process_state.starts_with(['Z', 'X', 'x']) {
        return Some(StuckHelper { who, place: "is dead".to_owned() });
    }
    if last.process_state.starts_with(['T', 't']) {
        return Some(StuckHelper { who, place: "is stopped".to_owned() });
    }
    let first = (child.samples.len() > 1).then(|| of_process(&child.samples[0]));
    let (_, place) = stuck_thread(first, of_process(last), 0)?;
    Some(StuckHelper { who, place })
}

/// A thread other than `not` that does input or output, in both samples without having run in between.
fn stuck_thread(first: Option<Sample<'_>>, last: Sample<'_>, not: u32) -> Option<(String, String)> {
    let python: std::collections::HashMap<u32, &PySpyStacktrace> = last
        .python
        .iter()
        .filter(|thread| thread.os_thread_id != 0)
        .map(|thread| (thread.os_thread_id, thread))
        .collect();
    let before: Option<std::collections::HashMap<u32, &PstackStacktrace>> =
        first.map(|first| first.native.iter().map(|thread| (thread.pid, thread)).collect());
    last.native.iter().filter(|thread| thread.pid != not).find_map(|thread| {
        let same = before.as_ref().is_none_or(|before| {
            before.get(&thread.pid).is_some_and(|before| before.context_switches == thread.context_switches)
        });
        let doing = classify(Some(thread), None);
        // Threads without Python frames (watchers, network threads) read sockets and pipes by nature.
        let frames = python.get(&thread.pid).map(|thread| &thread.frames).filter(|frames| !frames.is_empty())?;
        if doing.activity != Activity::Io || !same {
            return None;
        }
        let place = own_frame(frames).map_or(String::new(), |frame| format!(" at {}", shown(frame)));
        let name = python.get(&thread.pid).map(|thread| thread.thread_name.clone()).filter(|name| !name.is_empty());
        Some((name.unwrap_or_else(|| thread.thread_name.clone()), format!("is inside {}{place}", doing.witness)))
    })
}

/// The holder of Python's global lock, when it is blocked at the same place in both samples while others wait for the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GilHolder {
    /// Its name.
    pub thread: String,
    /// The native function that it is blocked in.
    pub function: String,
    /// Where it stands in Python.
    pub place: Option<String>,
    /// How many threads wait for the lock.
    pub waiting: usize,
}

/// Looks for a deadlock on the global lock.
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
    let find = |sample: Sample<'_>| sample.native.iter().find(|thread| thread.pid == tid).cloned();
    let (before, after) = (find(first)?, find(last)?);
    // A capture may have to stop it for a moment, which counts as running.
    let blocked = after.cpu_time_ns.saturating_sub(before.cpu_time_ns) < STOPS_NS
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
    if !blocked || waiting == 0 {
        return None;
    }
    let python = last.python.iter().find(|thread| thread.os_thread_id == tid);
    Some(GilHolder {
        thread: python.map(|thread| thread.thread_name.clone()).unwrap_or_else(|| after.thread_name.clone()),
        function: after
            .frames
            .iter()
            .map(|frame| &frame.func_name)
            .find(|name| named(name))
            .cloned()
            .unwrap_or_default(),
        place: python.and_then(|thread| own_frame(&thread.frames)).map(shown),
        waiting,
    })
}

/// Whether a child of the rank is a compiler.
pub(crate) fn compiler_child(dump: &Stacktrace) -> Option<String> {
    dump.children.iter().find_map(|child| {
        let program = child.command.split_whitespace().next().map(short)?;
        let alive = child.samples.last().is_none_or(|sample| !sample.process_state.starts_with(['Z', 'X', 'x']));
        (alive && words::COMPILERS.contains(&program)).then(|| program.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(witness: &str, stack: &[(&str, &str)]) -> String {
        let frame = |(function, module): &(&str, &str)| PstackFrame {
            func_name: (*function).into(),
            module: (*module).into(),
            ..Default::default()
        };
        let frames: Vec<PstackFrame> = stack.iter().map(frame).collect();
        telling_function(&frames, witness).unwrap_or("nothing").to_owned()
    }

    const LIBC: &str = "/usr/lib/x86_64-linux-gnu/libc.so.6";
    const PYTHON: &str = "/usr/lib/libpython3.11.so";
    const CUDA: &str = "/usr/lib/libcuda.so.1";

    #[test]
    fn the_function_that_tells_most() {
        let lock = [
            ("__futex_abstimed_wait_common64", LIBC),
            ("__new_sem_wait_slow64.constprop.0", LIBC),
            ("PyThread_acquire_lock_timed", PYTHON),
        ];
        assert_eq!(told("", &lock), "PyThread_acquire_lock_timed");
        assert_eq!(told("", &[("__GI___libc_read", LIBC), ("read", LIBC), ("_Py_read", PYTHON)]), "read");
        let device = [("ioctl", LIBC), ("??", CUDA), ("cuStreamSynchronize", CUDA), ("cudaStreamSynchronize", CUDA)];
        assert_eq!(told("cuStreamSynchronize", &device), "cuStreamSynchronize");
        let rust = [("syscall", LIBC), ("std::sys::futex_wait", "/app"), ("app::wait", "/app")];
        assert_eq!(told("", &rust), "app::wait");
        assert_eq!(told("", &[("syscall", LIBC)]), "syscall");
        assert_eq!(told("", &[("??", "/app")]), "nothing");
    }

    #[test]
    fn a_public_function_says_more_than_a_closure_of_its_inside() {
        let names = ["{closure#0}<sim::cuStreamSynchronize>", "sim::wait", "cuStreamSynchronize"];
        let frames = names.iter().map(|name| PstackFrame { func_name: (*name).into(), ..Default::default() }).collect();
        let native = PstackStacktrace { frames, ..Default::default() };
        let doing = classify(Some(&native), None);
        assert_eq!((doing.activity, doing.witness.as_str()), (Activity::DeviceWait, "cuStreamSynchronize"));
    }
}
