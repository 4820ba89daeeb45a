//! The conclusion of the judge before it becomes a verdict: also if no rule explains the incident.
//! The facts that several steps of the judge need, and the evidence that the job hangs.

use std::collections::BTreeSet;

use xpu_timer_proto::{
    server::AwaitedKind,
    v1::{OpKind, Presence, TriggerKind},
};

use crate::{
    case::Case,
    finding::{Conclusion, Finding, HealthyReason, KnownFacts, TableRule, rules},
    graph::{ProcessWait, Suspect},
    stacks::{self, Host, Movement, StuckHelper},
    verdict::{Activity, Cause, Confidence, HangEvidence},
    world::{RankView, is_collective},
};

/// The conclusion, before it becomes a [`Verdict`](crate::verdict::Verdict).
pub(super) struct Outcome {
    pub cause: Cause,
    pub culprits: Vec<usize>,
    pub confidence: Confidence,
    pub conclusion: Conclusion,
    /// The suspect of the cause for which most ranks wait.
    pub main: Option<Suspect>,
}

/// The outcome for a job that does not hang.
pub(super) fn not_a_hang(why: HealthyReason, confidence: Confidence) -> Outcome {
    let conclusion = Conclusion::NoHang(why);
    Outcome { cause: Cause::NotAHang, culprits: Vec::new(), confidence, conclusion, main: None }
}

fn unknown(conclusion: Conclusion) -> Outcome {
    Outcome { cause: Cause::Unknown, culprits: Vec::new(), confidence: Confidence::Low, conclusion, main: None }
}

/// The outcome, if a rule applies to a case.
type Conclude = fn(&Case<'_>) -> Option<Outcome>;

/// Conclusions about an incident that no rule of a cause explains. The first rule that applies
/// counts.
const UNEXPLAINED: &[TableRule<Conclude>] = &[
    TableRule {
        name: "every_rank_moves",
        reason: "If nothing is pending and every rank makes progress, the job works.",
        scenario: "hang::a_job_that_reads_or_computes_is_not_a_hang",
        rule: every_rank_moves,
    },
    TableRule {
        name: "on_demand",
        reason: "A manual dump without a pending operation and without a stuck rank is probably of a healthy job.",
        scenario: "devices::a_dump_on_demand_of_a_job_without_a_pending_operation_is_not_a_hang",
        rule: on_demand,
    },
    TableRule {
        name: "left",
        reason: "If ranks have ended in order and nobody waits for one, the job is ending.",
        scenario: "hang::a_job_whose_ranks_end_in_order_is_not_a_hang",
        rule: left,
    },
    TableRule {
        name: "idle",
        reason: "If nothing is pending and every rank sleeps or waits for a request, the job may have no work.",
        scenario: "hang::ranks_that_all_sleep_may_be_idle",
        rule: may_be_idle,
    },
];

/// The outcome if no rule explains the incident.
pub(super) fn unexplained(case: &Case<'_>) -> Outcome {
    let found = rules(UNEXPLAINED).find_map(|conclude| conclude(case));
    found.unwrap_or_else(|| unknown(Conclusion::Unexplained(known_facts(case))))
}

fn nothing_pending(case: &Case<'_>) -> bool {
    case.graph.events.is_empty()
}

fn have_stacks(case: &Case<'_>) -> bool {
    !case.world.views.is_empty() && case.world.views.iter().all(|view| view.host.stack)
}

fn every_rank_moves(case: &Case<'_>) -> Option<Outcome> {
    // A thread may wait for its device in a busy loop of the driver, which is not progress.
    let quiet = matches!(case.trigger_kind(), TriggerKind::Idle | TriggerKind::Heartbeat);
    let spins = |view: &RankView<'_>| quiet && view.host.observed.activity == Activity::DeviceWait;
    let progresses = |view: &RankView<'_>| {
        view.host.moved.is_some_and(|moved| if spins(view) { moved.own_frame || moved.io } else { moved.is_progress() })
    };
    (nothing_pending(case) && have_stacks(case) && case.world.views.iter().all(progresses))
        .then(|| not_a_hang(HealthyReason::EveryRankMoves, Confidence::Medium))
}

fn on_demand(case: &Case<'_>) -> Option<Outcome> {
    (nothing_pending(case) && have_stacks(case) && case.trigger_kind() == TriggerKind::Manual)
        .then(|| not_a_hang(HealthyReason::NothingPending, Confidence::Low))
}

fn left(case: &Case<'_>) -> Option<Outcome> {
    let views = &case.world.views;
    let done: Vec<usize> = (0..views.len()).filter(|rank_index| ended_in_order(case, *rank_index)).collect();
    let comes = |view: &RankView<'_>| !view.halted() && view.host.observed.activity == Activity::CommInit;
    (!done.is_empty() && nothing_pending(case) && !views.iter().any(|view| view.unseen() || comes(view)))
        .then(|| not_a_hang(HealthyReason::Left(done), Confidence::Medium))
}

fn may_be_idle(case: &Case<'_>) -> Option<Outcome> {
    (nothing_pending(case) && is_idle(case))
        .then(|| unknown(Conclusion::MayBeIdle { together: all_at_one_place(case) }))
}

/// The known facts about a job whose stop nothing explains.
fn known_facts(case: &Case<'_>) -> KnownFacts {
    let views = &case.world.views;
    let stacks = views.iter().filter(|view| view.host.stack).count();
    let unseen = || (0..views.len()).filter(|rank_index| views[*rank_index].unseen()).collect();
    let busiest = || case.graph.events.iter().copied().max_by_key(|event| case.graph.waiters_of(*event).len());
    match (views.len(), nothing_pending(case)) {
        (0, _) => KnownFacts::NoRank,
        (_, true) if stacks == 0 => KnownFacts::NoStack,
        (_, true) if all_at_one_place(case) => KnownFacts::Together,
        (_, true) => KnownFacts::Stacks(stacks),
        (_, false) => KnownFacts::Pending { busiest: busiest(), unseen: unseen() },
    }
}

/// Whether all ranks of a job of several are at one known place.
fn all_at_one_place(case: &Case<'_>) -> bool {
    let all = case.world.views.len();
    all > 1
        && !case.position(0).is_unknown()
        && (1..all).all(|rank_index| case.position(rank_index) == case.position(0))
}

/// Whether a rank left in order, with or without a `Goodbye`. A rank that ended with an error of
/// its own did not.
pub(super) fn ended_in_order(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    match view.presence {
        Presence::Left => !view.exit().failed(),
        Presence::Dead => view.exit().succeeded(),
        _ => false,
    }
}

/// A job that has worked and whose ranks all do nothing now. A job that has not started yet waits
/// for something.
pub(super) fn is_idle(case: &Case<'_>) -> bool {
    let views = &case.world.views;
    let worked = views.iter().any(|view| view.any_operation(is_collective));
    let rests = |rank_index: usize| case.is_idle(rank_index) || is_served(case, rank_index);
    worked && (0..views.len()).all(|rank_index| views[rank_index].host.stack && rests(rank_index))
}

/// A rank waits for a process that may be at rest itself: a server waits like this for the next
/// request. An unknown process counts as one too, unless the rank has a stuck helper.
pub(super) fn is_served(case: &Case<'_>, rank_index: usize) -> bool {
    let is_helped = || case.stuck_helper(rank_index).is_some_and(|helper| helper.is_stuck());
    case.graph.is_at_rest(rank_index)
        || case.graph.waits_for_unknown(rank_index) && !is_helped()
        || case.graph.process_wait(rank_index).is_some_and(|wait| !wait.proves_hang())
}

/// Ranks inside an operation that needs others.
pub(super) fn waiting(case: &Case<'_>) -> BTreeSet<usize> {
    let pends = |rank_index: usize| {
        case.view(rank_index)
            .pending()
            .any(|operation| matches!(operation.kind(), OpKind::Collective | OpKind::HostCall))
            || !case.graph.events.is_empty() && case.does(rank_index, Activity::DeviceWait)
    };
    let mut waiting: BTreeSet<usize> = (0..case.world.views.len()).filter(|rank_index| pends(*rank_index)).collect();
    waiting.extend(case.graph.waiters.iter().flatten());
    waiting.extend(&case.stack_waiters);
    waiting.extend(case.graph.resource_waits.iter().map(|wait| wait.waiter));
    waiting.extend(case.graph.process_waits.iter().map(|wait| wait.waiter));
    waiting.retain(|rank_index| !case.view(*rank_index).dead());
    waiting
}

/// The outcome of a case, as the rules about its hang see it.
struct Judged<'c, 'a> {
    case: &'c Case<'a>,
    outcome: &'c Outcome,
    /// The confidence by the rules alone.
    strength: Confidence,
    /// Number of ranks that wait for the culprits.
    victims: usize,
    /// The processes of [`Conclusion::culprit_processes`].
    processes: BTreeSet<usize>,
}

/// The evidence that a rule sees if it applies.
struct HangRule {
    evidence: HangEvidence,
    applies: fn(&Judged<'_, '_>) -> bool,
}

/// Whether the job hangs. The first rule that applies decides. Without one, nothing shows a hang.
const HANG_RULES: &[TableRule<HangRule>] = &[
    TableRule {
        name: "healthy_cause",
        reason: "A job whose ranks compute, compile or collect garbage goes on by itself.",
        scenario: "processes::a_busy_process_does_not_prove_a_hang",
        rule: HangRule {
            evidence: HangEvidence::None,
            applies: |judged| {
                let cause = judged.outcome.cause;
                matches!(cause, Cause::NotAHang | Cause::LongStep | Cause::Compile | Cause::PythonGc)
            },
        },
    },
    TableRule {
        name: "culprit_progresses",
        reason: "A culprit that makes progress may release the others, unless they also wait for one that stands still.",
        scenario: "hang::ranks_that_wait_for_a_rank_using_its_device_do_not_hang",
        rule: HangRule { evidence: HangEvidence::None, applies: culprit_progresses },
    },
    TableRule {
        name: "seen_once",
        reason: "Of a process that is in only one of the samples, nothing shows that it stands still.",
        scenario: "hang::a_process_in_only_one_of_the_samples_does_not_prove_a_hang",
        rule: HangRule {
            evidence: HangEvidence::None,
            applies: |judged| judged.hosts().any(|host| host.moved.is_none() && !host.halted()),
        },
    },
    TableRule {
        name: "pending_operation",
        reason: "An operation that has been pending for longer than the timeout, and that something explains, hangs.",
        scenario: "hang::an_operation_that_is_pending_past_the_timeout_is_a_hang",
        rule: HangRule { evidence: HangEvidence::PendingOperation, applies: operation_is_overdue },
    },
    TableRule {
        name: "on_demand",
        reason: "A manual dump may be of a healthy job, whose ranks wait for each other all the time.",
        scenario: "hang::a_manual_dump_of_ranks_that_wait_for_a_stopped_one_does_not_prove_a_hang",
        rule: HangRule {
            evidence: HangEvidence::None,
            applies: |judged| judged.case.trigger_kind() == TriggerKind::Manual,
        },
    },
    TableRule {
        name: "open_end",
        reason: "A chain that ends nowhere, or in a process that may move, proves nothing.",
        scenario: "hang::a_job_that_waits_for_work_is_not_a_hang",
        rule: HangRule { evidence: HangEvidence::None, applies: |judged| !judged.ends_still() },
    },
    TableRule {
        name: "victims",
        reason: "Ranks that wait for a rank that stands still do not continue.",
        scenario: "hang::a_chain_that_ends_in_a_dead_rank_is_a_hang",
        rule: HangRule { evidence: HangEvidence::WaitChain, applies: |judged| judged.victims > 0 },
    },
    TableRule {
        name: "gil_deadlock",
        reason: "No thread of a rank gets the GIL while its holder waits for another of them.",
        scenario: "processes::a_gil_deadlock_is_found_although_the_main_thread_seems_idle",
        rule: HangRule {
            evidence: HangEvidence::WaitChain,
            applies: |judged| judged.outcome.cause == Cause::GilDeadlock,
        },
    },
    TableRule {
        name: "cycle",
        reason: "Processes that wait for each other never continue.",
        scenario: "processes::ranks_of_a_silent_job_that_wait_for_each_other_hang",
        rule: HangRule { evidence: HangEvidence::WaitChain, applies: |judged| judged.outcome.conclusion.is_cycle() },
    },
    TableRule {
        name: "locked_in",
        reason: "A lock that only the rank's own threads could release stays locked if none of them will.",
        scenario: "hang::a_silent_rank_hangs_if_only_its_own_threads_could_wake_it",
        rule: HangRule {
            evidence: HangEvidence::WaitChain,
            applies: |judged| {
                matches!(judged.outcome.cause, Cause::HostLock | Cause::Teardown)
                    && judged.any_culprit(|case, rank_index| case.graph.is_locked_in(rank_index))
            },
        },
    },
    TableRule {
        name: "unread_write",
        reason: "A rank that waits for a thread of its own whose bytes nobody takes does not continue.",
        scenario: "hang::a_silent_rank_hangs_if_only_its_own_threads_could_wake_it",
        rule: HangRule {
            evidence: HangEvidence::WaitChain,
            applies: |judged| {
                let writes = |helper: StuckHelper| helper.pid == 0 && helper.is_in_write();
                judged.outcome.cause == Cause::HostLock
                    && judged.any_culprit(|case, rank_index| case.stuck_helper(rank_index).is_some_and(writes))
            },
        },
    },
    TableRule {
        name: "storage",
        reason: "Storage that does not answer keeps a rank, whether or not others wait for that rank.",
        scenario: "hang::a_process_that_stands_in_storage_is_not_at_rest",
        rule: HangRule {
            evidence: HangEvidence::WaitChain,
            applies: |judged| {
                judged.outcome.cause == Cause::StorageIo
                    && judged.any_culprit(|case, rank_index| stands_in_storage(&case.view(rank_index).host))
            },
        },
    },
    TableRule {
        name: "own_process",
        reason: "A rank that waits for a process of its own waits forever if that process can never answer.",
        scenario: "hang::a_silent_rank_that_waits_for_a_process_of_its_own_hangs_if_that_can_never_answer",
        rule: HangRule {
            evidence: HangEvidence::WaitChain,
            applies: |judged| {
                let is_behind = |wait: &ProcessWait| wait.is_own && wait.proves_hang();
                judged.outcome.cause != Cause::StorageIo
                    && judged.any_culprit(|case, rank_index| case.graph.process_wait(rank_index).is_some_and(is_behind))
            },
        },
    },
    TableRule {
        name: "certain_cause",
        reason: "A loader, a kernel or a lock that certainly keeps a rank keeps it whether or not others wait for it.",
        scenario: "hang::a_rank_alone_in_uninterruptible_sleep_hangs",
        rule: HangRule {
            evidence: HangEvidence::WaitChain,
            applies: |judged| {
                matches!(judged.outcome.cause, Cause::DataLoader | Cause::DState | Cause::HostLock)
                    && judged.strength == Confidence::High
            },
        },
    },
];

/// The evidence that the job hangs. `XPU_TIMER_HANG_KILL` ends ranks and `XPU_TIMER_COMMON_HANG`
/// rises only on a verdict with such evidence. The cause and its confidence alone are not enough.
///
/// A silent rank that waits for its device proves nothing by itself: a compiled training loop is
/// one call of an hour.
///
/// `strength` is the confidence by the rules alone, and `victims` the number of ranks that wait for
/// the culprits.
pub(super) fn hang_evidence(case: &Case<'_>, outcome: &Outcome, strength: Confidence, victims: usize) -> HangEvidence {
    let judged = Judged { case, outcome, strength, victims, processes: outcome.conclusion.culprit_processes() };
    let found = rules(HANG_RULES).find(|rule| (rule.applies)(&judged));
    found.map_or(HangEvidence::None, |rule| rule.evidence)
}

impl Judged<'_, '_> {
    /// The culprits that are not ranks.
    fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.processes.iter().map(|process| &self.case.world.processes[*process].host)
    }

    fn any_culprit(&self, property: impl Fn(&Case<'_>, usize) -> bool) -> bool {
        self.outcome.culprits.iter().any(|rank_index| property(self.case, *rank_index))
    }

    /// Whether there are culprits, and all of them stand still.
    fn ends_still(&self) -> bool {
        let is_known = !self.outcome.culprits.is_empty() || !self.processes.is_empty();
        is_known && !self.any_culprit(|case, rank_index| !stands_still(case, rank_index)) && self.hosts().all(is_still)
    }
}

/// A culprit makes progress, and the others wait for no other culprit that is certain to stand
/// still.
fn culprit_progresses(judged: &Judged<'_, '_>) -> bool {
    let progresses = |rank_index: &usize| makes_progress(judged.case, *rank_index);
    let is_certain = |finding: &Finding| {
        finding.confidence == Confidence::High
            && !finding.culprits.is_empty()
            && !finding.culprits.iter().any(progresses)
    };
    judged.outcome.culprits.iter().any(progresses) && !judged.outcome.conclusion.findings().iter().any(is_certain)
}

/// Whether an operation has been pending for longer than the timeout. If nothing explains it, it
/// must be in the wait-for graph: a server that waits for a key of a store may only wait for its
/// next request.
fn operation_is_overdue(judged: &Judged<'_, '_>) -> bool {
    let case = judged.case;
    let is_explained = judged.outcome.cause != Cause::Unknown || !nothing_pending(case);
    let timeout_ns = case.evidence.hang_timeout_ns.max(1);
    let is_overdue = |rank_index| !case.view(rank_index).dead() && case.has_overdue_operation(rank_index, timeout_ns);
    is_explained && (0..case.world.views.len()).any(is_overdue)
}

/// Whether a process without a known waiter is stuck in storage. A process that reads a FIFO does
/// not count: it may be a server that reads its requests.
fn stands_in_storage(host: &Host) -> bool {
    let is_pipe = host.awaited.as_ref().is_some_and(|awaited| awaited.kind() == AwaitedKind::Pipe);
    host.stands_in_storage() && (!is_pipe || host.location.native.as_deref().is_some_and(stacks::is_send))
}

/// Whether the work of the threads and child processes for which a rank waits is progress: bytes
/// flowed, or one of them reached another line. A worker of a loader that computes, and a child
/// process that stays in one function, count until the others have waited for two hang timeouts. Up
/// to then it may be a large batch. After that, it may be an endless loop.
fn helpers_progress(case: &Case<'_>, rank_index: usize, moved: Movement) -> bool {
    let first = case.graph.waiters.iter().flatten().next();
    let waited_ns = first.map_or(0, |waiter| case.view(*waiter).oldest_pending_ns());
    let loads = moved.helper_busy && case.does(rank_index, Activity::DataLoader);
    let may_loop = moved.helper_may_loop || !moved.helper_progressed && loads;
    if may_loop { waited_ns < 2 * case.evidence.hang_timeout_ns } else { moved.helper_progressed }
}

/// The program of this rank made progress between the samples (it reached another line, bytes
/// flowed, or a thread or child process that it may wait for made progress), or its device worked
/// within the timeout.
fn makes_progress(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    let progressed = |moved: Movement| {
        moved.own_frame || moved.io || moved.library_progressed || helpers_progress(case, rank_index, moved)
    };
    !view.halted() && (view.host.moved.is_some_and(progressed) || uses_device(case, rank_index))
}

/// This rank has called its device, or the device has completed an operation, within the last
/// timeout. A rank that waits for it longer than that waits for a rank that is slow or elsewhere,
/// but not for one that stands still.
pub(super) fn uses_device(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    let Some(flight) = view.flight else { return false };
    let mut last_ns = flight.last_launch_ns;
    view.any_operation(|operation| {
        last_ns = last_ns.max(operation.completed_ns);
        false
    });
    last_ns != 0 && flight.read_ns.saturating_sub(last_ns) < case.evidence.hang_timeout_ns
}

/// The main thread of each culprit waits for a thread or child process that is busy, or the culprit
/// is a busy process that is not a rank. Like a busy main thread, that does not prove a hang.
pub(super) fn helpers_busy(case: &Case<'_>, outcome: &Outcome) -> bool {
    let waits = |host: &Host| host.moved.is_some_and(|moved| moved.helper_busy);
    let runs = |host: &Host| host.moved.is_some_and(Movement::is_progress);
    let processes = outcome.conclusion.culprit_processes();
    let hosts = processes.iter().map(|process| &case.world.processes[*process].host);
    let is_known = !outcome.culprits.is_empty() || !processes.is_empty();
    is_known
        && outcome.culprits.iter().all(|index| !case.view(*index).halted() && waits(&case.view(*index).host))
        && hosts.into_iter().all(|host| waits(host) || runs(host))
}

/// Its process is gone or stopped, or the two samples show that nothing moved.
fn stands_still(case: &Case<'_>, rank_index: usize) -> bool {
    case.view(rank_index).halted() || is_still(&case.view(rank_index).host)
}

/// Whether a process is halted or does nothing, or one of its requests never ends, whatever else it
/// does.
fn is_still(host: &Host) -> bool {
    host.stopped() || host.gone() || host.lost_request.is_some() || host.moved.is_some_and(|moved| !moved.is_progress())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::assert_table;

    #[test]
    fn every_rule_has_a_name_of_its_own_a_reason_and_a_scenario() {
        assert_table(UNEXPLAINED.iter().map(TableRule::texts));
        assert_table(HANG_RULES.iter().map(TableRule::texts));
    }
}
