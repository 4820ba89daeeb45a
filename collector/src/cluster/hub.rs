//! Connects the engine of the cluster collector to streams, threads, disks and pages: passes in the
//! events, and executes the returned actions. One task owns it and never waits for a node, a disk
//! or a verdict.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::mpsc as std_mpsc,
};

use tokio::sync::mpsc;
use tracing::warn;
use xpu_timer_analysis::stragglers::Comparison;
use xpu_timer_proto::{
    procfs,
    v1::{ClusterMessage, cluster_message::Message, delivery::Message as DeliveryMessage},
};

use crate::{
    client::webhook::Webhook,
    cluster::{
        comparison::ComparisonThread,
        config::Settings,
        engine::{Action, Engine},
        gather::{self, GatherEvent, GatherSetup, GatherTask},
        service::{Outgoing, StreamEvent},
        status,
        timeline::Timelines,
    },
    error::chain,
    http::questions::{Question, Refusal, TimelineFiles, TimelineReply, WantedTimeline},
    incident::{
        engine::Record,
        folder::{Folder, MadeFolder},
        mild,
        records::{self, OpenIncident},
        retention,
        verdict_files::{CLUSTER_RECORD, set_status, try_write_record},
    },
    job::{JobKey, StreamId},
    os::{clock::Now, disk::Disk, process},
};

/// A message to the hub that is not from a node's stream.
#[derive(Debug)]
pub(crate) enum Command {
    /// A question of an HTTP page.
    Question(Question),
    /// The thread of an incident has finished a step.
    Gathered(String, GatherEvent),
    /// The ranks of a job in an attempt were compared.
    Compared(JobKey, u32, Comparison),
    /// Incidents that an earlier cluster collector left open.
    OpenIncidentsFound(Vec<OpenIncident>),
    /// The folder of an incident was made, or could not be made.
    FolderMade(String, MadeFolder),
}

/// The engine with everything that it acts on.
pub(crate) struct Hub {
    /// The nodes and incidents.
    pub engine: Engine,
    settings: Settings,
    streams: HashMap<StreamId, Outgoing>,
    // The gathering threads by incident.
    gathering: HashMap<String, std_mpsc::Sender<GatherTask>>,
    comparison: ComparisonThread,
    timelines: Timelines,
    disk: Disk,
    webhook: Option<Webhook>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Hub {
    /// The first commands bring the incidents that an earlier cluster collector left open. Waits
    /// for them, but not long for a disk that does not answer.
    #[must_use]
    pub(crate) fn new(settings: Settings, commands: mpsc::UnboundedSender<Command>, now: Now) -> Self {
        let to_hub = commands.clone();
        let comparison = ComparisonThread::start(move |job, attempt, comparison| {
            // Fails only if the hub has ended before the thread.
            let _ = to_hub.send(Command::Compared(job, attempt, comparison));
        });
        let mut hub = Hub {
            engine: Engine::new(process::random_id, now),
            streams: HashMap::new(),
            gathering: HashMap::new(),
            comparison,
            timelines: Timelines::new(process::random_id),
            // Nothing waits for it: results arrive as commands.
            disk: Disk::new(|| {}),
            webhook: settings.webhook.as_deref().map(Webhook::new),
            commands,
            settings,
        };
        for root in hub.folders() {
            let (commands, below) = (hub.commands.clone(), root.clone());
            // Fails only when the process ends.
            let find = move || drop(commands.send(Command::OpenIncidentsFound(records::open_in_cluster(&below))));
            hub.disk.submit(&root, find);
            hub.disk.wait(&root);
        }
        hub
    }

    /// Roots that may contain incident folders.
    fn folders(&self) -> Vec<PathBuf> {
        vec![self.settings.timeline_path.clone(), self.settings.fallback_path.clone()]
    }

    /// Handles an event of a node's stream.
    pub(crate) fn stream_event(&mut self, event: StreamEvent, now: Now) {
        match event {
            StreamEvent::Joined(stream, hello, outgoing) => {
                self.streams.insert(stream, outgoing);
                self.engine.node_joined(stream, *hello, now);
            }
            StreamEvent::Message(stream, message) => self.engine.message(stream, *message, now),
            StreamEvent::Ended(stream, why) => {
                self.streams.remove(&stream);
                self.engine.stream_ended(stream, &why, now);
            }
            StreamEvent::Refused(node, why) => self.engine.log_refused_stream(&node, why, now),
            // The sender of the question may be gone.
            StreamEvent::DeliveryStarted(key, known) => {
                let _ = known.send(self.engine.expects(&key) || self.timelines.expects(&key));
            }
            StreamEvent::DeliveryPiece(key, piece, credit) => match *piece {
                DeliveryMessage::Timeline(file) => {
                    self.timelines.piece(&key, file, credit, &self.engine.nodes, now);
                }
                piece => self.engine.delivery_piece(&key, piece, credit, now),
            },
            StreamEvent::DeliveryEnded(key) => {
                self.timelines.ended(&key, &self.engine.nodes);
                self.engine.delivery_ended(&key, now);
            }
        }
        self.execute(now);
    }

    /// Handles a message from another task or thread.
    pub(crate) fn command(&mut self, command: Command, now: Now) {
        match command {
            Command::Question(question) => self.answer(question, now),
            Command::Gathered(id, event) => self.engine.gathered(&id, event, now),
            Command::Compared(job, attempt, comparison) => self.engine.note_comparison(&job, attempt, comparison, now),
            Command::OpenIncidentsFound(found) => self.engine.restore(found, now),
            Command::FolderMade(id, made) => self.engine.folder_made(&id, made, now),
        }
        self.execute(now);
    }

    /// The receiver of an answer may be gone, which is harmless.
    fn answer(&mut self, question: Question, now: Now) {
        let engine = &self.engine;
        match question {
            Question::Status(reply) => drop(reply.send(status::status(engine, self.settings.listen, now))),
            Question::Metrics(reply) => drop(reply.send(status::metrics(engine, now))),
            Question::Folders(reply) => drop(reply.send(self.folders())),
            Question::WithoutFolder(reply) => drop(reply.send(status::without_folder(engine))),
            Question::SlowRanks(reply) => drop(reply.send(engine.slow.json())),
            Question::Dump { job, reply } => self.engine.dump_by_hand(job.as_deref(), reply, now),
            Question::Timeline { wanted, reply } => self.timeline_asked(wanted, reply, now),
            Question::KernelTrace { reply, .. } => {
                let why = "the cluster collector records no operations itself; `xpu_timer_collector timeline` fetches \
                           those of all its nodes";
                drop(reply.send(Err(Refusal::Unusable(why.into()))));
            }
        }
    }

    /// Passes the files of a timeline on, as fast as the requester takes them.
    fn timeline_asked(&mut self, wanted: WantedTimeline, reply: TimelineReply, now: Now) {
        let mut arriving = match self.timelines.start(wanted, &self.engine.nodes, now) {
            Ok(arriving) => arriving,
            Err(refusal) => return drop(reply.send(Err(refusal))),
        };
        let (sender, chunks) = mpsc::channel(1);
        let files = TimelineFiles { root: self.settings.timeline_path.clone(), chunks };
        drop(reply.send(Ok(files)));
        retention::start(self.folders(), self.settings.keep, self.engine.needed());
        tokio::spawn(async move {
            while let Some((file, _credit)) = arriving.recv().await {
                if sender.send(file).await.is_err() {
                    return;
                }
            }
        });
    }

    /// Checks all deadlines.
    pub(crate) fn tick(&mut self, now: Now) {
        self.disk.report_stuck();
        self.timelines.tick(&self.engine.nodes, now);
        self.engine.tick(now);
        self.execute(now);
    }

    /// Waits for the disk work so far, but not long for a disk that does not answer.
    pub(crate) fn wait_for_disk(&mut self) {
        self.folders().iter().for_each(|root| self.disk.wait(root));
    }

    /// Executes the actions of the engine.
    pub(super) fn execute(&mut self, now: Now) {
        for (node, request) in self.timelines.next_requests(&self.engine.nodes, now) {
            let stream = self.engine.nodes.get(node).and_then(|node| node.stream);
            stream.into_iter().for_each(|stream| self.send(stream, Message::Timeline(request.clone()), now));
        }
        while let Some(action) = self.engine.next_action() {
            match action {
                Action::Send(stream, message) => self.send(stream, message, now),
                Action::Disconnect(stream) => drop(self.streams.remove(&stream)),
                Action::MakeFolder(record) => self.make_folder(record),
                Action::RemoveFolder(path) => {
                    self.disk.submit_for(path, |path| drop(std::fs::remove_dir_all(path)));
                }
                Action::WriteStatus { incident, folder, status, closed_unix_ns } => {
                    let write = move |folder: &Path| set_status(&incident, folder, status, closed_unix_ns);
                    self.disk.submit_for(folder, write);
                }
                Action::Gather(id, setup, task) => self.gather(id, setup, task, now),
                Action::Release(id) => drop(self.gathering.remove(&id)),
                Action::Compare(input) => self.comparison.send(input),
                Action::Notify(verdict, folder) => {
                    if let Some(webhook) = &self.webhook {
                        webhook.post(&verdict, folder.as_deref());
                    }
                }
                Action::Reply(reply, folder, answer) => self.disk.reply(folder.as_deref(), reply, answer),
                Action::Promote { job: JobKey { name, instance }, started_ns, reason } => {
                    let of = mild::OfJob { job: name, instance, boot: procfs::boot_id(), started_ns };
                    let root = self.settings.timeline_path.clone();
                    let promote = move || mild::draw(&root, &mild::promote(&root, &of, &reason));
                    self.disk.submit(&self.settings.timeline_path, promote);
                }
                Action::Retire(open) => retention::start(self.folders(), self.settings.keep, open),
            }
        }
    }

    /// Sends a message to a node. A node that does not read its messages is disconnected.
    fn send(&mut self, stream: StreamId, message: Message, now: Now) {
        let Some(outgoing) = self.streams.get(&stream) else { return };
        if outgoing.try_send(Box::new(Ok(ClusterMessage { message: Some(message) }))).is_err() {
            self.streams.remove(&stream);
            self.engine.stream_ended(stream, "it accepts no more messages", now);
        }
    }

    /// Makes the folder of an incident and writes its record.
    fn make_folder(&mut self, record: Record) {
        let record = Record { boot: procfs::boot_id(), ..record };
        let (root, fallback) = (self.settings.timeline_path.clone(), self.settings.fallback_path.clone());
        let commands = self.commands.clone();
        self.disk.submit(&self.settings.timeline_path, move || {
            let id = record.id.clone();
            let made = Folder::create(&root, &fallback, &id);
            if let Ok((folder, _)) = &made
                && let Err(error) = try_write_record(&folder.path, CLUSTER_RECORD, &record)
            {
                let why = chain(&error);
                warn!("incident {id}: a restarted cluster collector will not know this incident: {why}");
            }
            // Fails only when the process ends.
            let _ = commands.send(Command::FolderMade(id, made));
        });
    }

    fn gather(&mut self, id: String, setup: Option<Box<GatherSetup>>, task: GatherTask, now: Now) {
        if let Some(setup) = setup {
            let (commands, name) = (self.commands.clone(), id.clone());
            // Fails only when the process ends.
            let report = move |event| drop(commands.send(Command::Gathered(name.clone(), event)));
            match gather::start(*setup, report) {
                Ok(sender) => drop(self.gathering.insert(id.clone(), sender)),
                Err(error) => warn!("incident {id}: {}", chain(&error)),
            }
        }
        let given = self.gathering.get(&id).is_some_and(|sender| sender.send(task).is_ok());
        if !given {
            // The thread ends only when it is released, or because of a bug.
            warn!("incident {id}: there is no gathering thread");
            self.gathering.remove(&id);
            self.engine.gathering_failed(&id, now);
        }
    }
}
