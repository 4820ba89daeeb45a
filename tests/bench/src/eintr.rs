//! Captures a program that is in every restartable and non-restartable system call, with its
//! processors busy. No call may return another result because of it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use xpu_timer_capture::{Capturer, Options as CaptureOptions};
use xpu_timer_proto::server::CaptureMethod;
use xpu_timer_tests::{PATIENCE, Process, compile_c, tree, wait_until};

use crate::report::Report;

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// How often the program is captured
    #[arg(long, default_value_t = 10_000)]
    captures: usize,
    /// Additional threads of the program that compute, at most 4
    #[arg(long, default_value_t = 2)]
    busy: usize,
}

/// Runs the benchmark. Returns false if a call returned an unexpected result.
pub fn run(options: &Options) -> Result<bool> {
    let folder = tempfile::tempdir()?;
    let source = std::fs::read_to_string(tree().join("tests/tests/it/capture/calls.c"))?;
    let program = compile_c(folder.path(), "calls", &source, &["-O1", "-pthread"]);
    let mut process = Process::spawn(std::process::Command::new(program).arg(options.busy.to_string()));
    process.wait_for("ready", PATIENCE);
    let pid = process.pid();
    let mut capturer = Capturer::new();
    let (mut slept, mut ran, mut neither, mut longest) = (0usize, 0usize, 0usize, Duration::ZERO);
    let start = Instant::now();
    for _ in 0..options.captures {
        let began = Instant::now();
        let captured = capturer.capture(&[pid], &CaptureOptions::default());
        longest = longest.max(began.elapsed());
        for thread in captured.iter().flat_map(|process| &process.sample.stacktrace) {
            match thread.capture() {
                CaptureMethod::ZeroStop => slept += 1,
                CaptureMethod::PerfSample => ran += 1,
                _ => neither += 1,
            }
        }
    }
    let wall = start.elapsed();
    process.signal(Signal::SIGUSR1);
    wait_until(PATIENCE, "the program counts", || process.stdout().contains(" end\n"));
    let stdout = process.stdout();
    let line = stdout.lines().find(|line| line.starts_with("round 1:")).unwrap_or_default();
    let counts: Vec<(&str, u64, u64)> = line
        .split_whitespace()
        .filter_map(|word| {
            let (call, counts) = word.split_once('=')?;
            let (odd, turns) = counts.split_once('/')?;
            Some((call, odd.parse().ok()?, turns.parse().ok()?))
        })
        .collect();
    process.signal(Signal::SIGTERM);
    process.wait(PATIENCE);
    ensure!(!counts.is_empty(), "the program counted nothing: {stdout}");
    let mut report = Report::new();
    report.section("The system calls of a captured process");
    report.note("captures", options.captures.to_string());
    report.note("stacks of threads that slept", slept.to_string());
    report.note("stacks of threads that ran, sampled without a stop", ran.to_string());
    report.note("threads without a stack", neither.to_string());
    report.note("mean and longest capture", format!("{:.1?}, {longest:.1?}", wall / options.captures.max(1) as u32));
    for (call, odd, turns) in counts {
        report.check(&format!("{call}: odd returns of {turns}"), odd.to_string(), "none", odd == 0);
    }
    Ok(report.all_hold())
}
