//! The state of the cluster collector and what happens to it. One task owns it; nothing here waits for a node, a disk or a verdict.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};
use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::v1::{
    Alarm, AlarmDeclined, Deliver, DumpFile, DumpRequest, FetchFiles, IncidentClosed, IncidentVerdict, NodeDump,
    NodeHello, NodeWelcome, Presence, RankEntry, RankEvidence, RankRun, StackTree, Trigger, TriggerKind,
    cluster_message::Message, node_message::Message as Said,
};

use super::{
    config::Settings,
    gather::{self, Done, Plan, Record, Work},
    incident::{DumpReply, Incident, Part, Progress, State},
    nodes::{NodeId, Nodes, Outgoing, StreamId},
    service::StreamEvent,
};
use crate::{
    clock::{self, Now},
    delivery::rank_of,
    dump::change_verdict,
    error::chain,
    folder::Folder,
    inbox::wanted_job,
    member::key,
    registry::JobKey,
    retention,
    throttle::Throttle,
    webhook::Webhook,
};

/// A message to the hub that is not from a node's stream.
#[derive(Debug)]
pub enum Command {
    /// `/status`.
    Status(oneshot::Sender<Value>),
    /// `/metrics`.
    Metrics(oneshot::Sender<String>),
    /// `POST /dump`.
    Dump(Option<String>, DumpReply),
    /// The thread of an incident is done with something.
    Done(String, Done),
}

/// The state.
pub struct Hub {
    /// Settings.
    pub settings: Settings,
    /// Nodes and ranks.
    pub nodes: Nodes,
    /// Incidents, oldest first.
    pub incidents: BTreeMap<String, Incident>,
    /// Incidents opened by this process.
    pub opened: u64,
    /// When it was started.
    pub started: Now,
    streams: BTreeMap<StreamId, NodeId>,
    throttle: Throttle<JobKey>,
    // Alarms of jobs that have had too many incidents of late.
    held: Vec<(NodeId, Alarm)>,
    // Parts that were taken and wait to be asked for.
    captured: VecDeque<(String, NodeId)>,
    delivering: BTreeSet<(String, NodeId)>,
    // Jobs of which every rank is known, with attempt and world.
    whole: BTreeMap<JobKey, (u32, u32)>,
    forget_ns: u64,
    webhook: Option<Webhook>,
    commands: mpsc::UnboundedSender<Command>,
}

const SECOND: u64 = 1_000_000_000;
/// Beyond the sample interval, for a node to have taken its dump.
const CAPTURE_NS: u64 = 10 * SECOND;
/// For a node to send what it was asked for.
const DELIVERY_NS: u64 = 15 * SECOND;
/// Parts that are under way at a time: each is some hundred kilobytes, and the merging takes one after the other.
const DELIVERIES: usize = 32;
/// A node that was away for so long when the incident was opened is not waited for.
const AWAY_NS: u64 = 30 * SECOND;
/// A hang is over when no node has hung for so long.
const QUIET_NS: u64 = 2 * SECOND;
/// After a restart, nodes come again within this time.
const RETURN_NS: u64 = 60 * SECOND;
/// What comes late is collected for so long before it is judged.
const LATE_NS: u64 = 15 * SECOND;
/// In jobs of up to so many ranks all `.stacktrace` files are fetched; in larger ones those of the culprits and of some others.
const ALL_FILES: usize = 1024;
const SOME_FILES: usize = 16;
/// Nodes that send files at a time, and how long files are waited for.
const FILE_NODES: usize = 8;
const FILES_NS: u64 = 20 * SECOND;
/// How often nodes and attempts that are gone are looked for.
const FORGET_EVERY_NS: u64 = 30 * SECOND;
/// Operations of all ranks together that are worth their memory.
const OPERATIONS: u32 = 1_000_000;
/// Closed incidents are kept for `/status`; the folders stay.
const MAX_CLOSED: usize = 500;

impl Hub {
    /// With what an earlier cluster collector left open.
    #[must_use]
    pub fn new(settings: Settings, commands: mpsc::UnboundedSender<Command>, now: Now) -> Self {
        let webhook = settings.webhook.as_deref().map(Webhook::new);
        let mut hub = Hub {
            nodes: Nodes::default(),
            incidents: BTreeMap::new(),
            opened: 0,
            started: now,
            streams: BTreeMap::new(),
            throttle: Throttle::default(),
            held: Vec::new(),
            captured: VecDeque::new(),
            delivering: BTreeSet::new(),
            whole: BTreeMap::new(),
            forget_ns: 0,
            webhook,
            commands,
            settings,
        };
        for root in [hub.settings.timeline_path.clone(), hub.settings.fallback_path.clone()] {
            for (folder, record, verdict) in Record::open_in(&root) {
                hub.restore(folder, record, verdict, now);
            }
        }
        hub
    }

    fn restore(&mut self, folder: std::path::PathBuf, record: Record, verdict: Option<Verdict>, now: Now) {
        info!("incident {} was left open by an earlier cluster collector", record.id);
        let trigger = xpu_timer_proto::Message::decode(&record.trigger[..]).unwrap_or_default();
        let age_ns = now.unix_ns.saturating_sub(record.opened_unix_ns);
        let opened = Now { mono_ns: now.mono_ns.saturating_sub(age_ns), unix_ns: record.opened_unix_ns };
        let job = JobKey { name: record.job, instance: record.instance };
        let mut incident = Incident::new(&record.id, &job, record.attempt, trigger, opened, record.late_ns);
        incident.folder = Some(folder);
        incident.deadline_ns = now.mono_ns + RETURN_NS;
        if let Some(verdict) = verdict {
            incident.state = State::Judged;
            (incident.sentence, incident.cause) = (verdict.sentence, verdict.cause.to_string());
            incident.culprits = verdict.culprits;
            incident.quiet_since_ns = Some(now.mono_ns + RETURN_NS);
        }
        self.incidents.insert(record.id, incident);
    }

    /// Something happened on a node's stream.
    pub fn stream(&mut self, event: StreamEvent, now: Now) {
        match event {
            StreamEvent::Joined(stream, hello, outgoing) => self.joined(stream, *hello, outgoing, now),
            StreamEvent::Said(stream, message) => {
                // The stream may have been closed by the node's next one.
                if let Some(node) = self.streams.get(&stream).copied() {
                    self.said(node, *message, now);
                }
            }
            StreamEvent::Ended(stream, why) => {
                let Some(node) = self.streams.remove(&stream) else { return };
                if self.nodes.lose(node, stream, now.mono_ns) {
                    info!("node {} is gone: {why}", self.nodes.name(node));
                    self.lost(node, now);
                }
            }
        }
    }

    fn joined(&mut self, stream: StreamId, hello: NodeHello, outgoing: Outgoing, now: Now) {
        let node = self.nodes.join(&hello.node, &hello.identity, stream, outgoing);
        self.streams.retain(|_, other| *other != node);
        self.streams.insert(stream, node);
        // What was under way on its old stream is lost.
        self.interrupted(node, now);
        let ranks = hello.ranks.unwrap_or_default().ranks;
        info!("node {} joined with {} ranks", hello.node, ranks.len());
        self.claim(node, ranks);
        let open: Vec<String> = self.incidents.values().filter(|one| one.is_open()).map(|one| one.id.clone()).collect();
        let requests = open.iter().filter_map(|id| self.ask(id, node)).collect();
        self.nodes.send(node, Message::Welcome(NodeWelcome { open: requests }), now.mono_ns);
        for alarm in hello.incidents {
            self.alarm(node, alarm, now);
        }
    }

    fn claim(&mut self, node: NodeId, ranks: Vec<RankEntry>) {
        let jobs: BTreeSet<JobKey> = ranks.iter().filter_map(|entry| entry.job.as_ref().map(key)).collect();
        self.claim_ranks(node, ranks);
        for job in jobs {
            let view = self.nodes.job(&job);
            let now = (view.attempt, view.world_size);
            if view.is_whole() && self.whole.insert(job.clone(), now) != Some(now) {
                info!(
                    "job {job} is whole: {} ranks on {} nodes, attempt {}",
                    view.ranks,
                    view.nodes.len(),
                    view.attempt
                );
            }
        }
    }

    fn claim_ranks(&mut self, node: NodeId, ranks: Vec<RankEntry>) {
        for refused in self.nodes.claim(node, ranks) {
            warn!(
                "node {} says that it has ranks {} of job {}, which node {} has; they are refused to it",
                self.nodes.name(node),
                refused.ranks,
                refused.job,
                refused.by
            );
        }
    }

    /// A node has no stream any more.
    fn lost(&mut self, node: NodeId, now: Now) {
        self.interrupted(node, now);
        for helped in self.nodes.claim_again() {
            self.ask_all_of(helped, now);
        }
    }

    /// Deliveries of a node end with its stream. They begin anew when it comes again.
    fn interrupted(&mut self, node: NodeId, now: Now) {
        for incident in self.incidents.values_mut() {
            if let Some(part) = incident.parts.get_mut(&node)
                && matches!(part.progress, Progress::Captured | Progress::Delivering(_))
            {
                part.progress = Progress::Asked;
                incident.deadline_ns = incident.deadline_ns.max(now.mono_ns + CAPTURE_NS);
            }
            if incident.files_coming.remove(&node) {
                incident.files_wanted.insert(node, RankSet::new());
            }
        }
        self.captured.retain(|(_, other)| *other != node);
    }

    fn said(&mut self, node: NodeId, message: Said, now: Now) {
        match message {
            Said::Hello(_) => warn!("node {} said hello twice", self.nodes.name(node)),
            Said::Ranks(ranks) => {
                self.claim(node, ranks.ranks);
                self.ask_all_of(node, now);
            }
            Said::Alarm(alarm) => self.alarm(node, alarm, now),
            Said::Captured(captured) => self.captured(&captured.incident, node, now),
            Said::Dump(dump) => self.delivered(node, dump, now),
            Said::File(file) => self.file(node, file, now),
            Said::Update(update) => {
                if !update.hangs {
                    self.held.retain(|(other, alarm)| *other != node || alarm.incident != update.incident);
                }
                if let Some(incident) = self.incidents.get_mut(&update.incident) {
                    incident.hangs(node, update.hangs, update.ended, now.mono_ns);
                }
            }
            Said::Heartbeat(beat) => {
                for activity in beat.jobs {
                    let job = activity.job.unwrap_or_default();
                    self.nodes.launched(node, &job, activity.launch_age_ms, now.mono_ns);
                }
            }
        }
    }

    /// A node that got new ranks takes part in the open incidents of their jobs.
    fn ask_all_of(&mut self, node: NodeId, now: Now) {
        let open: Vec<String> = self.incidents.values().filter(|one| one.is_open()).map(|one| one.id.clone()).collect();
        for id in open {
            let known = self.incidents.get(&id).is_some_and(|incident| incident.parts.contains_key(&node));
            if !known && let Some(request) = self.ask(&id, node) {
                self.nodes.send(node, Message::Dump(request), now.mono_ns);
            }
        }
    }

    fn alarm(&mut self, node: NodeId, alarm: Alarm, now: Now) {
        let job = key(&alarm.job.clone().unwrap_or_default());
        let view = self.nodes.job(&job);
        let decline = |reason: String| Message::Declined(AlarmDeclined { incident: alarm.incident.clone(), reason });
        if !view.nodes.contains(&node) {
            let reason = format!("no rank of job {job} is this node's in attempt {}", view.attempt);
            self.nodes.send(node, decline(reason), now.mono_ns);
            return;
        }
        let trigger = alarm.trigger.clone().unwrap_or_default();
        if trigger.kind() == TriggerKind::Idle
            && let Some(busy) = self.nodes.busy_elsewhere(&job, node, now.mono_ns)
        {
            let reason = format!("the job is not idle, it launches on node {busy}");
            self.nodes.send(node, decline(reason), now.mono_ns);
            return;
        }
        let open =
            self.incidents.values_mut().find(|one| one.is_open() && one.job == job && one.attempt == view.attempt);
        if let Some(incident) = open {
            let id = incident.id.clone();
            if alarm.hangs {
                incident.hangs(node, true, false, now.mono_ns);
            }
            // A node that alarms while the others have delivered long ago missed the request, or came new.
            let waits = incident.parts.get(&node).is_none_or(|part| matches!(part.progress, Progress::Asked));
            if let Some(request) = waits.then(|| self.ask(&id, node)).flatten() {
                self.nodes.send(node, Message::Dump(request), now.mono_ns);
            } else if id != alarm.incident {
                self.nodes.send(node, decline(format!("it is a part of incident {id}")), now.mono_ns);
            }
            return;
        }
        if !alarm.hangs && trigger.kind() != TriggerKind::Manual {
            return;
        }
        if trigger.kind() != TriggerKind::Manual && !self.throttle.allows(&job, now.mono_ns) {
            let known = |(other, held): &(NodeId, Alarm)| *other == node && held.incident == alarm.incident;
            if !self.held.iter().any(known) {
                info!("job {job} has had too many incidents of late: {} waits", alarm.incident);
                self.held.push((node, alarm));
            }
            return;
        }
        let hanging = alarm.hangs.then_some(node);
        self.open(&alarm.incident, &job, view.attempt, trigger, alarm.late_ns, hanging, now);
    }

    #[allow(clippy::too_many_arguments, reason = "all of it is the incident")]
    fn open(
        &mut self,
        id: &str,
        job: &JobKey,
        attempt: u32,
        trigger: Trigger,
        late_ns: u64,
        hanging: Option<NodeId>,
        now: Now,
    ) -> String {
        let mut id: String = id.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(64).collect();
        while self.incidents.contains_key(&id) || id.is_empty() {
            id.push('0');
        }
        info!("incident {id} opened for job {job}: {:?} of rank {}", trigger.kind(), trigger.rank);
        self.opened += 1;
        let view = self.nodes.job(job);
        let mut incident = Incident::new(&id, job, attempt, trigger, now, late_ns);
        incident.hanging.extend(hanging);
        incident.deadline_ns = now.mono_ns + view.sample_interval_ms * 1_000_000 + CAPTURE_NS;
        match Folder::create(&self.settings.timeline_path, &self.settings.fallback_path, &id) {
            Ok((folder, problem)) => {
                if let Some(problem) = problem {
                    warn!("incident {id}: {}; the folder is {}", chain(&problem), folder.path.display());
                }
                let record = Record {
                    id: id.clone(),
                    job: job.name.clone(),
                    instance: job.instance.clone(),
                    attempt,
                    opened_unix_ns: now.unix_ns,
                    late_ns,
                    trigger: xpu_timer_proto::Message::encode_to_vec(&incident.trigger),
                };
                record.write(&folder.path);
                incident.folder = Some(folder.path);
            }
            Err(error) => warn!("incident {id}: no folder could be made: {}", chain(&error)),
        }
        self.incidents.insert(id.clone(), incident);
        for node in view.nodes.iter().copied() {
            let away = self.nodes.get(node).filter(|node| !node.is_joined()).map(|node| now.mono_ns - node.lost_ns);
            let request = self.ask(&id, node);
            match (away, request) {
                (Some(away_ns), _) if away_ns > AWAY_NS => {
                    let why = format!("it has been away for {:.0} s", clock::seconds(away_ns));
                    self.progress(&id, node, Progress::Failed(why));
                }
                (None, Some(request)) => _ = self.nodes.send(node, Message::Dump(request), now.mono_ns),
                _ => {}
            }
        }
        self.finish_if_complete(&id, now);
        id
    }

    /// Notes that a node takes part in an incident, and what it is asked for; `None` when it has no rank of the job, or has delivered.
    fn ask(&mut self, id: &str, node: NodeId) -> Option<DumpRequest> {
        let incident = self.incidents.get_mut(id)?;
        let ranks = self.nodes.ranks_of(&incident.job, incident.attempt, node);
        let done = incident.parts.get(&node).is_some_and(|part| part.progress == Progress::Delivered);
        if ranks.is_empty() || done {
            return None;
        }
        let view = self.nodes.job(&incident.job);
        let request = DumpRequest {
            incident: id.into(),
            job: Some(xpu_timer_proto::v1::JobId {
                name: incident.job.name.clone(),
                instance: incident.job.instance.clone(),
            }),
            attempt: incident.attempt,
            trigger: Some(incident.trigger.clone()),
            sample_interval_ms: view.sample_interval_ms,
            ranks: runs(&ranks),
            operations: (OPERATIONS / view.world_size.max(1)).clamp(10, 1024),
        };
        let part = incident.parts.entry(node).or_insert(Part { progress: Progress::Asked, ranks: RankSet::new() });
        part.ranks.union_with(&ranks);
        part.progress = Progress::Asked;
        // The ranks of a node that was started anew are no longer those of the old one, which is away.
        let away = self.nodes.away().filter(|other| incident.parts.contains_key(other));
        let (job, attempt) = (&incident.job, incident.attempt);
        let successors: Vec<NodeId> =
            away.filter(|other| self.nodes.ranks_of(job, attempt, *other).is_empty()).collect();
        for old in successors {
            if incident.parts.get(&old).is_some_and(|part| part.progress != Progress::Delivered) {
                incident.parts.remove(&old);
            }
            if incident.hanging.remove(&old) {
                incident.hanging.insert(node);
            }
        }
        Some(request)
    }

    fn progress(&mut self, id: &str, node: NodeId, progress: Progress) {
        if let Some(part) = self.incidents.get_mut(id).and_then(|incident| incident.parts.get_mut(&node)) {
            part.progress = progress;
        }
    }

    /// A node has taken its dump.
    fn captured(&mut self, id: &str, node: NodeId, now: Now) {
        let Some(incident) = self.incidents.get_mut(id).filter(|incident| incident.is_open()) else { return };
        let Some(part) = incident.parts.get_mut(&node) else { return };
        if matches!(part.progress, Progress::Asked | Progress::Failed(_)) {
            part.progress = Progress::Captured;
            self.captured.push_back((id.into(), node));
        }
        self.deliver(now);
    }

    /// Asks for as many parts as may be under way.
    fn deliver(&mut self, now: Now) {
        let incidents = &self.incidents;
        self.delivering.retain(|(id, node)| {
            let part = incidents.get(id).and_then(|incident| incident.parts.get(node));
            part.is_some_and(|part| matches!(part.progress, Progress::Delivering(_)))
        });
        while self.delivering.len() < DELIVERIES {
            let Some((id, node)) = self.captured.pop_front() else { return };
            if self.nodes.send(node, Message::Deliver(Deliver { incident: id.clone() }), now.mono_ns) {
                self.progress(&id, node, Progress::Delivering(now.mono_ns + DELIVERY_NS));
                self.delivering.insert((id, node));
            }
        }
    }

    /// A piece of a node's part. A node speaks for its own ranks, and for those that nobody has registered.
    fn delivered(&mut self, node: NodeId, mut dump: NodeDump, now: Now) {
        let id = dump.incident.clone();
        let Some(incident) = self.incidents.get_mut(&id).filter(|incident| incident.is_open()) else { return };
        let Some(part) = incident.parts.get_mut(&node) else { return };
        if !matches!(part.progress, Progress::Delivering(_) | Progress::Failed(_)) {
            return;
        }
        let world = self.nodes.job(&incident.job).world_size;
        let before = dump.ranks.len();
        dump.ranks.retain(|rank| {
            let found = rank.presence() == Presence::Unregistered
                && rank.rank < world
                && !self.nodes.is_of_another(&incident.job, incident.attempt, rank.rank, node);
            if found {
                part.ranks.insert(rank.rank);
            }
            part.ranks.contains(rank.rank)
        });
        let mut foreign = before - dump.ranks.len();
        for tree in [&mut dump.native, &mut dump.python] {
            if tree.as_ref().is_some_and(|tree| !speaks_for(tree, &part.ranks)) {
                *tree = None;
                foreign += 1;
            }
        }
        let name = self.nodes.name(node).to_string();
        if foreign > 0 {
            let problem = format!("node {name} spoke for ranks that are not its own; that is left out");
            warn!("incident {id}: {problem}");
            dump.errors.push(problem);
        }
        for error in &mut dump.errors {
            if !error.starts_with("node ") {
                *error = format!("node {name}: {error}");
            }
        }
        let last = dump.last;
        if last {
            part.progress = Progress::Delivered;
        } else {
            part.progress = Progress::Delivering(now.mono_ns + DELIVERY_NS);
        }
        let late = incident.state == State::Judged;
        self.work(&id, Work::Part(Box::new(dump)));
        if last {
            if late {
                info!("incident {id}: the part of node {name} came late");
                if let Some(incident) = self.incidents.get_mut(&id) {
                    incident.late_since_ns.get_or_insert(now.mono_ns);
                }
            } else {
                self.finish_if_complete(&id, now);
            }
            self.deliver(now);
        }
    }

    /// Gives work to the incident's thread, which is started when there is none.
    fn work(&mut self, id: &str, work: Work) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        if incident.work.is_none() {
            let view = self.nodes.job(&incident.job);
            let milliseconds = |ms: u64| ms.saturating_mul(1_000_000);
            let plan = Plan {
                incident: id.into(),
                job: incident.job.name.clone(),
                attempt: incident.attempt,
                world_size: view.world_size,
                trigger: incident.trigger.clone(),
                opened: incident.opened,
                late_ns: incident.late_ns,
                hang_timeout_ns: milliseconds(view.hang_timeout_ms),
                sample_interval_ns: milliseconds(view.sample_interval_ms),
                folder: incident.folder.clone(),
            };
            let (commands, name) = (self.commands.clone(), id.to_string());
            // Nobody hears it when the process ends.
            let tell = move |done| drop(commands.send(Command::Done(name.clone(), done)));
            match gather::start(plan, tell) {
                Ok(sender) => incident.work = Some(sender),
                Err(error) => {
                    warn!("incident {id}: {}", chain(&error));
                    return;
                }
            }
        }
        if let Some(sender) = &incident.work {
            // The thread ends only when it is let go.
            let _ = sender.send(work);
        }
    }

    fn finish_if_complete(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get(id).filter(|one| one.state == State::Gathering && !one.judging) else {
            return;
        };
        if !incident.is_complete() {
            return;
        }
        // After a restart of this collector the nodes come one after the other.
        let view = self.nodes.job(&incident.job);
        let all_known = view.nodes.iter().all(|node| incident.parts.contains_key(node)) && !view.nodes.is_empty();
        let restored = incident.opened.mono_ns < self.started.mono_ns;
        let returned = !restored || now.mono_ns > self.started.mono_ns + 20 * SECOND || view.is_whole();
        if all_known && returned {
            self.judge(id);
        }
    }

    fn judge(&mut self, id: &str) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        incident.judging = true;
        let mut missing = Vec::new();
        let mut errors = Vec::new();
        for (node, part) in &incident.parts {
            let Progress::Failed(why) = &part.progress else { continue };
            let name = self.nodes.name(*node);
            errors.push(format!("node {name} (ranks {}) delivered nothing: {why}", part.ranks));
            missing.extend(part.ranks.iter().map(|rank| RankEvidence {
                rank,
                presence: Presence::Missing.into(),
                node: name.into(),
                errors: vec![format!("its node {name} delivered nothing: {why}")],
                ..Default::default()
            }));
        }
        self.work(id, Work::Judge(missing, errors));
    }

    /// A message from another task or thread.
    pub fn command(&mut self, command: Command, now: Now) {
        match command {
            Command::Status(reply) => drop(reply.send(super::status::status(self, now))),
            Command::Metrics(reply) => drop(reply.send(super::status::metrics(self, now))),
            Command::Dump(job, reply) => self.by_hand(job.as_deref(), reply, now),
            Command::Done(id, Done::Judged(verdict)) => self.judged(&id, &verdict, now),
            Command::Done(id, Done::Drawn) => self.drawn(&id, now),
        }
    }

    fn judged(&mut self, id: &str, verdict: &Verdict, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let first = incident.state == State::Gathering;
        incident.judging = false;
        incident.sentence.clone_from(&verdict.sentence);
        incident.cause = verdict.cause.to_string();
        incident.culprits.clone_from(&verdict.culprits);
        let path = incident.folder.as_ref().map_or(String::new(), |path| path.display().to_string());
        warn!("incident {id}: {} [{}, {path}]", verdict.sentence, verdict.cause);
        if first {
            incident.state = State::Judged;
            if incident.hanging.is_empty() && incident.quiet_since_ns.is_none() {
                incident.quiet_since_ns = Some(now.mono_ns);
            }
            if let Some(webhook) = &self.webhook {
                webhook.post(verdict, incident.folder.as_deref());
            }
        }
        let message = IncidentVerdict {
            incident: id.into(),
            sentence: verdict.sentence.clone(),
            cause: verdict.cause.to_string(),
            path,
        };
        let nodes: Vec<NodeId> = incident.parts.keys().copied().collect();
        for node in nodes {
            self.nodes.send(node, Message::Verdict(message.clone()), now.mono_ns);
        }
        self.want_files(id, verdict, now);
    }

    /// Chooses whose `.stacktrace` files are fetched.
    fn want_files(&mut self, id: &str, verdict: &Verdict, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let all = incident.parts.values().map(|part| part.ranks.len()).sum::<u64>() <= ALL_FILES as u64;
        let some: Vec<u32> = verdict
            .culprits
            .iter()
            .take(SOME_FILES)
            .chain(verdict.ranks.iter().filter_map(|group| group.ranks.first()).take(SOME_FILES))
            .copied()
            .collect();
        for (node, part) in &incident.parts {
            if part.progress != Progress::Delivered {
                continue;
            }
            let wanted: RankSet = part.ranks.iter().filter(|rank| all || some.contains(rank)).collect();
            if !wanted.is_empty() {
                incident.files_wanted.insert(*node, wanted);
            }
        }
        incident.files_until_ns = Some(now.mono_ns + FILES_NS);
        self.fetch(id, now);
    }

    fn fetch(&mut self, id: &str, now: Now) {
        loop {
            let Some(incident) = self.incidents.get_mut(id).filter(|one| one.files_until_ns.is_some()) else { return };
            if incident.files_coming.len() >= FILE_NODES {
                return;
            }
            let Some((node, ranks)) = incident.files_wanted.pop_first() else { break };
            let request = FetchFiles { incident: id.into(), ranks: runs(&ranks) };
            if self.nodes.send(node, Message::Fetch(request), now.mono_ns)
                && let Some(incident) = self.incidents.get_mut(id)
            {
                incident.files_coming.insert(node);
            }
        }
        if let Some(incident) = self.incidents.get_mut(id)
            && incident.files_coming.is_empty()
        {
            incident.files_until_ns = None;
            self.work(id, Work::Draw);
        }
    }

    fn file(&mut self, node: NodeId, file: DumpFile, now: Now) {
        let id = file.incident.clone();
        let Some(incident) = self.incidents.get_mut(&id).filter(|one| one.files_coming.contains(&node)) else { return };
        if file.name.is_empty() {
            incident.files_coming.remove(&node);
            self.fetch(&id, now);
            return;
        }
        let own =
            incident.parts.get(&node).zip(rank_of(&file.name)).is_some_and(|(part, rank)| part.ranks.contains(rank));
        if own {
            self.work(&id, Work::File(Box::new(file)));
        }
    }

    fn drawn(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let path = incident.folder.clone();
        for reply in std::mem::take(&mut incident.replies) {
            // Whoever asked may be gone.
            drop(reply.send(Ok(json!({ "incident": id, "path": path }))));
        }
        // The merged whole is on disk; a part that comes late reads it again.
        incident.work = None;
        if incident.is_manual() {
            self.close(id, State::Ended, now);
        }
        let open = self.incidents.values().filter(|one| one.is_open()).map(|one| one.id.clone()).collect();
        let roots = vec![self.settings.timeline_path.clone(), self.settings.fallback_path.clone()];
        retention::start(roots, self.settings.keep, open);
    }

    fn by_hand(&mut self, name: Option<&str>, reply: DumpReply, now: Now) {
        let alive: Vec<JobKey> = self.nodes.jobs().filter(|job| self.nodes.job(job).alive).cloned().collect();
        let job = match wanted_job(&alive, name) {
            Ok(job) => job,
            Err(refusal) => return drop(reply.send(Err(refusal))),
        };
        let open = self.incidents.values().find(|one| one.state == State::Gathering && one.job == job);
        let id = open.map(|incident| incident.id.clone()).unwrap_or_else(|| {
            let trigger =
                Trigger { kind: TriggerKind::Manual.into(), rank: -1, unix_ns: now.unix_ns, ..Default::default() };
            let id = format!("{}-{:08x}", clock::compact(now.unix_ns), now.unix_ns % SECOND);
            let attempt = self.nodes.job(&job).attempt;
            self.open(&id, &job, attempt, trigger, 0, None, now)
        });
        if let Some(incident) = self.incidents.get_mut(&id) {
            incident.replies.push(reply);
        }
    }

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
                Progress::Asked if now.mono_ns > incident.deadline_ns => Some(match self.nodes.get(*node) {
                    Some(node) if node.is_joined() => "it took no dump in time".to_string(),
                    Some(node) => {
                        format!("its connection was lost {:.0} s ago", clock::seconds(now.mono_ns - node.lost_ns))
                    }
                    None => "it is gone".to_string(),
                }),
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

    fn close(&mut self, id: &str, state: State, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        info!("incident {id}: {}", if state == State::Resolved { "resolved, the job goes on" } else { "ended" });
        incident.state = state;
        incident.work = None;
        let nodes: Vec<NodeId> = incident.parts.keys().copied().collect();
        if let Some(folder) = incident.folder.clone() {
            let status = match state {
                State::Resolved => xpu_timer_analysis::Status::Resolved,
                _ => xpu_timer_analysis::Status::Ended,
            };
            let changed = change_verdict(&folder, |verdict| {
                verdict.timing.status = status;
                verdict.timing.resolved_at = Some(clock::rfc3339(now.unix_ns));
            });
            if let Err(error) = changed {
                warn!("incident {id}: {}", chain(&error));
            }
        }
        for node in nodes {
            self.nodes.send(node, Message::Closed(IncidentClosed { incident: id.into() }), now.mono_ns);
        }
    }
}

/// How often the hub looks at its deadlines.
pub const TICK: Duration = Duration::from_millis(500);

fn runs(ranks: &RankSet) -> Vec<RankRun> {
    ranks.runs().iter().map(|run| RankRun { first: run.first, last: run.last }).collect()
}

/// Whether a tree is about these ranks alone.
fn speaks_for(tree: &StackTree, ranks: &RankSet) -> bool {
    let allowed = |run: &RankRun| ranks.runs().iter().any(|own| own.first <= run.first && run.last <= own.last);
    tree.nodes.iter().flat_map(|node| &node.ranks).all(|run| run.first <= run.last && allowed(run))
}
