//! Names, labels and lines of folded stacks, exactly as the docs describe them.
//!
//! The name of a frame is `func@file`. A label is `name@HAS|LEAK`. A line consists of the labels
//! from the root, joined by `;`, and ` 1`.

use crate::prefix_tree::{NodeId, PrefixTree};
use crate::rank_set::RankSet;
use std::fmt::Write as _;
use xpu_timer_proto::{printable, server::Stacktrace};

/// A frame whose name contains this text is not drawn, and neither is anything leafward of it.
pub const DROPPED_FROM: &str = "lto_priv";

/// The function of the name that shows the state of a process: `State@` and the state.
pub const STATE: &str = "State";

/// Appends the name of a frame, `func@file`, without characters that would break a line.
pub fn push_name(out: &mut String, func: &str, file: &str) {
    push_clean(out, func);
    out.push('@');
    push_clean(out, file);
}

fn push_clean(out: &mut String, text: &str) {
    // Fast path: nearly every name is printable ASCII without `;`.
    if text.bytes().all(|b| (b' '..0x7f).contains(&b) && b != b';') {
        out.push_str(text);
    } else {
        out.extend(text.chars().map(|c| match c {
            ';' => ',',
            c => printable::shown(c),
        }));
    }
}

/// The names of one stack, root first. The frames come as in the messages: `(func, file)`, leaf
/// first.
pub fn stack_names<'a>(
    leaf_first: impl DoubleEndedIterator<Item = (&'a str, &'a str)>,
) -> impl Iterator<Item = String> {
    leaf_first
        .rev()
        .map(|(func, file)| {
            let mut name = String::with_capacity(func.len() + 1 + file.len());
            push_name(&mut name, func, file);
            name
        })
        .take_while(|name| !name.contains(DROPPED_FROM))
}

/// Inserts the native stacks of a dump and the state of its process, as the flame graph of native
/// stacks shows them.
pub fn insert_native(tree: &mut PrefixTree, dump: &Stacktrace, rank: u32) {
    insert(tree, [(STATE, dump.process_state.as_str())].into_iter(), rank);
    for thread in &dump.stacktrace {
        insert(tree, thread.frames.iter().map(|f| (f.func_name.as_str(), f.file_name.as_str())), rank);
    }
}

/// Inserts the Python stacks of a dump and the state of its process, as the flame graph of Python
/// stacks shows them.
pub fn insert_python(tree: &mut PrefixTree, dump: &Stacktrace, rank: u32) {
    insert(tree, [(STATE, dump.process_state.as_str())].into_iter(), rank);
    for thread in &dump.py_stacktrace {
        insert(tree, thread.frames.iter().map(|f| (f.func_name.as_str(), f.file_name.as_str())), rank);
    }
}

fn insert<'a>(tree: &mut PrefixTree, leaf_first: impl DoubleEndedIterator<Item = (&'a str, &'a str)>, rank: u32) {
    let names: Vec<String> = stack_names(leaf_first).collect();
    tree.insert(names.iter().map(String::as_str), rank);
}

/// Appends the label of a name: `name@HAS|LEAK`, where LEAK is every other rank of `0..world`.
pub fn push_label(out: &mut String, name: &str, ranks: &RankSet, world: u32) {
    // Writing to a string cannot fail.
    let _ = write!(out, "{name}@{ranks}|{}", ranks.complement(world));
}

/// One node, as [`walk`] passes it.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The node.
    pub id: NodeId,
    /// Its label.
    pub label: &'a str,
    /// The labels from the root to it, joined by `;`.
    pub path: &'a str,
    /// True if the node has no parent.
    pub root: bool,
    /// True if a line ends here.
    pub end: bool,
}

/// Visits every node of the tree in the order of drawing, each parent right before its subtree.
pub fn walk<E>(tree: &PrefixTree, world: u32, mut visit: impl FnMut(Step<'_>) -> Result<(), E>) -> Result<(), E> {
    // Length of the path at each open node. The last open node is the parent of the next one.
    let mut open: Vec<(NodeId, usize)> = Vec::new();
    let mut path = String::new();
    for id in tree.order().depth_first() {
        let node = tree.node(id);
        while open.last().is_some_and(|&(last, _)| Some(last) != node.parent) {
            open.pop();
        }
        path.truncate(open.last().map_or(0, |&(_, length)| length));
        if !open.is_empty() {
            path.push(';');
        }
        let at = path.len();
        push_label(&mut path, tree.text(id), &node.ranks, world);
        open.push((id, path.len()));
        visit(Step { id, label: &path[at..], path: &path, root: at == 0, end: node.end })?;
    }
    Ok(())
}

/// The complete folded text: one line for each end node.
pub fn folded(tree: &PrefixTree, world: u32) -> String {
    let mut text = String::new();
    let done: Result<(), std::convert::Infallible> = walk(tree, world, |step| {
        if step.end {
            text.push_str(step.path);
            text.push_str(" 1\n");
        }
        Ok(())
    });
    match done {
        Ok(()) => text,
        Err(never) => match never {},
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn name(func: &str, file: &str) -> String {
        let mut out = String::new();
        push_name(&mut out, func, file);
        out
    }

    #[test]
    fn a_name_never_breaks_a_line() {
        assert_eq!(name("f", "a.py:3"), "f@a.py:3");
        assert_eq!(name("operator;\n", "a\tb\u{7f}\u{85}\u{2028}c"), "operator, @a b\u{fffd}  c");
        assert_eq!(name("größe", "模型.py:1"), "größe@模型.py:1");
        assert_eq!(name("", ""), "@");
    }

    #[test]
    fn lto_priv_drops_the_frame_and_everything_leafward() {
        let frames = [("leaf", "l"), ("mid.lto_priv.0", "m"), ("root", "r")];
        assert_eq!(stack_names(frames.into_iter()).collect::<Vec<_>>(), ["root@r"]);
        let frames = [("leaf", "l"), ("root", "x.lto_priv")];
        assert_eq!(stack_names(frames.into_iter()).count(), 0);
    }

    #[test]
    fn labels_of_an_end_node_with_children_and_of_absent_ranks() {
        let mut tree = PrefixTree::new();
        tree.insert(["a@f"], 0);
        tree.insert(["a@f", "b@g"], 1);
        assert_eq!(folded(&tree, 4), "a@f@0-1|2-3 1\na@f@0-1|2-3;b@g@1|0/2-3 1\n");
        assert_eq!(folded(&tree, 2), "a@f@0-1| 1\na@f@0-1|;b@g@1|0 1\n");
        assert_eq!(folded(&PrefixTree::new(), 8), "");
    }

    #[test]
    fn a_rank_beyond_the_world_size_is_drawn_without_leaks() {
        let mut tree = PrefixTree::new();
        tree.insert(["a@f"], 9);
        assert_eq!(folded(&tree, 4), "a@f@9|0-3 1\n");
    }

    fn ranks_of(text: &str) -> Vec<u32> {
        let mut ranks = Vec::new();
        for run in text.split('/').filter(|run| !run.is_empty()) {
            let (a, b) = run.split_once('-').unwrap_or((run, run));
            let (a, b): (u32, u32) = (a.parse().unwrap(), b.parse().unwrap());
            assert!(a < b || !run.contains('-'), "a run of one is a single number: {run}");
            assert!(ranks.last().is_none_or(|&last| last + 1 < a), "runs are maximal and ascending: {text}");
            ranks.extend(a..=b);
        }
        ranks
    }

    proptest! {
        #[test]
        fn labels_list_exactly_the_stuck_and_leaking_ranks(
            stacks in prop::collection::vec((prop::collection::vec("[ab@ |/]{0,2}", 1..5), 0u32..24), 1..40),
            world in 24u32..30,
        ) {
            let mut tree = PrefixTree::new();
            let mut model: BTreeMap<Vec<String>, BTreeSet<u32>> = BTreeMap::new();
            let mut ends: BTreeSet<Vec<String>> = BTreeSet::new();
            for (stack, rank) in &stacks {
                tree.insert(stack.iter().map(String::as_str), *rank);
                for depth in 1..=stack.len() {
                    model.entry(stack[..depth].to_vec()).or_default().insert(*rank);
                }
                ends.insert(stack.clone());
            }
            let text = folded(&tree, world);
            let mut seen = BTreeSet::new();
            for line in text.lines() {
                let path = line.strip_suffix(" 1").expect("every line counts once");
                let mut names: Vec<String> = Vec::new();
                let mut parent: BTreeSet<u32> = (0..world).collect();
                for label in path.split(';') {
                    let (name, sets) = label.rsplit_once('@').unwrap();
                    let (has, leak) = sets.split_once('|').unwrap();
                    let (has, leak) = (ranks_of(has), ranks_of(leak));
                    names.push(name.to_owned());
                    let has: BTreeSet<u32> = has.into_iter().collect();
                    prop_assert_eq!(&has, &model[&names]);
                    prop_assert!(has.is_subset(&parent));
                    let all: Vec<u32> = has.iter().copied().chain(leak.iter().copied()).collect();
                    prop_assert_eq!(all.len() as u32, world, "disjoint");
                    prop_assert_eq!(all.into_iter().collect::<BTreeSet<_>>(), (0..world).collect::<BTreeSet<_>>());
                    parent = has;
                }
                prop_assert!(seen.insert(names), "no duplicate lines");
            }
            prop_assert_eq!(seen, ends);
        }

        #[test]
        fn the_order_of_insertion_changes_nothing(
            stacks in prop::collection::vec((prop::collection::vec("[abc]", 1..4), 0u32..8), 1..20).prop_shuffle(),
        ) {
            let build = |stacks: &[(Vec<String>, u32)]| {
                let mut tree = PrefixTree::new();
                for (stack, rank) in stacks {
                    tree.insert(stack.iter().map(String::as_str), *rank);
                }
                folded(&tree, 8)
            };
            let mut sorted = stacks.clone();
            sorted.sort();
            prop_assert_eq!(build(&stacks), build(&sorted));
        }
    }
}
