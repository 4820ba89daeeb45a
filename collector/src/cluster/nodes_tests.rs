//! Nodes that join and leave, and their reports about ranks.

use xpu_timer_proto::v1::RankInfo;

use super::*;

fn job(name: &str) -> JobKey {
    JobKey { name: name.into(), instance: String::new() }
}

fn entry(name: &str, rank: i32, attempt: u32, world_size: u32) -> RankEntry {
    RankEntry {
        job: Some(JobId { name: name.into(), instance: String::new() }),
        info: Some(RankInfo { rank, attempt, world_size, ..Default::default() }),
        presence: Presence::Present.into(),
        idle_timeout_ms: 10_000,
        ..Default::default()
    }
}

fn node(nodes: &mut Nodes, name: &str, stream: StreamId) -> NodeId {
    nodes.join(name, name, stream)
}

fn ranks(nodes: &Nodes, id: NodeId) -> String {
    nodes.ranks_of(&job("j"), id).to_string()
}

const SECOND: u64 = 1_000_000_000;

/// A rank whose process is `age_s` old and, if given, ended `ended_s` ago.
fn aged(rank: i32, attempt: u32, world_size: u32, age_s: u64, ended_s: Option<u64>) -> RankEntry {
    let presence = if ended_s.is_some() { Presence::Dead } else { Presence::Present };
    RankEntry {
        presence: presence.into(),
        age_ms: age_s * 1000,
        ended_age_ms: ended_s.unwrap_or(0) * 1000,
        ..entry("j", rank, attempt, world_size)
    }
}

#[test]
fn a_rank_belongs_to_one_living_node() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    nodes.claim(a, vec![entry("j", 0, 0, 4), entry("j", 1, 0, 4)], 1);
    assert_eq!(nodes.refused(), []);
    let others = nodes.claim(b, vec![entry("j", 1, 0, 4), entry("j", 2, 0, 4), entry("k", 1, 0, 4)], 2);
    assert_eq!(others, BTreeSet::from([a]));
    assert_eq!(
        nodes.refused(),
        [RefusedClaim { node: b, job: job("j"), by: a, ranks: RankSet::from_iter([1]) }],
        "the younger process does not take the place of the older one"
    );
    assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0-1".into(), "2".into()));
    assert!(nodes.node_of_rank(&job("j"), 1) == Some(a) && nodes.node_of_rank(&job("j"), 3).is_none());
    // The first node leaves: its rank may have moved.
    assert!(nodes.disconnect(a, 1, 5));
    assert_eq!(nodes.competing_nodes(a), BTreeSet::from([b]));
    assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0".into(), "1-2".into()));
    // It reconnects and holds the rank again, because it claimed the rank first.
    let again = node(&mut nodes, "a", 3);
    assert_eq!(again, a);
    assert_eq!((ranks(&nodes, a), nodes.refused().len()), ("0-1".into(), 1));
    assert!(!nodes.disconnect(a, 1, 6), "the old stream is not the node's any more");
}

#[test]
fn the_newest_attempt_counts_with_its_world() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    nodes.claim(a, vec![entry("j", 0, 0, 4), entry("j", 1, 0, 4)], 1);
    nodes.claim(b, vec![entry("j", 2, 0, 4), entry("j", 3, 0, 4)], 2);
    assert_eq!((nodes.job(&job("j")).world_size, nodes.job(&job("j")).nodes.len()), (4, 2));
    nodes.claim(a, vec![entry("j", 0, 1, 2), entry("j", 1, 1, 2)], 2 * SECOND);
    let summary = nodes.job(&job("j"));
    assert_eq!((summary.attempt, summary.world_size, summary.nodes.clone()), (1, 2, BTreeSet::from([a])));
    assert!(summary.is_complete());
    nodes.claim(b, vec![aged(2, 0, 4, 3, Some(2)), aged(3, 0, 4, 3, Some(2))], 3 * SECOND);
    nodes.forget(4 * SECOND);
    assert_eq!(nodes.claims[&job("j")].ranks.len(), 2, "the older world is forgotten");
    nodes.claim(a, Vec::new(), 5 * SECOND);
    assert_eq!(nodes.jobs().count(), 0);
}

#[test]
fn agents_with_different_attempts_have_one_world() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    let at = |seconds: u64| seconds * SECOND;
    nodes.claim(a, vec![aged(0, 0, 4, 5, None), aged(1, 0, 4, 5, None)], at(10));
    nodes.claim(b, vec![aged(2, 0, 4, 5, None), aged(3, 0, 4, 5, None)], at(10));
    assert!(nodes.job(&job("j")).is_complete());
    // A rank of the first node crashes: its agent counts that. The other agent only sees a
    // membership change.
    nodes.claim(a, vec![aged(0, 1, 4, 1, None), aged(1, 1, 4, 1, None)], at(30));
    nodes.claim(b, vec![aged(2, 0, 4, 26, Some(5)), aged(3, 0, 4, 26, Some(5))], at(31));
    let summary = nodes.job(&job("j"));
    assert_eq!((summary.attempt, summary.ranks, summary.nodes.clone()), (1, 2, BTreeSet::from([a])));
    assert_eq!(summary.first_start_ns, at(29), "the world before is not that one");
    nodes.claim(b, vec![aged(2, 0, 4, 2, None), aged(3, 0, 4, 2, None)], at(31));
    let summary = nodes.job(&job("j"));
    assert!(summary.is_complete() && summary.nodes.len() == 2 && summary.attempt == 1, "{summary:?}");
    assert_eq!((ranks(&nodes, a), ranks(&nodes, b)), ("0-1".into(), "2-3".into()));
    // A rank that dies in this world belongs to it, whatever its attempt is.
    nodes.claim(b, vec![aged(2, 0, 4, 10, Some(1)), aged(3, 0, 4, 10, None)], at(40));
    assert_eq!((nodes.job(&job("j")).ranks, ranks(&nodes, b).as_str()), (4, "2-3"));
    // Again, now with the counter of the other agent ahead.
    nodes.claim(b, vec![aged(2, 1, 4, 1, None), aged(3, 1, 4, 1, None)], at(50));
    nodes.claim(a, vec![aged(0, 1, 4, 1, None), aged(1, 1, 4, 1, None)], at(50));
    assert!(nodes.job(&job("j")).is_complete());
    assert_eq!(nodes.refused(), []);
}

/// As [`aged`], for the process with this pid that was started this many seconds after its node.
fn started(pid: i32, start_s: u64, entry: RankEntry) -> RankEntry {
    let info = entry.info.map(|info| RankInfo { pid, ..info });
    RankEntry { info, start: start_s * SECOND / TICK_NS, ..entry }
}

#[test]
fn a_late_message_changes_no_start_time() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    let at = |seconds: u64| seconds * SECOND;
    // The node was started 5 s before this collector.
    nodes.claim(a, vec![started(7, 10, aged(0, 0, 2, 5, None))], at(10));
    nodes.claim(b, vec![aged(1, 0, 2, 5, None)], at(10));
    assert_eq!(nodes.job(&job("j")).first_start_ns, at(5));
    let number = nodes.claims[&job("j")].ranks[&(0, a)].number;
    // Four seconds late and with another place in the world: it is the same process.
    nodes.claim(a, vec![started(7, 10, aged(0, 0, 3, 10, None))], at(19));
    let claim = &nodes.claims[&job("j")].ranks[&(0, a)];
    assert_eq!((claim.started_ns, claim.number), (at(5), number));
    assert!(!nodes.all_started_after(&job("j"), a, at(5)) && nodes.all_started_after(&job("j"), a, at(4)));
    // The first message of a node is late and the next one is not: the start times of the first
    // message were wrong.
    let c = node(&mut nodes, "c", 3);
    nodes.claim(c, vec![started(7, 100, aged(0, 0, 1, 1, None))], at(30));
    assert_eq!(nodes.job(&job("j")).world.started_ns, at(29));
    nodes.claim(c, vec![started(7, 100, aged(0, 0, 1, 5, None))], at(31));
    assert_eq!(nodes.job(&job("j")).world.started_ns, at(26));
    // Another process within the same second.
    let before = nodes.claims[&job("j")].ranks[&(0, c)].number;
    nodes.claim(c, vec![started(8, 100, aged(0, 0, 1, 5, None))], at(31));
    let claim = &nodes.claims[&job("j")].ranks[&(0, c)];
    assert!(claim.process.is_some_and(|(pid, _)| pid == 8) && claim.number > before);
    // For a process that is not visible, the start time is unknown.
    assert!(!nodes.all_started_after(&job("j"), b, at(1)));
}

#[test]
fn an_unregistered_rank_belongs_to_its_world() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    let at = |seconds: u64| seconds * SECOND;
    nodes.claim(a, vec![aged(0, 0, 2, 5, None)], at(10));
    let silent = RankEntry { presence: Presence::Unregistered.into(), ..started(7, 10, aged(1, 0, 2, 5, None)) };
    nodes.claim(b, vec![silent], at(10));
    let summary = nodes.job(&job("j"));
    assert!(summary.is_complete() && summary.alive && summary.nodes.contains(&b) && summary.hang_timeout_ms == 0);
    drop(summary);
    let registered = RankEntry { hang_timeout_ms: 300, ..started(7, 10, aged(1, 0, 2, 6, None)) };
    nodes.claim(b, vec![registered], at(11));
    assert!(nodes.claims[&job("j")].summary.borrow().is_some(), "in a large job that is not worked out for each rank");
    assert_eq!(nodes.job(&job("j")).hang_timeout_ms, 300);
    assert_eq!(nodes.claims[&job("j")].ranks[&(1, b)].presence, Presence::Present);
    nodes.claim(b, vec![started(7, 10, aged(1, 0, 2, 7, Some(1)))], at(12));
    assert_eq!((nodes.job(&job("j")).ranks, nodes.job(&job("j")).ended), (2, true));
}

#[test]
fn a_world_that_grows_and_shrinks_within_an_attempt() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    let c = node(&mut nodes, "c", 3);
    let at = |seconds: u64| seconds * SECOND;
    nodes.claim(a, vec![aged(0, 0, 2, 5, None)], at(10));
    nodes.claim(b, vec![aged(1, 0, 2, 5, None)], at(10));
    // A node joins: its rank arrives before the old ranks are reported as ended, and has one of
    // their numbers.
    nodes.claim(c, vec![aged(0, 0, 3, 1, None)], at(20));
    let summary = nodes.job(&job("j"));
    assert_eq!(
        (summary.world_size, summary.ranks, nodes.refused()),
        (3, 1, vec![]),
        "nobody complains of the old ranks"
    );
    nodes.claim(a, vec![aged(1, 0, 3, 1, None)], at(20));
    nodes.claim(b, vec![aged(1, 0, 2, 15, Some(2)), aged(2, 0, 3, 1, None)], at(20));
    assert!(nodes.job(&job("j")).is_complete());
    assert_eq!((ranks(&nodes, a), ranks(&nodes, b), ranks(&nodes, c)), ("1".into(), "2".into(), "0".into()));
    // The first node is preempted, and the other nodes take its place.
    nodes.claim(a, vec![aged(1, 0, 3, 11, Some(2))], at(30));
    nodes.claim(b, vec![aged(0, 0, 2, 1, None)], at(30));
    nodes.claim(c, vec![aged(1, 0, 2, 1, None)], at(30));
    let summary = nodes.job(&job("j"));
    assert_eq!((summary.world_size, summary.ranks, summary.nodes.clone()), (2, 2, BTreeSet::from([b, c])));
    // Another node replaces it in a world of the same size: the old number is free as soon as its
    // process has ended.
    nodes.claim(c, vec![aged(1, 0, 2, 11, Some(1))], at(40));
    nodes.claim(a, vec![aged(1, 0, 2, 0, None)], at(41));
    nodes.claim(b, vec![aged(0, 0, 2, 1, None)], at(41));
    assert_eq!((ranks(&nodes, a), ranks(&nodes, b), ranks(&nodes, c)), ("1".into(), "0".into(), String::new()));
    assert!(nodes.job(&job("j")).is_complete() && nodes.refused().is_empty());
}

#[test]
fn a_job_is_idle_only_if_all_nodes_are() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    nodes.claim(a, vec![entry("j", 0, 0, 2)], 1);
    nodes.claim(b, vec![entry("j", 1, 0, 2)], 1);
    nodes.launched(b, job("j"), 19 * SECOND);
    assert_eq!(nodes.busy_elsewhere(&job("j"), a, 28 * SECOND), Some("b"));
    assert_eq!(nodes.busy_elsewhere(&job("j"), b, 28 * SECOND), None);
    assert_eq!(nodes.busy_elsewhere(&job("j"), a, 29 * SECOND), None);
}

#[test]
fn communicators_separate_two_jobs_of_one_name() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    let b = node(&mut nodes, "b", 2);
    let of = |instance: &str, ranks: [i32; 2], communicators: &[u64]| {
        ranks.map(|rank| RankEntry {
            job: Some(JobId { name: "j".into(), instance: instance.into() }),
            communicators: communicators.into(),
            ..entry("j", rank, 0, 4)
        })
    };
    let on = |communicators: [&[u64]; 4]| {
        let [one, two, three, four] = communicators;
        (
            [of("", [0, 1], one), of("pid 9 on a 01", [0, 1], two)].concat(),
            [of("", [2, 3], three), of("pid 4 on b 02", [2, 3], four)].concat(),
        )
    };
    // Without communicators, nothing separates them.
    let (of_a, of_b) = on([&[], &[], &[], &[]]);
    nodes.claim(a, of_a, 1);
    nodes.claim(b, of_b, 2);
    assert!(nodes.job(&job("j")).is_complete() && nodes.jobs().count() == 3);
    let (of_a, of_b) = on([&[7], &[8], &[8], &[7]]);
    nodes.claim(a, of_a, 3);
    nodes.claim(b, of_b, 4);
    let keys: Vec<JobKey> = nodes.jobs().cloned().collect();
    assert_eq!(keys.len(), 2, "{keys:?}");
    let other = JobKey { name: "j".into(), instance: "pid 9 on a 01".into() };
    for key in [&job("j"), &other] {
        let summary = nodes.job(key);
        assert!(summary.is_complete() && summary.nodes == BTreeSet::from([a, b]), "{key}: {summary:?}");
    }
    assert_eq!(nodes.refused(), []);
    assert_eq!(nodes.key_at(b, &other), job("j"), "what the node is asked for");
    let plain = JobId { name: "j".into(), instance: String::new() };
    assert_eq!((nodes.key(a, &plain), nodes.key(b, &plain)), (job("j"), other.clone()));
    // One of the two ends: the other one keeps its name.
    let (of_a, of_b) = on([&[7], &[8], &[8], &[7]]);
    nodes.claim(a, of_a[2..].to_vec(), 5);
    nodes.claim(b, of_b[..2].to_vec(), 6);
    assert_eq!(nodes.jobs().collect::<Vec<_>>(), [&other]);
    assert!(nodes.job(&other).is_complete());
}

#[test]
fn a_node_without_a_stream_is_forgotten() {
    let mut nodes = Nodes::default();
    let a = node(&mut nodes, "a", 1);
    assert!(nodes.get(a).unwrap().is_joined() && nodes.disconnect(a, 1, 5));
    assert!(!nodes.get(a).unwrap().is_joined());
    nodes.forget(6 + FORGET_NS);
    assert!(nodes.get(a).is_none());
}
