//! Why a process failed: the last traceback or line that it wrote to its standard error, the error
//! file of torchelastic, the exceptions that its threads are handling, and its fatal signal. All of
//! that is read from outside. Where the hook listens to uncaught exceptions, the last of those.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::Value;
use tracing::{info, warn};
use xpu_timer_analysis::{Exit, native_place, own_place};
use xpu_timer_capture::{Capturer, ProcessCapture};
use xpu_timer_proto::{
    file, printable,
    ring::{self, fault, offset, stderr},
    secrets,
    server::{PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace},
    v1::{Failure, FailureKind},
};

use crate::os::{clock::Now, process::Handle, ring_file::RingFile};

/// A fatal signal of a process.
#[derive(Debug, Clone)]
pub struct Fault {
    failure: Failure,
    /// The thread that received it, at the signal.
    native: Option<PstackStacktrace>,
    python: Option<PySpyStacktrace>,
}

/// The fatal signal of a process, once its stack is known. The registry and running dumps share it.
pub type SharedFault = Arc<Mutex<Option<Fault>>>;

/// Maximum length of one text of a failure, in bytes.
pub const MOST_TEXT: usize = 400;
/// Maximum number of frames of an exception or a signal.
const MOST_FRAMES: usize = 64;
/// Time limit to read an error file, which may be on a network file system.
const FILE_DEADLINE: Duration = Duration::from_millis(200);
/// Maximum number of exceptions of one process that are being handled.
const MOST_HANDLED: usize = 8;

/// If a process writes within this time after an uncaught exception, the text reports that
/// exception.
const REPORT_NS: u64 = 1_000_000_000;

/// How the lines begin that PyTorch adds to the text of an error of CUDA.
const CUDA_ADVICE: [&str; 5] = [
    "Search for `cuda",
    "CUDA kernel errors might be asynchronously reported",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertion tracking was not enabled",
];

/// A traceback as Python prints it.
#[derive(Debug, Clone, PartialEq)]
struct Traceback {
    failure: Failure,
    /// Whether no other text follows.
    ends_text: bool,
}

/// The known failures of a process that has a ring or had one.
#[must_use]
pub fn of_process(ring: Option<&RingFile>, process: Option<&Handle>, exit: &str, fault: &SharedFault) -> Vec<Failure> {
    let mut found: Vec<Failure> = lock(fault).iter().map(|fault| fault.failure.clone()).collect();
    let error_file = process.and_then(|process| process.error_file.as_deref());
    found.extend(error_file.and_then(stored));
    let now_ns = Now::get().mono_ns;
    let text = |entry: usize| {
        let ring = ring?;
        let last = ring::read_last_text(|offset, buffer| ring.read_at(offset, buffer), entry).ok()??;
        Some((String::from_utf8_lossy(&last.text).into_owned(), now_ns.saturating_sub(last.last_ns)))
    };
    let own = text(stderr::OWN);
    let mut uncaught =
        text(stderr::UNCAUGHT).and_then(|(text, age_ns)| of_text(&text, age_ns, Exit::Unknown, &found).pop());
    uncaught = uncaught.filter(|failure| own.as_ref().is_none_or(|(text, _)| !is_in(failure, text)));
    if let Some((text, age_ns)) = own {
        let is_report = |end: &Failure| end.thread.is_empty() && end.age_ns <= age_ns.saturating_add(REPORT_NS);
        let exit = if uncaught.as_ref().is_some_and(is_report) { Exit::Unknown } else { Exit::of(exit) };
        found.extend(of_text(&text, age_ns, exit, &found));
    }
    // The text before may be about an exception that the process survived.
    drop(found.splice(..0, uncaught));
    if let Some((text, age_ns)) = text(stderr::CHILDREN)
        && let Some(Traceback { failure, .. }) = last_traceback(&text)
    {
        let thread = match failure.thread.as_str() {
            "" => "a child process".into(),
            thread => format!("{thread} of a child process"),
        };
        found.push(Failure { thread, age_ns, ..failure });
    }
    found
}

/// The failures that the last text of a process shows, besides the known ones.
#[must_use]
pub fn of_text(text: &str, age_ns: u64, exit: Exit<'_>, known: &[Failure]) -> Vec<Failure> {
    let mut found = Vec::new();
    let traceback = last_traceback(text);
    let ends_text = traceback.as_ref().is_some_and(|traceback| traceback.ends_text);
    if let Some(Traceback { failure, .. }) = traceback {
        let is_same = |other: &&Failure| (&other.r#type, &other.message) == (&failure.r#type, &failure.message);
        if !known.iter().any(|other| is_same(&other)) {
            found.push(Failure { age_ns, ..failure });
        }
    }
    if exit.failed()
        && !ends_text
        && let Some(line) = text.lines().rev().map(plain).find(|line| !line.trim().is_empty())
    {
        let message = shown(line.trim());
        found.push(Failure { kind: FailureKind::LastLine.into(), message, age_ns, ..Default::default() });
    }
    found
}

/// Whether a text has the line of an exception. It then shows at least as much of it.
fn is_in(failure: &Failure, text: &str) -> bool {
    let Failure { r#type, message, .. } = failure;
    let line = if message.is_empty() { r#type.clone() } else { format!("{}: {message}", r#type) };
    text.lines().any(|one| one.contains(&line))
}

/// A text without its secrets, on one line.
fn shown(text: &str) -> String {
    printable::shortened(&printable::line(&secrets::text(text)), MOST_TEXT)
}

/// A line without what PyTorch and terminals put before it: `[rank3]: `, colours, and the bars of
/// an exception group.
fn plain(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        text.push_str(before);
        rest = after.split_once('m').map_or("", |(_, behind)| behind);
    }
    text.push_str(rest);
    if let Some((_, behind)) = rank_mark(&text) {
        text = behind.strip_prefix(' ').unwrap_or(behind).into();
    }
    let bar = text.trim_start();
    match bar.strip_prefix("| ").or_else(|| bar.strip_prefix("+ ")) {
        Some(inside) => inside.into(),
        None => text,
    }
}

/// The rank and the rest of a line that begins as PyTorch's `excepthook` marks each line of an
/// exception: `[rank3]: `.
fn rank_mark(line: &str) -> Option<(&str, &str)> {
    let (rank, behind) = line.strip_prefix("[rank")?.split_once("]:")?;
    rank.bytes().all(|digit| digit.is_ascii_digit()).then_some((rank, behind))
}

/// Parses the last traceback of a text. In a chain of exceptions, that is the one that was raised
/// last; of an exception of a loader's worker, the one of the worker.
fn last_traceback(text: &str) -> Option<Traceback> {
    const HEADER: &str = "Traceback (most recent call last):";
    let lines: Vec<String> = text.lines().map(plain).collect();
    let header = lines.iter().rposition(|line| line.trim_end().ends_with(HEADER))?;
    let mut frames = Vec::new();
    let mut index = header + 1;
    while let Some(line) = lines.get(index).filter(|line| line.starts_with("  ") || line.trim().is_empty()) {
        frames.extend(frame(line));
        index += 1;
    }
    let line = lines.get(index)?.trim_end();
    let (kind, message) = line.split_once(": ").unwrap_or((line.strip_suffix(':').unwrap_or(line), ""));
    let is_class = |name: &str| {
        !name.is_empty()
            && name.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '_' | '.' | '<' | '>'))
    };
    if !is_class(kind) {
        return None;
    }
    index += 1;
    // The text may begin on the next line.
    let next = lines.get(index).filter(|_| message.is_empty() && line.ends_with(':'));
    let message = next.map_or(message, |next| next.trim());
    // In a text of several lines, only the lines are known that PyTorch marks or that it adds to
    // each error of CUDA. Nothing separates the others from the following output. PyTorch's log has
    // the rank, too, but no space behind it: `[rank1]:[W1127 …`.
    let mark = |line| rank_mark(line).filter(|(_, behind)| behind.starts_with(' ')).map(|(rank, _)| rank);
    let marks: Vec<Option<&str>> = text.lines().map(mark).collect();
    let mark = marks[index - 1];
    let belongs = |at: usize| {
        mark.is_some() && marks[at] == mark || CUDA_ADVICE.iter().any(|advice| lines[at].starts_with(advice))
    };
    let rest = (index..lines.len()).skip_while(|at| belongs(*at)).any(|at| !lines[at].trim().is_empty());
    let (thread, ignored) = before(&lines[..header]);
    let kind = if kind.contains('.') { kind.rsplit("__main__.").next().unwrap_or(kind) } else { kind };
    Some(Traceback {
        failure: exception(FailureKind::Exception, kind, message, frames, thread, ignored),
        ends_text: !rest,
    })
}

/// The thread and whether Python ignores the exception, from the lines before a traceback.
fn before(lines: &[String]) -> (String, bool) {
    let Some(line) = lines.iter().rev().find(|line| !line.trim().is_empty()) else { return (String::new(), false) };
    let line = line.trim_end().trim_end_matches(':');
    if let Some(thread) = line.strip_prefix("Exception in thread ") {
        return (format!("thread {}", shown(thread)), false);
    }
    if let Some(process) = line.strip_prefix("Process ").filter(|name| !name.contains(' ')) {
        return (format!("process {}", shown(process)), false);
    }
    (String::new(), line.starts_with("Exception ignored"))
}

/// A line `  File "train.py", line 33, in step` of a traceback.
fn frame(line: &str) -> Option<PySpyFrame> {
    let (file, rest) = line.trim_start().strip_prefix("File \"")?.split_once("\", line ")?;
    let (number, function) = rest.split_once(", in ").unwrap_or((rest, "<module>"));
    let number: u32 = number.trim().parse().ok()?;
    Some(PySpyFrame {
        file_name: format!("{file}:{number}"),
        func_name: function.trim_end().into(),
        ..Default::default()
    })
}

/// An exception with these frames, outermost first.
fn exception(
    kind: FailureKind,
    class: &str,
    message: &str,
    mut frames: Vec<PySpyFrame>,
    thread: String,
    ignored: bool,
) -> Failure {
    let place = {
        frames.reverse();
        own_place(&frames).map(|place| shown(&place)).unwrap_or_default()
    };
    let text = |frame: &PySpyFrame| shown(&format!("{} in {}", frame.file_name, frame.func_name));
    let mut texts: Vec<String> = frames.iter().take(MOST_FRAMES).map(text).collect();
    texts.reverse();
    let (r#type, message) = (shown(class), shown(message));
    Failure { kind: kind.into(), r#type, message, place, thread, frames: texts, ignored, ..Default::default() }
}

/// The exception in an error file of torchelastic.
fn stored(path: &Path) -> Option<Failure> {
    let path = path.to_owned();
    let bytes = file::within(FILE_DEADLINE, move || file::read(&path).ok()).ok()??;
    of_error_file(&bytes)
}

/// The exception in the contents of an error file of torchelastic. `None` if they name none.
#[must_use]
pub fn of_error_file(bytes: &[u8]) -> Option<Failure> {
    let error: Value = serde_json::from_slice(bytes).ok()?;
    let message = &error["message"];
    if let Some(stack) = message["extraInfo"]["py_callstack"].as_str()
        && let Some(Traceback { failure, .. }) = last_traceback(stack)
    {
        return Some(failure);
    }
    let text = message["message"].as_str().or_else(|| message.as_str())?;
    let (class, text) = text.split_once(": ").unwrap_or((text, ""));
    Some(exception(FailureKind::Exception, class, text, Vec::new(), String::new(), false))
}

/// The exceptions that the threads of a dump are handling.
#[must_use]
pub fn handled(threads: &[PySpyStacktrace]) -> Vec<Failure> {
    let all = threads.iter().flat_map(|thread| {
        let name =
            if thread.pid == thread.os_thread_id { String::new() } else { format!("thread {}", thread.thread_name) };
        thread.exceptions.iter().map(move |one| (name.clone(), one))
    });
    all.take(MOST_HANDLED)
        .map(|(thread, one)| {
            let frames = one.frames.iter().rev().cloned().collect();
            exception(FailureKind::Handled, &one.r#type, &one.message, frames, thread, false)
        })
        .collect()
}

/// Reads the stack of a thread that has received a fatal signal and waits. Blocks for as long as
/// the capture takes; the thread waits only until its stack is unwound.
#[must_use]
pub fn read_fault(ring: &RingFile, process: &Handle) -> Option<Fault> {
    let fault = ring::read_fault(|offset, buffer| ring.read_at(offset, buffer)).ok()??;
    let answer = || {
        if let Err(error) = ring.write(offset::FAULT / 8 + fault::READ, fault.count) {
            warn!("pid {}: its ring cannot be written: {error}", process.pid);
        }
    };
    let captured = Capturer::new().capture_fault(process.pid, fault.tid, fault.signal, &fault.registers, answer);
    let (mut captured, reason) = captured;
    let failure = of_signal(&fault, &captured, reason);
    info!("pid {} received {}{}", process.pid, failure.r#type, at(&failure.place));
    let (mut native, python) = (captured.sample.stacktrace.pop(), captured.sample.py_stacktrace.pop());
    native.iter_mut().for_each(|thread| thread.state = format!("received {}", failure.r#type));
    Some(Fault { failure, native, python })
}

/// The native and the Python stack of the thread that received the fatal signal of a process, at
/// the signal.
#[must_use]
pub fn fault_stacks(shared: &SharedFault) -> (Option<PstackStacktrace>, Option<PySpyStacktrace>) {
    lock(shared).as_ref().map(|fault| (fault.native.clone(), fault.python.clone())).unwrap_or_default()
}

fn of_signal(fault: &ring::Fault, captured: &ProcessCapture, reason: Option<String>) -> Failure {
    let name =
        Signal::try_from(fault.signal).map_or_else(|_| format!("signal {}", fault.signal), |s| s.as_str().into());
    let thread = captured.sample.stacktrace.first();
    let frames: Vec<String> = thread
        .iter()
        .flat_map(|thread| &thread.frames)
        .take(MOST_FRAMES)
        .map(|frame| shown(&format!("{} ({})", frame.func_name, frame.file_name)))
        .collect();
    let native = thread.and_then(|thread| native_place(&thread.frames));
    let python = captured.sample.py_stacktrace.first().and_then(|thread| own_place(&thread.frames));
    let place = match (native, python) {
        (Some(native), Some(python)) => format!("{native}, called at {python}"),
        (native, python) => native.or(python).unwrap_or_default(),
    };
    let is_address = matches!(fault.signal, libc::SIGSEGV | libc::SIGBUS) && fault.code > 0;
    let message = match reason {
        Some(reason) => shown(&reason),
        None if is_address => format!("at address {:#x}", fault.address),
        None => String::new(),
    };
    let incomplete = thread.map(|thread| thread.incomplete.clone()).unwrap_or_default();
    let problem = captured.sample.errors.first().cloned().unwrap_or(incomplete);
    if frames.is_empty() {
        warn!("the stack at the {name} of pid {} is not known: {problem}", captured.pid);
    }
    let numbers = |number: fn(&PstackFrame) -> u64| -> Vec<u64> {
        thread.iter().flat_map(|thread| &thread.frames).take(MOST_FRAMES).map(number).collect()
    };
    let (addresses, offsets) = (numbers(|frame| frame.pc), numbers(|frame| frame.module_address));
    let main = thread.is_none_or(|thread| i32::try_from(thread.pid).is_ok_and(|tid| tid == captured.pid));
    let thread = thread.filter(|_| !main).map(|thread| format!("thread {}", thread.thread_name)).unwrap_or_default();
    Failure {
        kind: FailureKind::Signal.into(),
        r#type: name,
        message,
        place: shown(&place),
        thread,
        frames,
        addresses,
        offsets,
        ..Default::default()
    }
}

/// Whether the stack at a fatal signal is still in work.
#[must_use]
pub fn awaits_fault(ring: &RingFile, shared: &SharedFault) -> bool {
    let has_fault = ring::read_fault(|offset, buffer| ring.read_at(offset, buffer)).is_ok_and(|fault| fault.is_some());
    has_fault && lock(shared).is_none()
}

/// A failure on one line, for the log.
#[must_use]
pub fn summary(failure: &Failure) -> String {
    let Failure { r#type, message, place, thread, .. } = failure;
    let parts = [r#type, message, place, thread].into_iter().filter(|part| !part.is_empty());
    parts.map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// ` in PLACE`; empty without a place.
fn at(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(" in {place}") }
}

/// Stores the fatal signal of a process.
pub fn store(shared: &SharedFault, fault: Fault) {
    *lock(shared) = Some(fault);
}

fn lock(shared: &SharedFault) -> std::sync::MutexGuard<'_, Option<Fault>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traceback(text: &str) -> (String, String, String, String, bool) {
        let Traceback { failure, ends_text } = last_traceback(text).unwrap_or_else(|| panic!("a traceback: {text}"));
        (failure.r#type, failure.message, failure.place, failure.thread, ends_text)
    }

    const PLAIN: &str = "epoch 1\nTraceback (most recent call last):\n  File \"/job/train.py\", line 70, in <module>\n    main()\n    ~~~~^^\n  File \"/job/train.py\", line 33, in step\n    raise ValueError(\"bad batch\")\nValueError: bad batch\n";

    #[test]
    fn a_traceback_has_its_class_text_and_innermost_own_frame() {
        let expected = |thread: &str, ends| {
            (
                "ValueError".to_string(),
                "bad batch".to_string(),
                "train.py:33 in step".to_string(),
                thread.to_string(),
                ends,
            )
        };
        assert_eq!(traceback(PLAIN), expected("", true));
        let ranked: String = PLAIN.lines().map(|line| format!("[rank3]: {line}\n")).collect();
        assert_eq!(traceback(&ranked), expected("", true));
        let coloured = PLAIN.replace("ValueError:", "\u{1b}[1;35mValueError\u{1b}[0m:");
        assert_eq!(traceback(&coloured), expected("", true));
        let threaded = PLAIN.replace("epoch 1", "Exception in thread Thread-1 (work):") + "later\n";
        assert_eq!(traceback(&threaded), expected("thread Thread-1 (work)", false));
        let chained = format!(
            "{}\nDuring handling of the above exception, another exception occurred:\n\n{PLAIN}",
            PLAIN.replace("bad", "first")
        );
        assert_eq!(traceback(&chained), expected("", true));
    }

    #[test]
    fn the_exception_of_a_worker_is_that_of_its_own_traceback() {
        let text = "Traceback (most recent call last):\n  File \"t.py\", line 9, in <module>\n    for x in loader:\n  File \"/opt/venv/lib/python3.11/site-packages/torch/_utils.py\", line 700, in reraise\n    raise exception\nKeyError: Caught KeyError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  File \"/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py\", line 350, in _worker_loop\n    data = fetcher.fetch(index)\n  File \"/job/data.py\", line 12, in __getitem__\n    return self.table[index]\nKeyError: 17\n";
        let found = traceback(text);
        assert_eq!(
            (found.0.as_str(), found.1.as_str(), found.2.as_str()),
            ("KeyError", "17", "data.py:12 in __getitem__")
        );
    }

    #[test]
    fn texts_that_are_not_a_traceback_give_the_last_line_of_a_failed_process() {
        let of = |text: &str, exit: &str| {
            let found = of_text(text, 5, Exit::of(exit), &[]);
            found.into_iter().map(|one| (one.kind(), one.r#type, one.message)).collect::<Vec<_>>()
        };
        let line = |text: &str| (FailureKind::LastLine, String::new(), text.to_string());
        assert_eq!(of("loading\nno data\n\n", "exit code 1"), [line("no data")]);
        assert_eq!(of("loading\nno data\n", "exit code 0"), []);
        let error = (FailureKind::Exception, "ValueError".to_string(), "bad batch".to_string());
        assert_eq!(of(PLAIN, "exit code 1"), std::slice::from_ref(&error));
        assert_eq!(of(&format!("{PLAIN}giving up\n"), "exit code 3"), [error.clone(), line("giving up")]);
        assert_eq!(of(PLAIN, ""), [error]);
        let interrupted = "Traceback (most recent call last):\n  File \"t.py\", line 1, in <module>\n    sleep()\nKeyboardInterrupt\n";
        assert_eq!(
            of(interrupted, "exit code 130"),
            [(FailureKind::Exception, "KeyboardInterrupt".to_string(), String::new())]
        );
        assert_eq!(of("Traceback (most recent call last):\n  File \"t", "exit code 1").len(), 1, "cut");

        let several = PLAIN.replace(
            "ValueError: bad batch\n",
            "torch.AcceleratorError: CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in the documentation.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n",
        );
        let error = (
            FailureKind::Exception,
            "torch.AcceleratorError".to_string(),
            "CUDA error: device-side assert triggered".to_string(),
        );
        assert_eq!(of(&several, "exit code 1"), std::slice::from_ref(&error));
        let marked: String = several.lines().map(|line| format!("[rank1]: {line}\n")).collect();
        let marked = marked.replace("For debugging", "More that nobody knows\n[rank1]: For debugging");
        assert_eq!(of(&marked, "exit code 1"), std::slice::from_ref(&error));
        let warned = format!("{marked}[rank1]:[W1127 12:29:30] Warning: the group was not destroyed\n");
        let warning = "[W1127 12:29:30] Warning: the group was not destroyed";
        assert_eq!(of(&warned, "exit code 1"), [error, line(warning)]);
    }

    #[test]
    fn an_error_file_of_torchelastic_has_the_exception() {
        let file = serde_json::json!({ "message": { "message": "ValueError: bad batch", "extraInfo": { "py_callstack": PLAIN, "timestamp": "1" } } });
        let found = of_error_file(file.to_string().as_bytes()).unwrap();
        assert_eq!((found.r#type.as_str(), found.place.as_str()), ("ValueError", "train.py:33 in step"));
        let found = of_error_file(br#"{"message": "RuntimeError: lost"}"#).unwrap();
        assert_eq!((found.r#type.as_str(), found.message.as_str()), ("RuntimeError", "lost"));
        assert_eq!(of_error_file(b"{"), None);
    }

    #[test]
    fn secrets_are_hidden() {
        let found = last_traceback(
            "Traceback (most recent call last):\n  File \"t.py\", line 1, in f\nIOError: https://me:hunter2@host failed\n",
        );
        assert!(!found.unwrap().failure.message.contains("hunter2"));
    }
}
