//! Native stacks: exact frames, for every way to sleep and every way to build.

use std::process::Command;

use xpu_timer_capture::Options;
use xpu_timer_proto::server::CaptureMethod;
use xpu_timer_tests::{PATIENCE, lacks, skip, wait_until};

use super::{
    LEVELS, SOON, capture_until, capture_with, describe, has_run, names, optimized, sleeps_in, start, stripped, thread,
    unoptimized, without_tables,
};

/// Frames from `leaf` to `main`.
fn run(leaf: &str) -> Vec<&str> {
    [&[leaf], &LEVELS[..], &["main"]].concat()
}

#[test]
fn sleeping_threads_are_read_without_a_stop() {
    for (mode, leaf, kernel) in
        [("futex", "in_futex", "futex"), ("poll", "in_poll", "poll"), ("nanosleep", "in_nanosleep", "nanosleep")]
    {
        let process = start(&optimized(), &[mode]);
        let captured = capture_until(process.pid(), mode, |sample| {
            sample.stacktrace.len() == 1 && sleeps_in(&sample.stacktrace[0], &run(leaf))
        });
        let sample = &captured.sample;
        let thread = thread(sample, process.pid());
        assert_eq!(thread.capture(), CaptureMethod::ZeroStop, "{}", describe(sample));
        assert_eq!(sample.longest_stop_ns, 0);
        assert_eq!(thread.incomplete, "");
        assert!(names(thread).last().is_some_and(|name| *name == "_start"), "{}", describe(sample));
        assert!(thread.wchan.contains(kernel), "{mode}: {:?}", thread.wchan);
        assert!(thread.syscall.is_some_and(|number| number >= 0));
        assert_eq!(thread.state, "S (sleeping)");
        assert_eq!(sample.process_state, "S (sleeping)");
        assert!(thread.context_switches > 0 && sample.captured_unix_ns > 0 && sample.capture_ns > 0);
        assert!(captured.command.ends_with(&format!("target_o2 {mode}")), "{:?}", captured.command);
        assert_eq!(captured.parent_pid, std::process::id() as i32);
    }
}

#[test]
fn frames_have_lines_modules_and_addresses() {
    let process = start(&optimized(), &["poll"]);
    let captured = capture_until(process.pid(), "poll", |sample| has_run(&sample.stacktrace[0], &run("in_poll")));
    let frames = &thread(&captured.sample, process.pid()).frames;
    let source = include_str!("target.c");
    let line_of = |text: &str| source.lines().position(|line| line.contains(text)).expect("in the source") + 1;
    for (function, text) in [("in_poll", "poll(&none, 1, -1);"), ("level_two", "  level_three();")] {
        let frame = frames.iter().find(|frame| frame.func_name == function).expect("in the stack");
        assert!(frame.file_name.ends_with(&format!("target_o2.c:{}", line_of(text))), "{:?}", frame.file_name);
        assert!(frame.module.ends_with("/target_o2"), "{:?}", frame.module);
        assert!(frame.origin.contains(&format!("in {function} () at ")), "{:?}", frame.origin);
        assert!(frame.pc > frame.module_address && frame.module_address > 0);
        assert!((frame.pc - frame.module_address).is_multiple_of(4096), "the bias is whole pages");
    }
}

#[test]
fn a_build_that_needs_rbp_is_whole_without_a_stop() {
    for mode in ["futex", "poll", "nanosleep"] {
        let process = start(&unoptimized(), &[mode]);
        let leaf = format!("in_{mode}");
        let captured = capture_until(process.pid(), mode, |sample| sleeps_in(&sample.stacktrace[0], &run(&leaf)));
        let thread = thread(&captured.sample, process.pid());
        assert_eq!(thread.incomplete, "", "{}", describe(&captured.sample));
        assert_eq!(thread.capture(), CaptureMethod::ZeroStop, "{}", describe(&captured.sample));
    }
}

#[test]
fn frame_pointers_do_where_tables_are_missing() {
    let process = start(&without_tables(), &["poll"]);
    let captured = capture_until(process.pid(), "poll", |sample| sleeps_in(&sample.stacktrace[0], &run("in_poll")));
    let thread = thread(&captured.sample, process.pid());
    assert_eq!(thread.capture(), CaptureMethod::ZeroStop, "{}", describe(&captured.sample));
    assert_eq!(thread.incomplete, "", "{}", describe(&captured.sample));
}

#[test]
fn a_stripped_program_keeps_its_addresses() {
    let process = start(&stripped(), &["poll"]);
    let captured = capture_until(process.pid(), "poll", |sample| {
        sample.stacktrace[0].frames.iter().any(|frame| frame.func_name == "poll")
    });
    let thread = thread(&captured.sample, process.pid());
    let own: Vec<_> = thread.frames.iter().filter(|frame| frame.module.ends_with("/target_stripped")).collect();
    // in_poll, the three levels, main and _start
    assert_eq!(own.len(), 6, "{}", describe(&captured.sample));
    assert!(own.iter().all(|frame| frame.module_address > 0 && frame.file_name.ends_with("/target_stripped")));
    assert!(own.iter().all(|frame| frame.func_name == "??"), "{}", describe(&captured.sample));
    assert_eq!(thread.incomplete, "");
}

#[test]
fn running_threads_are_sampled_without_a_stop() {
    let process = start(&optimized(), &["spin"]);
    let captured = capture_until(process.pid(), "spin", |sample| has_run(&sample.stacktrace[0], &run("in_spin")));
    let thread = thread(&captured.sample, process.pid());
    assert_eq!(thread.capture(), CaptureMethod::PerfSample, "{}", describe(&captured.sample));
    assert_eq!(thread.incomplete, "");
    assert_eq!(thread.state, "R (running)");
    assert_eq!(captured.sample.longest_stop_ns, 0);
    // It continues, and no process traces it.
    let cpu = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/schedstat", process.pid())).expect("it lives");
        stat.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()).expect("a number")
    };
    let before = cpu();
    wait_until(PATIENCE, "the thread runs on", || cpu() > before);
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).expect("it lives");
    assert!(status.contains("TracerPid:\t0\n"), "{status}");
}

#[test]
fn signal_handlers_and_their_stacks() {
    for mode in ["signal", "siginfo", "sigaltstack"] {
        for program in [optimized(), unoptimized()] {
            let process = start(&program, &[mode]);
            let wanted = [&["in_futex"], &LEVELS[..], &["on_signal", "<signal handler called>"]].concat();
            let captured = capture_until(process.pid(), mode, |sample| {
                let names = names(&sample.stacktrace[0]);
                has_run(&sample.stacktrace[0], &wanted) && names.contains(&"raise") && names.contains(&"main")
            });
            assert_eq!(thread(&captured.sample, process.pid()).incomplete, "", "{}", describe(&captured.sample));
        }
    }
}

#[test]
fn deep_stacks_are_whole() {
    for program in [optimized(), unoptimized()] {
        let process = start(&program, &["deep", "5000"]);
        let captured = capture_until(process.pid(), "deep", |sample| {
            let names = names(&sample.stacktrace[0]);
            names.contains(&"in_futex") && names.contains(&"main")
        });
        let thread = thread(&captured.sample, process.pid());
        let recursions = names(thread).iter().filter(|name| **name == "recurse").count();
        let inlined = thread.frames.iter().filter(|frame| frame.inlined && frame.func_name == "recurse").count();
        assert_eq!(recursions - inlined, 5001, "{}", thread.incomplete);
        assert_eq!(thread.incomplete, "");
    }
}

#[test]
fn a_hundred_threads() {
    let process = start(&optimized(), &["threads", "100"]);
    let pool = |sample: &xpu_timer_proto::server::ProcessSample| {
        let levels = |thread: &&xpu_timer_proto::server::PstackStacktrace| {
            has_run(thread, &[&["in_futex"], &LEVELS[..], &["thread_main"]].concat())
                && thread.thread_name.starts_with("pool-")
        };
        sample.stacktrace.iter().filter(levels).count()
    };
    // The first captures may find threads that do not sleep yet.
    let captured = capture_until(process.pid(), "100 threads that sleep", |sample| {
        pool(sample) == 100 && sample.stacktrace.iter().all(|thread| thread.capture() == CaptureMethod::ZeroStop)
    });
    assert_eq!(captured.sample.stacktrace.len(), 101);
    assert!(captured.sample.stacktrace.iter().all(|thread| thread.incomplete.is_empty()));
    // With `--force-ptrace`, every thread is stopped, and the stacks are equal.
    let forced = capture_with(process.pid(), &Options { deadline: PATIENCE, force_ptrace: true, ..Options::default() });
    assert!(forced.sample.stacktrace.iter().all(|thread| thread.capture() == CaptureMethod::Ptrace));
    for (one, other) in captured.sample.stacktrace.iter().zip(&forced.sample.stacktrace) {
        assert_eq!((one.pid, &one.frames), (other.pid, &other.frames));
    }
}

#[test]
fn gdb_sees_the_same_addresses() {
    if let Some(reason) = lacks("gdb") {
        return skip(&reason);
    }
    for (program, arguments) in [
        (optimized(), ["futex", ""]),
        (unoptimized(), ["nanosleep", ""]),
        (optimized(), ["sigaltstack", ""]),
        (optimized(), ["threads", "3"]),
    ] {
        let process = start(&program, &arguments);
        let sleeping = |sample: &xpu_timer_proto::server::ProcessSample| {
            sample.stacktrace.iter().all(|thread| thread.state.starts_with('S') && thread.incomplete.is_empty())
        };
        capture_until(process.pid(), "it sleeps", sleeping);
        // The last capture may have found a thread before its last call; nothing moves after gdb
        // has looked twice.
        wait_until(SOON, "gdb sees the same", || {
            let captured = capture_until(process.pid(), "it sleeps", sleeping);
            let mut ours: Vec<(u32, Vec<u64>)> = captured
                .sample
                .stacktrace
                .iter()
                .map(|thread| (thread.pid, thread.frames.iter().filter(|f| !f.inlined).map(|f| f.pc).collect()))
                .collect();
            ours.sort();
            let gdb = gdb(process.pid());
            if ours != gdb {
                eprintln!("{}\ngdb: {gdb:x?}\nours: {ours:x?}", describe(&captured.sample));
            }
            ours == gdb
        });
    }
}

/// Thread ids and their program counters, leaf first, as gdb sees them.
fn gdb(pid: i32) -> Vec<(u32, Vec<u64>)> {
    let script = "python\n\
        for thread in gdb.selected_inferior().threads():\n  \
          thread.switch()\n  \
          frame, pcs = gdb.newest_frame(), []\n  \
          while frame is not None:\n    \
            if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME): pcs.append(frame.pc())\n    \
            frame = frame.older()\n  \
          print('THREAD', thread.ptid[1], *pcs)\n\
        end\n";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("script");
    std::fs::write(&file, script).expect("the script can be written");
    let output = Command::new("gdb")
        .args(["-nx", "-batch", "-iex", "set debuginfod enabled off", "-ex", "set backtrace past-main on"])
        .args(["-ex", "set backtrace past-entry on", "-p"])
        .arg(pid.to_string())
        .arg("-x")
        .arg(&file)
        .output()
        .expect("gdb runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut threads: Vec<(u32, Vec<u64>)> = text
        .lines()
        .filter_map(|line| line.strip_prefix("THREAD "))
        .map(|line| {
            let mut words = line.split(' ');
            let tid = words.next().and_then(|tid| tid.parse().ok()).expect("a thread id");
            (tid, words.map(|pc| pc.parse().expect("an address")).collect())
        })
        .collect();
    threads.sort();
    threads
}
