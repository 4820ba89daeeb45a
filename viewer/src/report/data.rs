//! The data of a report, as it is embedded in the page. Values that repeat across ranks are stored
//! once and referenced by number, so that a thousand ranks with a hundred threads each need only a
//! few megabytes.

use serde::Serialize;
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::verdict::CommunicatorReport;

/// Index of a text in [`Report::texts`]; 0 is the empty text.
pub type TextId = u32;
/// Index of a rank set in [`Report::sets`].
pub type SetId = u32;

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
}

/// A tree. Its nodes are in depth-first order: each node is directly followed by its subtree.
#[derive(Debug, Default, Serialize)]
pub struct Tree {
    /// Depth of every node, from 0.
    pub depth: Vec<u32>,
    /// Label of every node.
    pub word: Vec<TextId>,
    /// Ranks whose stacks include the node in the last sample. Empty for nodes that only the first
    /// sample or a child process has.
    pub ranks: Vec<SetId>,
    /// Ranks whose main threads include the node in the last sample.
    pub main: Vec<SetId>,
}

/// Ranks whose main threads stand at the same place.
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
    /// What changed between the samples; absent if there is only one.
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

/// What changed between two samples of a process.
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
    /// What changed between the samples.
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
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !*flag
}
