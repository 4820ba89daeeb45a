//! The checks of the node that run once a second.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use xpu_timer_proto::ring::header;

use crate::{
    incident::engine::{Cause, Raise},
    job::key::{JobKey, RankId},
    node::{
        monitor::{Observation, SHORTEST_SILENCE},
        registry::Rank,
        state::{ENDING_TIMEOUTS, NodeState, cause_pid, living_ranks, nanoseconds, raise, read_header},
    },
    os::{clock::Now, process::Handle},
};

impl NodeState {
    /// Runs once a second.
    pub fn tick(&mut self, now: Now) {
        self.check_filters(self.living().map(|rank| rank.id).collect::<Vec<_>>(), now);
        self.filtered.retain(|id, _| self.registry.get(*id).is_some());
        self.registry.note_lingering(now.mono_ns);
        self.note_ended_unregistered(now);
        let registry = &self.registry;
        self.launched.look(&self.settings.socket, |pid, start| registry.is_registered(pid, start));
        self.rejoin(None, now);
        let living = self.registry.living_jobs();
        let observations = self.observe(&living, now);
        let conditions = self.monitor.look(&observations, now.mono_ns);
        self.raise_stuck(&observations, &conditions.stuck, now);
        self.raise_idle(living, &observations, &conditions.idle, now);
        for action in self.engine.tick(&self.registry, now) {
            self.act(action, now);
        }
        self.tick_member(now);
        let engine = &self.engine;
        self.reports.retain(|id, _| engine.get(id).is_some());
        let folders = self.folders();
        self.searched.retain(|path| folders.contains(path));
        self.tick_ending(now);
        self.tick_unwritten(now);
        self.sampler.turn(living_ranks(&self.registry).map(Rank::living), now);
        self.compare(now);
        self.registry.forget(now.mono_ns);
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
                self.raise(Raise { since_ns, late_ns, ..raise(rank, cause) }, now);
            } else {
                self.engine.lift(&rank.job, &cause, now);
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
        for job in living {
            let ranks: Vec<&Observation> = observations.iter().filter(|rank| rank.job == job).collect();
            let last = ranks.iter().map(|rank| rank.last_launch_ns.max(rank.registered_ns)).max().unwrap_or(0);
            self.member.launched(&job, last);
            let since_ns = idle.get(&job).filter(|_| !self.member.is_declined(&job, now));
            if let Some(since_ns) = since_ns.copied() {
                let timeout = ranks.iter().map(|rank| rank.idle_timeout).max().unwrap_or_default();
                let late_ns = now.mono_ns.saturating_sub(since_ns + nanoseconds(timeout));
                let attempt = self.attempt(&job);
                let cause = Cause::Idle;
                self.raise(Raise { job, attempt, rank: -1, cause, operation: None, since_ns, late_ns }, now);
            } else {
                self.engine.lift(&job, &Cause::Idle, now);
                self.forgive_deaths(&job, last, now);
            }
        }
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
            self.engine.lift(job, &Cause::Death { pid }, now);
        }
    }
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
