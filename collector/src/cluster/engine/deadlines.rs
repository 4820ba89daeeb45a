//! Deadlines: missing parts, hangs that are over, and forgetting old state.

use std::{path::Path, time::Duration};

use tracing::{info, warn};
use xpu_timer_proto::v1::{IncidentClosed, cluster_message::Message};

use crate::{
    cluster::{
        comparison::ComparisonInput,
        engine::{Action, Engine, RETURN_NS, SECOND, delivery::DELIVERY_NS},
        incident::{Part, Progress},
        nodes::Node,
    },
    incident::State,
    job::NodeId,
    os::clock::{self, Now},
};

/// How often the deadlines are checked.
pub(crate) const TICK: Duration = Duration::from_millis(500);
/// A hang is over when no node has hung for this long.
const QUIET_NS: u64 = 2 * SECOND;
/// A node that claims ranks of another node for this long is reported in the log.
const REFUSED_NS: u64 = 3 * SECOND;
/// Late parts are collected for this long before they are judged.
const LATE_NS: u64 = 15 * SECOND;
/// How often old nodes and attempts are forgotten.
const FORGET_EVERY_NS: u64 = 30 * SECOND;
/// Closed hangs, and closed dumps by hand, that are kept for `/status`. Their folders stay.
const MAX_CLOSED: usize = 500;

impl Engine {
    /// Checks all deadlines; called once per [`TICK`].
    pub fn tick(&mut self, now: Now) {
        let ids = self.incidents.values().filter(|one| one.is_active()).map(|one| one.head.id.clone());
        for id in ids.collect::<Vec<String>>() {
            self.tick_incident(&id, now);
        }
        let (free, held): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.deferred).into_iter().partition(|(node, alarm)| {
                let job = self.nodes.key(*node, &alarm.job.clone().unwrap_or_default());
                self.throttle.would_allow(&job, now.mono_ns)
            });
        self.deferred = held;
        let nodes = &self.nodes;
        self.idle.retain(|job, _| nodes.job(job).alive);
        self.promote_captures_of_dead_jobs();
        for (node, alarm) in free {
            self.alarm(node, alarm, now);
        }
        if now.mono_ns >= self.forget_ns {
            self.forget_ns = now.mono_ns + FORGET_EVERY_NS;
            self.nodes.forget(now.mono_ns);
            let nodes = &self.nodes;
            self.complete.retain(|job, _| nodes.job(job).ranks > 0);
            self.slow.retain(|job, attempt| nodes.job(job).alive && nodes.job(job).attempt == attempt);
            let running = nodes.jobs().filter(|job| nodes.job(job).alive).cloned().collect();
            self.actions.push_back(Action::Compare(ComparisonInput::Running(running)));
        }
        // Counted separately, so that dumps by hand never push out a hang.
        for by_hand in [true, false] {
            let closed = self.incidents.values().filter(|one| !one.is_open() && one.by_hand == by_hand);
            let closed: Vec<String> = closed.map(|one| one.head.id.clone()).collect();
            for id in closed.iter().take(closed.len().saturating_sub(MAX_CLOSED)) {
                self.release(id);
                self.incidents.remove(id);
            }
        }
        self.log_refused_claims(now);
        self.request_parts(now);
    }

    /// Makes the mild captures of jobs that have died incidents. Those of jobs that ended in order
    /// stay what they are.
    fn promote_captures_of_dead_jobs(&mut self) {
        let nodes = &self.nodes;
        let ended = self.captured.extract_if(.., |job, _| !nodes.job(job).alive);
        for (job, started_ns) in ended.collect::<Vec<_>>() {
            if let Some(rank) = self.nodes.job(&job).failed {
                let reason = format!("the job died later: rank {rank} ended");
                self.actions.push_back(Action::Promote { job, started_ns, reason });
            }
        }
    }

    fn tick_incident(&mut self, id: &str, now: Now) {
        self.fail_late_parts(id, now);
        self.tick_files(id, now);
        self.judge_late_parts(id, now);
        self.advance(id, now);
    }

    /// Gives up parts that missed their deadline.
    fn fail_late_parts(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let mut given_up = Vec::new();
        for (node, part) in &incident.parts {
            let late = match part.progress {
                // A part that was taken waits for its turn as long as its node is connected.
                Progress::Captured if self.nodes.get(*node).is_some_and(Node::is_joined) => None,
                Progress::Requested | Progress::Captured if now.mono_ns > incident.deadline_ns => {
                    Some(match self.nodes.get(*node) {
                        Some(node) if node.is_joined() => "it did not dump its ranks in time".to_string(),
                        Some(node) => {
                            format!("its connection was lost {:.0} s ago", clock::seconds(now.mono_ns - node.lost_ns))
                        }
                        None => "it has left".to_string(),
                    })
                }
                Progress::Delivering(until) if now.mono_ns > until => {
                    Some(format!("its delivery stopped {} s ago", DELIVERY_NS / SECOND))
                }
                _ => None,
            };
            if let Some(why) = late {
                warn!("incident {id}: node {}: {why}", self.nodes.name(*node));
                given_up.push((*node, why));
            }
        }
        for (node, why) in given_up {
            incident.progress(node, Progress::Failed(why));
        }
    }

    /// Gives up files that missed their deadline, and requests further ones.
    fn tick_files(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        if let Some((_, until)) = incident.files {
            if now.mono_ns > until {
                let nodes = incident.files_in_transfer.len() + incident.files_pending.len();
                warn!("incident {id}: {nodes} nodes did not send their files in time");
                incident.files_pending.clear();
                incident.files_in_transfer.clear();
            }
            self.fetch_files(id);
        }
    }

    /// Judges late parts together: in a large job a verdict takes seconds.
    fn judge_late_parts(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        if let Some(since) = incident.late_since_ns.filter(|_| incident.state == State::Dumped && !incident.judging) {
            let coming = |part: &Part| matches!(part.progress, Progress::Captured | Progress::Delivering(_));
            if now.mono_ns > since + LATE_NS || !incident.parts.values().any(coming) {
                incident.late_since_ns = None;
                info!("incident {id}: judged again with the late deliveries");
                self.judge(id);
            }
        }
    }

    /// Closes the incident or starts its next step, if it is time.
    fn advance(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get(id) else { return };
        let summary = self.nodes.job(&incident.head.job);
        let is_over = self.is_over(incident);
        let restored = incident.head.opened.mono_ns < self.started.mono_ns;
        let is_back = summary.alive && summary.is_complete();
        let settling = restored && !is_back && now.mono_ns < self.started.mono_ns + RETURN_NS;
        match incident.state {
            // No node of its world reconnected after a restart.
            State::Open if incident.parts.is_empty() && (summary.nodes.is_empty() || is_over) && !settling => {
                self.close(id, State::Ended, now);
            }
            State::Open => self.judge_if_complete(id, now),
            State::Dumped if incident.mild_verdict.is_some() => {}
            State::Dumped if settling => {}
            // Drawings that were pending when an earlier collector ended are dropped.
            State::Dumped if incident.by_hand && restored && !incident.is_working() => {
                self.close(id, State::Ended, now);
            }
            State::Dumped if incident.by_hand => {}
            State::Dumped => {
                let quiet = incident.hanging.is_empty()
                    && incident.quiet_since_ns.is_some_and(|since| now.mono_ns > since + QUIET_NS);
                if quiet {
                    let state = if incident.recovered { State::Resolved } else { State::Ended };
                    self.close(id, state, now);
                } else if !summary.alive || is_over {
                    self.close(id, State::Ended, now);
                    self.open_successor(id, now);
                } else if incident.next_round_ns.is_some_and(|due| now.mono_ns > due)
                    && !(incident.is_working() || incident.hanging.is_empty())
                {
                    self.begin_round(id, now);
                }
            }
            _ => {}
        }
    }

    /// Reopens a hang that begins again before its node learns that it was over: the node will not
    /// open another incident.
    pub(super) fn reopen(&mut self, id: &str, now: Now) {
        let Some((job, is_over)) = self.incidents.get(id).map(|one| (one.head.job.clone(), self.is_over(one))) else {
            return;
        };
        let is_alive = self.nodes.job(&job).alive;
        let is_open = self.incidents.values().any(|one| one.is_open() && one.head.job == job);
        let Some(incident) = self.incidents.get_mut(id).filter(|one| !one.is_open()) else { return };
        if is_open || is_over || !is_alive {
            return;
        }
        info!("incident {id}: the job hangs again");
        incident.state = State::Dumped;
        incident.closed = None;
        incident.quiet_since_ns = Some(now.mono_ns);
        if let Some(folder) = incident.folder.clone() {
            self.note_status(id, &folder, State::Dumped, None);
        }
    }

    /// Writes the status of an incident, and when it was closed, into its verdict.
    pub(super) fn note_status(&mut self, id: &str, folder: &Path, state: State, closed_unix_ns: Option<u64>) {
        let (incident, folder) = (id.to_string(), folder.to_path_buf());
        self.actions.push_back(Action::WriteStatus { incident, folder, status: state.status(), closed_unix_ns });
    }

    /// Logs nodes that keep claiming ranks of another node. During the change to a new world this
    /// happens for a moment.
    fn log_refused_claims(&mut self, now: Now) {
        let mut known = std::mem::take(&mut self.refused);
        for refused in self.nodes.refused() {
            let key = (refused.node, refused.by, refused.job.clone());
            let (since, mut logged) = known.remove(&key).unwrap_or((now.mono_ns, false));
            if !logged && now.mono_ns > since + REFUSED_NS {
                logged = true;
                warn!(
                    "node {} claims ranks {} of job {}, which node {} already has; the claim is refused",
                    self.nodes.name(refused.node),
                    refused.ranks,
                    refused.job,
                    self.nodes.name(refused.by)
                );
            }
            self.refused.insert(key, (since, logged));
        }
    }

    pub(super) fn close(&mut self, id: &str, state: State, now: Now) {
        if self.incidents.get(id).is_some_and(|incident| !incident.is_idle) {
            self.show(id);
        }
        let Some(incident) = self.incidents.get_mut(id) else { return };
        info!("incident {id}: {}", if state == State::Resolved { "resolved: the job continues" } else { "ended" });
        incident.state = state;
        incident.closed = Some((state, now.unix_ns));
        incident.captured.clear();
        incident.merging.clear();
        let nodes: Vec<NodeId> = incident.parts.keys().copied().collect();
        let folder = incident.folder.clone();
        // Files in transfer still belong to its folder.
        if !incident.is_active() {
            self.release(id);
        }
        self.expected.retain(|_, expected| expected.incident != id || expected.files);
        if let Some(folder) = folder {
            self.note_status(id, &folder, state, Some(now.unix_ns));
        }
        for node in nodes {
            self.send(node, Message::Closed(IncidentClosed { incident: id.into() }));
        }
    }
}
