//! The processes that ranks wait for and that are not ranks themselves, directly or through others:
//! an engine, a server, a launcher. They are found through what the captured threads wait for, and
//! captured like ranks.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::{Duration, Instant},
};

use tracing::warn;
use xpu_timer_capture::{ProcessCapture, connected_to_other_machines};
use xpu_timer_proto::{procfs, v1::ProcessEvidence};

use crate::node::{
    captures::{Captures, Scope},
    evidence::{RankCapture, has_stacks, of_process},
};

/// Maximum number of such processes of one incident.
const MAX_PROCESSES: usize = 32;
/// Maximum number of parents, and of their children, that are captured because a rank is missing.
const MAX_FAMILY: usize = 16;
/// Number of processes below the launched commands whose connections are checked.
const MAX_BELOW_COMMANDS: usize = 256;
/// Number of these that are captured.
const MAX_CONNECTED: usize = 16;
/// Maximum number of processes between a rank and the end of a chain.
const MAX_CHAIN: usize = 8;

/// The related processes of one incident, by pid.
#[derive(Debug, Default)]
pub(super) struct RelatedProcesses {
    samples: BTreeMap<i32, [Option<ProcessCapture>; 2]>,
}

impl RelatedProcesses {
    /// Captures the processes that the sample `which` of the ranks leads to, and `others`, until no
    /// new one is found or the time is up. Those of the first sample are captured again in the
    /// second.
    pub(super) fn sample(
        &mut self,
        which: usize,
        captures: &Captures,
        ranks: &BTreeMap<u32, RankCapture>,
        others: &[i32],
        deadline: Duration,
    ) {
        let until = Instant::now() + deadline;
        let of_ranks: Vec<&ProcessCapture> =
            ranks.values().filter_map(|taken| taken.samples[which].as_ref()).flat_map(with_children).collect();
        // Another user's process is none of the job's.
        let owners: BTreeSet<u32> = of_ranks.iter().filter_map(|process| procfs::owner(process.pid)).collect();
        let captured: BTreeSet<i32> = of_ranks.iter().map(|process| process.pid).collect();
        let mut wanted: BTreeSet<i32> = self.samples.keys().copied().collect();
        wanted.extend(of_ranks.iter().flat_map(|process| awaited(process)));
        wanted.extend(others);
        for _ in 0..MAX_CHAIN {
            let is_new = |pid: &i32| {
                let is_known =
                    captured.contains(pid) || self.samples.get(pid).is_some_and(|both| both[which].is_some());
                !is_known && *pid > 1 && *pid != std::process::id().cast_signed()
            };
            let is_ours = |pid: &i32| procfs::owner(*pid).is_some_and(|owner| owners.contains(&owner));
            let room = MAX_PROCESSES.saturating_sub(self.samples.len());
            let (again, new): (Vec<i32>, Vec<i32>) =
                wanted.iter().copied().filter(is_new).filter(is_ours).partition(|pid| self.samples.contains_key(pid));
            let asked: Vec<i32> = again.into_iter().chain(new.into_iter().take(room)).collect();
            let left = until.saturating_duration_since(Instant::now());
            if asked.is_empty() || left.is_zero() {
                break;
            }
            match captures.capture(&asked, Scope::Alone, left) {
                Ok(processes) => {
                    for process in processes.into_iter().filter(|process| has_stacks(&process.sample)) {
                        wanted.extend(awaited(&process));
                        let pid = process.pid;
                        self.samples.entry(pid).or_default()[which] = Some(process);
                    }
                }
                Err(error) => {
                    warn!("the processes {asked:?}, for which ranks wait, could not be captured: {error}");
                    break;
                }
            }
            // One that could not be captured is not tried again.
            wanted.retain(|pid| !asked.contains(pid));
        }
    }

    /// Their pids.
    #[must_use]
    pub(super) fn pids(&self) -> BTreeSet<i32> {
        self.samples.keys().copied().collect()
    }

    /// The evidence of these processes, and of the children of ranks that captured threads wait
    /// for.
    #[must_use]
    pub(super) fn evidence(self, ranks: &BTreeMap<u32, RankCapture>, node: &str) -> Vec<ProcessEvidence> {
        let all = ranks.values().flat_map(|taken| taken.samples.iter().flatten()).flat_map(with_children);
        let related = self.samples.values().flatten().flatten();
        let awaited: BTreeSet<i32> = all.chain(related).flat_map(awaited).collect();
        let children = ranks.values().flat_map(children).filter(|(pid, _)| awaited.contains(pid));
        let children = children.map(|(_, [first, last])| of_process([first.cloned(), last.cloned()], node));
        children.chain(self.samples.into_values().map(|samples| of_process(samples, node))).collect()
    }
}

/// The parents of ranks and the other children of these parents. One of them may be about to become
/// a rank that is missing.
#[must_use]
pub(super) fn family(ranks: &[i32]) -> Vec<i32> {
    let parents: BTreeSet<i32> =
        ranks.iter().filter_map(|pid| procfs::stat(*pid).ok()).map(|stat| stat.parent).filter(|pid| *pid > 1).collect();
    let children = parents.iter().flat_map(|parent| procfs::children(*parent, MAX_FAMILY).unwrap_or_default());
    let children: BTreeSet<i32> = children.filter(|pid| !ranks.contains(pid)).take(MAX_FAMILY).collect();
    parents.iter().copied().take(MAX_FAMILY).chain(children).collect()
}

/// The launched commands and their descendants that have a TCP connection to another machine: ranks
/// of other nodes may wait for them.
#[must_use]
pub(super) fn connected_processes(
    commands: &[i32],
    ranks: &BTreeMap<u32, RankCapture>,
    deadline: Duration,
) -> Vec<i32> {
    let until = Instant::now() + deadline;
    let of_ranks = ranks.values().flat_map(|taken| taken.samples.iter().flatten()).flat_map(with_children);
    let of_ranks: HashSet<i32> = of_ranks.map(|process| process.pid).collect();
    let others = commands.iter().copied().filter(|pid| !of_ranks.contains(pid));
    let below = |pid: i32| std::iter::once(pid).chain(procfs::descendants_until(pid, &of_ranks, Some(until)).0);
    let all: BTreeSet<i32> = others.flat_map(below).take(MAX_BELOW_COMMANDS).collect();
    let mut connected = connected_to_other_machines(all, until);
    connected.truncate(MAX_CONNECTED);
    connected
}

fn with_children(process: &ProcessCapture) -> Vec<&ProcessCapture> {
    std::iter::once(process).chain(&process.children).collect()
}

/// The children of a rank, in both samples.
fn children(taken: &RankCapture) -> BTreeMap<i32, [Option<&ProcessCapture>; 2]> {
    let mut children: BTreeMap<i32, [Option<&ProcessCapture>; 2]> = BTreeMap::new();
    for (which, sample) in taken.samples.iter().enumerate() {
        for child in sample.iter().flat_map(|process| &process.children) {
            children.entry(child.pid).or_default()[which] = Some(child);
        }
    }
    children
}

/// The processes that the threads of a process wait for, or whose memory its main thread may poll.
fn awaited(process: &ProcessCapture) -> Vec<i32> {
    let threads = || process.sample.stacktrace.iter();
    let holders = threads().filter_map(|thread| thread.awaited.as_ref()).flat_map(|awaited| &awaited.holders);
    holders.chain(threads().flat_map(|thread| &thread.sharers)).map(|holder| holder.pid).collect()
}
