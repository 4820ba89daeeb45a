//! The network between nodes. Three nodes are network namespaces with addresses of their own, and a
//! link goes down in the middle of a dump, or is slow. With TLS and the token: the conditions for
//! listening, joining and reading.
//!
//! The namespaces are made by root and removed when the test ends, also when it fails.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::json;
use xpu_timer_proto::v1::Presence;
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, skip, wait_until};

use super::{Cluster, Node, evidence};

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
        // The bridge is in a namespace of its own, so that this machine's network does not change.
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
    pub(super) fn cluster(&self, folder: &Path) -> Cluster {
        certificates(folder, &[&self.address(0)]);
        let job = secured(Job::new(), folder).within(&self.namespace(0));
        let mut cluster = Cluster::with(job, "https", &self.address(0));
        cluster.start();
        cluster
    }

    /// Settings of a node collector in its namespace.
    pub(super) fn job(&self, cluster: &Cluster, folder: &Path, member: u32) -> Job {
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

fn three_nodes(network: &Network, cluster: &Cluster, folder: &Path, interval_ms: u64) -> Vec<Node> {
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
    incident.assert_in_time(Duration::from_millis(700));
}

/// An authority, and a certificate of it for some names, as PEM files in a folder.
pub fn certificates(folder: &Path, names: &[&str]) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(|name| (*name).to_string()).collect();
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
    fs::write(folder.join("ca.pem"), authority.pem()).unwrap();
    fs::write(folder.join("cert.pem"), certificate.pem()).unwrap();
    fs::write(folder.join("key.pem"), key.serialize_pem()).unwrap();
    fs::write(folder.join("token"), "a long secret\n").unwrap();
}

/// Settings of a cluster collector with TLS and a token; the files are in `folder`.
pub fn secured(job: Job, folder: &Path) -> Job {
    let path = |name: &str| folder.join(name).display().to_string();
    job.with("XPU_TIMER_CLUSTER_CERT_FILE", &path("cert.pem"))
        .with("XPU_TIMER_CLUSTER_KEY_FILE", &path("key.pem"))
        .with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &path("token"))
        .with("XPU_TIMER_COLLECTOR_CA_FILE", &path("ca.pem"))
}

fn run(command: &mut Command) -> (i32, String) {
    let output = Process::spawn(command).wait(PATIENCE);
    (output.code(), output.stderr)
}

#[test]
fn beyond_loopback_it_listens_with_tls_and_a_token_only() {
    let job = Job::new();
    let mut command = job.command(artifacts().bin("xpu_timer_collector"));
    let (code, stderr) = run(command.args(["cluster", "--listen", "0.0.0.0:0"]));
    assert!(
        code == 1 && stderr.contains("is not a loopback address, so TLS and a token are required"),
        "{code} {stderr}"
    );
    let job = job.with("XPU_TIMER_COLLECTOR_TOKEN_FILE", "/nowhere/token");
    let (code, stderr) = run(job.command(artifacts().bin("xpu_timer_collector")).arg("cluster"));
    assert!(code == 1 && stderr.contains("/nowhere/token"), "{code} {stderr}");
    // A node sends nothing in plain text to another machine either.
    let node = Job::new().with("XPU_TIMER_COLLECTOR", "http://192.0.2.1:18890");
    let process = crate::collector::fake::collector(&node, &[]);
    wait_until(PATIENCE, "it says so", || process.stderr().contains("plain text is allowed on loopback only"));
    let problems = node.status().expect("/status")["problems"].to_string();
    assert!(problems.contains("this node works alone"), "{problems}");
}

#[test]
fn only_holders_of_the_token_can_join_and_read() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["localhost"]);
    let mut cluster = Cluster::with(secured(Job::new(), folder.path()), "https", "127.0.0.1");
    cluster.start();
    let mut a = Node::on(secured(cluster.node_job("node-a"), folder.path()));
    a.add_ranks("safe", 0, 1, 1);
    wait_until(PATIENCE, "the node joins", || cluster.log().contains("node node-a joined"));

    fs::write(folder.path().join("wrong"), "a long secre7").unwrap();
    let wrong = folder.path().join("wrong").display().to_string();
    let thief =
        Node::on(secured(cluster.node_job("thief"), folder.path()).with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &wrong));
    thief.wait_log("the token is wrong or missing");
    // A node that trusts another authority does not even send its token.
    let other = tempfile::tempdir().unwrap();
    certificates(other.path(), &["localhost"]);
    let wary = Node::on(
        secured(cluster.node_job("wary"), folder.path())
            .with("XPU_TIMER_COLLECTOR_CA_FILE", &other.path().join("ca.pem").display().to_string()),
    );
    wary.wait_log("invalid peer certificate");
    assert!(!cluster.log().contains("node thief") && !cluster.log().contains("node wary"), "{}", cluster.log());

    a.hooks[0].hang(3);
    let url = cluster.url();
    let incidents = |job: &Job, what: &str| {
        let mut command = job.command(artifacts().bin("xpu_timer_collector"));
        Process::spawn(command.args(["incidents", what, "--url", &url])).wait(PATIENCE)
    };
    let reader = secured(Job::new(), folder.path());
    let mut list = String::new();
    wait_until(Duration::from_secs(60), "the incident is listed", || {
        list = incidents(&reader, "list").stdout;
        list.contains(" safe ")
    });
    let stranger = secured(Job::new(), folder.path()).with("XPU_TIMER_COLLECTOR_TOKEN_FILE", &wrong);
    let refused = incidents(&stranger, "list");
    assert!(refused.code() == 1 && refused.stderr.contains("the token is wrong or missing"), "{refused:?}");
    assert_eq!(incidents(&stranger.with("XPU_TIMER_COLLECTOR_TOKEN_FILE", ""), "list").code(), 1);
}
