//! What repeats across ranks, each stored once: texts, lists, and the stacks of one kind with their tree.

use super::data::{TextId, Tree};
use crate::dump::Frame;
use crate::stacks::Stacks;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use xpu_timer_analysis::prefix_tree::NodeId;
use xpu_timer_analysis::rank_set::RankSet;

/// Things, each stored once, numbered in the order of first use.
#[derive(Debug)]
pub struct Table<T> {
    /// By number.
    pub items: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T: Clone + Eq + Hash> Table<T> {
    /// An empty table.
    pub fn new() -> Self {
        Table { items: Vec::new(), numbers: HashMap::new() }
    }

    /// The number of a thing, which is stored when it is new.
    pub fn number(&mut self, item: T) -> u32 {
        if let Some(&number) = self.numbers.get(&item) {
            return number;
        }
        let number = u32::try_from(self.items.len()).expect("fewer than 2^32 things, each of which takes memory");
        self.items.push(item.clone());
        self.numbers.insert(item, number);
        number
    }
}

/// Texts, of which the empty one is number 0.
#[derive(Debug)]
pub struct Texts(pub Table<String>);

impl Texts {
    /// The number of a text, which is stored when it is new.
    pub fn number(&mut self, text: &str) -> TextId {
        match self.0.numbers.get(text) {
            Some(&number) => number,
            None => self.0.number(text.to_owned()),
        }
    }
}

/// All stacks of one kind.
#[derive(Debug, Default)]
pub struct Layer {
    stacks: Stacks,
    /// By number of the stack: the ranks whose main threads have it.
    main: BTreeMap<u32, RankSet>,
}

impl Layer {
    /// The number of a stack, which counts for a rank, if any, and perhaps as the stack of its main thread.
    pub fn add(&mut self, frames: &[Frame<'_>], rank: Option<u32>, main: bool) -> Option<u32> {
        // These names were strings, so that they are text, which is all that could be refused here.
        let id = self.stacks.intern(frames).ok().flatten()?;
        let number = u32::try_from(id.index()).expect("a stack is numbered by 32 bits");
        if let Some(rank) = rank {
            self.stacks.add(id, rank);
            if main {
                self.main.entry(number).or_default().insert(rank);
            }
        }
        Some(number)
    }

    /// The tree in the order of drawing, and the place at which each stack ends.
    pub fn finish(self, texts: &mut Texts, sets: &mut Table<String>) -> (Tree, Vec<u32>) {
        let (merged, ends) = self.stacks.into_tree_and_ends();
        // Ranks by main thread, by node: every stack's ranks come by all nodes on the way to its end.
        let mut main: HashMap<NodeId, RankSet> = HashMap::new();
        for (stack, ranks) in &self.main {
            let mut at = ends.get(*stack as usize).copied();
            while let Some(id) = at {
                main.entry(id).or_default().union_with(ranks);
                at = merged.node(id).parent;
            }
        }
        let mut places = HashMap::with_capacity(merged.nodes().len());
        let mut tree = Tree::default();
        for (place, id) in (0u32..).zip(merged.order().depth_first()) {
            let node = merged.node(id);
            // A parent stands before its children, in the places and in the depths.
            let parent = node.parent.and_then(|parent| places.get(&parent));
            tree.depth.push(parent.map_or(0, |&parent: &u32| tree.depth[parent as usize] + 1));
            places.insert(id, place);
            tree.word.push(texts.number(merged.text(id)));
            tree.ranks.push(sets.number(node.ranks.to_string()));
            tree.main.push(sets.number(main.get(&id).map(RankSet::to_string).unwrap_or_default()));
        }
        let ends = ends.iter().filter_map(|id| places.get(id).copied()).collect();
        (tree, ends)
    }
}
