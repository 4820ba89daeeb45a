//! Tables that store values which repeat across ranks once: texts, lists, and the nodes of a tree.

use super::data::{TextId, Tree};
use hashbrown::{HashMap, HashSet};
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::hash::Hash;
use xpu_timer_analysis::prefix_tree::{NodeId, PrefixTree};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::secrets;

/// Distinct values, numbered in the order of first use.
#[derive(Debug)]
pub struct Table<T> {
    /// The values by number.
    pub items: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T: Clone + Eq + Hash> Table<T> {
    /// An empty table.
    pub fn new() -> Self {
        Table { items: Vec::new(), numbers: HashMap::new() }
    }

    /// The number of a value, which is added if it is new.
    pub fn number<Q>(&mut self, item: &Q) -> u32
    where
        Q: Hash + Eq + ToOwned<Owned = T> + ?Sized,
        T: Borrow<Q>,
    {
        if let Some(&number) = self.numbers.get(item) {
            return number;
        }
        let number = u32::try_from(self.items.len()).expect("fewer than 2^32 things, each of which takes memory");
        self.items.push(item.to_owned());
        self.numbers.insert(item.to_owned(), number);
        number
    }
}

/// Texts. The empty text is number 0.
#[derive(Debug)]
pub struct Texts(pub Table<String>);

impl Texts {
    /// The number of a text, which is added if it is new.
    pub fn number(&mut self, text: &str) -> TextId {
        if text.is_empty() {
            return 0;
        }
        self.0.number(text)
    }

    /// The number of a text from a dump, which may not be UTF-8.
    pub fn bytes(&mut self, text: &[u8]) -> TextId {
        self.number(&String::from_utf8_lossy(text))
    }

    /// The number of a command line, without its secrets: an older version or another tool may have
    /// stored them.
    pub fn command(&mut self, text: &[u8]) -> TextId {
        self.number(&secrets::text(&String::from_utf8_lossy(text)))
    }
}

/// For each stack, the ranks whose main threads have it.
pub type MainRanks = BTreeMap<u32, RankSet>;

/// The part of a tree that leads to the given ends, in depth-first order, and the index of each end
/// in it.
pub fn draw(
    merged: &PrefixTree,
    ends: &[Option<NodeId>],
    main_ranks: &MainRanks,
    texts: &mut Texts,
    sets: &mut Table<String>,
) -> (Tree, Vec<Option<u32>>) {
    // Ranks whose main threads include each node: a stack's ranks count for all nodes on the path
    // to its end.
    let mut main: HashMap<NodeId, RankSet> = HashMap::new();
    for (stack, ranks) in main_ranks {
        let mut at = ends.get(*stack as usize).copied().flatten();
        while let Some(id) = at {
            main.entry(id).or_default().union_with(ranks);
            at = merged.node(id).parent;
        }
    }
    let mut drawn: HashSet<NodeId> = HashSet::new();
    for end in ends.iter().flatten() {
        let mut at = Some(*end);
        while let Some(id) = at.filter(|&id| drawn.insert(id)) {
            at = merged.node(id).parent;
        }
    }
    let mut places = HashMap::with_capacity(merged.nodes().len());
    let mut tree = Tree::default();
    // Most children have the same ranks as their parents.
    let mut numbers: HashMap<RankSet, u32> = HashMap::new();
    let mut number = |ranks: &RankSet, sets: &mut Table<String>| match numbers.get(ranks) {
        Some(&number) => number,
        None => *numbers.entry(ranks.clone()).or_insert(sets.number(&ranks.to_string())),
    };
    let nobody = RankSet::new();
    for (place, id) in (0u32..).zip(merged.order().depth_first().filter(|id| drawn.contains(id))) {
        let node = merged.node(id);
        // A parent comes before its children.
        let parent = node.parent.and_then(|parent| places.get(&parent));
        tree.depth.push(parent.map_or(0, |&parent: &u32| tree.depth[parent as usize] + 1));
        places.insert(id, place);
        tree.word.push(texts.number(merged.text(id)));
        tree.ranks.push(number(&node.ranks, sets));
        tree.main.push(number(main.get(&id).unwrap_or(&nobody), sets));
    }
    let ends = ends.iter().map(|id| places.get(&(*id)?).copied()).collect();
    (tree, ends)
}
