//! What the cluster does not believe: a rank that another node has, and that two machines mean the same place by `127.0.0.1`.

use xpu_timer_tests::{PATIENCE, wait_until};

use super::{Cluster, Node, evidence, network::Network};

#[test]
fn a_node_whose_ranks_are_another_ones_works_alone() {
    let cluster = Cluster::new();
    let _owner = Node::with_ranks(&cluster, "node-a", "mine", 0, 2, 2);
    cluster.wait_ranks("mine", 2);
    let mut thief = Node::with_ranks(&cluster, "node-x", "mine", 1, 1, 2);
    wait_until(PATIENCE, "it is refused", || {
        cluster.log().contains("node node-x says that it has ranks 1 of job mine, which node node-a has")
    });
    // Its ranks hang all the same, and nobody else would look at them.
    thief.hooks[0].hang(3);
    let alone = thief.job.wait_incident(1, PATIENCE);
    assert_eq!(alone.verdict["job"], "mine");
    assert!(thief.log().contains("no rank of job mine is this node's"), "{}", thief.log());
    assert!(cluster.job.incidents().is_empty(), "{}", cluster.log());
}

#[test]
fn collectors_of_one_machine_may_meet_on_its_loopback() {
    let cluster = Cluster::new();
    let nodes: Vec<Node> = (0..2)
        .map(|rank| {
            let job = cluster.node_job(&format!("node-{rank}"));
            let mut node = Node::on(job.with("MASTER_ADDR", "localhost").with("MASTER_PORT", "29500"));
            node.add_ranks("near", rank, 1, 2);
            node
        })
        .collect();
    wait_until(PATIENCE, "they are one job", || cluster.log().contains("is whole: 2 ranks on 2 nodes"));
    assert!(cluster.log().contains("job near (localhost:29500 on "), "{}", cluster.log());
    drop(nodes);
}

#[test]
fn jobs_that_meet_on_the_loopback_of_two_machines_are_two() {
    let Some(network) = Network::new(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let cluster = network.cluster(folder.path());
    let mut nodes: Vec<Node> = (1..=2)
        .map(|member| {
            let job = network.job(&cluster, folder.path(), member);
            let mut node = Node::on(job.with("MASTER_ADDR", "127.0.0.1").with("MASTER_PORT", "29500"));
            node.add_ranks("none", 0, 2, 2);
            node
        })
        .collect();
    wait_until(PATIENCE, "there are two jobs", || {
        cluster.log().matches("is whole: 2 ranks on 1 nodes, attempt 0").count() == 2
    });
    nodes[1].hooks[0].hang(3);
    let incident = cluster.wait_finished(1);
    let all = evidence(&incident);
    let of: Vec<&str> = all.ranks.iter().map(|rank| rank.node.as_str()).collect();
    assert_eq!(of, ["node-2", "node-2"], "{}", cluster.log());
    assert!(!nodes[0].log().contains("sample took") && !cluster.log().contains("refused"), "{}", cluster.log());
}
