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
    ended(&["raise"], &["Rank 2 has exited (exit code 1)", "all_reduce 2"]);
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
    ended(&["raise", "--moment", "start"], &["Rank 2 has exited (exit code 1)", "creation of communicator"]);
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
