//! The incidents of a node: starts dumps, handles their outcome, and notifies. Verdicts without a
//! folder, because the disk was full, read-only or unavailable, are served from memory and written
//! as soon as possible.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
};

use serde_json::json;
use tracing::{info, warn};
use xpu_timer_analysis::{Verdict, rank_set::RankSet};
use xpu_timer_proto::v1::{Grounds, TriggerKind};

use crate::{
    error::{Error, chain},
    http::questions::{DumpReply, Refusal, wanted_job},
    incident::{
        IdleJob, Plan, State,
        engine::{Action, Cause, Incident, RaisedCause, Record},
        folder::{Folder, folder_name, own_stamp},
        retention,
        verdict_files::{self, link_latest, name_others, note_problem, set_status, try_write_verdict, write_record},
    },
    job::JobKey,
    node::{
        captures::Captures,
        dump::{self, ShutdownFlag},
        folder_writer::WrittenTimelines,
        inbox::{Command, Inbox},
        plan::{ClusterPart, DumpTask, Outcome, registered_subjects},
        reports::{ExaminedJob, IncidentReport, UnwrittenVerdict, VerdictSummary},
        state::NodeState,
    },
    os::{
        clock::{self, Now},
        resources,
    },
};

/// Number of operations of each flight record that are kept for a cluster collector that has not
/// requested the dump.
const UNREQUESTED_OPERATIONS: usize = 128;

impl NodeState {
    /// Folders that may contain incidents.
    pub(crate) fn folders(&self) -> Vec<PathBuf> {
        let mut folders = BTreeSet::from([self.settings.timeline_path.clone(), self.settings.fallback_path.clone()]);
        folders.extend(self.registry.ranks().map(|rank| rank.settings.timeline_path.clone()));
        folders.into_iter().collect()
    }

    pub(super) fn dump_by_hand(&mut self, name: Option<&str>, reply: DumpReply, now: Now) {
        let alive: Vec<JobKey> = self.registry.jobs().into_iter().filter(|job| self.registry.is_alive(job)).collect();
        let job = match wanted_job(&alive, name) {
            Ok(job) => job,
            Err(refusal) => return drop(reply.send(Err(refusal))),
        };
        if self.engine.dump_in_progress(&job).is_none() && !self.dumps.allows(&job, now.mono_ns) {
            return drop(reply.send(Err(Refusal::too_many(self.dumps.wait_ns(&job, now.mono_ns)))));
        }
        let attempt = self.attempt(&job);
        let raise = RaisedCause {
            attempt,
            rank: -1,
            cause: Cause::Manual,
            operation: None,
            since_ns: now.mono_ns,
            late_ns: 0,
            job: job.clone(),
        };
        self.raise(raise, now);
        if let Some(incident) = self.engine.dump_in_progress(&job) {
            self.waiting.entry(incident.head.id.clone()).or_default().push(reply);
        }
    }

    pub(super) fn execute(&mut self, action: Action, now: Now) {
        match action {
            Action::Dump(id) if self.announce(&id, now) => {}
            Action::Dump(id) => self.dump_alone(&id),
            Action::Resume(id) => self.resume(&id, now),
            Action::Close(id, state) => self.close(&id, state, now),
        }
    }

    /// Dumps an incident without the cluster collector, which may request the part later.
    pub(crate) fn dump_alone(&mut self, id: &str) {
        self.note_opened(id);
        self.capture_alone(id);
    }

    /// Dumps an incident.
    pub(crate) fn dump(&mut self, id: &str, for_cluster: Option<ClusterPart>) {
        self.note_opened(id);
        self.start_dump(id, for_cluster);
    }

    fn note_opened(&mut self, id: &str) {
        let Some(incident) = self.engine.get(id) else { return };
        let is_shown = !self.may_be_mild(incident);
        if is_shown {
            self.opened += 1;
        }
        let (job, kind) = (&incident.head.job, incident.head.trigger.kind());
        if is_shown || !incident.is_idle() {
            info!("incident {id} opened for job {job}: {kind:?}");
        } else {
            info!("job {job} has launched nothing for its idle timeout; it is examined as {id}");
        }
        self.reports.insert(id.to_string(), IncidentReport { is_shown, ..IncidentReport::default() });
    }

    /// Whether a verdict without a hang on an incident is only logged: no user has requested the
    /// dump, or a report of idle jobs, and not all ranks have died. A job of a cluster is examined
    /// by all of its nodes together, and the verdict is that of the cluster collector.
    fn may_be_mild(&self, incident: &Incident) -> bool {
        let ranks = self.registry.of_job(&incident.head.job);
        let all_died =
            incident.head.trigger.kind() == TriggerKind::Death && !ranks.iter().any(|rank| rank.has_process());
        let is_requested = incident.seen.contains(&Cause::Manual)
            || incident.seen.contains(&Cause::Idle) && ranks.iter().any(|rank| rank.settings.reports_idle);
        !all_died && !is_requested
    }

    /// Whether an incident is visible to users: it is not, or not yet, a dump whose verdict shows
    /// no hang.
    pub(super) fn is_shown(&self, incident: &Incident) -> bool {
        self.reports.get(&incident.head.id).is_none_or(|report| report.is_shown)
    }

    /// Whether it has a report that users do not see.
    fn is_hidden(&self, id: &str) -> bool {
        self.reports.get(id).is_some_and(|report| !report.is_shown)
    }

    /// Whether an incident is visible, or the dump of one that may be a hang is in progress.
    pub(super) fn is_in_view(&self, incident: &Incident) -> bool {
        self.is_shown(incident) || incident.state == State::Open && !incident.is_idle()
    }

    /// The verdict shows no hang: there is no incident, and the dump is a mild capture. If a user
    /// has requested a dump meanwhile, the ranks are captured again.
    fn found_mild(&mut self, outcome: Outcome, now: Now) {
        let Outcome { incident: id, path, verdict, timeline_path, sampled_ns, .. } = outcome;
        let Some(incident) = self.engine.get(&id) else { return };
        if !self.may_be_mild(incident) {
            if let Some(path) = path {
                self.disk.submit_for(path, retention::discard_capture);
            }
            return self.capture_alone(&id);
        }
        let job = incident.head.job.clone();
        let place = path.map_or("not kept".into(), |path| path.display().to_string());
        let state = if incident.is_idle() { "is idle" } else { "shows no hang" };
        info!("job {job} {state}. Its capture: {} [{}, {place}]", verdict.sentence, verdict.cause);
        for problem in &verdict.timing.errors {
            info!("capture {id}: {problem}");
        }
        self.mild.insert(job.clone(), timeline_path);
        if self.engine.found_mild(&id, now) {
            return self.note_idle(&id, job, verdict.sentence, now);
        }
        let judged = VerdictSummary::of(&verdict);
        let report = IncidentReport { is_shown: false, ..IncidentReport::of(verdict, sampled_ns) };
        self.reports.insert(id.clone(), report);
        self.apply_verdict(&id, &judged, now);
    }

    /// An examined job is idle. It is examined again after another idle timeout.
    fn note_idle(&mut self, id: &str, job: JobKey, sentence: String, now: Now) {
        self.reports.remove(id);
        self.monitor.note_idle(&job, now.mono_ns);
        let last_launch_ns = self.last_launch_ns(&job, now);
        self.idle.insert(job, IdleJob { last_launch_ns, sentence });
    }

    /// The verdict of the cluster collector, or without one that of this node, on a dump that users
    /// do not see yet. Returns whether it shows no hang; otherwise users see the incident from now
    /// on. While this node has the problem, it examines the job again.
    pub(super) fn examined_together(&mut self, id: &str, verdict: ExaminedJob<'_>, now: Now) -> bool {
        let Some(incident) = self.engine.get(id).filter(|_| self.is_hidden(id)) else { return false };
        let closed = incident.closed.map(|closed| (incident.state, closed));
        if !verdict.is_mild || !self.may_be_mild(incident) {
            self.opened += 1;
            self.reports.entry(id.into()).and_modify(|report| report.is_shown = true);
            if let Some((state, closed)) = closed {
                self.write_closed(id, state, closed);
            }
            return false;
        }
        let job = incident.head.job.clone();
        let state = if incident.is_idle() { "is idle" } else { "shows no hang" };
        info!("job {job} {state} on all of its nodes. The capture of this node: {id}");
        self.keep_capture(id, job.clone());
        self.unwritten.waiting.remove(id);
        self.member.parts.remove(id);
        if closed.is_some() {
            self.engine.discard(id);
            self.reports.remove(id);
        } else if self.engine.found_mild(id, now) {
            self.note_idle(id, job, verdict.sentence.into(), now);
        } else {
            // The cluster collector has no incident any more.
            self.engine.clear_cause(&job, &Cause::Cluster, now);
            let (culprits, hanging) = (verdict.culprits.to_vec(), RankSet::new());
            let judged = VerdictSummary { grounds: Grounds::Unspecified, culprits, hanging, by_cluster: false };
            self.apply_verdict(id, &judged, now);
        }
        true
    }

    /// The folder of an incident that users have not seen becomes a mild capture, if it is not one
    /// yet, when its timelines are written.
    fn keep_capture(&mut self, id: &str, job: JobKey) {
        let Some(path) = self.reports.get_mut(id).and_then(|report| report.path.take()) else { return };
        self.mild.extend(path.parent().map(|root| (job, root.to_path_buf())));
        if self.pending_timelines.contains_key(id) {
            self.incomplete_captures.insert(id.into(), path);
        } else {
            self.disk.submit_for(path, retention::keep_capture);
        }
    }

    /// Gives an incident another name.
    pub(super) fn rename_incident(&mut self, old: &str, new: &str) {
        self.engine.rename(old, new);
        if let Some(report) = self.reports.remove(old) {
            self.reports.insert(new.into(), report);
        }
        self.verdict_actions.rename(old, new);
    }

    /// The incident of a job whose last verdict showed no hang, and that lasts.
    pub(super) fn mild_incident(&self, job: &JobKey) -> Option<String> {
        let is_mild =
            |incident: &&Incident| incident.head.job == *job && incident.state == State::Dumped && !incident.superseded;
        let mut ids = self.engine.incidents().filter(is_mild).map(|incident| &incident.head.id);
        ids.find(|id| self.is_hidden(id) && !self.member.awaits_verdict(id)).cloned()
    }

    /// Captures the ranks of an incident again, because its hang lasts. Returns false while another
    /// dump of it is in progress.
    pub(super) fn examine_again(&mut self, id: &str, now: Now) -> bool {
        if !self.engine.restart_dump(id) {
            return false;
        }
        info!("incident {id}: the hang lasts; its ranks are captured again");
        let is_mild = self.is_hidden(id);
        // The old name is that of the mild capture.
        let Some(renamed) = is_mild.then(|| self.engine.rename_examined(id, now)).flatten() else {
            self.capture_alone(id);
            return true;
        };
        if let Some(report) = self.reports.remove(id) {
            self.reports.insert(renamed.clone(), report);
        }
        self.verdict_actions.rename(id, &renamed);
        if !self.announce(&renamed, now) {
            self.capture_alone(&renamed);
        }
        true
    }

    pub(super) fn capture_alone(&mut self, id: &str) {
        let part = ClusterPart { operations: UNREQUESTED_OPERATIONS, alone: true };
        self.start_dump(id, self.settings.cluster.is_some().then_some(part));
    }

    /// Everything that the dump of an incident needs. `None` if there is no such incident.
    fn dump_task(&mut self, id: &str, for_cluster: Option<ClusterPart>) -> Option<DumpTask> {
        let job = self.engine.get(id)?.head.job.clone();
        let timelines = self.timelines_of(&job, Now::get());
        let now = Now::get();
        let incident = self.engine.get(id)?;
        let subjects = registered_subjects(&self.registry, &incident.head.job, &self.node);
        let unregistered = self.unregistered_ranks(now);
        let members = self.registry.members(&incident.head.job.name, &unregistered, now.mono_ns);
        let unregistered = unregistered.into_iter().filter(|rank| rank.job == incident.head.job);
        let unregistered = unregistered.filter(|rank| rank.info.attempt == incident.head.attempt).cloned().collect();
        let of_job = self.registry.of_job(&incident.head.job);
        let settings = of_job.first().map(|rank| &rank.settings);
        let path = settings.map_or(&self.settings.timeline_path, |settings| &settings.timeline_path);
        Some(DumpTask {
            plan: Plan {
                head: incident.head.clone(),
                hang_timeout: settings.map_or(self.settings.hang_timeout, |settings| settings.hang_timeout),
                sample_interval: settings.map_or(self.settings.sample_interval, |settings| settings.sample_interval),
            },
            subjects,
            timelines,
            timelines_follow: false,
            unregistered,
            members,
            node: self.node.clone(),
            socket: self.settings.socket.clone(),
            timeline_path: path.clone(),
            record: Record { dumped_mono_ns: now.mono_ns, writer: own_stamp().into(), ..self.record_of(incident) },
            fallback_path: self.settings.fallback_path.clone(),
            for_cluster,
            may_be_mild: self.may_be_mild(incident),
            is_mild: false,
            commands: self.launched.running_commands().collect(),
            ended_commands: self.launched.ended_commands().to_vec(),
            ended_sharers: self.sharers.ended_about(self.last_launch_ns(&incident.head.job, now)),
            job_started_ns: of_job.iter().map(|rank| rank.started_ns(now.mono_ns)).min().unwrap_or(now.mono_ns),
        })
    }

    /// Starts the dump of an incident on a thread of its own.
    fn start_dump(&mut self, id: &str, for_cluster: Option<ClusterPart>) {
        let Some(task) = self.dump_task(id, for_cluster) else { return };
        let (captures, shutdown, inbox) = (Arc::clone(&self.captures), Arc::clone(&self.shutdown), self.inbox.clone());
        let (give, take) = mpsc::channel();
        let work = move || {
            if let Ok(task) = take.recv() {
                run_dump(task, &captures, &shutdown, &inbox);
            }
        };
        match thread::Builder::new().name(format!("incident-{id}")).spawn(work) {
            Ok(_) => drop(give.send(task)),
            // Without a thread the dump runs here, and everything else waits for it.
            Err(error) => {
                warn!("incident {id}: cannot start a thread for its dump: {error}");
                run_dump(task, &self.captures, &self.shutdown, &self.inbox);
            }
        }
    }

    pub(super) fn dump_finished(&mut self, outcome: Outcome, now: Now) {
        if outcome.is_mild {
            return self.found_mild(outcome, now);
        }
        if outcome.timelines_follow {
            *self.pending_timelines.entry(outcome.incident.clone()).or_default() += 1;
        }
        let Outcome { incident: id, path, verdict, written, timeline_path, sampled_ns, part, .. } = outcome;
        let was_shown = !self.is_hidden(&id);
        let shared = self.member.awaits_verdict(&id);
        let is_shown = was_shown || !shared || !self.engine.get(&id).is_some_and(|one| self.may_be_mild(one));
        self.opened += u64::from(is_shown && !was_shown);
        let place = path.as_ref().map_or("no folder".into(), |path| path.display().to_string());
        if is_shown {
            warn!("incident {id}: {} [{}, {place}]", verdict.sentence, verdict.cause);
        }
        let answer = json!({ "incident": id, "path": path });
        let judged = VerdictSummary::of(&verdict);
        let cause = verdict.cause.to_string();
        // A second look without news causes no notification.
        let is_news = !was_shown || self.reports.get(&id).is_none_or(|before| before.cause != cause);
        if let (Some(webhook), true) = (&self.webhook, !shared && is_news) {
            webhook.post(&verdict, path.as_deref());
        }
        let report = IncidentReport {
            verdict: (!written).then(|| Box::new(verdict.clone())),
            path: path.clone(),
            hanging: self.reports.get(&id).map(|before| before.hanging.clone()).unwrap_or_default(),
            is_shown,
            ..IncidentReport::of(verdict, sampled_ns)
        };
        self.reports.insert(id.clone(), report);
        if !written {
            self.keep_unwritten(&id, timeline_path, now);
        }
        let action = self.engine.dump_finished(&id, now);
        if let Some(path) = path.clone() {
            self.note_on_disk(&id, path);
        }
        if let Some(action) = action {
            self.execute(action, now);
        }
        for reply in self.waiting.remove(&id).unwrap_or_default() {
            self.disk.reply(path.as_deref(), reply, Ok(answer.clone()));
        }
        if let Some(part) = part {
            self.part_captured(&id, part);
        }
        self.name_same_culprit(&id);
        if !shared {
            self.apply_verdict(&id, &judged, now);
        }
        self.retire();
    }

    /// The timelines of an incident are in its folder, or could not be written.
    pub(super) fn timelines_written(&mut self, written: WrittenTimelines) {
        let WrittenTimelines { incident: id, path, problem } = written;
        if let Some(count) = self.pending_timelines.get_mut(&id) {
            *count -= 1;
            if *count == 0 {
                self.pending_timelines.remove(&id);
            }
        }
        let is_complete = !self.pending_timelines.contains_key(&id);
        if let Some(capture) = is_complete.then(|| self.incomplete_captures.remove(&id)).flatten() {
            return self.disk.submit_for(capture, retention::keep_capture);
        }
        if let Some(problem) = problem {
            if let Some(report) = self.reports.get_mut(&id) {
                report.errors.push(problem.clone());
            }
            self.disk.submit_for(path, move |path| note_problem(path, problem));
        }
        self.send_waiting_timelines(&id);
        self.retire();
    }

    /// Names open incidents with a culprit process in common, which is not a rank, in the verdicts
    /// of each other.
    fn name_same_culprit(&mut self, id: &str) {
        let Some(own) = self.reports.get(id).filter(|own| own.is_shown) else { return };
        let is_same = |report: &IncidentReport| {
            report.is_shown && report.culprit_processes.iter().any(|pid| own.culprit_processes.contains(pid))
        };
        let is_open = |id: &str| self.engine.get(id).is_some_and(|incident| incident.closed.is_none());
        let same: Vec<(&String, &IncidentReport)> =
            self.reports.iter().filter(|(id, report)| is_same(report) && is_open(id)).collect();
        let names: Vec<String> = same.iter().map(|(name, _)| (*name).clone()).collect();
        // A verdict that is not on disk yet is written later, without the names.
        let on_disk = same.iter().filter(|(_, report)| report.verdict.is_none());
        let folders: Vec<(String, PathBuf)> =
            on_disk.filter_map(|(name, report)| Some(((*name).clone(), report.path.clone()?))).collect();
        for (own, path) in folders.into_iter().filter(|_| names.len() > 1) {
            let others = names.iter().filter(|name| **name != own).cloned().collect();
            self.disk.submit_for(path, move |path| name_others(path, others));
        }
    }

    /// Writes a record of an incident for the next collector.
    pub(super) fn note_on_disk(&mut self, id: &str, path: PathBuf) {
        let Some(incident) = self.engine.get(id) else { return };
        let record = self.record_of(incident);
        self.disk.submit_for(path, move |path| write_record(path, &record));
    }

    fn record_of(&self, incident: &Incident) -> Record {
        Record {
            boot: self.boot.clone(),
            opened_mono_ns: incident.head.opened.mono_ns,
            dumped_mono_ns: self.reports.get(&incident.head.id).map_or(0, |report| report.sampled_ns),
            seen: incident.seen.clone(),
            ..Record::new(&incident.head)
        }
    }

    /// Removes folders of incidents and timelines beyond the number and the age that are kept.
    pub(super) fn retire(&self) {
        let open = self.engine.incidents().filter(|incident| incident.closed.is_none());
        let open = open.map(|incident| &incident.head.id);
        let needed = open.chain(self.pending_timelines.keys()).cloned().collect();
        retention::start(self.folders(), self.settings.keep, needed);
    }

    fn close(&mut self, id: &str, state: State, now: Now) {
        let resolved = state == State::Resolved;
        info!("incident {id}: {}", if resolved { "resolved: the job continues" } else { "ended" });
        if self.is_hidden(id) {
            if self.member.awaits_verdict(id) {
                // That verdict decides what becomes of the dump.
                return self.report_closed(id, resolved);
            }
            if let Some(job) = self.engine.get(id).map(|incident| incident.head.job.clone()) {
                self.keep_capture(id, job);
            }
            self.engine.discard(id);
            return;
        }
        self.report_closed(id, resolved);
        self.write_closed(id, state, now);
    }

    /// Writes into the verdict of an incident that it is closed.
    fn write_closed(&mut self, id: &str, state: State, closed: Now) {
        // A verdict that is not on disk yet will be written with the status of its incident.
        let report = self.reports.get(id).filter(|report| report.verdict.is_none());
        let Some(path) = report.and_then(|report| report.path.clone()) else { return };
        if report.is_some_and(|report| report.is_unfinished) {
            return self.disk.submit_for(path, |path| verdict_files::finish_leftover_folder(path.into()));
        }
        let id = id.to_string();
        self.disk.submit_for(path, move |path| set_status(&id, path, state.status(), Some(closed.unix_ns)));
    }
}

/// Dumps, and writes the timelines when the verdict is published.
fn run_dump(task: DumpTask, captures: &Captures, shutdown: &ShutdownFlag, inbox: &Inbox) {
    let (outcome, timelines) = dump::run(task, captures, shutdown);
    let path = outcome.path.clone();
    inbox.post(Command::Finished(Box::new(outcome)));
    if let Some((timelines, path)) = timelines.zip(path) {
        inbox.post(Command::TimelinesWritten(timelines.write(path)));
    }
    resources::trim_heap();
}

/// Pause before the second attempt.
const FIRST_PAUSE_NS: u64 = 2_000_000_000;
const LAST_PAUSE_NS: u64 = 60_000_000_000;
/// Number of verdicts to keep, newest first; a verdict has some kilobytes.
const MAX_KEPT: usize = 64;

impl NodeState {
    /// Keeps a verdict that could not be written to its place.
    pub(super) fn keep_unwritten(&mut self, id: &str, root: PathBuf, now: Now) {
        let due_ns = now.mono_ns + FIRST_PAUSE_NS;
        let waiting = UnwrittenVerdict { root, due_ns, pause_ns: FIRST_PAUSE_NS, under_way: false };
        self.unwritten.waiting.insert(id.into(), waiting);
        while self.unwritten.waiting.len() > MAX_KEPT
            && let Some((oldest, _)) = self.unwritten.waiting.pop_first()
        {
            warn!("incident {oldest}: its verdict is dropped: {MAX_KEPT} newer ones cannot be written either");
            if let Some(report) = self.reports.get_mut(&oldest) {
                report.verdict = None;
            }
        }
    }

    /// Runs once a second: repeats the writes that are due.
    pub(super) fn tick_unwritten(&mut self, now: Now) {
        let reports = &self.reports;
        // The verdict of a second look may have been written.
        self.unwritten.waiting.retain(|id, _| reports.get(id).is_some_and(|report| report.verdict.is_some()));
        for (id, waiting) in &mut self.unwritten.waiting {
            let verdict = self.reports.get(id).and_then(|report| report.verdict.clone());
            let (Some(mut verdict), Some(incident)) = (verdict, self.engine.get(id)) else { continue };
            if waiting.under_way || waiting.due_ns > now.mono_ns {
                continue;
            }
            waiting.under_way = true;
            verdict.timing.status = incident.state.status();
            verdict.timing.resolved_at = incident.closed.map(|closed| clock::rfc3339(closed.unix_ns));
            let path = self.reports.get(id).and_then(|report| report.path.clone());
            let (root, fallback) = (waiting.root.clone(), self.settings.fallback_path.clone());
            let (name, inbox) = (id.clone(), self.inbox.clone());
            self.disk.submit(&waiting.root, move || {
                let result = write_verdict_late(path.as_deref(), &root, &fallback, &name, &verdict);
                inbox.post(Command::Written(name, result));
            });
        }
    }

    pub(super) fn verdict_written(&mut self, id: &str, result: Result<PathBuf, Error>, now: Now) {
        match result {
            Ok(path) => {
                info!("incident {id}: its verdict is finally written: {}", path.display());
                self.unwritten.waiting.remove(id);
                if let Some(report) = self.reports.get_mut(id) {
                    (report.verdict, report.path) = (None, Some(path.clone()));
                }
                self.note_on_disk(id, path);
            }
            Err(error) => {
                let Some(waiting) = self.unwritten.waiting.get_mut(id) else { return };
                waiting.pause_ns = (waiting.pause_ns * 2).min(LAST_PAUSE_NS);
                (waiting.due_ns, waiting.under_way) = (now.mono_ns + waiting.pause_ns, false);
                let seconds = clock::seconds(waiting.pause_ns);
                warn!("incident {id}: its verdict cannot be written ({}); retry in {seconds} s", chain(&error));
            }
        }
    }
}

/// Writes a verdict into the folder of its incident if that still exists, else into a new one.
fn write_verdict_late(
    path: Option<&Path>,
    root: &Path,
    fallback: &Path,
    id: &str,
    verdict: &Verdict,
) -> Result<PathBuf, Error> {
    if let Some(path) = path.filter(|path| path.is_dir()) {
        let folder = Folder { path: path.into() };
        try_write_verdict(&folder, verdict).and_then(|()| link_latest(&folder, verdict))?;
        return Ok(folder.path);
    }
    verdict_files::recreate_folder(root, fallback, &folder_name(id, None), verdict).map(|folder| folder.path)
}
