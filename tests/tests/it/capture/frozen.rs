//! A capturing process that is frozen or killed at any moment leaves no thread of the target
//! stopped, also when it was asked to stop threads.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use xpu_timer_proto::procfs;
use xpu_timer_tests::{PATIENCE, Process, artifacts, wait_until};

use super::target::{optimized, start};

const THREADS: usize = 300;

/// Threads of the target in a tracing stop or a stop.
fn stopped_threads(pid: i32) -> Vec<i32> {
    let tids = procfs::threads(pid).expect("the target lives").into_iter();
    tids.filter(|tid| procfs::thread_stat(pid, *tid).is_some_and(|stat| stat.is_stopped())).collect()
}

/// The command and its children.
fn family(command: &Process) -> Vec<Pid> {
    let pid = command.pid();
    let children = procfs::children(pid, 1).unwrap_or_default();
    std::iter::once(pid).chain(children).map(Pid::from_raw).collect()
}

/// The first thread of the target that is held while the command runs; `None` when it ended without
/// that being seen.
fn wait_for_a_stop(command: &mut Process, target: i32) -> Option<()> {
    // One of the threads, queried so often that a stop cannot be missed for long.
    let tid = *procfs::threads(target).expect("the target lives").last()?;
    loop {
        if procfs::thread_stat(target, tid).is_some_and(|stat| stat.state == 't') {
            return Some(());
        }
        if command.try_wait().is_some() {
            return None;
        }
    }
}

#[test]
fn no_thread_stays_stopped() {
    let target = start(&optimized(), &["threads", &THREADS.to_string()]);
    let pid = target.pid();
    let begin = Instant::now();
    let (mut frozen, mut killed) = (0, 0);
    while frozen < 3 || killed < 3 {
        assert!(begin.elapsed() < PATIENCE, "{frozen} frozen and {killed} killed while they held a thread");
        let signal = if frozen <= killed { Signal::SIGSTOP } else { Signal::SIGKILL };
        let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
        let mut command = Process::spawn(command.args(["--force-ptrace", "--pid", &pid.to_string()]));
        if wait_for_a_stop(&mut command, pid).is_none() {
            continue;
        }
        let all = family(&command);
        for one in &all {
            // One may have ended just now.
            let _ = kill(*one, signal);
        }
        let at_that_time = stopped_threads(pid).len();
        // The command is still frozen while this is waited for.
        wait_until(PATIENCE, "no thread is held", || stopped_threads(pid).is_empty());
        match signal {
            Signal::SIGSTOP => frozen += usize::from(at_that_time > 0),
            _ => killed += usize::from(at_that_time > 0 || all.len() > 1),
        }
        for one in &all {
            let _ = kill(*one, Signal::SIGKILL);
        }
    }
    // The threads are as they were, and can be captured.
    wait_until(PATIENCE, "all threads sleep", || {
        let captured = super::target::capture(pid);
        captured.sample.stacktrace.iter().filter(|thread| thread.incomplete.is_empty()).count() == THREADS + 1
    });
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    assert!(status.contains("TracerPid:\t0\n"), "{status}");
}

#[test]
fn captures_at_random_times() {
    let target = start(&optimized(), &["threads", "50"]);
    let pid = target.pid();
    for round in 0..16u64 {
        let signal = if round % 2 == 0 { Signal::SIGSTOP } else { Signal::SIGKILL };
        for arguments in [&["--force-ptrace"][..], &[]] {
            let mut command = Command::new(artifacts().bin("xpu_timer_dump"));
            let command = Process::spawn(command.args(arguments).args(["--pid", &pid.to_string()]));
            // Spread over the time that the command takes.
            std::thread::sleep(Duration::from_micros(round * 1500));
            let all = family(&command);
            for one in &all {
                let _ = kill(*one, signal);
            }
            wait_until(PATIENCE, "no thread is held", || stopped_threads(pid).is_empty());
            for one in &all {
                let _ = kill(*one, Signal::SIGKILL);
            }
        }
    }
}
