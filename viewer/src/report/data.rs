//! The data of a report, as it stands in the page. Whatever repeats across ranks stands here once and is referred to by
//! its number, so that a thousand ranks with a hundred threads each stay within a few megabytes.

use serde::Serialize;
use xpu_timer_analysis::Verdict;
use xpu_timer_analysis::verdict::CommunicatorReport;

/// Number of a text in [`Report::texts`]; 0 is the empty one.
pub type TextId = u32;
/// Number of a rank set in [`Report::sets`].
pub type SetId = u32;

/// All that the page shows.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Name of the folder that the report was made from.
    pub folder: String,
    /// Ranks of the job.
    pub world: u32,
    /// Who stopped the job; absent when the folder holds no `verdict.json`.
    pub verdict: Option<Verdict>,
    /// What a reader should know of the folder, one sentence each.
    pub notes: Vec<String>,
    /// Wall clock of the last sample, milliseconds since the Unix epoch: the latest of all ranks.
    pub captured_ms: Option<u64>,
    /// From the first to the last sample, in milliseconds: the longest of all ranks.
    pub between_ms: Option<u64>,
    /// All texts.
    pub texts: Vec<String>,
    /// All rank sets, as labels write them: `0-3/6`.
    pub sets: Vec<String>,
    /// The merged stacks.
    pub trees: Trees,
    /// Ranks whose main threads have equal stacks, the largest group first.
    pub groups: Vec<Group>,
    /// What became of every rank; each stands in one of the sets.
    pub conditions: Vec<Conditions>,
    /// What is known of ranks that have no dump or are gone.
    pub fates: Vec<Fate>,
    /// Who is at which operation: what the verdict tells, then the communicators on which nothing is pending.
    pub communicators: Vec<CommunicatorReport>,
    /// The different threads.
    pub threads: Vec<Thread>,
    /// The different lists of numbers: of threads, or of the differences from one thread's id to the next.
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
    /// Python frames at their place within the native stacks.
    pub mixed: Tree,
}

/// One tree, its nodes in the order of drawing: every one right before its subtree.
#[derive(Debug, Default, Serialize)]
pub struct Tree {
    /// Depth of every node, from 0.
    pub depth: Vec<u32>,
    /// What every node is called.
    pub word: Vec<TextId>,
    /// Ranks that come by every node in the last sample. None come by where only the first sample, or a child process, was.
    pub ranks: Vec<SetId>,
    /// Ranks whose main threads come by every node in the last sample.
    pub main: Vec<SetId>,
}

/// Ranks whose main threads stand at one place.
#[derive(Debug, Serialize)]
pub struct Group {
    /// Its ranks.
    pub ranks: SetId,
    /// `python` or `native`: the kind of stack that was compared. Absent, as the next two, when there is no stack.
    pub mode: Option<&'static str>,
    /// Deepest frame that all of them share.
    pub deepest: Option<TextId>,
    /// First frame, from the root, at which nobody else stands.
    pub own: Option<TextId>,
}

/// Ranks in one condition.
#[derive(Debug, Serialize)]
pub struct Conditions {
    /// Which.
    pub condition: Condition,
    /// They.
    pub ranks: SetId,
}

/// What is known of ranks that have no dump or are gone.
#[derive(Debug, Serialize)]
pub struct Fate {
    /// They.
    pub ranks: SetId,
    /// Host or pod.
    pub node: TextId,
    /// How the processes ended, and why there is no dump.
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
    /// Gone, or a zombie.
    Dead,
    /// Ended in order, or was scaled down.
    Left,
    /// There is no dump of it.
    NoDump,
}

/// One rank.
#[derive(Debug, Serialize)]
pub struct Rank {
    /// Number in the job.
    pub rank: u32,
    /// Process id; 0 when unknown.
    pub pid: i32,
    /// Host or pod.
    pub node: TextId,
    /// Command line.
    pub command: TextId,
    /// What went wrong while its stacks were taken.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<TextId>,
    /// The sample that was taken first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<Sample>,
    /// The last sample.
    pub last: Sample,
    /// What changed between the two; absent without two samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<Moved>,
    /// Its child processes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<Child>,
}

/// The threads of one process at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// `S (sleeping)` and the like.
    pub state: TextId,
    /// List of threads.
    pub threads: u32,
    /// Id of the first thread.
    pub tid: u32,
    /// List of the differences of each thread's id to the one before; the first one is 0.
    pub tids: u32,
    /// Place of the main thread in the list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub main: Option<u32>,
}

/// What changed between two samples of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// Processor time that was used, in milliseconds.
    pub cpu_ms: u64,
    /// Bytes that were read and written.
    pub io_bytes: u64,
    /// The main thread has another stack.
    pub main: bool,
    /// Threads that have another stack, came or went.
    pub stacks: u32,
    /// Threads that ran in between, whatever their stack.
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
    /// One or two samples, in the order of time.
    pub samples: Vec<Sample>,
    /// What changed between the two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<Moved>,
}

/// One thread, without its id. Numbers of nodes are places in the three trees.
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
    /// `S (sleeping)` and the like.
    #[serde(skip_serializing_if = "is_zero")]
    pub state: TextId,
    /// Kernel function that it sleeps in.
    #[serde(skip_serializing_if = "is_zero")]
    pub wchan: TextId,
    /// Kernel stack, leaf first, one frame a line.
    #[serde(skip_serializing_if = "is_zero")]
    pub kernel: TextId,
    /// Why the native stack is not whole.
    #[serde(skip_serializing_if = "is_zero")]
    pub incomplete: TextId,
    /// How the stack was taken, in words.
    #[serde(skip_serializing_if = "is_zero")]
    pub capture: TextId,
    /// It holds Python's global lock.
    #[serde(skip_serializing_if = "is_false")]
    pub gil: bool,
    /// It ran between the two samples.
    #[serde(skip_serializing_if = "is_false")]
    pub ran: bool,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !*flag
}
