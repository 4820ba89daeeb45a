//! The interface of a rule, and what the rules and the judge found, as values: findings with the
//! facts that support them, the reasons why a cause is excluded, and the conclusion. `wording`
//! renders them in English.
//!
//! All ranks are rank indices, unless a field says otherwise.

use std::collections::BTreeSet;

use xpu_timer_proto::v1::{Failure, Op, Operation};

use crate::{
    case::Case,
    explanation::{CollectiveFault, Explanation, HostState, TransferFault},
    graph::{Event, Suspect},
    history::Deviation,
    verdict::{Cause, Confidence},
};

/// One cause and how to recognize it.
pub(crate) struct Rule {
    /// The cause that this rule finds.
    pub cause: Cause,
    /// Explains a suspect, or returns `None` to leave it to the next rule.
    pub explain: fn(&Case<'_>, &Suspect) -> Option<Finding>,
    /// The reason why it is not this cause, if the evidence excludes the cause and a reader could
    /// suspect it. The list has the culprits of the verdict.
    pub rule_out: fn(&Case<'_>, &[usize]) -> Option<Exclusion>,
}

/// For rules whose cause no reader confuses with another.
pub(crate) fn never_ruled_out(_: &Case<'_>, _: &[usize]) -> Option<Exclusion> {
    None
}

/// The result of a rule for a suspect.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    /// The culprits.
    pub culprits: Vec<usize>,
    /// Why they hold up the others.
    pub explanation: Explanation,
    /// How far the finding can be trusted.
    pub confidence: Confidence,
    /// The facts that support the finding.
    pub evidence: Vec<Fact>,
}

/// A fact that supports a finding. It becomes one line of evidence or several, or none if the
/// dumps and records do not show it.
#[derive(Debug, Clone)]
pub(crate) enum Fact {
    /// The explanation of the finding, in detail.
    Explained,
    /// The ranks inside an event.
    Inside(Event),
    /// The counters of a rank for the communicator of a collective, beside those of the ranks
    /// inside.
    Counters { rank_index: usize, event: Event },
    /// Where the main thread of a rank is, what that waits for, and its progress between the
    /// samples.
    Position(usize),
    /// Another fact about one rank.
    Rank(usize, RankFact),
    /// A fact about the collective of the explanation.
    Collective(CollectiveFact),
}

impl Fact {
    /// The positions of the first two of these ranks.
    pub(crate) fn positions(rank_indices: &[usize]) -> impl Iterator<Item = Fact> {
        rank_indices.iter().take(2).copied().map(Fact::Position)
    }
}

/// A fact about one rank.
#[derive(Debug, Clone)]
pub(crate) enum RankFact {
    /// The frame or function that classifies its main thread.
    Witness,
    /// Like `Witness`, unless [`Fact::Position`] shows that frame in more detail.
    WitnessUnlessShown,
    /// Its thread or child process that is stuck.
    StuckHelper,
    /// The object that its system call waits for.
    Awaited,
    /// It polls, and sleeps between the polls.
    Polls,
    /// It launched the awaited collective, and exited normally before that completed.
    EndedAfterLaunch,
    /// gloo aborted it in the collective of the explanation.
    AbortedByGloo,
    /// It has launched a collective, which its device has not started.
    NotStarted { op: Op, seq: u64 },
    /// It waits for its device, and none of its collectives is pending.
    WaitsForDevice,
    /// Its watcher thread has not run for a while.
    StaleWatcher,
    /// Its host thread makes progress.
    HostMakesProgress,
    /// It is not in this creation of a communicator, unlike its waiters.
    NotInCreation(Event),
    /// It left the pattern of its operations.
    LeftPattern(Deviation),
}

impl RankFact {
    /// The fact about this rank.
    pub(crate) fn of(self, rank_index: usize) -> Fact {
        Fact::Rank(rank_index, self)
    }
}

/// A fact about the collective of an explanation.
#[derive(Debug, Clone)]
pub(crate) enum CollectiveFact {
    /// These ranks have completed it.
    Completed { event: Event, completed_by: Vec<usize> },
    /// A clock or a device time proves that these ranks completed it without taking part.
    TookNoPart { completed_by: Vec<usize> },
    /// The past of the ranks decides which operation was due, because no group is the largest.
    DueByHistory,
    /// This number of its members are unknown.
    UnknownMembers(u32),
    /// The ranks may have passed different roots, because the records do not contain the root.
    RootsMayDiffer,
}

/// Why the evidence excludes a cause, for the culprits of the verdict.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Exclusion {
    /// The ranks that wait in one collective run the same operation.
    OperationsAgree,
    /// The processes of all ranks are alive.
    AllAlive,
    /// No process is stopped or frozen.
    NoProcessStopped,
    /// No thread of the culprits sleeps uninterruptibly.
    NoUninterruptibleSleep,
    /// The main threads of the culprits do not wait for the GIL.
    NoGilWait,
    /// The main threads of the culprits do not wait for a data loader.
    NoLoaderWait,
    /// The main threads of the culprits do not read, write or sync.
    NoIo,
    /// The main threads of the culprits do not wait for a lock.
    NoLockWait,
    /// The culprits made no progress between the samples.
    NoProgress,
    /// All ranks have entered this collective.
    AllEntered(Event),
    /// No device is kept from starting a launched collective.
    NoDeviceBlocked,
    /// This culprit is behind the others.
    IsBehind(usize),
}

/// One rule of an ordered table, and what a reader needs to know about it.
pub(crate) struct TableRule<R> {
    /// Name of the rule.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers and tests"))]
    pub name: &'static str,
    /// Why the rule holds.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers and tests"))]
    pub reason: &'static str,
    /// The scenario that fails without the rule.
    #[cfg_attr(not(test), expect(dead_code, reason = "for readers and tests"))]
    pub scenario: &'static str,
    /// The condition or action of the rule.
    pub rule: R,
}

#[cfg(test)]
impl<R> TableRule<R> {
    /// Its name, reason and scenario.
    pub(crate) fn texts(&self) -> (&'static str, &'static str, &'static str) {
        (self.name, self.reason, self.scenario)
    }

    fn is_on(&self) -> bool {
        crate::scenarios::rule_that_is_off().is_none_or(|off| off != self.reason)
    }
}

/// The rules of a table, in order. A test switches them off in turn, to see that their scenarios
/// need them.
pub(crate) fn rules<R>(table: &'static [TableRule<R>]) -> impl Iterator<Item = &'static R> {
    let rules = table.iter();
    #[cfg(test)]
    let rules = rules.filter(|rule| rule.is_on());
    rules.map(|rule| &rule.rule)
}

/// The conclusion of the judge. The sentence of the verdict says it.
#[derive(Debug, Clone)]
pub(crate) enum Conclusion {
    /// The findings of the rules. The first `primary` of them belong to one rule, which gives the
    /// cause.
    Explained { findings: Vec<Finding>, primary: usize },
    /// All ranks of the job are stuck in one way, one finding each, so no rank is the culprit.
    AllStuckAlike(Vec<Finding>),
    /// The job does not hang.
    NoHang(HealthyReason),
    /// All ranks do nothing. `together` if they are at one place.
    MayBeIdle { together: bool },
    /// No rule explains why the job stopped.
    Unexplained(KnownFacts),
}

impl Conclusion {
    /// The processes that belong to no rank and hold up the job, as indices.
    pub(crate) fn culprit_processes(&self) -> BTreeSet<usize> {
        let processes = |finding: &Finding| match &finding.explanation {
            Explanation::Process(fault) => match &fault.mutual {
                Some(mutual) => mutual.processes.clone(),
                None if finding.culprits.is_empty() || fault.is_to_come => vec![fault.end],
                None => Vec::new(),
            },
            _ => Vec::new(),
        };
        self.findings().iter().flat_map(processes).collect()
    }

    /// The culprits that are late because they wait on their host, as rank indices.
    pub(crate) fn ranks_that_wait(&self) -> BTreeSet<usize> {
        let waits = |finding: &&Finding| match &finding.explanation {
            Explanation::Process(_) | Explanation::Collective(CollectiveFault::Absent { .. }) => true,
            Explanation::Host { state, .. } => matches!(
                state,
                HostState::WaitsForLoader | HostState::WaitsForLock { .. } | HostState::StuckInIo { .. }
            ),
            _ => false,
        };
        self.findings().iter().filter(waits).flat_map(|finding| finding.culprits.iter().copied()).collect()
    }

    /// Whether the culprits wait for each other and not in an operation.
    pub(crate) fn is_cycle(&self) -> bool {
        let is_cycle = |finding: &Finding| match &finding.explanation {
            Explanation::HoldEachOther(_) => true,
            Explanation::Process(fault) => fault.mutual.is_some(),
            _ => false,
        };
        self.findings().iter().any(is_cycle)
    }

    /// The ranks that are culprits because they and other processes wait for each other.
    pub(crate) fn ranks_in_cycles(&self) -> BTreeSet<usize> {
        let rank = |finding: &Finding| match &finding.explanation {
            Explanation::Process(fault) if fault.mutual.is_some() => Some(fault.rank_index),
            _ => None,
        };
        self.findings().iter().filter_map(rank).collect()
    }

    /// The events that all ranks are known to have entered with equal arguments, and that do not
    /// complete.
    pub(crate) fn stalled(&self) -> Vec<Event> {
        let stalled = |finding: &Finding| match &finding.explanation {
            Explanation::Collective(CollectiveFault::Stalled { event, certain: true })
            | Explanation::Transfer(TransferFault::Stalled { event }) => Some(*event),
            _ => None,
        };
        self.findings().iter().filter_map(stalled).collect()
    }

    /// The findings of the rules.
    pub(crate) fn findings(&self) -> &[Finding] {
        match self {
            Conclusion::Explained { findings, .. } => findings,
            _ => &[],
        }
    }

    /// The findings whose facts are the evidence. If all ranks are stuck alike, a few show it.
    pub(crate) fn evidence(&self) -> &[Finding] {
        match self {
            Conclusion::Explained { findings, .. } => findings,
            Conclusion::AllStuckAlike(findings) => &findings[..findings.len().min(4)],
            Conclusion::NoHang(_) | Conclusion::MayBeIdle { .. } | Conclusion::Unexplained(_) => &[],
        }
    }
}

/// Why a job does not hang.
#[derive(Debug, Clone)]
pub(crate) enum HealthyReason {
    /// Every pending operation was launched recently.
    AllLaunchedRecently,
    /// Nothing is pending, and every rank makes progress.
    EveryRankMoves,
    /// Nothing is pending.
    NothingPending,
    /// These ranks have left in order.
    Left(Vec<usize>),
}

/// The known facts about a job whose stop no rule explains.
#[derive(Debug, Clone)]
pub(crate) enum KnownFacts {
    /// There is no data from any rank.
    NoRank,
    /// There is no stack, and nothing is pending.
    NoStack,
    /// Nothing is pending, and all ranks are at one place.
    Together,
    /// Nothing is pending, and this many ranks have stacks.
    Stacks(usize),
    /// Operations are pending.
    Pending {
        /// The event in which most ranks wait.
        busiest: Option<Event>,
        /// The ranks about which nothing is known.
        unseen: Vec<usize>,
    },
}

/// A fact about the incident or its evidence as a whole.
#[derive(Debug, Clone)]
pub(crate) enum JobFact {
    /// Something is missing in the evidence about these ranks.
    Gap(EvidenceGap, Vec<usize>),
    /// This rank reported the first timeout, of this operation. A rank number, not an index.
    SignalledFirst { rank: u32, operation: Box<Operation> },
    /// NCCL reported this asynchronous error of a communicator to these ranks.
    AsyncError { communicator: u64, error: u32, reported_to: Vec<usize> },
    /// These ranks failed this way, or this fails in them.
    Fails { rank_indices: Vec<usize>, failure: Box<Failure> },
    /// These ranks wait for keys in a store, in this call.
    WaitsForKeys { waiters: Vec<usize>, call: Box<Operation> },
    /// The oldest pending operation is younger than the hang timeout.
    YoungerThanTimeout { oldest_ns: u64, timeout_ns: u64 },
}

/// A part of the evidence that is missing for some ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) enum EvidenceGap {
    Unseen,
    NoStack,
    NoFlightRecord,
    LostOperations,
    StuckWatcher,
}
