//! Real PyTorch, the CUDA build of PyPI, with its own ProcessGroupNCCL on the simulated device. `cargo xtask test --torch` sets
//! it up and runs it; in a clean clone that is 5.4 GB and some minutes, too much for every run of CI.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
};

use serde_json::json;
use xpu_timer_tests::{Job, PATIENCE, Process, torch_preloads, torch_venv, tree};

/// Four ranks of the example under the launcher.
fn ranks(job: &Job, arguments: &[&str]) -> Process {
    let python = torch_venv().expect("the virtual environment with PyPI's torch");
    let preloads = torch_preloads(&job.dir).expect("the simulated libraries and stubs");
    let preloads: Vec<String> = preloads.iter().map(|path| path.display().to_string()).collect();
    let examples = tree().join("tests/examples");
    let mut command = job.launch(python);
    command.arg(examples.join("run_ranks.py")).args(["--nproc", "4"]).arg(examples.join("torch_cuda.py"));
    Process::spawn(command.args(arguments).env("LD_PRELOAD", preloads.join(":")))
}

/// Starting four real torches takes many seconds on a small machine, and differs between the ranks.
fn job() -> Job {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr()).expect("a free port");
    Job::new()
        .with("XPU_TIMER_HANG_TIMEOUT", "20")
        .with("XPU_TIMER_SAMPLE_INTERVAL", "1")
        .with("XPU_TIMER_LINGER", "120")
        .with("MASTER_ADDR", "127.0.0.1")
        .with("MASTER_PORT", &port.port().to_string())
        .with("OMP_NUM_THREADS", "1")
}

#[test]
#[ignore = "cargo xtask test --torch sets up PyPI's torch and runs it"]
fn torch_of_pypi_skips_a_step_of_ddp() {
    let job = job();
    let _ranks = ranks(&job, &["--parts", "ddp", "--fault", "step"]);
    // The watchdog of torch speaks after ten minutes.
    let incident = job.wait_incident(1, PATIENCE * 4);
    let text = fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt");
    assert_eq!(incident.verdict["cause"], "missing_rank", "{text}");
    assert_eq!(incident.verdict["culprits"], json!([2]), "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for part in ["has not entered all_reduce", "in wait_for_shard", "ranks 0-1, 3 wait"] {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
}

#[test]
#[ignore = "cargo xtask test --torch sets up PyPI's torch and runs it"]
fn torch_of_pypi_trains_with_ddp_autocast_and_a_graph() {
    let job = job();
    let output = ranks(&job, &["--parts", "ddp", "autocast", "graph"]).wait(PATIENCE * 4);
    for rank in 0..4 {
        assert!(output.stdout.contains(&format!("rank {rank} done")), "{}{}", output.stdout, output.stderr);
    }
    assert_eq!(job.incidents().len(), 0, "{}", job.logs());
}
