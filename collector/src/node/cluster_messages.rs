//! This node as a member of a cluster: it reports its ranks and incidents to the cluster collector
//! and serves its requests. Without an answer the node works alone.

use std::sync::Arc;

use tracing::{info, warn};
use xpu_timer_analysis::rank_set::RankSet;
use xpu_timer_proto::{
    PROTOCOL_VERSION,
    v1::{
        Alarm, Captured, DumpRequest, FetchFiles, FileKind, Grounds, Heartbeat, IncidentUpdate, IncidentVerdict,
        JobActivity, NodeHello, NodeRanks, Presence as Shown, RankEntry, RankInfo, cluster_message,
        node_message::Message,
    },
};

use crate::{
    incident::{
        self,
        engine::{Cause, Incident},
        part::PartLocation,
    },
    job::{JobKey, job_id, local_key},
    node::{
        cluster_member::{self, UplinkEvent},
        launched::{State, Unregistered},
        plan::ClusterPart,
        registry::{Presence, Rank},
        reports::{ExaminedJob, VerdictSummary},
        state::NodeState,
    },
    os::{clock::Now, process},
};

const SECOND: u64 = 1_000_000_000;
/// A cluster that has not requested a dump within this time counts as absent, whatever the state of
/// the connection.
const ANSWER_NS: u64 = 2 * SECOND;
/// After a restart of the node collector its hooks connect again within this time.
const RETURN_NS: u64 = 6 * SECOND;
const HEARTBEAT_NS: u64 = 10 * SECOND;
const DECLINED_NS: u64 = 60 * SECOND;
/// A verdict of the cluster takes as long as its slowest node. After this time the node's own
/// verdict counts.
const VERDICT_NS: u64 = 90 * SECOND;
/// When the stream has been lost for this long, earlier messages of the cluster no longer count.
const FORGET_NS: u64 = 20 * SECOND;
/// Number of parts of closed incidents that are kept for a cluster that comes back.
const MAX_PARTS: usize = 32;
/// Number of communicators of a rank that the node reports, so that the cluster can identify its
/// job.
const MAX_COMMUNICATORS: usize = 4;

impl NodeState {
    /// Handles an event of the stream.
    pub(super) fn uplink(&mut self, event: UplinkEvent, now: Now) {
        match event {
            UplinkEvent::Opened(link) => {
                self.member.link = Some(*link);
                self.send_hello(now);
            }
            UplinkEvent::Lost(why) => {
                self.stop_searching(now);
                self.member.link = None;
                self.member.welcomed = false;
                self.member.problem = why;
                self.member.lost_ns.get_or_insert(now.mono_ns);
            }
            UplinkEvent::Message(message) => self.cluster_message(*message, now),
        }
    }

    fn send_hello(&mut self, now: Now) {
        // A mild capture is not an incident. If its problem lasts, the job is examined again.
        let is_mild = |incident: &&Incident| self.mild_incident(&incident.head.job).as_ref() == Some(&incident.head.id);
        let open = self.engine.incidents().filter(|incident| incident.closed.is_none() && !is_mild(incident));
        let incidents = open.filter_map(|incident| self.alarm(incident)).collect();
        let ranks = self.rank_entries(now);
        self.member.reported_ranks = without_ages(&ranks);
        let hello = NodeHello {
            protocol: PROTOCOL_VERSION,
            node: self.node.clone(),
            identity: self.member.identity.clone(),
            ranks: Some(NodeRanks { ranks }),
            incidents,
        };
        self.member.reported_hangs.clear();
        self.member.send(Message::Hello(hello));
    }

    pub(super) fn handle_cluster_message(&mut self, message: cluster_message::Message, now: Now) {
        // Ranks may have registered since the last report. The cluster collector ignores data of
        // ranks that it does not know, and a request may be answered at once.
        self.report_ranks(now);
        match message {
            cluster_message::Message::Welcome(welcome) => {
                self.member.welcomed = true;
                self.member.problem.clear();
                self.member.lost_ns = None;
                for request in welcome.open {
                    self.dump_requested(request, now);
                }
            }
            cluster_message::Message::Dump(request) => self.dump_requested(request, now),
            cluster_message::Message::Deliver(wanted) => {
                if let Some(kept) = self.member.parts.get(&wanted.incident).cloned() {
                    self.member.start_delivery(wanted.key, move |sender| {
                        cluster_member::send_part(&wanted.incident, &kept, &sender)
                    });
                }
            }
            cluster_message::Message::Fetch(fetch) => self.fetch(fetch),
            cluster_message::Message::Timeline(request) => self.timeline_requested(request, now),
            cluster_message::Message::Verdict(verdict) => self.cluster_verdict(verdict, now),
            cluster_message::Message::Closed(closed) => {
                if let Some(job) = self.engine.get(&closed.incident).map(|incident| incident.head.job.clone()) {
                    self.engine.clear_cause(&job, &Cause::Cluster, now);
                }
            }
            cluster_message::Message::Declined(declined) => {
                if self.member.announced.remove(&declined.incident).is_none() {
                    return;
                }
                info!("incident {}: {}", declined.incident, declined.reason);
                if declined.alone {
                    return self.dump_alone(&declined.incident);
                }
                if let Some(job) = self.engine.get(&declined.incident).map(|incident| incident.head.job.clone()) {
                    self.member.declined.insert(job, now.mono_ns + DECLINED_NS);
                }
                self.engine.discard(&declined.incident);
            }
        }
    }

    /// Reports an incident that has not been dumped yet to the cluster. Returns false when the node
    /// must work without the cluster.
    pub(super) fn announce(&mut self, id: &str, now: Now) -> bool {
        let Some(incident) = self.engine.get(id).filter(|_| self.member.welcomed) else { return false };
        let Some(alarm) = self.alarm(incident) else { return false };
        self.report_ranks(now);
        if !self.member.send(Message::Alarm(alarm)) {
            return false;
        }
        self.member.announced.insert(id.into(), now.mono_ns + ANSWER_NS);
        true
    }

    /// Whether other nodes may have a part in a job: processes that do not know their rank concern
    /// this node alone.
    pub(super) fn is_of_cluster(&self, job: &JobKey) -> bool {
        self.registry.ranks().any(|rank| rank.job == *job && rank.info.rank >= 0)
    }

    /// `None` for a job that concerns this node alone.
    fn alarm(&self, incident: &Incident) -> Option<Alarm> {
        self.is_of_cluster(&incident.head.job).then(|| Alarm {
            incident: incident.head.id.clone(),
            job: Some(job_id(&incident.head.job)),
            attempt: incident.head.attempt,
            trigger: Some(incident.head.trigger.clone()),
            late_ns: incident.head.late_ns,
            hangs: !incident.superseded
                && self.engine.has_local_problem(&incident.head.job)
                && incident.state != incident::State::Adopted,
            captured: self.member.parts.contains_key(&incident.head.id) || incident.dumped.is_some(),
            reports_idle: self.registry.of_job(&incident.head.job).iter().any(|rank| rank.settings.reports_idle),
        })
    }

    /// Handles a dump request of the cluster.
    fn dump_requested(&mut self, request: DumpRequest, now: Now) {
        let Some(job) = request.job.as_ref().map(local_key) else { return };
        let id = request.incident.clone();
        if request.round > self.member.rounds.get(&id).copied().unwrap_or(0) {
            // The part of an earlier look is out of date.
            self.member.parts.remove(&id);
        }
        if self.member.parts.contains_key(&id) {
            self.engine.join_cluster_incident(&id);
            self.member.send(Message::Captured(Captured { incident: id, round: request.round }));
            return;
        }
        if self.member.deferred.iter().any(|deferred| deferred.incident == id) {
            return;
        }
        let just_started = now.mono_ns < self.started.mono_ns + RETURN_NS;
        let is_here = |rank: u32| self.registry.of_job(&job).iter().any(|entry| entry.info.rank == rank as i32);
        let all = request.ranks.iter().flat_map(|run| run.first..=run.last).all(is_here);
        if just_started && !all {
            self.member.deferred.push(request);
            return;
        }
        let operations = request.operations as usize;
        self.member.rounds.insert(id.clone(), request.round);
        let is_past = self.engine.get(&id).is_some_and(|incident| incident.superseded);
        let is_of_job = |own: &&String| !is_past && self.engine.get(own).is_some_and(|one| one.head.job == job);
        let announced = self.member.announced.keys().find(is_of_job);
        if let Some(own) = announced.cloned() {
            self.member.announced.remove(&own);
            self.rename_incident(&own, &id);
            // Requests for a manual dump that wait for this incident get this dump.
            if let Some(waiting) = self.waiting.remove(&own) {
                self.waiting.entry(id.clone()).or_default().extend(waiting);
            }
        } else if self.engine.get(&id).is_some_and(|incident| incident.state == incident::State::Open) {
            return;
        } else if let Some(own) = self.mild_incident(&job).filter(|_| !is_past) {
            self.rename_incident(&own, &id);
            self.engine.restart_dump(&id);
            // The verdict of the cluster collector decides about another look.
            self.verdict_actions.rechecks.entry(id.clone()).or_default().due_ns = None;
        } else if request.round == 0 || !self.engine.restart_dump(&id) {
            let of_job = self.registry.of_job(&job);
            let unregistered =
                || self.unregistered_ranks(now).into_iter().find(|rank| rank.job == job).map(|rank| rank.info.attempt);
            let attempt = of_job.first().map(|rank| rank.info.attempt).or_else(unregistered).unwrap_or(request.attempt);
            self.engine.open_for_cluster(&id, &job, attempt, request.trigger.unwrap_or_default(), now);
        }
        self.member.awaiting_verdict.insert(id.clone(), now.mono_ns + VERDICT_NS);
        self.dump(&id, Some(ClusterPart { operations, alone: false }));
    }

    /// This node's part has been captured.
    pub(super) fn part_captured(&mut self, id: &str, part: PartLocation) {
        self.member.parts.insert(id.into(), Arc::new(part));
        while self.member.parts.len() > MAX_PARTS {
            self.member.parts.pop_first();
        }
        while self.member.rounds.len() > MAX_PARTS {
            self.member.rounds.pop_first();
        }
        let round = self.member.rounds.get(id).copied().unwrap_or(0);
        self.member.send(Message::Captured(Captured { incident: id.into(), round }));
    }

    fn fetch(&mut self, fetch: FetchFiles) {
        if fetch.kind() != FileKind::Stacktrace && self.pending_timelines.contains_key(&fetch.incident) {
            return self.member.waiting_fetches.push(fetch);
        }
        let folder = match self.member.parts.get(&fetch.incident).map(|kept| &**kept) {
            Some(PartLocation::InFolder(folder)) => Some(folder.clone()),
            _ => None,
        };
        self.member.start_delivery(fetch.key.clone(), move |sender| {
            cluster_member::send_files(&fetch, &folder.unwrap_or_default(), &sender);
        });
    }

    /// The timelines of an incident are in its folder.
    pub(super) fn send_waiting_timelines(&mut self, id: &str) {
        let of_incident = |fetch: &mut FetchFiles| fetch.incident == id;
        let due: Vec<FetchFiles> = self.member.waiting_fetches.extract_if(.., of_incident).collect();
        due.into_iter().for_each(|fetch| self.fetch(fetch));
    }

    fn cluster_verdict(&mut self, verdict: IncidentVerdict, now: Now) {
        let IncidentVerdict { is_mild, sentence, culprits, .. } = &verdict;
        let examined = ExaminedJob { is_mild: *is_mild, sentence, culprits };
        if self.examined_together(&verdict.incident, examined, now) {
            self.member.awaiting_verdict.remove(&verdict.incident);
            return;
        }
        warn!("incident {}: {} [{}, of the whole job]", verdict.incident, verdict.sentence, verdict.cause);
        let grounds = verdict.grounds();
        // The evidence of the hang may be on other nodes.
        if grounds != Grounds::Unspecified
            && let Some(incident) = self.engine.get(&verdict.incident)
        {
            let reason = format!("the job hung later (incident {})", verdict.incident);
            self.promote_captures(incident.head.job.clone(), reason, now);
        }
        if let Some(report) = self.reports.get_mut(&verdict.incident) {
            (report.sentence, report.cause) = (verdict.sentence, verdict.cause);
        }
        if self.member.awaiting_verdict.remove(&verdict.incident).is_some() {
            let mut hanging = RankSet::new();
            verdict.hanging.iter().for_each(|run| hanging.insert_run(run.first, run.last));
            // The cluster collector no longer has an incident for a mild verdict.
            let by_cluster = !verdict.is_mild;
            if let Some(incident) = self.engine.get(&verdict.incident).filter(|_| !by_cluster) {
                let job = incident.head.job.clone();
                self.engine.clear_cause(&job, &Cause::Cluster, now);
            }
            let summary = VerdictSummary { grounds, culprits: verdict.culprits, hanging, by_cluster };
            self.apply_verdict(&verdict.incident, &summary, now);
        }
    }

    /// Reports to the cluster that an incident is closed here.
    pub(super) fn report_closed(&mut self, id: &str, resolved: bool) {
        self.member.reported_hangs.insert(id.into(), false);
        self.member.send(Message::Update(IncidentUpdate { incident: id.into(), hangs: false, ended: !resolved }));
    }

    /// Runs once a second.
    pub(super) fn tick_member(&mut self, now: Now) {
        self.continue_after_search(now);
        let late = |due: &u64| *due <= now.mono_ns;
        let alone: Vec<String> =
            self.member.announced.iter().filter(|(_, due)| late(due)).map(|(id, _)| id.clone()).collect();
        for id in alone {
            self.member.announced.remove(&id);
            warn!("incident {id}: the cluster collector does not answer; this node works alone");
            self.dump_alone(&id);
        }
        // These maps keep only jobs and incidents that still exist.
        let (living, engine) = (self.registry.living_jobs(), &self.engine);
        self.member.last_launch.retain(|job, _| living.contains(job));
        self.member.declined.retain(|_, until| *until > now.mono_ns);
        self.member.reported_hangs.retain(|id, _| engine.get(id).is_some());
        for request in std::mem::take(&mut self.member.deferred) {
            self.dump_requested(request, now);
        }
        let late = |due: &u64| *due <= now.mono_ns;
        let over: Vec<String> =
            self.member.awaiting_verdict.iter().filter(|(_, due)| late(due)).map(|(id, _)| id.clone()).collect();
        for id in over {
            self.member.awaiting_verdict.remove(&id);
            let Some(report) = self.reports.get(&id) else { continue };
            let (own, is_mild, sentence) = (report.own.clone(), report.is_mild, report.sentence.clone());
            let Some(own) = own else { continue };
            warn!("incident {id}: the cluster collector sent no verdict; the verdict of this node counts");
            let examined = ExaminedJob { is_mild, sentence: &sentence, culprits: &own.culprits };
            if !self.examined_together(&id, examined, now) {
                self.apply_verdict(&id, &own, now);
            }
        }
        if self.member.lost_ns.is_some_and(|since| now.mono_ns > since + FORGET_NS) {
            // It is no longer known whether the job hangs on other nodes.
            for job in self.registry.jobs() {
                self.engine.clear_cause(&job, &Cause::Cluster, now);
            }
        }
        let jobs = self.registry.jobs();
        self.member.last_launch.retain(|job, _| jobs.contains(job));
        if !self.member.welcomed {
            return;
        }
        self.report_ranks(now);
        self.report_hangs();
        if now.mono_ns >= self.member.heartbeat_ns + HEARTBEAT_NS {
            self.member.heartbeat_ns = now.mono_ns;
            let activity = |(job, last): (&JobKey, &u64)| JobActivity {
                job: Some(job_id(job)),
                launch_age_ms: now.mono_ns.saturating_sub(*last) / 1_000_000,
            };
            let jobs = self.member.last_launch.iter().map(activity).collect();
            self.member.send(Message::Heartbeat(Heartbeat { jobs }));
            for paces in self.paces() {
                self.member.send(Message::Paces(paces));
            }
        }
    }

    fn report_ranks(&mut self, now: Now) {
        let ranks = self.rank_entries(now);
        let report = without_ages(&ranks);
        if report != self.member.reported_ranks {
            self.member.reported_ranks = report;
            self.member.send(Message::Ranks(NodeRanks { ranks }));
        }
    }

    fn report_hangs(&mut self) {
        let open =
            self.engine.incidents().filter(|one| matches!(one.state, incident::State::Open | incident::State::Dumped));
        let now: Vec<(String, bool, bool)> = open
            .map(|one| {
                (one.head.id.clone(), !one.superseded && self.engine.has_local_problem(&one.head.job), one.ranks_left)
            })
            .collect();
        for (incident, hangs, ended) in now {
            if self.member.reported_hangs.insert(incident.clone(), hangs) != Some(hangs) {
                self.member.send(Message::Update(IncidentUpdate { incident, hangs, ended }));
            }
        }
        let engine = &self.engine;
        self.member.reported_hangs.retain(|id, _| engine.get(id).is_some());
    }

    /// The entries of the ranks that know their rank.
    fn rank_entries(&self, now: Now) -> Vec<RankEntry> {
        let jobs = self.registry.jobs();
        let ranks: Vec<&Rank> =
            jobs.iter().flat_map(|job| self.registry.of_job(job)).filter(|rank| rank.info.rank >= 0).collect();
        let aged = |entry: RankEntry, started_ns: u64, ended_ns: Option<u64>| {
            let age_ms = |ns: u64| (now.mono_ns.saturating_sub(ns) / 1_000_000).max(1);
            RankEntry { age_ms: age_ms(started_ns), ended_age_ms: ended_ns.map_or(0, age_ms), ..entry }
        };
        let registered = ranks.iter().map(|rank| {
            let ended_ns = (!rank.presence.is_alive()).then_some(rank.ended_ns);
            aged(entry(rank), rank.started_ns(now.mono_ns), ended_ns)
        });
        let is_other = |unregistered: &&Unregistered| {
            ranks.iter().all(|rank| (&rank.job, rank.info.rank) != (&unregistered.job, unregistered.info.rank))
        };
        let unregistered = self.unregistered_ranks(now).into_iter().filter(is_other).map(|unregistered| {
            let ended_ns = match unregistered.state {
                State::Runs(_) => None,
                State::Ended(ended_ns, _) => Some(ended_ns),
            };
            aged(unregistered_entry(unregistered), process::started_ns(unregistered.start, now.mono_ns), ended_ns)
        });
        registered.chain(unregistered).collect()
    }
}

/// The fields that make a rank worth reporting again when they change: all but the ages.
fn without_ages(entries: &[RankEntry]) -> Vec<RankEntry> {
    entries.iter().map(|entry| RankEntry { age_ms: 0, ended_age_ms: 0, ..entry.clone() }).collect()
}

fn entry(rank: &Rank) -> RankEntry {
    let milliseconds = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    RankEntry {
        job: Some(job_id(&rank.job)),
        info: Some(RankInfo { command: String::new(), ..rank.info.clone() }),
        presence: match rank.presence {
            Presence::Present | Presence::Detached => Shown::Present,
            Presence::Dead => Shown::Dead,
            Presence::Left => Shown::Left,
        }
        .into(),
        hang_timeout_ms: milliseconds(rank.settings.hang_timeout),
        sample_interval_ms: milliseconds(rank.settings.sample_interval),
        idle_timeout_ms: milliseconds(rank.settings.idle_timeout),
        failed: !rank.presence.is_alive() && !rank.ended_in_order(),
        start: rank.process.as_ref().map_or(0, |process| process.start),
        communicators: rank.communicators.iter().take(MAX_COMMUNICATORS).map(|place| place.id).collect(),
        ..Default::default()
    }
}

fn unregistered_entry(unregistered: &Unregistered) -> RankEntry {
    let presence = match unregistered.state {
        State::Runs(_) => Shown::Unregistered,
        State::Ended(..) => Shown::Dead,
    };
    RankEntry {
        job: Some(job_id(&unregistered.job)),
        info: Some(RankInfo { command: String::new(), ..unregistered.info.clone() }),
        presence: presence.into(),
        start: unregistered.start,
        ..Default::default()
    }
}
