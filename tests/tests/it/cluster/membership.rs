//! The membership of a job. Worlds change: they grow and shrink within a restart attempt, and their
//! agents count restarts apart. Ranks do not register. Two jobs have one name, or one address. A
//! node speaks for a rank that another node has. And processes that are not ranks: a rank of one
//! node waits for a rank of another one, which waits for such a process.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::{Value, json};
use xpu_timer_proto::{
    Message as _,
    ring::{comm, offset, pack_halves},
    server::Stacktrace,
    v1::{Presence, RankEvidence},
};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, python, tree, wait_until};

use super::{Cluster, Node, evidence, network::Network};
use crate::{collector::fake::FakeHook, torch::pypi};

/// A rank of a world joins on a node; those that the node had before are gone.
fn join(node: &mut Node, job: &str, rank: i32, world: u32, attempt: u32) {
    let mut hook = FakeHook::start(&node.job, job, rank, world);
    let info = hook.hello.rank.as_mut().expect("a rank");
    (info.attempt, info.local_rank, info.local_world_size) = (attempt, 0, 1);
    hook.join(&node.job);
    node.hooks = vec![hook];
}

/// Terminates the ranks of a node, as an agent does before it starts those of the next world.
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
    // A late part of a stopped machine is judged in another round.
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
    assert!(!cluster.log().contains("the claim is refused"), "{}", cluster.log());
}

#[test]
fn a_world_that_grows_and_shrinks_within_one_attempt() {
    let cluster = Cluster::new();
    let mut nodes: Vec<Node> = ["node-a", "node-b", "node-c"].map(|name| Node::new(&cluster, name)).into();
    for (rank, node) in nodes[..2].iter_mut().enumerate() {
        join(node, "elastic", rank as i32, 2, 0);
    }
    wait_world(&cluster, "elastic", 2, 0, 2);

    // A third node joins, and every process gets another rank.
    nodes[..2].iter_mut().for_each(end);
    for (rank, node) in [(1, 0), (2, 1), (0, 2)] {
        join(&mut nodes[node], "elastic", rank, 3, 0);
    }
    wait_world(&cluster, "elastic", 3, 0, 3);
    nodes[1].hooks[0].hang(5);
    check(&cluster, 1, 0, &[(0, "node-c"), (1, "node-a"), (2, "node-b")]);

    // The first node is preempted while the incident is open: that world is over, and the next one
    // is smaller.
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
    // The agent of the node with the crash counts it; the other one only sees that a member was
    // away.
    crash(&mut nodes[0]);
    end(&mut nodes[1]);
    join(&mut nodes[0], "apart", 0, 2, 1);
    join(&mut nodes[1], "apart", 1, 2, 0);
    wait_world(&cluster, "apart", 2, 1, 2);
    nodes[1].hooks[0].hang(4);
    check(&cluster, 1, 1, &[(0, "node-a"), (1, "node-b")]);
}

/// Rank 0 hangs on one node. Returns the evidence of rank 1, which runs a piece of Python under the
/// launcher of another one, and the sentence.
fn unregistered_rank(script: &str) -> (RankEvidence, String) {
    let cluster = Cluster::new();
    let mut a = Node::with_ranks(&cluster, "node-a", "silent", 0, 1, 2);
    let b = Node::new(&cluster, "node-b");
    let mut command = b.job.launch(python());
    command.args(["-c", script]).envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("XPU_TIMER_JOB", "silent")]);
    let mut rank = Process::spawn(&mut command);
    rank.wait_for("up", PATIENCE);
    cluster.wait_ranks("silent", 2);
    if script.contains("exit") {
        drop(rank.wait(PATIENCE));
    }
    a.hooks[0].hang(1);
    let incident = cluster.wait_incident(1);
    let mut ranks = evidence(&incident).ranks;
    assert_eq!(ranks.len(), 2, "{}", cluster.log());
    assert_eq!(incident.verdict["errors"].to_string(), "[]", "{}", cluster.log());
    (ranks.remove(1), incident.verdict["sentence"].as_str().expect("a sentence").into())
}

#[test]
fn a_rank_that_runs_and_has_not_registered_is_looked_at_on_its_node() {
    let (rank, sentence) =
        unregistered_rank("import time\ndef read_shard():\n    time.sleep(600)\nprint('up', flush=True)\nread_shard()");
    assert_eq!((rank.presence(), rank.node.as_str()), (Presence::Unregistered, "node-b"));
    let host = rank.host.expect("facts");
    assert!(host.stack && host.native().contains("nanosleep"), "{host:?}\n{sentence}");
}

#[test]
fn a_rank_that_ended_unregistered_is_known() {
    let (rank, sentence) =
        unregistered_rank("import time\nprint('up', flush=True)\ntime.sleep(3)\nraise SystemExit(3)  # exit");
    assert_eq!((rank.presence(), rank.node.as_str()), (Presence::Dead, "node-b"), "{sentence}");
    assert!(rank.exit.ends_with("before its first device call"), "{rank:?}");
}

/// The rank makes the communicator of its job's world, which has four ranks.
fn make_communicator(hook: &mut FakeHook, id: u64) {
    let rank = hook.hello.rank.as_ref().expect("a rank").rank;
    let entry = offset::COMMS / 8;
    for (word, value) in [(comm::SIZE_RANK, pack_halves(4, rank as u32)), (comm::UNIQUE, 1), (comm::ID, id)] {
        hook.word(entry + word, value);
    }
}

#[test]
fn two_jobs_of_one_name_over_two_nodes_each() {
    let cluster = Cluster::new();
    let mut nodes = [Node::new(&cluster, "node-a"), Node::new(&cluster, "node-b")];
    // The order of the two jobs differs between the nodes.
    let order = [[0xa1, 0xb2], [0xb2, 0xa1]];
    for (number, (node, jobs)) in nodes.iter_mut().zip(order).enumerate() {
        for id in jobs {
            let before = node.hooks.len();
            node.add_ranks("twin", 2 * number as i32, 2, 4);
            node.hooks[before..].iter_mut().for_each(|hook| make_communicator(hook, id));
        }
    }
    cluster.wait("two jobs are whole", |status| {
        let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
        jobs.len() == 2 && jobs.iter().all(|job| job["ranks"] == 4 && job["world_size"] == 4)
    });
    // A rank of the second job of the second node hangs, which is the first one of the first node.
    nodes[1].hooks[2].hang(3);
    let incident = cluster.wait_finished(1);
    let pid = |path: std::path::PathBuf| Stacktrace::decode(&fs::read(path).unwrap()[..]).unwrap().pid;
    let files = fs::read_dir(&incident.path).unwrap().flatten().map(|entry| entry.path());
    let dumped: BTreeSet<i32> =
        files.filter(|path| path.extension().is_some_and(|end| end == "stacktrace")).map(pid).collect();
    let job = nodes[0].hooks[..2].iter().chain(&nodes[1].hooks[2..]);
    assert_eq!(dumped, job.map(FakeHook::pid).collect(), "{}\n{}", incident.verdict, cluster.log());
    assert!(!cluster.log().contains("is refused") && cluster.job.incidents().len() == 1, "{}", cluster.log());
}

#[test]
fn a_node_with_ranks_of_another_node_works_alone() {
    let cluster = Cluster::new();
    let _owner = Node::with_ranks(&cluster, "node-a", "mine", 0, 2, 2);
    cluster.wait_ranks("mine", 2);
    let mut thief = Node::with_ranks(&cluster, "node-x", "mine", 1, 1, 2);
    wait_until(PATIENCE, "it is refused", || {
        cluster.log().contains("node node-x claims ranks 1 of job mine, which node node-a already has")
    });
    // Its ranks hang as well, and no other collector would capture them.
    thief.hooks[0].hang(3);
    let alone = thief.job.wait_incident(1, PATIENCE);
    assert_eq!(alone.verdict["job"], "mine");
    assert!(thief.log().contains("this node has no rank of job mine"), "{}", thief.log());
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
    wait_until(PATIENCE, "they are one job", || cluster.log().contains("is complete: 2 ranks on 2 nodes"));
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
        cluster.log().matches("is complete: 2 ranks on 1 nodes, attempt 0").count() == 2
    });
    nodes[1].hooks[0].hang(3);
    let incident = cluster.wait_finished(1);
    let all = evidence(&incident);
    let of: Vec<&str> = all.ranks.iter().map(|rank| rank.node.as_str()).collect();
    assert_eq!(of, ["node-2", "node-2"], "{}", cluster.log());
    assert!(!nodes[0].log().contains("sample took") && !cluster.log().contains("refused"), "{}", cluster.log());
}

const NODES: u32 = 3;

/// A rank of a PyTorch job on the CPU. In the first attempt the last rank misses a collective.
const TRAINING: &str = r#"
import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def stay_away():
    signal.pause()


for step in range(50):
    total = torch.ones(8)
    dist.all_reduce(total)
    assert total[0].item() == SIZE, total
    if step == 20 and RANK == SIZE - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        stay_away()
dist.barrier()
print(f"rank {RANK} done\n", end="", flush=True)
dist.destroy_process_group()
"#;

/// The agents of one job run on three nodes, which are network namespaces. A rank hangs, the nodes
/// end their ranks after the verdict of all, and the agents start the job again.
#[test]
fn agents_on_three_nodes_restart_a_job_that_hung() {
    let Some(network) = Network::new(NODES) else { return };
    let Some((torch, _turn)) = pypi() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cluster = network.cluster(folder.path());
    let library_path = torch.library_path().expect("the libraries of stubs");
    let script = folder.path().join("agents.py");
    fs::write(&script, TRAINING).unwrap();
    let agents: Vec<(Job, Process)> = (1..=NODES)
        .map(|member| {
            let settings = [
                ("XPU_TIMER_HANG_KILL", "1"),
                ("XPU_TIMER_HANG_TIMEOUT", "4"),
                ("XPU_TIMER_SAMPLE_INTERVAL", "1"),
                ("GLOO_SOCKET_IFNAME", "eth0"),
                ("OMP_NUM_THREADS", "1"),
                // Each attempt has a store of its own.
                ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),
            ];
            let job = network.job(&cluster, folder.path(), member);
            let job = settings.into_iter().fold(job, |job, (name, value)| job.with(name, value));
            let mut command = job.launch(torch.python());
            command.env("LD_LIBRARY_PATH", &library_path).args(["-m", "torch.distributed.run", "--rdzv-backend=c10d"]);
            command
                .args(["--nproc-per-node=1", "--max-restarts=1", "--rdzv-id=agents"])
                .arg(format!("--nnodes={NODES}"));
            command.arg(format!("--rdzv-endpoint={}:29400", network.address(1)));
            // All have the name of this machine, by which an agent knows whether it is the host.
            command.arg(format!("--rdzv-conf=is_host={}", u32::from(member == 1)));
            command.arg(format!("--local-addr={}", network.address(member)));
            let process = Process::spawn(command.arg(&script));
            (job, process)
        })
        .collect();
    let output = || agents.iter().map(|(_, agent)| format!("{}{}", agent.stdout(), agent.stderr())).collect::<String>();
    let begun = std::time::Instant::now();
    while cluster.job.finished_incidents().is_empty() {
        assert!(begun.elapsed() < 3 * PATIENCE, "no incident\n{}\n{}", cluster.log(), output());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let incident = cluster.job.finished_incidents().remove(0);
    assert_eq!(incident.verdict["cause"], "missing_rank", "{}", incident.verdict);
    assert_eq!(incident.verdict["culprits"], json!([NODES - 1]), "{}", incident.verdict);
    assert!(
        incident.verdict["sentence"].as_str().is_some_and(|text| text.contains("in stay_away")),
        "{}",
        incident.verdict
    );
    let ranks = evidence(&incident).ranks;
    assert_eq!(ranks.iter().map(|rank| rank.presence()).collect::<Vec<_>>(), [Presence::Present; NODES as usize]);

    // The second attempt trains to its end.
    wait_until(3 * PATIENCE, "all ranks are done", || output().matches(" done").count() == NODES as usize);
    for (_, agent) in agents {
        let output = agent.wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    }
    wait_until(PATIENCE, "the incident is closed", || cluster.job.incidents()[0].verdict["status"] != "open");
    assert_eq!(cluster.job.incidents().len(), 1, "the ranks of the second attempt are not to blame: {}", cluster.log());
}

/// A rank of two, and a front end that starts a helper and a rank that asks it.
const FRONT_END: &str = r#"
import os, signal, socket, subprocess, sys, time

def ask_helper(channel):
    channel.send(b"x")
    return channel.recv(1)

def rank(channel):
    import cuda
    cuda.set_device(0)
    communicator = cuda.Communicator.create("world", int(os.environ["RANK"]), 2)
    stream, buffer = cuda.Stream(), cuda.Buffer(64)
    while channel is None and "ASK" in os.environ:
        try:
            channel = socket.create_connection((os.environ["ASK"], PORT))
        except OSError:
            time.sleep(0.1)
    for step in range(1 << 30):
        if step == 5 and channel is not None:
            ask_helper(channel)
        communicator.all_reduce(buffer, stream)
        stream.synchronize()
        time.sleep(0.02)

PORT = 7000

def server():
    helper(socket.create_server(("", PORT)).accept()[0])

def helper(channel):
    with open("helper.pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("helper.pid.part", "helper.pid")
    channel.recv(1)
    os.kill(os.getpid(), signal.SIGSTOP)

def front_end():
    ends = socket.socketpair()
    def start(role, end, **variables):
        command = [sys.executable, __file__, role, str(end.fileno())]
        return subprocess.Popen(command, pass_fds=[end.fileno()], env=dict(os.environ, **variables))
    helper = start("tokenizer", ends[0])
    asks = start("rank", ends[1], RANK="1", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    for end in ends:
        end.close()
    asks.wait()
    helper.kill()

role, *descriptors = sys.argv[1:]
channel = socket.socket(fileno=int(descriptors[0])) if descriptors else None
{"rank": lambda: rank(channel), "tokenizer": lambda: helper(channel), "server": server, "front_end": front_end}[role]()
"#;

fn start(job: &Job, folder: &Path, role: &str, variables: &[(&str, &str)]) -> Process {
    let script = folder.join("serve.py");
    fs::write(&script, FRONT_END).expect("the job's folder");
    let mut command = job.launch(python());
    command.arg(script).arg(role).current_dir(folder).envs(variables.iter().copied());
    Process::spawn(command.env("PYTHONPATH", tree().join("tests/examples")))
}

const SETTINGS: [(&str, &str); 3] =
    [("XPU_TIMER_JOB", "wide"), ("XPU_TIMER_HANG_TIMEOUT", "3"), ("XPU_TIMER_SAMPLE_INTERVAL", "1")];

#[test]
fn a_stopped_process_that_is_no_rank_is_named_across_two_nodes() {
    let cluster = Cluster::new();
    let folder = &cluster.job.dir;
    let [a, b] = ["node-a", "node-b"].map(|name| {
        let rendezvous = folder.join("rendezvous");
        let job = SETTINGS.into_iter().fold(cluster.node_job(name), |job, (name, value)| job.with(name, value));
        job.with("XPU_EXAMPLE_RENDEZVOUS", rendezvous.to_str().expect("UTF-8"))
    });
    let rank_0 = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")];
    let _processes = [start(&a, folder, "rank", &rank_0), start(&b, folder, "front_end", &[])];
    check_process(&cluster.wait_incident(1), folder, "node-b", "serve.py tokenizer");
}

/// The verdict names the process of `helper.pid`, which is not a rank.
fn check_process(incident: &Incident, folder: &Path, node: &str, command: &str) {
    let mut pid = None;
    wait_until(PATIENCE, "the helper has written its pid", || {
        pid = fs::read_to_string(folder.join("helper.pid")).ok().and_then(|pid| pid.parse::<i32>().ok());
        pid.is_some()
    });
    let verdict = &incident.verdict;
    assert_eq!((&verdict["cause"], &verdict["culprits"]), (&json!("process_stopped"), &json!([])), "{verdict:#}");
    assert_eq!(verdict["victims"], json!([0, 1]), "{verdict:#}");
    let process = &verdict["culprit_processes"][0];
    assert_eq!(
        (&process["rank"], &process["pid"], &process["node"]),
        (&Value::Null, &json!(pid), &json!(node)),
        "{verdict:#}"
    );
    assert!(process["command"].as_str().is_some_and(|text| text.contains(command)), "{verdict:#}");
    let sentence = verdict["sentence"].as_str().expect("a sentence");
    assert!(sentence.contains(&format!("Process {}", pid.expect("a pid"))), "{sentence}");
}

#[test]
fn a_stopped_server_at_the_other_end_of_a_tcp_connection_is_named_across_two_nodes() {
    let Some(network) = Network::new(2) else { return };
    let certificates = tempfile::tempdir().expect("a temporary folder");
    let cluster = network.cluster(certificates.path());
    let folder = &cluster.job.dir;
    let [a, b] = [1, 2].map(|member| {
        let job = network.job(&cluster, certificates.path(), member);
        let job = SETTINGS.into_iter().fold(job, |job, (name, value)| job.with(name, value));
        job.with("XPU_EXAMPLE_RENDEZVOUS", folder.join("rendezvous").to_str().expect("UTF-8"))
    });
    let server = network.address(2);
    let of_rank =
        |rank: &'static str| [("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")];
    let asking = [&of_rank("0")[..], &[("ASK", server.as_str())]].concat();
    let _processes = [
        start(&b, folder, "server", &[]),
        start(&a, folder, "rank", &asking),
        start(&b, folder, "rank", &of_rank("1")),
    ];
    check_process(&cluster.wait_finished(1), folder, "node-2", "serve.py server");
}
