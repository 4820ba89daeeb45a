//! The dump as JSON, with the field names of the `.stacktrace` schema. It is serialized directly,
//! without a copy of the whole dump.

use std::{
    collections::HashMap,
    io::{self, BufWriter, Write},
};

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use xpu_timer_proto::{
    printable,
    server::{CaptureMethod, PstackStacktrace, PySpyFrame, PySpyStacktrace, PySuspended},
};

use crate::stacks::{CodeLocation, Function, Stacks, View, check_match, is_loop_name};

/// Writes one process and its descendants. `pretty` is for a person.
pub(super) fn write(out: &mut impl Write, process: &Stacks, view: View, pretty: bool) -> io::Result<()> {
    let process = Process::new(process, view)?;
    let mut out = BufWriter::with_capacity(1 << 16, printable::Json::new(out));
    if pretty { serde_json::to_writer_pretty(&mut out, &process) } else { serde_json::to_writer(&mut out, &process) }?;
    out.flush()
}

/// One process, for serde.
#[derive(Serialize)]
struct Process<'a> {
    pid: i32,
    parent_pid: i32,
    command: &'a str,
    process_state: &'a str,
    captured_unix_ns: u64,
    cpu_time_ns: u64,
    io_bytes: u64,
    tcp_bytes: u64,
    errors: &'a [String],
    capture_ns: u64,
    longest_stop_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    stacktrace: Option<Threads<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    py_stacktrace: Option<Vec<Python<'a>>>,
    children: Vec<Process<'a>>,
}

impl<'a> Process<'a> {
    fn new(process: &'a Stacks, view: View) -> serde_json::Result<Self> {
        let sample = &process.sample;
        Ok(Process {
            pid: process.pid,
            parent_pid: process.parent_pid,
            command: &process.command,
            process_state: &sample.process_state,
            captured_unix_ns: sample.captured_unix_ns,
            cpu_time_ns: sample.cpu_time_ns,
            io_bytes: sample.io_bytes,
            tcp_bytes: sample.tcp_bytes,
            errors: &sample.errors,
            capture_ns: sample.capture_ns,
            longest_stop_ns: sample.longest_stop_ns,
            stacktrace: if view == View::Python { None } else { Some(Threads::new(process)?) },
            py_stacktrace: (view != View::Native).then(|| pythons(process, view)),
            children: process.children.iter().map(|child| Process::new(child, view)).collect::<Result<_, _>>()?,
        })
    }
}

/// The native threads. A place may expand to several frames, so each place is serialized once.
struct Threads<'a> {
    process: &'a Stacks,
    places: Vec<Vec<Box<RawValue>>>,
}

impl<'a> Threads<'a> {
    fn new(process: &'a Stacks) -> serde_json::Result<Self> {
        let places = process.places.iter().map(native_frames).collect::<Result<_, _>>()?;
        Ok(Threads { process, places })
    }
}

impl Serialize for Threads<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let threads = self.process.sample.stacktrace.iter().zip(&self.process.frames);
        serializer.collect_seq(threads.map(|(thread, frames)| native(thread, Frames { frames, places: &self.places })))
    }
}

/// The frames of one native thread.
struct Frames<'a> {
    frames: &'a [u32],
    places: &'a [Vec<Box<RawValue>>],
}

impl Serialize for Frames<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.frames.iter().filter_map(|number| self.places.get(*number as usize)).flatten())
    }
}

/// A list whose entries are converted one by one.
struct List<'a, T, U>(&'a [T], fn(&'a T) -> U);

impl<T, U: Serialize> Serialize for List<'_, T, U> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(self.1))
    }
}

#[derive(Serialize)]
struct Native<'a> {
    tid: u32,
    thread_name: &'a str,
    state: &'a str,
    wchan: &'a str,
    kernel_stack: &'a [String],
    capture: &'static str,
    context_switches: u64,
    cpu_time_ns: u64,
    incomplete: &'a str,
    syscall: Option<i64>,
    frames: Frames<'a>,
}

#[derive(Serialize)]
struct NativeFrame<'a> {
    func_name: &'a str,
    file_name: &'a str,
    pc: u64,
    module: &'a str,
    module_address: u64,
    inlined: bool,
}

fn native_frames(place: &CodeLocation) -> serde_json::Result<Vec<Box<RawValue>>> {
    let frame = |(function, inlined): (&'_ Function, bool)| {
        serde_json::value::to_raw_value(&NativeFrame {
            func_name: &function.name,
            file_name: place.file_name(function),
            pc: place.pc,
            module: &place.module,
            module_address: place.module_address,
            inlined,
        })
    };
    place.functions().map(frame).collect()
}

fn native<'a>(thread: &'a PstackStacktrace, frames: Frames<'a>) -> Native<'a> {
    Native {
        tid: thread.pid,
        thread_name: &thread.thread_name,
        state: &thread.state,
        wchan: &thread.wchan,
        kernel_stack: &thread.kernel_stack,
        capture: method(thread),
        context_switches: thread.context_switches,
        cpu_time_ns: thread.cpu_time_ns,
        incomplete: &thread.incomplete,
        syscall: thread.syscall,
        frames,
    }
}

/// Name of the method that captured the stack.
pub(super) fn method(thread: &PstackStacktrace) -> &'static str {
    match thread.capture() {
        CaptureMethod::ZeroStop => "zero_stop",
        CaptureMethod::Ptrace => "ptrace",
        CaptureMethod::KernelOnly => "kernel_only",
        CaptureMethod::PerfSample => "perf_sample",
        CaptureMethod::Unspecified => "unspecified",
    }
}

#[derive(Serialize)]
struct Python<'a> {
    thread_id: u64,
    thread_name: &'a str,
    os_thread_id: u32,
    active: bool,
    owns_gil: bool,
    /// Why the frames may be wrong.
    incomplete: &'a str,
    /// Why the frames do not match those of the native stack, so that the two cannot be merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    unmerged: Option<String>,
    frames: List<'a, PySpyFrame, PythonFrame<'a>>,
    /// Its tasks and greenlets that wait.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    suspended: Vec<Suspended<'a>>,
}

#[derive(Serialize)]
struct Suspended<'a> {
    /// `task` or `greenlet`.
    kind: &'static str,
    name: &'a str,
    /// The object that it waits for.
    awaits: &'a str,
    frames: List<'a, PySpyFrame, PythonFrame<'a>>,
}

#[derive(Serialize)]
struct PythonFrame<'a> {
    func_name: &'a str,
    file_name: &'a str,
}

fn pythons(process: &Stacks, view: View) -> Vec<Python<'_>> {
    let sample = &process.sample;
    let natives: HashMap<u32, usize> =
        sample.stacktrace.iter().enumerate().map(|(index, native)| (native.pid, index)).collect();
    let is_loop = |place: &CodeLocation| place.functions.last().is_some_and(|function| is_loop_name(&function.name));
    let is_loop: Vec<bool> = process.places.iter().map(is_loop).collect();
    let unmerged = |thread: &PySpyStacktrace, entries: &[bool]| {
        let frames = process.frames.get(*natives.get(&thread.os_thread_id)?)?;
        let loops = frames.iter().filter(|number| is_loop.get(**number as usize) == Some(&true)).count();
        check_match(loops, entries).err().map(|mismatch| mismatch.to_string())
    };
    let threads = sample.py_stacktrace.iter().zip(&process.python_entries);
    threads
        .map(|(thread, entries)| python(thread, if view == View::Python { None } else { unmerged(thread, entries) }))
        .collect()
}

fn python_frame(frame: &PySpyFrame) -> PythonFrame<'_> {
    PythonFrame { func_name: &frame.func_name, file_name: &frame.file_name }
}

fn suspended(suspended: &PySuspended) -> Suspended<'_> {
    Suspended {
        kind: suspended.kind().noun(),
        name: &suspended.name,
        awaits: &suspended.awaits,
        frames: List(&suspended.frames, python_frame),
    }
}

fn python(thread: &PySpyStacktrace, unmerged: Option<String>) -> Python<'_> {
    Python {
        thread_id: thread.thread_id,
        thread_name: &thread.thread_name,
        os_thread_id: thread.os_thread_id,
        active: thread.active,
        owns_gil: thread.owns_gil,
        incomplete: &thread.incomplete,
        unmerged,
        frames: List(&thread.frames, python_frame),
        suspended: thread.suspended.iter().map(suspended).collect(),
    }
}
