//! Captures targets that the kernel blocks, one by one and all at once.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use nix::{
    sys::{ptrace, signal::Signal},
    unistd::Pid,
};
use xpu_timer_capture::{Capturer, Options, ProcessCapture};
use xpu_timer_proto::server::CaptureMethod;
use xpu_timer_tests::{PATIENCE, Process, compile_c, skip, wait_until};

use super::target::{capture_until, describe, has_run, names, optimized, start, thread};

/// The deadline of a capture, and what a loaded machine may need beyond it to notice.
const LATEST: Duration = Duration::from_secs(6);

/// The library keeps frame pointers, because its unwind tables cannot be read.
const LIBRARY: &str = "
static const char filler[1 << 20] = {1};
__attribute__((noinline)) static int within(int (*callback)(void)) { return callback() + filler[5]; }
int enter_library(int (*callback)(void)) { return within(callback) + 1; }
";

/// The program whose library lies on a file system that hangs.
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

/// Whether this machine lets us mount a file system of our own; says so when not.
fn fuse() -> bool {
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
    if !fuse() {
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
    let hanging = fuse().then(|| start_stuck(folder.path()));
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
        let _ = nix::sys::signal::kill(Pid::from_raw(child.parse().expect("a pid")), Signal::SIGKILL);
    }
    assert!(wall < LATEST, "{wall:?}");
    assert_eq!(captured.iter().map(|process| process.pid).collect::<Vec<_>>(), pids);
    let of = |process: &Process| {
        let found = captured.iter().find(|captured| captured.pid == process.pid());
        &found.expect("one entry for each pid").sample
    };
    let whole = |process: &Process, function: &str| {
        let threads = of(process).stacktrace.iter();
        threads.filter(|thread| thread.incomplete.is_empty() && names(thread).contains(&function)).count()
    };
    // More threads than processors: one that gets none in time cannot be sampled, and has this
    // reason.
    let late = |thread: &&xpu_timer_proto::server::PstackStacktrace| {
        ["got no CPU", "was not sampled", "the deadline passed"].iter().any(|words| thread.incomplete.contains(words))
    };
    let late_of = |process: &Process| of(process).stacktrace.iter().filter(late).count();
    let spins = whole(&spinning, "in_spin");
    assert!(spins > 0 && spins + late_of(&spinning) == 32, "{}", describe(of(&spinning)));
    assert!(whole(&uninterruptible, "in_vfork") == 1, "{}", describe(of(&uninterruptible)));
    assert!(of(&uninterruptible).stacktrace[0].capture() != CaptureMethod::Ptrace);
    assert_eq!(whole(&stopped, "in_futex"), 20, "{}", describe(of(&stopped)));
    assert_eq!(whole(&traced, "in_spin") + late_of(&traced), 1, "{}", describe(of(&traced)));
    assert_eq!(whole(&leaderless, "become_alone"), 1, "{}", describe(of(&leaderless)));
    assert!(!of(&churning).stacktrace.is_empty(), "{}", describe(of(&churning)));
    assert_eq!(whole(&deep, "recurse"), 1, "{}", describe(of(&deep)));
    if let Some(hanging) = &hanging {
        assert_eq!(whole(hanging, "in_callback"), 1, "{}", describe(of(hanging)));
    }
    for process in &captured {
        let told = !process.sample.errors.is_empty() || !process.sample.stacktrace.is_empty();
        assert!(told && !process.sample.process_state.is_empty(), "{}", describe(&process.sample));
    }
}
