//! Merges the dumps of all ranks one by one, into two trees and into groups of ranks that are at
//! the same place.

use crate::dump::{Dump, Frame, Thread, Threads};
use crate::stacks::{StackEnd, StackId, Stacks};
use std::collections::BTreeMap;
use xpu_timer_analysis::folded::STATE;
use xpu_timer_analysis::groups;
pub use xpu_timer_analysis::groups::{Group, Mode, StackLocation};
use xpu_timer_analysis::main_thread::{self, Candidate};
use xpu_timer_analysis::prefix_tree::{PrefixTree, WordId};
use xpu_timer_analysis::rank_set::RankSet;

/// The merged dumps of a folder.
#[derive(Debug)]
pub struct Merged {
    /// Tree of the native stacks.
    pub native: PrefixTree,
    /// Tree of the Python stacks.
    pub python: PrefixTree,
    /// Where each native stack ends. The index is the stack's number from [`Merger::intern`].
    pub native_ends: Vec<StackEnd>,
    /// Where each Python stack ends.
    pub python_ends: Vec<StackEnd>,
    /// Ranks that have a dump.
    pub ranks: RankSet,
    /// `ranks` in groups, largest group first.
    pub groups: Vec<Group>,
    /// Ranks by process state.
    pub states: BTreeMap<String, RankSet>,
    /// Ranks by host or pod, for dumps that name it.
    pub nodes: BTreeMap<String, RankSet>,
    /// Ranks by capture error: name of the field, text.
    pub capture_errors: BTreeMap<(&'static str, String), RankSet>,
}

/// Adds dumps one by one.
#[derive(Debug, Default)]
pub struct Merger {
    native: Stacks,
    python: Stacks,
    ranks: RankSet,
    main: BTreeMap<Option<(Mode, StackId)>, RankSet>,
    states: BTreeMap<String, RankSet>,
    nodes: BTreeMap<String, RankSet>,
    capture_errors: BTreeMap<(&'static str, String), RankSet>,
    last: Interned,
}

/// The numbers of the stacks of one sample, one for each thread; `None` if no frame of the stack is
/// drawn.
#[derive(Clone, Debug, Default)]
pub struct Interned {
    /// Of the native threads.
    pub native: Vec<Option<StackId>>,
    /// Of the Python threads.
    pub python: Vec<Option<StackId>>,
    /// Index of the main thread in the Python threads, else in the native threads.
    pub main: Option<(Mode, usize)>,
}

impl Interned {
    fn stack(&self, (mode, place): (Mode, usize)) -> Option<StackId> {
        *(if mode == Mode::Native { &self.native } else { &self.python }).get(place)?
    }
}

impl Merger {
    /// Adds the dump of one rank.
    pub fn add(&mut self, rank: u32, dump: &Dump<'_>) {
        let mut last = std::mem::take(&mut self.last);
        self.intern_into(&dump.threads, dump.pid, &mut last);
        let state = [Frame::new(STATE, &dump.process_state)];
        for (stacks, ids) in [(&mut self.native, &last.native), (&mut self.python, &last.python)] {
            let state = stacks.intern(&state);
            for &id in ids.iter().chain([&state]).flatten() {
                stacks.add(id, rank);
            }
        }
        let main = last.main.and_then(|(mode, place)| Some((mode, last.stack((mode, place))?)));
        self.last = last;
        self.ranks.insert(rank);
        self.main.entry(main).or_default().insert(rank);
        add_to(&mut self.states, &dump.process_state, rank);
        if !dump.node.is_empty() {
            add_to(&mut self.nodes, &String::from_utf8_lossy(dump.node), rank);
        }
        for (field, text) in [("pstack_stderr", &dump.pstack_stderr), ("pyspy_stderr", &dump.pyspy_stderr)] {
            if !text.trim().is_empty() {
                self.capture_errors.entry((field, text.trim_end().to_owned())).or_default().insert(rank);
            }
        }
    }

    /// The stacks of the dump that was added last.
    pub fn last(&self) -> &Interned {
        &self.last
    }

    /// Numbers the stacks of another sample, without counting them for a rank.
    pub fn intern(&mut self, threads: &Threads<'_>, pid: i32) -> Interned {
        let mut ids = Interned::default();
        self.intern_into(threads, pid, &mut ids);
        ids
    }

    fn intern_into(&mut self, threads: &Threads<'_>, pid: i32, ids: &mut Interned) {
        let all = [
            (&threads.native, &mut self.native, &mut ids.native),
            (&threads.python, &mut self.python, &mut ids.python),
        ];
        for (threads_of, stacks, ids) in all {
            ids.clear();
            for thread in threads_of {
                ids.push(stacks.intern(threads.frames_of(thread)));
            }
        }
        let (native, python) = main_threads(threads, pid);
        // The main thread's Python stack is more useful to a reader.
        let python = python.map(|place| (Mode::Python, place)).filter(|&place| ids.stack(place).is_some());
        ids.main = python.or_else(|| native.map(|place| (Mode::Native, place)));
    }

    /// Builds the trees and groups.
    pub fn finish(self) -> Merged {
        let stacks_of = |mode| if mode == Mode::Native { &self.native } else { &self.python };
        let path_of = |(mode, id)| -> (Mode, Box<[WordId]>) { (mode, stacks_of(mode).words_of(id).into()) };
        let paths: Vec<_> = self.main.into_iter().map(|(main, ranks)| (ranks, main.map(path_of))).collect();
        let (native, native_ends) = self.native.into_tree();
        let (python, python_ends) = self.python.into_tree();
        let groups = groups::groups(paths, &native, &python);
        Merged {
            native,
            python,
            native_ends,
            python_ends,
            ranks: self.ranks,
            groups,
            states: self.states,
            nodes: self.nodes,
            capture_errors: self.capture_errors,
        }
    }
}

/// Index of the main thread in the native and in the Python threads.
pub fn main_threads(threads: &Threads<'_>, pid: i32) -> (Option<usize>, Option<usize>) {
    let main = |list: &[Thread<'_>]| {
        let candidates = list.iter().map(|thread| Candidate {
            tid: thread.tid,
            name: thread.name,
            root: threads.frames_of(thread).last().map(|frame| frame.func),
        });
        main_thread::of(candidates, pid)
    };
    (main(&threads.native), main(&threads.python))
}

fn add_to(map: &mut BTreeMap<String, RankSet>, key: &str, rank: u32) {
    match map.get_mut(key) {
        Some(ranks) => {
            ranks.insert(rank);
        }
        None => {
            map.insert(key.to_owned(), RankSet::from_iter([rank]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xpu_timer_proto::Message;
    use xpu_timer_proto::server::{PySpyFrame, PySpyStacktrace, Stacktrace};

    fn python(name: &str, root_first: &str) -> PySpyStacktrace {
        let frames = root_first.split(' ').rev().map(|word| {
            let (func, file) = word.split_once('@').unwrap();
            PySpyFrame { func_name: func.into(), file_name: file.into(), ..Default::default() }
        });
        PySpyStacktrace { thread_name: name.into(), frames: frames.collect(), ..Default::default() }
    }

    fn merged(dumps: &[(u32, Stacktrace)]) -> Merged {
        let mut merger = Merger::default();
        for (rank, dump) in dumps {
            merger.add(*rank, &Dump::decode(&dump.encode_to_vec()).unwrap());
        }
        merger.finish()
    }

    fn rank(rank: u32, main: &str, other: &str) -> (u32, Stacktrace) {
        let py_stacktrace = vec![python("feeder", other), python("MainThread", main)];
        (rank, Stacktrace { py_stacktrace, process_state: "S (sleeping)".into(), ..Default::default() })
    }

    #[test]
    fn groups_are_by_the_main_thread_and_the_largest_comes_first() {
        let merged = merged(&[
            rank(0, "<module>@t.py:1 load@d.py:2", "run@a:1"),
            rank(1, "<module>@t.py:1 step@t.py:9 wait@w.py:3", "run@a:2"),
            rank(2, "<module>@t.py:1 step@t.py:9 wait@w.py:3", "run@a:1"),
            (
                3,
                Stacktrace {
                    process_state: "D (disk sleep)".into(),
                    pyspy_stderr: "no\n".into(),
                    ..Default::default()
                },
            ),
        ]);
        let shown: Vec<_> = merged.groups.iter().map(|g| (g.ranks.to_string(), g.place.clone())).collect();
        let place = |deepest: &str, own: &str| {
            Some(StackLocation { mode: Mode::Python, deepest: deepest.into(), own: Some(own.into()) })
        };
        assert_eq!(
            shown,
            [
                ("1-2".to_owned(), place("wait@w.py:3", "step@t.py:9")),
                ("0".to_owned(), place("load@d.py:2", "load@d.py:2")),
                ("3".to_owned(), None),
            ]
        );
        assert_eq!(merged.states["D (disk sleep)"].to_string(), "3");
        assert_eq!(merged.capture_errors[&("pyspy_stderr", "no".to_owned())].to_string(), "3");
    }

    #[test]
    fn a_single_group_has_no_distinguishing_frame() {
        let merged = merged(&[rank(0, "f@a:1", "g@b:1"), rank(1, "f@a:1", "g@b:2")]);
        assert_eq!(merged.groups.len(), 1);
        assert_eq!(merged.groups[0].place.as_ref().unwrap().own, None);
    }
}
