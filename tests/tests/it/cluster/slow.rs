//! Ranks that slow a job down without a hang: eight ranks on the simulated device, two of them with
//! slower kernels, on one node and on two; and an even run with jitter.

use std::time::{Duration, Instant};

use serde_json::Value;
use xpu_timer_tests::{Job, PATIENCE, Process, artifacts, http, python, tree, wait_until};

use super::Cluster;

const RANKS: u32 = 8;
/// A kernel of the example takes 0.2 or 0.3 ms, a step nine of them and 20 ms on the host.
const SLOW: &str = "slow:rank=1,ms=3;slow:rank=6,ms=5";

fn slow_ranks(port: u16) -> Vec<Value> {
    let (_, body) = http("GET", port, "/slow_ranks").unwrap_or_default();
    serde_json::from_str(&body).unwrap_or_default()
}

fn rank_numbers(slow: &[Value]) -> Vec<u64> {
    let mut ranks: Vec<u64> = slow.iter().filter_map(|one| one["rank"].as_u64()).collect();
    ranks.sort_unstable();
    ranks
}

/// Waits until these ranks are named, and none ever that is not slow.
fn wait_slow(port: u16, ranks: &[u64], log: impl Fn() -> String) -> Vec<Value> {
    let start = Instant::now();
    loop {
        let slow = slow_ranks(port);
        let found = rank_numbers(&slow);
        assert!(found.iter().all(|rank| ranks.contains(rank)), "{found:?} instead of {ranks:?}\n{slow:#?}");
        if found == ranks {
            return slow;
        }
        assert!(start.elapsed() < 2 * PATIENCE, "{found:?} instead of {ranks:?}\n{}", log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn metrics(port: u16, name: &str) -> Vec<(String, f64)> {
    let (_, page) = http("GET", port, "/metrics").unwrap_or_default();
    let of_name = page.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    let sample = |line: &str| {
        let (labels, value) = line.rsplit_once(' ').expect("a value");
        (labels.to_string(), value.parse().expect("a number"))
    };
    of_name.map(sample).collect()
}

fn incidents(job: &Job, arguments: &[&str]) -> String {
    let mut command = job.command(artifacts().bin("xpu_timer_collector"));
    let output = Process::spawn(command.arg("incidents").args(arguments)).wait(PATIENCE);
    assert_eq!(output.code(), 0, "{output:?}");
    output.stdout
}

/// Waits until a part of the step of a slow rank is said to be longer. On a loaded machine, other
/// parts may be longer once.
fn wait_longer(job: &Job, arguments: &[&str], rank: u32, part: &str) {
    let found = || {
        let list = incidents(job, &[&["slow"], arguments].concat());
        let of_rank = list.split_once(&format!("  rank {rank} on ")).map(|(_, of_rank)| of_rank.to_string());
        let of_rank = of_rank.unwrap_or_default();
        let mut lines = of_rank.lines().skip(1).take_while(|line| line.starts_with("    longer: "));
        lines.any(|line| line.contains(part))
    };
    wait_until(PATIENCE, &format!("{part} of rank {rank} are longer"), found);
}

#[test]
fn two_slow_ranks_of_eight_are_named() {
    let job = Job::new().with("XPU_SIM_FAULT", SLOW).with("XPU_TIMER_JOB", "uneven");
    let mut ranks = job.train(RANKS, &[]);
    let slow = wait_slow(job.port, &[1, 6], || ranks.stdout());
    let numbers_of = |name: &str| slow.iter().map(|one| one[name].as_f64().expect("a number")).collect::<Vec<_>>();
    assert!(numbers_of("others_wait").iter().all(|part| *part > 0.2), "{slow:#?}");
    assert!(
        slow[0]["rank"] == 6 && numbers_of("waits").iter().all(|part| *part < 0.5),
        "the slower one first: {slow:#?}"
    );
    assert_eq!(slow[0]["job"], "uneven");

    let flags = metrics(job.port + 1, "xpu_timer_rank_slow");
    let flagged: Vec<&str> =
        flags.iter().filter(|(_, value)| *value == 1.0).map(|(labels, _)| labels.as_str()).collect();
    assert_eq!((flags.len(), flagged.len()), (8, 2), "{flags:#?}");
    for rank in [1, 6] {
        assert!(flagged.iter().any(|labels| labels.contains(&format!("rank=\"{rank}\""))), "{flagged:#?}");
    }
    let status = job.status().expect("the status");
    assert_eq!(rank_numbers(status["slow_ranks"].as_array().expect("a list")), [1, 6]);
    let list = incidents(&job, &["list"]);
    assert!(list.starts_with("no incidents\n\nslow ranks, without a hang:\nuneven  rank 6 on "), "{list}");
    // Kernels are slow. They are not recorded unless they are asked for.
    wait_longer(&job, &["--seconds=5"], 6, "time on the host, or in kernels that are not recorded");
    for rank in [6, 1] {
        wait_longer(&job, &["--kernels=all", "--seconds=3"], rank, "kernels other than matrix products");
    }
    assert!(job.incidents().is_empty(), "a slow rank does not hang");
    assert!(ranks.try_wait().is_none(), "it goes on");
}

#[test]
fn an_even_run_has_no_stragglers() {
    let job = Job::new();
    let mut ranks = job.train(RANKS, &["--step-ms=60", "--jitter=0.5"]);
    let mut compared_since = None;
    let start = Instant::now();
    // Twelve blocks of a second are what a comparison takes; this is twice that.
    while compared_since.is_none_or(|since: Instant| since.elapsed() < Duration::from_secs(30)) {
        assert_eq!(slow_ranks(job.port), [] as [Value; 0]);
        let waits = metrics(job.port + 1, "xpu_timer_rank_wait_ratio");
        if waits.len() == 8 && compared_since.is_none() {
            compared_since = Some(Instant::now());
        }
        assert!(start.elapsed() < PATIENCE, "the ranks are not compared: {waits:?}\n{}", ranks.stdout());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(ranks.try_wait().is_none(), "it goes on");
    assert_eq!(incidents(&job, &["slow"]), "no slow ranks\n");
}

#[test]
fn slow_ranks_are_named_over_two_nodes() {
    let cluster = Cluster::new();
    let rendezvous = cluster.job.dir.join("rendezvous");
    let nodes = ["node-a", "node-b"].map(|name| {
        let job = cluster.node_job(name).with("XPU_SIM_FAULT", SLOW).with("XPU_TIMER_JOB", "wide");
        job.with("XPU_EXAMPLE_RENDEZVOUS", rendezvous.to_str().expect("UTF-8"))
    });
    let local = RANKS / 2;
    let mut ranks: Vec<Process> = (0..RANKS)
        .map(|rank| {
            let mut command = nodes[(rank / local) as usize].launch(python());
            command.arg(tree().join("tests/examples/train.py"));
            for (name, value) in
                [("RANK", rank), ("WORLD_SIZE", RANKS), ("LOCAL_RANK", rank % local), ("LOCAL_WORLD_SIZE", local)]
            {
                command.env(name, value.to_string());
            }
            Process::spawn(&mut command)
        })
        .collect();
    cluster.wait_ranks("wide", 8);
    let slow = wait_slow(cluster.port, &[1, 6], || cluster.log());
    let node_of = |rank: u64| slow.iter().find(|one| one["rank"] == rank).map(|one| one["node"].clone());
    assert_eq!((node_of(1), node_of(6)), (Some("node-a".into()), Some("node-b".into())), "{slow:#?}");
    assert_eq!(cluster.status()["slow_ranks"].as_array().map(Vec::len), Some(2));
    let flags = metrics(cluster.port, "xpu_timer_rank_slow");
    assert!(
        flags.len() == 2 && flags.iter().all(|(labels, value)| labels.contains("job_name=\"wide\"") && *value == 1.0)
    );
    let list = incidents(&cluster.job, &["--url", &cluster.url()]);
    assert!(list.contains("wide  rank 6 on node-b: it waits "), "{list}");
    let arguments = ["--url", &cluster.url(), "--seconds=5"];
    wait_longer(&cluster.job, &arguments, 6, "time on the host, or in kernels that are not recorded");
    assert!(ranks.iter_mut().all(|rank| rank.try_wait().is_none()), "it goes on");
    drop(ranks);
    cluster.wait("they are gone with their job", |status| status["slow_ranks"] == serde_json::json!([]));
}
