//! Stack capture against programs whose stacks are known, and against processes in every kind of
//! trouble. Here are the program whose stacks are known, built in several ways, and what the tests
//! ask of a capture of it.

mod builds;
mod debug_files;
mod eintr;
mod layouts;
mod native;
pub mod python;
mod python_kinds;
mod stuck;
mod troubled_processes;
mod unusual_targets;

use std::{path::PathBuf, process::Command, sync::OnceLock, time::Duration};

use xpu_timer_capture::{Capturer, Options, ProcessCapture};
use xpu_timer_proto::server::{ProcessSample, PstackStacktrace};
use xpu_timer_tests::{PATIENCE, Process, compile_c, wait_until};

/// The frames above the leaf in every mode without a detour.
pub const LEVELS: [&str; 3] = ["level_three", "level_two", "level_one"];

/// Builds the program once with these arguments to gcc.
fn build(name: &'static str, arguments: &[&str]) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("xpu_timer_capture_{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the program");
    compile_c(&folder, name, include_str!("capture/target.c"), &[arguments, &["-pthread", "-fno-ipa-icf"]].concat())
}

/// `-O2` without frame pointers: what distributions ship.
pub fn optimized() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("target_o2", &["-O2", "-fomit-frame-pointer", "-g"])).clone()
}

/// `-O0`: every frame is found through rbp, which no system call reports.
pub fn unoptimized() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("target_o0", &["-O0", "-g"])).clone()
}

/// Without `.symtab`, without lines, with names in `.dynsym` only where they are exported.
pub fn stripped() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("target_stripped", &["-O2", "-fomit-frame-pointer", "-s"])).clone()
}

/// No unwind tables at all for the program's own code: frame pointers have to do.
pub fn without_tables() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let arguments = [
        "-O1",
        "-fno-omit-frame-pointer",
        "-fno-asynchronous-unwind-tables",
        "-fno-unwind-tables",
        "-fno-optimize-sibling-calls",
    ];
    BUILT.get_or_init(|| build("target_fp", &arguments)).clone()
}

/// Starts the program and waits until it reports that it is ready.
pub fn start(program: &PathBuf, arguments: &[&str]) -> Process {
    let mut process = Process::spawn(Command::new(program).args(arguments));
    process.wait_for("ready", PATIENCE);
    process
}

/// Captures one process with the default options.
pub fn capture(pid: i32) -> ProcessCapture {
    capture_with(pid, &Options { deadline: PATIENCE, ..Options::default() })
}

/// Captures one process.
pub fn capture_with(pid: i32, options: &Options) -> ProcessCapture {
    let mut captured = Capturer::new().capture(&[pid], options);
    assert_eq!(captured.len(), 1, "one entry for each pid");
    captured.remove(0)
}

/// Captures until the sample is as it has to be: a program that says that it is ready still has to
/// reach its last call.
#[track_caller]
pub fn capture_until(pid: i32, what: &str, good: impl Fn(&ProcessSample) -> bool) -> ProcessCapture {
    let mut capturer = Capturer::new();
    let mut last = None;
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        wait_until(SOON, what, || {
            let options = Options { deadline: PATIENCE, children: true, ..Options::default() };
            let captured = capturer.capture(&[pid], &options).remove(0);
            let is_good = good(&captured.sample);
            last = Some(captured);
            is_good
        });
    }));
    let last = last.expect("captured at least once");
    assert!(result.is_ok(), "not captured: {what}\n{}", describe(&last.sample));
    last
}

/// Function names of a thread, leaf first.
pub fn names(thread: &PstackStacktrace) -> Vec<&str> {
    thread.frames.iter().map(|frame| frame.func_name.as_str()).collect()
}

/// Whether the names of a thread contain `wanted` in this order and without gaps.
pub fn has_run(thread: &PstackStacktrace, wanted: &[&str]) -> bool {
    names(thread).windows(wanted.len()).any(|run| run == wanted)
}

/// Like [`has_run`], but the thread must also sleep. On a busy machine, a thread may have these
/// frames before it is inside the system call.
pub fn sleeps_in(thread: &PstackStacktrace, wanted: &[&str]) -> bool {
    thread.state.starts_with('S') && has_run(thread, wanted)
}

/// The thread with this id.
pub fn thread(sample: &ProcessSample, tid: i32) -> &PstackStacktrace {
    let found = sample.stacktrace.iter().find(|thread| thread.pid == tid as u32);
    found.unwrap_or_else(|| panic!("no thread {tid}\n{}", describe(sample)))
}

/// A sample in the message of a failed test.
pub fn describe(sample: &ProcessSample) -> String {
    let mut text = format!("state {}, errors {:?}\n", sample.process_state, sample.errors);
    for thread in &sample.stacktrace {
        text += &format!(
            "thread {} {:?} {} {:?} incomplete {:?}\n",
            thread.pid,
            thread.thread_name,
            thread.state,
            thread.capture(),
            thread.incomplete
        );
        for frame in thread.frames.iter().take(50) {
            text += &format!("  {}\n", frame.origin);
        }
    }
    for thread in &sample.py_stacktrace {
        text += &format!("Python {} {:?} tid {}\n", thread.thread_id, thread.thread_name, thread.os_thread_id);
        for frame in thread.frames.iter().take(50) {
            text += &format!("  {} {}\n", frame.func_name, frame.file_name);
        }
    }
    text
}

/// A deadline that is long for a machine under load, and far too long for one thread that does not
/// answer.
pub const SOON: Duration = Duration::from_secs(20);
