//! Trouble around a job-wide incident: ranks that are ended or leave, two jobs on the same nodes,
//! one folder for all, a disk that fills up, a webhook that hangs, a port that is taken, and either
//! role restarted or stopped while parts and files are being sent.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use xpu_timer_proto::{
    Message,
    timeline::PENDING,
    v1::{Evidence, Presence},
};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, artifacts, http, wait_until};

use super::{Cluster, Node, evidence, network::Network, text};
use crate::{
    collector::{Tmpfs, fake::FakeHook},
    timeline::{NOT_HERE, with_slow_timelines},
};

const NAMES: [&str; 3] = ["node-a", "node-b", "node-c"];

/// Three nodes with two ranks each, of one job; `change` is applied to each hook before it says
/// hello.
fn three(cluster: &Cluster, job: &str, change: impl Fn(&mut FakeHook)) -> Vec<Node> {
    let nodes = NAMES.iter().enumerate().map(|(index, name)| {
        let mut node = Node::new(cluster, name);
        for local in 0..2 {
            let mut hook = FakeHook::start(&node.job, job, index as i32 * 2 + local, 6);
            let info = hook.hello.rank.as_mut().expect("a rank");
            (info.local_rank, info.local_world_size) = (local, 2);
            change(&mut hook);
            hook.join(&node.job);
            node.hooks.push(hook);
        }
        node
    });
    let nodes = nodes.collect();
    cluster.wait_ranks(job, 6);
    nodes
}

fn list(cluster: &Cluster) -> Vec<Value> {
    let (_, list) = http("GET", cluster.port, "/incidents").expect("an answer");
    serde_json::from_str(&list).expect("a list")
}

#[test]
fn hang_kill_ends_the_ranks_of_all_nodes_after_the_verdict_of_all() {
    let cluster = Cluster::new();
    let mut nodes = three(&cluster, "kill", |hook| hook.hello.hang_kill = true);
    nodes[1].hooks[0].hang(3);
    let incident = cluster.wait_finished(1);
    let all = evidence(&incident);
    // The dumps were taken before anybody was ended.
    assert!(all.ranks.iter().all(|rank| rank.presence() == Presence::Present), "{}", incident.verdict);
    assert_eq!((all.ranks.len(), &incident.verdict["errors"]), (6, &json!([])));
    for hook in nodes.iter_mut().flat_map(|node| &mut node.hooks) {
        assert!(!hook.wait().success(), "the elastic agent must see a failure");
    }
    cluster.wait_state("ended");
    assert_eq!(cluster.job.incidents().len(), 1, "the deaths of its ranks are not a second incident");
    for node in &nodes {
        assert!(node.log().contains("XPU_TIMER_HANG_KILL ends the ranks of job kill"), "{}", node.log());
    }
}

#[test]
fn two_jobs_over_the_same_nodes_hang_at_once() {
    let cluster = Cluster::new();
    let mut nodes: Vec<Node> = NAMES[..2].iter().map(|name| Node::new(&cluster, name)).collect();
    for (index, node) in nodes.iter_mut().enumerate() {
        for job in ["one", "two"] {
            let mut hook = FakeHook::start(&node.job, job, index as i32, 2);
            hook.join(&node.job);
            node.hooks.push(hook);
        }
    }
    cluster.wait_ranks("one", 2);
    cluster.wait_ranks("two", 2);
    nodes[0].hooks[0].hang(3);
    nodes[1].hooks[1].hang(3);
    // Either may be finished first, so that `latest` says nothing about the other one.
    let reported = || cluster.job.incidents().iter().filter(|one| one.path.join("report.html").exists()).count() == 2;
    wait_until(PATIENCE, "both incidents have their report", reported);
    let mut jobs: Vec<(String, usize)> = cluster
        .job
        .incidents()
        .iter()
        .map(|incident| (incident.verdict["job"].as_str().expect("a job").to_string(), evidence(incident).ranks.len()))
        .collect();
    jobs.sort();
    assert_eq!(jobs, [("one".to_string(), 2), ("two".to_string(), 2)], "{}", cluster.log());
    // One of them ends, and the other one's incident lasts.
    nodes[0].hooks[0].resolve(3);
    cluster.wait("one of them is over", |status| {
        let state = |job: &str| {
            let of_job = |one: &&Value| one["job"] == job;
            status["incidents"].as_array().and_then(|all| all.iter().find(of_job)).map(|one| one["state"].clone())
        };
        state("one") == Some(json!("resolved")) && state("two") == Some(json!("dumped"))
    });
}

#[test]
fn a_node_that_is_preempted_while_the_incident_is_open_has_left() {
    let cluster = Cluster::new();
    let mut nodes = three(&cluster, "spot", |hook| hook.hello.sample_interval_ms = 4000);
    nodes[0].hooks[0].hang(3);
    wait_until(PATIENCE, "node-c takes its dump", || nodes[2].log().contains("the first sample took"));
    for hook in &mut nodes[2].hooks {
        hook.goodbye();
        hook.kill_if_alive();
    }
    let incident = cluster.wait_finished(1);
    let presence: Vec<Presence> = evidence(&incident).ranks.iter().map(|rank| rank.presence()).collect();
    assert_eq!(presence[..4], [Presence::Present; 4], "{}", incident.verdict);
    assert!(!presence[4..].contains(&Presence::Missing), "{presence:?}");
    // The next attempt is smaller, and its hang is an incident of its own.
    for node in &mut nodes[..2] {
        for hook in &mut node.hooks {
            hook.goodbye();
        }
    }
    cluster.wait_state("ended");
    for (index, node) in nodes[..2].iter_mut().enumerate() {
        let mut hook = FakeHook::start(&node.job, "spot", index as i32, 2);
        hook.hello.rank.as_mut().expect("a rank").attempt = 1;
        hook.join(&node.job);
        node.hooks.push(hook);
    }
    cluster.wait_ranks("spot", 2);
    nodes[1].hooks[2].hang(9);
    let second = cluster.wait_incident(2);
    let all = evidence(&second);
    assert_eq!((all.attempt, all.world_size, all.ranks.len()), (1, 2, 2), "{}", second.verdict);
}

#[test]
fn all_nodes_and_the_cluster_may_share_one_folder() {
    let shared = tempfile::tempdir().unwrap();
    let path = shared.path().to_str().expect("UTF-8").to_string();
    let job = Job::new().with("XPU_TIMER_TIMELINE_PATH", &path).with("XPU_TIMER_KEEP_INCIDENTS", "2");
    let mut cluster = Cluster::with(job, "http", "127.0.0.1");
    cluster.start();
    let mut nodes = three(&cluster, "nfs", |hook| hook.hello.timeline_path.clone_from(&path));
    let mut names = Vec::new();
    for ticket in 1..=3 {
        nodes[0].hooks[0].hang(ticket);
        cluster.wait("it is dumped", |status| {
            let open = |one: &Value| one["state"] == "dumped";
            status["incidents"].as_array().is_some_and(|list| list.len() as u64 == ticket && list.iter().any(open))
        });
        let id = list(&cluster).last().expect("an incident")["incident"].as_str().expect("an id").to_string();
        let latest = shared.path().join("latest");
        wait_until(PATIENCE, "the link shows the job's folder", || {
            fs::read_link(&latest).is_ok_and(|to| to.as_os_str() == format!("incident-{id}").as_str())
        });
        assert!(latest.join("report.html").exists());
        names.push(id);
        nodes[0].hooks[0].resolve(ticket);
        cluster.wait("it is over", |status| {
            status["incidents"].as_array().is_some_and(|list| list.iter().all(|one| one["state"] == "resolved"))
        });
        for node in &nodes {
            wait_until(PATIENCE, "it is over on the node", || {
                let status = node.job.status().unwrap_or_default();
                status["incidents"].as_array().is_some_and(|list| list.iter().all(|one| one["state"] == "resolved"))
            });
        }
    }
    // One line for each incident, whatever its parts; the oldest goes with all of them.
    wait_until(PATIENCE, "the oldest is gone", || {
        let entries = fs::read_dir(shared.path()).unwrap().flatten();
        !entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).any(|name| name.contains(&names[0]))
    });
    let listed: Vec<String> =
        list(&cluster).iter().map(|one| one["incident"].as_str().expect("an id").to_string()).collect();
    assert_eq!(listed, names[1..]);
    for name in NAMES {
        assert!(shared.path().join(format!("incident-{}-{name}/node_dump.bin", names[2])).exists(), "{name}");
    }
}

#[test]
fn two_nodes_of_one_name_may_share_one_folder() {
    let shared = tempfile::tempdir().unwrap();
    let path = shared.path().to_str().expect("UTF-8").to_string();
    let mut cluster = Cluster::with(Job::new().with("XPU_TIMER_TIMELINE_PATH", &path), "http", "127.0.0.1");
    cluster.start();
    let mut nodes: Vec<Node> = (0..2)
        .map(|rank| {
            let change = |hook: &mut FakeHook| hook.hello.timeline_path.clone_from(&path);
            Node::with_rank(&cluster, "pod-0", ("twins", rank, 2), change)
        })
        .collect();
    cluster.wait_ranks("twins", 2);
    nodes[1].hooks[0].hang(1);
    cluster.wait_state("dumped");
    wait_until(PATIENCE, "the report is there", || shared.path().join("latest/report.html").exists());
    let evidence = fs::read(shared.path().join("latest/evidence.bin")).unwrap();
    let evidence: Evidence = Message::decode(&evidence[..]).unwrap();
    let known: Vec<(u32, bool)> = evidence.ranks.iter().map(|rank| (rank.rank, rank.flight.is_some())).collect();
    assert_eq!(known, [(0, true), (1, true)], "{}", cluster.log());
    let id = list(&cluster)[0]["incident"].as_str().expect("an id").to_string();
    for name in ["pod-0", "pod-0-2"] {
        assert!(shared.path().join(format!("incident-{id}-{name}/node_dump.bin")).exists(), "{name}");
    }
}

#[test]
fn a_cluster_disk_that_fills_during_an_incident_still_has_the_verdict() {
    let job = Job::new();
    let Some(disk) = Tmpfs::new(job.dir.join("disk"), 268) else { return };
    let job = job.with("XPU_TIMER_TIMELINE_PATH", &disk.0.display().to_string());
    let mut cluster = Cluster::with(job, "http", "127.0.0.1");
    cluster.start();
    let mut nodes = three(&cluster, "full", |hook| {
        hook.hello.rank.as_mut().expect("a rank").node = "n".repeat(2000);
    });
    nodes[0].hooks[0].hang(3);
    cluster.wait_state("dumped");
    let sentence = cluster.status()["incidents"][0]["sentence"].as_str().expect("a sentence").to_string();
    assert!(!sentence.is_empty(), "{}", cluster.log());
    wait_until(PATIENCE, "it is logged", || cluster.log().contains(&sentence));
    wait_until(PATIENCE, "it is listed", || list(&cluster).len() == 1);
    let id = list(&cluster)[0]["incident"].as_str().expect("an id").to_string();
    let (code, body) = http("GET", cluster.port, &format!("/incidents/{id}")).expect("an answer");
    let verdict: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((code, verdict["sentence"].as_str()), (200, Some(sentence.as_str())));
    assert!(verdict["errors"].to_string().contains("No space left on device"), "{verdict}");
}

#[test]
fn an_unresponsive_disk_does_not_block_the_cluster_collector() {
    let cluster = Cluster::new();
    let mut node = Node::with_ranks(&cluster, "node-a", "stuck_disk", 0, 2, 2);
    cluster.wait_ranks("stuck_disk", 2);
    node.hooks[0].hang(1);
    let incident = cluster.wait_incident(1);
    // A process that opens it now waits forever, as on a network file system whose server is gone.
    let verdict = incident.path.join("verdict.json");
    fs::remove_file(&verdict).expect("it is there");
    nix::unistd::mkfifo(&verdict, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    node.hooks[0].resolve(1);
    cluster.wait_state("resolved");
    wait_until(PATIENCE, "it is over on the node", || {
        node.job.status().unwrap_or_default()["incidents"][0]["state"] == "resolved"
    });
    // The next incident finds the disk busy: it has no folder, but still a verdict.
    node.hooks[1].hang(2);
    cluster.wait_state("dumped");
    let known = cluster.status()["incidents"][1].clone();
    assert_eq!((&known["path"], &known["state"]), (&Value::Null, &json!("dumped")), "{}", cluster.log());
    let id = known["incident"].as_str().expect("an id");
    let (code, body) = http("GET", cluster.port, &format!("/incidents/{id}")).expect("an answer");
    let verdict: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((code, &verdict["sentence"]), (200, &known["sentence"]));
}

#[test]
fn a_webhook_that_hangs_or_does_not_resolve_holds_up_nothing() {
    // It takes connections and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let hanging = format!("http://{}/hook", listener.local_addr().unwrap());
    for (url, problem) in [(hanging.as_str(), "timeout"), ("http://webhook.invalid/hook", "")] {
        let mut cluster = Cluster::with(Job::new().with("XPU_TIMER_WEBHOOK", url), "http", "127.0.0.1");
        cluster.start();
        let mut node = Node::with_ranks(&cluster, "node-a", "post", 0, 2, 2);
        cluster.wait_ranks("post", 2);
        node.hooks[0].hang(3);
        let _ = cluster.wait_incident(1);
        node.resolve_all();
        cluster.wait_state("resolved");
        wait_until(PATIENCE, "the webhook fails and is tried again", || {
            let log = cluster.log();
            log.lines().any(|line| line.contains("posting to the webhook failed, retry in") && line.contains(problem))
        });
        let process = cluster.process.take().expect("it runs");
        let signalled = Instant::now();
        process.signal(Signal::SIGTERM);
        assert_eq!(process.wait(PATIENCE).code(), 0);
        assert!(signalled.elapsed() < Duration::from_secs(8), "its end does not wait for the webhook");
    }
}

#[test]
fn mistyped_arguments_are_reported_in_one_line() {
    let cluster = Cluster::new();
    let address = format!("127.0.0.1:{}", cluster.port);
    let run = |arguments: &[&str]| {
        let mut command = cluster.job.command(artifacts().bin("xpu_timer_collector"));
        // A proxy for external addresses does not apply to a collector.
        command.env("http_proxy", "http://127.0.0.1:9");
        let output = Process::spawn(command.args(arguments)).wait(PATIENCE);
        assert_eq!((output.stderr.trim().lines().count(), output.code()), (1, 1), "{arguments:?}: {output:?}");
        output.stderr
    };
    let taken = run(&["cluster", "--listen", &address]);
    for word in [address.as_str(), "--listen", "in use"] {
        assert!(taken.contains(word), "{word} is not in {taken}");
    }
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = format!("http://{nobody}");
    for (arguments, words) in [
        (&["--url", nobody.as_str()][..], &[nobody.as_str(), "does not answer"][..]),
        (&[], &["127.0.0.1", "does not answer", "--url"]),
        (&["--url", "127.0.0.1:1"], &["127.0.0.1:1", "http://"]),
        (&["--url", "http://192.0.2.1:1"], &["http://192.0.2.1:1", "https://", "XPU_TIMER_COLLECTOR_TOKEN_FILE"]),
        (
            &["--url", &cluster.url(), "show", "20200101T000000Z-00000000"],
            &["20200101T000000Z-00000000", "no such incident"],
        ),
        (
            &["--url", &cluster.url(), "fetch", "20200101T000000Z-00000000"],
            &["20200101T000000Z-00000000", "no such incident"],
        ),
        (&["--url", &cluster.url(), "show", "../etc"], &["../etc"]),
    ] {
        let shown = run(&[&["incidents"], arguments].concat());
        for word in words {
            assert!(shown.contains(word), "{word} is not in {shown}");
        }
    }
}

#[test]
fn a_job_wide_verdict_does_not_wait_for_the_timelines_of_a_slow_node() {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "slow", 0, 1, 2);
    let (job, awaited) = with_slow_timelines(cluster.node_job("node-b"));
    let mut b = Node::on(job);
    b.add_ranks("slow", 1, 1, 2);
    cluster.wait_ranks("slow", 2);
    a.hooks[0].hang(3);
    let latest = cluster.job.dir.join("timeline/latest");
    wait_until(PATIENCE, "the report is there", || latest.exists());
    let incident = cluster.job.incidents().pop().expect("a verdict");
    for name in ["00000-00002.stacktrace", "00001-00002.stacktrace", "report.html", "evidence.bin", PENDING] {
        assert!(incident.path.join(name).exists(), "{name}\n{}", cluster.log());
    }
    let page = |incident: &Incident| text(incident.path.join("report.html"));
    assert!(page(&incident).contains(NOT_HERE) && !incident.path.join("00001-00002.ops").exists());
    cluster.wait_state("dumped");
    wait_until(PATIENCE, "the slow node knows the verdict", || {
        b.job.status().is_ok_and(|status| status["incidents"][0]["sentence"] == incident.verdict["sentence"])
    });
    fs::write(&awaited, "").unwrap();
    let incident = cluster.wait_incident(1);
    for rank in 0..2 {
        assert!(incident.path.join(format!("0000{rank}-00002.ops")).exists(), "{rank}\n{}", cluster.log());
    }
    assert!(!page(&incident).contains(NOT_HERE));
    assert_eq!(incident.verdict["errors"], json!([]), "{}", cluster.log());
}

const RANKS: i32 = 4;

/// Two nodes. The second has a slow link and much to send; its part is being sent.
struct Scene {
    cluster: Cluster,
    nodes: Vec<Node>,
    _network: Network,
}

/// `None` when this machine cannot make it. The second node prints `text` when it is sending.
fn sending(folder: &Path, text: &str) -> Option<Scene> {
    let network = Network::new(2)?;
    let cluster = network.cluster(folder);
    let mut nodes: Vec<Node> = (1..=2).map(|member| Node::on(network.job(&cluster, folder, member))).collect();
    for (index, node) in nodes.iter_mut().enumerate() {
        // The evidence and the file of each rank contain it, and it is the longest that a hook may
        // send in one message.
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
