//! Merges the dumps of all ranks one by one, into two trees and into groups of ranks that are at
//! the same place.
//!
//! Stacks repeat across ranks. Each frame becomes the number of its name, and each stack a list of
//! these numbers. A rank only adds itself to its stacks, and a tree is built once from the distinct
//! stacks ([`Stacks`]).

use std::{collections::BTreeMap, hash::BuildHasher};

use hashbrown::{DefaultHashBuilder, HashTable};
use xpu_timer_analysis::{
    folded::{self, DROPPED_FROM, STATE},
    groups,
    main_thread::{self, Candidate},
    own_place,
    prefix_tree::{NameId, NameTable, NodeId, PrefixTree},
    rank_set::RankSet,
    suspended::Waiting,
};
use xpu_timer_proto::server::{PySpyFrame, PySuspendedKind};

use crate::dump::{Dump, Frame, Suspended, Thread, Threads};

pub use xpu_timer_analysis::groups::{Group, Mode, StackLocation};

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
    /// Tree of the tasks and greenlets that wait. The root of each stack is what waits, and the
    /// name of its thread.
    pub suspended: PrefixTree,
    /// Where each of these stacks ends.
    pub suspended_ends: Vec<StackEnd>,
    /// Tasks and greenlets that wait, those alike together.
    pub waiting: Vec<WaitingRanks>,
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

/// Tasks or greenlets that wait at one place in threads with equal stacks.
#[derive(Clone, Debug)]
pub struct WaitingRanks {
    /// Python stack of their thread; `None` if no frame of it is drawn.
    pub thread: Option<StackId>,
    /// Their stack, in [`Merged::suspended`].
    pub stack: StackId,
    /// The tasks or greenlets, their number, and the object that they wait for.
    pub waiting: Waiting,
    /// The innermost line of the user's own code: `train.py:31 in fetch`.
    pub place: String,
    /// The ranks that have them.
    pub ranks: RankSet,
}

/// Adds dumps one by one.
#[derive(Debug, Default)]
pub struct Merger {
    native: Stacks,
    python: Stacks,
    suspended: Stacks,
    /// By the stack of the thread, and their own.
    waiting: BTreeMap<(Option<StackId>, StackId), Vec<WaitingRanks>>,
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
    /// Stacks of the native threads.
    pub native: Vec<Option<StackId>>,
    /// Stacks of the Python threads.
    pub python: Vec<Option<StackId>>,
    /// Stacks of the tasks and greenlets, in the order of [`Threads::suspended`].
    pub suspended: Vec<Option<StackId>>,
    /// Index of the main thread in the Python threads, else in the native threads.
    pub main: Option<(Mode, usize)>,
}

impl Interned {
    fn stack(&self, (mode, place): (Mode, usize)) -> Option<StackId> {
        *(if mode == Mode::Native { &self.native } else { &self.python }).get(place)?
    }

    /// The tasks and greenlets of a Python thread that wait, with the number of their stack and an
    /// index in [`Threads::suspended`]. Those that are alike come together.
    pub fn waiting(&self, threads: &Threads<'_>, thread: &Thread<'_>) -> Vec<(StackId, Waiting, usize)> {
        let mut all: Vec<(StackId, Waiting, usize)> = Vec::new();
        for index in thread.suspended.clone() {
            let Some(stack) = self.suspended[index] else { continue };
            let suspended = &threads.suspended[index];
            let [name, awaits] = [suspended.name, suspended.awaits].map(String::from_utf8_lossy);
            let waiting = Waiting::new(kind_of(suspended), &name, &awaits);
            match all.iter_mut().find(|known| known.0 == stack && known.1.is_like(&waiting)) {
                Some(known) => known.1.add(&waiting),
                None => all.push((stack, waiting, index)),
            }
        }
        all
    }
}

fn kind_of(suspended: &Suspended<'_>) -> PySuspendedKind {
    PySuspendedKind::try_from(suspended.kind).unwrap_or_default()
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
        self.add_waiting(rank, &dump.threads, &last);
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

    /// Adds the tasks and greenlets of a rank that wait. Those that wait alike in one thread, with
    /// equal stacks, are one entry.
    fn add_waiting(&mut self, rank: u32, threads: &Threads<'_>, ids: &Interned) {
        for (thread, of_thread) in threads.python.iter().zip(&ids.python) {
            for (stack, waiting, index) in ids.waiting(threads, thread) {
                self.suspended.add(stack, rank);
                let all = self.waiting.entry((*of_thread, stack)).or_default();
                if let Some(known) = all.iter_mut().find(|known| known.waiting.is_like(&waiting)) {
                    known.waiting.add(&waiting);
                    known.ranks.insert(rank);
                    continue;
                }
                let frames = threads.frames[threads.suspended[index].frames.clone()].iter().map(|frame| {
                    let (func, file) = frame.text();
                    PySpyFrame { func_name: func.into(), file_name: file.into(), ..PySpyFrame::default() }
                });
                let place = own_place(&frames.collect::<Vec<_>>()).unwrap_or_default();
                let ranks = RankSet::from_iter([rank]);
                all.push(WaitingRanks { thread: *of_thread, stack, waiting, place, ranks });
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
        ids.suspended.clear();
        ids.suspended.resize(threads.suspended.len(), None);
        for thread in &threads.python {
            for index in thread.suspended.clone() {
                ids.suspended[index] = self.intern_suspended(threads, thread, &threads.suspended[index]);
            }
        }
        let (native, python) = main_threads(threads, pid);
        // The main thread's Python stack is more useful to a reader.
        let python = python.map(|place| (Mode::Python, place)).filter(|&place| ids.stack(place).is_some());
        ids.main = python.or_else(|| native.map(|place| (Mode::Native, place)));
    }

    fn intern_suspended(
        &mut self,
        threads: &Threads<'_>,
        thread: &Thread<'_>,
        suspended: &Suspended<'_>,
    ) -> Option<StackId> {
        let frames = &threads.frames[suspended.frames.clone()];
        let root = Frame { func: kind_of(suspended).noun().as_bytes(), file: thread.name };
        if frames.is_empty() { None } else { self.suspended.intern(&[frames, &[root]].concat()) }
    }

    /// Builds the trees and groups.
    pub fn finish(self) -> Merged {
        let stacks_of = |mode| if mode == Mode::Native { &self.native } else { &self.python };
        let path_of = |(mode, id)| -> (Mode, Box<[NameId]>) { (mode, stacks_of(mode).names_of(id).into()) };
        let paths: Vec<_> = self.main.into_iter().map(|(main, ranks)| (ranks, main.map(path_of))).collect();
        let (native, native_ends) = self.native.into_tree();
        let (python, python_ends) = self.python.into_tree();
        let (suspended, suspended_ends) = self.suspended.into_tree();
        let groups = groups::groups(paths, &native, &python);
        Merged {
            native,
            python,
            native_ends,
            python_ends,
            suspended,
            suspended_ends,
            waiting: self.waiting.into_values().flatten().collect(),
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

/// Number of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(u32);

impl StackId {
    /// Index of the stack in the order of first use, from 0.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One stack and the ranks that have it.
#[derive(Debug)]
struct Stack {
    /// Root first; not empty.
    names: Box<[NameId]>,
    ranks: RankSet,
}

/// The distinct stacks of one picture.
#[derive(Debug, Default)]
pub struct Stacks {
    names: NameTable,
    /// Names by function and file, so that the name of a known frame is not built again. Each entry
    /// has the hash of its frame. A name whose frame needed cleaning is missing, because its text
    /// differs from the frame.
    by_frame: HashTable<(u64, NameId)>,
    /// Indexed by name: whether this frame and all frames towards the leaf are not drawn.
    dropped: Vec<bool>,
    /// The root of the last stack, and for each name the name that followed it last.
    first: Option<NameId>,
    next: Vec<Option<NameId>>,
    stacks: Vec<Stack>,
    by_names: HashTable<(u64, StackId)>,
    hasher: DefaultHashBuilder,
    /// Buffers for the current stack and name, kept to reuse their memory.
    stack: Vec<NameId>,
    text: String,
}

impl Stacks {
    /// The number of a stack, or `None` if no frame of it is drawn. This does not add a rank.
    pub fn intern(&mut self, leaf_first: &[Frame<'_>]) -> Option<StackId> {
        self.stack.clear();
        let mut guess = self.first;
        for frame in leaf_first.iter().rev() {
            // The name that followed its caller last time nearly always follows it again.
            let name = match guess {
                Some(guess) if is_text_of(self.names.text(guess), frame) => guess,
                _ => self.name(frame),
            };
            match self.stack.last() {
                Some(caller) => self.next[caller.index()] = Some(name),
                None => self.first = Some(name),
            }
            if self.dropped[name.index()] {
                break;
            }
            self.stack.push(name);
            guess = self.next[name.index()];
        }
        if self.stack.is_empty() { None } else { Some(self.intern_stack()) }
    }

    /// Adds a rank to a stack.
    pub fn add(&mut self, id: StackId, rank: u32) {
        self.stacks[id.0 as usize].ranks.insert(rank);
    }

    fn name(&mut self, frame: &Frame<'_>) -> NameId {
        let hash = self.hasher.hash_one((frame.func, frame.file));
        let names = &self.names;
        if let Some(&(_, name)) = self.by_frame.find(hash, |&(_, name)| is_text_of(names.text(name), frame)) {
            return name;
        }
        let (func, file) = frame.text();
        self.text.clear();
        folded::push_name(&mut self.text, &func, &file);
        let name = self.names.intern(&self.text);
        if name.index() == self.dropped.len() {
            self.dropped.push(self.text.contains(DROPPED_FROM));
            self.next.push(None);
        }
        if is_text_of(&self.text, frame) {
            self.by_frame.insert_unique(hash, (hash, name), |&(hash, _)| hash);
        }
        name
    }

    fn intern_stack(&mut self) -> StackId {
        let hash = self.hasher.hash_one(&self.stack[..]);
        let (stacks, stack) = (&self.stacks, &self.stack);
        if let Some(&(_, id)) = self.by_names.find(hash, |&(_, id)| *stacks[id.0 as usize].names == **stack) {
            return id;
        }
        let id = StackId(u32::try_from(stacks.len()).expect("fewer than 2^32 stacks, each of which takes memory"));
        self.stacks.push(Stack { names: self.stack[..].into(), ranks: RankSet::new() });
        self.by_names.insert_unique(hash, (hash, id), |&(hash, _)| hash);
        id
    }

    /// The names of a stack, root first.
    pub fn names_of(&self, id: StackId) -> &[NameId] {
        &self.stacks[id.0 as usize].names
    }

    /// Number of different stacks.
    pub fn len(&self) -> usize {
        self.stacks.len()
    }

    /// Whether there is no stack.
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }

    /// The tree of all stacks, including those without a rank, and the node at which each stack
    /// ends.
    pub fn into_tree_and_ends(self) -> (PrefixTree, Vec<NodeId>) {
        let mut tree = PrefixTree::with_names(self.names);
        let ends = self.stacks.iter().filter_map(|stack| tree.insert_set(&stack.names, &stack.ranks)).collect();
        (tree, ends)
    }

    /// The tree of the stacks that have a rank, and the end of each stack. The numbers of the names
    /// stay valid.
    pub fn into_tree(self) -> (PrefixTree, Vec<StackEnd>) {
        let mut tree = PrefixTree::with_names(self.names);
        let ends = self.stacks.into_iter().map(|stack| {
            let node = if stack.ranks.is_empty() { None } else { tree.insert_set(&stack.names, &stack.ranks) };
            node.map_or(StackEnd::Undrawn(stack.names), StackEnd::Drawn)
        });
        let ends = ends.collect();
        (tree, ends)
    }
}

/// Where a stack ends in the tree.
#[derive(Clone, Debug)]
pub enum StackEnd {
    /// It ends at this node.
    Drawn(NodeId),
    /// No rank has this stack, so it is not in the tree. It belongs to an earlier sample, a child
    /// process, or a file that turned out to be invalid.
    Undrawn(Box<[NameId]>),
}

/// Whether the name is exactly the text of the frame.
fn is_text_of(name: &str, frame: &Frame<'_>) -> bool {
    let (name, func, file) = (name.as_bytes(), frame.func, frame.file);
    name.len() == func.len() + 1 + file.len()
        && name[func.len()] == b'@'
        && name.starts_with(func)
        && name.ends_with(file)
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{
        Message,
        server::{PySpyFrame, PySpyStacktrace, Stacktrace},
    };

    use super::*;

    fn python(name: &str, root_first: &str) -> PySpyStacktrace {
        let frames = root_first.split(' ').rev().map(|name| {
            let (func, file) = name.split_once('@').unwrap();
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

    fn frame<'a>(func: &'a str, file: &'a str) -> Frame<'a> {
        Frame { func: func.as_bytes(), file: file.as_bytes() }
    }

    fn add(stacks: &mut Stacks, leaf_first: &[Frame<'_>], rank: u32) -> Option<StackId> {
        let id = stacks.intern(leaf_first);
        id.inspect(|&id| stacks.add(id, rank))
    }

    #[test]
    fn names_are_equal_when_their_text_is() {
        let mut stacks = Stacks::default();
        let a = add(&mut stacks, &[frame("a", "b@c")], 0);
        assert_eq!(add(&mut stacks, &[frame("a@b", "c")], 1), a, "the same text from another frame");
        let semicolon = add(&mut stacks, &[frame("operator;", "x")], 0);
        assert_eq!(add(&mut stacks, &[frame("operator,", "x")], 1), semicolon, "the same text after cleaning");
        assert_eq!(add(&mut stacks, &[frame("operator;", "x")], 2), semicolon);
        assert_eq!(stacks.len(), 2);
        assert_eq!(folded::folded(&stacks.into_tree().0, 3), "a@b@c@0-1|2 1\noperator,@x@0-2| 1\n");
    }

    #[test]
    fn a_dropped_frame_ends_the_stack() {
        let mut stacks = Stacks::default();
        let short = add(&mut stacks, &[frame("root", "r")], 0);
        assert_eq!(add(&mut stacks, &[frame("leaf", "l"), frame("x.lto_priv.3", "m"), frame("root", "r")], 1), short);
        assert_eq!(add(&mut stacks, &[frame("leaf", "l"), frame("x", "lto_priv")], 1), None);
        assert_eq!(add(&mut stacks, &[], 1), None);
        assert_eq!(folded::folded(&stacks.into_tree().0, 2), "root@r@0-1| 1\n");
    }

    #[test]
    fn an_invalid_utf8_name_is_drawn_with_replacements() {
        let mut stacks = Stacks::default();
        let broken = Frame { func: b"f\xff", file: b"\xe6x" };
        let first = add(&mut stacks, &[broken, frame("root", "r")], 0);
        assert_eq!(add(&mut stacks, &[broken, frame("root", "r")], 1), first);
        assert_eq!(folded::folded(&stacks.into_tree().0, 2), "root@r@0-1|;f\u{fffd}@\u{fffd}x@0-1| 1\n");
    }

    #[test]
    fn a_stack_without_ranks_is_not_drawn() {
        let mut stacks = Stacks::default();
        stacks.intern(&[frame("left", "out")]);
        add(&mut stacks, &[frame("f", "x")], 0);
        assert_eq!(folded::folded(&stacks.into_tree().0, 1), "f@x@0| 1\n");
    }
}
