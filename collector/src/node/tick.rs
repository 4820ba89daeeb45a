//! The checks of the node that run once a second: stuck watchers, idle jobs, system call filters
//! and slow ranks.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tracing::warn;
use xpu_timer_analysis::stragglers;
use xpu_timer_proto::{
    WATCHER_THREAD, codec, procfs,
    ring::{self, filtered, header},
    v1::{Paces, RankPace},
};

use crate::{
    incident::{
        engine::{Cause, RaisedCause},
        mild,
    },
    job::{JobKey, RankId, job_id},
    node::{
        monitor::{Observation, SHORTEST_SILENCE},
        registry::Rank,
        state::{ENDING_TIMEOUTS, NodeState, cause_pid, living_ranks, raised_by, read_header},
    },
    os::{
        clock::{Now, nanoseconds},
        process::Handle,
    },
};

impl NodeState {
    /// Runs once a second.
    pub(super) fn tick(&mut self, now: Now) {
        self.check_filters(self.living().map(|rank| rank.id).collect::<Vec<_>>(), now);
        self.filtered.retain(|id, _| self.registry.get(*id).is_some());
        self.registry.note_lingering(now.mono_ns);
        self.note_ended_unregistered(now);
        let registry = &self.registry;
        let seen = self.launched.scan(&self.settings.socket, |pid, start| registry.is_registered(pid, start));
        self.sharers.note(&seen, now.mono_ns);
        self.registry.note_starting(self.launched.starting(now.mono_ns));
        self.rejoin(None, now);
        let living = self.registry.living_jobs();
        let observations = self.observe(&living, now);
        let conditions = self.monitor.evaluate(&observations, now.mono_ns);
        self.raise_stuck(&observations, &conditions.stuck, now);
        self.raise_idle(living, &observations, &conditions.idle, now);
        self.tick_engine(now);
        self.promote_captures_of_dead_jobs(now);
        self.tick_member(now);
        let engine = &self.engine;
        self.reports.retain(|id, _| engine.get(id).is_some());
        let folders = self.folders();
        self.searched.retain(|path, _| folders.contains(path));
        self.disk.report_stuck();
        self.tick_verdict_actions(now);
        self.tick_unwritten(now);
        self.follow_rings(now);
        self.compare(now);
        self.registry.forget(now.mono_ns);
    }

    /// Opens and closes the incidents that are due.
    pub(super) fn tick_engine(&mut self, now: Now) {
        for action in self.engine.tick(&self.registry, now) {
            self.execute(action, now);
        }
    }

    /// Observes all living ranks. The watcher of a rank under a filter counts as running, and a job
    /// that is ending gets a longer idle timeout.
    fn observe(&self, living: &BTreeSet<JobKey>, now: Now) -> Vec<Observation> {
        let headers: BTreeMap<RankId, [u64; header::WORDS]> = self.living().filter_map(read_header).collect();
        let mut observations: Vec<Observation> =
            self.living().filter_map(|rank| Some(observation(rank, headers.get(&rank.id)?, now))).collect();
        observations
            .iter_mut()
            .filter(|rank| self.watcher_is_filtered(rank.id))
            .for_each(|rank| rank.heartbeat_ns = now.mono_ns);
        for job in living.iter().filter(|job| self.registry.is_ending(job, self.attempt(job))) {
            observations
                .iter_mut()
                .filter(|rank| rank.job == *job)
                .for_each(|rank| rank.idle_timeout *= ENDING_TIMEOUTS);
        }
        observations
    }

    /// Raises the ranks with a stuck watcher, and lifts the others.
    fn raise_stuck(&mut self, observations: &[Observation], stuck: &BTreeMap<RankId, u64>, now: Now) {
        for observed in observations {
            let Some(rank) = self.registry.get(observed.id) else { continue };
            let cause = Cause::Heartbeat { pid: cause_pid(rank) };
            if let Some(since_ns) = stuck.get(&rank.id).copied() {
                let late_ns = now.mono_ns.saturating_sub(since_ns + nanoseconds(rank.settings.hang_timeout));
                self.raise(RaisedCause { since_ns, late_ns, ..raised_by(rank, cause) }, now);
            } else {
                self.engine.clear_cause(&rank.job, &cause, now);
            }
        }
    }

    /// Raises the jobs that are idle, and lifts the others.
    fn raise_idle(
        &mut self,
        living: BTreeSet<JobKey>,
        observations: &[Observation],
        idle: &BTreeMap<JobKey, u64>,
        now: Now,
    ) {
        self.idle.retain(|job, _| living.contains(job));
        for job in living {
            let ranks: Vec<&Observation> = observations.iter().filter(|rank| rank.job == job).collect();
            let last = last_launch_ns(&ranks);
            self.member.launched(&job, last);
            // A job that has launched since it was examined is no longer idle.
            self.idle.retain(|idle_job, idle| *idle_job != job || idle.last_launch_ns == last);
            let since_ns = idle.get(&job).filter(|_| !self.member.is_declined(&job, now));
            if let Some(since_ns) = since_ns.copied() {
                let timeout = ranks.iter().map(|rank| rank.idle_timeout).max().unwrap_or_default();
                let late_ns = now.mono_ns.saturating_sub(since_ns + nanoseconds(timeout));
                let attempt = self.attempt(&job);
                let cause = Cause::Idle;
                self.raise(RaisedCause { job, attempt, rank: -1, cause, operation: None, since_ns, late_ns }, now);
            } else {
                self.engine.clear_cause(&job, &Cause::Idle, now);
                self.forgive_deaths(&job, last, now);
            }
        }
    }

    /// Makes the mild captures of jobs that have died incidents. Those of jobs that ended in order
    /// stay what they are.
    fn promote_captures_of_dead_jobs(&mut self, now: Now) {
        let living = self.registry.living_jobs();
        let ended: Vec<JobKey> = self.mild.keys().filter(|job| !living.contains(job)).cloned().collect();
        for job in ended {
            let has_died = |rank: &&Rank| rank.job == job && !rank.auxiliary && !rank.ended_in_order();
            let reason = self.registry.ranks().find(has_died).map(|dead| {
                let how = dead.exit.clone().unwrap_or_else(|| "the reason is unknown".into());
                format!("the job died later: {} ended ({how})", dead.title())
            });
            match reason {
                Some(reason) => self.promote_captures(job, reason, now),
                None => _ = self.mild.remove(&job),
            }
        }
    }

    /// Makes the mild captures of a job incidents. `reason` completes "it is kept because".
    pub(super) fn promote_captures(&mut self, job: JobKey, reason: String, now: Now) {
        let Some(root) = self.mild.remove(&job) else { return };
        let ranks = self.registry.ranks().filter(|rank| rank.job == job && !rank.auxiliary);
        let started_ns = ranks.map(|rank| rank.started_ns(now.mono_ns)).min().unwrap_or(u64::MAX);
        let JobKey { name, instance } = job;
        let of = mild::OfJob { job: name, instance, boot: self.boot.clone(), started_ns };
        let timeline = root.clone();
        self.disk.submit(&root, move || mild::draw(&timeline, &mild::promote(&timeline, &of, &reason)));
    }

    /// When a job launched anything last, or a rank of it registered.
    pub(super) fn last_launch_ns(&self, job: &JobKey, now: Now) -> u64 {
        let observations = self.observe(&BTreeSet::from([job.clone()]), now);
        last_launch_ns(&observations.iter().filter(|rank| rank.job == *job).collect::<Vec<_>>())
    }

    /// Lifts the deaths of ranks that the job does not need: it still launches long after they
    /// died.
    pub(super) fn forgive_deaths(&mut self, job: &JobKey, last_launch_ns: u64, now: Now) {
        let dead = self.registry.ranks().filter(|rank| rank.job == *job && rank.ended_ns > 0);
        let over: Vec<i32> = dead
            .filter(|rank| last_launch_ns > rank.ended_ns + nanoseconds(rank.settings.hang_timeout))
            .map(cause_pid)
            .collect();
        for pid in over {
            self.engine.clear_cause(job, &Cause::Death { pid }, now);
        }
    }
}

fn last_launch_ns(ranks: &[&Observation]) -> u64 {
    ranks.iter().map(|rank| rank.last_launch_ns.max(rank.registered_ns)).max().unwrap_or(0)
}

fn observation(rank: &Rank, words: &[u64; header::WORDS], now: Now) -> Observation {
    let is_silent = now.mono_ns.saturating_sub(words[header::HEARTBEAT_NS]) > nanoseconds(SHORTEST_SILENCE);
    let stopped = |process: &Arc<Handle>| {
        process.stat().is_some_and(|stat| stat.is_stopped()) || is_silent && process.is_frozen()
    };
    Observation {
        job: rank.job.clone(),
        id: rank.id,
        stopped: rank.process.as_ref().is_some_and(stopped),
        heartbeat_ns: words[header::HEARTBEAT_NS],
        last_launch_ns: words[header::LAST_LAUNCH_NS],
        registered_ns: rank.registered_ns,
        hang_timeout: rank.settings.hang_timeout,
        idle_timeout: rank.settings.idle_timeout,
    }
}

// System call filters that ranks install on themselves. The hook must not make a call that such a
// filter may forbid, and it cannot see a filter that a bare instruction installs. The collector
// sees it in `/proc` and notes it in the rank's ring.

impl NodeState {
    /// Checks ranks for filters. Writes to their rings that the collector checks, and what it
    /// found.
    pub(super) fn check_filters(&mut self, ids: impl IntoIterator<Item = RankId>, now: Now) {
        for id in ids {
            let Some(rank) = self.registry.get(id) else { continue };
            let Some(bits) = filter_bits(rank, now) else { continue };
            if bits & !self.filtered.insert(id, bits).unwrap_or(0) != 0 {
                let what = match bits & filtered::WATCHER {
                    0 => "its threads make no system call for the hook",
                    _ => "its hook stops reporting, so only its peers show a hang of this rank",
                };
                warn!("{} has installed a seccomp filter; {what}", rank.title());
            }
        }
    }

    /// Whether a system call filter is a reason for the watcher of this rank to stand still.
    pub(super) fn watcher_is_filtered(&self, id: RankId) -> bool {
        self.filtered.get(&id).is_some_and(|bits| bits & filtered::WATCHER != 0)
    }
}

/// The filter bits of a rank; `None` when this collector cannot see the process or its ring.
fn filter_bits(rank: &Rank, now: Now) -> Option<u32> {
    let process = rank.process.as_ref().filter(|process| !process.is_dead())?;
    let ring = rank.ring.as_ref()?;
    let read = |offset: u64, buffer: &mut [u8]| ring.read_at(offset, buffer);
    let words = ring.header().ok()?;
    let at_load = words[header::FILTERS_AT_LOAD];
    let grew = |tid: u64| {
        // A ring holds thread ids of the process's own namespace. A thread that is not visible
        // under its id here adds nothing.
        let filters = i32::try_from(tid).map_or(0, |tid| procfs::seccomp_filters(process.pid, tid));
        u64::from(filters) > at_load
    };
    let before = words[header::FILTERS_SEEN] as u32 | words[header::FILTERED] as u32;
    let mut owners = ring::lane::owners(&read).ok()?;
    owners.push(process.pid as u64);
    owners.sort_unstable();
    owners.dedup();
    // A filter stays in force even after its thread has ended.
    let program = before & filtered::PROGRAM != 0 || owners.into_iter().any(grew);
    // A filter may also end the watcher before anybody reads its status.
    let is_ended = || program && words[header::GOODBYE] == 0 && !has_watcher(process.pid);
    let watcher = words[header::WATCHER_TID] != 0 && (grew(words[header::WATCHER_TID]) || is_ended());
    let found = [(program, filtered::PROGRAM), (watcher, filtered::WATCHER)];
    let bits = found.into_iter().filter(|(holds, _)| *holds).fold(before, |bits, (_, bit)| bits | bit);
    // The result is written before the note that the collector has checked. A ring that cannot be
    // written is the fault of its process.
    let is_noted = words[header::FILTERED] == u64::from(bits);
    let noted = if is_noted { Ok(()) } else { ring.write(header::FILTERED, u64::from(bits)) };
    let _ = noted.and_then(|()| ring.write(header::COLLECTOR_NS, now.mono_ns));
    Some(bits)
}

/// Whether a process has the hook's thread, which is known by its name in every PID namespace. Also
/// true if the process cannot be read.
fn has_watcher(pid: i32) -> bool {
    let is_watcher = |tid: i32| procfs::thread_stat(pid, tid).is_some_and(|stat| stat.name == WATCHER_THREAD);
    procfs::threads(pid).map_or(true, |threads| threads.into_iter().any(is_watcher))
}

/// Time between two comparisons of the ranks of a job with each other.
const COMPARE_NS: u64 = 5_000_000_000;

impl NodeState {
    /// Runs once a second.
    pub(super) fn compare(&mut self, now: Now) {
        if now.mono_ns < self.compared_ns + COMPARE_NS {
            return;
        }
        self.compared_ns = now.mono_ns;
        let jobs: BTreeSet<(JobKey, u32)> =
            living_ranks(&self.registry).map(|rank| (rank.job.clone(), rank.info.attempt)).collect();
        self.slow.retain(|job, attempt| jobs.contains(&(job.clone(), attempt)));
        for (job, attempt) in &jobs {
            let ranks = living_ranks(&self.registry).filter(|rank| rank.job == *job && rank.info.attempt == *attempt);
            let paces = ranks.filter_map(|rank| {
                let number = u32::try_from(rank.info.rank).ok()?;
                Some((number, &self.sampler.of(rank.id)?.recorder.pace))
            });
            let comparison = stragglers::compare(paces);
            self.slow.note(job, *attempt, comparison, |_| self.node.clone(), now);
        }
    }

    /// The progress of the ranks' collectives since the last call, in messages for the cluster
    /// collector.
    pub(crate) fn paces(&mut self) -> Vec<Paces> {
        let mut ranks = Vec::new();
        for rank in living_ranks(&self.registry) {
            let Ok(number) = u32::try_from(rank.info.rank) else { continue };
            let communicators = self.sampler.take_unreported(rank.id);
            if !communicators.is_empty() {
                let (job, attempt) = (Some(job_id(&rank.job)), rank.info.attempt);
                ranks.push(RankPace { job, attempt, rank: number, communicators });
            }
        }
        codec::small_messages(ranks)
    }
}
