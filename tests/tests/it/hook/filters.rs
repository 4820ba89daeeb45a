//! Programs that put a filter of system calls on themselves: the hook makes no call that the filter
//! forbids.

use std::{
    fs,
    os::unix::{fs::FileExt, process::ExitStatusExt},
    process::Command,
};

use xpu_timer_proto::{
    ring::{filtered, header},
    v1::Op,
};
use xpu_timer_tests::{FakeCollector, Job, Output, PATIENCE, Process, ReadMode, idle_library, wait_until};

use crate::cost::{hooked_program, idle_libraries};

const SOURCE: &str = include_str!("filters.c");

/// Makes the libraries of the program, and returns the options of its linker.
fn libraries(job: &Job) -> Vec<String> {
    idle_libraries(job);
    idle_library(&job.dir, "libmpi.so.40", "-DMPI");
    let folder = format!("-L{}", job.dir.display());
    let link =
        ["-O2", &folder, "-l:libcuda.so.1", "-l:libnccl.so.2", "-l:libmpi.so.40", "-Wl,-rpath,$ORIGIN", "-pthread"];
    link.map(String::from).to_vec()
}

fn assert_continued(how: &str, action: &str, output: &Output) {
    let ended = (output.status.code(), output.status.signal());
    assert_eq!(
        (ended, output.stdout.as_str(), output.stderr.as_str()),
        ((Some(7), None), "went on\n", ""),
        "{how} {action}"
    );
}

/// The program under the hook.
fn shut_in(job: &Job, change: impl FnOnce(&mut Command)) -> Process {
    let link = libraries(job);
    let link: Vec<&str> = link.iter().map(String::as_str).collect();
    hooked_program(job, "filters", SOURCE, &link, change)
}

/// The program under the hook, and its collector.
fn start(job: &Job, how: &str, action: &str) -> (FakeCollector, Process) {
    let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
    let process = shut_in(job, |command| {
        command.arg(how).arg(action).arg(&job.dir);
    });
    (collector, process)
}

fn threads(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// All cases at once, because each takes some seconds of its own.
#[test]
fn a_program_that_installs_a_filter_continues() {
    let cases = ["prctl", "seccomp", "tsync", "handle"]
        .into_iter()
        .flat_map(|how| ["kill", "trap", "errno"].map(|action| (how, action)));
    let cases = cases.chain([("strict", "kill")]);
    let started: Vec<_> = cases
        .map(|(how, action)| {
            let job = Job::new();
            let (collector, process) = start(&job, how, action);
            assert_eq!(collector.wait_hello(), process.pid());
            wait_until(PATIENCE, "its watcher", || threads(process.pid()) == 2);
            fs::write(job.dir.join("go"), "").unwrap();
            (how, action, job, collector, process)
        })
        .collect();
    for (how, action, _job, collector, process) in started {
        let pid = process.pid();
        if how == "tsync" {
            wait_until(PATIENCE, "its watcher is gone", || threads(pid) < 2);
        }
        assert_continued(how, action, &process.wait(PATIENCE));
        let record = collector.ring(pid);
        assert_eq!((record.kernels_launched, record.collectives_launched), (30_010, 30_010), "{how} {action}");
        assert_eq!(record.health.unwrap().panics, 0);
        let words = collector.header(pid);
        let seen = if how == "tsync" { filtered::PROGRAM | filtered::WATCHER } else { filtered::PROGRAM };
        // The strict mode leaves no way to end but the bare system call.
        let goodbye = u64::from(how != "strict");
        assert_eq!((words[header::FILTERS_SEEN], words[header::GOODBYE]), (u64::from(seen), goodbye), "{how} {action}");
    }
}

#[test]
fn a_program_with_a_filter_before_its_first_launch_is_not_recorded() {
    for action in ["kill", "trap", "errno"] {
        let job = Job::new();
        let (collector, process) = start(&job, "early", action);
        assert_continued("early", action, &process.wait(PATIENCE));
        assert_eq!(collector.hellos().len(), 0);
    }
}

/// The filters of a program are those of the one that it executes, which cannot ask what they
/// forbid.
#[test]
fn a_program_that_inherits_a_filter_at_exec_is_not_recorded() {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    for action in ["kill", "trap", "errno"] {
        let job = Job::new();
        let collector = FakeCollector::listen(&job.dir.join("fake.sock"), ReadMode::Reads);
        let process = shut_in(&job, |command| {
            let launched = format!("{}:{}", own_filters(), boot.trim());
            command.env("XPU_TIMER_FILTERS", launched).env("XPU_TIMER_COLLECTOR_PID", std::process::id().to_string());
            command.arg("exec").arg(action).arg(&job.dir);
        });
        assert_continued("exec", action, &process.wait(PATIENCE));
        assert_eq!(collector.hellos().len(), 0, "{action}");
    }
}

fn own_filters() -> u32 {
    xpu_timer_proto::ring::filters(&fs::read("/proc/self/status").unwrap())
}

#[test]
fn a_filter_that_the_system_refuses_changes_nothing() {
    let job = Job::new();
    let (collector, process) = start(&job, "refused", "kill");
    let pid = collector.wait_hello();
    fs::write(job.dir.join("go"), "").unwrap();
    assert_continued("refused", "kill", &process.wait(PATIENCE));
    wait_until(PATIENCE, "it says goodbye", || collector.goodbyes().contains(&pid));
    let record = collector.ring(pid);
    // The message that it polls for never comes.
    let pending = record.operations.iter().filter(|one| one.completed_ns == 0 && one.op() != Op::Recv);
    let pending: Vec<_> = pending.collect();
    assert!(pending.is_empty(), "the watcher goes on: {pending:?}");
    assert_eq!(record.collectives_launched, 30_010);
    assert_eq!(collector.header(pid)[header::FILTERS_SEEN], 0);
}

/// Only the collector detects a filter that is installed without the C library, within a second.
/// Until then, a job in its steady state makes no system call for the hook. A thread that launches
/// in a burst makes one when it overtakes the watcher.
#[test]
fn the_collector_sees_a_filter_that_the_hook_cannot_see() {
    let stops = "its hook stops reporting, so only its peers show a hang of this rank";
    for (how, action, words) in [
        ("inline", "kill", "its threads make no system call for the hook"),
        ("inline-tsync", "kill", stops),
        // The filter ends the watcher before the collector looks.
        ("inline-tsync", "kill-thread", stops),
    ] {
        let job = Job::new();
        let link = libraries(&job);
        let link: Vec<&str> = link.iter().map(String::as_str).collect();
        let program = xpu_timer_tests::compile_c(&job.dir, "filters", SOURCE, &link);
        let mut command = job.launch(program);
        command.arg(how).arg(action).arg(&job.dir).env("RANK", "0").env("WORLD_SIZE", "1");
        let mut process = Process::spawn(command.env_remove("LD_LIBRARY_PATH"));
        let logged = |text: &str| wait_until(PATIENCE, text, || job.logs().contains(text));
        logged("registered");
        fs::write(job.dir.join("go"), "").unwrap();
        wait_until(PATIENCE, words, || {
            assert_eq!(process.try_wait(), None, "{how} {action}: it ended\n{}", job.logs());
            job.logs().contains(words)
        });
        // From here on, a burst makes no system call either.
        let seen = fs::OpenOptions::new().write(true).open(job.dir.join("seen")).unwrap();
        seen.write_all_at(b"1", 0).unwrap();
        assert_continued(how, action, &process.wait(PATIENCE));
        logged("sent Goodbye");
        assert!(!job.logs().contains("ended without Goodbye") && job.incidents().is_empty(), "{}", job.logs());
    }
}
