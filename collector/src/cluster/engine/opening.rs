//! The start of an incident: an alarm of a node or a request by hand, and the requests to all nodes
//! of the job.

use tracing::{info, warn};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::v1::{
    Alarm, AlarmDeclined, DumpRequest, IncidentClosed, JobId, Trigger, TriggerKind, cluster_message::Message,
};

use crate::{
    cluster::{
        engine::{Action, CAPTURE_NS, Engine, SECOND},
        incident::{Incident, Part, Progress},
    },
    error::chain,
    http::questions::{DumpReply, Refusal, wanted_job},
    incident::{Head, State, engine::Record, folder::MadeFolder},
    job::{JobKey, NodeId},
    os::clock::{self, Now},
};

/// A node that had been away for this long when the incident was opened is not waited for.
const AWAY_NS: u64 = 30 * SECOND;
/// A node whose clock differs by more does not choose incident names.
const CLOCK_NS: u64 = 600 * SECOND;
/// Maximum number of operations of all ranks together, to bound the memory.
const OPERATIONS: u32 = 1_000_000;

impl Engine {
    /// A node with new ranks joins the open incidents of their jobs. If it takes part in one, its
    /// part has these ranks too: the ranks of a restarted node register one after another.
    pub(super) fn request_for_open_incidents(&mut self, node: NodeId, now: Now) {
        let open: Vec<String> =
            self.incidents.values().filter(|one| one.is_open()).map(|one| one.head.id.clone()).collect();
        for id in open {
            let known = self.incidents.get(&id).is_some_and(|incident| incident.parts.contains_key(&node));
            if known {
                self.extend_part(&id, node, now);
            } else if let Some(request) = self.dump_request(&id, node, now) {
                self.send(node, Message::Dump(request));
            }
        }
    }

    /// Adds the ranks that a node has now to its part of an incident, unless that is complete.
    fn extend_part(&mut self, id: &str, node: NodeId, now: Now) {
        let Some(incident) = self.incidents.get(id).filter(|incident| !self.is_over(incident)) else { return };
        let ranks = self.nodes.ranks_of(&incident.head.job, node);
        let Some(part) = self.incidents.get_mut(id).and_then(|incident| incident.parts.get_mut(&node)) else { return };
        // Nodes send their ranks often, and each look at a large job takes time.
        if ranks.is_subset(&part.ranks) {
            return;
        }
        if part.progress != Progress::Delivered {
            part.ranks.union_with(&ranks);
        }
        self.replace_away_nodes(id, node);
        self.judge_if_complete(id, now);
    }

    pub(super) fn alarm(&mut self, node: NodeId, alarm: Alarm, now: Now) {
        let job = self.nodes.key(node, &alarm.job.clone().unwrap_or_default());
        let summary = self.nodes.job(&job);
        let decline = |reason: String, alone: bool| {
            Message::Declined(AlarmDeclined { incident: alarm.incident.clone(), reason, alone })
        };
        if !summary.nodes.contains(&node) {
            let reason = format!("this node has no rank of job {job}; it works alone");
            self.send(node, decline(reason, true));
            return;
        }
        let mut trigger = alarm.trigger.clone().unwrap_or_default();
        // A node may report only its own ranks. The rest of its alarm still counts.
        if u32::try_from(trigger.rank).is_ok_and(|rank| self.nodes.node_of_rank(&job, rank) != Some(node)) {
            warn!(
                "node {} sent an alarm for rank {} of job {job}, which it does not have",
                self.nodes.name(node),
                trigger.rank
            );
            (trigger.rank, trigger.operation) = (-1, None);
        }
        if trigger.kind() == TriggerKind::Idle
            && let Some(busy) = self.nodes.busy_elsewhere(&job, node, now.mono_ns)
        {
            let reason = format!("the job is not idle: it launches on node {busy}");
            self.send(node, decline(reason, false));
            return;
        }
        // A dump by hand that the node has already taken does not contain a later hang, nor does
        // a mild capture.
        let taken = |one: &Incident| one.by_hand && !one.awaits(node) || one.mild_verdict.is_some();
        let is_other = |one: &Incident| one.head.id != alarm.incident && (taken(one) || self.is_before(one, node));
        let open = self
            .incidents
            .values()
            .find(|one| one.is_open() && one.head.job == job && !self.is_over(one) && !is_other(one));
        let open = open.map(|one| one.head.id.clone());
        let is_idle = trigger.kind() == TriggerKind::Idle && !alarm.reports_idle;
        let is_requested = match trigger.kind() {
            TriggerKind::Manual => true,
            TriggerKind::Idle => alarm.reports_idle,
            _ => false,
        };
        if let Some(incident) = open.and_then(|id| self.incidents.get_mut(&id)) {
            let id = incident.head.id.clone();
            if alarm.hangs {
                incident.note_hang(node, true, false, now.mono_ns);
            }
            let awaits = incident.awaits(node);
            incident.is_idle &= is_idle;
            if is_requested {
                self.show(&id);
            }
            // An alarm long after the other nodes have delivered: the node missed the request or is
            // new.
            if let Some(request) = awaits.then(|| self.dump_request(&id, node, now)).flatten() {
                self.send(node, Message::Dump(request));
            } else if id != alarm.incident {
                self.send(node, decline(format!("it is a part of incident {id}"), false));
            }
            return;
        }
        if !alarm.hangs && trigger.kind() != TriggerKind::Manual {
            // The node was away when the incident was closed.
            let closed = IncidentClosed { incident: alarm.incident };
            self.send(node, Message::Closed(closed));
            return;
        }
        if trigger.kind() != TriggerKind::Manual && !self.throttle.allows(&job, now.mono_ns) {
            let known = |(other, held): &(NodeId, Alarm)| *other == node && held.incident == alarm.incident;
            if !self.deferred.iter().any(known) {
                info!("job {job} has had too many incidents recently: {} is postponed", alarm.incident);
                self.deferred.push((node, alarm));
            }
            return;
        }
        let hanging = alarm.hangs.then_some(node);
        let name = if alarm.captured { alarm.incident } else { in_time(&alarm.incident, now) };
        let head = Head { id: name, job, attempt: summary.attempt, trigger, opened: now, late_ns: alarm.late_ns };
        let (hanging, may_be_mild) = (hanging.into_iter().collect(), !is_requested);
        self.open(Incident { hanging, is_idle, may_be_mild, ..Incident::new(head) }, now);
    }

    /// Opens an incident, under another name if its own is taken. Returns the name.
    fn open(&mut self, mut incident: Incident, now: Now) -> String {
        let name = incident.head.id.chars();
        let mut id: String = name.filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(64).collect();
        while self.incidents.contains_key(&id) || id.is_empty() {
            id.push('0');
        }
        let Head { job, trigger, .. } = &incident.head;
        if incident.is_idle {
            info!("job {job} has launched nothing for its idle timeout; it is examined as {id}");
        } else {
            info!("incident {id} opened for job {job}: {:?} of rank {}", trigger.kind(), trigger.rank);
        }
        self.opened += u64::from(!incident.may_be_mild);
        let summary = self.nodes.job(job);
        incident.head.id.clone_from(&id);
        incident.deadline_ns = now.mono_ns + summary.sample_interval_ms * 1_000_000 + CAPTURE_NS;
        let record = Record { opened_mono_ns: now.mono_ns, dumped_mono_ns: now.mono_ns, ..Record::new(&incident.head) };
        self.incidents.insert(id.clone(), incident);
        self.actions.push_back(Action::MakeFolder(record));
        self.request_dumps(&id, now);
        id
    }

    /// An incident is not, or not only, a dump that may show no hang: users see it from now on.
    pub(super) fn show(&mut self, id: &str) {
        if let Some(incident) = self.incidents.get_mut(id)
            && std::mem::take(&mut incident.may_be_mild)
        {
            if std::mem::take(&mut incident.is_idle) {
                info!("incident {id} opened for job {}", incident.head.job);
            }
            self.opened += 1;
        }
    }

    /// The folder of an incident was made, or could not be made.
    pub fn folder_made(&mut self, id: &str, made: MadeFolder, now: Now) {
        let folder = match made {
            Ok((folder, problem)) => {
                if let Some(problem) = problem {
                    warn!("incident {id}: {}; the folder is {}", chain(&problem), folder.path.display());
                }
                folder
            }
            Err(error) => return warn!("incident {id}: no folder could be created: {}", chain(&error)),
        };
        match self.incidents.get_mut(id) {
            Some(incident) if incident.state == State::Open && !incident.is_gathering => {
                incident.folder = Some(folder.path);
                self.request_parts(now);
            }
            // Its thread has started without a folder, and an empty folder is not an incident.
            _ => {
                warn!("incident {id}: {} was created too late and is removed", folder.path.display());
                self.actions.push_back(Action::RemoveFolder(folder.path));
            }
        }
    }

    /// Asks every node of the job for a dump.
    fn request_dumps(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get(id) else { return };
        let nodes = self.nodes.job(&incident.head.job).nodes.clone();
        for node in nodes {
            let away = self.nodes.get(node).filter(|node| !node.is_joined()).map(|node| now.mono_ns - node.lost_ns);
            let request = self.dump_request(id, node, now);
            match (away, request) {
                (Some(away_ns), _) if away_ns > AWAY_NS => {
                    let why = format!("it has been disconnected for {:.0} s", clock::seconds(away_ns));
                    self.progress(id, node, Progress::Failed(why));
                }
                (None, Some(request)) => _ = self.send(node, Message::Dump(request)),
                _ => {}
            }
        }
        self.judge_if_complete(id, now);
    }

    /// Starts another round for a hang that lasts but may not have been one.
    pub(super) fn begin_round(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let summary = self.nodes.job(&incident.head.job);
        info!("incident {id}: the hang lasts; the ranks are captured again");
        incident.begin_round();
        incident.deadline_ns = now.mono_ns + summary.sample_interval_ms * 1_000_000 + CAPTURE_NS;
        self.release(id);
        self.expected.retain(|_, expected| expected.incident != id);
        self.request_dumps(id, now);
    }

    /// Adds a node to an incident and returns the request for it. Returns `None` if the node has no
    /// rank of the job or has delivered.
    pub(super) fn dump_request(&mut self, id: &str, node: NodeId, now: Now) -> Option<DumpRequest> {
        let is_over = self.is_over(self.incidents.get(id)?);
        let incident = self.incidents.get_mut(id)?;
        let ranks = match is_over {
            // For a world that is over, only nodes that were asked before still have data.
            true => incident.parts.get(&node).map(|part| part.ranks.clone()).unwrap_or_default(),
            false => self.nodes.ranks_of(&incident.head.job, node),
        };
        let done = incident.parts.get(&node).is_some_and(|part| part.progress == Progress::Delivered);
        if ranks.is_empty() || done {
            return None;
        }
        let summary = self.nodes.job(&incident.head.job);
        let JobKey { name, instance } = self.nodes.key_at(node, &incident.head.job);
        let request = DumpRequest {
            incident: id.into(),
            job: Some(JobId { name, instance }),
            attempt: incident.head.attempt,
            trigger: Some(incident.head.trigger.clone()),
            sample_interval_ms: summary.sample_interval_ms,
            ranks: ranks.to_message(),
            operations: (OPERATIONS / summary.world_size.max(1)).clamp(10, 1024),
            round: incident.round,
        };
        let new = || Part { progress: Progress::Requested, ranks: RankSet::new(), interruptions: 0, requested_ns: 0 };
        let part = incident.parts.entry(node).or_insert_with(new);
        part.ranks.union_with(&ranks);
        part.requested_ns = now.mono_ns;
        incident.captured.retain(|other| *other != node);
        incident.progress(node, Progress::Requested);
        if is_over {
            return Some(request);
        }
        self.replace_away_nodes(id, node);
        Some(request)
    }

    /// Removes the parts of nodes that are away and have no ranks of the job any more: the ranks of
    /// a restarted node no longer belong to its old entry.
    fn replace_away_nodes(&mut self, id: &str, node: NodeId) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let away = self.nodes.away().filter(|other| incident.parts.contains_key(other));
        let job = &incident.head.job;
        let successors: Vec<NodeId> = away.filter(|other| self.nodes.ranks_of(job, *other).is_empty()).collect();
        for old in successors {
            if incident.parts.get(&old).is_some_and(|part| part.progress != Progress::Delivered) {
                incident.parts.remove(&old);
            }
            if incident.hanging.remove(&old) {
                incident.hanging.insert(node);
            }
        }
    }

    /// A hang in an incident whose world is over may belong to the current world. It becomes an
    /// incident of its own: its nodes reported it before the other nodes reported the end of the
    /// older world.
    pub(super) fn open_successor(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get(id) else { return };
        let of_the_next =
            |node: &&NodeId| self.nodes.all_started_after(&incident.head.job, **node, incident.head.opened.mono_ns);
        let hanging: Vec<NodeId> = incident.hanging.iter().filter(of_the_next).copied().collect();
        let job = incident.head.job.clone();
        let is_open = self.incidents.values().any(|one| one.is_open() && one.head.job == job);
        if hanging.is_empty() || is_open || !self.throttle.allows(&job, now.mono_ns) {
            return;
        }
        let attempt = self.nodes.job(&job).attempt;
        let trigger = Trigger { rank: -1, unix_ns: now.unix_ns, ..Default::default() };
        let head = Head { id: new_name(now), job, attempt, trigger, opened: now, late_ns: 0 };
        self.open(Incident { hanging: hanging.into_iter().collect(), ..Incident::new(head) }, now);
    }

    /// A user requests a dump of a job; without a name, of the only one.
    pub fn dump_by_hand(&mut self, name: Option<&str>, reply: DumpReply, now: Now) {
        let alive: Vec<JobKey> = self.nodes.jobs().filter(|job| self.nodes.job(job).alive).cloned().collect();
        let job = match wanted_job(&alive, name) {
            Ok(job) => job,
            Err(refusal) => return self.actions.push_back(Action::Reply(reply, None, Err(refusal))),
        };
        let open =
            self.incidents.values().find(|one| one.state == State::Open && one.head.job == job && !self.is_over(one));
        let open = open.map(|incident| incident.head.id.clone());
        if open.is_none() && !self.dumps.allows(&job, now.mono_ns) {
            let refusal = Refusal::too_many(self.dumps.wait_ns(&job, now.mono_ns));
            return self.actions.push_back(Action::Reply(reply, None, Err(refusal)));
        }
        let id = open.unwrap_or_else(|| {
            let trigger =
                Trigger { kind: TriggerKind::Manual.into(), rank: -1, unix_ns: now.unix_ns, ..Default::default() };
            let attempt = self.nodes.job(&job).attempt;
            let head = Head { id: new_name(now), job, attempt, trigger, opened: now, late_ns: 0 };
            self.open(Incident::new(head), now)
        });
        self.show(&id);
        if let Some(incident) = self.incidents.get_mut(&id) {
            incident.replies.push(reply);
        }
    }
}

/// A name for an incident that was not named by a node.
fn new_name(now: Now) -> String {
    format!("{}-{:08x}", clock::compact(now.unix_ns), now.unix_ns % SECOND)
}

/// Gives a name the time of this collector: incidents are listed and removed by name, and the clock
/// of a node may be wrong by hours. A node that has already written a folder keeps its name.
fn in_time(name: &str, now: Now) -> String {
    let [earliest, latest] = [now.unix_ns.saturating_sub(CLOCK_NS), now.unix_ns + CLOCK_NS].map(clock::compact);
    match name.split_once('-') {
        Some((time, _)) if *earliest <= *time && *time <= *latest => name.into(),
        Some((_, rest)) => format!("{}-{rest}", clock::compact(now.unix_ns)),
        None => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_whose_clock_is_off_does_not_name_incidents() {
        // 2026-11-21T10:55:00Z.
        let now = Now { mono_ns: 0, unix_ns: 1_795_258_500 * SECOND };
        for (name, taken) in [
            ("20261121T105430Z-0e0c1f66", "20261121T105430Z-0e0c1f66"),
            ("20261121T165430Z-0e0c1f66", "20261121T105500Z-0e0c1f66"),
            ("20261120T235959Z-0e0c1f66", "20261121T105500Z-0e0c1f66"),
            ("19700101T000012Z-0e0c1f66", "20261121T105500Z-0e0c1f66"),
            ("odd", "odd"),
        ] {
            assert_eq!(in_time(name, now), taken);
        }
    }
}
