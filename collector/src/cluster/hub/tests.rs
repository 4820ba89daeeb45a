//! What happens to the parts of an incident when streams and deliveries break off, told with a clock of its own.

use tokio::sync::oneshot;
use xpu_timer_proto::{
    env::Source,
    v1::{Captured, JobId, NodeDump, NodeRanks, Presence, RankInfo, Trigger, TriggerKind, delivery},
};

use super::*;
use crate::cluster::nodes::Outbound;

struct Told {
    hub: Hub,
    folder: tempfile::TempDir,
    _commands: mpsc::UnboundedReceiver<Command>,
}

fn at(seconds: u64) -> Now {
    Now { mono_ns: seconds * SECOND, unix_ns: (1_795_258_500 + seconds) * SECOND }
}

fn hub() -> Told {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings::new(&Source::new(|_| None, ""), None, folder.path().into(), 7).unwrap();
    let settings = Settings { timeline_path: folder.path().join("timeline"), ..settings };
    let (commands, _commands) = mpsc::unbounded_channel();
    Told { hub: Hub::new(settings, commands, at(1)), folder, _commands }
}

impl Told {
    /// A node of one rank joins on a stream of its number.
    fn join(&mut self, rank: i32) -> mpsc::Receiver<Outbound> {
        let (outgoing, messages) = mpsc::channel(8);
        let entry = RankEntry {
            job: Some(JobId { name: "j".into(), instance: String::new() }),
            info: Some(RankInfo { rank, world_size: 2, ..Default::default() }),
            presence: Presence::Present.into(),
            ..Default::default()
        };
        let ranks = Some(NodeRanks { ranks: vec![entry] });
        let hello = NodeHello { node: format!("n{rank}"), identity: format!("{rank}"), ranks, ..Default::default() };
        self.hub.stream(StreamEvent::Joined(rank as u64, Box::new(hello), outgoing), at(2));
        messages
    }

    fn say(&mut self, stream: StreamId, message: Said, now: Now) {
        self.hub.stream(StreamEvent::Said(stream, Box::new(message)), now);
    }

    /// The first node alarms.
    fn alarm(&mut self, rank: i32) -> String {
        let alarm = Alarm {
            incident: "20261121T105510Z-00000001".into(),
            job: Some(JobId { name: "j".into(), instance: String::new() }),
            trigger: Some(Trigger { kind: TriggerKind::Operation.into(), rank, ..Default::default() }),
            hangs: true,
            ..Default::default()
        };
        self.say(0, Said::Alarm(alarm), at(10));
        self.hub.incidents.keys().next().unwrap().clone()
    }

    fn progress_of(&self, id: &str, name: &str) -> Progress {
        let parts = &self.hub.incidents[id].parts;
        parts.iter().find(|(node, _)| self.hub.nodes.name(**node) == name).unwrap().1.progress.clone()
    }

    fn captured(&mut self, id: &str, stream: StreamId, now: Now) {
        self.say(stream, Said::Captured(Captured { incident: id.into() }), now);
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
        self.hub.stream(StreamEvent::Brings(key.clone(), reply), at(12));
        assert!(known.try_recv().unwrap());
        key
    }
}

#[test]
fn a_node_that_dies_before_it_is_asked_for_its_part_does_not_hold_up_the_verdict() {
    let mut told = hub();
    let (_first, second) = (told.join(0), told.join(1));
    let id = told.alarm(0);
    drop(second);
    told.captured(&id, 1, at(11));
    assert_eq!(told.progress_of(&id, "n1"), Progress::Asked, "the request did not reach it");
    told.hub.stream(StreamEvent::Ended(1, "reset".into()), at(12));
    told.hub.tick(at(100));
    assert!(matches!(told.progress_of(&id, "n1"), Progress::Failed(_)));
    assert!(told.folder.path().join("timeline").join(format!("incident-{id}")).is_dir());
}

#[test]
fn a_delivery_that_breaks_off_is_asked_for_again_a_few_times() {
    let mut told = hub();
    let (mut first, _second) = (told.join(0), told.join(1));
    let id = told.alarm(0);
    told.captured(&id, 0, at(11));
    for _ in 0..2 {
        let key = told.bring(&mut first);
        told.hub.stream(StreamEvent::Ceased(key), at(12));
        assert!(matches!(told.progress_of(&id, "n0"), Progress::Delivering(_)));
    }
    let key = told.bring(&mut first);
    told.hub.stream(StreamEvent::Ceased(key.clone()), at(12));
    let Progress::Failed(why) = told.progress_of(&id, "n0") else { panic!("it is given up") };
    assert!(why.contains("broke off 3 times"), "{why}");
    told.hub.stream(StreamEvent::Ceased(key), at(13));
}

#[test]
fn the_end_of_a_delivery_that_is_whole_changes_nothing() {
    let mut told = hub();
    let (mut first, _second) = (told.join(0), told.join(1));
    let id = told.alarm(0);
    told.captured(&id, 0, at(11));
    let key = told.bring(&mut first);
    let dump = delivery::Message::Dump(NodeDump { last: true, ..Default::default() });
    told.hub.stream(StreamEvent::Brought(key.clone(), Box::new(dump)), at(12));
    told.hub.stream(StreamEvent::Ceased(key), at(12));
    assert_eq!(told.progress_of(&id, "n0"), Progress::Delivered);
}

#[test]
fn a_node_does_not_alarm_in_the_name_of_a_rank_of_another_one() {
    let mut told = hub();
    let (_first, _second) = (told.join(0), told.join(1));
    let id = told.alarm(1);
    assert_eq!(told.hub.incidents[&id].trigger.rank, -1);
}
