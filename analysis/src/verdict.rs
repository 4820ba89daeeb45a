//! The verdict: the content of `verdict.json`, and the types that its schema is generated from.
//!
//! `docs/verdict.md` explains every field. The judge fills everything except [`Timing`], which the
//! collector owns, because this crate reads no clock. The doc comments of the types are the
//! descriptions in the schema.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xpu_timer_proto::ring::lane::LONG_NS;

/// Version of the form of `verdict.json`; a change that breaks a reader raises it.
pub const FORMAT: u32 = 1;

/// Why the job stopped. Every cause here is the result of a rule of the judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cause {
    /// The process is gone, and others wait for it.
    ProcessDead,
    /// The process is stopped by a signal or a debugger.
    ProcessStopped,
    /// A thread sleeps uninterruptibly in the kernel, at the same place in both samples.
    DState,
    /// The holder of the GIL is blocked in native code, and other threads wait for the GIL.
    GilDeadlock,
    /// The main thread waits for its data loader.
    DataLoader,
    /// The main thread is inside a read, write or sync that does not progress.
    StorageIo,
    /// The process compiles code. Not a hang.
    Compile,
    /// The process collects garbage. Not a hang.
    PythonGc,
    /// The process tears its communicators or itself down while others go on.
    Teardown,
    /// The main thread waits for a lock of its own process.
    HostLock,
    /// A communicator is not complete: some ranks are in its creation and others are not.
    CommInit,
    /// A send without its receive, or a receive without its send.
    P2pUnmatched,
    /// A rank has not entered the collective that its peers wait in.
    MissingRank,
    /// Something else than a collective does not end on the device of a rank.
    KernelHang,
    /// Ranks run different operations at the same place of the same communicator.
    OpMismatch,
    /// Ranks run the same operation with different sizes.
    SizeMismatch,
    /// Ranks run the same operation with different element types.
    DtypeMismatch,
    /// Point-to-point operations wait for each other in a circle.
    P2pCycle,
    /// Ranks enter several communicators in different orders.
    OrderMismatch,
    /// All ranks agree, all have entered, and nothing moves.
    NetworkStall,
    /// A rank is busy with something long, and it moves. Not a hang.
    LongStep,
    /// Nothing is stuck. Not a hang.
    NotAHang,
    /// The evidence does not tell.
    Unknown,
}

impl Cause {
    /// The name in `verdict.json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Cause::ProcessDead => "process_dead",
            Cause::ProcessStopped => "process_stopped",
            Cause::DState => "d_state",
            Cause::GilDeadlock => "gil_deadlock",
            Cause::DataLoader => "data_loader",
            Cause::StorageIo => "storage_io",
            Cause::Compile => "compile",
            Cause::PythonGc => "python_gc",
            Cause::Teardown => "teardown",
            Cause::HostLock => "host_lock",
            Cause::CommInit => "comm_init",
            Cause::P2pUnmatched => "p2p_unmatched",
            Cause::MissingRank => "missing_rank",
            Cause::KernelHang => "kernel_hang",
            Cause::OpMismatch => "op_mismatch",
            Cause::SizeMismatch => "size_mismatch",
            Cause::DtypeMismatch => "dtype_mismatch",
            Cause::P2pCycle => "p2p_cycle",
            Cause::OrderMismatch => "order_mismatch",
            Cause::NetworkStall => "network_stall",
            Cause::LongStep => "long_step",
            Cause::NotAHang => "not_a_hang",
            Cause::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// How far the verdict can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// A guess from little evidence.
    Low,
    /// The best explanation, but another one is not excluded.
    Medium,
    /// The evidence excludes the other explanations.
    High,
}

impl Confidence {
    /// The name in `verdict.json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Confidence::Low => "low",
            Confidence::Medium => "medium",
            Confidence::High => "high",
        }
    }
}

/// What shows that the job hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HangEvidence {
    /// Nothing does: the job moves, is idle, or the evidence does not tell.
    #[default]
    None,
    /// An operation has been pending for longer than the hang timeout, and no culprit makes
    /// progress.
    PendingOperation,
    /// A wait chain ends in a rank that is dead or makes no progress.
    WaitChain,
}

/// A fact that speaks for the verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EvidenceLine {
    /// The fact, in words.
    pub text: String,
    /// The ranks it is about, ascending; empty when it is about the job.
    pub ranks: Vec<u32>,
}

/// A cause that was looked for and excluded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RuledOut {
    /// The cause.
    pub cause: Cause,
    /// What excludes it.
    pub reason: String,
}

/// The operation that the incident was opened for, or that a rank waits in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct OperationState {
    /// `all_reduce` and the like; the name of the kernel or C function when there is one.
    pub op: String,
    /// Communicator, `0x` and hexadecimal digits; absent when it has none.
    pub communicator: Option<String>,
    /// Number within the communicator, from 1.
    pub seq: u64,
    /// Elements, as the caller passed them.
    pub count: u64,
    /// `float32` and the like; empty when unknown.
    pub dtype: String,
    /// Root or peer within the communicator; absent when it has none.
    pub peer: Option<u32>,
    /// The device has begun it: everything before it in its stream is done.
    pub started: bool,
}

/// Ranks of a communicator that are in the same state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CommunicatorGroup {
    /// Ranks in the job, ascending.
    pub ranks: Vec<u32>,
    /// Collectives launched on the host.
    pub launched: u64,
    /// Collectives begun on the device.
    pub started: u64,
    /// Collectives completed on the device.
    pub completed: u64,
    /// The oldest operation on this communicator that has not completed; absent when all have.
    pub waits_in: Option<OperationState>,
}

/// A communicator on which something is pending.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CommunicatorReport {
    /// Identity, equal on all its ranks: `0x` and hexadecimal digits.
    pub id: String,
    /// Number of its ranks.
    pub size: u32,
    /// Its ranks by equal state, those that are behind first.
    pub groups: Vec<CommunicatorGroup>,
    /// Ranks in the job that belong to it and of which no flight record tells anything.
    pub silent: Vec<u32>,
    /// Members whose rank in the job is not known.
    pub unnamed: u32,
}

/// Where a rank stands.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
pub struct Location {
    /// The user's own innermost Python frame on the main thread: `path:line`.
    pub python: Option<String>,
    /// The function of that frame.
    pub python_function: Option<String>,
    /// Of a thread that waits for its device, when the frame is in a file that was called from
    /// another one of the user's: the frame there, `path:line in function`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller: Option<String>,
    /// The function of the main thread's native stack that tells most: the call that blocks,
    /// without the insides of libraries.
    pub native: Option<String>,
}

/// What the main thread of a rank does, by the words on its stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// No stack, or none of its words is known.
    #[default]
    Unknown,
    /// Waits for the device, or in a collective.
    DeviceWait,
    /// In the creation of a communicator or in the store behind it.
    CommInit,
    /// Waits for its data loader.
    DataLoader,
    /// In a read, write or sync.
    Io,
    /// Waits for a lock.
    Lock,
    /// Waits for the GIL.
    Gil,
    /// Compiles.
    Compile,
    /// Collects garbage.
    Gc,
    /// Sleeps by its own will.
    Sleep,
    /// Tears communicators or the process down.
    Teardown,
    /// On a processor.
    Running,
}

/// Ranks of the job that are in the same state.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct RankGroup {
    /// Ranks in the job, ascending.
    pub ranks: Vec<u32>,
    /// `present`, `dead`, `left`, `unregistered`, `missing`, or `not seen` for a rank of another
    /// node.
    pub presence: String,
    /// As in `/proc/PID/status`: `S (sleeping)`; empty when no dump tells.
    pub process_state: String,
    /// What the main thread does.
    pub activity: Activity,
    /// Something moved on it between the two samples; absent when there are no two samples.
    pub moved: Option<bool>,
    /// Where the main thread stands.
    pub location: Location,
    /// Why there is no dump, or what is missing in it.
    pub errors: Vec<String>,
}

/// What opened the incident.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TriggerReport {
    /// `operation`, `idle`, `heartbeat`, `death`, `manual` or `unspecified`.
    pub kind: String,
    /// The rank that reported the first timeout.
    pub rank: Option<u32>,
    /// The operation that was pending for too long.
    pub operation: Option<OperationState>,
}

/// Whether the incident goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The hang lasts.
    #[default]
    Open,
    /// What was pending completed after all.
    Resolved,
    /// The job ended.
    Ended,
}

/// What the hooks of all ranks say of themselves.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HookReport {
    /// Ranks whose hook says something.
    pub ranks: u32,
    /// Own time in one launch, in nanoseconds, on average over the measured ones; absent when none
    /// was measured.
    pub launch_ns: Option<f64>,
    /// Own time in one call of the collective library.
    pub collective_ns: Option<f64>,
    /// Launches and calls that were measured.
    pub samples: u64,
    /// Measured calls of more than 20 us, which are in neither average: interruptions, and what is
    /// done once.
    pub long_samples: u64,
    /// Operations that found no free slot in their ring. Should be 0.
    pub dropped: u64,
    /// Panics caught in a hook. Should be 0.
    pub panics: u64,
    /// Entries that did not fit their table. Should be 0.
    pub overflows: u64,
}

/// The judge does not use the report.
impl HookReport {
    /// The report in one line. `None` if no hook reported anything.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        if self.ranks == 0 {
            return None;
        }
        let mut parts = Vec::new();
        parts.extend(self.launch_ns.map(|ns| format!("{ns:.0} ns a launch")));
        parts.extend(self.collective_ns.map(|ns| format!("{ns:.0} ns a collective")));
        if self.long_samples > self.samples {
            let (long, all) = (self.long_samples, self.long_samples + self.samples);
            parts.push(format!("more than {} us in {long} of {all} calls", LONG_NS / 1000));
        } else if parts.is_empty() {
            parts.push("cost not measured (too few calls)".to_owned());
        }
        let lost =
            [(self.dropped, "operations dropped"), (self.panics, "panics"), (self.overflows, "table entries lost")];
        let lost: Vec<String> =
            lost.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        parts.push(if lost.is_empty() { "nothing dropped".to_owned() } else { lost.join(", ") });
        Some(parts.join(", "))
    }
}

/// What only the collector knows. All times are RFC 3339 in UTC.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Timing {
    /// Whether the incident goes on.
    pub status: Status,
    /// When the incident was opened.
    pub opened_at: Option<String>,
    /// When the verdict was made.
    pub judged_at: Option<String>,
    /// When the incident was resolved or the job ended.
    pub resolved_at: Option<String>,
    /// From the moment the hang timeout ran out to the finished verdict.
    pub seconds_from_timeout: Option<f64>,
    /// What went wrong while the incident was handled. Should be empty.
    pub errors: Vec<String>,
}

/// Who stopped the job, where, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Verdict {
    /// Version of this form.
    pub format: u32,
    /// Name of the incident.
    pub incident: String,
    /// Name of the job.
    pub job: String,
    /// Ranks of the job.
    pub world_size: u32,
    /// Restart number of the elastic agent.
    pub attempt: u32,
    /// What opened the incident.
    pub trigger: TriggerReport,
    /// The whole verdict in one sentence.
    pub sentence: String,
    /// Why the job stopped.
    pub cause: Cause,
    /// How far the verdict can be trusted.
    pub confidence: Confidence,
    /// Ranks that stopped the job, ascending. Empty when no rank is to blame or none could be
    /// named.
    pub culprits: Vec<u32>,
    /// Ranks that wait, ascending; never a culprit.
    pub victims: Vec<u32>,
    /// What shows that the job hangs. Absent in verdicts of earlier releases.
    #[serde(default)]
    pub hang: HangEvidence,
    /// Each culprit waits for a thread or child process that is busy. No part of the written
    /// verdict.
    #[serde(skip)]
    pub helpers_busy: bool,
    /// The facts that speak for the verdict, the strongest first.
    pub evidence: Vec<EvidenceLine>,
    /// The causes that were looked for and excluded.
    pub ruled_out: Vec<RuledOut>,
    /// Who is at which operation, for every communicator on which something is pending.
    pub communicators: Vec<CommunicatorReport>,
    /// Where every rank stands, by equal state, the smallest group first.
    pub ranks: Vec<RankGroup>,
    /// What the hooks say of themselves. Absent in verdicts of earlier releases.
    #[serde(default)]
    pub hook: HookReport,
    /// What only the collector knows; its fields stand beside the others.
    #[serde(flatten)]
    pub timing: Timing,
}

impl Verdict {
    /// The ranks that hang, ascending: culprits and victims, when there is evidence of a hang.
    #[must_use]
    pub fn hanging_ranks(&self) -> Vec<u32> {
        if self.hang == HangEvidence::None {
            return Vec::new();
        }
        let mut ranks = [self.culprits.as_slice(), &self.victims].concat();
        ranks.sort_unstable();
        ranks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hook_line_reports_cost_and_losses() {
        assert_eq!(HookReport::default().line(), None);
        let quiet = HookReport { ranks: 4, ..Default::default() };
        assert_eq!(quiet.line().unwrap(), "cost not measured (too few calls), nothing dropped");
        let slow = HookReport { long_samples: 7, ..quiet.clone() };
        assert_eq!(slow.line().unwrap(), "more than 20 us in 7 of 7 calls, nothing dropped");
        let report = HookReport { launch_ns: Some(18.4), collective_ns: Some(120.0), dropped: 3, panics: 1, ..quiet };
        assert_eq!(report.line().unwrap(), "18 ns a launch, 120 ns a collective, 3 operations dropped, 1 panics");
    }
}
