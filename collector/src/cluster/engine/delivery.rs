//! The deliveries of the nodes for an incident, some at a time: first their parts for the verdict,
//! and after it the files of the ranks.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::json;
use tracing::{info, warn};
use xpu_timer_analysis::{HangEvidence, Verdict, rank_set::RankSet};
use xpu_timer_proto::lenient;
use xpu_timer_proto::v1::{
    Captured, Deliver, DumpFile, FetchFiles, FileKind, Grounds, IncidentVerdict, NodeDump, Presence, RankEvidence,
    RankPresence, TriggerKind, cluster_message::Message, delivery::Message as DeliveryMessage,
};

use crate::{
    cluster::{
        engine::{Action, Engine, Expected, SECOND},
        gather::{GatherSetup, GatherTask, NodePart, foreign_data},
        incident::{Incident, Part, Progress},
        nodes::Node,
        service::Credit,
    },
    incident::{
        IdleJob, Plan, State,
        folder::rank_of_file,
        judging, mild,
        part::{ALL_FILES, some_ranks},
    },
    job::NodeId,
    os::clock::Now,
};

/// Time in which a node must send a requested delivery.
pub(super) const DELIVERY_NS: u64 = 15 * SECOND;
/// Parts of an incident in transfer at a time. Each has some hundred kilobytes, and they are merged
/// one by one.
const DELIVERIES: usize = 32;
/// The parts of an incident wait this long for its folder: an incident without a folder is not
/// written. A disk that does not answer never makes the folder.
const FOLDER_NS: u64 = 2 * SECOND;
/// How often a part is requested again if its delivery was cut off while its node was connected.
const RETRIES: u32 = 2;

impl Engine {
    pub(super) fn progress(&mut self, id: &str, node: NodeId, progress: Progress) {
        if let Some(incident) = self.incidents.get_mut(id) {
            incident.progress(node, progress);
        }
    }

    /// A node has taken its dump.
    pub(super) fn part_captured(&mut self, captured: &Captured, node: NodeId, now: Now) {
        let open = self.incidents.get_mut(&captured.incident).filter(|incident| incident.is_open());
        let Some(incident) = open.filter(|incident| incident.round == captured.round) else { return };
        let progress = incident.parts.get(&node).map(|part| &part.progress);
        if matches!(progress, Some(Progress::Requested | Progress::Failed(_))) {
            incident.progress(node, Progress::Captured);
        }
        self.request_parts(now);
    }

    /// Requests as many parts as may be in transfer.
    pub(super) fn request_parts(&mut self, now: Now) {
        let is_ready = |one: &Incident| one.folder.is_some() || now.mono_ns >= one.head.opened.mono_ns + FOLDER_NS;
        let waiting = self.incidents.values().filter(|one| !one.captured.is_empty() && is_ready(one));
        let waiting: Vec<String> = waiting.map(|one| one.head.id.clone()).collect();
        for id in waiting {
            // Each incident has its own limit: a stuck thread of one does not block the others.
            while let Some(incident) = self.incidents.get_mut(&id).filter(|one| one.transfers() < DELIVERIES)
                && let Some(node) = incident.captured.pop_front()
            {
                let key = self.expect_delivery(Expected { incident: id.clone(), node, files: false });
                let sent = self.send(node, Message::Deliver(Deliver { incident: id.clone(), key }));
                let until = Progress::Delivering(now.mono_ns + DELIVERY_NS);
                self.progress(&id, node, if sent { until } else { Progress::Requested });
            }
        }
    }

    /// A delivery ended. If it is incomplete, it is requested again, a few times.
    pub fn delivery_ended(&mut self, key: &str, now: Now) {
        // A complete delivery is no longer expected, nor one that was replaced by a new request.
        let Some(Expected { incident: id, node, files }) = self.expected.remove(key) else { return };
        if files {
            return self.file_transfer_ended(&id, node);
        }
        let Some(incident) = self.incidents.get_mut(&id).filter(|incident| incident.is_open()) else { return };
        let Some(part) = incident.parts.get_mut(&node) else { return };
        if !matches!(part.progress, Progress::Delivering(_)) {
            return;
        }
        warn!("incident {id}: the delivery of node {} was interrupted", self.nodes.name(node));
        part.interruptions += 1;
        let broken = part.interruptions;
        if broken > RETRIES {
            incident.progress(node, Progress::Failed(format!("its delivery was interrupted {broken} times")));
            self.judge_if_complete(&id, now);
        } else {
            incident.progress(node, Progress::Captured);
        }
        self.request_parts(now);
    }

    /// Draws the key of a delivery and voids an older key for the same delivery.
    fn expect_delivery(&mut self, expected: Expected) -> String {
        self.expected.retain(|_, other| *other != expected);
        let key = (self.draw_key)();
        self.expected.insert(key.clone(), expected);
        key
    }

    /// Whether a delivery with this key is expected.
    #[must_use]
    pub fn expects(&self, key: &str) -> bool {
        self.expected.contains_key(key)
    }

    /// A piece of a delivery. Its key may have become void in the meantime.
    pub fn delivery_piece(&mut self, key: &str, piece: DeliveryMessage, credit: Credit, now: Now) {
        let Some(expected) = self.expected.get(key).cloned() else { return };
        let (id, node) = (&expected.incident, expected.node);
        match piece {
            DeliveryMessage::Key(_) => {}
            DeliveryMessage::Dump(dump) if !expected.files => self.part_received(id, node, dump, credit, now),
            DeliveryMessage::File(file) if expected.files => self.file_received(id, node, file, credit, now),
            DeliveryMessage::Dump(_) | DeliveryMessage::File(_) | DeliveryMessage::Timeline(_) => {
                warn!("node {} sent a delivery that was not requested", self.nodes.name(node));
            }
        }
    }

    /// A piece of the part of a node. A node reports its own ranks, and ranks that no node has
    /// registered even if they are gone.
    fn part_received(&mut self, id: &str, node: NodeId, mut dump: NodeDump, credit: Credit, now: Now) {
        let Some(incident) = self.incidents.get_mut(id).filter(|incident| incident.is_open()) else { return };
        let Some(part) = incident.parts.get_mut(&node) else { return };
        if !matches!(part.progress, Progress::Delivering(_) | Progress::Failed(_)) {
            return;
        }
        let world = self.nodes.job(&incident.head.job).world_size;
        let name = self.nodes.name(node).to_string();
        let (mut foreign, mut invalid) = (false, false);
        let own = std::mem::take(&mut dump.ranks).into_iter().filter_map(|encoded| {
            // The judge decodes the rest.
            let Ok(rank) = lenient::decode::<RankPresence>(&encoded) else {
                invalid = true;
                return None;
            };
            let found = matches!(rank.presence(), Presence::Unregistered | Presence::Dead)
                && rank.rank < world
                && self.nodes.node_of_rank(&incident.head.job, rank.rank).is_none_or(|of| of == node);
            if found {
                part.ranks.insert(rank.rank);
            }
            let is_own = part.ranks.contains(rank.rank);
            foreign |= !is_own;
            is_own.then_some((rank.rank, encoded))
        });
        let ranks: Vec<(u32, Vec<u8>)> = own.collect();
        let allowed = part.ranks.clone();
        let problems = [(foreign, foreign_data(&name)), (invalid, format!("node {name} delivered invalid data"))];
        for (_, problem) in problems.into_iter().filter(|(occurred, _)| *occurred) {
            warn!("incident {id}: {problem}");
            dump.errors.push(problem);
        }
        for error in &mut dump.errors {
            if !error.starts_with("node ") {
                *error = format!("node {name}: {error}");
            }
        }
        let last = dump.last;
        let until = Progress::Delivering(now.mono_ns + DELIVERY_NS);
        incident.progress(node, if last { Progress::Delivered } else { until });
        let late = incident.state == State::Dumped;
        if last {
            incident.merging.insert(node);
        }
        self.gather(
            id,
            GatherTask::Part(node, Box::new(NodePart { name: name.clone(), allowed, ranks, dump }), credit),
        );
        if last {
            self.expected.retain(|_, expected| expected.files || expected.node != node || expected.incident != id);
            if late {
                info!("incident {id}: the delivery of node {name} arrived late");
                if let Some(incident) = self.incidents.get_mut(id) {
                    incident.late_since_ns.get_or_insert(now.mono_ns);
                }
            } else {
                self.judge_if_complete(id, now);
            }
            self.request_parts(now);
        }
    }

    /// Gives a task to the thread of an incident; the first task starts the thread.
    fn gather(&mut self, id: &str, task: GatherTask) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let summary = self.nodes.job(&incident.head.job);
        let setup = || GatherSetup {
            plan: Plan {
                head: incident.head.clone(),
                hang_timeout: Duration::from_millis(summary.hang_timeout_ms),
                sample_interval: Duration::from_millis(summary.sample_interval_ms),
            },
            world_size: summary.world_size,
            folder: incident.folder.clone(),
            is_new_round: incident.state == State::Open,
            job_started_ns: summary.first_start_ns,
        };
        let setup = (!incident.is_gathering).then(|| Box::new(setup()));
        incident.is_gathering = true;
        incident.drawing = matches!(task, GatherTask::Draw { .. });
        self.actions.push_back(Action::Gather(id.into(), setup, task));
    }

    /// Releases the thread of an incident, if there is one.
    pub(super) fn release(&mut self, id: &str) {
        if self.incidents.get_mut(id).is_some_and(|incident| std::mem::take(&mut incident.is_gathering)) {
            self.actions.push_back(Action::Release(id.into()));
        }
    }

    /// The thread of an incident could not be started, or ended because of a bug. Its parts are
    /// requested again, a few times.
    pub fn gathering_failed(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        (incident.is_gathering, incident.judging, incident.drawing) = (false, false, false);
        incident.merging.clear();
        if incident.state == State::Open {
            let lost = incident.parts.iter_mut().filter(|(_, part)| part.progress == Progress::Delivered);
            let lost: Vec<(NodeId, Progress)> = lost
                .map(|(node, part)| {
                    part.interruptions += 1;
                    let failed = || Progress::Failed("the cluster collector could not gather its delivery".into());
                    (*node, if part.interruptions > RETRIES { failed() } else { Progress::Captured })
                })
                .collect();
            lost.into_iter().for_each(|(node, progress)| incident.progress(node, progress));
            self.request_parts(now);
        }
    }

    pub(super) fn judge_if_complete(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get(id).filter(|one| one.state == State::Open && !one.judging) else {
            return;
        };
        if !incident.is_complete() || incident.parts.is_empty() {
            return;
        }
        // After a restart of this collector the nodes reconnect one by one.
        let summary = self.nodes.job(&incident.head.job);
        let is_over = self.is_over(incident);
        let all_known = is_over || summary.nodes.iter().all(|node| incident.parts.contains_key(node));
        let restored = incident.head.opened.mono_ns < self.started.mono_ns;
        let is_complete = summary.is_complete() && !is_over && !summary.nodes.is_empty();
        let returned = !restored || now.mono_ns > self.started.mono_ns + 20 * SECOND || is_complete;
        if all_known && returned {
            self.judge(id);
        }
    }

    pub(super) fn judge(&mut self, id: &str) {
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
        self.gather(id, GatherTask::Judge(missing, errors));
    }

    /// The verdict shows no hang, and the files of the capture are here: there is no incident, and
    /// its folder is a mild capture. While the problem lasts, the nodes that have it report it
    /// again.
    fn found_mild(&mut self, id: &str, verdict: &Verdict) {
        self.gather(id, GatherTask::KeepMild);
        self.release(id);
        let Some(incident) = self.incidents.remove(id) else { return };
        let Incident { head, folder, parts, is_idle, .. } = incident;
        let state = if is_idle { "is idle" } else { "shows no hang" };
        let place = folder.map_or("not kept".into(), |folder| folder.display().to_string());
        info!("job {} {state}. Its capture: {} [{}, {place}]", head.job, verdict.sentence, verdict.cause);
        self.throttle.refund(&head.job);
        self.expected.retain(|_, expected| expected.incident != id);
        let message = IncidentVerdict { is_mild: true, ..message_of(verdict, id, String::new()) };
        for node in parts.into_keys() {
            self.send(node, Message::Verdict(message.clone()));
        }
        self.captured.insert(head.job.clone(), self.nodes.job(&head.job).first_start_ns);
        if is_idle {
            let last_launch_ns = self.nodes.last_launch_ns(&head.job).unwrap_or(head.opened.mono_ns);
            self.idle.insert(head.job, IdleJob { last_launch_ns, sentence: verdict.sentence.clone() });
        }
    }

    /// Whether a verdict makes the dump of an incident a mild capture. A part that is missing may
    /// have shown a hang, and the death of all ranks is a problem.
    fn is_mild(&self, incident: &Incident, verdict: &Verdict) -> bool {
        let is_delivered = |part: &Part| part.progress == Progress::Delivered;
        let all_died = incident.head.trigger.kind() == TriggerKind::Death && !self.nodes.job(&incident.head.job).alive;
        incident.may_be_mild && incident.parts.values().all(is_delivered) && !all_died && mild::is_mild(verdict)
    }

    pub(super) fn apply_verdict(&mut self, id: &str, verdict: &Verdict, now: Now) {
        let is_mild = self.incidents.get(id).is_some_and(|incident| self.is_mild(incident, verdict));
        if let Some(incident) = self.incidents.get_mut(id).filter(|_| is_mild) {
            (incident.judging, incident.state) = (false, State::Dumped);
            incident.mild_verdict = Some(Box::new(verdict.clone()));
            return self.select_files(id, verdict, now);
        }
        self.show(id);
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let (first, grounds) = (incident.state == State::Open, judging::grounds(verdict));
        incident.judging = false;
        incident.is_proven = verdict.hang != HangEvidence::None;
        let is_news = incident.cause != verdict.cause.to_string();
        incident.sentence.clone_from(&verdict.sentence);
        incident.cause = verdict.cause.to_string();
        incident.culprits.clone_from(&verdict.culprits);
        incident.verdict = incident.folder.is_none().then(|| Box::new(verdict.clone()));
        let path = incident.folder.as_ref().map_or(String::new(), |path| path.display().to_string());
        warn!("incident {id}: {} [{}, {path}]", verdict.sentence, verdict.cause);
        if first {
            incident.state = State::Dumped;
            if incident.hanging.is_empty() && incident.quiet_since_ns.is_none() {
                incident.quiet_since_ns = Some(now.mono_ns);
            }
            incident.next_round_ns = None;
            if grounds != Grounds::Proven && !incident.by_hand {
                let timeout = Duration::from_millis(self.nodes.job(&incident.head.job).hang_timeout_ms);
                let wait_ns = judging::recheck_delay_ns(timeout, incident.round);
                incident.next_round_ns = Some(now.mono_ns.saturating_add(wait_ns));
            }
            if is_news {
                self.actions.push_back(Action::Notify(Box::new(verdict.clone()), incident.folder.clone()));
            }
        }
        // The thread has written the status open, which is wrong if the incident was closed in the
        // meantime.
        if let Some((state, at)) = incident.closed
            && let Some(folder) = incident.folder.clone()
        {
            self.note_status(id, &folder, state, Some(at));
        }
        let Some(incident) = self.incidents.get(id) else { return };
        let message = message_of(verdict, id, path);
        let nodes: Vec<NodeId> = incident.parts.keys().copied().collect();
        for node in nodes {
            self.send(node, Message::Verdict(message.clone()));
        }
        self.select_files(id, verdict, now);
    }
}

/// What the nodes learn of a verdict. `path` is the folder of the incident.
fn message_of(verdict: &Verdict, incident: &str, path: String) -> IncidentVerdict {
    IncidentVerdict {
        incident: incident.into(),
        sentence: verdict.sentence.clone(),
        cause: verdict.cause.to_string(),
        path,
        culprits: verdict.culprits.clone(),
        grounds: judging::grounds(verdict).into(),
        hanging: verdict.hanging_ranks().into_iter().collect::<RankSet>().to_message(),
        is_mild: false,
    }
}

// The files of the ranks are fetched after the verdict: first all `.stacktrace` files, with which
// the report is drawn, and then the timelines (`.ops` and `.samples`), with which it is drawn
// again.

/// Number of nodes that send files at a time.
const FILE_NODES: usize = 8;
/// Time limit for one piece.
const PIECE_NS: u64 = 20 * SECOND;
/// Time limit for all files.
const FILES_NS: u64 = 120 * SECOND;

impl Engine {
    /// Chooses the ranks whose files are fetched.
    fn select_files(&mut self, id: &str, verdict: &Verdict, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let all = incident.parts.values().map(|part| part.ranks.len()).sum::<u64>() <= ALL_FILES as u64;
        let some = some_ranks(verdict);
        let delivered = incident.parts.iter().filter(|(_, part)| part.progress == Progress::Delivered);
        let wanted = delivered.map(|(node, part)| {
            let wanted: RankSet = part.ranks.iter().filter(|rank| all || some.contains(rank)).collect();
            (*node, wanted)
        });
        let pending: BTreeMap<NodeId, RankSet> = wanted.filter(|(_, wanted)| !wanted.is_empty()).collect();
        // Nobody looks at the timelines of a mild capture.
        incident.timelines = if incident.mild_verdict.is_some() { BTreeMap::new() } else { pending.clone() };
        self.begin_fetching(id, FileKind::Stacktrace, pending, now);
    }

    fn begin_fetching(&mut self, id: &str, kind: FileKind, pending: BTreeMap<NodeId, RankSet>, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        incident.file_kind = kind;
        incident.files_pending.extend(pending);
        incident.files = Some((now.mono_ns, now.mono_ns + PIECE_NS));
        self.fetch_files(id);
    }

    /// Requests files from some nodes at a time, and starts the viewer when all have arrived. A
    /// disconnected node is waited for.
    pub(super) fn fetch_files(&mut self, id: &str) {
        loop {
            let Some(incident) = self.incidents.get_mut(id).filter(|one| one.files.is_some()) else { return };
            if incident.files_in_transfer.len() >= FILE_NODES {
                return;
            }
            let is_here = |node: &NodeId| self.nodes.get(*node).is_some_and(Node::is_joined);
            let Some(node) = incident.files_pending.keys().copied().find(is_here) else { break };
            let (Some(ranks), kind) = (incident.files_pending.remove(&node), incident.file_kind) else { break };
            let key = self.expect_delivery(Expected { incident: id.into(), node, files: true });
            let request = FetchFiles { incident: id.into(), ranks: ranks.to_message(), key, kind: kind.into() };
            let sent = self.send(node, Message::Fetch(request));
            let Some(incident) = self.incidents.get_mut(id) else { return };
            if sent { &mut incident.files_in_transfer } else { &mut incident.files_pending }.insert(node, ranks);
        }
        if let Some(incident) = self.incidents.get_mut(id)
            && incident.files_in_transfer.is_empty()
            && incident.files_pending.is_empty()
        {
            incident.files = None;
            if let Some(verdict) = incident.mild_verdict.take() {
                return self.found_mild(id, &verdict);
            }
            let is_complete = incident.file_kind == FileKind::Timeline || incident.timelines.is_empty();
            self.gather(id, GatherTask::Draw { is_complete });
        }
    }

    /// A transfer ended before its last message. It is started over, a few times.
    fn file_transfer_ended(&mut self, id: &str, node: NodeId) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let Some(ranks) = incident.files_in_transfer.remove(&node) else { return };
        warn!("incident {id}: the files of node {} were interrupted", self.nodes.name(node));
        self.gather(id, GatherTask::TransferAborted(ranks.clone()));
        let Some(incident) = self.incidents.get_mut(id) else { return };
        if let Some(part) = incident.parts.get_mut(&node).filter(|part| part.interruptions < RETRIES) {
            part.interruptions += 1;
            incident.files_pending.insert(node, ranks);
        }
        self.fetch_files(id);
    }

    /// A piece of a file. It carries its credit: the node sends the next piece when this one is
    /// written.
    fn file_received(&mut self, id: &str, node: NodeId, file: DumpFile, credit: Credit, now: Now) {
        let coming = self.incidents.get_mut(id).filter(|one| one.files_in_transfer.contains_key(&node));
        let Some(incident) = coming else { return };
        if let Some((begun, until)) = &mut incident.files {
            *until = (now.mono_ns + PIECE_NS).min(*begun + FILES_NS);
        }
        if file.name.is_empty() {
            incident.files_in_transfer.remove(&node);
            self.expected.retain(|_, expected| !expected.files || expected.node != node || expected.incident != id);
            self.fetch_files(id);
            return;
        }
        let own = incident
            .parts
            .get(&node)
            .zip(rank_of_file(&file.name))
            .is_some_and(|(part, rank)| part.ranks.contains(rank));
        if own {
            self.gather(id, GatherTask::File(Box::new(file), credit));
        }
    }

    pub(super) fn drawing_finished(&mut self, id: &str, now: Now) {
        let Some(incident) = self.incidents.get_mut(id) else { return };
        let path = incident.folder.clone();
        let answer = json!({ "incident": id, "path": path });
        let replies = std::mem::take(&mut incident.replies).into_iter();
        let (drawn, closes) = (std::mem::take(&mut incident.drawing), incident.by_hand && incident.is_open());
        let timelines = std::mem::take(&mut incident.timelines);
        if !timelines.is_empty() {
            self.begin_fetching(id, FileKind::Timeline, timelines, now);
        } else if drawn {
            // The merged evidence is on disk, and a late part loads it again. A part that arrived
            // in the meantime exists only in the thread.
            self.release(id);
        }
        if closes {
            self.close(id, State::Ended, now);
        }
        self.actions.extend(replies.map(|reply| Action::Reply(reply, path.clone(), Ok(answer.clone()))));
        self.actions.push_back(Action::Retire(self.needed()));
    }

    /// The incidents whose folders must stay.
    pub(crate) fn needed(&self) -> BTreeSet<String> {
        self.incidents.values().filter(|one| one.is_active()).map(|one| one.head.id.clone()).collect()
    }
}
