//! Processes that are no ranks, in jobs of several nodes: a rank of one node waits for a rank of
//! another one, which waits for such a process.

use std::{fs, path::Path};

use serde_json::{Value, json};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, python, tree, wait_until};

use super::{Cluster, network::Network};

/// A rank of two, and a front end that starts a helper and a rank that asks it.
const PROGRAM: &str = r#"
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
    fs::write(&script, PROGRAM).expect("the job's folder");
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
    check(&cluster.wait_incident(1), folder, "node-b", "serve.py tokenizer");
}

/// The verdict names the process of `helper.pid`, which is no rank.
fn check(incident: &Incident, folder: &Path, node: &str, command: &str) {
    let mut pid = None;
    wait_until(PATIENCE, "the helper has said who it is", || {
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
    check(&cluster.wait_finished(1), folder, "node-2", "serve.py server");
}
