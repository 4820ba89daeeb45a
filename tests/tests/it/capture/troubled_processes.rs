//! Captures processes in trouble: the capture reports what it can, changes nothing, and meets its
//! deadline.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use nix::{
    sys::{ptrace, signal::Signal},
    unistd::Pid,
};
use xpu_timer_capture::{Capturer, Options};
use xpu_timer_proto::{
    procfs,
    server::{CaptureMethod, ProcessSample, PstackStacktrace},
};
use xpu_timer_tests::{PATIENCE, Process, wait_until};

use super::{
    LEVELS, SOON, capture, capture_until, capture_with, describe, has_run, names, optimized, sleeps_in, start, thread,
    without_tables,
};

#[test]
fn a_nonexistent_process_has_an_entry_with_a_reason() {
    let captured = capture(i32::MAX - 1);
    assert_eq!(captured.sample.process_state, "X (dead)");
    assert!(captured.sample.errors[0].contains("is gone"), "{:?}", captured.sample.errors);
    assert!(captured.sample.stacktrace.is_empty());
}

#[test]
fn order_and_number_of_entries_are_those_of_the_pids() {
    let one = start(&optimized(), &["poll"]);
    let other = start(&optimized(), &["futex"]);
    let pids = [other.pid(), i32::MAX - 1, one.pid()];
    let captured = Capturer::new().capture(&pids, &Options { deadline: PATIENCE, ..Options::default() });
    assert_eq!(captured.iter().map(|process| process.pid).collect::<Vec<_>>(), pids);
    assert!(captured[1].sample.stacktrace.is_empty() && !captured[0].sample.stacktrace.is_empty());
}

#[test]
fn stopped_processes_stay_stopped_and_have_stacks() {
    for (mode, leaf) in [("spin", "in_spin"), ("poll", "in_poll")] {
        let process = start(&optimized(), &[mode]);
        capture_until(process.pid(), "it has arrived", |sample| names(&sample.stacktrace[0]).contains(&leaf));
        process.signal(Signal::SIGSTOP);
        let wanted = [&[leaf], &LEVELS[..], &["main"]].concat();
        let captured = capture_until(process.pid(), "SIGSTOP", |sample| {
            sample.process_state == "T (stopped)" && has_run(&sample.stacktrace[0], &wanted)
        });
        assert_eq!(thread(&captured.sample, process.pid()).state, "T (stopped)");
        let forced = Options { deadline: PATIENCE, force_ptrace: true, ..Options::default() };
        let forced = capture_with(process.pid(), &forced);
        assert!(has_run(&forced.sample.stacktrace[0], &wanted), "{}", describe(&forced.sample));
        let state = || procfs::status(process.pid(), process.pid()).expect("it lives").state;
        assert_eq!(state(), "T (stopped)", "a capture must not make it go on");
        process.signal(Signal::SIGCONT);
        wait_until(PATIENCE, "it goes on", || !state().starts_with('T'));
    }
}

#[test]
fn threads_that_have_not_run_yet() {
    // All of them have run when the scheduler takes the processor from their creator just before it
    // stops.
    wait_until(PATIENCE, "threads that have not run", || {
        let process = start(&optimized(), &["newborn", "64"]);
        let captured = capture_until(process.pid(), "SIGSTOP", |sample| {
            sample.process_state == "T (stopped)" && sample.stacktrace.len() == 65
        });
        let threads = &captured.sample.stacktrace;
        // Only a register, which the kernel does not report, tells the new thread from its creator.
        let honest = |thread: &PstackStacktrace| {
            thread.incomplete.is_empty()
                || (thread.frames.len() == 1 && thread.incomplete == "register rbp is not known")
        };
        assert!(threads.iter().all(honest), "{}", describe(&captured.sample));
        threads.iter().any(|thread| thread.frames.len() == 1 && names(thread)[0].contains("clone"))
    });
}

#[test]
fn the_threads_of_a_leader_that_has_ended() {
    let process = start(&optimized(), &["zombie_leader"]);
    let wanted = [&["in_futex"], &LEVELS[..], &["become_alone"]].concat();
    let captured = capture_until(process.pid(), "zombie leader", |sample| {
        sample.process_state == "Z (zombie)" && sample.stacktrace.iter().any(|thread| has_run(thread, &wanted))
    });
    let leader = thread(&captured.sample, process.pid());
    assert_eq!(leader.state, "Z (zombie)");
    assert!(leader.frames.is_empty() && leader.incomplete.contains("has ended"), "{:?}", leader.incomplete);
    assert_eq!(leader.capture(), CaptureMethod::KernelOnly);
    assert!(captured.sample.stacktrace.iter().any(|thread| thread.thread_name == "survivor"));
}

#[test]
fn a_zombie_is_reported_as_such() {
    let process = start(&optimized(), &["poll"]);
    process.signal(Signal::SIGKILL);
    // Nobody has waited for it yet. A capture that began before it ended has seen its threads go.
    let has_ended = |sample: &ProcessSample| sample.process_state == "Z (zombie)" && !sample.errors.is_empty();
    let captured = capture_until(process.pid(), "zombie", has_ended);
    assert!(captured.sample.errors[0].contains("has ended"), "{:?}", captured.sample.errors);
}

#[test]
fn a_thread_in_uninterruptible_sleep_is_never_traced() {
    let process = start(&optimized(), &["vfork"]);
    let captured = capture_until(process.pid(), "D state", |sample| sample.process_state.starts_with('D'));
    let thread = thread(&captured.sample, process.pid());
    assert_ne!(thread.capture(), CaptureMethod::Ptrace);
    assert_eq!(captured.sample.longest_stop_ns, 0);
    assert!(!thread.wchan.is_empty());
    assert!(
        has_run(thread, &["in_vfork", "level_three", "level_two", "level_one", "main"]),
        "{}",
        describe(&captured.sample)
    );
    // The child of vfork is a descendant like any other.
    assert_eq!(captured.children.len(), 1);
    assert_eq!(captured.children[0].parent_pid, process.pid());
    // `--force-ptrace` cannot stop it either, and the capture does not wait for it.
    let began = Instant::now();
    let forced = Options { deadline: PATIENCE, force_ptrace: true, ..Options::default() };
    let forced = capture_with(process.pid(), &forced);
    assert!(began.elapsed() < SOON);
    assert!(forced.sample.stacktrace[0].incomplete.contains("uninterruptibly"), "{}", describe(&forced.sample));
    nix::sys::signal::kill(Pid::from_raw(captured.children[0].pid), Signal::SIGKILL).expect("the child can be killed");
}

#[test]
fn a_process_that_somebody_else_traces() {
    let process = start(&optimized(), &["spin"]);
    let pid = Pid::from_raw(process.pid());
    ptrace::seize(pid, ptrace::Options::empty()).expect("a child can be traced");
    // While it starts, and on a busy machine, the kernel may take no sample of it.
    capture_until(process.pid(), "sampled while it runs", |sample| {
        sample.stacktrace[0].capture() == CaptureMethod::PerfSample
            && has_run(&sample.stacktrace[0], &["in_spin", "level_three"])
    });
    // `--force-ptrace` would need a second tracer.
    let forced = capture_with(process.pid(), &Options { deadline: PATIENCE, force_ptrace: true, ..Options::default() });
    let forced_main = thread(&forced.sample, process.pid());
    assert!(forced_main.incomplete.contains("already traced by process"), "{}", describe(&forced.sample));
    // Once its tracer has stopped it, it does not move and can be read.
    ptrace::interrupt(pid).expect("a traced process can be interrupted");
    let captured = capture_until(process.pid(), "tracing stop", |sample| {
        sample.process_state.starts_with('t') && has_run(&sample.stacktrace[0], &["in_spin", "level_three"])
    });
    assert_eq!(thread(&captured.sample, process.pid()).capture(), CaptureMethod::ZeroStop);
    ptrace::detach(pid, None).expect("a stopped process can be released");
}

#[test]
fn a_thread_that_sleeps_is_read_whoever_traces_it() {
    for program in [optimized(), without_tables()] {
        let process = start(&program, &["poll"]);
        let wanted = [&["in_poll"], &LEVELS[..], &["main"]].concat();
        capture_until(process.pid(), "it sleeps", |sample| sleeps_in(&sample.stacktrace[0], &wanted));
        ptrace::seize(Pid::from_raw(process.pid()), ptrace::Options::empty()).expect("a child can be traced");
        let captured = capture(process.pid());
        let main = thread(&captured.sample, process.pid());
        assert_eq!(main.capture(), CaptureMethod::ZeroStop, "{}", describe(&captured.sample));
        assert!(has_run(main, &wanted) && main.incomplete.is_empty(), "{}", describe(&captured.sample));
    }
}

#[test]
fn processes_that_die_in_the_middle() {
    let options = Options { deadline: PATIENCE, children: true, ..Options::default() };
    let mut capturer = Capturer::new();
    let mut states = Vec::new();
    for round in 0..20u64 {
        let process = start(&optimized(), &["threads", "50"]);
        let pid = process.pid();
        let killer = std::thread::spawn(move || {
            // Spread over the time that a capture takes, so that some rounds hit each of its steps.
            std::thread::sleep(Duration::from_micros(round * 300));
            drop(process);
        });
        let captured = capturer.capture(&[pid], &options);
        killer.join().expect("the killer ends");
        assert_eq!(captured.len(), 1);
        let state = captured[0].sample.process_state.clone();
        assert!(!state.is_empty());
        // A stack that is reported as complete must be complete.
        for thread in captured[0].sample.stacktrace.iter().filter(|thread| thread.incomplete.is_empty()) {
            let last = names(thread).last().copied();
            assert!(
                thread.frames.is_empty() || matches!(last, Some("_start" | "clone3" | "__clone3" | "clone")),
                "{}",
                describe(&captured[0].sample)
            );
        }
        states.push(state);
    }
    // After the last one, the process is gone for sure.
    let gone = capturer.capture(&[i32::MAX - 1], &options);
    assert_eq!(gone[0].sample.process_state, "X (dead)");
}

#[test]
fn five_hundred_threads_within_the_usual_deadline() {
    let process = start(&optimized(), &["threads", "500"]);
    let wanted = [&["in_futex"], &LEVELS[..], &["thread_main"]].concat();
    for force_ptrace in [false, true] {
        let mut capturer = Capturer::new();
        let options = Options { force_ptrace, ..Options::default() };
        // Right after the start, some threads have not reached their call yet.
        wait_until(PATIENCE, "all threads are whole", || {
            let began = Instant::now();
            let captured = capturer.capture(&[process.pid()], &options).remove(0);
            let wall = began.elapsed();
            assert!(wall < options.deadline + Duration::from_secs(1), "{wall:?}");
            let whole = captured.sample.stacktrace.iter().filter(|thread| {
                let forced = !force_ptrace || thread.capture() == CaptureMethod::Ptrace;
                thread.incomplete.is_empty() && has_run(thread, &wanted) && forced
            });
            whole.count() == 500
        });
    }
}

#[test]
fn no_stack_is_wrong_while_threads_come_and_go() {
    let process = start(&optimized(), &["churn"]);
    let mut capturer = Capturer::new();
    let options = Options { deadline: PATIENCE, ..Options::default() };
    let (mut checked, mut sampled) = (0, 0);
    for _ in 0..300 {
        let captured = capturer.capture(&[process.pid()], &options).remove(0);
        for thread in &captured.sample.stacktrace {
            let frames = names(thread);
            let own: Vec<&str> =
                frames.iter().copied().filter(|name| name.starts_with("left_") || name.starts_with("right_")).collect();
            if own.is_empty() {
                continue;
            }
            let side = own[0].split('_').next().unwrap_or_default();
            let chain = ["three", "two", "one", "root"].map(|level| format!("{side}_{level}"));
            // A thread is at some depth of one chain, and never in both chains.
            let whole = (0..chain.len()).any(|from| own.iter().copied().eq(chain[from..].iter().map(String::as_str)));
            assert!(whole || !thread.incomplete.is_empty(), "{}", describe(&captured.sample));
            checked += usize::from(whole);
            sampled += usize::from(thread.capture() == CaptureMethod::PerfSample);
        }
    }
    eprintln!("{checked} stacks of short-lived threads checked, {sampled} of them sampled while they ran");
    assert!(checked > 300, "there was something to check");
}

#[test]
fn no_permission_says_what_is_missing() {
    use std::os::unix::process::CommandExt;
    if !nix::unistd::geteuid().is_root() {
        return xpu_timer_tests::skip("only root can become somebody else");
    }
    let process = start(&optimized(), &["poll"]);
    // The command is copied to a folder where another user can run it.
    let artifacts = xpu_timer_tests::artifacts();
    let folder = tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir();
    let folder = folder.expect("a temporary folder");
    let copy = folder.path().join("xpu_timer_dump");
    xpu_timer_tests::copy_program(&artifacts.bin("xpu_timer_dump"), &copy);
    let mut command = Command::new(&copy);
    command.args(["--pid", &process.pid().to_string()]).uid(65534).gid(65534);
    let output = Process::spawn(&mut command).wait(PATIENCE);
    assert_eq!(output.code(), 1, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("no permission to inspect process"), "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("CAP_SYS_PTRACE"), "{}", output.stdout);
}
