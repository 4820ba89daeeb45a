//! The timeline of a job of two nodes, fetched from the cluster collector.

use std::{fs, path::Path};

use super::*;
use crate::timeline::{all_reduces, read};

/// Starts rank `rank` of a training job of two ranks on a node of its own.
fn train(job: &Job, rank: u32, rendezvous: &Path, arguments: &[&str]) -> Process {
    let mut command = job.launch(xpu_timer_tests::python());
    command.arg(xpu_timer_tests::tree().join("tests/examples/train.py")).args(arguments);
    let number = rank.to_string();
    for (name, value) in [("RANK", &*number), ("WORLD_SIZE", "2"), ("LOCAL_RANK", &*number), ("LOCAL_WORLD_SIZE", "1")]
    {
        command.env(name, value);
    }
    Process::spawn(command.env("XPU_TIMER_JOB", "wide").env("XPU_EXAMPLE_RENDEZVOUS", rendezvous))
}

#[test]
fn the_timelines_of_all_nodes_are_fetched_in_one_call() {
    let cluster = Cluster::new();
    let nodes = ["node-a", "node-b"].map(|name| cluster.node_job(name));
    let rendezvous = cluster.job.dir.join("rendezvous");
    let arguments = ["--step-ms=5", "--fault=loader", "--fault-rank=1", "--fault-step", "200"];
    let mut ranks: Vec<Process> =
        nodes.iter().zip(0..).map(|(job, rank)| train(job, rank, &rendezvous, &arguments)).collect();
    cluster.wait_ranks("wide", 2);
    ranks[0].wait_for("step 20 ", PATIENCE);
    let output = cluster.job.dir.join("fetched");
    let fetch = |more: &[&str]| {
        let mut command = cluster.job.command(artifacts().bin("xpu_timer_collector"));
        command.args(["timeline", "--url", &cluster.url(), "--job", "wide", "--seconds", "60", "--output"]);
        command.arg(&output).args(more).output().unwrap()
    };
    let ran = fetch(&[]);
    let (stdout, stderr) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{stderr}\n{}", cluster.log());
    let folder = PathBuf::from(stdout.trim());
    for rank in 0..2 {
        let (head, operations) = read(&folder.join(format!("{rank:05}-00002.ops")));
        assert_eq!((head.rank.expect("the rank").rank, head.lost), (rank, 0));
        let seqs = all_reduces(&operations);
        assert!(seqs.len() >= 20 && seqs == (1..=seqs.len() as u64).collect::<Vec<_>>(), "{seqs:?}");
    }
    let ran = fetch(&["--rank=1"]);
    let folder = PathBuf::from(String::from_utf8_lossy(&ran.stdout).trim());
    let names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["00001-00002.ops"]);
    let ran = fetch(&["--rank=5"]);
    assert!(!ran.status.success() && String::from_utf8_lossy(&ran.stderr).contains("no such rank"), "{ran:?}");

    // The cluster collector also writes a folder of its own, and the incident has the timelines.
    let (code, body) = http("POST", cluster.port, "/timeline?job=wide&seconds=60").unwrap();
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert!(code == 200 && answer["ranks"] == 2 && answer["lost"] == 0, "{code} {body}");
    let incident = cluster.wait_incident(1);
    for rank in 0..2 {
        let (_, operations) = read(&incident.path.join(format!("{rank:05}-00002.ops")));
        assert!(all_reduces(&operations).ends_with(&[199, 200]), "{:?}", all_reduces(&operations));
    }
    drop(ranks);
}
