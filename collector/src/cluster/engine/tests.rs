//! The parts of an incident when streams and deliveries are cut off, with a simulated clock.

use tokio::sync::{mpsc, oneshot};
use xpu_timer_analysis::Verdict;
use xpu_timer_proto::{
    env::Source,
    timeline::PENDING,
    v1::{
        Alarm, Captured, DumpFile, FileKind, Heartbeat, IncidentClosed, IncidentUpdate, JobActivity, JobId, NodeDump,
        NodeHello, NodeRanks, Presence, RankEntry, RankInfo, Trigger, TriggerKind, cluster_message::Message, delivery,
        node_message::Message as NodeMessage,
    },
};

use super::*;
use crate::{
    cluster::{
        config::Settings,
        gather::GatherEvent,
        hub::{Command, Hub},
        incident::Progress,
        service::{Credit, Outbound, StreamEvent},
    },
    http::questions::Question,
    incident::records,
};

/// An alarm of the first node for a rank.
fn alarm(rank: i32) -> Alarm {
    Alarm {
        incident: "20261121T105510Z-00000001".into(),
        job: Some(JobId { name: "j".into(), instance: String::new() }),
        trigger: Some(Trigger { kind: TriggerKind::Operation.into(), rank, ..Default::default() }),
        hangs: true,
        ..Default::default()
    }
}

/// A rank of a world of two. Its process was started together with the hub.
fn entry(rank: i32, now: Now) -> RankEntry {
    RankEntry {
        job: Some(JobId { name: "j".into(), instance: String::new() }),
        info: Some(RankInfo { rank, world_size: 2, ..Default::default() }),
        presence: Presence::Present.into(),
        age_ms: (now.mono_ns - at(1).mono_ns) / 1_000_000,
        ..Default::default()
    }
}

/// An alarm for a hang that is over; its answer is that the incident is closed.
fn closed_alarm() -> Alarm {
    Alarm { hangs: false, ..alarm(0) }
}

struct TestHub {
    hub: Hub,
    folder: tempfile::TempDir,
    commands: mpsc::UnboundedReceiver<Command>,
}

fn at(seconds: u64) -> Now {
    Now { mono_ns: seconds * SECOND, unix_ns: (1_795_258_500 + seconds) * SECOND }
}

fn hub() -> TestHub {
    hub_in(tempfile::tempdir().unwrap(), at(1))
}

fn hub_in(folder: tempfile::TempDir, now: Now) -> TestHub {
    let settings = Settings::new(&Source::new(|_| None, ""), None, folder.path().into(), 7).unwrap();
    let settings = Settings { timeline_path: folder.path().join("timeline"), ..settings };
    let (sender, commands) = mpsc::unbounded_channel();
    let mut cluster = TestHub { hub: Hub::new(settings, sender, now), folder, commands };
    // The incidents that an earlier hub left open.
    while let Ok(command) = cluster.commands.try_recv() {
        cluster.hub.command(command, now);
    }
    cluster
}

impl TestHub {
    /// A node with one rank joins on the stream of its number.
    fn join(&mut self, rank: i32) -> mpsc::Receiver<Outbound> {
        self.join_at(rank, at(2))
    }

    fn join_at(&mut self, rank: i32, now: Now) -> mpsc::Receiver<Outbound> {
        self.join_with(rank, Vec::new(), now)
    }

    /// As `join`, with incidents that are open on the node.
    fn join_with(&mut self, rank: i32, incidents: Vec<Alarm>, now: Now) -> mpsc::Receiver<Outbound> {
        let ranks = NodeRanks { ranks: vec![entry(rank, now)] };
        self.join_as(&format!("n{rank}"), rank as u64, ranks, incidents, now)
    }

    /// A node with these ranks joins. Its stream also identifies its process.
    fn join_as(
        &mut self,
        node: &str,
        stream: StreamId,
        ranks: NodeRanks,
        incidents: Vec<Alarm>,
        now: Now,
    ) -> mpsc::Receiver<Outbound> {
        let (outgoing, messages) = mpsc::channel(8);
        let (node, identity) = (node.to_string(), stream.to_string());
        let hello = NodeHello { node, identity, ranks: Some(ranks), incidents, ..Default::default() };
        self.hub.stream_event(StreamEvent::Joined(stream, Box::new(hello), outgoing), now);
        messages
    }

    fn say(&mut self, stream: StreamId, message: NodeMessage, now: Now) {
        self.hub.stream_event(StreamEvent::Message(stream, Box::new(message)), now);
    }

    /// The node of a rank, started together with this collector, reports a new process for the
    /// rank.
    fn restarts(&mut self, rank: i32, started: Now, now: Now) {
        let entry = RankEntry {
            start: started.mono_ns / xpu_timer_proto::procfs::TICK_NS,
            age_ms: (now.mono_ns - started.mono_ns) / 1_000_000,
            ..entry(rank, now)
        };
        self.say(rank as u64, NodeMessage::Ranks(NodeRanks { ranks: vec![entry] }), now);
    }

    /// The first node alarms.
    fn alarm(&mut self, rank: i32) -> String {
        self.say(0, NodeMessage::Alarm(alarm(rank)), at(10));
        self.folder_made(at(10));
        self.hub.engine.incidents.keys().next().unwrap().clone()
    }

    /// Waits for the folder of the incident that was opened last.
    fn folder_made(&mut self, now: Now) {
        loop {
            let command = self.commands.blocking_recv().expect("a folder");
            let is_last = matches!(command, Command::FolderMade(..));
            self.hub.command(command, now);
            if is_last {
                return;
            }
        }
    }

    fn gathered(&mut self, id: &str, event: GatherEvent, now: Now) {
        self.hub.command(Command::Gathered(id.into(), event), now);
    }

    /// The thread has made this verdict.
    fn apply(&mut self, id: &str, verdict: &Verdict, now: Now) {
        self.gathered(id, GatherEvent::Judged(Box::new(verdict.clone())), now);
    }

    fn judge(&mut self, id: &str) {
        self.hub.engine.judge(id);
        self.hub.execute(at(41));
    }

    fn close(&mut self, id: &str, state: State, now: Now) {
        self.hub.engine.close(id, state, now);
        self.hub.execute(now);
    }

    /// Requests a dump by hand.
    fn by_hand(&mut self, now: Now) -> String {
        let (reply, _) = oneshot::channel();
        self.hub.command(Command::Question(Question::Dump { job: None, reply }), now);
        self.folder_made(now);
        self.hub.engine.incidents.keys().next_back().unwrap().clone()
    }

    fn hangs(&mut self, id: &str, now: Now) {
        self.say(0, NodeMessage::Update(IncidentUpdate { incident: id.into(), hangs: true, ended: false }), now);
    }

    fn progress_of(&self, id: &str, name: &str) -> Progress {
        let parts = &self.hub.engine.incidents[id].parts;
        parts.iter().find(|(node, _)| self.hub.engine.nodes.name(**node) == name).unwrap().1.progress.clone()
    }

    fn captured(&mut self, id: &str, stream: StreamId, now: Now) {
        self.say(stream, NodeMessage::Captured(Captured { incident: id.into(), round: 0 }), now);
    }

    /// Delivers a piece of a part.
    fn dump(&mut self, key: &std::sync::Arc<str>, last: bool, now: Now) {
        let dump = delivery::Message::Dump(NodeDump { last, ..Default::default() });
        self.hub.stream_event(StreamEvent::DeliveryPiece(key.clone(), Box::new(dump), Credit::default()), now);
    }

    /// Waits for the next verdict of the thread.
    fn verdict(&mut self) -> Verdict {
        loop {
            match self.commands.blocking_recv() {
                Some(Command::Gathered(_, GatherEvent::Judged(verdict))) => return *verdict,
                Some(_) => {}
                None => panic!("no verdict"),
            }
        }
    }

    /// `xpu_timer_job_hang` of the only job.
    fn job_hang(&self) -> String {
        let page = super::super::status::metrics(&self.hub.engine, at(41));
        let line = page.lines().find(|line| line.starts_with("xpu_timer_job_hang{"));
        line.and_then(|line| line.rsplit(' ').next()).expect("a job").into()
    }

    /// The key with which a node was asked for its files of this kind, and for no others.
    fn fetched(&mut self, messages: &mut mpsc::Receiver<Outbound>, kind: FileKind) -> std::sync::Arc<str> {
        let all = std::iter::from_fn(|| messages.try_recv().ok());
        let keys = all.filter_map(|message| match message.unwrap().message {
            Some(Message::Fetch(fetch)) => {
                assert_eq!(fetch.kind(), kind);
                Some(fetch.key)
            }
            _ => None,
        });
        keys.last().expect("the node is asked for its files").into()
    }

    /// A complete file of an incident arrives; without a name, the delivery is complete.
    fn file(&mut self, id: &str, key: &std::sync::Arc<str>, name: &str, now: Now) {
        let file = DumpFile { incident: id.into(), name: name.into(), data: b"x".to_vec(), last: true };
        let file = Box::new(delivery::Message::File(file));
        self.hub.stream_event(StreamEvent::DeliveryPiece(key.clone(), file, Credit::default()), now);
    }

    /// Waits until the thread has drawn.
    fn wait_drawn(&mut self) {
        while !matches!(self.commands.blocking_recv(), Some(Command::Gathered(_, GatherEvent::Drawn))) {}
    }

    /// Pretends that all files have arrived and the viewer has finished.
    fn finish_files(&mut self, id: &str) {
        let incident = self.hub.engine.incidents.get_mut(id).unwrap();
        (incident.files, incident.drawing) = (None, false);
        incident.timelines.clear();
        incident.files_in_transfer.clear();
        incident.files_pending.clear();
    }

    /// An incident of two nodes where only the first one delivers, up to a verdict that the hub has
    /// not received yet.
    fn judged_without_the_second(&mut self, first: &mut mpsc::Receiver<Outbound>) -> (String, Verdict) {
        let id = self.alarm(0);
        self.captured(&id, 0, at(11));
        let key = self.bring(first);
        self.dump(&key, true, at(12));
        self.hub.tick(at(40));
        // The evidence of these tests is empty and therefore shows no hang.
        let hang = HangEvidence::PendingOperation;
        let verdict = self.verdict();
        (id, Verdict { hang, ..verdict })
    }

    fn bring(&mut self, messages: &mut mpsc::Receiver<Outbound>) -> std::sync::Arc<str> {
        let mut key = None;
        while let Ok(message) = messages.try_recv() {
            if let Some(Message::Deliver(wanted)) = message.unwrap().message {
                key = Some(wanted.key);
            }
        }
        let key: std::sync::Arc<str> = key.expect("the node is asked for its part").into();
        let (reply, mut known) = oneshot::channel();
        self.hub.stream_event(StreamEvent::DeliveryStarted(key.clone(), reply), at(12));
        assert!(known.try_recv().unwrap());
        key
    }
}

#[test]
fn a_node_that_dies_before_its_delivery_does_not_block_the_verdict() {
    let mut cluster = hub();
    let (_first, second) = (cluster.join(0), cluster.join(1));
    let id = cluster.alarm(0);
    drop(second);
    cluster.captured(&id, 1, at(11));
    assert_eq!(cluster.progress_of(&id, "n1"), Progress::Requested, "the request did not reach it");
    cluster.hub.stream_event(StreamEvent::Ended(1, "reset".into()), at(12));
    cluster.hub.tick(at(100));
    assert!(matches!(cluster.progress_of(&id, "n1"), Progress::Failed(_)));
    assert!(cluster.folder.path().join("timeline").join(format!("incident-{id}")).is_dir());
}

#[test]
fn the_ranks_of_a_restarted_node_may_register_one_after_another() {
    let mut cluster = hub();
    let ranks = |ranks: &[i32], now: Now| {
        let entry = |rank: &i32| {
            let info = RankInfo { rank: *rank, world_size: 3, ..Default::default() };
            RankEntry { info: Some(info), ..entry(*rank, now) }
        };
        NodeRanks { ranks: ranks.iter().map(entry).collect() }
    };
    let _first = cluster.join_as("n0", 0, ranks(&[0], at(2)), Vec::new(), at(2));
    let _old = cluster.join_as("n1", 1, ranks(&[1, 2], at(2)), Vec::new(), at(2));
    let id = cluster.alarm(0);
    cluster.hub.stream_event(StreamEvent::Ended(1, "reset".into()), at(11));
    let _new = cluster.join_as("n1", 2, ranks(&[1], at(12)), Vec::new(), at(12));
    let parts = |cluster: &TestHub| -> Vec<String> {
        cluster.hub.engine.incidents[&id].parts.values().map(|part| part.ranks.to_string()).collect()
    };
    assert_eq!(parts(&cluster), ["0", "1-2", "1"], "the old entry still has rank 2");
    cluster.say(2, NodeMessage::Ranks(ranks(&[1, 2], at(13))), at(13));
    assert_eq!(parts(&cluster), ["0", "1-2"], "the part of the old entry has a successor");
    assert_eq!(cluster.progress_of(&id, "n1"), Progress::Requested);
}

#[test]
fn a_node_that_reads_no_messages_is_disconnected() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    for _ in 0..20 {
        cluster.hub.stream_event(StreamEvent::Message(0, Box::new(NodeMessage::Alarm(closed_alarm()))), at(5));
    }
    let node = cluster.hub.engine.nodes.iter().find(|(_, node)| node.name == "n0").unwrap().1;
    assert!(!node.is_joined() && node.lost_ns == at(5).mono_ns);
    // The welcome and the answers that found room.
    assert_eq!(std::iter::from_fn(|| first.try_recv().ok()).count(), 8);
    assert!(first.is_closed(), "its stream is closed");
    let mut again = cluster.join_at(0, at(6));
    assert!(matches!(again.try_recv().unwrap().unwrap().message, Some(Message::Welcome(_))));
}

#[test]
fn parts_that_could_not_be_gathered_are_requested_again() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let id = cluster.alarm(0);
    cluster.captured(&id, 0, at(11));
    for _ in 0..3 {
        let key = cluster.bring(&mut first);
        cluster.dump(&key, true, at(12));
        assert_eq!(cluster.progress_of(&id, "n0"), Progress::Delivered);
        cluster.hub.engine.gathering_failed(&id, at(12));
        cluster.hub.execute(at(12));
    }
    let Progress::Failed(why) = cluster.progress_of(&id, "n0") else { panic!("it is given up") };
    assert!(why.contains("could not gather"), "{why}");
}

#[test]
fn an_interrupted_delivery_is_retried_a_few_times() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let id = cluster.alarm(0);
    cluster.captured(&id, 0, at(11));
    for _ in 0..2 {
        let key = cluster.bring(&mut first);
        cluster.hub.stream_event(StreamEvent::DeliveryEnded(key), at(12));
        assert!(matches!(cluster.progress_of(&id, "n0"), Progress::Delivering(_)));
    }
    let key = cluster.bring(&mut first);
    cluster.hub.stream_event(StreamEvent::DeliveryEnded(key.clone()), at(12));
    let Progress::Failed(why) = cluster.progress_of(&id, "n0") else { panic!("it is given up") };
    assert!(why.contains("was interrupted 3 times"), "{why}");
    cluster.hub.stream_event(StreamEvent::DeliveryEnded(key), at(13));
}

#[test]
fn the_end_of_a_complete_delivery_changes_nothing() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let id = cluster.alarm(0);
    cluster.captured(&id, 0, at(11));
    let key = cluster.bring(&mut first);
    let dump = delivery::Message::Dump(NodeDump { last: true, ..Default::default() });
    cluster.hub.stream_event(StreamEvent::DeliveryPiece(key.clone(), Box::new(dump), Credit::default()), at(12));
    cluster.hub.stream_event(StreamEvent::DeliveryEnded(key), at(12));
    assert_eq!(cluster.progress_of(&id, "n0"), Progress::Delivered);
}

#[test]
fn an_alarm_for_a_rank_of_another_node_names_no_rank() {
    let mut cluster = hub();
    let (_first, _second) = (cluster.join(0), cluster.join(1));
    let id = cluster.alarm(1);
    assert_eq!(cluster.hub.engine.incidents[&id].head.trigger.rank, -1);
}

#[test]
fn a_stalled_delivery_times_out_and_its_node_is_named() {
    let mut cluster = hub();
    let (mut first, mut second) = (cluster.join(0), cluster.join(1));
    let id = cluster.alarm(0);
    cluster.captured(&id, 0, at(11));
    cluster.captured(&id, 1, at(11));
    let (key, stalled) = (cluster.bring(&mut first), cluster.bring(&mut second));
    cluster.dump(&key, true, at(12));
    cluster.dump(&stalled, false, at(12));
    cluster.hub.tick(at(26));
    assert!(matches!(cluster.progress_of(&id, "n1"), Progress::Delivering(_)), "a piece came 14 s ago");
    cluster.hub.tick(at(28));
    let Progress::Failed(why) = cluster.progress_of(&id, "n1") else { panic!("it is given up") };
    assert!(why.contains("its delivery stopped"), "{why}");
    assert!(cluster.hub.engine.incidents[&id].judging, "the others are judged without it");
}

#[test]
fn a_late_verdict_does_not_reopen_a_closed_incident() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    let folder = cluster.folder.path().join("timeline").join(format!("incident-{id}"));
    cluster.apply(&id, &verdict, at(41));
    // A part arrives late, and the hang ends while it is judged.
    cluster.judge(&id);
    let _ = cluster.verdict();
    cluster.close(&id, State::Resolved, at(42));
    cluster.judge(&id);
    let verdict = cluster.verdict();
    let status = || records::verdict(&folder).unwrap().timing.status;
    assert_eq!(status(), Status::Open, "its thread knows nothing of the end");
    cluster.apply(&id, &verdict, at(43));
    cluster.hub.wait_for_disk();
    assert_eq!(status(), Status::Resolved);
    assert_eq!(cluster.hub.engine.incidents[&id].state, State::Resolved);
}

#[test]
fn files_are_fetched_after_the_job_has_ended() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&id, &verdict, at(41));
    cluster.close(&id, State::Ended, at(42));
    let key = cluster.fetched(&mut first, FileKind::Stacktrace);
    for name in ["00000-00002.stacktrace", ""] {
        cluster.file(&id, &key, name, at(43));
    }
    assert!(cluster.hub.engine.incidents[&id].drawing, "all files have arrived");
    // The thread writes them before it draws.
    cluster.wait_drawn();
    let root = cluster.folder.path().join("timeline");
    let folder = root.join(format!("incident-{id}"));
    assert_eq!(std::fs::read(folder.join("00000-00002.stacktrace")).unwrap(), b"x");
    // Verdict and report are there before a timeline is fetched, and the folder says what is
    // missing.
    assert!(root.join("latest/verdict.json").exists() && folder.join(PENDING).exists());
    cluster.gathered(&id, GatherEvent::Drawn, at(44));
    assert!(cluster.hub.engine.needed().contains(&id), "its folder stays, although it is closed");
    // Another incident is finished meanwhile.
    std::fs::remove_file(root.join("latest")).unwrap();
    std::os::unix::fs::symlink("another", root.join("latest")).unwrap();
    let key = cluster.fetched(&mut first, FileKind::Timeline);
    for name in ["00000-00002.ops", ""] {
        cluster.file(&id, &key, name, at(45));
    }
    cluster.wait_drawn();
    assert_eq!(std::fs::read(folder.join("00000-00002.ops")).unwrap(), b"x");
    assert!(!folder.join(PENDING).exists());
    assert_eq!(std::fs::read_link(root.join("latest")).unwrap().to_str(), Some("another"));
    cluster.gathered(&id, GatherEvent::Drawn, at(46));
    assert!(!cluster.hub.engine.incidents[&id].is_gathering, "its thread is released");
    assert!(!cluster.hub.engine.needed().contains(&id));
}

#[test]
fn timelines_that_do_not_come_cost_nothing_else() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&id, &verdict, at(41));
    let key = cluster.fetched(&mut first, FileKind::Stacktrace);
    cluster.file(&id, &key, "", at(42));
    cluster.wait_drawn();
    cluster.gathered(&id, GatherEvent::Drawn, at(43));
    let _ = cluster.fetched(&mut first, FileKind::Timeline);
    let folder = cluster.folder.path().join("timeline").join(format!("incident-{id}"));
    assert!(folder.join(PENDING).exists() && folder.join("verdict.json").exists());
    cluster.hub.tick(at(300));
    cluster.wait_drawn();
    assert!(!folder.join(PENDING).exists(), "the cluster collector does not wait forever for them");
    cluster.gathered(&id, GatherEvent::Drawn, at(301));
    assert!(!cluster.hub.engine.incidents[&id].is_gathering);
}

#[test]
fn files_are_requested_again_when_a_node_reconnects() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&id, &verdict, at(41));
    let _ = cluster.fetched(&mut first, FileKind::Stacktrace);
    cluster.hub.stream_event(StreamEvent::Ended(0, "reset".into()), at(42));
    cluster.hub.tick(at(43));
    assert!(!cluster.hub.engine.incidents[&id].drawing, "they are waited for");
    let mut again = cluster.join_at(0, at(44));
    cluster.hub.tick(at(45));
    let _ = cluster.fetched(&mut again, FileKind::Stacktrace);
    cluster.hub.tick(at(300));
    assert!(cluster.hub.engine.incidents[&id].drawing, "the cluster collector does not wait forever");
}

#[test]
fn an_unproven_hang_gets_another_round_if_it_lasts() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, mut verdict) = cluster.judged_without_the_second(&mut first);
    verdict.hang = HangEvidence::None;
    cluster.apply(&id, &verdict, at(41));
    assert!(cluster.hub.engine.incidents[&id].next_round_ns.is_some());
    assert_eq!(cluster.job_hang(), "0", "nothing proves it");
    // Work in progress is finished first.
    cluster.hub.tick(at(50));
    assert_eq!(cluster.hub.engine.incidents[&id].round, 0);
    cluster.hub.stream_event(StreamEvent::Ended(1, "reset".into()), at(51));
    cluster.finish_files(&id);
    let _ = std::iter::from_fn(|| first.try_recv().ok()).count();
    cluster.hub.tick(at(52));
    let incident = &cluster.hub.engine.incidents[&id];
    assert_eq!((incident.round, incident.state, incident.next_round_ns), (1, State::Open, None));
    assert_eq!(cluster.progress_of(&id, "n0"), Progress::Requested);
    let asked = std::iter::from_fn(|| first.try_recv().ok()).find_map(|message| match message.unwrap().message {
        Some(Message::Dump(request)) => Some(request.round),
        _ => None,
    });
    assert_eq!(asked, Some(1));
    // The part of the first round does not count for the second.
    cluster.say(0, NodeMessage::Captured(Captured { incident: id.clone(), round: 0 }), at(53));
    assert_eq!(cluster.progress_of(&id, "n0"), Progress::Requested);
    cluster.say(0, NodeMessage::Captured(Captured { incident: id.clone(), round: 1 }), at(53));
    assert!(matches!(cluster.progress_of(&id, "n0"), Progress::Delivering(_)));
    // A later verdict with a proven hang is final.
    verdict.hang = HangEvidence::PendingOperation;
    cluster.apply(&id, &verdict, at(60));
    assert!(cluster.hub.engine.incidents[&id].next_round_ns.is_none());
    assert_eq!(cluster.job_hang(), "1");
}

/// As [`examined_job`], for a job that a node reports as idle.
fn idle_job(reports_idle: bool) -> (TestHub, String, PathBuf, Verdict, [mpsc::Receiver<Outbound>; 2]) {
    let trigger = Some(Trigger { kind: TriggerKind::Idle.into(), rank: -1, ..Default::default() });
    examined_job(Alarm { trigger, reports_idle, ..alarm(-1) })
}

/// A node alarms, and both nodes of the job deliver. Returns the incident, its folder, the verdict
/// without a hang, and the messages to the nodes.
fn examined_job(alarm: Alarm) -> (TestHub, String, PathBuf, Verdict, [mpsc::Receiver<Outbound>; 2]) {
    let mut cluster = hub();
    let (mut first, mut second) = (cluster.join(0), cluster.join(1));
    cluster.say(0, NodeMessage::Alarm(alarm), at(10));
    cluster.folder_made(at(10));
    let id = cluster.hub.engine.incidents.keys().next().unwrap().clone();
    for (stream, messages) in [(0, &mut first), (1, &mut second)] {
        cluster.captured(&id, stream, at(11));
        let key = cluster.bring(messages);
        cluster.dump(&key, true, at(12));
    }
    let verdict = cluster.verdict();
    assert_eq!(verdict.hang, HangEvidence::None);
    let folder = cluster.hub.engine.incidents[&id].folder.clone().unwrap();
    (cluster, id, folder, verdict, [first, second])
}

fn status_of(cluster: &TestHub) -> Value {
    super::super::status::status(&cluster.hub.engine, "127.0.0.1:1".parse().unwrap(), at(13))
}

#[test]
fn an_idle_job_is_no_incident_and_its_capture_is_kept() {
    let (mut cluster, id, folder, verdict, [mut first, _second]) = idle_job(false);
    assert_eq!(status_of(&cluster)["incidents"], serde_json::json!([]), "it is only examined");
    cluster.apply(&id, &verdict, at(13));
    let key = cluster.fetched(&mut first, FileKind::Stacktrace);
    cluster.file(&id, &key, "00000-00002.stacktrace", at(13));
    cluster.file(&id, &key, "", at(13));
    assert_eq!(status_of(&cluster)["incidents"], serde_json::json!([]));
    // The second node does not send its files.
    cluster.hub.tick(at(60));
    let told = std::iter::from_fn(|| first.try_recv().ok()).find_map(|message| match message.unwrap().message {
        Some(Message::Verdict(verdict)) => Some((verdict.incident, verdict.is_mild)),
        _ => None,
    });
    assert_eq!(told, Some((id.clone(), true)));
    assert!(cluster.hub.engine.incidents.is_empty() && cluster.hub.engine.opened == 0);
    let status = status_of(&cluster);
    assert_eq!((&status["idle"][0]["job"], &status["incidents"]), (&"j".into(), &serde_json::json!([])));
    let root = folder.parent().unwrap();
    let kept = root.join("mild").join(folder.file_name().unwrap());
    // The gathering thread moves it. Without that, the next check fails.
    for _ in (0..2000).take_while(|_| folder.exists()) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(kept.join("00000-00002.stacktrace").exists() && !root.join("latest").exists());
    assert_eq!(records::verdict(&kept).unwrap().timing.status, Status::Mild);
    // It launches again.
    let jobs = vec![JobActivity { job: alarm(0).job, launch_age_ms: 0 }];
    cluster.say(0, NodeMessage::Heartbeat(Heartbeat { jobs }), at(70));
    assert_eq!(status_of(&cluster)["idle"], serde_json::json!([]));
}

#[test]
fn a_job_that_has_ended_is_not_idle() {
    let (mut cluster, id, _, verdict, _nodes) = idle_job(false);
    cluster.apply(&id, &verdict, at(13));
    // Neither node sends its files.
    cluster.hub.tick(at(60));
    assert_eq!(status_of(&cluster)["idle"][0]["job"], "j");
    for node in [0, 1] {
        cluster.say(node, NodeMessage::Ranks(NodeRanks::default()), at(61));
    }
    cluster.hub.tick(at(62));
    assert_eq!(status_of(&cluster)["idle"], serde_json::json!([]));
}

#[test]
fn an_idle_job_is_an_incident_if_the_user_wants_that_or_something_else_is_wrong() {
    let (mut cluster, id, folder, verdict, _nodes) = idle_job(true);
    assert_eq!(status_of(&cluster)["incidents"][0]["incident"], id.as_str());
    cluster.apply(&id, &verdict, at(13));
    cluster.hub.wait_for_disk();
    assert!(folder.exists() && cluster.hub.engine.opened == 1);

    let (mut cluster, id, folder, mut verdict, _nodes) = idle_job(false);
    verdict.hang = HangEvidence::WaitChain;
    cluster.apply(&id, &verdict, at(13));
    cluster.hub.wait_for_disk();
    assert!(folder.exists() && cluster.hub.engine.opened == 1);

    let (mut cluster, id, folder, verdict, _nodes) = idle_job(false);
    let trigger = Some(Trigger { kind: TriggerKind::Manual.into(), rank: -1, ..Default::default() });
    cluster.say(1, NodeMessage::Alarm(Alarm { incident: "2".into(), trigger, ..alarm(1) }), at(12));
    assert_eq!(status_of(&cluster)["incidents"][0]["incident"], id.as_str(), "a user wants a dump");
    cluster.apply(&id, &verdict, at(13));
    cluster.hub.wait_for_disk();
    assert!(folder.exists() && cluster.hub.engine.opened == 1);
}

/// The verdict without a hang is made, and no node sends its files. Returns the mild capture.
fn found_mild(cluster: &mut TestHub, id: &str, folder: &std::path::Path, verdict: &Verdict) -> PathBuf {
    cluster.apply(id, verdict, at(13));
    cluster.hub.tick(at(60));
    let kept = folder.parent().unwrap().join("mild").join(folder.file_name().unwrap());
    // The gathering thread moves it. Without that, the next check fails.
    for _ in (0..2000).take_while(|_| folder.exists()) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(records::verdict(&kept).unwrap().timing.status, Status::Mild);
    kept
}

#[test]
fn a_timeout_that_shows_no_hang_is_no_incident_and_its_capture_is_kept() {
    let (mut cluster, id, folder, verdict, [mut first, _second]) = examined_job(alarm(0));
    assert_eq!(status_of(&cluster)["incidents"][0]["incident"], id.as_str(), "it may be a hang");
    found_mild(&mut cluster, &id, &folder, &verdict);
    let told = std::iter::from_fn(|| first.try_recv().ok()).find_map(|message| match message.unwrap().message {
        Some(Message::Verdict(verdict)) => Some(verdict.is_mild),
        _ => None,
    });
    assert_eq!(told, Some(true));
    assert!(cluster.hub.engine.incidents.is_empty() && cluster.hub.engine.opened == 0);
    let status = status_of(&cluster);
    assert_eq!((&status["idle"], &status["incidents"]), (&serde_json::json!([]), &serde_json::json!([])));
    assert!(!folder.parent().unwrap().join("latest").exists());
    // The problem lasts: the node reports it again.
    cluster.say(0, NodeMessage::Alarm(Alarm { incident: "20261121T105610Z-00000002".into(), ..alarm(0) }), at(70));
    assert_eq!(cluster.hub.engine.incidents.len(), 1);
}

#[test]
fn a_timeout_that_shows_a_hang_or_lacks_a_part_is_an_incident() {
    let (mut cluster, id, folder, mut verdict, _nodes) = examined_job(alarm(0));
    verdict.hang = HangEvidence::PendingOperation;
    cluster.apply(&id, &verdict, at(13));
    cluster.hub.wait_for_disk();
    assert!(folder.exists() && cluster.hub.engine.opened == 1);

    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, mut verdict) = cluster.judged_without_the_second(&mut first);
    verdict.hang = HangEvidence::None;
    cluster.apply(&id, &verdict, at(41));
    assert_eq!(cluster.hub.engine.opened, 1, "the missing part may show it");
}

#[test]
fn the_captures_of_a_job_that_dies_become_incidents() {
    for failed in [true, false] {
        let (mut cluster, id, folder, verdict, _nodes) = examined_job(alarm(0));
        let kept = found_mild(&mut cluster, &id, &folder, &verdict);
        for rank in [0, 1] {
            let presence = Presence::Left.into();
            let ended = RankEntry { presence, ended_age_ms: 1, failed: failed && rank == 1, ..entry(rank, at(61)) };
            cluster.say(rank as u64, NodeMessage::Ranks(NodeRanks { ranks: vec![ended] }), at(61));
        }
        cluster.hub.tick(at(62));
        cluster.hub.wait_for_disk();
        assert_eq!((folder.exists(), kept.exists()), (failed, !failed));
        let promoted = records::verdict(if failed { &folder } else { &kept }).unwrap().timing.promoted;
        assert_eq!(promoted.as_deref(), failed.then_some("the job died later: rank 1 ended"));
    }
}

#[test]
fn a_hang_after_a_dump_by_hand_is_another_incident() {
    let mut cluster = hub();
    let (_first, _second) = (cluster.join(0), cluster.join(1));
    let id = cluster.by_hand(at(9));
    cluster.captured(&id, 0, at(10));
    cluster.alarm(0);
    assert_eq!(cluster.hub.engine.incidents.len(), 2);
    assert!(cluster.hub.engine.incidents[&id].by_hand && cluster.hub.engine.incidents[&id].hanging.is_empty());
}

#[test]
fn a_hang_during_a_dump_by_hand_takes_it_over() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let id = cluster.by_hand(at(10));
    cluster.hangs(&id, at(10));
    cluster.captured(&id, 0, at(11));
    let key = cluster.bring(&mut first);
    cluster.dump(&key, true, at(12));
    cluster.hub.tick(at(40));
    let verdict = cluster.verdict();
    cluster.apply(&id, &verdict, at(41));
    cluster.gathered(&id, GatherEvent::Drawn, at(42));
    assert_eq!(cluster.hub.engine.incidents[&id].state, State::Dumped, "it lasts");
}

#[test]
fn parts_wait_for_the_folder_but_not_for_a_disk_that_does_not_answer() {
    for answers in [true, false] {
        let mut cluster = hub();
        let mut first = cluster.join(0);
        cluster.say(0, NodeMessage::Alarm(alarm(0)), at(10));
        let id = cluster.hub.engine.incidents.keys().next().unwrap().clone();
        cluster.captured(&id, 0, at(10));
        assert_eq!(cluster.progress_of(&id, "n0"), Progress::Captured, "it has no folder yet");
        match answers {
            true => cluster.folder_made(at(10)),
            false => cluster.hub.tick(at(12)),
        }
        cluster.bring(&mut first);
    }
}

#[test]
fn a_hang_reported_for_an_ended_incident_reopens_it() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&id, &verdict, at(41));
    cluster.close(&id, State::Ended, at(42));
    cluster.hangs(&id, at(43));
    assert_eq!(cluster.hub.engine.incidents[&id].state, State::Dumped);
}

#[test]
fn a_reconnecting_node_learns_that_its_incident_was_closed() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&id, &verdict, at(41));
    cluster.hub.stream_event(StreamEvent::Ended(0, "reset".into()), at(42));
    cluster.close(&id, State::Resolved, at(43));
    let mut again = cluster.join_with(0, vec![Alarm { incident: id.clone(), ..closed_alarm() }], at(44));
    let closed = std::iter::from_fn(|| again.try_recv().ok())
        .any(|message| message.unwrap().message == Some(Message::Closed(IncidentClosed { incident: id.clone() })));
    assert!(closed && cluster.hub.engine.incidents.len() == 1);
}

#[test]
fn a_hang_that_ended_while_its_node_was_away_is_resolved() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&id, &verdict, at(41));
    cluster.finish_files(&id);
    cluster.hub.stream_event(StreamEvent::Ended(0, "reset".into()), at(42));
    cluster.hub.tick(at(60));
    assert_eq!(cluster.hub.engine.incidents[&id].state, State::Dumped, "nobody knows");
    let _again = cluster.join_at(0, at(62));
    cluster.hub.tick(at(65));
    assert_eq!(cluster.hub.engine.incidents[&id].state, State::Resolved);
}

#[test]
fn after_a_restart_a_hang_resolves_when_all_nodes_report_it() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (id, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&id, &verdict, at(41));
    let mut cluster = hub_in(cluster.folder, at(50));
    let open = Alarm { incident: id.clone(), captured: true, ..alarm(0) };
    let (_first, _second) = (cluster.join_with(0, vec![open], at(51)), cluster.join_at(1, at(51)));
    cluster.hub.tick(at(52));
    assert_eq!(cluster.hub.engine.incidents[&id].state, State::Dumped);
    cluster.say(0, NodeMessage::Update(IncidentUpdate { incident: id.clone(), hangs: false, ended: false }), at(53));
    cluster.hub.tick(at(56));
    assert_eq!(cluster.hub.engine.incidents[&id].state, State::Resolved);
}

#[test]
fn an_early_alarm_of_a_new_world_is_a_separate_incident() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (old, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&old, &verdict, at(41));
    // The agents restart the job, and the second node has not reported that yet.
    cluster.restarts(0, at(42), at(43));
    assert!(!cluster.hub.engine.is_over(&cluster.hub.engine.incidents[&old]));
    let new = Alarm { incident: "20261121T105544Z-00000002".into(), ..alarm(0) };
    cluster.say(0, NodeMessage::Alarm(new.clone()), at(44));
    let asked = std::iter::from_fn(|| first.try_recv().ok()).find_map(|message| match message.unwrap().message {
        Some(Message::Dump(request)) => Some(request.incident),
        _ => None,
    });
    assert_eq!(asked, Some(new.incident.clone()));
    cluster.finish_files(&old);
    cluster.restarts(1, at(42), at(45));
    cluster.hub.tick(at(46));
    assert_eq!(cluster.hub.engine.incidents[&old].state, State::Ended);
    assert_eq!(
        (cluster.hub.engine.incidents[&new.incident].state, cluster.hub.engine.incidents.len()),
        (State::Open, 2)
    );
    // A second alarm of that world joins that incident.
    cluster.say(1, NodeMessage::Alarm(Alarm { incident: "20261121T105547Z-00000003".into(), ..alarm(1) }), at(47));
    assert_eq!((cluster.hub.engine.incidents.len(), cluster.hub.engine.incidents[&new.incident].hanging.len()), (2, 2));
}

#[test]
fn a_hang_of_a_new_world_gets_its_own_incident_when_the_old_one_ends() {
    let mut cluster = hub();
    let (mut first, _second) = (cluster.join(0), cluster.join(1));
    let (old, verdict) = cluster.judged_without_the_second(&mut first);
    cluster.apply(&old, &verdict, at(41));
    cluster.finish_files(&old);
    // Another node replaces the first one, and was asked for its part before it hung.
    let _third = cluster.join_with(2, Vec::new(), at(42));
    cluster.hub.stream_event(StreamEvent::Ended(0, "reset".into()), at(42));
    let of_rank_0 = |now: Now| RankEntry {
        info: Some(RankInfo { rank: 0, world_size: 2, ..Default::default() }),
        start: at(42).mono_ns / xpu_timer_proto::procfs::TICK_NS,
        age_ms: (now.mono_ns - at(42).mono_ns) / 1_000_000,
        ..entry(0, now)
    };
    cluster.say(2, NodeMessage::Ranks(NodeRanks { ranks: vec![of_rank_0(at(43))] }), at(43));
    cluster.say(2, NodeMessage::Update(IncidentUpdate { incident: old.clone(), hangs: true, ended: false }), at(44));
    cluster.hub.tick(at(45));
    assert_eq!(cluster.hub.engine.incidents[&old].state, State::Dumped);
    cluster.restarts(1, at(42), at(46));
    cluster.hub.tick(at(47));
    assert_eq!((cluster.hub.engine.incidents[&old].state, cluster.hub.engine.incidents.len()), (State::Ended, 2));
    let new = cluster.hub.engine.incidents.values().find(|one| one.head.id != old).unwrap();
    assert!(new.is_open() && new.hanging.len() == 1 && new.parts.len() == 2, "{new:?}");
}
