//! A busy mixed node: training, servers without a rank, short processes, hangs that resolve and
//! hangs that do not, dumps on demand, scrapes, and, in the first fifth of the time, killed
//! collectors. Our processes and folders are measured throughout. They must not grow between the
//! second and the last quarter.

#![forbid(unsafe_code)]

use std::{
    fmt, fs,
    path::Path,
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Parser;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use xpu_timer_proto::procfs;
use xpu_timer_tests::{Job, Process, compile_c, has_variable, http, idle_library, python, tree};

/// Options of the soak.
#[derive(Debug, Parser)]
struct Options {
    /// Duration in hours; 0.2 is twelve minutes
    #[arg(long, default_value_t = 2.0)]
    hours: f64,
    /// Short processes a second
    #[arg(long, default_value_t = 30.0)]
    rate: f64,
    /// Runs only short processes beside one training job, and fails when the machine does not reach
    /// the rate
    #[arg(long)]
    flood: bool,
}

/// Counters for the last line.
#[derive(Debug, Default)]
struct Counts {
    jobs: AtomicUsize,
    kills: AtomicUsize,
    dumps: AtomicUsize,
    scrapes: AtomicUsize,
}

/// Minimum number of measurements in the total time.
const SAMPLES: u32 = 240;
const RANKS: u32 = 4;
/// The share of the short processes that must have started and ended well in a flood.
const REACHED: f64 = 0.9;
/// Maximum number of concurrent short processes.
const MOST_AT_ONCE: u32 = 64;
const SERVERS: usize = 2;
/// A server without a rank: it answers a request on the device twenty times a second, until it is
/// asked to end.
const SERVER: &str = r"
import signal, sys, time
import cuda

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
buffer = cuda.Buffer(1024)
while True:
    buffer.fill(1.0)
    cuda.synchronize()
    time.sleep(0.05)
";
/// Starts short processes; see [`short_processes`].
const SHORT: &str = r#"
/* Starts short processes, RATE a second, each of which launches a kernel on a device that does
   nothing and ends: one half in order, the other half at once. At most AT_ONCE of them run at one
   time, so that a machine that cannot keep up is not flooded.

   Prints every second how many it has started and how many of these made their call and ended well.

   usage: short RATE AT_ONCE */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void end_after_a_launch(int in_order) {
    int code = cuLaunchKernel((void *)0x500000, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    if (in_order) exit(code);
    _exit(code);
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    double rate = atof(arguments[1]), begun = now(), printed = begun;
    long at_once = atol(arguments[2]), started = 0, ended = 0, well = 0;
    for (;;) {
        while (started < (now() - begun) * rate && started - ended < at_once) {
            pid_t child = fork();
            if (child < 0) break;
            if (child == 0) end_after_a_launch(started % 2);
            started++;
        }
        int status;
        while (waitpid(-1, &status, WNOHANG) > 0) {
            ended++;
            well += status == 0;
        }
        if (now() > printed + 1) {
            printed = now();
            printf("%ld %ld\n", started, well);
            fflush(stdout);
        }
        usleep(2000);
    }
}
"#;
/// Faults of every kind. Each job of a sequence has one of them.
const FAULTS: [&[&str]; 5] = [
    &[],
    &["--fault=pause", "--pause=8"],
    &["--fault=loader"],
    &["--fault=skip", "--fault-step=40"],
    &["--fault=killed", "--fault-step=40"],
];

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xpu_timer_soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the soak. Returns whether nothing has grown.
///
/// # Errors
/// It cannot be run.
fn run(options: &Options) -> Result<bool> {
    let time = Duration::try_from_secs_f64(options.hours * 3600.0).context("--hours")?;
    let dir = tree().join("target/soak");
    // Remove the remains of the previous run.
    let _ = fs::remove_dir_all(&dir);
    let job = Job::at(&dir).with("XPU_TIMER_SAMPLE_INTERVAL", "1").with("XPU_TIMER_KEEP_INCIDENTS", "20");
    let job = job.with("XPU_TIMER_LINGER", "600");
    let (over, counts) = (AtomicBool::new(false), Counts::default());
    let samples = Mutex::new(Vec::new());
    let begun = Instant::now();
    let examples = tree().join("tests/examples");
    let server = || Process::spawn(job.launch(python()).env("PYTHONPATH", &examples).args(["-c", SERVER]));
    let servers: Vec<Process> = (0..if options.flood { 0 } else { SERVERS }).map(|_| server()).collect();
    let mut short = short_processes(&job, options.rate)?;
    let trains = options.flood.then(|| job.train(2, &[]));
    thread::scope(|scope| {
        if !options.flood {
            for seed in 0..2 {
                let (job, over, counts) = (&job, &over, &counts);
                scope.spawn(move || train(job, seed, over, counts));
            }
            scope.spawn(|| ask(&job, &over, &counts));
            scope.spawn(|| end_collectors(&job, &over, &counts, begun, time));
        }
        let pause = (time / SAMPLES).max(Duration::from_secs(1));
        while begun.elapsed() < time {
            sleep(pause, &over);
            if let Some(sample) = Sample::take(&job, begun.elapsed()) {
                println!("{sample}");
                samples.lock().expect("no thread panics while it holds the lock").push(sample);
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    let reached = !options.flood || keeps_up(&mut short, options.rate * time.as_secs_f64());
    drop((servers, short, trains));
    let samples = samples.into_inner().expect("no thread panics while it holds the lock");
    let count = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    println!(
        "{} jobs, {} kills of a collector, {} dumps on demand, {} scrapes, {} samples in {:.0?}",
        count(&counts.jobs),
        count(&counts.kills),
        count(&counts.dumps),
        count(&counts.scrapes),
        samples.len(),
        begun.elapsed()
    );
    Ok(compare(&samples, options.flood) && reached)
}

/// A program that starts short processes. It is in C, because a Python process takes ten times as
/// long to end as the hook and the collector take for it.
fn short_processes(job: &Job, rate: f64) -> Result<Process> {
    let folder = job.dir.join("short");
    fs::create_dir_all(&folder)?;
    idle_library(&folder, "libcuda.so.1", "-DDRIVER");
    let beside = format!("-L{}", folder.display());
    let program = compile_c(&folder, "short", SHORT, &["-O2", &beside, "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]);
    let mut command = job.launch(program);
    command.args([rate.to_string(), MOST_AT_ONCE.to_string()]);
    Ok(Process::spawn(command.env_remove("LD_LIBRARY_PATH")))
}

/// Whether the short processes started at their rate and ended well.
fn keeps_up(short: &mut Process, due: f64) -> bool {
    let output = short.stdout();
    let counts = output.lines().next_back().unwrap_or_default().split(' ');
    let mut counts = counts.map(|count| count.parse::<f64>().unwrap_or(0.0));
    let (started, well) = (counts.next().unwrap_or(0.0), counts.next().unwrap_or(0.0));
    let reached = short.try_wait().is_none() && started >= due * REACHED && well >= started - f64::from(MOST_AT_ONCE);
    let verdict = if reached { "reached" } else { "NOT REACHED" };
    println!("{started} short processes were started of {due:.0}, {well} ended well: {verdict}");
    reached
}

/// Sleeps, but not after the end of the soak.
fn sleep(time: Duration, over: &AtomicBool) {
    let begun = Instant::now();
    while begun.elapsed() < time && !over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(50).min(time));
    }
}

/// Runs jobs one after the other, each with its own name; some of them hang.
fn train(job: &Job, seed: usize, over: &AtomicBool, counts: &Counts) {
    for number in seed.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let fault = FAULTS[number % FAULTS.len()];
        let examples = tree().join("tests/examples");
        let mut command = job.launch(python());
        command.arg(examples.join("run_ranks.py")).arg(format!("--nproc={RANKS}")).arg(examples.join("train.py"));
        command.args(fault).arg("--steps=400").env("XPU_TIMER_JOB", format!("soak-{seed}-{number}"));
        let mut ranks = Process::spawn(&mut command);
        let begun = Instant::now();
        while ranks.try_wait().is_none() && begun.elapsed() < Duration::from_secs(25) && !over.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(100));
        }
        // The launcher of the ranks forwards the signal. A stopped or stuck rank is killed with its
        // children below.
        ranks.signal(Signal::SIGTERM);
        let signalled = Instant::now();
        while ranks.try_wait().is_none() && signalled.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(50));
        }
        for pid in of_job(job, &format!("soak-{seed}-{number}")) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        counts.jobs.fetch_add(1, Ordering::Relaxed);
    }
}

/// Scrapes metrics, reads the status and requests dumps, as dashboards and people do.
fn ask(job: &Job, over: &AtomicBool, counts: &Counts) {
    for turn in 0u32.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let answered = http("GET", job.port + 1, "/metrics").is_ok();
        counts.scrapes.fetch_add(usize::from(answered), Ordering::Relaxed);
        let _ = job.status();
        if turn % 5 == 0 {
            let name = job.status().ok().and_then(|status| status["ranks"][0]["job"].as_str().map(str::to_string));
            let path = name.map_or("/dump".into(), |name| format!("/dump?job={}", name.replace(' ', "%20")));
            let dumped = http("POST", job.port, &path).is_ok_and(|(code, _)| code == 200);
            counts.dumps.fetch_add(usize::from(dumped), Ordering::Relaxed);
        }
        sleep(Duration::from_secs(4), over);
    }
}

/// Kills collectors, only in the first fifth of the time, so that the later ones have the same age.
fn end_collectors(job: &Job, over: &AtomicBool, counts: &Counts, begun: Instant, time: Duration) {
    let pause = (time / 50).max(Duration::from_secs(3));
    for turn in 0u32.. {
        sleep(pause, over);
        if over.load(Ordering::Relaxed) || begun.elapsed() > time / 5 {
            return;
        }
        let Ok(status) = job.status() else { continue };
        let which = if turn % 3 == 2 { "supervisor" } else { "pid" };
        if let Some(pid) = status[which].as_i64() {
            counts
                .kills
                .fetch_add(usize::from(kill(Pid::from_raw(pid as i32), Signal::SIGKILL).is_ok()), Ordering::Relaxed);
        }
    }
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Duration,
    /// In the order of [`MEASURES`].
    values: [u64; 5],
}

/// Name, relative growth limit, and additional absolute growth limit.
const MEASURES: [(&str, f64, u64); 5] = [
    ("resident KiB", 0.10, 4096),
    (DESCRIPTORS, 0.0, 24),
    ("threads", 0.0, 8),
    ("processes", 0.0, 1),
    ("files", 0.10, 40),
];

const DESCRIPTORS: &str = "descriptors";

/// The relative limit of the descriptors in a flood. They vary with the number of short processes
/// that live at one time, by a tenth; a leak of one descriptor per process would be a thousand
/// times that much.
const DESCRIPTORS_IN_A_FLOOD: f64 = 0.25;

impl Sample {
    /// `None` while no collector runs.
    fn take(job: &Job, at: Duration) -> Option<Sample> {
        let pids: Vec<i32> = job.processes().into_iter().filter(|pid| is_ours(*pid)).collect();
        if pids.is_empty() {
            return None;
        }
        let count =
            |pid: i32, what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count) as u64;
        let sum = |measure: &dyn Fn(i32) -> u64| pids.iter().map(|pid| measure(*pid)).sum::<u64>();
        let values = [
            sum(&resident_kib),
            sum(&|pid| count(pid, "fd")),
            sum(&|pid| count(pid, "task")),
            pids.len() as u64,
            files(&job.dir.join("timeline")) + files(&job.dir.join("log")),
        ];
        Some(Sample { at, values })
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8.0?}", self.at)?;
        for (value, (name, ..)) in self.values.iter().zip(MEASURES) {
            write!(f, "  {value:>7} {name}")?;
        }
        Ok(())
    }
}

/// Whether it is a collector or a supervisor. The processes of viewers and captures are
/// short-lived.
fn is_ours(pid: i32) -> bool {
    let command = procfs::cmdline(pid).unwrap_or_default();
    command.split(|byte| *byte == 0).next().is_some_and(|program| program.ends_with(b"xpu_timer_collector"))
}

/// The processes of a job, by name.
fn of_job(job: &Job, name: &str) -> Vec<i32> {
    let is_its = |pid: &i32| !is_ours(*pid) && has_variable(*pid, "XPU_TIMER_JOB", name);
    job.processes().into_iter().filter(is_its).collect()
}

fn resident_kib(pid: i32) -> u64 {
    let status = procfs::status_text(pid).unwrap_or_default();
    let resident = procfs::field(&status, "VmRSS:").unwrap_or_default();
    resident.trim_end_matches(" kB").parse().unwrap_or(0)
}

fn files(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| 1 + if entry.file_type().is_ok_and(|kind| kind.is_dir()) { files(&entry.path()) } else { 0 })
        .sum()
}

/// Compares the medians of the second and the last quarter. Returns whether nothing has grown
/// beyond its limit.
fn compare(samples: &[Sample], flood: bool) -> bool {
    let quarter = samples.len() / 4;
    if quarter == 0 {
        println!("too few samples to compare");
        return false;
    }
    let mut flat = true;
    for (index, (name, part, more)) in MEASURES.into_iter().enumerate() {
        let part = if flood && name == DESCRIPTORS { DESCRIPTORS_IN_A_FLOOD } else { part };
        let median = |samples: &[Sample]| {
            let mut values: Vec<u64> = samples.iter().map(|sample| sample.values[index]).collect();
            values.sort_unstable();
            values[values.len() / 2]
        };
        let (before, after) = (median(&samples[quarter..2 * quarter]), median(&samples[3 * quarter..]));
        let limit = before + (before as f64 * part) as u64 + more;
        let verdict = if after <= limit { "flat" } else { "GROWS" };
        println!("{name:>14}: {before} in the second quarter, {after} in the last (at most {limit}): {verdict}");
        flat &= after <= limit;
    }
    flat
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(resident: impl Fn(u64) -> u64) -> Vec<Sample> {
        let sample = |second| Sample { at: Duration::from_secs(second), values: [resident(second), 40, 12, 2, 100] };
        (0..100).map(sample).collect()
    }

    #[test]
    fn a_leak_is_seen_and_noise_is_not() {
        assert!(compare(&samples(|second| 30_000 + second % 7 * 500), false));
        assert!(!compare(&samples(|second| 30_000 + second * 300), false));
        assert!(!compare(&samples(|_| 30_000)[..3], false));
    }

    #[test]
    fn the_descriptors_of_a_flood_vary() {
        let descriptors = |second| [30_000, 400 + second, 12, 2, 100];
        let samples: Vec<Sample> =
            (0..100).map(|second| Sample { at: Duration::from_secs(second), values: descriptors(second) }).collect();
        assert!(compare(&samples, true) && !compare(&samples, false));
    }
}
