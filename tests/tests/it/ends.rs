//! Ranks that end: in every way, at every moment, and however they were started. What the others
//! wait for is said with the way in which it ended, and a job that ends as it should is no
//! incident.

use std::{fs, process::Command};

use nix::sys::signal::Signal;
use serde_json::json;
use xpu_timer_proto::{procfs, v1::hook_message::Message};
use xpu_timer_tests::{Incident, Job, PATIENCE, Process, python, tree, wait_until};

use crate::collector::fake::{FakeHook, collector};

const RANKS: &str = "4";

fn job() -> Job {
    Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_SAMPLE_INTERVAL", "1")
}

/// Ranks that a launcher such as torchrun starts.
fn started(job: &Job, arguments: &[&str]) -> Process {
    let examples = tree().join("tests/examples");
    let mut command = job.launch(python());
    command.arg(examples.join("run_ranks.py")).args(["--nproc", RANKS]).arg(examples.join("ends.py"));
    Process::spawn(command.args(arguments))
}

/// Ranks that the program starts itself.
fn multiprocessing(job: &Job, method: &str, arguments: &[&str]) -> Process {
    let mut command: Command = job.launch(python());
    command.arg(tree().join("tests/examples/ends.py")).args(["--nproc", RANKS, "--method", method]);
    Process::spawn(command.args(arguments))
}

fn text(incident: &Incident) -> String {
    fs::read_to_string(incident.path.join("verdict.txt")).expect("every incident has a verdict.txt")
}

/// Waits for the verdict on rank 2, whose sentence must hold these words.
#[track_caller]
fn expect(job: &Job, cause: &str, words: &[&str]) {
    let incident = job.wait_incident(1, PATIENCE);
    let text = text(&incident);
    assert_eq!(incident.verdict["cause"], cause, "{text}");
    assert_eq!(incident.verdict["culprits"], json!([2]), "{text}");
    assert_eq!(incident.verdict["confidence"], "high", "{text}");
    let sentence = incident.verdict["sentence"].as_str().expect("a sentence");
    for word in words {
        assert!(sentence.contains(word), "{word} in: {sentence}");
    }
}

#[track_caller]
fn ended(how: &[&str], words: &[&str]) {
    let job = job();
    let _ranks = started(&job, &[&["--rank", "2", "--how"], how].concat());
    expect(&job, "process_dead", &[words, &["ranks 0-1, 3 wait for it"]].concat());
}

#[test]
fn a_rank_that_leaves_while_others_wait_is_named_with_its_exit_code() {
    ended(&["exit", "--code", "3"], &["Rank 2 has exited (exit code 3)", "all_reduce 2"]);
    ended(&["exit"], &["Rank 2 has exited (exit code 0)", "all_reduce 2"]);
    ended(&["raise"], &["Rank 2 has exited (exit code 1: ValueError: a bad sample at ends.py:", "all_reduce 2"]);
}

#[test]
fn a_rank_that_ends_without_goodbye_is_named_with_its_exit_code_or_signal() {
    ended(&["_exit", "--code", "5"], &["Rank 2 is dead (exit code 5)", "all_reduce 2"]);
    ended(&["killed"], &["Rank 2 is dead (killed by SIGKILL)", "all_reduce 2"]);
    ended(&["abort"], &["Rank 2 is dead (killed by SIGABRT", "all_reduce 2"]);
}

#[test]
fn a_rank_that_ends_before_its_first_collective_belongs_to_its_job() {
    ended(&["_exit", "--code", "9", "--moment", "made"], &["Rank 2 is dead (exit code 9)"]);
    let raised = ["Rank 2 has exited (exit code 1: ValueError: a bad sample", "creation of communicator"];
    ended(&["raise", "--moment", "start"], &raised);
}

#[test]
fn ranks_of_multiprocessing_are_ranks() {
    let stays = ["--rank", "2", "--how", "stay"];
    let place = ["Rank 2 has not entered all_reduce 2", "in wait_for_shard", "ranks 0-1, 3 wait for it"];
    for method in ["spawn", "forkserver"] {
        let job = job();
        let _ranks = multiprocessing(&job, method, &stays);
        expect(&job, "missing_rank", &place);
    }
    let job = job();
    let _ranks = multiprocessing(&job, "fork", &["--rank", "2", "--how", "exit", "--code", "3"]);
    // Children of a fork leave by _exit, whatever their code does.
    expect(&job, "process_dead", &["Rank 2 is dead (exit code 3)", "ranks 0-1, 3 wait for it"]);
}

#[test]
fn ranks_that_end_together_after_their_work_are_not_an_incident() {
    let job = job();
    for how in [&["--how", "_exit"][..], &["--how", "_exit", "--moment", "start"], &[]] {
        let output = started(&job, how).wait(PATIENCE);
        assert_eq!(output.code(), 0, "{}", output.stderr);
    }
    wait_until(PATIENCE, "no rank is left", || {
        let ranks = job.status().ok().and_then(|status| status["ranks"].as_array().cloned()).unwrap_or_default();
        ranks.iter().all(|rank| rank["presence"] != "present")
    });
    assert_eq!(job.incidents().len(), 0, "{}", job.logs());
}

#[test]
fn a_rank_that_is_gone_before_its_hello_is_read_belongs_to_its_job() {
    let job = job().with("MASTER_ADDR", "10.0.0.9").with("MASTER_PORT", "29500");
    let collector = collector(&job, &[]);
    let mut rank = FakeHook::start(&job, "short", 1, 2);
    rank.connect(&job);
    collector.signal(Signal::SIGSTOP);
    wait_until(PATIENCE, "the collector stands still", || {
        procfs::stat(collector.pid()).is_ok_and(|stat| stat.state == 'T')
    });
    rank.send(Message::Hello(rank.hello.clone()));
    // It is killed and waited for: nothing of it is in /proc any more.
    drop(rank);
    collector.signal(Signal::SIGCONT);
    let mut found = None;
    wait_until(PATIENCE, "the collector knows of its end", || {
        found = job.status().ok().and_then(|status| status["ranks"].as_array()?.first().cloned());
        found.as_ref().is_some_and(|rank| rank["presence"] == "dead")
    });
    let rank = found.expect("the loop ends with it");
    assert_eq!((&rank["job"], &rank["rank"]), (&json!("short (10.0.0.9:29500)"), &json!(1)), "{rank}");
    // Linux before 6.15 forgets how a process ended when it is waited for.
    assert!(rank["exit"].is_null() || rank["exit"] == "killed by SIGKILL", "{rank}");
}

/// A front end that starts two ranks, which communicate for a while and then end or stand, and
/// ends or stays itself.
const FRONT_END: &str = r#"
import os, subprocess, sys, time

def stay_away():
    time.sleep(600)

def rank(number, how):
    import cuda
    cuda.set_device(number)
    communicator = cuda.Communicator.create("world", number, 2)
    stream, buffer = cuda.Stream(), cuda.Buffer(64)
    for _ in range(20):
        communicator.all_reduce(buffer, stream)
        stream.synchronize()
    if how == "signal":
        os.abort()
    if how == "fail":
        sys.exit(3)
    if how == "stand" and number == 1:
        time.sleep(1)
        stay_away()
    if how == "stand":
        communicator.all_reduce(buffer, stream)
        stream.synchronize()

role, how = sys.argv[1:]
if role != "front_end":
    rank(int(role), how)
    sys.exit(0)
variables = lambda number: dict(os.environ, RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number))
ranks = [subprocess.Popen([sys.executable, __file__, str(number), how], env=variables(number)) for number in range(2)]
if how == "stand":
    time.sleep(1)
    sys.exit(7)
for one in ranks:
    one.wait()
print("ended", flush=True)
time.sleep(600)
"#;

fn front_end(job: &Job, how: &str) -> Process {
    let script = job.dir.join("serve.py");
    fs::write(&script, FRONT_END).expect("the job's folder");
    let mut command = job.launch(python());
    command.env("PYTHONPATH", tree().join("tests/examples")).arg(script).args(["front_end", how]);
    Process::spawn(&mut command)
}

#[test]
fn ranks_that_all_die_while_their_front_end_lives_are_an_incident() {
    for (how, exit) in [("signal", "SIGABRT"), ("fail", "exit code 3")] {
        let job = job();
        let _front_end = front_end(&job, how);
        let incident = job.wait_incident(1, PATIENCE);
        let text = text(&incident);
        assert_eq!(incident.verdict["trigger"]["kind"], "death", "{text}");
        assert_eq!(incident.verdict["cause"], "process_dead", "{text}");
        assert_eq!(incident.verdict["culprits"], json!([0, 1]), "{text}");
        assert!(text.contains(exit), "{text}");
        assert_eq!(job.incidents().len(), 1, "{}", job.logs());
    }
}

#[test]
fn ranks_that_all_end_in_order_while_their_front_end_lives_are_no_incident() {
    let job = job();
    let mut front_end = front_end(&job, "succeed");
    front_end.wait_for("ended", PATIENCE);
    let uptime = || job.status().ok().and_then(|status| status["uptime_s"].as_f64()).unwrap_or_default();
    let ended = uptime();
    wait_until(PATIENCE, "an incident would be there", || uptime() > ended + 8.0);
    assert!(job.incidents().is_empty(), "{}", job.logs());
}

#[test]
fn the_end_of_the_launched_command_is_in_the_verdict() {
    let job = job();
    let front_end = front_end(&job, "stand");
    let incident = job.wait_incident(1, PATIENCE);
    let text = text(&incident);
    assert_eq!(incident.verdict["culprits"], json!([1]), "{text}");
    let wanted = format!("its launched command, pid {} (", front_end.pid());
    let errors: Vec<&str> = incident.verdict["ranks"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|group| group["errors"].as_array().into_iter().flatten().filter_map(|error| error.as_str()))
        .collect();
    let named = errors.iter().filter(|error| error.starts_with(&wanted) && error.contains("serve.py front_end stand"));
    assert!(named.count() > 0 && text.contains("has ended"), "{text}");
}
