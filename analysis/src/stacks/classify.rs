//! The activity of a thread, by the names on its stacks.

use xpu_timer_proto::{
    FUTURE, MAX_SUSPENDED,
    server::{Holder, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace, PySuspended, PySuspendedKind},
};

use super::{
    host::ObservedActivity,
    names::{
        base_name, contains_any, frame_label, in_c_library, is_library, is_named, is_poll, strip_variant, unqualified,
        unqualified_native,
    },
    patterns,
};
use crate::verdict::Activity;

/// The activity of a thread, by its native and Python stacks. The checks have an order: frames near
/// the device or the lock come before frames around them.
pub(super) fn classify(native: Option<&PstackStacktrace>, python: Option<&PySpyStacktrace>) -> ObservedActivity {
    classify_without(Activity::Unknown, native, python)
}

/// Like [`classify`], for a thread that is known not to have the activity `excluded`.
pub(super) fn classify_without(
    excluded: Activity,
    native: Option<&PstackStacktrace>,
    python: Option<&PySpyStacktrace>,
) -> ObservedActivity {
    type Matcher = fn(&Thread<'_>) -> Option<String>;
    const MATCHERS: &[(Activity, Matcher)] = &[
        (Activity::Gil, waits_for_gil),
        (Activity::CommInit, initializes),
        (Activity::Running, runs_in_nccl),
        (Activity::DeviceWait, waits_for_device),
        (Activity::Teardown, tears_down),
        (Activity::Gc, collects),
        (Activity::Compile, compiles),
        (Activity::DataLoader, loads_data),
        (Activity::Io, reads_or_writes),
        (Activity::Sleep, sleeps),
        (Activity::Lock, locks),
        (Activity::Lock, locks_in_tasks),
        (Activity::Running, runs),
    ];
    let thread = Thread { native, python };
    MATCHERS
        .iter()
        .filter(|(activity, _)| *activity != excluded)
        .find_map(|(activity, matcher)| {
            matcher(&thread).map(|witness| ObservedActivity { activity: *activity, witness })
        })
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

    /// The innermost native functions: what the thread itself is in, without its callers. All
    /// frames of the C library count; there are many of them if its inlined functions are known.
    fn leaves(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let frames = self.native.map_or(&[][..], |thread| &thread.frames);
        let library = frames.iter().take_while(|frame| in_c_library(frame)).count();
        frames.iter().map(|frame| frame.func_name.as_str()).filter(|function| is_named(function)).take(library.max(3))
    }

    fn python(&self) -> &'a [PySpyFrame] {
        self.python.map_or(&[], |thread| &thread.frames)
    }

    fn syscall(&self) -> Option<i64> {
        self.native.and_then(|thread| thread.syscall)
    }
}

fn waits_for_gil(thread: &Thread<'_>) -> Option<String> {
    let named = thread.functions().take(8).find(|function| strip_variant(function) == "take_gil");
    named.or_else(|| takes_gil_unnamed(thread)).map(str::to_owned)
}

/// The wait for the GIL in a stripped interpreter, which has only its public names. Among all
/// functions that these functions call, only the wait for the GIL waits for a condition with a
/// timeout and has no public name itself.
fn takes_gil_unnamed<'a>(thread: &Thread<'a>) -> Option<&'a str> {
    let frames = &thread.native?.frames;
    let (library, rest) = frames.split_at(frames.iter().take_while(|frame| in_c_library(frame)).count());
    let insides = rest.iter().take_while(|frame| !is_named(&frame.func_name)).count();
    let caller = rest.get(insides)?;
    (library.iter().any(|frame| frame.func_name.contains(patterns::GIL_WAIT_NATIVE))
        && patterns::TAKES_GIL_NATIVE.contains(&strip_variant(&caller.func_name))
        && rest[..insides].iter().all(|frame| frame.module == caller.module))
    .then_some(&caller.func_name)
}

/// The witness of a failing connection to the store of a job.
pub(super) const STORE_CONNECT: &str = "connect to c10d::TCPStore";

fn connects_to_store(thread: &Thread<'_>) -> bool {
    let innermost = thread.functions().find(|function| function.contains("c10d::"));
    innermost.is_some_and(|function| contains_any(function, patterns::STORE_CONNECT_NATIVE))
        && thread.leaves().any(|function| patterns::CONNECT_NATIVE.contains(&strip_variant(function)))
}

fn initializes(thread: &Thread<'_>) -> Option<String> {
    if connects_to_store(thread) {
        return Some(STORE_CONNECT.to_owned());
    }
    // A thread waits for the store in the creation of a group, and in programs that use the store
    // for something else. The Python frames distinguish the two.
    let is_in = |frame: &PySpyFrame, functions: &[&str]| {
        frame.file_name.contains("torch/distributed") && functions.contains(&unqualified(&frame.func_name))
    };
    // A barrier over the store belongs to a creation only if a creation calls it.
    let creates = thread.python().iter().any(|frame| is_in(frame, patterns::CREATION_PYTHON));
    let of_torch = |frame: &&PySpyFrame| creates && is_in(frame, patterns::INIT_PYTHON);
    let native =
        || thread.functions().find(|function| contains_any(function, patterns::INIT_NATIVE)).map(str::to_owned);
    thread.python().iter().find(of_torch).map(frame_label).or_else(native)
}

fn tears_down(thread: &Thread<'_>) -> Option<String> {
    let native = thread.functions().find(|function| contains_any(function, patterns::TEARDOWN_NATIVE));
    native.map(str::to_owned).or_else(|| {
        thread
            .python()
            .iter()
            .find(|frame| patterns::TEARDOWN_PYTHON.contains(&unqualified(&frame.func_name)))
            .map(frame_label)
    })
}

fn waits_for_device(thread: &Thread<'_>) -> Option<String> {
    let waits = |function: &&str| {
        let lower = function.to_ascii_lowercase();
        contains_any(&lower, patterns::DEVICE_NATIVE)
            || patterns::COLLECTIVE_PREFIXES.iter().any(|prefix| {
                lower.strip_prefix(prefix).is_some() && !contains_any(function, patterns::TEARDOWN_NATIVE)
            })
    };
    let all = || thread.functions().filter(waits);
    // A public function is a better witness than a closure of its implementation.
    all().find(|function| !function.contains('{')).or_else(|| all().next()).map(str::to_owned).or_else(|| {
        // Without native frames, the names of Python wrappers are the fallback.
        let of_wrapper = |frame: &&PySpyFrame| {
            patterns::DEVICE_PYTHON.contains(&unqualified(&frame.func_name))
                && (frame.file_name.contains("torch/") || base_name(&frame.file_name).starts_with("cuda."))
        };
        thread.python().iter().take(4).find(of_wrapper).map(frame_label)
    })
}

/// Whether a function belongs to NCCL or a library like it, by its name.
fn is_nccl(function: &str) -> bool {
    let lower = function.to_ascii_lowercase();
    patterns::NCCL_PREFIXES.iter().any(|prefix| lower.starts_with(prefix))
}

/// A thread that uses a CPU in the host code of NCCL. It does not wait for the device: then it
/// would be in a function of the device.
fn runs_in_nccl(thread: &Thread<'_>) -> Option<String> {
    runs(thread)?;
    let inside =
        |frame: &&PstackFrame| is_nccl(&frame.func_name) || contains_any(&frame.module, patterns::NCCL_LIBRARIES);
    let frames = thread.native?.frames.iter().skip_while(|frame| in_c_library(frame)).take_while(inside);
    let found = frames.map(|frame| frame.func_name.as_str()).find(|function| is_nccl(function))?;
    let ends = thread.functions().any(|function| contains_any(function, patterns::TEARDOWN_NATIVE));
    (!ends).then(|| found.to_owned())
}

fn collects(thread: &Thread<'_>) -> Option<String> {
    let named = thread
        .functions()
        .find(|function| patterns::GC_NATIVE.contains(&function.split('.').next().unwrap_or(function)));
    // A stripped interpreter has no names for the collector, but a flag in its memory.
    let collecting = || thread.python.is_some_and(|thread| thread.collects_garbage).then_some("the garbage collector");
    named.or_else(collecting).map(str::to_owned)
}

fn compiles(thread: &Thread<'_>) -> Option<String> {
    let native = thread.functions().find(|function| contains_any(function, patterns::COMPILE_NATIVE));
    native.map(str::to_owned).or_else(|| {
        let compiler = |frame: &&PySpyFrame| {
            contains_any(&frame.file_name, patterns::COMPILE_PATHS)
                && !patterns::COMPILE_NOT.contains(&unqualified(&frame.func_name))
        };
        thread.python().iter().find(compiler).map(frame_label)
    })
}

fn loads_data(thread: &Thread<'_>) -> Option<String> {
    let frames = thread.python();
    // A loader is a thread or a child of the rank.
    let awaited = thread.native.and_then(|native| native.awaited.as_ref());
    let is_foreign = |holders: &[Holder], pid: u32| {
        !holders.is_empty() && holders.iter().all(|holder| !holder.child && u32::try_from(holder.pid) != Ok(pid))
    };
    if awaited.zip(thread.native).is_some_and(|(awaited, native)| is_foreign(&awaited.holders, native.pid)) {
        return None;
    }
    let of_loader = |frame: &&PySpyFrame| {
        let file = frame.file_name.to_ascii_lowercase();
        patterns::LOADER_FUNCTIONS.contains(&unqualified(&frame.func_name))
            || ["next", "get"].iter().any(|part| unqualified(&frame.func_name).contains(part))
                && contains_any(&file, patterns::LOADER_FILES)
    };
    if let Some(frame) = frames.iter().find(of_loader) {
        return Some(frame_label(frame));
    }
    let native = thread.functions().find(|function| patterns::LOADER_NATIVE.contains(&unqualified_native(function)));
    if let Some(function) = native {
        return Some(function.to_owned());
    }
    queue_of_data(frames)
}

/// The frame of a queue that may belong to a loader, because one of the frames around it has a name
/// about data.
pub(super) fn queue_of_data(frames: &[PySpyFrame]) -> Option<String> {
    let is_queue = |frame: &PySpyFrame| patterns::QUEUE_FUNCTIONS.contains(&unqualified(&frame.func_name));
    let queue = frames
        .iter()
        .take(5)
        .find(|frame| is_queue(frame) && patterns::QUEUE_FILES.iter().any(|file| frame.file_name.contains(file)))?;
    let hinted = frames
        .iter()
        .filter(|frame| !is_library(&frame.file_name))
        .any(|frame| has_word(&frame.func_name, patterns::LOADER_HINTS));
    (hinted && !calls_manager(frames)).then(|| frame_label(queue))
}

/// Whether a thread waits for the result of a method of an object in a manager process, other than
/// of a queue.
fn calls_manager(frames: &[PySpyFrame]) -> bool {
    let call = frames.iter().rposition(|frame| frame.file_name.contains(patterns::MANAGER_FILE));
    let method = call.and_then(|call| frames.get(call + 1));
    method.is_some_and(|method| !patterns::QUEUE_FUNCTIONS.contains(&unqualified(&method.func_name)))
}

/// Whether a word in a name begins with one of `parts`. Words are separated by `_` and by capital
/// letters.
fn has_word(name: &str, parts: &[&str]) -> bool {
    let mut before = '_';
    name.char_indices().any(|(index, letter)| {
        let begins = !before.is_alphanumeric() || letter.is_uppercase() && !before.is_uppercase();
        before = letter;
        let rest = &name[index..];
        begins && parts.iter().any(|part| rest.get(..part.len()).is_some_and(|start| start.eq_ignore_ascii_case(part)))
    })
}

/// Whether a thread waits for the end or for the output of a child process.
pub(super) fn waits_for_child(native: Option<&PstackStacktrace>, python: Option<&PySpyStacktrace>) -> bool {
    let thread = Thread { native, python };
    let of_child = |frame: &PySpyFrame| {
        patterns::CHILD_FUNCTIONS.contains(&unqualified(&frame.func_name))
            && contains_any(&frame.file_name, patterns::CHILD_FILES)
    };
    thread.leaves().any(|function| patterns::CHILD_NATIVE.contains(&strip_variant(function)))
        || thread.syscall().is_some_and(|number| patterns::CHILD_SYSCALLS.contains(&number))
        || thread.python().iter().take_while(|frame| is_library(&frame.file_name)).any(of_child)
}

/// The outermost frame in which a thread receives from a queue or pipe of Python's multiprocessing.
pub(super) fn receives(frames: &[PySpyFrame]) -> Option<&PySpyFrame> {
    frames
        .iter()
        .take_while(|frame| is_library(&frame.file_name))
        .filter(|frame| {
            patterns::QUEUE_FUNCTIONS.contains(&unqualified(&frame.func_name))
                && frame.file_name.contains(patterns::OF_PROCESSES)
                && contains_any(&frame.file_name, patterns::QUEUE_FILES)
        })
        .last()
}

/// Whether a thread waits for the result of a task that it gave to a pool or an executor.
pub(super) fn awaits_result(frames: &[PySpyFrame]) -> bool {
    let mut library = frames.iter().take_while(|frame| is_library(&frame.file_name));
    library.any(|frame| {
        patterns::RESULT_FUNCTIONS.contains(&unqualified(&frame.func_name))
            && contains_any(&frame.file_name, patterns::RESULT_FILES)
    })
}

/// Whether a thread is in a function of a library that polls a ring in shared memory.
pub(super) fn polls_ring(frames: &[PySpyFrame]) -> bool {
    frames.iter().any(|frame| {
        patterns::RING_FUNCTIONS.contains(&unqualified(&frame.func_name))
            && contains_any(&frame.file_name, patterns::RING_FILES)
    })
}

/// Whether a thread lets other threads run, and is ready to run itself. On its way back to Python
/// it may be in inner functions.
pub(super) fn yields(native: Option<&PstackStacktrace>) -> bool {
    Thread { native, python: None }.functions().take(8).any(|function| function.contains(patterns::YIELD_NATIVE))
}

/// Whether a thread waits for the end of another thread of its process.
pub(super) fn joins_thread(native: Option<&PstackStacktrace>, python: Option<&PySpyStacktrace>) -> bool {
    let thread = Thread { native, python };
    let of_threading = |frame: &PySpyFrame| {
        patterns::JOIN_PYTHON.contains(&unqualified(&frame.func_name))
            && frame.file_name.contains(patterns::THREADING_FILE)
    };
    thread.functions().any(|function| contains_any(function, patterns::JOIN_NATIVE))
        || thread.python().iter().take_while(|frame| is_library(&frame.file_name)).any(of_threading)
}

/// Whether a thread waits for a signal.
pub(super) fn waits_for_signal(native: Option<&PstackStacktrace>) -> bool {
    let thread = Thread { native, python: None };
    thread.leaves().any(|function| patterns::SIGNAL_NATIVE.contains(&strip_variant(function)))
        || thread.syscall().is_some_and(|number| patterns::SIGNAL_SYSCALLS.contains(&number))
}

/// Whether a thread waits for data from another machine or process.
pub(super) fn waits_for_network(native: &PstackStacktrace) -> bool {
    let thread = Thread { native: Some(native), python: None };
    thread.leaves().any(|function| patterns::NETWORK_NATIVE.contains(&strip_variant(function)))
}

/// Whether a thread is in one of Python's own queues or pipes, and does not wait for room there.
pub(super) fn in_queue(frames: &[PySpyFrame]) -> bool {
    let of_queue = |frame: &&PySpyFrame| patterns::QUEUE_FILES.iter().any(|file| frame.file_name.contains(file));
    let outer = frames.iter().take(5).rfind(of_queue);
    outer.is_some_and(|frame| unqualified(&frame.func_name) != patterns::QUEUE_PUT)
}

/// Whether a thread is in library code of one of these files.
pub(super) fn in_files(frames: &[PySpyFrame], files: &[&str]) -> bool {
    let mut library = frames.iter().take_while(|frame| is_library(&frame.file_name));
    library.any(|frame| contains_any(&frame.file_name, files))
}

fn reads_or_writes(thread: &Thread<'_>) -> Option<String> {
    let leaf = thread.leaves().find(|function| patterns::IO_NATIVE.contains(&strip_variant(function)));
    let wchan = thread.native.map_or("", |thread| thread.wchan.as_str());
    // A socket is not storage: a thread that reads from a socket waits for another process. Data
    // between processes and keyboard input are not storage either.
    let asks = thread.functions().any(|function| patterns::INPUT_NATIVE.contains(&function));
    let of_events = |function: &str| patterns::EVENT_READS.iter().any(|start| function.starts_with(start));
    if asks
        || of_events(wchan)
        || thread.leaves().any(of_events)
        || receives(thread.python()).is_some()
        || wchan.contains("sk_wait")
        || wchan.contains("unix_stream")
        || wchan.contains("tcp_")
        || wchan.contains("skb_")
    {
        return None;
    }
    if let Some(leaf) = leaf {
        return Some(strip_variant(leaf).to_owned());
    }
    if thread.syscall().is_some_and(|number| patterns::IO_SYSCALLS.contains(&number)) {
        return Some(thread.leaves().next().unwrap_or("a file system call").to_owned());
    }
    has_word(wchan, patterns::IO_WCHAN).then(|| wchan.to_owned())
}

fn sleeps(thread: &Thread<'_>) -> Option<String> {
    let leaf = thread.leaves().find(|function| patterns::SLEEP_NATIVE.contains(&strip_variant(function)));
    leaf.map(|leaf| strip_variant(leaf).to_owned()).or_else(|| {
        thread.syscall().filter(|number| patterns::SLEEP_SYSCALLS.contains(number)).map(|_| "sleep".to_owned())
    })
}

fn locks(thread: &Thread<'_>) -> Option<String> {
    let lock = own_lock(thread)?;
    let mut native = thread.native.into_iter().flat_map(|thread| &thread.frames);
    let shared = native.any(|frame| frame.module.contains(patterns::SHARED_LOCK_MODULE))
        || thread.python().first().is_some_and(|frame| frame.file_name.contains(patterns::SHARED_LOCK_FILE));
    let enters = |frame: &PySpyFrame| {
        frame.file_name.contains(patterns::SHARED_LOCK_FILE) && unqualified(&frame.func_name) == "__enter__"
    };
    Some(match thread.python().first() {
        Some(frame) if enters(frame) => patterns::EXCLUSIVE_LOCK.to_owned(),
        _ if shared => patterns::SHARED_LOCK.to_owned(),
        _ => lock,
    })
}

fn locks_in_tasks(thread: &Thread<'_>) -> Option<String> {
    let polls = thread.leaves().any(is_poll);
    let stuck = thread.python.filter(|_| polls).and_then(stuck_task);
    stuck.map(|_| TASK_LOCK.to_owned())
}

/// The witness of a thread whose event loop waits for locks of asyncio only.
pub(super) const TASK_LOCK: &str = "a lock of asyncio";

/// The kind of object that an asyncio task waits for.
#[derive(Clone, Copy, PartialEq)]
enum TaskWait {
    /// Another task, or the end of a server.
    Other,
    /// An event or a queue. A task at rest waits for these too.
    Rest,
    /// A lock or a semaphore.
    Lock,
    /// A lock or a semaphore in a `with` statement, or the end of a queue: work has begun.
    Work,
}

/// The task that holds up an event loop in which no task waits for anything outside of the process:
/// all of them wait for each other, and at least one has begun work that it cannot end.
pub(super) fn stuck_task(python: &PySpyStacktrace) -> Option<&PySuspended> {
    let tasks = python.suspended.iter().filter(|one| one.kind() == PySuspendedKind::Task);
    let waits: Vec<(TaskWait, &PySuspended)> =
        tasks.map(|task| Some((task_wait(task)?, task))).collect::<Option<_>>()?;
    let of = |wanted: TaskWait| waits.iter().find(|(wait, _)| *wait == wanted).map(|(_, task)| *task);
    // A task that waits for a semaphore may be a producer at rest, if others wait for orders.
    let stuck = of(TaskWait::Work).or_else(|| of(TaskWait::Lock).filter(|_| of(TaskWait::Rest).is_none()));
    stuck.filter(|_| python.suspended.len() < MAX_SUSPENDED)
}

/// `None` if a task waits for something else.
fn task_wait(task: &PySuspended) -> Option<TaskWait> {
    if task.awaits != FUTURE {
        return (!task.awaits.is_empty()).then_some(TaskWait::Other);
    }
    let at = |place: usize, functions: &[&str], file: &str| {
        let is =
            |frame: &PySpyFrame| functions.contains(&unqualified(&frame.func_name)) && frame.file_name.contains(file);
        task.frames.get(place).is_some_and(is)
    };
    let (locks, queues) = (patterns::TASK_LOCK_FILE, patterns::TASK_QUEUE_FILE);
    // The end of a queue is an event.
    let joins = at(0, &["join"], queues) || at(1, &["join"], queues);
    let acquires = at(0, &["acquire"], locks);
    let rests = at(0, &["wait"], locks) || at(0, &["get", "put"], queues);
    let serves = at(0, &["serve_forever", "wait_closed"], patterns::TASK_SERVER_FILE);
    match () {
        () if joins || acquires && at(1, &["__aenter__"], locks) => Some(TaskWait::Work),
        () if acquires => Some(TaskWait::Lock),
        () if rests => Some(TaskWait::Rest),
        () => serves.then_some(TaskWait::Other),
    }
}

fn own_lock(thread: &Thread<'_>) -> Option<String> {
    // The outermost match is the function that the program called. The inner ones are its
    // implementation.
    let leaf = thread.leaves().filter(|function| contains_any(function, patterns::LOCK_NATIVE)).last();
    leaf.map(str::to_owned)
        .or_else(|| thread.syscall().filter(|number| *number == patterns::FUTEX_SYSCALL).map(|_| "futex".to_owned()))
}

fn runs(thread: &Thread<'_>) -> Option<String> {
    let native = thread.native?;
    (native.state.starts_with('R') || native.syscall == Some(-1)).then(|| native.state.clone())
}

/// Whether a thread waits for the GIL.
pub(crate) fn is_in_gil_wait(native: &PstackStacktrace) -> bool {
    waits_for_gil(&Thread { native: Some(native), python: None }).is_some()
}

/// Whether a witness of [`Activity::Io`] waits for a lock on a file
/// and not for its bytes.
pub(crate) fn is_file_lock(witness: &str) -> bool {
    patterns::FILE_LOCKS.contains(&witness)
}

/// Whether a witness of [`Activity::Lock`] is a lock that processes share.
pub(crate) fn is_shared_lock(witness: &str) -> bool {
    witness == patterns::SHARED_LOCK || is_exclusive_lock(witness)
}

/// Whether a witness of [`Activity::Lock`] is a lock that processes share, and that one process at
/// a time can hold.
pub(crate) fn is_exclusive_lock(witness: &str) -> bool {
    witness == patterns::EXCLUSIVE_LOCK
}

/// Whether a witness of [`Activity::Running`] is a function of NCCL.
pub(crate) fn is_busy_in_nccl(witness: &str) -> bool {
    is_nccl(witness)
}

/// Whether a function of the C library locks a mutex.
pub(crate) fn is_mutex(function: &str) -> bool {
    function.contains("pthread_mutex") || function.contains("lll_lock")
}

/// Whether a witness of [`Activity::CommInit`] is a failing
/// connection to the store.
pub(crate) fn is_store_connect(witness: &str) -> bool {
    witness == STORE_CONNECT
}

/// Whether a function of the C library waits for data from a socket.
pub(crate) fn is_network(function: &str) -> bool {
    patterns::NETWORK_NATIVE.contains(&strip_variant(function))
}

/// Whether a function of the C library waits for an event, a message or a semaphore that processes
/// share.
pub(crate) fn is_message_wait(function: &str) -> bool {
    patterns::MESSAGE_NATIVE.contains(&strip_variant(function))
}

/// Whether a function of the C library hands bytes to another process.
pub(crate) fn is_send(function: &str) -> bool {
    patterns::SEND_NATIVE.contains(&strip_variant(function))
}

/// Whether a function waits for the end of a thread.
pub(crate) fn is_join(function: &str) -> bool {
    patterns::JOIN_NATIVE.iter().any(|join| strip_variant(function).starts_with(join))
}

/// Whether a function of the C library waits for a signal.
pub(crate) fn is_signal_wait(function: &str) -> bool {
    patterns::SIGNAL_NATIVE.contains(&strip_variant(function))
}

/// Whether a function of the C library sleeps for a time.
pub(crate) fn is_sleep(function: &str) -> bool {
    patterns::SLEEP_NATIVE.contains(&strip_variant(function))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn native(names: &[&str]) -> PstackStacktrace {
        let frames = names.iter().map(|name| PstackFrame { func_name: (*name).into(), ..Default::default() }).collect();
        PstackStacktrace { frames, ..Default::default() }
    }

    #[test]
    fn a_public_function_is_preferred_to_its_closures() {
        let native = native(&["{closure#0}<sim::cuStreamSynchronize>", "sim::wait", "cuStreamSynchronize"]);
        let doing = classify(Some(&native), None);
        assert_eq!((doing.activity, doing.witness.as_str()), (Activity::DeviceWait, "cuStreamSynchronize"));
    }

    #[test]
    fn a_thread_that_uses_a_cpu_inside_nccl_does_not_wait_for_the_device() {
        let does = |state: &str, frames: &[(&str, &str)]| {
            let frame = |(function, module): &(&str, &str)| PstackFrame {
                func_name: (*function).into(),
                module: (*module).into(),
                ..Default::default()
            };
            let frames = frames.iter().map(frame).collect();
            let native = PstackStacktrace { frames, state: state.into(), ..Default::default() };
            let doing = classify(Some(&native), None);
            (doing.activity, doing.witness)
        };
        let (libc, nccl) = ("/usr/lib/x86_64-linux-gnu/libc.so.6", "/opt/venv/lib/libnccl.so.2");
        let appends =
            [("sched_yield", libc), ("ncclLocalOpAppend", nccl), ("ncclProxySaveOp", nccl), ("ncclAllReduce", nccl)];
        assert_eq!(does("R (running)", &appends), (Activity::Running, "ncclLocalOpAppend".into()));
        // The library has only its public names.
        assert_eq!(
            does("R (running)", &[("??", nccl), ("ncclAllReduce", nccl)]),
            (Activity::Running, "ncclAllReduce".into())
        );
        assert_eq!(does("S (sleeping)", &appends).0, Activity::DeviceWait);
        // It polls the device, or is in a function that waits for it.
        let polls = [("cuEventQuery", "/usr/lib/libcuda.so.1"), ("ncclGroupEnd", nccl)];
        assert_eq!(does("R (running)", &polls).0, Activity::DeviceWait);
        assert_eq!(does("R (running)", &[("ncclCommDestroy", nccl)]).0, Activity::Teardown);
        assert_eq!(does("R (running)", &[("ncclCommInitRank", nccl)]).0, Activity::CommInit);
    }

    #[test]
    fn a_collective_in_shared_memory_waits_for_others() {
        let native = native(&["get_curr_stamp", "shm_cc_loop<float>", "shm_allreduce", "THPFunction_apply"]);
        let doing = classify(Some(&native), None);
        assert_eq!((doing.activity, doing.witness.as_str()), (Activity::DeviceWait, "shm_allreduce"));
    }

    #[test]
    fn names_match_by_their_words() {
        for (name, part) in [
            ("next_batch", "batch"),
            ("ShardReader.read_shard", "read"),
            ("getSamples", "sample"),
            ("anon_pipe_read", "pipe_read"),
            ("__wait_on_buffer", "wait_on_buffer"),
            ("ll_file_read", "ll_"),
        ] {
            assert!(has_word(name, &[part]), "{name}");
        }
        for (name, part) in [
            ("start_thread", "read"),
            ("poll_schedule_timeout", "ll_"),
            ("do_epoll_wait", "ll_"),
            ("do_syscall_64", "ll_"),
            ("metadata", "data"),
            ("", "read"),
        ] {
            assert!(!has_word(name, &[part]), "{name}");
        }
    }
}
