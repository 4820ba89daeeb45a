//! What time does: parts that do not come, hangs that are over, and what is forgotten.

use std::{path::Path, time::Duration};

use tracing::{info, warn};
use xpu_timer_proto::v1::{IncidentClosed, cluster_message::Message};

use super::{Hub, RETURN_NS, SECOND, delivery::DELIVERY_NS};
use crate::{
    clock::{self, Now},
    cluster::{
        comparing::Told,
        incident::{Part, Progress, State},
        nodes::{Node, NodeId},
    },
    dump::change_verdict,
    error::chain,
    member::key,
};

/// How often the hub looks at its deadlines.
pub const TICK: Duration = Duration::from_millis(500);
/// A hang is over when no node has hung for so long.
const QUIET_NS: u64 = 2 * SECOND;
/// What comes late is collected for so long before it is judged.
const LATE_NS: u64 = 15 * SECOND;
/// How often nodes and attempts that are gone are looked for.
const FORGET_EVERY_NS: u64 = 30 * SECOND;
/// Closed incidents are kept for `/status`; the folders stay.
const MAX_CLOSED: usize = 500;

impl Hub {
    /// Once a second.
    pub fn tick(&mut self, now: Now) {
        let ids: Vec<String> = self.incidents.values().filter(|one| one.is_open()).map(|one| one.id.clone()).collect();
        for id in ids {
            self.tick_incident(&id, now);
        }
        let (free, held): (Vec<_>, Vec<_>) = std::mem::take(&mut self.held).into_iter().partition(|(_, alarm)| {
            self.throttle.would_allow(&key(&alarm.job.clone().unwrap_or_default()), now.mono_ns)
        });
        self.held = held;
        for (node, alarm) in free {
            self.alarm(node, alarm, now);
        }
        if now.mono_ns >= self.forget_ns {
            self.forget_ns = now.mono_ns + FORGET_EVERY_NS;
            self.nodes.forget(now.mono_ns);
            let nodes = &self.nodes;
            self.whole.retain(|job, _| nodes.job(job).ranks > 0);
            self.slow.retain(|job, attempt| nodes.job(job).alive && nodes.job(job).attempt == attempt);
            let running = nodes.jobs().filter(|job| nodes.job(job).alive).cloned().collect();
            self.comparing.tell(Told::Running(running));
        }
        let closed: Vec<String> =
            self.incidents.values().filter(|one| !one.is_open()).map(|one| one.id.clone()).collect();
        for id in closed.iter().take(closed.len().saturating_sub(MAX_CLOSED)) {
            self.incidents.remove(id);
        }
        self.deliver(now);
    }

    fn tick_incident(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        for (node, part) in &mut incident.parts {
            let late = match part.progress {
                // A part that was taken waits for its turn, as long as its node is there.
                Progress::Captured if self.nodes.get(*node).is_some_and(Node::is_joined) => None,
                Progress::Asked | Progress::Captured if now.mono_ns > incident.deadline_ns => {
                    Some(match self.nodes.get(*node) {
                        Some(node) if node.is_joined() => "it took no dump in time".to_string(),
                        Some(node) => {
                            format!("its connection was lost {:.0} s ago", clock::seconds(now.mono_ns - node.lost_ns))
                        }
                        None => "it is gone".to_string(),
                    })
                }
                Progress::Delivering(until) if now.mono_ns > until => {
                    Some(format!("nothing more came of it for {} s", DELIVERY_NS / SECOND))
                }
                _ => None,
            };
            if let Some(why) = late {
                warn!("incident {id}: node {}: {why}", self.nodes.name(*node));
                part.progress = Progress::Failed(why);
            }
        }
        let files_late = incident.files_until_ns.is_some_and(|until| now.mono_ns > until);
        if files_late {
            warn!("incident {id}: {} nodes did not send their files in time", incident.files_coming.len());
            incident.files_wanted.clear();
            incident.files_coming.clear();
            self.fetch(id, now);
        }
        let Some(incident) = self.incidents.get_mut(id) else { return };
        // Late parts are judged together: of a large job that takes seconds.
        if let Some(since) = incident.late_since_ns.filter(|_| incident.state == State::Judged && !incident.judging) {
            let coming = |part: &Part| matches!(part.progress, Progress::Captured | Progress::Delivering(_));
            if now.mono_ns > since + LATE_NS || !incident.parts.values().any(coming) {
                incident.late_since_ns = None;
                info!("incident {id}: judged again with what came late");
                self.judge(id);
            }
        }
        let Some(incident) = self.incidents.get(id) else { return };
        let view = self.nodes.job(&incident.job);
        let ended = !view.alive || view.attempt > incident.attempt;
        let restored = incident.opened.mono_ns < self.started.mono_ns;
        let settling = restored && now.mono_ns < self.started.mono_ns + RETURN_NS;
        match incident.state {
            // Nobody of the job came again after a restart.
            State::Gathering if view.nodes.is_empty() && !settling => self.close(id, State::Ended, now),
            State::Gathering => self.finish_if_complete(id, now),
            State::Judged if incident.is_manual() || settling => {}
            State::Judged => {
                let quiet = incident.hanging.is_empty()
                    && incident.quiet_since_ns.is_some_and(|since| now.mono_ns > since + QUIET_NS);
                if quiet {
                    let state = if incident.recovered { State::Resolved } else { State::Ended };
                    self.close(id, state, now);
                } else if ended {
                    self.close(id, State::Ended, now);
                }
            }
            _ => {}
        }
    }

    /// A hang that begins again before its node knows that it was over is the same one: the node will not ask for another incident.
    pub(super) fn reopen(&mut self, id: &str, now: Now) {
        let Some(job) = self.incidents.get(id).map(|one| one.job.clone()) else { return };
        let is_open = self.incidents.values().any(|one| one.is_open() && one.job == job);
        let Some(incident) = self.incidents.get_mut(id).filter(|one| one.state == State::Resolved) else { return };
        if is_open || self.nodes.job(&job).attempt != incident.attempt {
            return;
        }
        info!("incident {id}: the job hangs again");
        incident.state = State::Judged;
        incident.quiet_since_ns = Some(now.mono_ns);
        if let Some(folder) = incident.folder.clone() {
            self.note_status(id, &folder, xpu_timer_analysis::Status::Open, None);
        }
    }

    /// Writes into a verdict how its incident stands.
    fn note_status(&self, id: &str, folder: &Path, status: xpu_timer_analysis::Status, at: Option<String>) {
        let changed = change_verdict(folder, |verdict| {
            verdict.timing.status = status;
            verdict.timing.resolved_at = at;
        });
        if let Err(error) = changed {
            warn!("incident {id}: {}", chain(&error));
        }
    }

    pub(super) fn close(&mut self, id: &str, state: State, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        info!("incident {id}: {}", if state == State::Resolved { "resolved, the job goes on" } else { "ended" });
        incident.state = state;
        incident.work = None;
        self.expected.retain(|_, expected| expected.incident != id);
        self.captured.remove(id);
        self.merging.retain(|(of, _)| of != id);
        let nodes: Vec<NodeId> = incident.parts.keys().copied().collect();
        if let Some(folder) = incident.folder.clone() {
            let status = match state {
                State::Resolved => xpu_timer_analysis::Status::Resolved,
                _ => xpu_timer_analysis::Status::Ended,
            };
            self.note_status(id, &folder, status, Some(clock::rfc3339(now.unix_ns)));
        }
        for node in nodes {
            self.nodes.send(node, Message::Closed(IncidentClosed { incident: id.into() }), now.mono_ns);
        }
    }
}
