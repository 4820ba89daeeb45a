//! The distinct stacks of one picture, and the ranks that have each of them.
//!
//! Stacks repeat across ranks. Each frame becomes the number of its word, and each stack a list of
//! these numbers. A rank only adds itself to its stacks, and the tree is built once from the
//! distinct stacks.

use crate::dump::Frame;
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;
use xpu_timer_analysis::folded::{self, DROPPED_FROM};
use xpu_timer_analysis::prefix_tree::{NodeId, PrefixTree, WordId, WordTable};
use xpu_timer_analysis::rank_set::RankSet;

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
    words: Box<[WordId]>,
    ranks: RankSet,
}

/// The distinct stacks of one picture.
#[derive(Debug, Default)]
pub struct Stacks {
    words: WordTable,
    /// Words by function and file, so that the word of a known frame is not built again. Each entry
    /// has the hash of its frame. A word whose frame needed cleaning is missing, because its text
    /// differs from the frame.
    by_frame: HashTable<(u64, WordId)>,
    /// Indexed by word: whether this frame and all frames towards the leaf are not drawn.
    dropped: Vec<bool>,
    /// The root of the last stack, and for each word the word that followed it last.
    first: Option<WordId>,
    next: Vec<Option<WordId>>,
    stacks: Vec<Stack>,
    by_words: HashTable<(u64, StackId)>,
    hasher: DefaultHashBuilder,
    /// Buffers for the current stack and word, kept to reuse their memory.
    stack: Vec<WordId>,
    text: String,
}

impl Stacks {
    /// The number of a stack, or `None` if no frame of it is drawn. This does not add a rank.
    pub fn intern(&mut self, leaf_first: &[Frame<'_>]) -> Option<StackId> {
        self.stack.clear();
        let mut guess = self.first;
        for frame in leaf_first.iter().rev() {
            // The word that followed its caller last time nearly always follows it again.
            let word = match guess {
                Some(guess) if is_text_of(self.words.text(guess), frame) => guess,
                _ => self.word(frame),
            };
            match self.stack.last() {
                Some(caller) => self.next[caller.index()] = Some(word),
                None => self.first = Some(word),
            }
            if self.dropped[word.index()] {
                break;
            }
            self.stack.push(word);
            guess = self.next[word.index()];
        }
        if self.stack.is_empty() { None } else { Some(self.intern_stack()) }
    }

    /// Adds a rank to a stack.
    pub fn add(&mut self, id: StackId, rank: u32) {
        self.stacks[id.0 as usize].ranks.insert(rank);
    }

    fn word(&mut self, frame: &Frame<'_>) -> WordId {
        let hash = self.hasher.hash_one((frame.func, frame.file));
        let words = &self.words;
        if let Some(&(_, word)) = self.by_frame.find(hash, |&(_, word)| is_text_of(words.text(word), frame)) {
            return word;
        }
        let (func, file) = frame.text();
        self.text.clear();
        folded::push_word(&mut self.text, &func, &file);
        let word = self.words.intern(&self.text);
        if word.index() == self.dropped.len() {
            self.dropped.push(self.text.contains(DROPPED_FROM));
            self.next.push(None);
        }
        if is_text_of(&self.text, frame) {
            self.by_frame.insert_unique(hash, (hash, word), |&(hash, _)| hash);
        }
        word
    }

    fn intern_stack(&mut self) -> StackId {
        let hash = self.hasher.hash_one(&self.stack[..]);
        let (stacks, stack) = (&self.stacks, &self.stack);
        if let Some(&(_, id)) = self.by_words.find(hash, |&(_, id)| *stacks[id.0 as usize].words == **stack) {
            return id;
        }
        let id = StackId(u32::try_from(stacks.len()).expect("fewer than 2^32 stacks, each of which takes memory"));
        self.stacks.push(Stack { words: self.stack[..].into(), ranks: RankSet::new() });
        self.by_words.insert_unique(hash, (hash, id), |&(hash, _)| hash);
        id
    }

    /// The words of a stack, root first.
    pub fn words_of(&self, id: StackId) -> &[WordId] {
        &self.stacks[id.0 as usize].words
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
        let mut tree = PrefixTree::with_words(self.words);
        let ends = self.stacks.iter().filter_map(|stack| tree.insert_set(&stack.words, &stack.ranks)).collect();
        (tree, ends)
    }

    /// The tree of the stacks that have a rank, and the end of each stack. The numbers of the words
    /// stay valid.
    pub fn into_tree(self) -> (PrefixTree, Vec<StackEnd>) {
        let mut tree = PrefixTree::with_words(self.words);
        let ends = self.stacks.into_iter().map(|stack| {
            let node = if stack.ranks.is_empty() { None } else { tree.insert_set(&stack.words, &stack.ranks) };
            node.map_or(StackEnd::Undrawn(stack.words), StackEnd::Drawn)
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
    Undrawn(Box<[WordId]>),
}

/// Whether the word is exactly the text of the frame.
fn is_text_of(word: &str, frame: &Frame<'_>) -> bool {
    let (word, func, file) = (word.as_bytes(), frame.func, frame.file);
    word.len() == func.len() + 1 + file.len()
        && word[func.len()] == b'@'
        && word.starts_with(func)
        && word.ends_with(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame<'a>(func: &'a str, file: &'a str) -> Frame<'a> {
        Frame { func: func.as_bytes(), file: file.as_bytes() }
    }

    fn add(stacks: &mut Stacks, leaf_first: &[Frame<'_>], rank: u32) -> Option<StackId> {
        let id = stacks.intern(leaf_first);
        id.inspect(|&id| stacks.add(id, rank))
    }

    #[test]
    fn words_are_equal_when_their_text_is() {
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
    fn a_dropped_word_ends_the_stack() {
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
