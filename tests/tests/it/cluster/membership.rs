//! Jobs whose worlds change: they grow and shrink within a restart attempt, and their agents count restarts apart.

use serde_json::{Value, json};
use xpu_timer_proto::v1::Presence;

use super::{Cluster, Node, evidence};
use crate::collector::fake::FakeHook;

/// A rank of a world joins on a node; those that the node had before are gone.
fn join(node: &mut Node, job: &str, rank: i32, world: u32, attempt: u32) {
    let mut hook = FakeHook::start(&node.job, job, rank, world);
    let info = hook.hello.rank.as_mut().expect("a rank");
    (info.attempt, info.local_rank, info.local_world_size) = (attempt, 0, 1);
    hook.join(&node.job);
    node.hooks = vec![hook];
}

/// The ranks of a node are told to end, as an agent does it before it starts those of the next world.
fn end(node: &mut Node) {
    for hook in &mut node.hooks {
        hook.goodbye();
        hook.kill_if_alive();
    }
}

/// A rank of a node crashes.
fn crash(node: &mut Node) {
    for hook in &mut node.hooks {
        hook.kill_if_alive();
    }
}

fn wait_world(cluster: &Cluster, job: &str, world: u32, attempt: u32, nodes: u32) {
    let wanted = [("world_size", world), ("ranks", world), ("attempt", attempt), ("nodes", nodes)];
    cluster.wait(&format!("a world of {world} in attempt {attempt}"), |status| {
        let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
        let is_it = |one: &Value| wanted.iter().all(|(name, value)| one[name] == *value);
        jobs.iter().any(|one| one["job"] == job && one["alive"] == true && is_it(one))
    });
}

/// Waits for the report of an incident, which must know these ranks, and all of them.
fn check(cluster: &Cluster, count: usize, attempt: u32, ranks: &[(u32, &str)]) {
    // What a machine that stands still delivers late is judged once more.
    cluster.wait("the report knows all, and complains of nobody of the world before", |_| {
        let incidents = cluster.job.finished_incidents();
        incidents.get(count - 1).is_some_and(|incident| incident.verdict["errors"] == json!([]))
    });
    let incident = cluster.wait_incident(count);
    let all = evidence(&incident);
    assert_eq!((all.world_size, all.attempt), (ranks.len() as u32, attempt), "{}", incident.verdict);
    let known: Vec<(u32, &str)> = all.ranks.iter().map(|rank| (rank.rank, rank.node.as_str())).collect();
    assert_eq!(known, ranks, "{}", cluster.log());
    assert!(all.ranks.iter().all(|rank| rank.presence() == Presence::Present), "{}", incident.verdict);
    assert!(!cluster.log().contains("refused to it"), "{}", cluster.log());
}

#[test]
fn a_world_that_grows_and_shrinks_within_one_attempt() {
    let cluster = Cluster::new();
    let mut nodes: Vec<Node> = ["node-a", "node-b", "node-c"].map(|name| Node::new(&cluster, name)).into();
    for (rank, node) in nodes[..2].iter_mut().enumerate() {
        join(node, "elastic", rank as i32, 2, 0);
    }
    wait_world(&cluster, "elastic", 2, 0, 2);

    // A third node comes, and everybody has another rank.
    nodes[..2].iter_mut().for_each(end);
    for (rank, node) in [(1, 0), (2, 1), (0, 2)] {
        join(&mut nodes[node], "elastic", rank, 3, 0);
    }
    wait_world(&cluster, "elastic", 3, 0, 3);
    nodes[1].hooks[0].hang(5);
    check(&cluster, 1, 0, &[(0, "node-c"), (1, "node-a"), (2, "node-b")]);

    // The first node is preempted while the incident is open: that world is over, and the next one is smaller.
    nodes.iter_mut().for_each(end);
    for (rank, node) in [(0, 1), (1, 2)] {
        join(&mut nodes[node], "elastic", rank, 2, 0);
    }
    wait_world(&cluster, "elastic", 2, 0, 2);
    cluster.wait_state("ended");
    nodes[2].hooks[0].hang(6);
    check(&cluster, 2, 0, &[(0, "node-b"), (1, "node-c")]);
}

#[test]
fn agents_that_count_restarts_apart_have_one_world() {
    let cluster = Cluster::new();
    let mut nodes: Vec<Node> = ["node-a", "node-b"].map(|name| Node::new(&cluster, name)).into();
    for (rank, node) in nodes.iter_mut().enumerate() {
        join(node, "apart", rank as i32, 2, 0);
    }
    wait_world(&cluster, "apart", 2, 0, 2);
    // The agent of the node with the crash counts it; the other one only sees that a member was away.
    crash(&mut nodes[0]);
    end(&mut nodes[1]);
    join(&mut nodes[0], "apart", 0, 2, 1);
    join(&mut nodes[1], "apart", 1, 2, 0);
    wait_world(&cluster, "apart", 2, 1, 2);
    nodes[1].hooks[0].hang(4);
    check(&cluster, 1, 1, &[(0, "node-a"), (1, "node-b")]);
}
