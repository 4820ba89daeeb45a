//! The verdict: the content of `verdict.json`, and the types that its schema is generated from.
//!
//! `docs/verdict.md` explains every field. The judge fills everything except [`Timing`], which the
//! collector owns, because this crate reads no clock. The doc comments of the types are the
//! descriptions in the schema.

use std::fmt;

#[cfg(test)]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xpu_timer_proto::ring::lane::LONG_NS;

/// Version of the format of `verdict.json`. A change that breaks a reader raises it.
pub const FORMAT: u32 = 1;

/// Why the job stopped. Every cause here is the result of a rule of the judge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
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
    /// The process shuts down its communicators or itself while others continue.
    Teardown,
    /// The main thread waits for a lock of its own process, or for one that processes share.
    HostLock,
    /// A communicator is not complete: some ranks are in its creation and others are not.
    CommInit,
    /// A send without its receive, or a receive without its send.
    P2pUnmatched,
    /// A rank has not entered the collective that its peers wait in.
    MissingRank,
    /// An operation other than a collective does not complete on the device of a rank.
    KernelHang,
    /// Ranks run different operations at the same position of a communicator.
    OpMismatch,
    /// Ranks run the same operation with different sizes.
    SizeMismatch,
    /// Ranks run the same operation with different element types.
    DtypeMismatch,
    /// Point-to-point operations wait for each other in a cycle: a deadlock.
    P2pCycle,
    /// Ranks enter several communicators in different orders.
    OrderMismatch,
    /// All ranks have entered the same operation, none differs, and no data moves.
    NetworkStall,
    /// A rank is busy with a long step and makes progress. Not a hang.
    LongStep,
    /// Nothing is stuck. Not a hang.
    NotAHang,
    /// The evidence does not show the cause.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
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

/// What can end the trouble of a verdict. Verdicts of one kind are right about equally often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum VerdictKind {
    /// No other process can end what the culprits are in: they cannot run, their own records or
    /// threads show the fault, or they wait for nothing outside of their processes.
    ByItself,
    /// A culprit waits for something that another process may do, and it is not known which: data
    /// in a pipe, a message, a lock that processes share.
    OpenWait,
    /// A culprit is a process that is not a rank, or a rank that waits for one.
    BehindProcess,
    /// The culprits make progress.
    Progress,
    /// The verdict names nobody.
    Nobody,
}

impl VerdictKind {
    /// All kinds.
    pub const ALL: [VerdictKind; 5] = [
        VerdictKind::ByItself,
        VerdictKind::OpenWait,
        VerdictKind::BehindProcess,
        VerdictKind::Progress,
        VerdictKind::Nobody,
    ];

    /// The name in `verdict.json`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            VerdictKind::ByItself => "by_itself",
            VerdictKind::OpenWait => "open_wait",
            VerdictKind::BehindProcess => "behind_process",
            VerdictKind::Progress => "progress",
            VerdictKind::Nobody => "nobody",
        }
    }
}

/// What shows that the job hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum HangEvidence {
    /// Nothing: the job makes progress, is idle, or the evidence does not show a hang.
    #[default]
    None,
    /// An operation has been pending for longer than the hang timeout, and no culprit makes
    /// progress.
    PendingOperation,
    /// A wait chain ends in a rank that is dead or makes no progress.
    WaitChain,
}

/// A fact that supports the verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct EvidenceLine {
    /// The fact, as a sentence.
    pub text: String,
    /// The ranks that it is about, ascending. Empty if it is about the job.
    pub ranks: Vec<u32>,
}

/// A published defect of a library with the signature of this hang. It changes neither the cause
/// nor the culprits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct KnownDefect {
    /// Its name in the table of docs/verdict.md.
    pub name: String,
    /// The library: `NCCL`, `PyTorch`, `CPython`, `glibc`, `GNU OpenMP` or `NVIDIA driver`.
    pub library: String,
    /// The version that the ranks have loaded. Absent if it is unknown.
    pub version: Option<String>,
    /// The ranks with the signature, ascending.
    pub ranks: Vec<u32>,
    /// What the defect is and what to do, as a sentence.
    pub text: String,
    /// Where it is published.
    pub url: String,
}

/// A cause that the evidence excludes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct RuledOut {
    /// The cause.
    pub cause: Cause,
    /// The evidence that excludes it.
    pub reason: String,
}

/// The operation that the incident was opened for, or that a rank waits in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct OperationState {
    /// The operation, such as `all_reduce`, or the name of the kernel or C function.
    pub op: String,
    /// The communicator: `0x` and hexadecimal digits. Absent if the operation has none.
    pub communicator: Option<String>,
    /// Sequence number within the communicator, from 1.
    pub seq: u64,
    /// Number of elements, as the caller passed it.
    pub count: u64,
    /// The element type, such as `float32`. Empty if unknown.
    pub dtype: String,
    /// Root or peer, as a rank within the communicator. Absent if the operation has none.
    pub peer: Option<u32>,
    /// The device has started it: everything before it in its stream has completed.
    pub started: bool,
}

/// Ranks of a communicator that are in the same state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct CommunicatorGroup {
    /// Ranks in the job, ascending.
    pub ranks: Vec<u32>,
    /// Collectives launched on the host.
    pub launched: u64,
    /// Collectives started on the device.
    pub started: u64,
    /// Collectives completed on the device.
    pub completed: u64,
    /// The oldest pending operation on this communicator. Absent if nothing is pending.
    pub waits_in: Option<OperationState>,
}

/// A communicator with a pending operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct CommunicatorReport {
    /// Identity, equal on all ranks: `0x` and hexadecimal digits. For a collective without a host
    /// call, the name of its kernel.
    pub id: String,
    /// Number of its ranks.
    pub size: u32,
    /// Its ranks, grouped by equal state. Groups that are behind come first.
    pub groups: Vec<CommunicatorGroup>,
    /// Its ranks without a flight record.
    pub silent: Vec<u32>,
    /// Number of members whose rank in the job is unknown.
    pub unnamed: u32,
}

/// The place of the main thread in the code.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct Location {
    /// The innermost Python frame of the user's own code on the main thread: `path:line`.
    pub python: Option<String>,
    /// The function of that frame.
    pub python_function: Option<String>,
    /// The innermost frame in another file of the user, `path:line in function`. Only for a thread
    /// that waits for its device, because `python` may then be a mere wrapper of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller: Option<String>,
    /// The native function that says most about the wait: the blocking call, without the internal
    /// functions of libraries.
    pub native: Option<String>,
}

/// What the main thread of a rank does, by the functions on its stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// There is no stack, or no function on it is known.
    #[default]
    Unknown,
    /// Waits for the device, or in a collective.
    DeviceWait,
    /// Creates a communicator, or waits for the store that this needs.
    CommInit,
    /// Waits for its data loader.
    DataLoader,
    /// Is in a read, write or sync.
    Io,
    /// Waits for a lock.
    Lock,
    /// Waits for the GIL.
    Gil,
    /// Compiles.
    Compile,
    /// Collects garbage.
    Gc,
    /// Sleeps for a time.
    Sleep,
    /// Shuts down communicators or the process.
    Teardown,
    /// Runs on a CPU.
    Running,
}

/// The process of a culprit: of a rank, a process of a rank for which that rank waits (a loader
/// worker, a child process), or one that belongs to no rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct CulpritProcess {
    /// The rank that it belongs to. Absent if it belongs to none.
    pub rank: Option<u32>,
    /// Its process id on its node.
    pub pid: i32,
    /// Its node.
    pub node: String,
    /// Its command line. Empty if unknown.
    pub command: String,
}

/// Ranks of the job that are in the same state.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct RankGroup {
    /// Ranks in the job, ascending.
    pub ranks: Vec<u32>,
    /// `present`, `dead`, `left`, `unregistered`, `missing`, or `not seen` for a rank of another
    /// node.
    pub presence: String,
    /// As in `/proc/PID/status`: `S (sleeping)`. Empty if there is no dump.
    pub process_state: String,
    /// What the main thread does.
    pub activity: Activity,
    /// Whether it made progress between the two samples. Absent without two samples.
    pub moved: Option<bool>,
    /// The place of the main thread.
    pub location: Location,
    /// Why there is no dump, or what is missing in it.
    pub errors: Vec<String>,
}

/// What opened the incident.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct TriggerReport {
    /// `operation`, `idle`, `heartbeat`, `death`, `manual` or `unspecified`.
    pub kind: String,
    /// The rank that reported the first timeout.
    pub rank: Option<u32>,
    /// The operation that was pending for too long.
    pub operation: Option<OperationState>,
}

/// The state of the incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The hang continues.
    #[default]
    Open,
    /// The pending operation completed after all.
    Resolved,
    /// The job ended.
    Ended,
    /// A capture that shows no hang. It is an incident only because the job hung or died later.
    Mild,
}

/// What the hooks of all ranks measured about themselves.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct HookReport {
    /// Number of ranks whose hook reported its measurements.
    pub ranks: u32,
    /// The hook's own time in one launch, in nanoseconds: the average of the measured launches.
    /// Absent if none was measured.
    pub launch_ns: Option<f64>,
    /// The hook's own time in one call of the collective library, in nanoseconds. Like `launch_ns`.
    pub collective_ns: Option<f64>,
    /// Number of measured launches and calls.
    pub samples: u64,
    /// Measured calls of more than 20 us, which are in neither average: interrupted calls, and work
    /// that is done once.
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
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
#[serde(default)]
pub struct Timing {
    /// The state of the incident.
    pub status: Status,
    /// When the incident was opened.
    pub opened_at: Option<String>,
    /// When the verdict was made.
    pub judged_at: Option<String>,
    /// When the incident was resolved or the job ended.
    pub resolved_at: Option<String>,
    /// Seconds from the end of the hang timeout to the finished verdict.
    pub seconds_from_timeout: Option<f64>,
    /// Errors of the collector while it handled the incident. Should be empty.
    pub errors: Vec<String>,
    /// Earlier captures of the job, oldest first. They show no hang, and each is an incident with
    /// this name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<String>,
    /// Why a capture that shows no hang is an incident. Absent for all other incidents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub promoted: Option<String>,
    /// Names of the open incidents of other jobs that have a culprit process in common with this
    /// one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub same_culprit: Vec<String>,
}

/// Which ranks stopped the job, where, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(JsonSchema))]
pub struct Verdict {
    /// Version of this format.
    pub format: u32,
    /// Name of the incident.
    pub incident: String,
    /// Name of the job.
    pub job: String,
    /// Number of ranks in the job.
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
    /// The estimated probability that the culprits are exactly right, from 0 to 1: how often
    /// verdicts of this kind and strength were right on programs that were new to the judge. Absent
    /// in verdicts of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probability: Option<f64>,
    /// The kind that the estimate is about. Absent in verdicts of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<VerdictKind>,
    /// The confidence by the rules of the judge alone. `confidence` is lower if verdicts of this
    /// kind were wrong before, or too few of them are known. Absent in verdicts of earlier
    /// releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strength: Option<Confidence>,
    /// Ranks that stopped the job, ascending. Empty if no rank is the culprit, or the evidence does
    /// not show which.
    pub culprits: Vec<u32>,
    /// The processes of the culprits, as far as they are known. They include processes that belong
    /// to no rank. Absent in verdicts of earlier releases.
    #[serde(default)]
    pub culprit_processes: Vec<CulpritProcess>,
    /// Ranks that wait, ascending. A victim is never a culprit.
    pub victims: Vec<u32>,
    /// What shows that the job hangs. Absent in verdicts of earlier releases.
    #[serde(default)]
    pub hang: HangEvidence,
    /// Each culprit waits for a thread or child process that is busy, or is a busy process that is
    /// not a rank. Not part of `verdict.json`.
    #[serde(skip)]
    pub helpers_busy: bool,
    /// The facts that support the verdict, the strongest first. Then what the evidence lacks.
    pub evidence: Vec<EvidenceLine>,
    /// Published defects of libraries with the signature of this hang. Absent in verdicts of
    /// earlier releases.
    #[serde(default)]
    pub known_defects: Vec<KnownDefect>,
    /// The causes that the evidence excludes.
    pub ruled_out: Vec<RuledOut>,
    /// The state of every communicator with a pending operation.
    pub communicators: Vec<CommunicatorReport>,
    /// The state of every rank, in groups of equal state, the smallest group first.
    pub ranks: Vec<RankGroup>,
    /// What the hooks measured about themselves. Absent in verdicts of earlier releases.
    #[serde(default)]
    pub hook: HookReport,
    /// What only the collector knows. Its fields are beside the others.
    #[serde(flatten)]
    pub timing: Timing,
}

impl Verdict {
    /// How many of a hundred verdicts of this kind name exactly the right culprits. `None` if the
    /// verdict names nobody, or is of an earlier release.
    #[must_use]
    pub fn right_of_hundred(&self) -> Option<u8> {
        let names_somebody = !self.culprits.is_empty() || !self.culprit_processes.is_empty();
        let share = self.probability.filter(|_| names_somebody)?;
        // A hundred of a hundred is more than any number of tests shows.
        Some((share * 100.0).floor().clamp(0.0, 99.0) as u8)
    }

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
