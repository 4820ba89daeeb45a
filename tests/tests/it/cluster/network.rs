//! Three nodes as network namespaces with addresses of their own, and what a network does to them:
//! a link that goes down in the middle of a dump, a slow link.
//!
//! The namespaces are made by root and removed when the test ends, also when it fails.

use std::{
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use serde_json::json;
use xpu_timer_proto::v1::Presence;
use xpu_timer_tests::{Job, PATIENCE, skip, wait_until};

use super::{
    Cluster, Node, evidence,
    security::{certificates, secured},
};

/// A bridge, the cluster's namespace and those of the nodes: 10.77.N.1 is the cluster, .2 and on
/// are the nodes.
pub struct Network {
    prefix: String,
    subnet: u32,
    namespaces: Vec<String>,
}

fn ip(arguments: &str) -> Result<(), String> {
    tool("ip", arguments)
}

fn tool(program: &str, arguments: &str) -> Result<(), String> {
    let output =
        Command::new(program).args(arguments.split_whitespace()).output().map_err(|e| format!("{program}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Network {
    /// `None` if this machine forbids it; the test reports that it is skipped.
    pub fn new(nodes: u32) -> Option<Self> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        // Names of links have at most 15 characters.
        let prefix = format!("xt{}{number}", std::process::id() % 100_000);
        let subnet = (std::process::id() * 7 + number) % 250 + 1;
        let mut network = Network { prefix, subnet, namespaces: Vec::new() };
        match network.make(nodes) {
            Ok(()) => Some(network),
            Err(why) => {
                skip(&format!("network namespaces cannot be made here (it takes root and ip): {why}"));
                None
            }
        }
    }

    fn make(&mut self, nodes: u32) -> Result<(), String> {
        // The bridge lies in a namespace of its own, so that nothing of this machine's network is
        // touched.
        let hub = format!("{}-hub", self.prefix);
        ip(&format!("netns add {hub}"))?;
        self.namespaces.push(hub.clone());
        ip(&format!("-n {hub} link add br0 type bridge"))?;
        ip(&format!("-n {hub} link set br0 up"))?;
        for member in 0..=nodes {
            let (namespace, link) = (self.namespace(member), format!("{}{member}", self.prefix));
            ip(&format!("netns add {namespace}"))?;
            self.namespaces.push(namespace.clone());
            ip(&format!("-n {hub} link add {link} type veth peer name eth0 netns {namespace}"))?;
            ip(&format!("-n {hub} link set {link} master br0 up"))?;
            ip(&format!("-n {namespace} address add {}/24 dev eth0", self.address(member)))?;
            ip(&format!("-n {namespace} link set eth0 up"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        Ok(())
    }

    /// Name of a member's namespace.
    pub fn namespace(&self, member: u32) -> String {
        format!("{}-{member}", self.prefix)
    }

    /// Address of a member.
    pub fn address(&self, member: u32) -> String {
        format!("10.77.{}.{}", self.subnet, member + 1)
    }

    /// Pulls or plugs the cable of a member.
    fn link(&self, member: u32, state: &str) {
        ip(&format!("-n {}-hub link set {}{member} {state}", self.prefix, self.prefix))
            .expect("this user owns the link");
    }

    /// Kilobits a second from a member on. False when the kernel has no such thing.
    pub fn slow(&self, member: u32, kbit: u32) -> bool {
        let limits = format!("rate {kbit}kbit burst 8kb latency 2s");
        match tool("tc", &format!("-n {} qdisc add dev eth0 root tbf {limits}", self.namespace(member))) {
            Ok(()) => true,
            Err(why) => {
                skip(&format!("no slow link: {why}"));
                false
            }
        }
    }

    /// A cluster collector in its namespace, with TLS and a token, for nothing else may listen
    /// there.
    pub(super) fn cluster(&self, folder: &std::path::Path) -> Cluster {
        certificates(folder, &[&self.address(0)]);
        let job = secured(Job::new(), folder).within(&self.namespace(0));
        let mut cluster = Cluster::with(job, "https", &self.address(0));
        cluster.start();
        cluster
    }

    /// Settings of a node collector in its namespace.
    pub(super) fn job(&self, cluster: &Cluster, folder: &std::path::Path, member: u32) -> Job {
        secured(cluster.node_job(&format!("node-{member}")), folder).within(&self.namespace(member))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in self.namespaces.iter().rev() {
            // Links go with their namespaces. One that stays can only be reported.
            if let Err(why) = ip(&format!("netns delete {namespace}")) {
                eprintln!("{why}");
            }
        }
    }
}

fn three_nodes(network: &Network, cluster: &Cluster, folder: &std::path::Path, interval_ms: u64) -> Vec<Node> {
    let nodes: Vec<Node> = (1..=3)
        .map(|member| {
            let mut node = Node::on(network.job(cluster, folder, member));
            node.interval_ms = interval_ms;
            node.add_ranks("net", (member as i32 - 1) * 2, 2, 6);
            node
        })
        .collect();
    wait_until(PATIENCE, "three nodes join with their ranks", || {
        (1..=3).all(|member| cluster.log().contains(&format!("node node-{member} joined")))
    });
    nodes
}

#[test]
fn a_node_that_is_cut_off_in_the_middle_of_its_dump_is_named_and_delivers_late() {
    let Some(network) = Network::new(3) else { return };
    let folder = tempfile::tempdir().unwrap();
    let cluster = network.cluster(folder.path());
    let mut nodes = three_nodes(&network, &cluster, folder.path(), 3000);
    wait_until(PATIENCE, "all ranks are known", || cluster.log().contains("job net is complete: 6 ranks on 3 nodes"));
    nodes[0].hooks[1].hang(7);
    wait_until(PATIENCE, "node 3 takes its dump", || nodes[2].log().contains("the first sample took"));
    network.link(3, "down");
    let incident = cluster.wait_finished(1);
    let errors = incident.verdict["errors"].to_string();
    assert!(errors.contains("node node-3 (ranks 4-5) delivered nothing"), "{errors}");
    let all = evidence(&incident);
    assert_eq!(all.ranks.iter().filter(|rank| rank.presence() == Presence::Present).count(), 4);
    assert!(all.ranks[4].errors[0].contains("its node node-3 delivered nothing"), "{:?}", all.ranks[4]);

    // The cable is plugged in again: what the node has kept arrives, and the job is judged again.
    network.link(3, "up");
    wait_until(PATIENCE, "it is judged again with all", || {
        let incidents = cluster.job.incidents();
        incidents[0].verdict["errors"] == json!([])
            && evidence(&incidents[0]).ranks.iter().all(|rank| rank.presence() == Presence::Present)
    });
    assert_eq!(cluster.job.incidents().len(), 1, "{}", cluster.log());
}

#[test]
fn a_slow_link_delays_its_node_and_nobody_else() {
    let Some(network) = Network::new(3) else { return };
    let folder = tempfile::tempdir().unwrap();
    let cluster = network.cluster(folder.path());
    let mut nodes = three_nodes(&network, &cluster, folder.path(), 1000);
    wait_until(PATIENCE, "all ranks are known", || cluster.log().contains("job net is complete: 6 ranks on 3 nodes"));
    if !network.slow(2, 256) {
        return;
    }
    nodes[0].hooks[1].hang(7);
    let incident = cluster.wait_finished(1);
    let all = evidence(&incident);
    assert_eq!(all.ranks.iter().filter(|rank| rank.presence() == Presence::Present).count(), 6, "{}", cluster.log());
}

#[test]
fn all_three_nodes_are_one_incident_over_the_network() {
    let Some(network) = Network::new(3) else { return };
    let folder = tempfile::tempdir().unwrap();
    let cluster = network.cluster(folder.path());
    let mut nodes = three_nodes(&network, &cluster, folder.path(), 700);
    wait_until(PATIENCE, "all ranks are known", || cluster.log().contains("job net is complete: 6 ranks on 3 nodes"));
    nodes[2].hooks[0].hang(7);
    let incident = cluster.wait_finished(1);
    let all = evidence(&incident);
    let nodes_of: Vec<&str> = all.ranks.iter().map(|rank| rank.node.as_str()).collect();
    assert_eq!(nodes_of, ["node-1", "node-1", "node-2", "node-2", "node-3", "node-3"]);
    assert_eq!(incident.verdict["errors"], json!([]));
    let seconds = incident.verdict["seconds_from_timeout"].as_f64().expect("seconds_from_timeout");
    assert!(seconds < 0.7 + 3.0, "sample interval 0.7 s plus 3 s, not {seconds}");
}
