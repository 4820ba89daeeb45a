//! The cluster role: several node collectors with fake hooks, one cluster collector, and everything that can happen between them.

use std::{fs, net::TcpListener, path::PathBuf, time::Duration};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use xpu_timer_proto::{
    Message as _,
    v1::{Evidence, Presence},
};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, artifacts, http, wait_until};

use crate::collector::fake::{FakeHook, collector};

/// A cluster collector of a test's own.
struct Cluster {
    job: Job,
    process: Option<Process>,
    port: u16,
}

impl Cluster {
    fn new() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut cluster = Cluster { job: Job::new(), process: None, port };
        cluster.start();
        cluster
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn start(&mut self) {
        let mut command = self.job.command(artifacts().bin("xpu_timer_collector"));
        let process = Process::spawn(command.args(["cluster", "--listen", &format!("127.0.0.1:{}", self.port)]));
        wait_until(PATIENCE, "the cluster collector listens", || {
            http("GET", self.port, "/health").is_ok_and(|(code, _)| code == 200)
        });
        self.process = Some(process);
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

    fn log(&self) -> String {
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

    /// Waits until a job has so many ranks.
    fn wait_ranks(&self, job: &str, ranks: u64) {
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

    fn wait_incident(&self, count: usize) -> Incident {
        self.wait(&format!("incident {count} has its report"), |_| self.job.finished_incidents().len() >= count);
        self.job.finished_incidents().swap_remove(count - 1)
    }
}

/// A node collector with fake hooks.
struct Node {
    job: Job,
    process: Option<Process>,
    hooks: Vec<FakeHook>,
}

impl Node {
    fn new(cluster: &Cluster, name: &str) -> Self {
        let job = Job::new().with("XPU_TIMER_COLLECTOR", &cluster.url()).with("POD_NAME", name);
        let process = Some(collector(&job, &[]));
        Node { job, process, hooks: Vec::new() }
    }

    /// A node with the ranks `first..first + count` of a job of `world` ranks.
    fn with_ranks(cluster: &Cluster, name: &str, job: &str, first: i32, count: i32, world: u32) -> Self {
        let mut node = Self::new(cluster, name);
        node.add_ranks(job, first, count, world);
        node
    }

    fn add_ranks(&mut self, job: &str, first: i32, count: i32, world: u32) {
        for local in 0..count {
            let mut hook = FakeHook::start(&self.job, job, first + local, world);
            let info = hook.hello.rank.as_mut().expect("a rank");
            (info.local_rank, info.local_world_size) = (local, count as u32);
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
fn a_hang_on_one_node_is_one_incident_of_all() {
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
    for name in ["00000-00005.stacktrace", "00003-00005.stacktrace", "stacks.bin", "verdict.txt", "py_stack.svg", "report.html"] {
        assert!(names.iter().any(|one| one == name), "{name} is not in {names:?}\n{}", cluster.log());
    }
    let python = text(incident.path.join("py_stack"));
    assert!(python.lines().any(|line| line.contains("@0-3|4")), "all ranks stand at one place:\n{python}");
    // Rank 4 is no node's.
    assert!(incident.verdict["evidence"].to_string().contains("nothing is known of rank 4"), "{}", incident.verdict);
    let seconds = incident.verdict["seconds_from_timeout"].as_f64().expect("seconds_from_timeout");
    assert!(seconds < 0.7 + 3.0, "sample interval 0.7 s plus 3 s, not {seconds}");

    // The nodes know the same incident by the same name, and its verdict.
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
    assert_eq!(cluster.job.incidents()[0].verdict["status"], "resolved");
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
