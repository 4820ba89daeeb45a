//! Restarts or stops either role while parts and files are being sent. Nothing is lost.

use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::json;
use xpu_timer_proto::v1::Presence;
use xpu_timer_tests::{PATIENCE, wait_until};

use super::{Cluster, Node, evidence, network::Network, text};

const RANKS: i32 = 4;

/// Two nodes, of which the second has a slow link and much to send; its part is being sent.
struct Scene {
    cluster: Cluster,
    nodes: Vec<Node>,
    _network: Network,
}

/// `None` when this machine cannot make it. `text` is what the second node says when it is sending.
fn sending(folder: &Path, text: &str) -> Option<Scene> {
    let network = Network::new(2)?;
    let cluster = network.cluster(folder);
    let mut nodes: Vec<Node> = (1..=2).map(|member| Node::on(network.job(&cluster, folder, member))).collect();
    for (index, node) in nodes.iter_mut().enumerate() {
        // It stands in the evidence and in the file of each rank, and a hook may say no more in one
        // message.
        node.rank_name = (index == 1).then(|| "n".repeat(12_000));
        node.add_ranks("sends", index as i32 * RANKS, RANKS, 2 * RANKS as u32);
    }
    wait_until(PATIENCE, "all ranks are known", || cluster.log().contains("job sends is complete: 8 ranks on 2 nodes"));
    if !network.slow(2, 256) {
        return None;
    }
    nodes[0].hooks[0].hang(7);
    nodes[1].wait_log(text);
    Some(Scene { cluster, nodes, _network: network })
}

impl Scene {
    /// Waits for a report of all ranks, with the files of all.
    fn check(&self) {
        let mut last = String::new();
        wait_until(PATIENCE, "the report knows all ranks", || {
            let Some(incident) = self.cluster.job.finished_incidents().pop() else { return false };
            let all = evidence(&incident);
            let here = |rank: u32| incident.path.join(format!("{rank:05}-{:05}.stacktrace", 2 * RANKS)).exists();
            last = format!("{} {}", incident.verdict["errors"], incident.path.display());
            incident.verdict["errors"] == json!([])
                && all.ranks.len() == 2 * RANKS as usize
                && all.ranks.iter().all(|rank| rank.presence() == Presence::Present && here(rank.rank))
        });
        assert_eq!(self.cluster.job.incidents().len(), 1, "{last} {}", self.cluster.log());
        let python = text(self.cluster.job.incidents()[0].path.join("py_stack"));
        assert!(python.lines().any(|line| line.contains("@0-7|")), "each rank is in it once:\n{python}");
    }
}

#[test]
fn a_node_collector_restarts_while_it_delivers() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut scene) = sending(folder.path(), "sending the delivery of this node") else { return };
    scene.nodes[1].restart();
    scene.check();
}

#[test]
fn a_cluster_collector_restarts_between_deliveries() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut scene) = sending(folder.path(), "sending the delivery of this node") else { return };
    scene.cluster.kill();
    scene.cluster.start();
    scene.check();
}

#[test]
fn a_cluster_collector_restarts_while_files_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut scene) = sending(folder.path(), "sending files to the cluster collector") else { return };
    scene.cluster.kill();
    scene.cluster.start();
    scene.check();
}

#[test]
fn a_stopped_node_is_named_and_delivers_late() {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "still", 0, 2, 4);
    let b = Node::with_ranks(&cluster, "node-b", "still", 2, 2, 4);
    cluster.wait_ranks("still", 4);
    let process = b.process.as_ref().expect("it runs");
    process.signal(Signal::SIGSTOP);
    a.hooks[0].hang(4);
    let incident = cluster.wait_incident(1);
    let errors = incident.verdict["errors"].to_string();
    assert!(errors.contains("node node-b (ranks 2-3) delivered nothing: "), "{errors}");
    let here = evidence(&incident).ranks.iter().filter(|rank| rank.presence() == Presence::Present).count();
    assert_eq!(here, 2, "the others do not wait for it longer than that");
    process.signal(Signal::SIGCONT);
    wait_until(PATIENCE, "it is judged again with all", || {
        let incidents = cluster.job.incidents();
        incidents[0].verdict["errors"] == json!([])
            && evidence(&incidents[0]).ranks.iter().all(|rank| rank.presence() == Presence::Present)
    });
}
