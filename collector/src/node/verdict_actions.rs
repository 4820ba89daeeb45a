//! The actions after a verdict: `XPU_TIMER_COMMON_HANG`, another look at a job that may be healthy,
//! and `XPU_TIMER_HANG_KILL`, which ends the ranks of a hung job so that its agent restarts them.
//!
//! Only a verdict with evidence of a hang ends ranks. Any progress since its samples cancels that.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nix::sys::signal::Signal;
use tracing::{info, warn};
use xpu_timer_proto::v1::Grounds;

use crate::{
    incident::{
        State,
        engine::{Cause, Incident},
        judging,
    },
    job::JobKey,
    node::{
        launched::{self, Unregistered},
        registry::Rank,
        reports::{SignalledProcess, VerdictSummary},
        state::NodeState,
    },
    os::{
        clock::{Now, nanoseconds, seconds},
        process::Handle,
    },
};

/// Time between SIGTERM and SIGKILL.
const KILL_AFTER_NS: u64 = 5_000_000_000;

impl NodeState {
    /// Applies a verdict, which decides the ranks that hang. The ranks of the job are ended if the
    /// user wants that and the verdict allows it. A verdict without evidence, or with doubtful
    /// evidence, is made again for as long as the incident lasts.
    pub(crate) fn apply_verdict(&mut self, id: &str, judged: &VerdictSummary, now: Now) {
        let Some(report) = self.reports.get_mut(id) else { return };
        report.culprits.clone_from(&judged.culprits);
        report.hanging.clone_from(&judged.hanging);
        let Some(incident) = self.engine.get(id).filter(|_| self.hangs_now(id)) else { return };
        let (job, attempt) = (incident.head.job.clone(), incident.head.attempt);
        let is_ending = self.registry.is_ending(&job, attempt);
        let grounds = if is_ending { judged.grounds.min(Grounds::Doubtful) } else { judged.grounds };

        let recheck = self.verdict_actions.rechecks.entry(id.into()).or_default();
        let is_confirmed = grounds == Grounds::Proven || (grounds == Grounds::Doubtful && recheck.suspected);
        recheck.suspected = grounds != Grounds::Unspecified;
        (recheck.postponed, recheck.due_ns) = (false, None);
        let since_ns = self.reports.get(id).map_or(0, |report| report.sampled_ns);
        let postponed = is_confirmed && !self.kill(id, since_ns, now);
        if (is_confirmed || judged.by_cluster) && !postponed {
            return;
        }
        self.schedule_recheck(id, postponed && judged.by_cluster, now);
    }

    /// Schedules another look at the incident after one more hang timeout. The wait grows with the
    /// number of looks.
    fn schedule_recheck(&mut self, id: &str, postponed: bool, now: Now) {
        let Some(job) = self.engine.get(id).map(|incident| incident.head.job.clone()) else { return };
        let timeout = self.hang_timeout(&job);
        let quiet_ns = self.quiet_at_ns(id, now).map(|quiet_ns| quiet_ns - now.mono_ns);
        let recheck = self.verdict_actions.rechecks.entry(id.into()).or_default();
        let wait_ns = match quiet_ns {
            Some(wait_ns) if !postponed => wait_ns,
            _ => {
                let wait_ns = judging::recheck_delay_ns(timeout, recheck.count);
                recheck.count += 1;
                wait_ns
            }
        };
        recheck.postponed = postponed;
        recheck.due_ns = Some(now.mono_ns.saturating_add(wait_ns));
        info!("incident {id}: the job may be healthy; it is judged again in {} s if the hang lasts", seconds(wait_ns));
    }

    /// The time at which the devices of the incident's culprits will have been quiet for the hang
    /// timeout if nobody uses them again. `None` when they are already quiet, or are not visible
    /// from here. Before that time a verdict has no evidence of a hang.
    fn quiet_at_ns(&self, id: &str, now: Now) -> Option<u64> {
        let (incident, report) = self.engine.get(id).zip(self.reports.get(id))?;
        let is_culprit = |rank: &&&Rank| {
            let number = u32::try_from(rank.info.rank).unwrap_or(0);
            rank.presence.is_alive() && report.culprits.contains(&number)
        };
        let ranks = self.registry.of_job(&incident.head.job);
        let used_ns = ranks.iter().filter(is_culprit).filter_map(|rank| {
            let progress = rank.ring.as_ref()?.progress().ok()?;
            Some(progress.called_ns.max(progress.completed_ns))
        });
        let quiet_ns = used_ns.max()?.saturating_add(nanoseconds(self.hang_timeout(&incident.head.job)));
        (quiet_ns > now.mono_ns).then_some(quiet_ns)
    }

    fn hang_timeout(&self, job: &JobKey) -> Duration {
        let timeouts = self.registry.of_job(job).into_iter().map(|rank| rank.settings.hang_timeout);
        timeouts.max().unwrap_or(self.settings.hang_timeout)
    }

    /// Whether an incident has a cause now other than a manual dump.
    fn hangs_now(&self, id: &str) -> bool {
        let causes = self.engine.get(id).map(|incident| &incident.causes);
        causes.is_some_and(|causes| causes.iter().any(|cause| *cause != Cause::Manual))
    }

    /// Whether the job of an incident hangs now and is configured to be ended for that.
    fn must_be_ended(&self, id: &str) -> bool {
        let Some(incident) = self.engine.get(id) else { return false };
        self.hangs_now(id) && self.registry.of_job(&incident.head.job).iter().any(|rank| rank.settings.hang_kill)
    }

    /// Ends the ranks of a job that still hangs, if it is configured to be ended for that. Returns
    /// false, and ends nothing, when a rank has made progress since `since_ns`. One rank of each
    /// agent gets SIGKILL at once, so that it cannot exit with success: the agent would take its
    /// job for done.
    fn kill(&mut self, id: &str, since_ns: u64, now: Now) -> bool {
        let Some(incident) = self.engine.get(id).filter(|_| self.must_be_ended(id)) else { return true };
        let culprits = self.reports.get(id).map(|report| report.culprits.clone()).unwrap_or_default();
        let ranks = self.registry.of_job(&incident.head.job).into_iter().filter(|rank| rank.presence.is_alive());
        let ranks: Vec<&Rank> = ranks.collect();
        if let Some((rank, what)) = ranks.iter().find_map(|rank| Some((rank, progress_since(rank, since_ns)?))) {
            info!("incident {id}: the ranks are not ended: {} {what} since the first stacks were taken", rank.title());
            return false;
        }
        warn!("incident {id}: XPU_TIMER_HANG_KILL ends the ranks of job {}", incident.head.job);
        let registered = ranks.iter().filter_map(|rank| Some((rank.info.rank, Arc::clone(rank.process.as_ref()?))));
        let processes: Vec<(i32, Arc<Handle>)> = registered.chain(self.unregistered_that_hang(id, now)).collect();
        let mut agents: BTreeMap<i32, Vec<(i32, Arc<Handle>)>> = BTreeMap::new();
        for (rank, process) in processes {
            let parent = process.stat().map_or(0, |stat| stat.parent);
            agents.entry(parent).or_default().push((rank, process));
        }
        for processes in agents.into_values() {
            let is_culprit = |(rank, _): &(i32, _)| culprits.iter().any(|culprit| *rank == *culprit as i32);
            let failing = processes.iter().position(is_culprit).unwrap_or(0);
            for (index, (rank, process)) in processes.into_iter().enumerate() {
                let signal = if index == failing { Signal::SIGKILL } else { Signal::SIGTERM };
                if let Err(error) = process.signal(signal) {
                    warn!("rank {rank} (pid {}) cannot be ended: {error}", process.pid);
                }
                let due_ns = now.mono_ns + KILL_AFTER_NS;
                self.verdict_actions.signalled.push(SignalledProcess { rank, process, due_ns, was_killed: false });
            }
        }
        true
    }

    /// The processes of unregistered ranks that hang by the verdict on an incident. They hang
    /// before their first device call, or were stopped in it.
    fn unregistered_that_hang(&self, id: &str, now: Now) -> Vec<(i32, Arc<Handle>)> {
        let Some((incident, report)) = self.engine.get(id).zip(self.reports.get(id)) else { return Vec::new() };
        let hangs_by_verdict = |unregistered: &&&Unregistered| {
            let hangs = u32::try_from(unregistered.info.rank).is_ok_and(|rank| report.hanging.contains(rank));
            hangs && (&unregistered.job, unregistered.info.attempt) == (&incident.head.job, incident.head.attempt)
        };
        let unregistered = self.unregistered_ranks(now);
        let processes =
            unregistered.iter().filter(hangs_by_verdict).filter_map(|unregistered| match &unregistered.state {
                launched::State::Runs(process) => Some((unregistered.info.rank, Arc::clone(process))),
                launched::State::Ended(..) => None,
            });
        processes.collect()
    }

    /// Whether a rank hangs by the newest verdict on an open incident of its job:
    /// `XPU_TIMER_COMMON_HANG`. A suspicion without a verdict does not count, and neither does an
    /// incident that is over.
    #[must_use]
    pub(super) fn is_hanging(&self, rank: &Rank) -> bool {
        let is_open_here = |incident: &&Incident| {
            matches!(incident.state, State::Open | State::Dumped)
                && !incident.superseded
                && (&incident.head.job, incident.head.attempt) == (&rank.job, rank.info.attempt)
        };
        // A process that names no rank is a job of its own, and its only rank.
        let number = u32::try_from(rank.info.rank).unwrap_or(0);
        let mut reports =
            self.engine.incidents().filter(is_open_here).filter_map(|incident| self.reports.get(&incident.head.id));
        reports.any(|report| report.hanging.contains(number))
    }

    /// Runs once a second.
    pub(super) fn tick_verdict_actions(&mut self, now: Now) {
        self.verdict_actions.signalled.retain_mut(|signalled| {
            if signalled.due_ns > now.mono_ns {
                return true;
            }
            if signalled.process.is_dead() {
                return false;
            }
            if signalled.was_killed {
                let (rank, process) = (signalled.rank, &signalled.process);
                warn!(
                    "rank {rank} (pid {}) does not end after SIGKILL: {}",
                    process.pid,
                    process.where_the_kernel_is()
                );
                return false;
            }
            // This fails when the process has just ended.
            let _ = signalled.process.signal(Signal::SIGKILL);
            signalled.was_killed = true;
            signalled.due_ns = now.mono_ns + KILL_AFTER_NS;
            true
        });
        let engine = &self.engine;
        self.verdict_actions.rechecks.retain(|id, _| engine.get(id).is_some_and(|incident| incident.closed.is_none()));
        let due = self.verdict_actions.rechecks.iter_mut().filter_map(|(id, recheck)| {
            recheck.due_ns.take_if(|due_ns| *due_ns <= now.mono_ns).map(|_| (id.clone(), recheck.postponed))
        });
        for (id, postponed) in due.collect::<Vec<_>>() {
            if !self.hangs_now(&id) {
                self.verdict_actions.rechecks.remove(&id);
            } else if postponed {
                let Some(job) = self.engine.get(&id).map(|incident| incident.head.job.clone()) else { continue };
                // Nothing may have completed for a full timeout.
                if !self.kill(&id, now.mono_ns.saturating_sub(nanoseconds(self.hang_timeout(&job))), now) {
                    self.schedule_recheck(&id, true, now);
                }
            } else if let Some(quiet_ns) = self.quiet_at_ns(&id, now) {
                // Another verdict would only repeat that these ranks use their devices.
                if let Some(recheck) = self.verdict_actions.rechecks.get_mut(&id) {
                    recheck.due_ns = Some(quiet_ns);
                }
            } else if !self.examine_again(&id, now) {
                self.schedule_recheck(&id, false, now);
            }
        }
    }
}

/// The kind of progress that a rank's ring shows after this CLOCK_MONOTONIC time.
fn progress_since(rank: &Rank, since_ns: u64) -> Option<&'static str> {
    let progress = rank.ring.as_ref()?.progress().ok()?;
    if progress.completed_ns > since_ns {
        Some("completed an operation")
    } else if progress.called_ns > since_ns {
        Some("called its device")
    } else {
        None
    }
}
