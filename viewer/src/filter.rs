//! Selects some ranks, some threads, or the stacks that contain a text.

use crate::dump::{Child, Dump, Frame, Suspended, Thread, Threads};
use crate::folder::DumpFile;
use crate::merge::main_threads;
use std::collections::HashSet;
use std::ops::Range;
use xpu_timer_analysis::main_thread;
use xpu_timer_analysis::rank_set::RankSet;

/// Options that select ranks, threads and stacks. The default selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Filters (the summary then shows stacks; only the files that are chosen are written)")]
pub struct Filter {
    /// Only these ranks, such as 6 or 0-3,7
    #[arg(long, value_name = "RANKS")]
    pub rank: Option<RankSet>,
    /// Only threads with this id, or with this text in their Python or kernel name, in any case
    #[arg(long, value_name = "TID|NAME")]
    pub thread: Option<String>,
    /// Only stacks with this text in a function or file name, also those of child processes
    #[arg(long, value_name = "TEXT")]
    pub grep: Option<String>,
}

impl Filter {
    /// Whether everything is selected.
    pub fn is_all(&self) -> bool {
        *self == Filter::default()
    }

    /// Whether the rank of this file is selected.
    pub fn includes(&self, file: &DumpFile) -> bool {
        self.rank.as_ref().is_none_or(|ranks| ranks.contains(file.rank))
    }

    /// Removes the threads that are not selected. Earlier samples and child processes are removed
    /// too, because comparisons with them need all threads. A text in a stack also selects threads
    /// of child processes; these become threads of the rank, below a frame that names their
    /// process.
    pub fn apply(&self, dump: &mut Dump<'_>) {
        if !self.selects_threads() {
            return;
        }
        dump.first_sample = None;
        let children = std::mem::take(&mut dump.children);
        let named = self.thread.as_ref().map(|text| matching_threads(&dump.threads, dump.pid, text));
        self.select(&mut dump.threads, named.as_ref());
        // A part of a file that cannot be decoded hides no other part.
        let children = children.into_iter().filter(|_| self.grep.is_some());
        for child in children.filter_map(|child| Child::decode(child).ok()) {
            let mut samples = child.samples.into_iter().rev().map(|sample| sample.threads);
            let Some(mut threads) = samples.find(|threads| !threads.frames.is_empty()) else { continue };
            let named = self.thread.as_ref().map(|text| matching_threads(&threads, child.pid, text));
            self.select(&mut threads, named.as_ref());
            append(&mut dump.threads, threads, Frame { func: CHILD, file: child.command });
        }
    }

    /// Removes the threads that are not selected. `named` holds, for each native and each Python
    /// thread, whether its name or id selects it.
    fn select(&self, threads: &mut Threads<'_>, named: Option<&(Vec<bool>, Vec<bool>)>) {
        let Threads { native, python, frames, suspended } = threads;
        let greps = |stack: &Range<usize>| {
            let holds_it = |text: &String| {
                frames[stack.clone()].iter().any(|frame| holds(frame.func, text) || holds(frame.file, text))
            };
            self.grep.as_ref().is_none_or(holds_it)
        };
        // A thread stays for its tasks, without its own stack if only they have the text.
        for suspended in suspended.iter_mut().filter(|suspended| !greps(&suspended.frames)) {
            suspended.frames = 0..0;
        }
        for (threads, of_native) in [(native, true), (python, false)] {
            let mut place = 0;
            threads.retain_mut(|thread| {
                let is_named = named.is_none_or(|both| (if of_native { &both.0 } else { &both.1 })[place]);
                place += 1;
                if !greps(&thread.frames) {
                    thread.frames = 0..0;
                }
                let mut tasks = suspended[thread.suspended.clone()].iter();
                let stays = greps(&thread.frames) || tasks.any(|suspended| !suspended.frames.is_empty());
                is_named && stays
            });
        }
    }

    /// Whether only some threads of a rank are selected.
    pub fn selects_threads(&self) -> bool {
        self.thread.is_some() || self.grep.is_some()
    }
}

/// The outermost frame of the threads of child processes. Its file is their command.
const CHILD: &[u8] = b"child process";

/// Appends threads, each with `root` as its outermost frame.
fn append<'a>(threads: &mut Threads<'a>, others: Threads<'a>, root: Frame<'a>) {
    let Threads { native, python, frames, suspended } = others;
    let before = threads.suspended.len();
    for suspended in suspended {
        let begin = threads.frames.len();
        threads.frames.extend_from_slice(&frames[suspended.frames.clone()]);
        threads.suspended.push(Suspended { frames: begin..threads.frames.len(), ..suspended });
    }
    for (list, more) in [(&mut threads.native, native), (&mut threads.python, python)] {
        for thread in more {
            let begin = threads.frames.len();
            threads.frames.extend_from_slice(&frames[thread.frames.clone()]);
            threads.frames.push(root);
            let suspended = before + thread.suspended.start..before + thread.suspended.end;
            list.push(Thread { frames: begin..threads.frames.len(), suspended, ..thread });
        }
    }
}

/// For each native and each Python thread of a process, whether a thread id or a part of a name
/// selects it.
///
/// A thread with a name in Python and another in the kernel matches by both. The main thread also
/// matches by its name in Python if the dump contains no names.
fn matching_threads(threads: &Threads<'_>, pid: i32, text: &str) -> (Vec<bool>, Vec<bool>) {
    let Threads { native, python, .. } = threads;
    let tid = text.parse().ok().filter(|&tid: &u32| tid != 0);
    let holds_it = |name: &[u8]| holds(&name.to_ascii_lowercase(), &text.to_ascii_lowercase());
    let own = |thread: &Thread<'_>| tid == Some(thread.tid) || holds_it(thread.name);
    let mut named: (Vec<bool>, Vec<bool>) = (native.iter().map(own).collect(), python.iter().map(own).collect());
    let ids = |list: &[Thread<'_>], named: &[bool]| -> HashSet<u32> {
        list.iter()
            .zip(named)
            .filter(|(thread, named)| **named && thread.tid != 0)
            .map(|(thread, _)| thread.tid)
            .collect()
    };
    let (of_native, of_python) = (ids(native, &named.0), ids(python, &named.1));
    let main = main_threads(threads, pid);
    let is_main_name = holds_it(main_thread::NAME.as_bytes());
    for (threads, named, others, main) in
        [(native, &mut named.0, &of_python, main.0), (python, &mut named.1, &of_native, main.1)]
    {
        for (place, (thread, named)) in threads.iter().zip(named).enumerate() {
            *named |= others.contains(&thread.tid) || (is_main_name && main == Some(place));
        }
    }
    named
}

fn holds(bytes: &[u8], text: &str) -> bool {
    text.is_empty() || bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use xpu_timer_proto::Message;
    use xpu_timer_proto::server::{ChildProcess, ProcessSample, PstackFrame, PstackStacktrace};

    #[test]
    fn threads_match_by_id_name_and_frames() {
        let thread =
            |tid, name: &'static str, at| Thread { tid, name: name.as_bytes(), frames: at, ..Thread::default() };
        let threads = || Threads {
            native: vec![thread(7, "python3", 0..1), thread(8, "pool7", 1..2)],
            python: vec![thread(7, "MainThread", 2..3), thread(8, "feeder", 3..4)],
            frames: vec![
                Frame::new("poll", "libc.so"),
                Frame::new("futex", "libc.so"),
                Frame::new("step", "t.py:1"),
                Frame::new("put", "q.py:1"),
            ],
            ..Threads::default()
        };
        let left = |thread: Option<&str>, grep: Option<&str>, pid| {
            let mut dump = Dump { threads: threads(), pid, first_sample: Some(b""), ..Dump::default() };
            let filter = Filter { thread: thread.map(Into::into), grep: grep.map(Into::into), ..Filter::default() };
            filter.apply(&mut dump);
            assert_eq!(dump.first_sample.is_some(), !filter.selects_threads());
            let names = |threads: &[Thread<'_>]| -> Vec<String> {
                threads.iter().map(|thread| String::from_utf8_lossy(thread.name).into_owned()).collect()
            };
            [names(&dump.threads.native), names(&dump.threads.python)].concat().join(" ")
        };
        assert_eq!(left(None, None, 7), "python3 pool7 MainThread feeder");
        assert_eq!(
            left(Some("7"), None, 7),
            "python3 pool7 MainThread feeder",
            "two by their id, the others by a name"
        );
        assert_eq!(left(Some("8"), None, 7), "pool7 feeder");
        assert_eq!(left(Some("feeder"), None, 7), "pool7 feeder", "the same thread has two names");
        assert_eq!(left(Some("MainThread"), None, 7), "python3 MainThread");
        assert_eq!(left(Some("main"), None, 8), "python3 pool7 MainThread feeder", "one by its name, one by its id");
        assert_eq!(left(Some("Main"), Some("libc"), 7), "python3");
        assert_eq!(left(None, Some("libc"), 7), "python3 pool7");
        assert_eq!(left(None, Some("nowhere"), 7), "");
        assert_eq!(left(Some("nobody"), None, 7), "");
    }

    #[test]
    fn a_text_selects_tasks_without_the_stack_of_their_thread() {
        let threads = || Threads {
            python: vec![
                Thread { name: b"loop", frames: 0..1, suspended: 0..2, ..Thread::default() },
                Thread { name: b"other", frames: 1..2, ..Thread::default() },
            ],
            frames: ["select", "step", "fetch", "save"].map(|func| Frame::new(func, "t.py:1")).into(),
            suspended: [2..3, 3..4].map(|frames| Suspended { frames, ..Suspended::default() }).into(),
            ..Threads::default()
        };
        let left = |grep: &str| {
            let mut dump = Dump { threads: threads(), ..Dump::default() };
            Filter { grep: Some(grep.into()), ..Filter::default() }.apply(&mut dump);
            let Threads { python, frames, suspended, .. } = dump.threads;
            let texts =
                |range: &Range<usize>| frames[range.clone()].iter().map(|frame| frame.text().0).collect::<String>();
            let of_thread = |thread: &Thread<'_>| {
                let tasks = suspended[thread.suspended.clone()].iter().map(|task| texts(&task.frames));
                format!("{}: {} ", texts(&thread.frames), tasks.collect::<Vec<_>>().join(","))
            };
            python.iter().map(of_thread).collect::<String>()
        };
        assert_eq!(left("t.py"), "select: fetch,save step:  ");
        assert_eq!(left("fetch"), ": fetch, ");
        assert_eq!(left("select"), "select: , ");
        assert_eq!(left("nowhere"), "");
    }

    #[test]
    fn a_text_selects_stacks_of_child_processes_too() {
        let thread = |name: &str, function: &str| PstackStacktrace {
            thread_name: name.into(),
            frames: vec![PstackFrame { func_name: function.into(), ..Default::default() }],
            ..Default::default()
        };
        let sample = ProcessSample {
            stacktrace: vec![thread("worker", "read_shard"), thread("idle", "poll")],
            ..Default::default()
        };
        let child =
            ChildProcess { pid: 9, command: "python loader.py".into(), samples: vec![sample], ..Default::default() };
        let child = child.encode_to_vec();
        let left = |grep: Option<&str>, thread: Option<&str>| {
            let mut dump = Dump { children: vec![child.as_slice()], ..Dump::default() };
            let filter = Filter { thread: thread.map(Into::into), grep: grep.map(Into::into), ..Filter::default() };
            filter.apply(&mut dump);
            assert!(dump.children.is_empty());
            let names = |thread: &Thread<'_>| -> Vec<String> {
                dump.threads.frames_of(thread).iter().map(|frame| frame.text().0.into_owned()).collect()
            };
            dump.threads.native.iter().map(names).collect::<Vec<_>>()
        };
        assert_eq!(left(Some("read"), None), [["read_shard", "child process"]]);
        assert_eq!(left(Some("read"), Some("idle")), [[""; 0]; 0]);
        assert_eq!(left(None, Some("worker")), [[""; 0]; 0], "a name alone selects threads of ranks");
    }
}
