//! Groups of ranks with equal stacks (STAT's equivalence classes) by their main threads, and what
//! sets each group apart.

use crate::prefix_tree::{NameId, PrefixTree};
use crate::rank_set::RankSet;

/// The two kinds of flame graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Python threads.
    Python,
    /// Native threads.
    Native,
}

/// Ranks whose main threads have equal stacks. STAT calls this an equivalence class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Ranks of the group.
    pub ranks: RankSet,
    /// Where the ranks are. `None` if they have no stack.
    pub place: Option<StackLocation>,
}

/// Where a group is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackLocation {
    /// The kind of stack that was compared.
    pub mode: Mode,
    /// The deepest frame that all ranks of the group share.
    pub deepest: String,
    /// The first frame, from the root, that no rank outside the group has at this place. `None` if
    /// other ranks pass through every frame, or if there are no other ranks.
    pub own: Option<String>,
}

/// The stack of a main thread, root first, as names of the tree of its kind.
pub type MainStack = (Mode, Box<[NameId]>);

/// The groups of a job, the largest first. Each element of `stacks` has the ranks and the stack of
/// their main threads. No two elements have the same stack.
pub fn groups(mut stacks: Vec<(RankSet, Option<MainStack>)>, native: &PrefixTree, python: &PrefixTree) -> Vec<Group> {
    stacks.sort_by(|(a, _), (b, _)| b.len().cmp(&a.len()).then_with(|| a.first().cmp(&b.first())));
    let alone = stacks.len() == 1;
    let group = |(ranks, stack): (RankSet, Option<MainStack>)| {
        let place = stack.and_then(|(mode, names)| {
            let tree = if mode == Mode::Native { native } else { python };
            let deepest = tree.names().text(*names.last()?).to_owned();
            let own = if alone { None } else { first_own(tree, &names, &ranks) };
            Some(StackLocation { mode, deepest, own })
        });
        Group { ranks, place }
    };
    stacks.into_iter().map(group).collect()
}

/// The first name on the path to the leaf through which only these ranks pass.
fn first_own(tree: &PrefixTree, names: &[NameId], ranks: &RankSet) -> Option<String> {
    let mut at = None;
    for &name in names {
        let id = tree.child(at, name)?;
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

    #[test]
    fn groups_are_sorted_by_size_and_have_a_distinguishing_frame() {
        let mut python = PrefixTree::new();
        let stacks = [("main;load", 0..1), ("main;step;wait", 1..4), ("main;step", 4..6)];
        let mut of_ranks = Vec::new();
        for (stack, ranks) in stacks {
            let names: Box<[NameId]> = stack.split(';').map(|name| python.names_mut().intern(name)).collect();
            let ranks: RankSet = ranks.collect();
            python.insert_set(&names, &ranks);
            of_ranks.push((ranks, Some((Mode::Python, names))));
        }
        of_ranks.push(((6..7).collect(), None));
        let shown: Vec<_> = groups(of_ranks, &PrefixTree::new(), &python)
            .into_iter()
            .map(|group| {
                let place = group.place.map(|place| (place.deepest, place.own.unwrap_or_default()));
                (group.ranks.to_string(), place)
            })
            .collect();
        let place = |deepest: &str, own: &str| Some((deepest.to_owned(), own.to_owned()));
        assert_eq!(
            shown,
            [
                ("1-3".to_owned(), place("wait", "wait")),
                // Other ranks pass through every frame.
                ("4-5".to_owned(), place("step", "")),
                ("0".to_owned(), place("load", "load")),
                ("6".to_owned(), None),
            ]
        );
    }
}
