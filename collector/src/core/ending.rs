//! XPU_TIMER_HANG_KILL: ends the ranks of a job that hangs, so that its agent starts them again. Who moves is looked at once more
//! before that.

use std::{collections::BTreeMap, sync::Arc};

use rustix::process::Signal;
use tracing::{info, warn};

use super::{Core, nanoseconds};
use crate::{
    clock::{Now, seconds},
    incident::Cause,
    process::Handle,
    registry::Rank,
};

/// Between the polite and the final signal.
const KILL_AFTER_NS: u64 = 5_000_000_000;
/// For the cluster collector, which looks at the job again itself, to say what it found.
const CLUSTER_NS: u64 = 60_000_000_000;

/// What a verdict means for the ranks of its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// The job may be healthy after all; see [`crate::judging::is_mild`].
    pub mild: bool,
    /// Ranks to blame.
    pub culprits: Vec<u32>,
    /// The cluster collector has judged, which alone sees the whole job.
    pub by_cluster: bool,
}

/// Processes that are being ended, and jobs that will be if they hang on.
#[derive(Debug, Default)]
pub(super) struct Ending {
    // Ranks that were told to end, and when they are made to.
    told: Vec<(u64, Arc<Handle>)>,
    // Incidents with a mild verdict: whether the ranks are ended without another one, and when they are looked at again; `None`
    // from then on.
    mild: BTreeMap<String, (bool, Option<u64>)>,
}

impl Ending {
    pub(super) fn is_busy(&self) -> bool {
        !self.told.is_empty()
    }
}

impl Core {
    /// There is a verdict. Ends the ranks of its job if that is wanted: at once, or when a mild one still holds after another hang
    /// timeout.
    pub(crate) fn judged(&mut self, id: &str, judged: &Judged, now: Now) {
        if let Some(told) = self.told.get_mut(id) {
            told.culprits.clone_from(&judged.culprits);
        }
        let Some(incident) = self.engine.get(id).filter(|_| self.is_to_be_ended(id)) else { return };
        let mild = judged.mild || self.registry.is_ending(&incident.job, incident.attempt);
        if !mild || self.ending.mild.contains_key(id) {
            return self.kill(id, now);
        }
        let timeout = self.registry.of_job(&incident.job).iter().map(|rank| rank.settings.hang_timeout).max();
        let for_others_ns = if judged.by_cluster { CLUSTER_NS } else { 0 };
        let wait_ns = nanoseconds(timeout.unwrap_or_default()) + for_others_ns;
        info!("incident {id}: this may be no hang; its ranks are ended if it lasts for {} s more", seconds(wait_ns));
        self.ending.mild.insert(id.into(), (judged.by_cluster, Some(now.mono_ns + wait_ns)));
    }

    /// Whether the job of an incident hangs now and its ranks are to be ended for that.
    fn is_to_be_ended(&self, id: &str) -> bool {
        let Some(incident) = self.engine.get(id) else { return false };
        incident.causes.iter().any(|cause| *cause != Cause::Manual)
            && self.registry.of_job(&incident.job).iter().any(|rank| rank.settings.hang_kill)
    }

    /// Ends the ranks of a job that still hangs. One rank of each agent is given no chance to end with success, from which the agent
    /// would take its job for done.
    pub(crate) fn kill(&mut self, id: &str, now: Now) {
        if !self.is_to_be_ended(id) {
            return;
        }
        let Some(incident) = self.engine.get(id) else { return };
        warn!("incident {id}: XPU_TIMER_HANG_KILL ends the ranks of job {}", incident.job);
        let culprits = self.told.get(id).map(|told| told.culprits.clone()).unwrap_or_default();
        let ranks = self.registry.of_job(&incident.job).into_iter().filter(|rank| rank.presence.is_alive());
        let mut agents: BTreeMap<i32, Vec<&Rank>> = BTreeMap::new();
        for rank in ranks {
            let parent = rank.process.as_ref().and_then(|process| process.stat()).map_or(0, |stat| stat.parent);
            agents.entry(parent).or_default().push(rank);
        }
        for ranks in agents.into_values() {
            let is_culprit = |rank: &&&Rank| culprits.iter().any(|culprit| rank.info.rank == *culprit as i32);
            let failing = ranks.iter().find(is_culprit).or(ranks.first()).map(|rank| rank.id);
            for rank in ranks {
                let Some(process) = &rank.process else { continue };
                let signal = if Some(rank.id) == failing { Signal::KILL } else { Signal::TERM };
                if let Err(error) = process.signal(signal) {
                    warn!("{} cannot be ended: {error}", rank.title());
                }
                self.ending.told.push((now.mono_ns + KILL_AFTER_NS, Arc::clone(process)));
            }
        }
    }

    /// Once a second.
    pub(super) fn tick_ending(&mut self, now: Now) {
        self.ending.told.retain(|(due_ns, process)| {
            if *due_ns <= now.mono_ns && !process.is_dead() {
                // It fails when the process has just ended.
                let _ = process.signal(Signal::KILL);
            }
            *due_ns > now.mono_ns
        });
        let engine = &self.engine;
        self.ending.mild.retain(|id, _| engine.get(id).is_some_and(|incident| incident.closed.is_none()));
        let mut due = Vec::new();
        for (id, (by_cluster, wait)) in &mut self.ending.mild {
            if wait.take_if(|until| *until <= now.mono_ns).is_some() {
                due.push((id.clone(), *by_cluster));
            }
        }
        for (id, by_cluster) in due {
            if !self.is_to_be_ended(&id) {
                self.ending.mild.remove(&id);
            } else if by_cluster || !self.engine.again(&id) {
                self.kill(&id, now);
            } else {
                info!("incident {id}: it lasts; its ranks are looked at again");
                self.capture_alone(&id);
            }
        }
    }
}
