//! The cluster role: several node collectors with fake hooks, one cluster collector, and everything
//! that can happen between them.

mod membership;
pub mod network;
mod slow;
mod trouble;

use std::{fs, net::TcpListener, path::PathBuf, time::Duration};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use xpu_timer_proto::{
    Message as _,
    timeline::PENDING,
    v1::{Evidence, Presence},
};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, artifacts, http, wait_until};

use crate::collector::fake::{FakeHook, collector};

/// A cluster collector for one test.
pub struct Cluster {
    pub job: Job,
    process: Option<Process>,
    pub port: u16,
    scheme: &'static str,
    address: String,
}

impl Cluster {
    pub fn new() -> Self {
        let mut cluster = Self::with(Job::new(), "http", "127.0.0.1");
        cluster.start();
        cluster
    }

    /// Not started yet; `job` says how.
    fn with(job: Job, scheme: &'static str, address: &str) -> Self {
        // A free port of this namespace; in another one all are free.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Cluster { job, process: None, port, scheme, address: address.into() }
    }

    pub fn url(&self) -> String {
        // The name in the certificate of the tests on loopback.
        let host = if self.address == "127.0.0.1" { "localhost" } else { &self.address };
        format!("{}://{host}:{}", self.scheme, self.port)
    }

    fn start(&mut self) {
        let mut command = self.job.command(artifacts().bin("xpu_timer_collector"));
        command.args(["cluster", "--listen", &format!("{}:{}", self.address, self.port)]);
        let process = Process::spawn(&mut command);
        wait_until(PATIENCE, "the cluster collector listens", || process.stderr().contains("listening on"));
        self.process = Some(process);
    }

    /// Settings of a node collector that joins it.
    pub fn node_job(&self, name: &str) -> Job {
        Job::new().with("XPU_TIMER_COLLECTOR", &self.url()).with("POD_NAME", name)
    }

    /// Like [`Cluster::wait_incident`], but reads the folder only.
    fn wait_finished(&self, count: usize) -> Incident {
        let start = std::time::Instant::now();
        while self.job.finished_incidents().len() < count {
            assert!(start.elapsed() < PATIENCE, "incident {count} has no report\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.job.finished_incidents().swap_remove(count - 1)
    }

    fn kill(&mut self) {
        let process = self.process.take().expect("it runs");
        process.signal(Signal::SIGKILL);
        drop(process.wait(PATIENCE));
    }

    fn status(&self) -> Value {
        let (_, body) = http("GET", self.port, "/status").unwrap_or_default();
        serde_json::from_str(&body).unwrap_or_default()
    }

    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::stderr).unwrap_or_default()
    }

    fn wait(&self, what: &str, mut test: impl FnMut(&Value) -> bool) {
        let mut last = Value::Null;
        let start = std::time::Instant::now();
        while start.elapsed() < PATIENCE {
            last = self.status();
            if test(&last) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{what}: {last:#}\n{}", self.log());
    }

    /// Waits until a job has this number of ranks.
    pub fn wait_ranks(&self, job: &str, ranks: u64) {
        self.wait(&format!("{ranks} ranks of {job}"), |status| {
            let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
            jobs.iter().any(|one| one["job"] == job && one["ranks"] == ranks && one["alive"] == true)
        });
    }

    fn wait_state(&self, state: &str) {
        self.wait(&format!("an incident is {state}"), |status| {
            status["incidents"].as_array().is_some_and(|list| list.iter().any(|one| one["state"] == state))
        });
    }

    pub fn wait_incident(&self, count: usize) -> Incident {
        self.wait(&format!("incident {count} has its report"), |_| self.job.finished_incidents().len() >= count);
        self.job.finished_incidents().swap_remove(count - 1)
    }
}

/// A node collector with fake hooks.
struct Node {
    job: Job,
    process: Option<Process>,
    hooks: Vec<FakeHook>,
    /// Between the two samples, for ranks that are added.
    interval_ms: u64,
    /// The node's name, as the ranks report it.
    rank_name: Option<String>,
}

impl Node {
    fn new(cluster: &Cluster, name: &str) -> Self {
        Self::on(cluster.node_job(name))
    }

    fn on(job: Job) -> Self {
        let process = Some(collector(&job, &[]));
        Node { job, process, hooks: Vec::new(), interval_ms: 700, rank_name: None }
    }

    /// A node with the ranks `first..first + count` of a job of `world` ranks.
    fn with_ranks(cluster: &Cluster, name: &str, job: &str, first: i32, count: i32, world: u32) -> Self {
        let mut node = Self::new(cluster, name);
        node.add_ranks(job, first, count, world);
        node
    }

    /// A node with one rank, after a change of what the rank says.
    fn with_rank(
        cluster: &Cluster,
        name: &str,
        (job, rank, world): (&str, i32, u32),
        change: impl FnOnce(&mut FakeHook),
    ) -> Self {
        let mut node = Self::new(cluster, name);
        let mut hook = FakeHook::start(&node.job, job, rank, world);
        change(&mut hook);
        hook.join(&node.job);
        node.hooks.push(hook);
        node
    }

    fn add_ranks(&mut self, job: &str, first: i32, count: i32, world: u32) {
        for local in 0..count {
            let mut hook = FakeHook::start(&self.job, job, first + local, world);
            let info = hook.hello.rank.as_mut().expect("a rank");
            (info.local_rank, info.local_world_size) = (local, count as u32);
            info.node.clone_from(self.rank_name.as_ref().unwrap_or(&String::new()));
            hook.hello.sample_interval_ms = self.interval_ms;
            hook.join(&self.job);
            self.hooks.push(hook);
        }
    }

    fn restart(&mut self) {
        let process = self.process.take().expect("it runs");
        process.signal(Signal::SIGKILL);
        drop(process.wait(PATIENCE));
        self.process = Some(collector(&self.job, &[]));
        for hook in &mut self.hooks {
            hook.tell("closed");
            hook.join(&self.job);
        }
    }

    fn wait_log(&self, text: &str) {
        let start = std::time::Instant::now();
        while !self.log().contains(text) {
            assert!(start.elapsed() < PATIENCE, "{text:?} is not in the log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn resolve_all(&mut self) {
        for hook in &mut self.hooks {
            hook.resolve(3);
        }
    }

    fn log(&self) -> String {
        self.process.as_ref().map(Process::stderr).unwrap_or_default()
    }
}

fn evidence(incident: &Incident) -> Evidence {
    Evidence::decode(&fs::read(incident.path.join("evidence.bin")).expect("evidence.bin")[..]).expect("an Evidence")
}

fn files(incident: &Incident) -> Vec<String> {
    let entries = fs::read_dir(&incident.path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.filter(|name| !name.starts_with('.')).collect();
    names.sort();
    names
}

fn text(path: PathBuf) -> String {
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_hang_on_one_node_is_one_incident_of_the_cluster() {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "wide", 0, 2, 5);
    let b = Node::with_ranks(&cluster, "node-b", "wide", 2, 2, 5);
    cluster.wait_ranks("wide", 4);
    a.hooks[1].hang(7);
    let incident = cluster.wait_incident(1);

    let all = evidence(&incident);
    assert_eq!((all.world_size, all.job.as_str(), all.trigger.as_ref().expect("a trigger").rank), (5, "wide", 1));
    let ranks: Vec<(u32, &str, Presence)> =
        all.ranks.iter().map(|rank| (rank.rank, rank.node.as_str(), rank.presence())).collect();
    let here = Presence::Present;
    assert_eq!(ranks, [(0, "node-a", here), (1, "node-a", here), (2, "node-b", here), (3, "node-b", here)]);
    assert!(all.ranks.iter().all(|rank| rank.host.as_ref().is_some_and(|host| host.stack) && rank.dump.is_none()));
    assert_eq!(all.ranks[1].flight.as_ref().expect("a flight record").operations.len(), 1);
    let names = files(&incident);
    for name in
        ["00000-00005.stacktrace", "00003-00005.stacktrace", "stacks.bin", "verdict.txt", "py_stack.svg", "report.html"]
    {
        assert!(names.iter().any(|one| one == name), "{name} is not in {names:?}\n{}", cluster.log());
    }
    let python = text(incident.path.join("py_stack"));
    assert!(python.lines().any(|line| line.contains("@0-3|4")), "all ranks are in one place:\n{python}");
    // No node has rank 4.
    assert!(incident.verdict["evidence"].to_string().contains("there is no data from rank 4"), "{}", incident.verdict);
    incident.assert_in_time(Duration::from_millis(700));

    // The nodes show this incident under the same name and with the same verdict.
    let id = incident.verdict["incident"].as_str().expect("an id");
    for node in [&a, &b] {
        wait_until(PATIENCE, "the node knows the verdict", || {
            let status = node.job.status().unwrap_or_default();
            status["incidents"][0]["incident"] == id
                && status["incidents"][0]["sentence"] == incident.verdict["sentence"]
        });
        let page = crate::collector::fake::metrics(&node.job);
        assert!(page.contains("XPU_TIMER_COMMON_HANG{") && page.contains("} 1\n"), "the job hangs on every node");
    }
    a.hooks[1].resolve(7);
    cluster.wait_state("resolved");
    for node in [&a, &b] {
        wait_until(PATIENCE, "it is over on the node", || {
            node.job.status().unwrap_or_default()["incidents"][0]["state"] == "resolved"
        });
    }
    wait_until(PATIENCE, "the folder says so", || cluster.job.incidents()[0].verdict["status"] == "resolved");
    assert_eq!(cluster.job.incidents().len(), 1);

    a.hooks[0].hang(9);
    let second = cluster.wait_incident(2);
    assert_ne!(second.path, incident.path);
    let (code, page) = http("GET", cluster.port, &format!("/incidents/{id}/report.html")).expect("an answer");
    assert!(code == 200 && page.contains("<html"), "{code}");
    let (code, list) = http("GET", cluster.port, "/incidents").expect("an answer");
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!((code, &list[0]["status"], &list[1]["status"]), (200, &json!("resolved"), &json!("open")));
}

#[test]
fn two_jobs_stay_separate_while_one_grows_shrinks_and_restarts() {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "grows", 0, 1, 2);
    let mut b = Node::with_ranks(&cluster, "node-b", "grows", 1, 1, 2);
    let mut c = Node::with_ranks(&cluster, "node-c", "other", 0, 2, 2);
    cluster.wait_ranks("grows", 2);
    cluster.wait_ranks("other", 2);
    c.hooks[0].hang(3);
    let other = cluster.wait_incident(1);
    assert_eq!((&other.verdict["job"], evidence(&other).ranks.len()), (&json!("other"), 2));
    assert!(a.job.incidents().is_empty() && b.job.incidents().is_empty(), "the other job is not disturbed");

    // Scaled up: attempt 1 has three ranks on three nodes, and rank 0 is another process.
    let again = |node: &mut Node, rank: i32| {
        for hook in &mut node.hooks {
            hook.goodbye();
        }
        let mut hook = FakeHook::start(&node.job, "grows", rank, 3);
        let info = hook.hello.rank.as_mut().expect("a rank");
        (info.attempt, info.local_rank, info.local_world_size) = (1, 0, 1);
        hook.join(&node.job);
        node.hooks.push(hook);
    };
    again(&mut a, 1);
    again(&mut b, 2);
    c.resolve_all();
    let mut hook = FakeHook::start(&c.job, "grows", 0, 3);
    let info = hook.hello.rank.as_mut().expect("a rank");
    (info.attempt, info.local_rank, info.local_world_size) = (1, 0, 1);
    hook.join(&c.job);
    c.hooks.push(hook);
    cluster.wait("attempt 1 is whole", |status| {
        let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
        jobs.iter().any(|one| one["job"] == "grows" && one["attempt"] == 1 && one["ranks"] == 3)
    });
    b.hooks[1].hang(5);
    let grown = cluster.wait_incident(2);
    let all = evidence(&grown);
    assert_eq!((all.world_size, all.attempt, all.job.as_str()), (3, 1, "grows"));
    let ranks: Vec<(u32, &str)> = all.ranks.iter().map(|rank| (rank.rank, rank.node.as_str())).collect();
    assert_eq!(ranks, [(0, "node-c"), (1, "node-a"), (2, "node-b")]);

    // Scaled down to one rank.
    for hook in a.hooks.iter_mut().chain(&mut b.hooks).skip(1).step_by(2) {
        hook.goodbye();
    }
    c.hooks[2].goodbye();
    cluster.wait("its end ends the incident", |status| status["incidents"][1]["state"] == "ended");
    let mut alone = FakeHook::start(&a.job, "grows", 0, 1);
    let info = alone.hello.rank.as_mut().expect("a rank");
    (info.attempt, info.local_rank, info.local_world_size) = (2, 0, 1);
    alone.join(&a.job);
    a.hooks.push(alone);
    cluster.wait("attempt 2 is whole", |status| {
        let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
        jobs.iter().any(|one| one["job"] == "grows" && one["attempt"] == 2 && one["ranks"] == 1)
    });
    a.hooks[2].hang(6);
    let all = evidence(&cluster.wait_incident(3));
    assert_eq!((all.world_size, all.attempt, all.ranks.len()), (1, 2, 1));
}

#[test]
fn a_node_that_dies_is_named_and_the_others_are_judged() {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "dies", 0, 2, 4);
    let mut b = Node::with_ranks(&cluster, "node-b", "dies", 2, 2, 4);
    cluster.wait_ranks("dies", 4);
    // The machine is gone: collector and ranks at once.
    b.process.take().expect("it runs").signal(Signal::SIGKILL);
    for hook in &mut b.hooks {
        hook.kill_if_alive();
    }
    cluster.wait("the node is gone", |status| {
        status["nodes"].as_array().is_some_and(|nodes| nodes.iter().any(|node| node["joined"] == false))
    });
    a.hooks[0].hang(4);
    let incident = cluster.wait_incident(1);
    let errors = incident.verdict["errors"].to_string();
    assert!(errors.contains("node node-b (ranks 2-3) delivered nothing: its connection was lost"), "{errors}");
    let all = evidence(&incident);
    let lost: Vec<(u32, Presence, &str)> =
        all.ranks.iter().skip(2).map(|rank| (rank.rank, rank.presence(), rank.node.as_str())).collect();
    assert_eq!(lost, [(2, Presence::Missing, "node-b"), (3, Presence::Missing, "node-b")]);
    assert!(
        incident.verdict["ranks"].to_string().contains("its node node-b delivered nothing"),
        "{}",
        incident.verdict
    );
}

#[test]
fn a_restarted_cluster_collector_goes_on_with_the_incident() {
    let mut cluster = Cluster::new();
    let mut nodes: Vec<Node> = ["node-a", "node-b"]
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let mut node = Node::new(&cluster, name);
            for local in 0..2 {
                let mut hook = FakeHook::start(&node.job, "again", index as i32 * 2 + local, 4);
                // Long enough for a restart between the two samples.
                hook.hello.sample_interval_ms = 6000;
                hook.join(&node.job);
                node.hooks.push(hook);
            }
            node
        })
        .collect();
    cluster.wait_ranks("again", 4);
    nodes[0].hooks[0].hang(7);
    cluster.wait_state("open");
    for node in &nodes {
        wait_until(PATIENCE, "the first sample", || node.log().contains("the first sample took"));
    }
    cluster.kill();
    cluster.start();
    let incident = cluster.wait_incident(1);
    let all = evidence(&incident);
    assert_eq!(
        all.ranks.iter().map(|rank| (rank.rank, rank.presence())).collect::<Vec<_>>(),
        [(0, Presence::Present), (1, Presence::Present), (2, Presence::Present), (3, Presence::Present)]
    );
    assert!(all.ranks.iter().all(|rank| rank.host.as_ref().is_some_and(|host| host.stack)), "{}", cluster.log());
    assert_eq!(incident.verdict["errors"], json!([]), "{}", cluster.log());
    assert_eq!(cluster.job.incidents().len(), 1);

    // It restarts once more when the verdict exists and the hang lasts.
    cluster.kill();
    cluster.start();
    cluster.wait_ranks("again", 4);
    cluster.wait_state("dumped");
    nodes[1].hooks[1].hang(9);
    nodes[0].hooks[0].resolve(7);
    nodes[1].hooks[1].resolve(9);
    cluster.wait("it is over", |_| cluster.job.incidents()[0].verdict["status"] == "resolved");
    assert_eq!(cluster.job.incidents().len(), 1, "{}", cluster.log());
}

#[test]
fn a_restarted_node_collector_takes_its_dump_again() {
    let cluster = Cluster::new();
    let mut a = Node::new(&cluster, "node-a");
    let mut b = Node::new(&cluster, "node-b");
    for (node, rank) in [(&mut a, 0), (&mut b, 1)] {
        let mut hook = FakeHook::start(&node.job, "node", rank, 2);
        hook.hello.sample_interval_ms = 6000;
        hook.join(&node.job);
        node.hooks.push(hook);
    }
    cluster.wait_ranks("node", 2);
    a.hooks[0].hang(7);
    wait_until(PATIENCE, "node-b is asked", || b.log().contains("the first sample took"));
    b.restart();
    let incident = cluster.wait_incident(1);
    let all = evidence(&incident);
    assert_eq!(all.ranks.len(), 2);
    for rank in &all.ranks {
        assert!(rank.host.as_ref().is_some_and(|host| host.stack) && rank.flight.is_some(), "{}", cluster.log());
    }
    assert_eq!(incident.verdict["errors"], json!([]), "{}", cluster.log());
}

#[test]
fn a_node_speaks_for_its_own_ranks_only() {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "mine", 0, 2, 2);
    cluster.wait_ranks("mine", 2);
    let _thief = Node::with_ranks(&cluster, "node-x", "mine", 1, 1, 2);
    wait_until(PATIENCE, "it is refused", || {
        cluster.log().contains("node node-x claims ranks 1 of job mine, which node node-a already has")
    });
    a.hooks[0].hang(3);
    let all = evidence(&cluster.wait_incident(1));
    assert!(all.ranks.iter().all(|rank| rank.node == "node-a") && all.ranks.len() == 2);
    // The first node goes, and its rank moves.
    a.process.take().expect("it runs").signal(Signal::SIGKILL);
    cluster.wait("the rank is the other node's", |status| {
        status["nodes"].as_array().is_some_and(|nodes| nodes.iter().any(|node| node["joined"] == false))
    });
}

#[test]
fn a_node_without_its_cluster_works_alone() {
    let mut cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "alone", 0, 2, 2);
    cluster.wait_ranks("alone", 2);
    // Stopped, not ended: the connection stays open without answers.
    cluster.process.as_ref().expect("it runs").signal(Signal::SIGSTOP);
    a.hooks[0].hang(3);
    let incident = a.job.wait_incident(1, PATIENCE);
    assert!(files(&incident).contains(&"report.html".to_string()), "as without a cluster");
    assert!(a.log().contains("this node works alone"));
    cluster.process.as_ref().expect("it runs").signal(Signal::SIGCONT);
    // It comes back, and the hang that lasts is its incident as well.
    cluster.wait_state("dumped");
    cluster.kill();
    a.hooks[0].resolve(3);
    wait_until(PATIENCE, "it is over", || a.job.incidents()[0].verdict["status"] == "resolved");
    a.hooks[1].hang(8);
    let _ = a.job.wait_incident(2, PATIENCE);
}

#[test]
fn the_job_is_idle_only_when_all_nodes_are() {
    let cluster = Cluster::new();
    let mut nodes: Vec<Node> = (0..2)
        .map(|rank| {
            Node::with_rank(&cluster, &format!("node-{rank}"), ("idle", rank, 2), |hook| {
                hook.hello.idle_timeout_ms = 13_000;
                hook.tell("launch on");
            })
        })
        .collect();
    cluster.wait_ranks("idle", 2);
    nodes[0].hooks[0].tell("launch off");
    wait_until(PATIENCE, "the cluster knows better", || {
        nodes[0].log().contains("the job is not idle: it launches on node node-1")
    });
    assert!(cluster.job.incidents().is_empty() && nodes[0].job.incidents().is_empty());
    nodes[1].hooks[0].tell("launch off");
    cluster.wait("the cluster says that it is idle", |status| status["idle"][0]["job"] == "idle");
    let is_idle = |node: &Node| node.job.status().is_ok_and(|status| status["idle"][0]["job"] == "idle");
    wait_until(PATIENCE, "so does each node", || nodes.iter().all(is_idle));
    let captures = |nodes: &[Node]| -> Vec<usize> {
        let jobs = nodes.iter().map(|node| &node.job).chain([&cluster.job]);
        jobs.map(|job| job.mild_captures().len()).collect()
    };
    wait_until(PATIENCE, "the captures are kept", || captures(&nodes) == [1, 1, 1]);
    let are_incidents = nodes.iter().any(|node| !node.job.incidents().is_empty());
    assert!(!are_incidents && cluster.job.incidents().is_empty(), "an idle job is not an incident");
    assert!(!cluster.job.dir.join("timeline/latest").exists());
    assert_eq!(cluster.status()["incidents"], json!([]));
    // The reader of a hang sees how the job looked before.
    nodes[1].hooks[0].hang(3);
    let incident = cluster.wait_incident(1);
    wait_until(PATIENCE, "the captures are incidents", || captures(&nodes) == [0, 0, 0]);
    let promoted = cluster.job.promoted_captures();
    assert_eq!(incident.verdict["earlier"], json!([promoted[0].verdict["incident"]]), "{}", cluster.log());
}

#[test]
fn a_timeout_that_shows_no_hang_is_no_incident_on_any_node() {
    let cluster = Cluster::new();
    let mut nodes: Vec<Node> = (0..2)
        .map(|rank| {
            let change = |hook: &mut FakeHook| hook.hello.hang_timeout_ms = 1000;
            Node::with_rank(&cluster, &format!("node-{rank}"), ("busy", rank, 2), change)
        })
        .collect();
    cluster.wait_ranks("busy", 2);
    nodes[0].hooks[0].hang(1);
    nodes[0].hooks[0].keep_young(1);
    // The job is examined again while the operation is pending.
    let captures = || nodes.iter().map(|node| &node.job).chain([&cluster.job]).map(|job| job.mild_captures().len());
    let start = std::time::Instant::now();
    while captures().any(|count| count < 2) {
        let counts: Vec<usize> = captures().collect();
        assert!(start.elapsed() < PATIENCE, "{counts:?}\n{}\n{}", cluster.log(), nodes[0].log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let are_incidents = nodes.iter().any(|node| !node.job.incidents().is_empty());
    assert!(!are_incidents && cluster.job.incidents().is_empty(), "{}", cluster.log());
    assert!(!cluster.job.dir.join("timeline/latest").exists());
    let (_, page) = http("GET", cluster.port, "/metrics").expect("an answer");
    assert!(page.contains("xpu_timer_incidents_total 0\n"), "{page}");
    // It makes no progress any more.
    nodes[0].hooks[0].grow_old(60);
    let incident = cluster.wait_incident(1);
    assert_ne!(incident.verdict["hang"], "none", "{}", incident.verdict);
    let earlier = incident.verdict["earlier"].as_array().map_or(0, Vec::len);
    assert!(earlier >= 2, "{}\n{}", incident.verdict, cluster.log());
    wait_until(PATIENCE, "each node has promoted its captures", || {
        nodes.iter().all(|node| node.job.mild_captures().is_empty() && !node.job.promoted_captures().is_empty())
    });
    let known = evidence(&cluster.job.promoted_captures()[0]).ranks;
    assert!(known.len() == 2 && known.iter().all(|rank| rank.presence() == Presence::Present), "{}", cluster.log());
    for node in &nodes {
        wait_until(PATIENCE, "the node knows the verdict on the hang", || {
            node.job.status().unwrap_or_default()["incidents"][0]["cause"] == incident.verdict["cause"]
        });
    }
    nodes[0].hooks[0].resolve(1);
    cluster.wait_state("resolved");
    assert_eq!(cluster.job.incidents().len(), 1, "it is one incident");
}

#[test]
fn dumps_by_hand_and_the_incidents_command() {
    let cluster = Cluster::new();
    let _a = Node::with_ranks(&cluster, "node-a", "hand", 0, 1, 2);
    let _b = Node::with_ranks(&cluster, "node-b", "hand", 1, 1, 2);
    cluster.wait_ranks("hand", 2);
    let command = |arguments: &[&str]| {
        let mut command = cluster.job.command(artifacts().bin("xpu_timer_collector"));
        command.arg("incidents").args(["--url", &cluster.url()]).args(arguments);
        Process::spawn(&mut command).wait(PATIENCE)
    };
    assert_eq!(command(&["list"]).stdout, "no incidents\n");
    let (code, answer) = http("POST", cluster.port, "/dump?job=hand").expect("an answer");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(code, 200, "{answer}");
    let id = answer["incident"].as_str().expect("an id");
    assert_eq!(http("POST", cluster.port, "/dump?job=nobody").expect("an answer").0, 404);

    let list = command(&["list"]);
    let lines: Vec<&str> = list.stdout.lines().collect();
    assert!(list.code() == 0 && lines.len() == 3 && lines[0].starts_with("INCIDENT "), "{list:?}");
    assert!(lines[1].starts_with(id) && lines[1].contains(" hand "), "{list:?}");
    let sentence = text(cluster.job.dir.join(format!("timeline/incident-{id}/verdict.json")));
    let sentence: Value = serde_json::from_str(&sentence).expect("JSON");
    assert_eq!(lines[2].trim_start(), sentence["sentence"], "output to a pipe is not truncated");
    let shown = command(&["show", id]);
    assert_eq!(shown.stdout, text(cluster.job.dir.join(format!("timeline/incident-{id}/verdict.txt"))));
    let pending = cluster.job.dir.join(format!("timeline/incident-{id}")).join(PENDING);
    wait_until(PATIENCE, "the report has the timelines", || !pending.exists());
    let to = cluster.job.dir.join("copy");
    let fetched = command(&["fetch", id, to.to_str().expect("UTF-8")]);
    assert_eq!(fetched.code(), 0, "{fetched:?}");
    let (copy, own) = (to.join(format!("incident-{id}")), cluster.job.dir.join(format!("timeline/incident-{id}")));
    assert_eq!(fetched.stdout.trim(), copy.display().to_string());
    for name in ["verdict.json", "report.html", "00001-00002.stacktrace", "stacks.bin"] {
        assert_eq!(fs::read(copy.join(name)).expect(name), fs::read(own.join(name)).expect(name), "{name}");
    }
    let one = cluster.job.dir.join("one");
    let fetched = command(&["fetch", id, one.to_str().expect("UTF-8"), "--rank", "1"]);
    assert_eq!(fetched.code(), 0, "{fetched:?}");
    let files = fs::read_dir(one.join(format!("incident-{id}"))).expect("a folder").flatten();
    assert_eq!(files.map(|file| file.file_name()).collect::<Vec<_>>(), ["00001-00002.stacktrace"]);
    let missing = command(&["fetch", id, one.to_str().expect("UTF-8"), "--rank", "1", "--rank=7"]);
    assert!(missing.code() == 1 && missing.stderr.contains("no dump of rank 7"), "{missing:?}");
    assert!(missing.stderr.contains("those of 2 ranks: 0-1;"), "{missing:?}");
    let none = command(&["show", "20200101T000000Z-00000000"]);
    assert!(none.code() == 1 && none.stderr.contains("no such incident"), "{none:?}");
    assert_eq!(command(&["show", "../etc"]).code(), 1);
    assert_eq!(command(&["steal"]).code(), 2);
}

/// A server that answers each request with the next of these codes. Returns its URL, and a channel
/// with what was posted.
fn webhook(codes: Vec<u16>) -> (String, std::sync::mpsc::Receiver<Value>) {
    use std::io::{BufRead, BufReader, Read, Write};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let (sender, posted) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for code in codes {
            let Ok((stream, _)) = listener.accept() else { return };
            let mut reader = BufReader::new(stream);
            let (mut line, mut bytes) = (String::new(), 0);
            while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
                let header = line.to_ascii_lowercase();
                if let Some(length) = header.strip_prefix("content-length:") {
                    bytes = length.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; bytes];
            reader.read_exact(&mut body).unwrap();
            let answer = format!("HTTP/1.1 {code} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            reader.get_mut().write_all(answer.as_bytes()).unwrap();
            sender.send(serde_json::from_slice(&body).unwrap()).unwrap();
        }
    });
    (url, posted)
}

#[test]
fn a_verdict_is_posted_once_and_again_when_the_service_fails() {
    let (url, posted) = webhook(vec![503, 200]);
    let mut cluster = Cluster::with(Job::new().with("XPU_TIMER_WEBHOOK", &url), "http", "127.0.0.1");
    cluster.start();
    let mut node = Node::on(cluster.node_job("node-a").with("XPU_TIMER_WEBHOOK", &url));
    node.add_ranks("post", 0, 2, 2);
    cluster.wait_ranks("post", 2);
    node.hooks[0].hang(3);
    let incident = cluster.wait_incident(1);
    for _ in 0..2 {
        let body = posted.recv_timeout(PATIENCE).expect("it is posted");
        assert_eq!(body["sentence"], incident.verdict["sentence"]);
        assert_eq!((&body["job"], &body["path"]), (&json!("post"), &json!(incident.path)));
    }
    // The verdict is the cluster's, so the node has nothing to post.
    assert!(posted.try_recv().is_err());
}

#[test]
fn old_incidents_are_removed_on_both_sides() {
    let mut cluster = Cluster::with(Job::new().with("XPU_TIMER_KEEP_INCIDENTS", "1"), "http", "127.0.0.1");
    cluster.start();
    let mut node = Node::on(cluster.node_job("node-a").with("XPU_TIMER_KEEP_INCIDENTS", "1"));
    node.add_ranks("keep", 0, 1, 1);
    cluster.wait_ranks("keep", 1);
    let folders = |job: &Job| {
        let entries = fs::read_dir(job.dir.join("timeline")).unwrap().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("incident-")).count()
    };
    for ticket in 1..=3 {
        node.hooks[0].hang(ticket);
        cluster.wait("it is dumped", |status| {
            let open = |one: &Value| one["state"] == "dumped";
            status["incidents"].as_array().is_some_and(|list| list.len() as u64 == ticket && list.iter().any(open))
        });
        node.hooks[0].resolve(ticket);
        cluster.wait("it is over", |status| {
            status["incidents"].as_array().is_some_and(|list| list.iter().all(|one| one["state"] == "resolved"))
        });
        wait_until(PATIENCE, "it is over on the node", || {
            let status = node.job.status().unwrap_or_default();
            status["incidents"].as_array().is_some_and(|list| list.iter().all(|one| one["state"] == "resolved"))
        });
    }
    // Incidents that were open when the last one was written may be kept with it.
    wait_until(PATIENCE, "the oldest are gone", || folders(&cluster.job) <= 2 && folders(&node.job) <= 2);
}

#[test]
fn two_jobs_of_a_node_may_use_different_cluster_collectors() {
    let clusters = [Cluster::new(), Cluster::new()];
    let node = Job::new();
    let mut ranks = Vec::new();
    let mut sockets = Vec::new();
    for (name, cluster) in ["first", "second"].into_iter().zip(&clusters) {
        let mut command = node.launch(xpu_timer_tests::python());
        let examples = xpu_timer_tests::tree().join("tests/examples");
        command.arg(examples.join("run_ranks.py")).arg("--nproc=2").arg(examples.join("train.py"));
        command.env("XPU_TIMER_COLLECTOR", cluster.url()).env("XPU_TIMER_JOB", name);
        ranks.push(Process::spawn(&mut command));
        cluster.wait_ranks(name, 2);
        let mut shows = node.launch("sh");
        shows.args(["-c", "echo $XPU_TIMER_SOCKET"]).env("XPU_TIMER_COLLECTOR", cluster.url());
        sockets.push(Process::spawn(&mut shows).wait(PATIENCE).stdout);
    }
    assert_ne!(sockets[0], sockets[1]);
    // A job without settings of its own uses the running collector.
    let output = Process::spawn(node.launch("sh").args(["-c", "echo $XPU_TIMER_SOCKET"])).wait(PATIENCE);
    assert_eq!((output.stdout.as_str(), output.stderr.as_str()), (sockets[0].as_str(), ""));
    for (cluster, other) in clusters.iter().zip(["second", "first"]) {
        let jobs = cluster.status()["jobs"].as_array().cloned().unwrap_or_default();
        assert!(jobs.iter().all(|job| job["job"] != other), "{jobs:?}");
    }
}
