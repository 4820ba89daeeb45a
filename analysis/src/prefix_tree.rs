//! The prefix tree of all stacks of a job. Every node is one frame at one place and holds the ranks
//! that pass through it.
//!
//! The names of frames (see `folded.rs`) are interned, and children are found by hash, so inserting
//! a stack costs one lookup for each frame, whatever the number of ranks. The tree has no labels
//! (see `folded.rs`) and no files.

use crate::rank_set::RankSet;
use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use std::borrow::Cow;
use std::hash::BuildHasher;
use xpu_timer_proto::v1::{RankRun, StackTree, TreeNode};
use xpu_timer_proto::{DecodeError, Message as _, lenient, printable};

/// Number of an interned name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameId(u32);

impl NameId {
    /// Position of the name in the order of first use, from 0.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Number of a node of one tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

impl NodeId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why a tree message is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeError {
    /// A node has a name that is not in the list.
    UnknownName {
        /// Index of the node.
        node: usize,
        /// The index of the name.
        name: u32,
    },
    /// A node's parent does not come before the node.
    ParentAfterChild {
        /// Index of the node.
        node: usize,
        /// The index of the parent.
        parent: u32,
    },
    /// A run of ranks ends before it begins.
    BackwardRun {
        /// Index of the node.
        node: usize,
    },
    /// A node has a rank that the tree may not contain.
    ForeignRank {
        /// Index of the node.
        node: usize,
    },
    /// The bytes are not a tree message.
    Undecodable,
}

impl From<DecodeError> for TreeError {
    fn from(_: DecodeError) -> Self {
        TreeError::Undecodable
    }
}

impl std::fmt::Display for TreeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TreeError::UnknownName { node, name } => {
                write!(f, "node {node} of the tree has name {name}, which is not in the list")
            }
            TreeError::ParentAfterChild { node, parent } => {
                write!(f, "node {node} of the tree has parent {parent}, which does not come before it")
            }
            TreeError::BackwardRun { node } => {
                write!(f, "node {node} of the tree has a run of ranks that ends before it begins")
            }
            TreeError::ForeignRank { node } => write!(f, "node {node} of the tree has a rank that it may not have"),
            TreeError::Undecodable => write!(f, "the tree cannot be decoded"),
        }
    }
}

impl std::error::Error for TreeError {}

/// Names, each stored once. Numbers are given in the order of first use.
#[derive(Clone, Debug, Default)]
pub struct NameTable {
    texts: Vec<Box<str>>,
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl NameTable {
    /// The number of a name. Stores the name if it is new.
    pub fn intern(&mut self, name: &str) -> NameId {
        let hash = self.hasher.hash_one(name);
        if let Some(&id) = self.table.find(hash, |&id| &*self.texts[id as usize] == name) {
            return NameId(id);
        }
        let id = u32::try_from(self.texts.len()).expect("fewer than 2^32 names, each of which takes memory");
        self.texts.push(name.into());
        self.table.insert_unique(hash, id, |&id| self.hasher.hash_one(&*self.texts[id as usize]));
        NameId(id)
    }

    /// The text of a name.
    pub fn text(&self, name: NameId) -> &str {
        &self.texts[name.0 as usize]
    }

    /// Number of names.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// True if there are no names.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }
}

/// One frame at one place.
#[derive(Clone, Debug)]
pub struct Node {
    /// The caller. `None` for a root.
    pub parent: Option<NodeId>,
    /// The name of the frame.
    pub name: NameId,
    /// The ranks whose stacks pass through this node.
    pub ranks: RankSet,
    /// True if the stack of at least one rank ends here.
    pub end: bool,
}

/// Decodes the nodes of an encoded tree one by one, all into one message.
fn each_node(tree: &[u8], mut visit: impl FnMut(&TreeNode) -> Result<(), TreeError>) -> Result<(), TreeError> {
    let mut node = TreeNode::default();
    lenient::each_part(tree, |number, part| {
        if number != StackTree::NODES_FIELD {
            return Ok(());
        }
        node.clear();
        node.merge(part)?;
        visit(&node)
    })
}

/// Whether a node of a message is valid, given its index and the number of names.
fn check(index: usize, node: &TreeNode, names: usize) -> Result<(), TreeError> {
    if node.name as usize >= names {
        return Err(TreeError::UnknownName { node: index, name: node.name });
    }
    if let Some(parent) = node.parent.filter(|&parent| parent as usize >= index) {
        return Err(TreeError::ParentAfterChild { node: index, parent });
    }
    if node.ranks.iter().any(|run| run.first > run.last) {
        return Err(TreeError::BackwardRun { node: index });
    }
    Ok(())
}

/// The merged stacks of many ranks. There may be several roots.
#[derive(Clone, Debug, Default)]
pub struct PrefixTree {
    names: NameTable,
    nodes: Vec<Node>,
    children: HashMap<(Option<NodeId>, NameId), NodeId>,
}

impl PrefixTree {
    /// An empty tree.
    pub fn new() -> Self {
        PrefixTree::default()
    }

    /// An empty tree that will use these names.
    pub fn with_names(names: NameTable) -> Self {
        PrefixTree { names, ..PrefixTree::default() }
    }

    /// The names of the tree.
    pub fn names(&self) -> &NameTable {
        &self.names
    }

    /// The names of the tree, to intern more of them.
    pub fn names_mut(&mut self) -> &mut NameTable {
        &mut self.names
    }

    /// The nodes, every parent before its children.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// One node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The text of a node's name.
    pub fn text(&self, id: NodeId) -> &str {
        self.names.text(self.node(id).name)
    }

    /// Inserts one stack of one rank, root first, and returns the node at which it ends. Ignores an
    /// empty stack.
    pub fn insert<'w>(&mut self, stack: impl IntoIterator<Item = &'w str>, rank: u32) -> Option<NodeId> {
        let mut at = None;
        for name in stack {
            let name = self.names.intern(name);
            let id = self.child_or_new(at, name);
            self.nodes[id.index()].ranks.insert(rank);
            at = Some(id);
        }
        self.mark_end(at)
    }

    /// Inserts one stack, root first, for all of `ranks`. Ignores an empty stack.
    pub fn insert_set(&mut self, stack: &[NameId], ranks: &RankSet) -> Option<NodeId> {
        let mut at = None;
        for &name in stack {
            let id = self.child_or_new(at, name);
            self.nodes[id.index()].ranks.union_with(ranks);
            at = Some(id);
        }
        self.mark_end(at)
    }

    fn mark_end(&mut self, at: Option<NodeId>) -> Option<NodeId> {
        if let Some(id) = at {
            self.nodes[id.index()].end = true;
        }
        at
    }

    /// The child of a node with this name. With `None`, the root with this name.
    pub fn child(&self, parent: Option<NodeId>, name: NameId) -> Option<NodeId> {
        self.children.get(&(parent, name)).copied()
    }

    fn child_or_new(&mut self, parent: Option<NodeId>, name: NameId) -> NodeId {
        let nodes = &mut self.nodes;
        *self.children.entry((parent, name)).or_insert_with(|| {
            let id = NodeId(u32::try_from(nodes.len()).expect("fewer than 2^32 nodes, each of which takes memory"));
            nodes.push(Node { parent, name, ranks: RankSet::new(), end: false });
            id
        })
    }

    /// Adds all stacks of another tree. Everything that is drawn is independent of the order of
    /// merges.
    pub fn merge(&mut self, other: &PrefixTree) {
        let names: Vec<NameId> = other.names.texts.iter().map(|text| self.names.intern(text)).collect();
        let mut ids: Vec<NodeId> = Vec::with_capacity(other.nodes.len());
        for node in &other.nodes {
            // Parents come before their children, so the id of the parent is known.
            let parent = node.parent.map(|parent| ids[parent.index()]);
            let id = self.child_or_new(parent, names[node.name.0 as usize]);
            let mine = &mut self.nodes[id.index()];
            mine.ranks.union_with(&node.ranks);
            mine.end |= node.end;
            ids.push(id);
        }
    }

    /// Adds all stacks of a tree message. An invalid message adds nothing.
    pub fn merge_message(&mut self, tree: &StackTree) -> Result<(), TreeError> {
        for (index, node) in tree.nodes.iter().enumerate() {
            check(index, node, tree.names.len())?;
        }
        let names: Vec<NameId> = tree.names.iter().map(|text| self.names.intern(&printable::line(text))).collect();
        let mut ids: Vec<NodeId> = Vec::with_capacity(tree.nodes.len());
        for node in &tree.nodes {
            self.add_node(node, &names, &mut ids);
        }
        Ok(())
    }

    /// Adds all stacks of an encoded tree message, which may contain only `allowed` ranks. An
    /// invalid message adds nothing. The message is never decoded as a whole: a cluster collector
    /// merges those of thousands of nodes, and each of their tree nodes would be an allocation.
    pub fn merge_encoded(&mut self, tree: &[u8], allowed: &RankSet) -> Result<(), TreeError> {
        let mut names: Vec<Cow<'_, str>> = Vec::new();
        lenient::each_part(tree, |number, part| {
            if number == StackTree::NAMES_FIELD {
                names.push(String::from_utf8_lossy(part));
            }
            Ok::<(), TreeError>(())
        })?;
        let is_allowed =
            |run: &RankRun| allowed.runs().iter().any(|own| own.first <= run.first && run.last <= own.last);
        let mut count = 0;
        each_node(tree, |node| {
            check(count, node, names.len())?;
            if !node.ranks.iter().all(is_allowed) {
                return Err(TreeError::ForeignRank { node: count });
            }
            count += 1;
            Ok(())
        })?;
        let names: Vec<NameId> = names.iter().map(|text| self.names.intern(&printable::line(text))).collect();
        let mut ids: Vec<NodeId> = Vec::with_capacity(count);
        each_node(tree, |node| {
            self.add_node(node, &names, &mut ids);
            Ok(())
        })
    }

    /// Adds a node of a message that was checked.
    fn add_node(&mut self, node: &TreeNode, names: &[NameId], ids: &mut Vec<NodeId>) {
        let parent = node.parent.map(|parent| ids[parent as usize]);
        let id = self.child_or_new(parent, names[node.name as usize]);
        let mine = &mut self.nodes[id.index()];
        for run in &node.ranks {
            mine.ranks.insert_run(run.first, run.last);
        }
        mine.end |= node.end;
        ids.push(id);
    }

    /// The tree as a message, in the order of [`PrefixTree::order`], so that equal trees give equal
    /// bytes.
    pub fn to_message(&self) -> StackTree {
        let mut message = StackTree::default();
        let mut names: HashMap<NameId, u32> = HashMap::new();
        let mut places = vec![0u32; self.nodes.len()];
        for id in self.order().depth_first() {
            let node = self.node(id);
            let name = *names.entry(node.name).or_insert_with(|| {
                message.names.push(self.names.text(node.name).to_owned());
                (message.names.len() - 1) as u32
            });
            places[id.index()] = message.nodes.len() as u32;
            message.nodes.push(TreeNode {
                parent: node.parent.map(|parent| places[parent.index()]),
                name,
                ranks: node.ranks.to_message(),
                end: node.end,
            });
        }
        message
    }

    /// The order in which the tree is drawn: children by the bytes of their names, independent of
    /// the order of insertion.
    pub fn order(&self) -> Order {
        let mut by_text: Vec<u32> = (0..self.names.texts.len() as u32).collect();
        by_text.sort_unstable_by(|&a, &b| self.names.texts[a as usize].cmp(&self.names.texts[b as usize]));
        let mut place = vec![0u32; by_text.len()];
        for (i, &name) in by_text.iter().enumerate() {
            place[name as usize] = i as u32;
        }
        let mut list: Vec<NodeId> = (0..self.nodes.len() as u32).map(NodeId).collect();
        list.sort_unstable_by_key(|&id| {
            let node = self.node(id);
            (node.parent, place[node.name.0 as usize])
        });
        // The start of each node's children in the list: the roots first (their parent is `None`),
        // then by parent.
        let mut begin = vec![0u32; self.nodes.len() + 2];
        for node in &self.nodes {
            begin[node.parent.map_or(0, |parent| parent.index() + 1) + 1] += 1;
        }
        for i in 1..begin.len() {
            begin[i] += begin[i - 1];
        }
        Order { list, begin }
    }
}

/// The children of every node in the order of drawing. Describes the tree at the time of its
/// creation.
#[derive(Clone, Debug)]
pub struct Order {
    list: Vec<NodeId>,
    begin: Vec<u32>,
}

impl Order {
    /// The children of a node. With `None`, the roots.
    pub fn children(&self, parent: Option<NodeId>) -> &[NodeId] {
        let at = parent.map_or(0, |parent| parent.index() + 1);
        &self.list[self.begin[at] as usize..self.begin[at + 1] as usize]
    }

    /// All nodes, each right before its subtree. Iterative, because stacks may be deep.
    pub fn depth_first(&self) -> impl Iterator<Item = NodeId> + '_ {
        let mut stack: Vec<NodeId> = self.children(None).iter().rev().copied().collect();
        std::iter::from_fn(move || {
            let id = stack.pop()?;
            stack.extend(self.children(Some(id)).iter().rev());
            Some(id)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(stacks: &[(&str, u32)]) -> PrefixTree {
        let mut tree = PrefixTree::new();
        for (stack, rank) in stacks {
            tree.insert(stack.split(';').filter(|name| !name.is_empty()), *rank);
        }
        tree
    }

    fn shown(tree: &PrefixTree) -> Vec<String> {
        tree.order()
            .depth_first()
            .map(|id| {
                let node = tree.node(id);
                format!(
                    "{:?}>{}@{}{}",
                    node.parent.map(|p| tree.text(p)),
                    tree.text(id),
                    node.ranks,
                    ["", "!"][usize::from(node.end)]
                )
            })
            .collect()
    }

    #[test]
    fn a_stack_that_ends_within_another_marks_its_node() {
        let tree = tree(&[("a;b;c", 0), ("a;b", 1), ("a;d", 1)]);
        assert_eq!(shown(&tree), ["None>a@0-1", "Some(\"a\")>b@0-1!", "Some(\"b\")>c@0!", "Some(\"a\")>d@1!"]);
    }

    #[test]
    fn the_same_name_at_two_places_is_two_nodes() {
        assert_eq!(
            shown(&tree(&[("a;a", 0), ("b;a", 0)])),
            ["None>a@0", "Some(\"a\")>a@0!", "None>b@0", "Some(\"b\")>a@0!"]
        );
    }

    #[test]
    fn an_empty_stack_adds_no_node() {
        let tree = tree(&[("", 0)]);
        assert!(tree.nodes().is_empty());
        assert_eq!(tree.order().depth_first().count(), 0);
    }

    #[test]
    fn merging_in_any_order_gives_the_same_tree() {
        let (a, b) = (tree(&[("m;x", 3), ("m;y;z", 0)]), tree(&[("m;y", 7), ("n", 3)]));
        let mut ab = a.clone();
        ab.merge(&b);
        let mut ba = b.clone();
        ba.merge(&a);
        assert_eq!(shown(&ab), shown(&ba));
        assert_eq!(ab.to_message(), ba.to_message());
        let mut by_message = PrefixTree::new();
        by_message.merge_message(&b.to_message()).unwrap();
        by_message.merge_message(&a.to_message()).unwrap();
        assert_eq!(shown(&by_message), shown(&ab));
        let mut by_bytes = PrefixTree::new();
        let ranks = RankSet::from_iter([0, 3, 7]);
        by_bytes.merge_encoded(&b.to_message().encode_to_vec(), &ranks).unwrap();
        by_bytes.merge_encoded(&a.to_message().encode_to_vec(), &ranks).unwrap();
        assert_eq!(shown(&by_bytes), shown(&ab));
    }

    #[test]
    fn a_broken_message_is_refused_whole() {
        let good = tree(&[("a;b", 0)]).to_message();
        let (mut tree, allowed) = (PrefixTree::new(), RankSet::from_iter([0]));
        let mut refused = |change: &dyn Fn(&mut StackTree), error| {
            let mut bad = good.clone();
            change(&mut bad);
            assert_eq!(tree.merge_message(&bad), Err(error));
            assert_eq!(tree.merge_encoded(&bad.encode_to_vec(), &allowed), Err(error));
        };
        refused(&|bad| bad.nodes[1].name = 9, TreeError::UnknownName { node: 1, name: 9 });
        refused(&|bad| bad.nodes[0].parent = Some(0), TreeError::ParentAfterChild { node: 0, parent: 0 });
        refused(&|bad| bad.nodes[1].ranks[0] = RankRun { first: 2, last: 1 }, TreeError::BackwardRun { node: 1 });
        let bytes = good.encode_to_vec();
        let others = RankSet::from_iter([1, 2]);
        assert_eq!(tree.merge_encoded(&bytes, &others), Err(TreeError::ForeignRank { node: 0 }));
        assert_eq!(tree.merge_encoded(&bytes[..bytes.len() - 1], &allowed), Err(TreeError::Undecodable));
        assert!(tree.nodes().is_empty());
    }

    #[test]
    fn a_very_deep_stack_does_not_recurse() {
        let names: Vec<String> = (0..200_000).map(|i| (i % 7).to_string()).collect();
        let mut tree = PrefixTree::new();
        tree.insert(names.iter().map(String::as_str), 0);
        assert_eq!(tree.order().depth_first().count(), 200_000);
    }
}
