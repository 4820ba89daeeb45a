//! Merges the dumps of all ranks, one after the other, into two trees and into groups of ranks that stand at one place.

use crate::dump::{DecodeError, Dump, Frame, Thread};
use crate::stacks::{StackId, Stacks};
use std::collections::BTreeMap;
use xpu_timer_analysis::folded::STATE;
use xpu_timer_analysis::prefix_tree::{PrefixTree, WordId};
use xpu_timer_analysis::rank_set::RankSet;

/// Which of the two pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Python threads.
    Python,
    /// Native threads.
    Native,
}

/// Ranks whose main threads have equal stacks: what STAT calls an equivalence class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its ranks.
    pub ranks: RankSet,
    /// Where they stand; none when there is no stack of them.
    pub place: Option<Place>,
}

/// Where a group stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The kind of stack that was compared.
    pub mode: Mode,
    /// Word of the deepest frame that all ranks of the group share.
    pub deepest: String,
    /// Word of the first frame, from the root, that no rank outside of the group has at this place; none when others
    /// come by everywhere, or when there are no others.
    pub own: Option<String>,
}

/// All that the viewer says about a folder.
#[derive(Debug)]
pub struct Merged {
    /// Tree of the native stacks.
    pub native: PrefixTree,
    /// Tree of the Python stacks.
    pub python: PrefixTree,
    /// Ranks that have a dump.
    pub ranks: RankSet,
    /// All of `ranks`, the largest group first.
    pub groups: Vec<Group>,
    /// Ranks by process state.
    pub states: BTreeMap<String, RankSet>,
    /// Ranks by what failed while their stacks were taken: name of the field, text.
    pub complaints: BTreeMap<(&'static str, String), RankSet>,
}

/// Takes in one dump after the other.
#[derive(Debug, Default)]
pub struct Merger {
    native: Stacks,
    python: Stacks,
    ranks: RankSet,
    main: BTreeMap<Option<(Mode, StackId)>, RankSet>,
    states: BTreeMap<String, RankSet>,
    complaints: BTreeMap<(&'static str, String), RankSet>,
    /// The stacks of the rank at work, kept for its memory.
    has: Vec<(Mode, StackId)>,
}

impl Merger {
    /// Adds the dump of one rank, or nothing of it when a name in it is no text.
    pub fn add(&mut self, rank: u32, dump: &Dump<'_>) -> Result<(), DecodeError> {
        let state = [Frame::new(STATE, dump.process_state)];
        let mut main = None;
        self.has.clear();
        // Native first, so that the main thread's Python stack, which says more to people, has the last word.
        let threads = [(Mode::Native, &dump.native, &mut self.native), (Mode::Python, &dump.python, &mut self.python)];
        for (mode, threads, stacks) in threads {
            self.has.extend(stacks.intern(&state)?.map(|id| (mode, id)));
            let chosen = main_thread(dump, threads);
            for (i, thread) in threads.iter().enumerate() {
                if let Some(id) = stacks.intern(dump.frames_of(thread))? {
                    self.has.push((mode, id));
                    if chosen == Some(i) {
                        main = Some((mode, id));
                    }
                }
            }
        }
        for &(mode, id) in &self.has {
            let stacks = if mode == Mode::Native { &mut self.native } else { &mut self.python };
            stacks.add(id, rank);
        }
        self.ranks.insert(rank);
        self.main.entry(main).or_default().insert(rank);
        add_to(&mut self.states, dump.process_state, rank);
        for (field, text) in [("pstack_stderr", &dump.pstack_stderr), ("pyspy_stderr", &dump.pyspy_stderr)] {
            if !text.trim().is_empty() {
                self.complaints.entry((field, text.trim_end().to_owned())).or_default().insert(rank);
            }
        }
        Ok(())
    }

    /// Puts everything together.
    pub fn finish(self) -> Merged {
        let stacks_of = |mode| if mode == Mode::Native { &self.native } else { &self.python };
        let path_of = |(mode, id)| -> (Mode, Box<[WordId]>) { (mode, stacks_of(mode).words_of(id).into()) };
        let mut paths: Vec<_> = self.main.into_iter().map(|(main, ranks)| (ranks, main.map(path_of))).collect();
        paths.sort_by(|(a, _), (b, _)| b.len().cmp(&a.len()).then_with(|| a.first().cmp(&b.first())));
        let (native, python) = (self.native.into_tree(), self.python.into_tree());
        let alone = paths.len() == 1;
        let groups = paths
            .into_iter()
            .map(|(ranks, path)| {
                let place = path.and_then(|(mode, words)| {
                    let tree = if mode == Mode::Native { &native } else { &python };
                    let deepest = tree.words().text(*words.last()?).to_owned();
                    let own = if alone { None } else { first_own(tree, &words, &ranks) };
                    Some(Place { mode, deepest, own })
                });
                Group { ranks, place }
            })
            .collect();
        Merged { native, python, ranks: self.ranks, groups, states: self.states, complaints: self.complaints }
    }
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

/// The main thread, by what the dump tells: its name, its thread id, the module at its root, else the first with a stack.
fn main_thread(dump: &Dump<'_>, threads: &[Thread<'_>]) -> Option<usize> {
    let pid = u32::try_from(dump.pid).unwrap_or(0);
    let has_frames = |t: &&Thread<'_>| !t.frames.is_empty();
    let by = |is_main: &dyn Fn(&Thread<'_>) -> bool| threads.iter().position(|t| has_frames(&t) && is_main(t));
    by(&|t| t.name == b"MainThread")
        .or_else(|| by(&|t| pid != 0 && t.tid == pid))
        .or_else(|| by(&|t| dump.frames_of(t).last().is_some_and(|root| root.func == b"<module>")))
        .or_else(|| by(&|_| true))
}

/// The first word on the way to the leaf at which nobody but these ranks comes by.
fn first_own(tree: &PrefixTree, words: &[WordId], ranks: &RankSet) -> Option<String> {
    let mut at = None;
    for &word in words {
        let id = tree.child(at, word)?;
        if tree.node(id).ranks.is_subset(ranks) {
            return Some(tree.text(id).to_owned());
        }
        at = Some(id);
    }
    None
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
            merger.add(*rank, &Dump::decode(&dump.encode_to_vec()).unwrap()).unwrap();
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
            Some(Place { mode: Mode::Python, deepest: deepest.into(), own: Some(own.into()) })
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
        assert_eq!(merged.complaints[&("pyspy_stderr", "no".to_owned())].to_string(), "3");
    }

    #[test]
    fn one_group_has_no_others_to_differ_from() {
        let merged = merged(&[rank(0, "f@a:1", "g@b:1"), rank(1, "f@a:1", "g@b:2")]);
        assert_eq!(merged.groups.len(), 1);
        assert_eq!(merged.groups[0].place.as_ref().unwrap().own, None);
    }
}
