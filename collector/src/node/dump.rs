//! The work of one incident on a thread of its own: two samples, the rings, the verdict, the
//! folder, the viewer. Every step has a deadline. A failed step becomes an entry in the result.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Condvar, Mutex},
    time::{Duration, Instant},
};

use tracing::{error, info, warn};
use xpu_timer_analysis::{Status, Verdict, names_absent, stay::stay};
use xpu_timer_proto::v1::{Evidence, RankEvidence};

use crate::{
    incident::{judging, mild, part::PartLocation},
    job::partition::ProcessId,
    node::{
        captures::{Captures, Scope},
        evidence::{RankCapture, Subject, elsewhere, has_stacks, of_ended_process},
        folder_writer::{self, DeferredTimelines, Findings, WriteResult},
        plan::{DumpTask, Outcome, add_unregistered, world},
        related::{RelatedProcesses, connected_processes, family},
        sharers,
    },
    os::clock::Now,
};

/// Ends the waits of running dumps when the collector stops.
#[derive(Debug, Default)]
pub(super) struct ShutdownFlag {
    set: Mutex<bool>,
    changed: Condvar,
}

impl ShutdownFlag {
    /// Ends all current and future waits.
    pub(super) fn set(&self) {
        *self.set.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn wait_until(&self, deadline: Instant) {
        let set = self.set.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        // Whether the wait ended by timeout or by `set` makes no difference.
        drop(self.changed.wait_timeout_while(set, left, |set| !*set));
    }
}

/// The deadline for one sample of all ranks of the node.
const CAPTURE_DEADLINE: Duration = Duration::from_millis(1200);
/// The first sample finds all caches cold (a libtorch has half a gigabyte), so it may use the time
/// up to the second one.
const LONGEST_CAPTURE: Duration = Duration::from_secs(5);
/// The time from the stacks to the reading of the flight records. A watcher writes ten times a
/// second which operations have completed. So an operation that its record shows as pending was
/// pending when the stacks were captured.
const RECORD_LAG: Duration = Duration::from_millis(150);
/// Time limit to find the processes with connections to other machines.
const CONNECTIONS_DEADLINE: Duration = Duration::from_millis(200);
/// The time from the trigger to the finished folder, beyond the sample interval.
const BUDGET: Duration = Duration::from_millis(2700);

/// Dumps, judges and writes one incident. Returns an outcome even when a step fails, and the
/// timelines that are to be written when the outcome is published.
pub(super) fn run(
    task: DumpTask,
    captures: &Captures,
    shutdown: &ShutdownFlag,
) -> (Outcome, Option<DeferredTimelines>) {
    let evidence = task.plan.evidence();
    let timeline_path = task.timeline_path.clone();
    judging::catch_panic(|| work(task, captures, shutdown)).unwrap_or_else(|why| {
        let incident = evidence.incident.clone();
        error!("incident {incident}: its dump failed: {why}");
        let verdict = judging::unknown(&evidence, format!("There is no verdict, because the dump failed ({why})."));
        let sampled_ns = Now::get().mono_ns;
        let nothing = (None, false, None);
        (outcome(incident, verdict, timeline_path, sampled_ns, nothing), None)
    })
}

fn work(mut task: DumpTask, captures: &Captures, shutdown: &ShutdownFlag) -> (Outcome, Option<DeferredTimelines>) {
    let begun = Instant::now();
    let sampled_ns = Now::get().mono_ns;
    add_unregistered(&mut task);
    let mut taken: BTreeMap<u32, RankCapture> = BTreeMap::new();
    let mut related = RelatedProcesses::default();
    let first_deadline = task.plan.sample_interval.clamp(CAPTURE_DEADLINE, LONGEST_CAPTURE);
    sample(&mut task, captures, 0, first_deadline, &mut taken);
    let mut others = family_of_missing(&task);
    if task.for_cluster.is_some() {
        // Ranks of other nodes may wait for processes here.
        others.extend(connected_processes(&task.commands, &taken, CONNECTIONS_DEADLINE));
    }
    related.sample(0, captures, &taken, &others, CAPTURE_DEADLINE);
    info!("incident {}: the first sample took {:.0?}", task.plan.head.id, begun.elapsed());
    shutdown.wait_until(begun + task.plan.sample_interval);
    let second = Instant::now();
    sample(&mut task, captures, 1, CAPTURE_DEADLINE, &mut taken);
    let captured = Instant::now();
    related.sample(1, captures, &taken, &[], CAPTURE_DEADLINE);
    info!("incident {}: the second sample took {:.0?}", task.plan.head.id, second.elapsed());
    shutdown.wait_until(captured + RECORD_LAG);
    for subject in &mut task.subjects {
        subject.read_ring(taken.entry(subject.rank).or_default());
        subject.refresh();
    }

    let mut evidence = evidence(&task, taken, related);
    for rank in &mut evidence.ranks {
        let of_rank = task.timelines.iter().find(|(number, _)| *number == rank.rank);
        rank.stay = of_rank.and_then(|(_, timeline)| stay(timeline.samples.as_ref()?));
    }
    let mut verdict = judging::judge(&evidence);
    task.plan.date(&mut verdict);
    let deadline = begun + task.plan.sample_interval + BUDGET;
    let (incident, timeline_path) = (task.plan.head.id.clone(), task.timeline_path.clone());
    task.is_mild = task.may_be_mild && !task.is_part() && mild::is_mild(&verdict);
    if task.is_mild {
        verdict.timing.status = Status::Mild;
    }
    let is_mild = task.is_mild;
    let timelines = DeferredTimelines::take(&mut task, &verdict, evidence.world_size);
    let WriteResult { path, written, part, verdict } =
        folder_writer::write(Findings { task, evidence }, verdict, deadline);
    let timelines = timelines.filter(|_| written);
    let outcome = outcome(incident, verdict, timeline_path, sampled_ns, (path, written, part));
    (Outcome { is_mild, timelines_follow: timelines.is_some(), ..outcome }, timelines)
}

/// The processes that may be about to become a missing rank.
fn family_of_missing(task: &DumpTask) -> Vec<i32> {
    let pids: Vec<i32> = task.subjects.iter().filter_map(Subject::pid).collect();
    let (world_size, _) = world(&task.subjects);
    let is_complete = usize::try_from(world_size).is_ok_and(|size| task.subjects.len() >= size);
    if is_complete { Vec::new() } else { family(&pids) }
}

fn outcome(
    incident: String,
    verdict: Verdict,
    timeline_path: PathBuf,
    sampled_ns: u64,
    (path, written, part): (Option<PathBuf>, bool, Option<PartLocation>),
) -> Outcome {
    Outcome {
        incident,
        path,
        verdict,
        is_mild: false,
        written,
        timeline_path,
        sampled_ns,
        part,
        timelines_follow: false,
    }
}

/// Takes one sample of all ranks. For ranks whose process has ended only the ring remains.
fn sample(
    task: &mut DumpTask,
    captures: &Captures,
    which: usize,
    deadline: Duration,
    taken: &mut BTreeMap<u32, RankCapture>,
) {
    for subject in &mut task.subjects {
        subject.refresh();
    }
    let pids: BTreeMap<i32, u32> =
        task.subjects.iter().filter_map(|subject| Some((subject.pid()?, subject.rank))).collect();
    let asked: Vec<i32> = pids.keys().copied().collect();
    let result = captures.capture(&asked, Scope::WithChildren, deadline);
    match result {
        Ok(processes) => {
            for process in processes {
                let Some(rank) = pids.get(&process.pid) else { continue };
                let taken = taken.entry(*rank).or_default();
                if has_stacks(&process.sample) {
                    taken.samples[which] = Some(process);
                } else {
                    taken.errors.extend(process.sample.errors);
                }
            }
        }
        Err(error) => {
            warn!("incident {}: sample {} of pids {asked:?} failed: {error}", task.plan.head.id, which + 1);
            for rank in pids.values() {
                taken.entry(*rank).or_default().errors.push(format!("sample {}: {error}", which + 1));
            }
        }
    }
    // A process that ended meanwhile is dead, not just unreadable.
    for subject in &mut task.subjects {
        subject.refresh();
    }
}

/// The end of the launched command, which the verdict always contains.
fn ended_command_text(task: &DumpTask, command: ProcessId) -> String {
    let known = task.ended_commands.iter().find(|ended| ended.process == command);
    let name = known.map(|ended| format!(" ({})", ended.command)).unwrap_or_default();
    let how = known.and_then(|ended| ended.exit.as_ref()).map(|exit| format!(": {exit}")).unwrap_or_default();
    format!("its launched command, pid {}{name}, has ended{how}", command.0)
}

fn evidence(task: &DumpTask, mut taken: BTreeMap<u32, RankCapture>, related: RelatedProcesses) -> Evidence {
    // The judge finds a process by its pid and the node of the rank that waits for it.
    let node = task.subjects.first().map_or(&task.node, |subject| &subject.node);
    let ended_parents: BTreeSet<i32> = task.subjects.iter().filter_map(Subject::ended_parent).collect();
    let mut pids = related.pids();
    pids.extend(task.subjects.iter().filter_map(|subject| Some(subject.process.as_ref()?.pid)));
    let mut processes = related.evidence(&taken, node);
    pids.extend(processes.iter().filter_map(|process| Some(process.dump.as_ref()?.pid)));
    processes.extend(ended_parents.into_iter().map(|pid| of_ended_process(pid, "", "", node)));
    processes.extend(sharers::evidence(&task.ended_sharers, &pids, node));
    let (world_size, here) = world(&task.subjects);
    let mut ranks: BTreeMap<u32, RankEvidence> = BTreeMap::new();
    if let Some(here) = here.filter(|_| names_absent(world_size, task.subjects.len())) {
        ranks.extend((0..world_size).filter(|rank| !here.contains(rank)).map(|rank| (rank, elsewhere(rank))));
    }
    for subject in &task.subjects {
        let mut rank = subject.evidence(taken.remove(&subject.rank).unwrap_or_default());
        let is_known = |command: ProcessId| task.ended_commands.iter().any(|ended| ended.process == command);
        rank.errors.extend(subject.ended_command(is_known).map(|command| ended_command_text(task, command)));
        ranks.insert(subject.rank, rank);
    }
    Evidence { world_size, ranks: ranks.into_values().collect(), processes, ..task.plan.evidence() }
}
