//! The input and the outcome of one dump of a job's ranks on this node, and the choice of these
//! ranks: the registered ones, and those that never registered because they made no device call.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::unistd::getuid;
use xpu_timer_analysis::Verdict;
use xpu_timer_proto::v1::{Presence as Shown, RankInfo, TriggerKind};

use crate::{
    incident::{Plan, engine::Record, mild, part::PartLocation},
    job::{
        JobKey,
        partition::{self, Member},
    },
    node::{
        evidence::{self, Subject},
        failures::SharedFault,
        launched::{EndedCommand, State, Unregistered},
        registry::{Presence, Rank, Registry},
        sharers::EndedSharer,
    },
    os::{
        clock::{self, Now},
        process::{self, Handle, RankProcess},
    },
    timeline::files::RankTimeline,
};

/// A dump of the ranks of a job on this node.
#[derive(Debug)]
pub(super) struct DumpTask {
    /// The plan of the dump.
    pub plan: Plan,
    /// The job's registered ranks on this node, in ascending order.
    pub subjects: Vec<Subject>,
    /// The timelines of these ranks; none if nothing is recorded, or if they are written later.
    pub timelines: Vec<(u32, RankTimeline)>,
    /// Whether the timelines are written after the verdict was published.
    pub timelines_follow: bool,
    /// Its known ranks on this node that have not registered.
    pub unregistered: Vec<Unregistered>,
    /// All known processes with this job name, and their jobs.
    pub members: Vec<(Member, JobKey)>,
    /// Name of this node.
    pub node: String,
    /// The socket of this collector.
    pub socket: PathBuf,
    /// The folder that gets the incident folder.
    pub timeline_path: PathBuf,
    /// The folder to use when that cannot be written.
    pub fallback_path: PathBuf,
    /// The state of the incident that a next collector needs if this one is killed while it writes.
    pub record: Record,
    /// The part to keep for the cluster collector; `None` without one.
    pub for_cluster: Option<ClusterPart>,
    /// Whether a verdict without a hang is only logged, and its dump kept as a mild capture. The
    /// verdict on a part of a job is that of the cluster collector, which decides it.
    pub may_be_mild: bool,
    /// Whether the verdict is one of those.
    pub is_mild: bool,
    /// The pids of the launched commands that run on this node.
    pub commands: Vec<i32>,
    /// The launched commands of this node that have ended.
    pub ended_commands: Vec<EndedCommand>,
    /// Processes that were killed or failed about when the job launched something last, and that
    /// had memory in common with others.
    pub ended_sharers: Vec<EndedSharer>,
    /// When the first process of the job was started, CLOCK_MONOTONIC.
    pub job_started_ns: u64,
}

/// A part of a job-wide incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClusterPart {
    /// Number of operations of each flight record that the cluster gets.
    pub operations: usize,
    /// The cluster did not answer: the node draws the pictures and reports by itself, and keeps the
    /// part for later.
    pub alone: bool,
}

impl DumpTask {
    /// Whether the verdict is made elsewhere.
    pub(crate) fn is_part(&self) -> bool {
        self.for_cluster.is_some_and(|part| !part.alone)
    }

    /// Whether the cluster collector decides if its job is only idle. Nobody waits for its verdict.
    pub(crate) fn is_examined_part(&self) -> bool {
        self.is_part() && self.may_be_mild && self.plan.head.trigger.kind() == TriggerKind::Idle
    }

    /// The job, to find its mild captures.
    pub(crate) fn captured_job(&self) -> mild::OfJob {
        let Record { job, instance, boot, .. } = self.record.clone();
        mild::OfJob { job, instance, boot, started_ns: self.job_started_ns }
    }
}

/// The outcome of a dump.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Name of the incident.
    pub incident: String,
    /// Its folder; `None` when none could be made.
    pub path: Option<PathBuf>,
    /// The verdict.
    pub verdict: Verdict,
    /// The verdict shows no problem. `path` is the folder of the mild capture.
    pub is_mild: bool,
    /// Whether its folder has the verdict.
    pub written: bool,
    /// The folder that should have got the incident folder.
    pub timeline_path: PathBuf,
    /// When the first sample began, CLOCK_MONOTONIC.
    pub sampled_ns: u64,
    /// The part for the cluster collector.
    pub part: Option<PartLocation>,
    /// Whether the timelines of the ranks are still to be written into the folder.
    pub timelines_follow: bool,
}

/// Records the time from the timeout until now.
pub(crate) fn finish_times(plan: &Plan, verdict: &mut Verdict) {
    let since = Now::get().mono_ns.saturating_sub(plan.head.opened.mono_ns) + plan.head.late_ns;
    verdict.timing.seconds_from_timeout = Some(clock::seconds(since));
}

/// The registered ranks of a job.
#[must_use]
pub(super) fn registered_subjects(registry: &Registry, job: &JobKey, node: &str) -> Vec<Subject> {
    registry.of_job(job).into_iter().map(|rank| subject(rank, node)).collect()
}

fn subject(rank: &Rank, node: &str) -> Subject {
    let named = !matches!(rank.info.node.as_str(), "" | "NOT_SET");
    Subject {
        // A process that does not know its rank is a job of its own, and its only rank.
        rank: u32::try_from(rank.info.rank).unwrap_or(0),
        presence: match rank.presence {
            // A process that is stuck in its exit is still there to be captured.
            Presence::Present | Presence::Detached => Shown::Present,
            Presence::Left if rank.lingers => Shown::Present,
            Presence::Dead => Shown::Dead,
            Presence::Left => Shown::Left,
        },
        info: rank.info.clone(),
        process: rank.process.clone(),
        ring: rank.ring.clone(),
        exit: rank.exit.clone(),
        node: if named { rank.info.node.clone() } else { node.to_string() },
        lingers: rank.lingers,
        registered: true,
        fault: Arc::clone(&rank.fault),
    }
}

/// Adds the job's ranks that have not registered. A process that a launcher has started comes
/// before those that are found by their variables alone: these may be its descendants.
pub(super) fn add_unregistered(task: &mut DumpTask) {
    let (running, ended): (Vec<Unregistered>, Vec<Unregistered>) =
        std::mem::take(&mut task.unregistered).into_iter().partition(|rank| matches!(rank.state, State::Runs(_)));
    add_launched(&mut task.subjects, running, &task.node);
    add_found(task);
    add_launched(&mut task.subjects, ended, &task.node);
}

/// Adds the processes of the job's other ranks that run under our hook and never registered. They
/// must use this collector's socket, because another job of the same name may run on this node.
fn add_found(task: &mut DumpTask) {
    let world_size = known_size(&task.subjects);
    let is_known = |found: &RankProcess| {
        let mut known = task.members.iter().filter_map(|(member, _)| member.process);
        known.any(|process| process == (found.pid, found.start))
    };
    let may_be = |found: &RankProcess| {
        found.info.job == task.plan.head.job.name
            && found.info.attempt == task.plan.head.attempt
            && may_belong_to_world(&found.info, world_size)
            && found.socket == task.socket
            && !is_known(found)
    };
    let now_ns = Now::get().mono_ns;
    let found: Vec<RankProcess> = process::scan(getuid().as_raw()).into_iter().filter(may_be).collect();
    let mut by_rank: BTreeMap<i32, Vec<RankProcess>> = BTreeMap::new();
    for found in of_job(&task.plan.head.job, &task.members, found, now_ns) {
        if !task.subjects.iter().any(|subject| subject.rank as i32 == found.info.rank) {
            by_rank.entry(found.info.rank).or_default().push(found);
        }
    }
    let (subjects, node) = (&mut task.subjects, &task.node);
    for (_, mut candidates) in by_rank {
        let pid = main_process(&candidates, is_shell);
        let Some(index) = candidates.iter().position(|found| found.pid == pid) else { continue };
        let found = candidates.swap_remove(index);
        let Ok(handle) = Handle::open(found.pid) else { continue };
        if handle.start != found.start {
            continue;
        }
        subjects.push(Subject {
            rank: found.info.rank as u32,
            presence: Shown::Unregistered,
            info: found.info,
            process: Some(Arc::new(handle)),
            ring: None,
            exit: None,
            node: node.to_string(),
            lingers: false,
            registered: false,
            fault: SharedFault::default(),
        });
    }
    subjects.sort_by_key(|subject| subject.rank);
}

/// Selects the processes that belong to a job, by all that is known about the jobs of its name.
fn of_job(job: &JobKey, members: &[(Member, JobKey)], found: Vec<RankProcess>, now_ns: u64) -> Vec<RankProcess> {
    let all: Vec<Member> = members
        .iter()
        .map(|(member, _)| member.clone())
        .chain(found.iter().map(|found| found.member(now_ns)))
        .collect();
    let assignments = partition::partition(&all);
    let groups: BTreeSet<usize> = members
        .iter()
        .zip(&assignments)
        .filter(|((_, key), _)| key == job)
        .map(|(_, assignment)| assignment.group)
        .collect();
    found
        .into_iter()
        .zip(&assignments[members.len()..])
        .filter(|(_, assignment)| groups.contains(&assignment.group))
        .map(|(found, _)| found)
        .collect()
}

/// Adds the job's other ranks that a launcher of this node has started. Only the launcher's entry
/// still shows a rank that has ended.
fn add_launched(subjects: &mut Vec<Subject>, unregistered: Vec<Unregistered>, node: &str) {
    let world_size = known_size(subjects);
    for rank in unregistered {
        if !may_belong_to_world(&rank.info, world_size)
            || subjects.iter().any(|subject| subject.rank as i32 == rank.info.rank)
        {
            continue;
        }
        let (presence, process, exit) = match rank.state {
            State::Runs(process) => (Shown::Unregistered, Some(process), None),
            State::Ended(_, how) => (Shown::Dead, None, Some(evidence::before_its_first_device_call(how))),
        };
        subjects.push(Subject {
            rank: rank.info.rank as u32,
            presence,
            info: rank.info,
            process,
            ring: None,
            exit,
            node: node.to_string(),
            lingers: false,
            registered: false,
            fault: SharedFault::default(),
        });
    }
    subjects.sort_by_key(|subject| subject.rank);
}

/// All descendants of a rank inherit its variables. The rank is the topmost process, below the
/// shells that only started it.
fn main_process(candidates: &[RankProcess], is_shell: impl Fn(i32) -> bool) -> i32 {
    let is_candidate = |pid: i32| candidates.iter().any(|found| found.pid == pid);
    let Some(top) = candidates.iter().filter(|found| !is_candidate(found.parent)).min_by_key(|found| found.start)
    else {
        return candidates.first().map_or(0, |found| found.pid);
    };
    let mut pid = top.pid;
    while is_shell(pid) {
        let mut below = candidates.iter().filter(|found| found.parent == pid);
        match (below.next(), below.next()) {
            (Some(only), None) => pid = only.pid,
            _ => break,
        }
    }
    pid
}

fn is_shell(pid: i32) -> bool {
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    ["sh", "bash", "dash", "zsh", "ksh", "busybox"].contains(&name.as_str())
}

/// World size of a job, and the range of its ranks on this node; `None` when that is unknown.
#[must_use]
pub(super) fn world(subjects: &[Subject]) -> (u32, Option<Range<u32>>) {
    let known = known_size(subjects);
    let highest = subjects.iter().map(|subject| subject.rank + 1).max().unwrap_or(0);
    let size = known.max(highest);
    let here = subjects.iter().find_map(|subject| {
        let local = u32::try_from(subject.info.local_rank).ok()?;
        let count = subject.info.local_world_size;
        let first = subject.rank.checked_sub(local)?;
        let end = first.checked_add(count).filter(|end| *end <= size)?;
        (count > local).then_some(first..end)
    });
    (size, here)
}

/// Whether a process may be a rank of a world of this size; 0 is unknown. An agent in a pod may
/// have variables that number the agents instead.
fn may_belong_to_world(info: &RankInfo, world_size: u32) -> bool {
    world_size == 0 || info.world_size == 0 || info.world_size == world_size
}

/// World size of a job as its ranks report it; 0 when none does.
fn known_size(subjects: &[Subject]) -> u32 {
    subjects.iter().map(|subject| subject.info.world_size).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pid: i32, parent: i32) -> RankProcess {
        RankProcess {
            pid,
            parent,
            start: pid as u64,
            info: RankInfo::default(),
            instance: String::new(),
            ancestors: Vec::new(),
            socket: "/s".into(),
        }
    }

    #[test]
    fn main_process_is_below_shells_and_above_workers() {
        let family = [found(12, 11), found(10, 1), found(13, 11), found(11, 10)];
        assert_eq!(main_process(&family, |pid| pid == 10), 11);
        assert_eq!(main_process(&family, |_| false), 10);
        assert_eq!(main_process(&family[..2], |pid| pid == 10), 10, "a shell with no child of its own");
        assert_eq!(main_process(&[found(12, 11), found(13, 11), found(11, 1)], |_| true), 11, "two children");
    }

    fn subject(rank: u32, local_rank: i32, local_world_size: u32, world_size: u32) -> Subject {
        let info = RankInfo { world_size, local_rank, local_world_size, ..Default::default() };
        let node = String::new();
        let (presence, registered) = (Shown::Present, true);
        let (process, ring, exit, fault) = (None, None, None, SharedFault::default());
        Subject { rank, presence, info, process, ring, exit, node, lingers: false, registered, fault }
    }

    #[test]
    fn a_rank_that_ended_before_its_first_device_call_joins_the_world() {
        let ended = |rank: i32, world_size: u32, exit: Option<&str>| Unregistered {
            job: JobKey { name: "j".into(), instance: String::new() },
            info: RankInfo { rank, world_size, ..Default::default() },
            start: 1,
            instance: String::new(),
            ancestors: Vec::new(),
            state: State::Ended(1, exit.map(Into::into)),
        };
        let mut subjects = vec![subject(0, 0, 2, 4), subject(1, 1, 2, 4)];
        let unregistered =
            vec![ended(1, 4, None), ended(2, 4, Some("exit code 3")), ended(3, 4, None), ended(3, 2, None)];
        add_launched(&mut subjects, unregistered, "n");
        let added: Vec<_> = subjects.iter().map(|one| (one.rank, one.presence, one.exit.as_deref())).collect();
        assert_eq!(
            added,
            [
                (0, Shown::Present, None),
                (1, Shown::Present, None),
                (2, Shown::Dead, Some("exit code 3, before its first device call")),
                (3, Shown::Dead, Some("before its first device call")),
            ]
        );
        let evidence = subjects[3].evidence(Default::default());
        assert_eq!(evidence.errors, ["the process is gone: before its first device call"]);
    }

    #[test]
    fn world_finds_the_ranks_of_this_node() {
        assert_eq!(world(&[subject(9, 1, 8, 16)]), (16, Some(8..16)));
        assert_eq!(world(&[subject(0, -1, 0, 0), subject(3, -1, 0, 0)]), (4, None));
        assert_eq!(world(&[subject(0, 0, 0, 2)]), (2, None));
        assert_eq!(world(&[]), (0, None));
        assert_eq!(world(&[subject(2, 0, u32::MAX, 4)]), (4, None), "more ranks on the node than in the world");
        assert_eq!(world(&[subject(i32::MAX as u32, 0, u32::MAX, u32::MAX)]), (u32::MAX, None));
    }
}
