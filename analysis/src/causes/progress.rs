//! `compile`, `python_gc` and `long_step`: others wait for a rank that makes progress, so this is
//! not a hang. The confidence is never high.

use crate::{
    case::Case,
    explanation::{Explanation, HostState},
    finding::{Exclusion, Fact, Finding, RankFact, Rule, never_ruled_out},
    graph::Suspect,
    verdict::{Activity, Cause, Confidence},
};

/// In larger jobs, the checks that visit all ranks for a suspect are skipped.
const MOST: usize = 1024;

/// `compile`: the main thread is in the frames of a compiler (torch.compile, Triton, a C++
/// extension, NVRTC), or it waits for a child process that is a compiler, or for the build of
/// another rank. The compiler makes progress: it uses a processor, moves bytes or reaches another
/// line. Compilers take minutes and end by themselves. One that stands still, and a build lock that
/// no compiler holds, are hangs. The confidence is never high.
pub(super) const COMPILE: Rule = Rule { cause: Cause::Compile, explain: compiles, rule_out: never_ruled_out };

/// `python_gc`: the frames of the garbage collector are on the main thread, in the last sample or
/// in both. A collection over a large heap takes seconds and ends by itself. The confidence is
/// never high, because a finalizer inside the collection can block.
pub(super) const PYTHON_GC: Rule =
    Rule { cause: Cause::PythonGc, explain: collects_garbage, rule_out: never_ruled_out };

/// `long_step`: between the samples the rank read or wrote bytes, or its own Python code reached
/// another line: an evaluation, a checkpoint or a preprocessing that takes longer than the timeout.
/// A busy processor at one and the same line proves nothing, because an endless loop is busy as
/// well. The rule also covers a device that is far behind its host: an operation in the awaited
/// streams started or completed between the samples. The confidence is never high.
pub(super) const LONG_STEP: Rule = Rule { cause: Cause::LongStep, explain: long_step, rule_out: stands_still };

fn compiles(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect)?;
    let activity = case.view(rank_index).host.observed.activity;
    let compiler = match activity {
        Activity::Compile => None,
        Activity::Unknown | Activity::Lock | Activity::Io => Some(case.compiler_child(rank_index)?),
        _ => return None,
    };
    // A rank in a build that stands still may wait for the build of another rank.
    let ranks = case.world.views.len();
    if !case.compiles(rank_index) && (ranks > MOST || !(0..ranks).any(|other| case.compiles(other))) {
        return None;
    }
    let evidence = vec![Fact::Explained, Fact::Position(rank_index)];
    let explanation = Explanation::Host { rank_index, state: HostState::Compiles { compiler } };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}

fn collects_garbage(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    let rank_index = case.host_rank(suspect).filter(|rank_index| case.does(*rank_index, Activity::Gc))?;
    let evidence = vec![RankFact::WitnessUnlessShown.of(rank_index), Fact::Position(rank_index)];
    let explanation = Explanation::Host { rank_index, state: HostState::CollectsGarbage };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}

fn long_step(case: &Case<'_>, suspect: &Suspect) -> Option<Finding> {
    if let Suspect::Device { rank_index, .. } = suspect {
        return slow_device(case, *rank_index);
    }
    let rank_index = case.host_rank(suspect)?;
    let view = case.view(rank_index);
    let moved = view.host.moved.filter(|moved| moved.io || moved.own_frame)?;
    if matches!(view.host.observed.activity, Activity::DeviceWait | Activity::CommInit) {
        return None;
    }
    let evidence = vec![Fact::Explained, Fact::Position(rank_index)];
    let state = HostState::MakesProgress { in_python: moved.own_frame };
    let explanation = Explanation::Host { rank_index, state };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}

/// The device is behind its host, and its stream makes progress: an operation started or completed
/// since the first sample.
fn slow_device(case: &Case<'_>, rank_index: usize) -> Option<Finding> {
    let view = case.view(rank_index);
    let read_ns = view.flight?.read_ns;
    let recent = |ns: u64| ns != 0 && read_ns.saturating_sub(ns) < case.evidence.sample_interval_ns;
    let streams: Vec<u64> = view.pending().map(|operation| operation.stream).collect();
    let progressed = view
        .operations()
        .filter(|operation| streams.contains(&operation.stream))
        .any(|operation| recent(operation.completed_ns) || recent(operation.started_ns));
    if !progressed {
        return None;
    }
    let evidence = vec![Fact::Explained, Fact::Position(rank_index)];
    let explanation = Explanation::Host { rank_index, state: HostState::SlowDevice };
    Some(Finding { culprits: vec![rank_index], explanation, confidence: Confidence::Medium, evidence })
}

fn stands_still(case: &Case<'_>, culprits: &[usize]) -> Option<Exclusion> {
    culprits.first()?;
    let frozen = culprits
        .iter()
        .all(|rank_index| case.view(*rank_index).host.moved.is_some() && case.view(*rank_index).host.frozen());
    frozen.then_some(Exclusion::NoProgress)
}
