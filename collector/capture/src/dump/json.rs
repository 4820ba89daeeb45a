//! The dump as JSON: the field names of the `.stacktrace` schema.

use serde_json::{Value, json};
use xpu_timer_proto::server::{CaptureMethod, PstackStacktrace, PySpyStacktrace};

use super::View;
use crate::ProcessCapture;

pub(super) fn processes(captured: &[ProcessCapture], view: View) -> Value {
    captured.iter().map(|capture| process(capture, view)).collect()
}

fn process(process: &ProcessCapture, view: View) -> Value {
    let sample = &process.sample;
    let mut value = json!({
        "pid": process.pid,
        "parent_pid": process.parent_pid,
        "command": process.command,
        "process_state": sample.process_state,
        "captured_unix_ns": sample.captured_unix_ns,
        "cpu_time_ns": sample.cpu_time_ns,
        "io_bytes": sample.io_bytes,
        "errors": sample.errors,
        "capture_ns": sample.capture_ns,
        "longest_stop_ns": sample.longest_stop_ns,
        "children": processes(&process.children, view),
    });
    if view != View::Python {
        value["stacktrace"] = sample.stacktrace.iter().map(native).collect();
    }
    if view != View::Native {
        value["py_stacktrace"] = sample.py_stacktrace.iter().map(python).collect();
    }
    value
}

fn native(thread: &PstackStacktrace) -> Value {
    let frame = |frame: &xpu_timer_proto::server::PstackFrame| {
        json!({
            "func_name": frame.func_name,
            "file_name": frame.file_name,
            "pc": frame.pc,
            "module": frame.module,
            "module_address": frame.module_address,
            "inlined": frame.inlined,
        })
    };
    json!({
        "tid": thread.pid,
        "thread_name": thread.thread_name,
        "state": thread.state,
        "wchan": thread.wchan,
        "kernel_stack": thread.kernel_stack,
        "capture": method(thread),
        "context_switches": thread.context_switches,
        "cpu_time_ns": thread.cpu_time_ns,
        "incomplete": thread.incomplete,
        "syscall": thread.syscall,
        "frames": thread.frames.iter().map(frame).collect::<Value>(),
    })
}

/// How the stack was taken, in a word.
pub(super) fn method(thread: &PstackStacktrace) -> &'static str {
    match thread.capture() {
        CaptureMethod::ZeroStop => "zero_stop",
        CaptureMethod::Ptrace => "ptrace",
        CaptureMethod::KernelOnly => "kernel_only",
        CaptureMethod::Unspecified => "unspecified",
    }
}

fn python(thread: &PySpyStacktrace) -> Value {
    let frame = |frame: &xpu_timer_proto::server::PySpyFrame| json!({ "func_name": frame.func_name, "file_name": frame.file_name });
    json!({
        "thread_id": thread.thread_id,
        "thread_name": thread.thread_name,
        "os_thread_id": thread.os_thread_id,
        "active": thread.active,
        "owns_gil": thread.owns_gil,
        "frames": thread.frames.iter().map(frame).collect::<Value>(),
    })
}
