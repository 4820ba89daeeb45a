//! The whole way on real processes: ranks under `xpu_timer_launch`, a hang, a finished incident
//! folder with the right verdict.

use std::{
    env, fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use xpu_timer_tests::{
    GEVENT, Incident, Job, PATIENCE, Process, TRIO, artifacts, python, python_with, tree, wait_until,
};

const RANKS: u32 = 4;

fn culprits(incident: &Incident) -> &Value {
    &incident.verdict["culprits"]
}

/// Sentence and evidence, for messages and for looking up words.
fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

/// Runs the training program until its first incident is finished.
fn hang(job: &Job, arguments: &[&str]) -> (Process, Incident) {
    let ranks = job.train(RANKS, arguments);
    let incident = job.wait_incident(1, PATIENCE);
    (ranks, incident)
}

/// Runs a hang and compares its verdict.
fn expect(job: Job, arguments: &[&str], cause: &str, culprit: &[u32]) {
    let (_ranks, incident) = hang(&job, arguments);
    assert_eq!(incident.verdict["cause"], cause, "{}", text(&incident));
    assert_eq!(culprits(&incident), &json!(culprit), "{}", text(&incident));
}

#[test]
fn a_data_loader_that_waits_for_a_shard() {
    let job = Job::new();
    let (_ranks, incident) = hang(&job, &["--fault=loader"]);
    let text = text(&incident);
    assert_eq!(incident.verdict["cause"], "data_loader", "{text}");
    assert_eq!(culprits(&incident), &json!([2]), "{text}");
    assert_eq!(incident.verdict["victims"], json!([0, 1, 3]), "{text}");
    // Its position, and that of the others: steps 0 to 29 had one collective each.
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for part in ["train.py:", "in DataLoader.__next__", "read_shard (train.py:", "all_reduce 31 of communicator 0x"] {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
    assert_eq!(incident.verdict["confidence"], "high", "{text}");

    for rank in 0..RANKS {
        let dump = incident.path.join(format!("{rank:05}-{RANKS:05}.stacktrace"));
        assert!(fs::metadata(&dump).is_ok_and(|file| file.len() > 0), "{}", dump.display());
    }
    let python = fs::read_to_string(incident.path.join("py_stack")).expect("py_stack");
    let stuck = python.lines().find(|line| line.contains("read_shard@")).expect("the reader's stack is drawn");
    assert!(stuck.contains("@2|0-1/3"), "{stuck}");
    let native = fs::read_to_string(incident.path.join("cpp_stack")).expect("cpp_stack");
    assert!(native.contains("@0-1/3|2"), "the victims' common native frames are drawn");
    incident.assert_in_time(Duration::from_secs(2));
}

#[test]
fn every_rank_under_its_own_launcher_as_under_mpirun() {
    let job = Job::new();
    let script = tree().join("tests/examples/train.py");
    let rank = |rank: u32| {
        let mut command = job.launch(python());
        command.arg(&script).args(["--fault=loader", "--fault-rank=1"]);
        let variables = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", RANKS), ("LOCAL_WORLD_SIZE", RANKS)];
        Process::spawn(command.envs(variables.map(|(name, value)| (name, value.to_string()))))
    };
    // All at once: they must agree on one collector.
    let ranks: Vec<Process> = (0..RANKS).map(rank).collect();
    let incident = job.wait_incident(1, PATIENCE);
    assert_eq!(culprits(&incident), &json!([1]), "{}", text(&incident));
    let collectors = job.processes().into_iter().filter(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim().starts_with("xpu_timer_colle"))
    });
    assert_eq!(collectors.count(), 2, "one collector: its supervisor and its worker");
    assert!(ranks.iter().all(|rank| rank.stderr().is_empty()), "rank 0 prints nothing: {:?}", ranks[0].stderr());
}

#[test]
fn a_skipped_collective() {
    expect(Job::new(), &["--fault=skip", "--steps=60"], "missing_rank", &[2]);
}

#[test]
fn another_operation() {
    expect(Job::new(), &["--fault=op", "--fault-rank=0"], "op_mismatch", &[0]);
}

#[test]
fn another_size() {
    expect(Job::new(), &["--fault=size"], "size_mismatch", &[2]);
}

#[test]
fn a_rank_that_ends_with_an_exception() {
    expect(Job::new(), &["--fault=raise"], "process_dead", &[2]);
}

#[test]
fn a_rank_that_never_enters_the_communicator() {
    expect(Job::new().with("XPU_SIM_FAULT", "init_skip:rank=2"), &[], "comm_init", &[2]);
}

#[test]
fn a_stuck_kernel() {
    expect(Job::new().with("XPU_SIM_FAULT", "stuck_kernel:rank=2,n=200"), &[], "kernel_hang", &[2]);
}

#[test]
fn a_network_stall() {
    expect(Job::new().with("XPU_SIM_FAULT", "stall:bytes=200000"), &[], "network_stall", &[]);
}

#[test]
fn a_killed_rank() {
    expect(Job::new(), &["--fault=killed", "--fault-rank=0"], "process_dead", &[0]);
}

#[test]
fn a_stopped_rank() {
    expect(Job::new(), &["--fault=stopped"], "process_stopped", &[2]);
}

/// The verdict on two ranks, when rank 1 waits for a task or a greenlet, and what the viewer prints
/// about rank 1.
fn waits_for_nobody(python: &Path, fault: &str, place: &str, line: &str, shown: &str) {
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "2").with("XPU_TIMER_SAMPLE_INTERVAL", "0.5");
    let examples = tree().join("tests/examples");
    let mut command = job.launch(python);
    command.arg(examples.join("run_ranks.py")).arg("--nproc=2").arg(examples.join("train.py"));
    let _ranks = Process::spawn(command.args(["--fault-rank=1", "--fault-step=10"]).arg(format!("--fault={fault}")));
    let incident = job.wait_incident(1, PATIENCE);
    let text = text(&incident);
    assert_eq!(culprits(&incident), &json!([1]), "{text}");
    assert_eq!(incident.verdict["cause"], "missing_rank", "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    assert!(sentence.contains(place), "no {place} in: {sentence}");
    let lines = incident.verdict["evidence"].as_array().expect("a list");
    let lines: Vec<&str> = lines.iter().filter_map(|line| line["text"].as_str()).collect();
    let is_line = |text: &&str| text.starts_with(line) && text.contains(" at train.py:");
    assert!(lines.iter().any(is_line), "no {line} in: {lines:#?}");
    let tasks = fs::read_to_string(incident.path.join("task_stack")).expect("task_stack");
    assert!(tasks.contains(&format!("{shown}@")) && tasks.contains("@MainThread@1|0;"), "{tasks}");
    let python = fs::read_to_string(incident.path.join("py_stack")).expect("py_stack");
    assert!(!python.contains("@MainThread@"), "{python}");
    let viewer = artifacts().bin("xpu_timer_stacktrace_viewer");
    let mut viewer = Command::new(viewer);
    let summary = Process::spawn(viewer.args(["--text", "--rank=1", "--path"]).arg(&incident.path)).wait(PATIENCE);
    assert!(summary.stdout.contains(&format!("\n{line}")), "{}", summary.stdout);
}

#[test]
fn a_rank_that_awaits_a_future_of_asyncio() {
    let line = "3 tasks 'labels-…' of rank 1 await a future";
    waits_for_nobody(python().as_ref(), "task", "in receive_labels", line, "receive_labels");
}

/// Needs gevent from PyPI: `XPU_TIMER_TEST_LONG=1`.
#[test]
fn a_rank_that_joins_greenlets_of_gevent() {
    if env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    let program = python_with(GEVENT, python().as_ref(), "default").expect("gevent");
    waits_for_nobody(&program, "greenlet", "in join_labels", "3 greenlets 'Greenlet' of rank 1 wait", "receive");
}

/// Needs trio from PyPI: `XPU_TIMER_TEST_LONG=1`.
#[test]
fn a_rank_whose_tasks_of_trio_wait() {
    if env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return;
    }
    let program = python_with(TRIO, python().as_ref(), "default").expect("trio");
    for fault in ["trio", "anyio"] {
        let line = "3 tasks 'labels-…' of rank 1 await a wakeup";
        waits_for_nobody(&program, fault, ".receive_labels (C", line, "receive_labels");
    }
}

#[test]
fn a_rank_missing_from_a_child_of_a_grown_communicator() {
    // A rank that was there before, and the one that joined.
    for away in [1, 3] {
        let job = Job::new().with("AWAY", &away.to_string());
        let _ranks = grown(&job);
        let incident = job.wait_incident(1, PATIENCE);
        assert_eq!(incident.verdict["cause"], "missing_rank", "{}", text(&incident));
        assert_eq!(culprits(&incident), &json!([away]), "{}", text(&incident));
        let victims: Vec<u32> = (0..RANKS).filter(|rank| *rank != away).collect();
        assert_eq!(incident.verdict["victims"], json!(victims), "{}", text(&incident));
        let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
        assert!(sentence.contains("all_reduce 3 of"), "{sentence}");
    }
    let job = Job::new();
    let output = grown(&job).wait(PATIENCE);
    assert_eq!((output.code(), output.stdout.matches("ok").count()), (0, 4), "{}", output.stderr);
    assert_eq!(job.incidents().len(), 0, "{}", job.logs());
}

/// Four ranks that make communicators of one which the last of them has joined later.
fn grown(job: &Job) -> Process {
    let mut command = job.launch(python());
    command.arg(tree().join("tests/examples/run_ranks.py")).arg(format!("--nproc={RANKS}"));
    command.arg(tree().join("tests/tests/it/sim/checks.py")).arg("children_of_a_grown_one");
    Process::spawn(command.env("PYTHONPATH", tree().join("tests/examples")))
}

#[test]
fn two_hangs_are_two_incidents_and_a_hang_that_ends_is_closed() {
    let job = Job::new();
    // The shards are ten seconds late, five more than the timeout: both hangs resolve by
    // themselves.
    let ranks = job.train(RANKS, &["--fault=pause", "--fault-step", "20", "60", "--steps=90"]);
    let first = job.wait_incident(1, PATIENCE);
    assert_eq!(culprits(&first), &json!([2]), "{}", text(&first));
    let second = job.wait_incident(2, PATIENCE);
    assert_eq!(culprits(&second), &json!([2]), "{}", text(&second));
    let output = ranks.wait(PATIENCE);
    assert_eq!(output.code(), 0, "{}", output.stderr);
    wait_until(PATIENCE, "both incidents are closed as resolved", || {
        job.incidents().iter().filter(|incident| incident.verdict["status"] == "resolved").count() == 2
    });
    assert_eq!(job.incidents().len(), 2);
}

#[test]
fn a_healthy_minute_has_no_incident_and_no_output() {
    let job = Job::new();
    let output = job.train(RANKS, &["--seconds=60"]).wait(Duration::from_secs(120));
    assert_eq!(output.code(), 0, "{}", output.stderr);
    assert_eq!(output.stderr, "", "nothing is printed into the job");
    assert!(
        output.stdout.lines().all(|line| line.starts_with("step ") || line.starts_with("rank ")),
        "{}",
        output.stdout
    );
    assert_eq!(job.incidents().len(), 0, "{}", job.logs());
    let status = job.status().expect("the collector answers");
    assert_eq!(status["incidents"].as_array().map(Vec::len), Some(0), "{status}");
}

#[test]
fn a_job_that_is_stopped_and_continued_as_a_whole_is_not_an_incident() {
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_IDLE_TIMEOUT", "3");
    let mut ranks = job.train(RANKS, &[]);
    ranks.wait_for("step 20 ", PATIENCE);
    let pids: Vec<i32> = job.status().expect("/status")["ranks"].as_array().map_or(Vec::new(), |ranks| {
        ranks.iter().filter_map(|rank| rank["pid"].as_i64()).map(|pid| pid as i32).collect()
    });
    assert_eq!(pids.len(), RANKS as usize);
    let signal = |signal: Signal| {
        for pid in &pids {
            kill(Pid::from_raw(*pid), signal).expect("the rank runs");
        }
    };
    signal(Signal::SIGSTOP);
    let since = Instant::now();
    wait_until(PATIENCE, "it was stopped for longer than its timeouts", || since.elapsed() > Duration::from_secs(8));
    signal(Signal::SIGCONT);
    let step = |ranks: &Process| ranks.stdout().matches("step ").count();
    let steps = step(&ranks);
    wait_until(PATIENCE, "it goes on", || step(&ranks) > steps + 10);
    assert_eq!(job.incidents().len(), 0, "{}", job.logs());
}

/// A program of the hang corpus without rank variables, whose processes start each other.
fn serve(job: &Job, program: &str, scenario: &str) -> Process {
    let program = tree().join("tests/hangs/programs").join(program);
    let mut command = job.launch(python());
    command.env("PYTHONPATH", tree().join("tests/examples")).env("XPU_HANGS_TRUTH", job.dir.join("truth.json"));
    Process::spawn(command.arg(program).arg(scenario))
}

#[test]
fn a_process_that_is_no_rank_is_named_with_its_pid_and_command() {
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_SAMPLE_INTERVAL", "1");
    let _server = serve(&job, "servers.py", "pipe_collector_stopped");
    let incident = job.wait_incident(1, PATIENCE);
    let truth = fs::read(job.dir.join("truth.json")).expect("the program writes the truth");
    let truth: Value = serde_json::from_slice(&truth).expect("JSON");
    let text = text(&incident);
    assert_eq!(incident.verdict["cause"], "process_stopped", "{text}");
    assert_eq!(culprits(&incident), &json!([]), "{text}");
    let process = &incident.verdict["culprit_processes"][0];
    assert_eq!((&process["rank"], &process["pid"]), (&Value::Null, &truth["culprits"][0]), "{text}");
    assert_eq!(process["command"], "VLLM::Detokenizer", "{text}");
    assert_eq!(incident.verdict["victims"], json!([0, 1, 2]), "{text}");
    assert_ne!(incident.verdict["hang"], "none", "{text}");
}

#[test]
fn of_a_server_the_worker_is_named_in_time_by_its_pid_and_title() {
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_SAMPLE_INTERVAL", "1");
    let _server = serve(&job, "servers.py", "pipe_worker_lock");
    let incident = job.wait_incident(1, PATIENCE);
    let truth = fs::read(job.dir.join("truth.json")).expect("the program writes the truth");
    let truth: Value = serde_json::from_slice(&truth).expect("JSON");
    let process = &incident.verdict["culprit_processes"][0];
    assert_eq!(process["pid"], truth["culprits"][0], "{}", text(&incident));
    assert_eq!(process["command"], "VLLM::Worker_TP2", "{}", text(&incident));
    incident.assert_in_time(Duration::from_secs(1));
}

#[test]
fn incidents_of_several_jobs_that_wait_for_one_process_name_each_other() {
    // Two trainers without a common communicator call one manager process, which reads from
    // storage.
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_SAMPLE_INTERVAL", "1");
    let _trainers = serve(&job, "engines.py", "manager_reads_index");
    let named = || -> Vec<(Value, Value)> {
        let verdicts = job.incidents().into_iter().map(|incident| incident.verdict);
        verdicts.map(|verdict| (verdict["incident"].clone(), verdict["same_culprit"].clone())).collect()
    };
    let start = Instant::now();
    loop {
        let named = named();
        if let [(one, of_one), (other, of_other)] = &named[..]
            && (of_one, of_other) == (&json!([other]), &json!([one]))
        {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{named:?}\n{}", job.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    let incidents = job.incidents();
    let pid = |incident: &Incident| incident.verdict["culprit_processes"][0]["pid"].clone();
    assert_ne!(pid(&incidents[0]), Value::Null, "{}", text(&incidents[0]));
    assert_eq!(pid(&incidents[0]), pid(&incidents[1]), "{}", text(&incidents[1]));
}

#[test]
fn an_idle_server_is_listed_as_idle_and_is_no_incident() {
    let job = Job::new().with("XPU_TIMER_SAMPLE_INTERVAL", "0.5");
    let _server = serve(&job, "servers.py", "http_idle");
    let idle = || job.status().is_ok_and(|status| status["idle"].as_array().is_some_and(|jobs| !jobs.is_empty()));
    let start = Instant::now();
    while !idle() {
        assert!(start.elapsed() < PATIENCE, "the server is not listed as idle:\n{}", job.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    let status = job.status().expect("the collector answers");
    let sentence = status["idle"][0]["sentence"].as_str().unwrap_or_default();
    assert!(sentence.ends_with("the job may be idle."), "{status}\n{}", job.logs());
    assert!(status["idle"][0]["since"].as_str().is_some_and(|since| since.ends_with('Z')), "{status}");
    assert_eq!((job.incidents().len(), &status["incidents"]), (0, &json!([])), "{}", job.logs());
}

/// Runs ranks whose kernels reduce over all devices by themselves, until their first incident.
fn device_hang(job: &Job, arguments: &[&str]) -> (Process, Incident) {
    let examples = tree().join("tests/examples");
    let mut command = job.launch(python());
    command.arg(examples.join("run_ranks.py")).arg(format!("--nproc={RANKS}"));
    let ranks = Process::spawn(command.arg(examples.join("device_reduce.py")).args(arguments));
    let incident = job.wait_incident(1, PATIENCE);
    (ranks, incident)
}

#[test]
fn a_rank_that_does_not_launch_the_kernel_for_which_the_other_devices_busy_wait() {
    for (fault, cause) in [("late", "storage_io"), ("branch", "data_loader")] {
        let job = Job::new();
        let (_ranks, incident) = device_hang(&job, &[&format!("--fault={fault}")]);
        let text = text(&incident);
        assert_eq!(incident.verdict["cause"], cause, "{text}");
        assert_eq!(culprits(&incident), &json!([2]), "{text}");
        assert_eq!(incident.verdict["victims"], json!([0, 1, 3]), "{text}");
        assert_eq!(incident.verdict["trigger"]["kind"], "operation", "{text}");
        let counts = "rank 2 has launched vllm::cross_device_reduce_1stage<float, 4> 20 times on stream 0x";
        for part in [counts, "in launch 21 of vllm::cross_device_reduce_1stage<float, 4> (4 ranks)"] {
            assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(part), "{part} in: {text}");
        }
    }
}

#[test]
fn a_kernel_that_one_rank_leaves_out_on_another_stream() {
    let job = Job::new();
    let (_ranks, incident) = device_hang(&job, &["--fault=signal", "--nccl"]);
    let text = text(&incident);
    assert_eq!(incident.verdict["cause"], "missing_rank", "{text}");
    assert_eq!(culprits(&incident), &json!([2]), "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for part in ["Rank 2 has launched c10d::symmetric_memory::put_signal_kernel 20 times", "ranks 0-1, 3 21 times"] {
        assert!(sentence.contains(part), "{part} in: {sentence}");
    }
}

#[test]
fn devices_that_all_busy_wait_in_one_kernel_accuse_no_rank() {
    let job = Job::new();
    let (_ranks, incident) = device_hang(&job, &["--fault=flag"]);
    let text = text(&incident);
    assert_eq!((&incident.verdict["cause"], culprits(&incident)), (&json!("unknown"), &json!([])), "{text}");
    assert!(text.contains("launch 1 of multimem_all_reduce_kernel"), "{text}");
}

#[test]
fn a_kernel_that_hangs_before_the_one_that_communicates() {
    let job = Job::new();
    let (_ranks, incident) = device_hang(&job, &["--fault=kernel"]);
    let text = text(&incident);
    assert_eq!(incident.verdict["cause"], "kernel_hang", "{text}");
    assert_eq!((culprits(&incident), &incident.verdict["victims"]), (&json!([2]), &json!([0, 1, 3])), "{text}");
}
