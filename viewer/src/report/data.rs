//! The data of a report, as it is embedded in the page. Values that repeat across ranks are stored
//! once and referenced by number, so that a thousand ranks with a hundred threads each need only a
//! few megabytes.

use super::lanes::Lanes;
use hashbrown::{HashMap, HashSet};
use serde::Serialize;
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::hash::Hash;
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::prefix_tree::{NodeId, PrefixTree};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_analysis::verdict::CommunicatorReport;
use xpu_timer_proto::secrets;

/// Index of a text in [`Report::texts`]; 0 is the empty text.
pub(super) type TextId = u32;
/// Index of a rank set in [`Report::sets`].
pub(super) type SetId = u32;

/// Everything that the page shows.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the source folder.
    pub folder: String,
    /// Number of ranks in the job.
    pub world: u32,
    /// The verdict; `None` if the folder has no `verdict.json`.
    pub verdict: Option<Verdict>,
    /// Notes about the folder, one sentence each.
    pub notes: Vec<String>,
    /// Wall clock of the last sample, in milliseconds since the Unix epoch: the latest of all
    /// ranks.
    pub captured_ms: Option<u64>,
    /// From the first to the last sample, in milliseconds: the longest of all ranks.
    pub between_ms: Option<u64>,
    /// All texts.
    pub texts: Vec<String>,
    /// All rank sets, in the form of labels: `0-3/6`.
    pub sets: Vec<String>,
    /// The merged stacks.
    pub trees: Trees,
    /// Ranks whose main threads have equal stacks, largest group first.
    pub groups: Vec<Group>,
    /// The condition of every rank; each rank is in one of the sets.
    pub conditions: Vec<Conditions>,
    /// Ranks that have no dump or whose process has ended, with the known reasons.
    pub absent: Vec<AbsentRanks>,
    /// The operation of each rank: communicators of the verdict, then those on which nothing is
    /// pending.
    pub communicators: Vec<CommunicatorReport>,
    /// The distinct threads.
    pub threads: Vec<Thread>,
    /// The distinct lists of numbers: of threads, or of the differences from one thread's id to the
    /// next.
    pub lists: Vec<Vec<i64>>,
    /// The ranks that have a dump, ascending.
    pub ranks: Vec<Rank>,
    /// The activity of the ranks before the hang; `None` if the folder has no timeline.
    pub lanes: Option<Lanes>,
}

/// The merged stacks of all ranks, by kind of stack.
#[derive(Debug, Serialize)]
pub struct Trees {
    /// Python stacks.
    pub python: Tree,
    /// Native stacks.
    pub native: Tree,
    /// Python frames merged into the native stacks.
    pub mixed: Tree,
    /// Tasks and greenlets that wait. The root of each stack is what waits, and the name of its
    /// thread.
    pub suspended: Tree,
}

/// A tree. Its nodes are in depth-first order: each node is directly followed by its subtree.
#[derive(Debug, Default, Serialize)]
pub struct Tree {
    /// Depth of every node, from 0.
    pub depth: Vec<u32>,
    /// Name of every node, `func@file`.
    pub name: Vec<TextId>,
    /// Ranks whose stacks include the node in the last sample. Empty for nodes that only the first
    /// sample or a child process has.
    pub ranks: Vec<SetId>,
    /// Ranks whose main threads include the node in the last sample.
    pub main: Vec<SetId>,
}

/// Ranks whose main threads are at the same place.
#[derive(Debug, Serialize)]
pub struct Group {
    /// The ranks.
    pub ranks: SetId,
    /// `python` or `native`: the kind of stack that was compared. This and the next two fields are
    /// absent if there is no stack.
    pub mode: Option<&'static str>,
    /// Deepest frame that all of them have.
    pub deepest: Option<TextId>,
    /// First frame, from the root, that no other rank has.
    pub own: Option<TextId>,
}

/// Ranks in one condition.
#[derive(Debug, Serialize)]
pub struct Conditions {
    /// The condition.
    pub condition: Condition,
    /// The ranks.
    pub ranks: SetId,
}

/// Ranks that have no dump or whose process has ended, with the known reasons.
#[derive(Debug, Serialize)]
pub struct AbsentRanks {
    /// The ranks.
    pub ranks: SetId,
    /// Host or pod.
    pub node: TextId,
    /// How the processes ended and why there is no dump.
    pub why: TextId,
}

/// How a rank is drawn in the strip of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// Alive, with a dump.
    Alive,
    /// Stopped by a signal or a debugger.
    Stopped,
    /// In uninterruptible sleep.
    DState,
    /// Ended, or a zombie.
    Dead,
    /// Ended normally, or was scaled down.
    Left,
    /// It has no dump.
    NoDump,
}

/// One rank.
#[derive(Debug, Serialize)]
pub struct Rank {
    /// Rank in the job.
    pub rank: u32,
    /// Process id; 0 when unknown.
    pub pid: i32,
    /// Host or pod.
    pub node: TextId,
    /// Command line.
    pub command: TextId,
    /// Errors of capturing its stacks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<TextId>,
    /// The first sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<Sample>,
    /// The last sample.
    pub last: Sample,
    /// The changes between the samples; absent if there is only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<Progress>,
    /// Its child processes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<Child>,
}

/// The threads of one process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Such as `S (sleeping)`.
    pub state: TextId,
    /// Index of the list of its threads.
    pub threads: u32,
    /// Id of the first thread.
    pub tid: u32,
    /// Index of the list of differences between each thread's id and the previous one; the first
    /// difference is 0.
    pub tids: u32,
    /// Index of the main thread in the list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub main: Option<u32>,
}

/// The changes between two samples of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// CPU time used, in milliseconds.
    pub cpu_ms: u64,
    /// Bytes read and written.
    pub io_bytes: u64,
    /// Whether the main thread's stack changed.
    pub main: bool,
    /// Number of threads whose stack changed, and of threads that started or ended.
    pub stacks: u32,
    /// Number of threads that ran in between, even if their stack is unchanged.
    pub ran: u32,
}

/// A child process of a rank.
#[derive(Debug, Serialize)]
pub struct Child {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent.
    pub parent: i32,
    /// Command line.
    pub command: TextId,
    /// One or two samples, in chronological order.
    pub samples: Vec<Sample>,
    /// The changes between the samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<Progress>,
}

/// A thread without its id. Node numbers are indexes in the three trees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Thread {
    /// Name.
    pub name: TextId,
    /// Where its native stack ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub native: Option<u32>,
    /// Where its Python stack ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub python: Option<u32>,
    /// Where its mixed stack ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mixed: Option<u32>,
    /// Such as `S (sleeping)`.
    #[serde(skip_serializing_if = "is_zero")]
    pub state: TextId,
    /// Kernel function in which it sleeps.
    #[serde(skip_serializing_if = "is_zero")]
    pub wchan: TextId,
    /// Kernel stack, leaf first, one frame per line.
    #[serde(skip_serializing_if = "is_zero")]
    pub kernel: TextId,
    /// Why the native stack is incomplete.
    #[serde(skip_serializing_if = "is_zero")]
    pub incomplete: TextId,
    /// How the stack was captured, as text.
    #[serde(skip_serializing_if = "is_zero")]
    pub capture: TextId,
    /// Whether it holds the GIL.
    #[serde(skip_serializing_if = "is_false")]
    pub gil: bool,
    /// Whether it ran between the two samples.
    #[serde(skip_serializing_if = "is_false")]
    pub ran: bool,
    /// Its tasks and greenlets that wait.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suspended: Vec<Suspended>,
}

/// Tasks or greenlets of a thread that wait at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Suspended {
    /// For people: `3 tasks 'Task-…' await a future`.
    pub description: TextId,
    /// Where their stack ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stack: Option<u32>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Distinct values, numbered in the order of first use.
#[derive(Debug)]
pub(super) struct Table<T> {
    /// The values by number.
    pub items: Vec<T>,
    numbers: HashMap<T, u32>,
}

impl<T: Clone + Eq + Hash> Table<T> {
    /// An empty table.
    pub(super) fn new() -> Self {
        Table { items: Vec::new(), numbers: HashMap::new() }
    }

    /// The number of a value, which is added if it is new.
    pub(super) fn number<Q>(&mut self, item: &Q) -> u32
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
pub(super) struct Texts(pub Table<String>);

impl Texts {
    /// The number of a text, which is added if it is new.
    pub(super) fn number(&mut self, text: &str) -> TextId {
        if text.is_empty() {
            return 0;
        }
        self.0.number(text)
    }

    /// The number of a text from a dump, which may not be UTF-8.
    pub(super) fn bytes(&mut self, text: &[u8]) -> TextId {
        self.number(&String::from_utf8_lossy(text))
    }

    /// The number of a command line, without its secrets: an older version or another tool may have
    /// stored them.
    pub(super) fn command(&mut self, text: &[u8]) -> TextId {
        self.number(&secrets::text(&String::from_utf8_lossy(text)))
    }
}

/// For each stack, the ranks whose main threads have it.
pub(super) type MainRanks = BTreeMap<u32, RankSet>;

/// The part of a tree that leads to the given ends, in depth-first order, and the index of each end
/// in it.
pub(super) fn draw(
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
        tree.name.push(texts.number(merged.text(id)));
        tree.ranks.push(number(&node.ranks, sets));
        tree.main.push(number(main.get(&id).unwrap_or(&nobody), sets));
    }
    let ends = ends.iter().map(|id| places.get(&(*id)?).copied()).collect();
    (tree, ends)
}
