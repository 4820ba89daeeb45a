//! How likely a verdict is right: the share of right verdicts of its kind among the first verdicts
//! on programs that nobody had seen when the judge was written.
//!
//! `cargo xtask hangs --calibrate` evaluates the estimate; `docs/verdict.md` explains it.

use std::fmt;

use xpu_timer_proto::{
    server::{Awaited, AwaitedKind},
    v1::Evidence,
};

use crate::{
    alias,
    case::Case,
    stacks, suspended,
    verdict::{Activity, Cause, Confidence, Verdict, VerdictKind},
};

/// First verdicts of one kind and one strength of evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tally {
    /// The kind.
    pub kind: VerdictKind,
    /// The confidence that the rules of the judge alone give.
    pub strength: Confidence,
    /// How many named exactly the right culprits.
    pub right: u32,
    /// How many there are.
    pub all: u32,
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "Tally {{ kind: VerdictKind::{:?}, strength: Confidence::{:?}, right: {}, all: {} }},",
            self.kind, self.strength, self.right, self.all
        )
    }
}

/// The verdicts in `tests/hangs/first_runs.jsonl`. `cargo xtask bless` writes the lines between the
/// markers.
pub const FIRST_RUNS: &[Tally] = &[
    // generated: begin
    Tally { kind: VerdictKind::ByItself, strength: Confidence::Low, right: 0, all: 3 },
    Tally { kind: VerdictKind::ByItself, strength: Confidence::Medium, right: 46, all: 52 },
    Tally { kind: VerdictKind::ByItself, strength: Confidence::High, right: 41, all: 41 },
    Tally { kind: VerdictKind::OpenWait, strength: Confidence::Medium, right: 15, all: 52 },
    Tally { kind: VerdictKind::OpenWait, strength: Confidence::High, right: 7, all: 27 },
    Tally { kind: VerdictKind::BehindProcess, strength: Confidence::Medium, right: 20, all: 26 },
    Tally { kind: VerdictKind::BehindProcess, strength: Confidence::High, right: 2, all: 2 },
    Tally { kind: VerdictKind::Progress, strength: Confidence::Medium, right: 1, all: 1 },
    Tally { kind: VerdictKind::Nobody, strength: Confidence::Low, right: 15, all: 21 },
    Tally { kind: VerdictKind::Nobody, strength: Confidence::Medium, right: 2, all: 4 },
    // generated: end
];

/// The lowest probability of a verdict with high confidence.
pub const HIGH: f64 = 0.99;

/// The weight of what is known before the first verdict of a kind, in verdicts. If two thirds of
/// all verdicts of a strength were right, a kind needs 17 right verdicts and no wrong one to be
/// trusted in 99 of 100 cases.
const PRIOR: f64 = 0.5;

/// The estimated probability that a verdict names exactly the right culprits: the share of right
/// verdicts of its kind, and half a verdict that is right as often as all of its strength. A kind
/// without a verdict thus has the probability of its strength.
#[must_use]
pub fn probability(tallies: &[Tally], kind: VerdictKind, strength: Confidence) -> f64 {
    let sum = |chosen: &dyn Fn(&Tally) -> bool| {
        let chosen = tallies.iter().filter(|tally| tally.strength == strength && chosen(tally));
        chosen.fold((0, 0), |(right, all), tally| (right + tally.right, all + tally.all))
    };
    let (right, all) = sum(&|tally| tally.kind == kind);
    let (right_alike, all_alike) = sum(&|_| true);
    let prior = if all_alike == 0 { 0.5 } else { f64::from(right_alike) / f64::from(all_alike) };
    (f64::from(right) + PRIOR * prior) / (f64::from(all) + PRIOR)
}

/// The confidence of a verdict: that of the rules, and high only if the kind is that often right
/// and was never wrong.
#[must_use]
pub fn confidence(tallies: &[Tally], kind: VerdictKind, strength: Confidence) -> Confidence {
    let was_wrong =
        tallies.iter().any(|tally| (tally.kind, tally.strength) == (kind, strength) && tally.right < tally.all);
    let is_trusted = !was_wrong && probability(tallies, kind, strength) >= HIGH;
    if is_trusted { strength } else { strength.min(Confidence::Medium) }
}

/// The kind of a verdict of an earlier release, by its evidence.
#[must_use]
pub fn kind_of(evidence: &Evidence, verdict: &Verdict) -> VerdictKind {
    let (evidence, _) = alias::resolved(evidence, &[]);
    let case = Case::of(&evidence, &[]);
    let is_culprit = |index: &usize| verdict.culprits.contains(&case.view(*index).rank);
    let culprits: Vec<usize> = (0..case.world.views.len()).filter(is_culprit).collect();
    let others = verdict.culprit_processes.iter().any(|process| process.rank.is_none());
    kind(&case, verdict.cause, &culprits, others)
}

/// The kind of a verdict with these culprits, as rank indices. `others` if processes that belong to
/// no rank are culprits too.
pub(crate) fn kind(case: &Case<'_>, cause: Cause, culprits: &[usize], others: bool) -> VerdictKind {
    let is_shown = matches!(
        cause,
        Cause::ProcessDead
            | Cause::ProcessStopped
            | Cause::DState
            | Cause::GilDeadlock
            | Cause::OpMismatch
            | Cause::SizeMismatch
            | Cause::DtypeMismatch
            | Cause::KernelHang
            | Cause::NetworkStall
    );
    let waits_for_process = |index: &usize| case.graph.process_wait(*index).is_some();
    match cause {
        _ if others => VerdictKind::BehindProcess,
        Cause::LongStep | Cause::Compile | Cause::PythonGc => VerdictKind::Progress,
        Cause::Unknown | Cause::NotAHang => VerdictKind::Nobody,
        _ if culprits.is_empty() && cause != Cause::NetworkStall => VerdictKind::Nobody,
        _ if !is_shown && culprits.iter().any(waits_for_process) => VerdictKind::BehindProcess,
        _ if !is_shown && culprits.iter().any(|index| may_wait_for_process(case, *index)) => VerdictKind::OpenWait,
        _ => VerdictKind::ByItself,
    }
}

/// The main thread of a rank waits for something that another process may do, or may have done
/// before it ended: it reads from a pipe or a socket, waits in a lock that processes share, or
/// polls.
fn may_wait_for_process(case: &Case<'_>, rank_index: usize) -> bool {
    let view = case.view(rank_index);
    if view.halted() || case.does(rank_index, Activity::DeviceWait) {
        return false;
    }
    let is_own = |awaited: &Awaited| awaited.holders.iter().all(|holder| Some(holder.pid) == view.pid());
    // An event loop that only its own threads can wake, and these wait for nothing else.
    let wakes_itself = |awaited: &Awaited| !awaited.holders.is_empty() && is_own(awaited);
    let has_tasks = || view.evidence.is_some_and(|evidence| !suspended::of_rank(evidence).is_empty());
    if view.host.thread_waits.is_empty() && view.host.awaited.as_ref().is_some_and(wakes_itself) && has_tasks() {
        return false;
    }
    let is_open = view.host.awaited.as_ref().is_some_and(|awaited| match awaited.kind() {
        AwaitedKind::Unspecified | AwaitedKind::File | AwaitedKind::Mutex => false,
        AwaitedKind::Lock => awaited.holders.is_empty() || !is_own(awaited),
        AwaitedKind::Pipe
        | AwaitedKind::Socket
        | AwaitedKind::Child
        | AwaitedKind::Event
        | AwaitedKind::Several
        | AwaitedKind::SharedMemory
        | AwaitedKind::Semaphore
        | AwaitedKind::MessageQueue => true,
    });
    is_open
        || stacks::is_shared_lock(&view.host.observed.witness)
        || case.waits_for_peer(rank_index)
        || case.waits_for_message(rank_index)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOME: &[Tally] = &[
        Tally { kind: VerdictKind::ByItself, strength: Confidence::High, right: 40, all: 40 },
        Tally { kind: VerdictKind::OpenWait, strength: Confidence::High, right: 0, all: 20 },
        Tally { kind: VerdictKind::ByItself, strength: Confidence::Medium, right: 9, all: 10 },
    ];

    #[test]
    fn high_needs_enough_right_verdicts_and_no_wrong_one() {
        let high = |tallies: &[Tally]| confidence(tallies, VerdictKind::ByItself, Confidence::High);
        assert_eq!(high(SOME), Confidence::High);
        let few = |all| [Tally { right: all, all, ..SOME[0] }, SOME[1]];
        assert_eq!((high(&few(5)), high(&few(60))), (Confidence::Medium, Confidence::High));
        assert_eq!(high(&[Tally { right: 999, all: 1000, ..SOME[0] }]), Confidence::Medium);
        assert_eq!(high(&[]), Confidence::Medium);
    }

    #[test]
    fn a_kind_without_a_verdict_has_the_share_of_its_strength() {
        let chance = probability(SOME, VerdictKind::BehindProcess, Confidence::High);
        assert!((chance - 40.0 / 60.0).abs() < 1e-12, "{chance}");
        assert_eq!(confidence(SOME, VerdictKind::BehindProcess, Confidence::High), Confidence::Medium);
        let chance = probability(SOME, VerdictKind::ByItself, Confidence::Low);
        assert!((chance - 0.5).abs() < 1e-12, "{chance}");
    }

    #[test]
    fn a_weak_strength_is_never_raised() {
        let sure = [Tally { kind: VerdictKind::ByItself, strength: Confidence::Medium, right: 500, all: 500 }];
        assert_eq!(confidence(&sure, VerdictKind::ByItself, Confidence::Medium), Confidence::Medium);
        assert!(probability(&sure, VerdictKind::ByItself, Confidence::Medium) > HIGH);
    }

    #[test]
    fn no_kind_that_was_wrong_is_trusted() {
        assert!(!FIRST_RUNS.is_empty());
        for tally in FIRST_RUNS.iter().filter(|tally| tally.right < tally.all) {
            assert_eq!(confidence(FIRST_RUNS, tally.kind, tally.strength).max(Confidence::Medium), Confidence::Medium);
        }
    }
}
