//! Measures what a capture does to its target: how long it stops it, and whether a system call
//! returns another result.
//!
//! Stops have two witnesses that are independent of the engine: a library preloaded into the
//! capturing process, which logs every ptrace call, and a thread of the target that reads the clock
//! in a loop.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::{
        ptrace,
        signal::Signal,
        wait::{WaitPidFlag, waitpid},
    },
    time::{ClockId, clock_gettime},
    unistd::Pid,
};
use xpu_timer_capture::{Capturer, Options};
use xpu_timer_proto::server::CaptureMethod;
use xpu_timer_tests::{PATIENCE, Process, compile_c, tree, wait_until};

use crate::{
    other_tools::{Tools, run_quiet},
    report::{Report, median},
    targets::Spinner,
};

/// A stop of a thread, from the first to the second time at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stop {
    start_ns: u64,
    end_ns: u64,
}

/// The stops of one capture, from its ptrace calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stops {
    /// The time during which at least one thread was stopped.
    pub union_ns: u64,
    /// The longest stop of one thread.
    pub longest_ns: u64,
    /// Number of stopped threads.
    pub count: usize,
}

/// The preloaded library.
pub struct PtraceLog {
    library: PathBuf,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl PtraceLog {
    /// Compiles it.
    pub fn build() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let source = fs::read_to_string(tree().join("tests/bench/targets/ptrace_log.c"))?;
        let library = compile_c(folder.path(), "libptrace_log.so", &source, &["-shared", "-fPIC", "-O2", "-ldl"]);
        let log = folder.path().join("log");
        Ok(PtraceLog { library, log, _folder: folder })
    }

    /// Runs `xpu_timer_dump` under the library.
    pub fn dump(&self, tools: &Tools, pid: i32, force_ptrace: bool) -> Result<Stops> {
        // The log of an earlier run must not be mistaken for this one's.
        let _ = fs::remove_file(&self.log);
        let mut command = dump(tools, &[pid]);
        command.env("LD_PRELOAD", &self.library).env("XPU_BENCH_PTRACE_LOG", &self.log);
        if force_ptrace {
            command.arg("--force-ptrace");
        }
        run_quiet(&mut command)?;
        let log = fs::read_to_string(&self.log).context("the log of the ptrace calls")?;
        stops(&log)
    }
}

/// `xpu_timer_dump` for some processes, as JSON.
pub fn dump(tools: &Tools, pids: &[i32]) -> Command {
    let mut command = Command::new(&tools.dump);
    command.arg("--json");
    for pid in pids {
        command.args(["--pid", &pid.to_string()]);
    }
    command
}

fn stops(log: &str) -> Result<Stops> {
    let mut open: HashMap<&str, u64> = HashMap::new();
    let mut stops = Vec::new();
    for line in log.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [what, tid, ns] = words[..] else { anyhow::bail!("the log of the ptrace calls has {line:?}") };
        let ns: u64 = ns.parse()?;
        if what == "S" {
            ensure!(open.insert(tid, ns).is_none(), "thread {tid} is stopped twice");
        } else if let Some(start_ns) = open.remove(tid) {
            stops.push(Stop { start_ns, end_ns: ns });
        }
    }
    ensure!(open.is_empty(), "threads that were not released: {:?}", open.keys());
    let longest_ns = stops.iter().map(|stop| stop.end_ns - stop.start_ns).max().unwrap_or(0);
    Ok(Stops { union_ns: union_ns(&mut stops), longest_ns, count: stops.len() })
}

fn union_ns(stops: &mut [Stop]) -> u64 {
    stops.sort_by_key(|stop| stop.start_ns);
    let (mut total, mut covered) = (0, 0);
    for stop in stops {
        total += stop.end_ns.saturating_sub(stop.start_ns.max(covered));
        covered = covered.max(stop.end_ns);
    }
    total
}

/// Medians of the longest gaps in the spinning thread's clock.
pub struct Gaps {
    pub quiet: Duration,
    /// With a stop of [`HELD`] by the benchmark itself: proof that the witness detects stops.
    pub held: Duration,
    pub captured: Duration,
    /// The longest stop as reported by the engine, median.
    pub engine: Duration,
}

/// Duration for which the benchmark stops the spinning thread to prove that the witness detects it.
pub const HELD: Duration = Duration::from_millis(1);

/// Stops a thread for [`HELD`].
fn hold(tid: i32) -> Result<()> {
    let tid = Pid::from_raw(tid);
    ptrace::seize(tid, ptrace::Options::empty())?;
    // The end of this process releases it at the latest.
    ptrace::interrupt(tid)?;
    waitpid(tid, Some(WaitPidFlag::__WALL))?;
    let since = Instant::now();
    while since.elapsed() < HELD {
        std::hint::spin_loop();
    }
    ptrace::detach(tid, None)?;
    Ok(())
}

/// Alternates windows with and without a capture.
pub fn gaps(spinner: &mut Spinner, pid: i32, windows: usize) -> Result<Gaps> {
    const MARGIN: Duration = Duration::from_millis(20);
    const REST: Duration = Duration::from_millis(700);
    let mut capturer = Capturer::new();
    let warm = Options::default();
    capturer.capture(&[pid], &warm);
    let (wall, _) = crate::report::time(|| capturer.capture(&[pid], &warm));
    // On a busy machine, some captures take several times as long as others.
    let length = (wall * 4 + MARGIN * 2).min(REST);
    let (mut quiet, mut held, mut captured, mut engine) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut tries = 0;
    while captured.len() < windows {
        tries += 1;
        // The kernel preempts a real-time thread that has run for nearly a whole second.
        std::thread::sleep(length + REST);
        ensure!(tries < windows * 4, "no capture lies within the window of {length:?} in which the thread spins");
        spinner.start(length)?;
        let window = spinner.finish()?;
        quiet.push(window.longest_gap_ns);
        std::thread::sleep(REST);
        spinner.start(length)?;
        std::thread::sleep(MARGIN);
        hold(window.tid)?;
        held.push(spinner.finish()?.longest_gap_ns);
        std::thread::sleep(REST);
        spinner.start(length)?;
        std::thread::sleep(MARGIN);
        let start = monotonic_ns()?;
        let result = capturer.capture(&[pid], &warm);
        let end = monotonic_ns()?;
        let window = spinner.finish()?;
        if window.start_ns < start && end < window.end_ns {
            captured.push(window.longest_gap_ns);
            engine.push(result.iter().map(|process| process.sample.longest_stop_ns).max().unwrap_or(0));
        }
    }
    let [quiet, held, captured, engine] =
        [quiet, held, captured, engine].map(|values| Duration::from_nanos(median(values)));
    Ok(Gaps { quiet, held, captured, engine })
}

fn monotonic_ns() -> Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    Ok(Duration::from(now).as_nanos() as u64)
}

/// Options of the benchmark of system calls.
#[derive(clap::Args)]
pub struct EintrOptions {
    /// How often the program is captured
    #[arg(long, default_value_t = 10_000)]
    captures: usize,
    /// Additional threads of the program that compute, at most 4
    #[arg(long, default_value_t = 2)]
    busy: usize,
}

/// Captures a program that is in every restartable and non-restartable system call, with its
/// processors busy. No call may return another result because of it: false if one did.
pub fn eintr(options: &EintrOptions) -> Result<bool> {
    let folder = tempfile::tempdir()?;
    let source = fs::read_to_string(tree().join("tests/tests/it/capture/calls.c"))?;
    let program = compile_c(folder.path(), "calls", &source, &["-O1", "-pthread"]);
    let mut process = Process::spawn(Command::new(program).arg(options.busy.to_string()));
    process.wait_for("ready", PATIENCE);
    let pid = process.pid();
    let mut capturer = Capturer::new();
    let (mut slept, mut ran, mut neither, mut longest) = (0usize, 0usize, 0usize, Duration::ZERO);
    let start = Instant::now();
    for _ in 0..options.captures {
        let began = Instant::now();
        let captured = capturer.capture(&[pid], &Options::default());
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
    let mut report = Report::of_this_machine()?;
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

/// The peak resident set of a command, in bytes. A helper process runs it alone and reports the
/// peak of its child.
pub fn peak_memory(command: &Command) -> Result<u64> {
    peak_in(&peak_helper(command)?.output()?).with_context(|| format!("{command:?}"))
}

/// The helper process of [`peak_memory`], which prints the peak.
pub fn peak_helper(command: &Command) -> Result<Command> {
    let mut helper = Command::new(std::env::current_exe()?);
    helper.arg("peak").arg("--").arg(command.get_program()).args(command.get_args());
    Ok(helper)
}

/// The peak that the helper process has printed.
pub fn peak_in(output: &Output) -> Result<u64> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The helper process of [`peak_memory`].
pub fn peak(program: &Path, arguments: &[String]) -> Result<()> {
    run_quiet(Command::new(program).args(arguments))?;
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN)?;
    println!("{}", usage.max_rss() * 1024);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_stops_count_once() {
        let log = "S 1 100\nS 2 150\nC 1 200\nC 2 260\nS 3 1000\nC 3 1040\n";
        assert_eq!(stops(log).unwrap(), Stops { union_ns: 200, longest_ns: 110, count: 3 });
        assert!(stops("S 1 100\n").is_err(), "a thread that was not let go");
    }
}
