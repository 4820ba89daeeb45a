//! The dump as text for a person: one block for each thread, task and greenlet. Those with equal
//! stacks share one block.

use std::{
    collections::{HashMap, hash_map::Entry},
    io::{self, Write},
    rc::Rc,
};

use xpu_timer_proto::{
    printable::{capital, line},
    server::{CaptureMethod, PstackFrame, PstackStacktrace, PySpyFrame, PySpyStacktrace},
};

use crate::stacks::{Frame, ProcessCapture, View, merge};

const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[31m";
const CYAN: &str = "\x1b[36m";
const YELLOW: &str = "\x1b[33m";
const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// Number of thread ids that a shared block names.
const MAX_NAMED: usize = 8;
/// Maximum number of frames of a repeated run.
const MAX_RUN: usize = 64;
/// Minimum number of repetitions for a run to be folded.
const MIN_REPETITIONS: usize = 3;
/// Minimum number of lines that folding must save.
const MIN_SAVED_LINES: usize = 4;

/// Writes one process and its descendants.
pub(super) fn print(out: &mut impl Write, process: &ProcessCapture, view: View, colour: bool) -> io::Result<()> {
    let paint = Paint { colour };
    print_process(out, process, false, view, paint)?;
    for child in &process.children {
        writeln!(out)?;
        print_process(out, child, true, view, paint)?;
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Paint {
    colour: bool,
}

impl Paint {
    fn with(self, code: &str, text: impl std::fmt::Display) -> String {
        if self.colour { format!("{code}{text}{RESET}") } else { text.to_string() }
    }
}

fn print_process(
    out: &mut impl Write,
    process: &ProcessCapture,
    is_child: bool,
    view: View,
    paint: Paint,
) -> io::Result<()> {
    let sample = &process.sample;
    let parent = if is_child { format!(", child of {}", process.parent_pid) } else { String::new() };
    let command = if process.command.is_empty() { "?".into() } else { line(&process.command) };
    writeln!(out, "{}", paint.with(BOLD, format!("Process {}: {command}", process.pid)))?;
    let taken = format!("captured in {:.1} ms", sample.capture_ns as f64 / 1e6);
    let times = match (sample.stacktrace.is_empty() && sample.py_stacktrace.is_empty(), sample.longest_stop_ns) {
        (true, _) => "nothing captured".into(),
        (false, 0) => format!("{taken} without a stop"),
        (false, ns) => format!("{taken}, no thread stopped for more than {} us", ns.div_ceil(1000)),
    };
    let state = line(&sample.process_state);
    writeln!(out, "  {state}{parent}, {}, {times}", count(sample.stacktrace.len(), "thread"))?;
    if view == View::Python && sample.py_stacktrace.is_empty() && sample.errors.is_empty() {
        writeln!(out, "  no Python runs in this process")?;
    }
    for error in &sample.errors {
        writeln!(out, "  {}", paint.with(RED, line(error)))?;
    }
    let mut python: HashMap<u32, usize> = HashMap::new();
    for (index, thread) in sample.py_stacktrace.iter().enumerate() {
        python.insert(thread.os_thread_id, index);
    }
    let mut lines = Lines::new(paint);
    let mut blocks = Blocks::default();
    let mut shown = vec![false; sample.py_stacktrace.len()];
    for thread in &sample.stacktrace {
        let index = python.get(&thread.pid).copied();
        let trace = index.map(|index| &sample.py_stacktrace[index]);
        if let Some(index) = index {
            shown[index] = true;
        }
        if view == View::Python && trace.is_none() {
            continue;
        }
        let entries = index.and_then(|index| process.python_entries.get(index)).map_or(&[][..], Vec::as_slice);
        let body = body(&mut lines, thread, trace, entries, view);
        // The holder of the GIL and running threads always have a block of their own.
        let foldable = !thread.state.starts_with('R') && trace.is_none_or(|trace| !trace.owns_gil);
        blocks.add(THREAD, title(thread, trace, paint), body, foldable);
        if view != View::Native {
            trace.iter().for_each(|trace| add_suspended(&mut blocks, &mut lines, trace));
        }
    }
    for (trace, _) in sample.py_stacktrace.iter().zip(&shown).filter(|(_, shown)| !**shown) {
        let title = format!("Python thread {:#x} {}", trace.thread_id, quoted(&trace.thread_name));
        let body = trace.frames.iter().map(|frame| lines.python(frame)).collect();
        blocks.add(THREAD, format!("{title}{}", gil(trace, paint)), body, false);
        add_suspended(&mut blocks, &mut lines, trace);
    }
    write_blocks(out, &blocks.list, &lines)
}

const THREAD: &str = "thread";

/// Distinct lines of text. Thousands of frames of a process share a few dozen lines.
struct Lines<'a> {
    paint: Paint,
    texts: Vec<Rc<str>>,
    ids: HashMap<Rc<str>, LineId>,
    frames: HashMap<FrameKey<'a>, LineId>,
}

/// A key that distinguishes the lines of frames.
#[derive(PartialEq, Eq, Hash)]
enum FrameKey<'a> {
    Native { pc: u64, function: &'a str, inlined: bool },
    Python { function: &'a str, place: &'a str },
}

/// Index of a line in [`Lines`]. Equal lines have equal indices.
type LineId = usize;

impl<'a> Lines<'a> {
    fn new(paint: Paint) -> Self {
        Lines { paint, texts: Vec::new(), ids: HashMap::new(), frames: HashMap::new() }
    }

    fn add(&mut self, text: String) -> LineId {
        match self.ids.entry(text.into()) {
            Entry::Occupied(id) => *id.get(),
            Entry::Vacant(entry) => {
                self.texts.push(Rc::clone(entry.key()));
                *entry.insert(self.texts.len() - 1)
            }
        }
    }

    fn heading(&mut self, text: &str) -> LineId {
        self.add(format!("  {}", self.paint.with(DIM, line(text))))
    }

    fn native(&mut self, frame: &'a PstackFrame) -> LineId {
        let key = FrameKey::Native { pc: frame.pc, function: &frame.func_name, inlined: frame.inlined };
        self.of_frame(key, |paint| native_line(frame, paint))
    }

    fn python(&mut self, frame: &'a PySpyFrame) -> LineId {
        let key = FrameKey::Python { function: &frame.func_name, place: &frame.file_name };
        self.of_frame(key, |paint| python_line(frame, paint))
    }

    fn of_frame(&mut self, key: FrameKey<'a>, render: impl FnOnce(Paint) -> String) -> LineId {
        if let Some(id) = self.frames.get(&key) {
            return *id;
        }
        let id = self.add(render(self.paint));
        self.frames.insert(key, id);
        id
    }
}

/// One stack, and the titles of the threads, tasks or greenlets that have it.
struct Block {
    noun: &'static str,
    body: Vec<LineId>,
    titles: Vec<String>,
}

/// Distinct blocks, in the order of their first titles.
#[derive(Default)]
struct Blocks {
    list: Vec<Block>,
    indices: HashMap<(&'static str, Vec<LineId>), usize>,
}

impl Blocks {
    fn add(&mut self, noun: &'static str, title: String, body: Vec<LineId>, foldable: bool) {
        if foldable {
            match self.indices.entry((noun, body.clone())) {
                Entry::Occupied(index) => return self.list[*index.get()].titles.push(title),
                Entry::Vacant(index) => drop(index.insert(self.list.len())),
            }
        }
        self.list.push(Block { noun, body, titles: vec![title] });
    }
}

/// Adds the tasks and greenlets of a thread that wait.
fn add_suspended<'a>(blocks: &mut Blocks, lines: &mut Lines<'a>, trace: &'a PySpyStacktrace) {
    for suspended in &trace.suspended {
        let noun = suspended.kind().noun();
        let awaits =
            if suspended.awaits.is_empty() { String::new() } else { format!(" awaits {}", line(&suspended.awaits)) };
        let title = format!("{} {} of {}{awaits}", capital(noun), quoted(&suspended.name), quoted(&trace.thread_name));
        let body: Vec<LineId> = suspended.frames.iter().map(|frame| lines.python(frame)).collect();
        let body = fold(&body, lines);
        blocks.add(noun, title, body, true);
    }
}

/// Writes blocks, each with its titles.
fn write_blocks(out: &mut impl Write, blocks: &[Block], lines: &Lines<'_>) -> io::Result<()> {
    let paint = lines.paint;
    for Block { noun, body, titles } in blocks {
        writeln!(out)?;
        match titles.as_slice() {
            [title] => writeln!(out, "{}", paint.with(BOLD, title))?,
            titles => {
                writeln!(out, "{}", paint.with(BOLD, format!("{} with the same stack", count(titles.len(), noun))))?;
                for title in titles.iter().take(MAX_NAMED) {
                    writeln!(out, "  {title}")?;
                }
                if titles.len() > MAX_NAMED {
                    writeln!(out, "  and {} more", titles.len() - MAX_NAMED)?;
                }
            }
        }
        for line in body {
            writeln!(out, "{}", lines.texts[*line])?;
        }
    }
    Ok(())
}

fn title(thread: &PstackStacktrace, trace: Option<&PySpyStacktrace>, paint: Paint) -> String {
    let name = trace.map_or("", |trace| trace.thread_name.as_str());
    let comm = &thread.thread_name;
    let name =
        if name.is_empty() || name == comm { quoted(comm) } else { format!("{} ({})", quoted(name), line(comm)) };
    let place = if thread.wchan.is_empty() { String::new() } else { format!(" in {}", line(&thread.wchan)) };
    let taken = match thread.capture() {
        CaptureMethod::Ptrace => ", stopped to look",
        CaptureMethod::PerfSample => ", sampled while running, without a stop",
        CaptureMethod::Unspecified | CaptureMethod::ZeroStop | CaptureMethod::KernelOnly => "",
    };
    format!(
        "Thread {} {name} {}{place}{taken}{}",
        thread.pid,
        line(&thread.state),
        trace.map_or(String::new(), |trace| gil(trace, paint))
    )
}

fn gil(trace: &PySpyStacktrace, paint: Paint) -> String {
    let state = match (trace.owns_gil, trace.collects_garbage) {
        (true, true) => "holds the GIL and collects garbage",
        (true, false) => "holds the GIL",
        (false, _) => return String::new(),
    };
    format!(" {}", paint.with(YELLOW, state))
}

fn body<'a>(
    lines: &mut Lines<'a>,
    thread: &'a PstackStacktrace,
    trace: Option<&'a PySpyStacktrace>,
    entries: &[bool],
    view: View,
) -> Vec<LineId> {
    let paint = lines.paint;
    let python = trace.map_or(&[][..], |trace| trace.frames.as_slice());
    if view == View::Python {
        let body: Vec<LineId> = python.iter().map(|frame| lines.python(frame)).collect();
        let mut body = fold(&body, lines);
        body.extend(doubt(trace, paint).map(|text| lines.add(text)));
        return body;
    }
    let mut body: Vec<LineId> = Vec::with_capacity(thread.frames.len());
    if view == View::Native || python.is_empty() {
        body.extend(thread.frames.iter().map(|frame| lines.native(frame)));
    } else {
        match merge(&thread.frames, python, entries) {
            Ok(merged) => body.extend(merged.iter().map(|frame| match frame {
                Frame::Native(frame) => lines.native(frame),
                Frame::Python(frame) => lines.python(frame),
            })),
            Err(mismatch) => {
                body.push(lines.heading(&format!("two stacks, not merged: {mismatch}")));
                body.push(lines.heading("Python:"));
                body.extend(python.iter().map(|frame| lines.python(frame)));
                body.push(lines.heading("native:"));
                body.extend(thread.frames.iter().map(|frame| lines.native(frame)));
            }
        }
    }
    let mut body = fold(&body, lines);
    if view == View::Merged {
        body.extend(doubt(trace, paint).map(|text| lines.add(text)));
    }
    if !thread.incomplete.is_empty() {
        let text = format!("incomplete: {}", line(&thread.incomplete));
        body.push(lines.add(format!("    {}", paint.with(RED, text))));
    }
    if thread.capture() == CaptureMethod::KernelOnly || thread.frames.is_empty() {
        let functions = thread.kernel_stack.iter();
        body.extend(functions.map(|function| lines.add(format!("    {} [kernel]", line(function)))));
    }
    body
}

/// Why a Python stack may be wrong.
fn doubt(trace: Option<&PySpyStacktrace>, paint: Paint) -> Option<String> {
    let trace = trace.filter(|trace| !trace.incomplete.is_empty())?;
    Some(format!("    {}", paint.with(RED, format!("Python stack: {}", line(&trace.incomplete)))))
}

/// Folds recursion, which repeats the same frames hundreds of times: a repeated run is printed
/// once, with the number of repetitions.
fn fold(body: &[LineId], lines: &mut Lines<'_>) -> Vec<LineId> {
    let mut folded = Vec::with_capacity(body.len());
    let mut at = 0;
    while at < body.len() {
        let rest = &body[at..];
        // How often the run of this length repeats at this position.
        let times = |length: usize| rest.chunks_exact(length).take_while(|chunk| *chunk == &rest[..length]).count();
        let longest = MAX_RUN.min(rest.len() / MIN_REPETITIONS);
        let runs = (1..=longest).map(|length| (length, times(length))).filter(|(_, times)| *times >= MIN_REPETITIONS);
        // The run that hides the most lines; among equals, the shortest.
        let best = runs.max_by_key(|(length, times)| (length * (times - 1), std::cmp::Reverse(*length)));
        let (length, times) = best.filter(|(length, times)| length * (times - 1) >= MIN_SAVED_LINES).unwrap_or((1, 1));
        folded.extend_from_slice(&rest[..length]);
        if times > 1 {
            let what = if length == 1 { "frame".into() } else { format!("{length} frames") };
            let more = format!("... the {what} above {} more times", times - 1);
            folded.push(lines.add(format!("    {}", lines.paint.with(DIM, more))));
        }
        at += length * times;
    }
    folded
}

fn native_line(frame: &PstackFrame, paint: Paint) -> String {
    let inlined = if frame.inlined { " [inlined]" } else { "" };
    let file = frame.module.rsplit('/').next().unwrap_or_default();
    // Without a line, the name of the object is enough. Its address lets people with the symbols
    // find the function.
    let (name, place) = match (frame.func_name.as_str(), frame.file_name == frame.module) {
        ("??", true) if frame.module_address != 0 => (&*format!("?? {file}+{:#x}", frame.module_address), ""),
        ("??", _) => (&*format!("?? {:#x}", frame.pc), frame.file_name.as_str()),
        (name, true) => (name, file),
        (name, false) => (name, frame.file_name.as_str()),
    };
    let line = format!("    {}{} {}", line(name), paint.with(DIM, inlined), paint.with(DIM, line(place)));
    line.trim_end().to_string()
}

/// Marked, because people look for their own code first.
fn python_line(frame: &PySpyFrame, paint: Paint) -> String {
    format!("  {} {} {}", paint.with(CYAN, ">"), paint.with(CYAN, line(&frame.func_name)), line(&frame.file_name))
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", line(name))
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fold_text(text: &str) -> String {
        let mut lines = Lines::new(Paint { colour: false });
        let body: Vec<LineId> = text.split(' ').map(|line| lines.add(line.to_owned())).collect();
        fold(&body, &mut lines).iter().map(|line| lines.texts[*line].trim()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn folds_recursion() {
        assert_eq!(fold_text("a b b b b b c"), "a b ... the frame above 4 more times c");
        assert_eq!(fold_text("x a b a b a b a y"), "x a b ... the 2 frames above 2 more times a y");
        assert_eq!(fold_text("a a a b a b c"), "a a a b a b c", "too little to be worth it");
        assert_eq!(fold_text("a b c d"), "a b c d");
        let deep = vec!["f"; 5000].join(" ");
        assert_eq!(fold_text(&deep), "f ... the frame above 4999 more times");
    }

    #[test]
    fn formats_native_frames() {
        let paint = Paint { colour: false };
        let mut frame = PstackFrame {
            func_name: "poll".into(),
            file_name: "/lib/libc.so.6".into(),
            module: "/lib/libc.so.6".into(),
            pc: 0x7f12,
            module_address: 0x12,
            ..PstackFrame::default()
        };
        assert_eq!(native_line(&frame, paint), "    poll libc.so.6");
        frame.file_name = "/src/poll.c:7".into();
        assert_eq!(native_line(&frame, paint), "    poll /src/poll.c:7");
        frame.file_name = frame.module.clone();
        frame.func_name = "??".into();
        assert_eq!(native_line(&frame, paint), "    ?? libc.so.6+0x12");
        frame.module = String::new();
        frame.file_name = "??".into();
        assert_eq!(native_line(&frame, paint), "    ?? 0x7f12 ??");
    }
}
