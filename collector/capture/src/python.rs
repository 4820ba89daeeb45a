//! Python stacks, read from the interpreter's own structures by py-spy as a library.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use object::{Object, ObjectSymbol};
use py_spy::{Config, PythonSpy, StackTrace, config::LockingStrategy};
use read_process_memory::{ProcessHandle, copy_address};
use xpu_timer_proto::server::{PySpyFrame, PySpyStacktrace};

use crate::{
    address_space::AddressSpace,
    procfs::{self, Status},
};

/// Where glibc on x86-64 keeps the kernel's thread id within what `pthread_self` points to.
const TID_IN_PTHREAD: u64 = 0x2d0;

/// Whether the process runs an interpreter at all.
pub(crate) fn is_python(tid: i32, space: &AddressSpace<'_>) -> bool {
    let file_name = |path: &str| Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
    let is_library = |name: &str| name.starts_with("libpython") && name.contains(".so");
    if space.mappings().any(|mapping| file_name(&mapping.path).is_some_and(|name| is_library(&name))) {
        return true;
    }
    let exe = std::fs::read_link(format!("/proc/{tid}/exe")).unwrap_or_default().to_string_lossy().into_owned();
    if file_name(&exe).is_some_and(|name| name.starts_with("python")) {
        return true;
    }
    // A program that carries the interpreter within itself exports it for its extension modules.
    let main = space.mappings().find(|mapping| mapping.executable && mapping.path == exe);
    let image = main.and_then(|mapping| space.located(mapping.start)).map(|located| &located.image);
    let elf = image.and_then(|image| image.elf());
    elf.is_some_and(|elf| elf.dynamic_symbols().any(|symbol| symbol.name_bytes() == Ok(b"Py_GetVersion")))
}

/// Finds the interpreter of a process.
pub(crate) fn attach(tid: i32) -> Result<PythonSpy, String> {
    let config = Config { blocking: LockingStrategy::NonBlocking, full_filenames: true, ..Config::default() };
    guarded(|| PythonSpy::new(tid, &config).map_err(|error| format!("{error:#}")))
}

/// All Python threads of a process.
#[derive(Default)]
pub(crate) struct Walk {
    /// Their `os_thread_id` is the one that the interpreter knows, until [`Walk::place`] translates it.
    pub traces: Vec<PySpyStacktrace>,
    /// For each frame of each trace, whether C code entered the interpreter with it.
    pub entries: Vec<Vec<bool>>,
}

/// All Python threads, as they are at this moment.
pub(crate) fn walk(spy: &mut PythonSpy, pid: i32) -> Result<Walk, String> {
    let found = guarded(|| spy.get_stack_traces().map_err(|error| format!("{error:#}")))?;
    let version = (spy.version.major, spy.version.minor);
    let is_entry = |frame: &py_spy::Frame| match version {
        (3, 12..) => frame.is_shim_entry,
        (3, 11) => frame.is_entry,
        _ => true,
    };
    let mut walk = Walk { traces: Vec::with_capacity(found.len()), entries: Vec::with_capacity(found.len()) };
    for mut trace in found {
        drop_pseudo_frames(&mut trace);
        let tid = trace.os_thread_id.or_else(|| tid_of_pthread(spy.pid, trace.thread_id));
        walk.entries.push(trace.frames.iter().map(is_entry).collect());
        walk.traces.push(PySpyStacktrace {
            pid: pid as u32,
            thread_id: trace.thread_id,
            thread_name: trace.thread_name.unwrap_or_default(),
            os_thread_id: tid.and_then(|tid| u32::try_from(tid).ok()).unwrap_or(0),
            active: false,
            owns_gil: trace.owns_gil,
            frames: trace.frames.into_iter().map(frame).collect(),
        });
    }
    Ok(walk)
}

impl Walk {
    /// Translates the thread ids of the interpreter's PID namespace, which usually is also ours. 0 stands for a thread that
    /// does not exist (any more).
    pub fn place(&mut self, pid: i32, seen: &Seen) {
        let same = seen.get(&pid).is_none_or(|leader| leader.namespaced_tid == pid);
        let outer: HashMap<i32, i32> = seen.iter().map(|(tid, status)| (status.namespaced_tid, *tid)).collect();
        for trace in &mut self.traces {
            let tid = trace.os_thread_id as i32;
            let tid = if same { Some(tid) } else { outer.get(&tid).copied() };
            let status = tid.and_then(|tid| Some((tid, seen.get(&tid)?)));
            trace.os_thread_id = status.map_or(0, |(tid, _)| tid as u32);
            trace.active = status.is_some_and(|(_, status)| status.letter() == b'R');
        }
    }
}

/// All threads at one moment.
pub(crate) type Seen = HashMap<i32, Status>;

/// Looks at all threads.
pub(crate) fn look(pid: i32) -> Seen {
    let tids = procfs::threads(pid).unwrap_or_default();
    tids.into_iter().filter_map(|tid| Some((tid, procfs::status(pid, tid).ok()?))).collect()
}

/// Whether a thread has slept from the one moment to the other.
pub(crate) fn slept(tid: i32, before: &Seen, after: &Seen) -> bool {
    match (before.get(&tid), after.get(&tid)) {
        (Some(before), Some(after)) => {
            before.switches == after.switches && before.letter() != b'R' && after.letter() != b'R'
        }
        _ => false,
    }
}

fn frame(frame: py_spy::Frame) -> PySpyFrame {
    PySpyFrame {
        func_name: frame.name,
        file_name: format!("{}:{}", frame.filename, frame.line),
        module: frame.module.unwrap_or_default(),
    }
}

/// CPython 3.13 shows the code with which it cleans up after `__init__` as a frame; it is in no file.
fn drop_pseudo_frames(trace: &mut StackTrace) {
    let mut entry = false;
    // From the root to the leaf, so that the mark of an entry moves on to the frame that was called next.
    for frame in trace.frames.iter_mut().rev() {
        if is_pseudo(frame) {
            entry |= frame.is_shim_entry;
        } else {
            frame.is_shim_entry |= std::mem::take(&mut entry);
        }
    }
    trace.frames.retain(|frame| !is_pseudo(frame));
}

fn is_pseudo(frame: &py_spy::Frame) -> bool {
    frame.line == 0 && frame.name == "__init__" && frame.filename == "__init__"
}

/// Up to 3.10 the interpreter does not know kernel thread ids, but glibc does.
fn tid_of_pthread(tid: i32, pthread: u64) -> Option<u64> {
    let address = usize::try_from(pthread.checked_add(TID_IN_PTHREAD)?).ok()?;
    // Like all of the interpreter's memory, it comes from the pages that were copied during a stop.
    let bytes = copy_address(address, 4, &ProcessHandle::try_from(tid).ok()?).ok()?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?).into())
}

/// The structures may be torn while they are read, and a defect in reading them must not cost the native stacks.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("its structures could not be followed".into()))
}
