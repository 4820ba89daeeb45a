//! Captures that get stuck. Targets that the kernel blocks are captured one by one and all at once.
//! A capturing process that is frozen or killed at any moment leaves no thread of the target
//! stopped, also when it was asked to stop threads.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use nix::{
    sys::{
        ptrace,
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use xpu_timer_capture::{Capturer, Options, ProcessCapture};
use xpu_timer_proto::{procfs, server::CaptureMethod};
use xpu_timer_tests::{PATIENCE, Process, artifacts, compile_c, skip, wait_until};

use super::{capture_until, describe, has_run, names, optimized, start, thread};

/// The deadline of a capture, and what a loaded machine may need beyond it to notice.
const LATEST: Duration = Duration::from_secs(6);

/// The library keeps frame pointers, because its unwind tables cannot be read.
const LIBRARY: &str = "
static const char filler[1 << 20] = {1};
__attribute__((noinline)) static int within(int (*callback)(void)) { return callback() + filler[5]; }
int enter_library(int (*callback)(void)) { return within(callback) + 1; }
";

/// The program whose library is on a file system that hangs.
fn start_stuck(folder: &Path) -> Process {
    let library = compile_c(folder, "library.so", LIBRARY, &["-O1", "-fno-omit-frame-pointer", "-shared", "-fPIC"]);
    let arguments = ["-O1", "-fno-omit-frame-pointer", "-pthread", "-fno-optimize-sibling-calls", "-rdynamic"];
    let program = compile_c(folder, "stuck", include_str!("stuck.c"), &arguments);
    let mountpoint = folder.join("mount");
    fs::create_dir(&mountpoint).expect("own folder");
    let mut process = Process::spawn(Command::new(program).arg(&mountpoint).arg(library));
    process.wait_for("ready", PATIENCE);
    process
}

/// Whether this machine permits mounting a file system of our own; otherwise the test is skipped.
fn can_mount_fuse() -> bool {
    let allowed = Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success());
    if !allowed || !Path::new("/dev/fuse").exists() {
        skip("it takes root, or CAP_SYS_ADMIN, and /dev/fuse");
        return false;
    }
    true
}

fn timed(capturer: &mut Capturer, pids: &[i32], options: &Options) -> (Vec<ProcessCapture>, Duration) {
    let began = Instant::now();
    let captured = capturer.capture(pids, options);
    (captured, began.elapsed())
}

#[test]
fn a_library_on_a_file_system_that_hangs() {
    if !can_mount_fuse() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let process = start_stuck(folder.path());
    let pid = process.pid();
    let mut capturer = Capturer::new();
    for round in 0..2 {
        let mut captured = ProcessCapture::default();
        // The program says that it is ready before its last call.
        wait_until(PATIENCE, "the main thread sleeps", || {
            let (mut all, wall) = timed(&mut capturer, &[pid], &Options::default());
            assert!(wall < LATEST, "round {round}: {wall:?}");
            captured = all.remove(0);
            names(thread(&captured.sample, pid)).contains(&"pause")
        });
        let main = thread(&captured.sample, pid);
        assert!(has_run(main, &["pause", "in_callback"]), "{}", describe(&captured.sample));
        // Frame pointers lead through the library to the program.
        assert!(names(main).contains(&"main"), "{}", describe(&captured.sample));
        assert_eq!(main.incomplete, "", "{}", describe(&captured.sample));
        let inside: Vec<_> = main.frames.iter().filter(|frame| frame.module.ends_with("/libstuck.so")).collect();
        assert_eq!(inside.len(), 2, "{}", describe(&captured.sample));
        let second = captured.sample.stacktrace.iter().find(|thread| thread.pid != pid as u32).expect("two threads");
        assert!(has_run(second, &["pause", "sleep_as_usual", "second_thread"]), "{}", describe(&captured.sample));
    }
    // A file system that does not answer is not queried twice.
    let (_, wall) = timed(&mut capturer, &[pid], &Options::default());
    assert!(wall < Duration::from_secs(3), "{wall:?}");
}

/// A process in D state: it has created a child with vfork that never ends.
fn start_vfork() -> (Process, PathBuf) {
    let process = start(&optimized(), &["vfork"]);
    let pid = process.pid();
    let children = PathBuf::from(format!("/proc/{pid}/task/{pid}/children"));
    wait_until(PATIENCE, "the child is there", || {
        fs::read_to_string(&children).is_ok_and(|text| !text.trim().is_empty())
    });
    (process, children)
}

#[test]
fn eight_ranks_with_every_capture_fault_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = optimized();
    let spinning = start(&program, &["spin_threads", "32"]);
    let (uninterruptible, children) = start_vfork();
    let stopped = start(&program, &["threads", "20"]);
    capture_until(stopped.pid(), "they sleep", |sample| {
        sample.stacktrace.iter().filter(|thread| names(thread).contains(&"in_futex")).count() == 20
    });
    stopped.signal(Signal::SIGSTOP);
    let traced = start(&program, &["spin"]);
    ptrace::seize(Pid::from_raw(traced.pid()), ptrace::Options::empty()).expect("a child can be traced");
    let leaderless = start(&program, &["zombie_leader"]);
    let churning = start(&program, &["churn"]);
    let deep = start(&program, &["deep", "5000"]);
    let hanging = can_mount_fuse().then(|| start_stuck(folder.path()));
    let dying = start(&program, &["threads", "300"]);
    let processes = [&spinning, &uninterruptible, &stopped, &traced, &leaderless, &churning, &deep];
    let mut pids: Vec<i32> = processes.iter().map(|process| process.pid()).collect();
    pids.extend(hanging.as_ref().map(Process::pid));
    pids.push(dying.pid());
    let killer = std::thread::spawn(move || {
        // This happens in the middle of the capture, at any of its steps.
        std::thread::sleep(Duration::from_millis(20));
        drop(dying);
    });
    let (captured, wall) = timed(&mut Capturer::new(), &pids, &Options { children: true, ..Options::default() });
    killer.join().expect("the killer ends");
    // This comes before any assertion, because the child of vfork does not end by itself.
    for child in fs::read_to_string(children).unwrap_or_default().split_whitespace() {
        let _ = kill(Pid::from_raw(child.parse().expect("a pid")), Signal::SIGKILL);
    }
    assert!(wall < LATEST, "{wall:?}");
    assert_eq!(captured.iter().map(|process| process.pid).collect::<Vec<_>>(), pids);
    let of = |process: &Process| {
        let found = captured.iter().find(|captured| captured.pid == process.pid());
        &found.expect("one entry for each pid").sample
    };
    let complete = |process: &Process, function: &str| {
        let threads = of(process).stacktrace.iter();
        threads.filter(|thread| thread.incomplete.is_empty() && names(thread).contains(&function)).count()
    };
    // More threads than processors: one that gets none in time cannot be sampled, and has this
    // reason.
    let late = |thread: &&xpu_timer_proto::server::PstackStacktrace| {
        ["got no CPU", "was not sampled", "the deadline passed"].iter().any(|words| thread.incomplete.contains(words))
    };
    let late_of = |process: &Process| of(process).stacktrace.iter().filter(late).count();
    let spins = complete(&spinning, "in_spin");
    assert!(spins > 0 && spins + late_of(&spinning) == 32, "{}", describe(of(&spinning)));
    assert!(complete(&uninterruptible, "in_vfork") == 1, "{}", describe(of(&uninterruptible)));
    assert!(of(&uninterruptible).stacktrace[0].capture() != CaptureMethod::Ptrace);
    assert_eq!(complete(&stopped, "in_futex"), 20, "{}", describe(of(&stopped)));
    assert_eq!(complete(&traced, "in_spin") + late_of(&traced), 1, "{}", describe(of(&traced)));
    assert_eq!(complete(&leaderless, "become_alone"), 1, "{}", describe(of(&leaderless)));
    assert!(!of(&churning).stacktrace.is_empty(), "{}", describe(of(&churning)));
    assert_eq!(complete(&deep, "recurse"), 1, "{}", describe(of(&deep)));
    if let Some(hanging) = &hanging {
        assert_eq!(complete(hanging, "in_callback"), 1, "{}", describe(of(hanging)));
    }
    for process in &captured {
        let is_reported = !process.sample.errors.is_empty() || !process.sample.stacktrace.is_empty();
        assert!(is_reported && !process.sample.process_state.is_empty(), "{}", describe(&process.sample));
    }
}

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
        // The command is still frozen during this wait.
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
        let captured = super::capture(pid);
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
