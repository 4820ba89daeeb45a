//! Real PyTorch, the CUDA build of PyPI, with its own ProcessGroupNCCL on the simulated device:
//! what it launches is seen once, and in a job that hangs in NCCL, the culprit is named long before
//! torch's own watchdog speaks. `cargo xtask test --torch` runs these alone.

mod counts;

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde_json::json;
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, PypiTorch, skip, tree, wait_until};

const RANKS: u32 = 4;

/// A job of PyPI's torch. There is one at a time: four ranks keep a small machine busy for many
/// seconds.
struct Torch {
    torch: PypiTorch,
    job: Job,
    _turn: MutexGuard<'static, ()>,
}

/// PyPI's torch, for whose turn it is; nothing when it cannot be set up.
pub fn pypi() -> Option<(PypiTorch, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match PypiTorch::set_up() {
        Ok(torch) => Some((torch, turn)),
        Err(error) => {
            skip(&format!("{error:#}"));
            None
        }
    }
}

impl Torch {
    /// A job whose ranks hang soon and find each other at a port of their own.
    fn new() -> Option<Self> {
        let (torch, turn) = pypi()?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr()).unwrap().port();
        let libraries = torch.library_path().expect("the libraries of stubs").into_string().unwrap();
        let job = Job::new()
            .with("LD_LIBRARY_PATH", &libraries)
            .with("MASTER_ADDR", "127.0.0.1")
            .with("MASTER_PORT", &port.to_string())
            .with("OMP_NUM_THREADS", "1")
            // The ranks meet before their first collective, and then run in step, but two cores are
            // few for them.
            .with("XPU_TIMER_HANG_TIMEOUT", "8")
            .with("XPU_TIMER_SAMPLE_INTERVAL", "1")
            .with("XPU_TIMER_LINGER", "120");
        Some(Torch { torch, job, _turn: turn })
    }

    /// Adds the words that start the ranks of an example to a command of this Python.
    fn words(command: &mut Command, ranks: u32, script: &str, arguments: &[&str]) {
        let examples = tree().join("tests/examples");
        command.arg(examples.join("run_ranks.py")).arg(format!("--nproc={ranks}"));
        command.arg(examples.join(script)).args(arguments);
    }

    /// The ranks under the launcher.
    fn launch(&self, script: &str, arguments: &[&str]) -> Process {
        let mut command = self.job.launch(self.torch.python());
        Self::words(&mut command, RANKS, script, arguments);
        Process::spawn(&mut command)
    }
}

fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

/// How long four ranks on a busy machine may take from their start to a verdict.
const LONG: std::time::Duration = PATIENCE.saturating_mul(4);

/// Runs the example with a fault on rank 2 and checks the verdict; what each of `parts` says must
/// be in its sentence.
#[track_caller]
fn expect(fault: &[&str], cause: &str, parts: &[&str]) {
    let Some(torch) = Torch::new() else { return };
    let _ranks = torch.launch("torch_cuda.py", &[&["--fault"], fault].concat());
    check(&torch.job.wait_incident(1, LONG), cause, parts);
}

#[track_caller]
fn check(incident: &Incident, cause: &str, parts: &[&str]) {
    let text = text(incident);
    assert_eq!(incident.verdict["cause"], cause, "{text}");
    assert_eq!(incident.verdict["culprits"], json!([2]), "{text}");
    assert_eq!(incident.verdict["confidence"], "high", "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for part in parts {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
}

#[test]
fn a_rank_misses_a_step_of_ddp() {
    let parts = ["has not entered all_reduce", "in wait_for_shard", "ranks 0-1, 3 wait"];
    expect(&["ddp", "--parts", "ddp"], "missing_rank", &parts);
}

#[test]
fn a_rank_misses_a_step_of_fsdp() {
    let parts = ["has not entered all_gather", "in wait_for_shard", "ranks 0-1, 3 wait"];
    expect(&["fsdp2", "--parts", "fsdp2"], "missing_rank", &parts);
}

#[test]
fn a_rank_is_missing_from_its_tensor_parallel_group() {
    // Rank 3 waits for it in their row; ranks 0 and 1 wait in the columns, the one for it and the
    // other for rank 3.
    expect(
        &["tensor_parallel"],
        "missing_rank",
        &["Rank 2 has not entered all_reduce", "in wait_for_shard", "(2 ranks)"],
    );
}

#[test]
fn a_rank_misses_a_step_of_fsdp_over_tensor_parallelism() {
    // Rank 3 waits for it in their row, ranks 0 and 1 in the columns and in their own row.
    let parts = ["Rank 2 has not entered all_", "in wait_for_shard", "(2 ranks)"];
    expect(&["sharded", "--parts", "sharded"], "missing_rank", &parts);
}

#[test]
fn a_rank_misses_an_object_collective_on_gloo_beside_nccl() {
    let parts = ["Rank 2 has not entered all_gather", "in wait_for_shard", "ranks 0-1, 3 wait for it"];
    expect(&["objects", "--parts", "objects"], "missing_rank", &parts);
}

#[test]
fn a_stage_of_a_pipeline_stops() {
    expect(&["pipeline"], "p2p_unmatched", &["Rank 2 does not receive from rank 1", "in wait_for_shard"]);
}

#[test]
fn a_rank_skips_a_collective_and_continues() {
    expect(&["skip"], "op_mismatch", &["rank 2 runs all_gather", "while ranks 0-1, 3 run all_reduce"]);
}

#[test]
fn a_rank_skips_a_bucket() {
    expect(&["shapes"], "size_mismatch", &["rank 2 runs all_reduce of 64 elements", "run all_reduce of 32 elements"]);
}

#[test]
fn a_rank_raises() {
    expect(&["exception", "--parts", "ddp"], "process_dead", &["Rank 2 has exited (exit code 1)", "ranks 0-1, 3 wait"]);
}

#[test]
fn the_verdict_is_there_before_torch_ends_the_job_itself() {
    const WATCHDOG: &str = "timeout watchdog detected operation timeout";
    let Some(torch) = Torch::new() else { return };
    let arguments = ["--parts", "ddp", "--fault", "ddp", "--timeout", "40"];
    let ranks = torch.launch("torch_cuda.py", &arguments);
    check(&torch.job.wait_incident(1, LONG), "missing_rank", &["has not entered all_reduce", "in wait_for_shard"]);
    assert!(!ranks.stderr().contains(WATCHDOG), "{}", ranks.stderr());
    // xpu_timer does not change what torch does; the missing rank has nothing to time out.
    wait_until(LONG, "the watchdogs of three ranks", || ranks.stderr().matches(WATCHDOG).count() >= 3);
}

#[test]
fn torchrun_restarts_a_job_on_the_device_that_hung_and_was_ended() {
    let Some(mut torch) = Torch::new() else { return };
    // Ranks of a second attempt find NCCL's id of the first one in the store of the agent, and wait
    // for ever, unless each attempt has a store of its own.
    torch.job = torch.job.with("XPU_TIMER_HANG_KILL", "1").with("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1");
    let mut command = torch.job.launch(torch.torch.python());
    command.args(["-m", "torch.distributed.run", "--nproc-per-node=4", "--max-restarts=1", "--local-addr=127.0.0.1"]);
    command
        .args(["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"])
        .arg(tree().join("tests/examples/torch_cuda.py"));
    let agent = Process::spawn(command.args(["--parts", "ddp", "--fault", "once"]));
    let incident = torch.job.wait_incident(1, LONG);
    check(&incident, "missing_rank", &["has not entered all_reduce", "in wait_for_shard"]);
    assert_eq!(incident.verdict["attempt"], 0, "{}", text(&incident));
    let output = agent.wait(LONG);
    assert_eq!(output.code(), 0, "{}{}", output.stdout, output.stderr);
    for rank in 0..RANKS {
        assert!(output.stdout.contains(&format!("rank {rank} done")), "{}{}", output.stdout, output.stderr);
    }
    wait_until(PATIENCE, "the incident is closed", || torch.job.incidents()[0].verdict["status"] != "open");
    assert_eq!(torch.job.incidents().len(), 1, "{}", torch.job.logs());
}
