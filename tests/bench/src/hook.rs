//! The cost of the hook for its host: nanoseconds per call, the time of a training loop, the start
//! of a process, and memory. Each is compared with a run without the hook, alternating within one
//! run.

mod training;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use xpu_timer_proto::v1::FlightRecord;
use xpu_timer_tests::{
    Artifacts, FakeCollector, Job, PATIENCE, Process, ReadMode, compile_c, forky_python, idle_library, python,
    python_version, tree, wait_until,
};

use crate::report::{Report, median, ms, time};

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    parts: Vec<Part>,
    /// Rounds of each thread; the figure of a call is their median
    #[arg(long, default_value = "100")]
    rounds: usize,
    /// Number of Python processes with and without traced functions, for each version
    #[arg(long, default_value = "8")]
    traced: usize,
    /// Number of process starts, with and without the hook
    #[arg(long, default_value = "200")]
    starts: usize,
    #[command(flatten)]
    training: training::Options,
    /// Write the table into docs/benchmarks.md
    #[arg(long, conflicts_with = "equal")]
    write: bool,
}

/// The parts of the benchmark.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Calls of hooked functions
    Calls,
    /// Python functions that are traced, and the others
    Traced,
    /// Collectives whose Python stacks are kept
    Stacks,
    /// A training loop
    Training,
    /// The start of a process
    Start,
    /// Memory
    Memory,
}

const PARTS: [Part; 6] = [Part::Calls, Part::Traced, Part::Stacks, Part::Training, Part::Start, Part::Memory];

/// Numbers of threads that call concurrently.
const THREADS: [usize; 3] = [1, 4, 16];
const LAUNCH_LIMIT_NS: f64 = 25.0;
const COLLECTIVE_LIMIT_NS: f64 = 80.0;
const QUESTION_LIMIT_NS: f64 = 50.0;
const DETAILED_LIMIT_NS: f64 = 120.0;
const TRACED_LIMIT_NS: f64 = 300.0;
/// Limit for the time that the variable adds to a call of another function, in nanoseconds: the
/// noise between two processes.
const UNTRACED_LIMIT_NS: f64 = 1.5;
/// CPythons whose functions are traced.
const PYTHONS: [&str; 8] = ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"];
/// Launches of a rank while every kernel is recorded in detail.
const DETAILED_LAUNCHES_PER_SECOND: f64 = 10_000.0;
/// Maximum time for the rounds of one figure.
const PATIENCE_S: usize = 60;
const START_LIMIT: Duration = Duration::from_millis(2);
const MEMORY_LIMIT: f64 = 16e6;

fn limit(ns: f64) -> String {
    format!("at most {ns} ns")
}

/// Runs the benchmark. Returns whether all limits hold.
pub fn run(options: &Options) -> Result<bool> {
    let artifacts = Artifacts::beside_this_executable()?;
    artifacts.link_sim()?;
    let bench = Bench::set_up(&artifacts)?;
    let mut report = Report::of_this_machine()?;
    for part in if options.parts.is_empty() { &PARTS[..] } else { &options.parts[..] } {
        match part {
            Part::Calls => {
                calls(&bench, options, &mut report);
                questions(&bench, options, &mut report);
            }
            Part::Traced => traced(&bench, &artifacts, options, &mut report),
            Part::Stacks => stacks(&bench, &artifacts, &mut report),
            Part::Training => training::training(&bench.hook, &options.training, &mut report),
            Part::Start => start(&bench, options, &mut report),
            Part::Memory => memory(&bench, &mut report),
        }
    }
    if options.write {
        report.write(&tree().join("docs/benchmarks.md"), "## The hook")?;
    }
    Ok(report.all_hold())
}

/// The compiled programs.
struct Bench {
    hook: PathBuf,
    folder: tempfile::TempDir,
}

impl Bench {
    fn set_up(artifacts: &Artifacts) -> Result<Self> {
        let hook = artifacts.hook();
        ensure!(hook.exists(), "{} is missing: build it with cargo build --release -p xpu_timer_hook", hook.display());
        let bench = Bench { hook, folder: tempfile::tempdir()? };
        for (soname, part) in
            [("libcuda.so.1", "-DDRIVER"), ("libnccl.so.2", "-DCOLLECTIVES"), ("libmpi.so.40", "-DMPI")]
        {
            idle_library(bench.folder.path(), soname, part);
        }
        let link = ["-L.", "-l:libcuda.so.1", "-l:libnccl.so.2", "-l:libmpi.so.40", "-Wl,-rpath,$ORIGIN", "-pthread"];
        bench.compile("hook_calls.c", "hook_calls", &link)?;
        bench.compile("hook_start.c", "hook_start", &[])?;
        bench.compile("hook_start.c", "hook_start_large", &["-DLARGE", "-ldl"])?;
        Ok(bench)
    }

    fn compile(&self, source: &str, output: &str, arguments: &[&str]) -> Result<()> {
        let source = tree().join("tests/bench/targets").join(source);
        let mut gcc = Command::new("gcc");
        gcc.current_dir(self.folder.path()).args(["-O2", "-o", output]).arg(&source).args(arguments);
        let result = gcc.output().context("gcc cannot be run")?;
        ensure!(result.status.success(), "{}: {}", source.display(), String::from_utf8_lossy(&result.stderr));
        Ok(())
    }

    /// A program of this folder under the hook, with a collector that listens at `socket`.
    fn hooked(&self, program: &str, socket: &Path) -> Command {
        let mut command = Command::new(self.folder.path().join(program));
        command.env("LD_PRELOAD", &self.hook).env("XPU_TIMER_SOCKET", socket);
        command.env("XPU_TIMER_LOGGING_DIR", self.folder.path());
        command
    }

    /// Runs `hook_calls` under the hook with this many rounds in each thread.
    fn calls(&self, what: &str, threads: usize, rounds: usize, calls: usize) -> Result<Calls> {
        self.calls_with(&[], what, threads, rounds, calls)
    }

    /// Runs `hook_calls` under the hook with these variables.
    fn calls_with(
        &self,
        environment: &[(&str, &str)],
        what: &str,
        threads: usize,
        rounds: usize,
        calls: usize,
    ) -> Result<Calls> {
        let socket = self.folder.path().join("collector.sock");
        let collector = FakeCollector::listen(&socket, ReadMode::Reads);
        let mut command = self.hooked("hook_calls", &socket);
        command.envs(environment.iter().copied());
        command.arg(what).args([threads, rounds * threads, calls, PATIENCE_S].map(|number| number.to_string()));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let pid = child.id() as i32;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "hook_calls {what}: {}", output.status);
        let mut printed =
            Calls::parse(&String::from_utf8_lossy(&output.stdout)).context("hook_calls printed something else")?;
        ensure!(
            printed.at_full_speed.len() >= rounds,
            "the machine is too noisy: only {} of {rounds} rounds of a thread were undisturbed and at full speed",
            printed.share()
        );
        if collector.hellos().iter().any(|(speaker, _)| *speaker == pid) {
            printed.flight = collector.ring(pid);
        }
        Ok(printed)
    }
}

/// The output of `hook_calls` and its flight record, which is empty if it made no hooked call.
#[derive(Default)]
struct Calls {
    /// All hooked calls, measured or not.
    hooked: u64,
    /// Rounds of all threads, valid or not.
    rounds: usize,
    /// Nanoseconds that the hook added to a call, for each valid round.
    at_full_speed: Vec<f64>,
    /// Nanoseconds of rounds in which another process used the processor.
    shared: Vec<f64>,
    flight: FlightRecord,
}

impl Calls {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let (hooked, rounds) = lines.next()?.strip_prefix("total ")?.split_once(' ')?;
        let mut calls = Calls { hooked: hooked.parse().ok()?, rounds: rounds.parse().ok()?, ..Calls::default() };
        for line in lines {
            let mut fields = line.split(' ');
            let [bare, hooked]: [f64; 2] = [fields.next()?.parse().ok()?, fields.next()?.parse().ok()?];
            let rounds = match fields.next()? {
                "full" => &mut calls.at_full_speed,
                "shared" => &mut calls.shared,
                _ => return None,
            };
            rounds.push(hooked - bare);
        }
        calls.at_full_speed.sort_by(f64::total_cmp);
        calls.shared.sort_by(f64::total_cmp);
        Some(calls)
    }

    /// The median of the added time, and the 90th percentile.
    fn added(&self) -> (f64, f64) {
        let added = &self.at_full_speed;
        (added[added.len() / 2], added[added.len() * 9 / 10])
    }

    /// The share of valid rounds.
    fn share(&self) -> String {
        let slow = self.shared.get(self.shared.len() / 2);
        let slow =
            slow.map_or(String::new(), |added| format!("; {} on a shared core: {added:.0} ns", self.shared.len()));
        format!("{} of {}{slow}", self.at_full_speed.len(), self.rounds)
    }
}

fn calls(bench: &Bench, options: &Options, report: &mut Report) {
    report.section("Hook: time added to a call");
    for threads in THREADS {
        let what = format!("launch without events, {threads} threads: median (p90)");
        let measured = bench.calls("launch", threads, options.rounds, 2000).and_then(|calls| {
            let counted = calls.flight.kernels_launched;
            ensure!(counted == calls.hooked, "{counted} of {} launches were counted", calls.hooked);
            Ok(calls)
        });
        match measured {
            Ok(calls) => {
                let (median, p90) = calls.added();
                report.check(
                    &what,
                    format!("{median:.1} ns ({p90:.1})"),
                    &limit(LAUNCH_LIMIT_NS),
                    median <= LAUNCH_LIMIT_NS,
                );
                report.note("  rounds that counted", calls.share());
            }
            Err(error) => report.failed(&what, &error),
        }
    }
    let record = match bench.calls("record", 1, options.rounds, 2000) {
        Ok(calls) => calls.added().0,
        Err(error) => return report.failed("two event records", &error),
    };
    detailed(bench, record, options, report);
    for threads in THREADS {
        let what = format!("collective without its two event records, {threads} threads: median (p90)");
        // The ring has space for all operations of several rounds, so that none takes the short
        // path of one without a free slot.
        let measured = bench.calls("collective", threads, options.rounds, 128).and_then(|calls| {
            let dropped = calls.flight.health.as_ref().map_or(u64::MAX, |health| health.dropped);
            ensure!(dropped == 0, "{dropped} operations found no slot");
            let counted = calls.flight.collectives_launched;
            ensure!(counted == calls.hooked, "{counted} of {} collectives were counted", calls.hooked);
            Ok(calls)
        });
        match measured {
            Ok(calls) => {
                let (median, p90) = calls.added();
                let (median, p90) = (median - 2.0 * record, p90 - 2.0 * record);
                report.check(
                    &what,
                    format!("{median:.0} ns ({p90:.0})"),
                    &limit(COLLECTIVE_LIMIT_NS),
                    median <= COLLECTIVE_LIMIT_NS,
                );
                report.note("  rounds that counted", calls.share());
                if threads == 1 {
                    let health = calls.flight.health.unwrap_or_default();
                    let own = health.collective_cost_ns as f64 / health.collective_samples.max(1) as f64;
                    let samples = health.collective_samples;
                    report
                        .note("  cost by the hook's own report, records included", format!("{own:.0} ns ({samples})"));
                }
            }
            Err(error) => report.failed(&what, &error),
        }
    }
}

/// A launch while every kernel is recorded in detail, with the events of `XPU_TIMER_BRACKET=all`.
fn detailed(bench: &Bench, record: f64, options: &Options, report: &mut Report) {
    let what = "launch in detail without its two event records, 1 thread: median (p90)";
    let measured = bench.calls_with(&[("XPU_TIMER_BRACKET", "all")], "launch", 1, options.rounds, 128);
    let measured = measured.and_then(|calls| {
        let dropped = calls.flight.health.as_ref().map_or(u64::MAX, |health| health.dropped);
        ensure!(dropped == 0, "{dropped} operations found no slot");
        Ok(calls)
    });
    match measured {
        Ok(calls) => {
            let (median, p90) = calls.added();
            let (median, p90) = (median - 2.0 * record, p90 - 2.0 * record);
            let figure = format!("{median:.0} ns ({p90:.0})");
            report.check(what, figure, &limit(DETAILED_LIMIT_NS), median <= DETAILED_LIMIT_NS);
            report.note("  rounds that counted", calls.share());
            let share = median * DETAILED_LAUNCHES_PER_SECOND / 1e9;
            report.note("  share of a loop with 10,000 launches a second", format!("{:.2} %", share * 100.0));
        }
        Err(error) => report.failed(what, &error),
    }
}

/// A loop that polls MPI for a message that does not arrive.
fn questions(bench: &Bench, options: &Options, report: &mut Report) {
    for (what, function) in [("test", "MPI_Test"), ("probe", "MPI_Iprobe")] {
        let line = format!("{function} in a polling loop, 1 thread: median (p90)");
        let measured = bench.calls(what, 1, options.rounds, 2000).and_then(|calls| {
            let row = calls.flight.coverage.iter().find(|row| row.name == function);
            let counted = row.map_or(0, |row| row.calls);
            ensure!(counted == calls.hooked, "{counted} of {} calls were counted", calls.hooked);
            Ok(calls)
        });
        match measured {
            Ok(calls) => {
                let (median, p90) = calls.added();
                let held = median <= QUESTION_LIMIT_NS;
                report.check(&line, format!("{median:.1} ns ({p90:.1})"), &limit(QUESTION_LIMIT_NS), held);
                report.note("  rounds that counted", calls.share());
            }
            Err(error) => report.failed(&line, &error),
        }
    }
}

/// Prints the nanoseconds of a call of a traced function, of another function, and of a frame that
/// an exception leaves, each from the fastest of many loops.
const TRACED: &str = "
import os, sys, time
sys.path[:0] = [os.environ['EXAMPLES']]
import cuda
error = ValueError()
def traced():
    pass
def other():
    pass
def raises():
    raise error
def through_1(): raises()
def through_2(): through_1()
def through_3(): through_2()
def through_4(): through_3()
def calls(function, count=20000):
    numbers = range(count)
    began = time.perf_counter_ns()
    for _ in numbers:
        function()
    return (time.perf_counter_ns() - began) / count
def failures(function, count=4000):
    numbers = range(count)
    began = time.perf_counter_ns()
    for _ in numbers:
        try:
            function()
        except ValueError:
            error.__traceback__ = None
    return (time.perf_counter_ns() - began) / count
cuda.set_device(0)
cuda.Buffer(8)
time.sleep(1)
fastest = lambda measure, function: min(measure(function) for _ in range(40))
frames = (fastest(failures, through_4) - fastest(failures, raises)) / 4
print(fastest(calls, traced), fastest(calls, other), frames)
";

/// Figures without and with a traced function.
type Pair = ([f64; 3], [f64; 3]);

/// Python functions that are traced, and the others.
fn traced(bench: &Bench, artifacts: &Artifacts, options: &Options, report: &mut Report) {
    report.section("Hook: time of Python calls with a traced function");
    for version in PYTHONS {
        let of_forky = || forky_python(version).ok().filter(|python| python.exists());
        let Some(python) = python_version(version).or_else(of_forky) else {
            report.note(&format!("CPython {version}"), "not installed");
            continue;
        };
        let run = |function: &str| -> Result<[f64; 3]> {
            let mut command = Command::new(&python);
            command.args(["-c", TRACED]).env("EXAMPLES", tree().join("tests/examples"));
            command.env("LD_LIBRARY_PATH", artifacts.sim()).env("LD_PRELOAD", &bench.hook);
            command.env("XPU_TIMER_SOCKET", "/nowhere").env("XPU_TIMER_LOGGING_DIR", bench.folder.path());
            command.env("XPU_TIMER_HOST_TRACING_FUNC", function);
            let output = command.stderr(Stdio::inherit()).output()?;
            ensure!(output.status.success(), "{}: {}", python.display(), output.status);
            let text = String::from_utf8_lossy(&output.stdout);
            let figures = text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
            <[f64; 3]>::try_from(figures).map_err(|_| anyhow::anyhow!("it printed {text:?}"))
        };
        let pairs = (0..options.traced).map(|_| Ok((run("")?, run("traced")?))).collect::<Result<Vec<_>>>();
        let pairs = match pairs {
            Ok(pairs) => pairs,
            Err(error) => {
                report.failed(&format!("CPython {version}"), &error);
                continue;
            }
        };
        let middle = |of: &dyn Fn(&Pair) -> f64| {
            let mut values: Vec<f64> = pairs.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let [call, other, frame] = [0, 1, 2].map(|index| {
            (
                middle(&|pair| pair.0[index]),
                middle(&|pair| pair.1[index]),
                middle(&|pair| pair.1[index] - pair.0[index]),
            )
        });
        let line = |what: &str| format!("CPython {version}: {what}");
        let figure = |(without, with, added): (f64, f64, f64)| format!("{added:+.1} ns ({without:.1} to {with:.1})");
        let met = call.2 <= TRACED_LIMIT_NS;
        report.check(&line("call of the traced function"), figure(call), &limit(TRACED_LIMIT_NS), met);
        let met = other.2 <= UNTRACED_LIMIT_NS;
        report.check(&line("call of another function"), figure(other), &limit(UNTRACED_LIMIT_NS), met);
        report.note(&line("frame of another function that an exception leaves"), figure(frame));
    }
}

/// A library whose `reduce` returns the nanoseconds of an all-reduce. Each `step` in its size makes
/// another kind of operation.
const REDUCE: &str = r#"
#include <stddef.h>
#include <string.h>
#include <time.h>

typedef struct { char internal[128]; } Id;
int ncclCommInitRank(void **, int, Id, int);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

double reduce(int calls, size_t size, size_t step) {
    static void *comm;
    static int stream;
    if (comm == NULL) {
        Id id;
        memset(&id, 7, sizeof id);
        ncclCommInitRank(&comm, 4, id, 0);
    }
    double from = now();
    for (int index = 0; index < calls; index++)
        ncclAllReduce(NULL, NULL, size + index * step, 7, 0, comm, &stream);
    return (now() - from) / calls;
}
"#;

/// Prints the medians of the nanoseconds of a known and of a new kind of all-reduce, called ten
/// frames deep. The pauses let the watcher empty the ring.
const STACKS: &str = "
import ctypes, statistics, sys, time
library = ctypes.CDLL(sys.argv[1])
library.reduce.restype = ctypes.c_double
library.reduce.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
def deep(frames, *arguments):
    return deep(frames - 1, *arguments) if frames else library.reduce(*arguments)
def rounds(count, calls, step):
    figures = []
    for number in range(count):
        figures.append(deep(10, calls, 1024 + number * calls * step, step))
        time.sleep(0.03)
    return statistics.median(figures[3:])
rounds(4, 1, 0)
time.sleep(2)
print(rounds(100, 128, 0), rounds(15, 8, 1))
";

/// The least cost of the stack of a new kind. Below it, no stack was kept.
const LEAST_STACK_NS: f64 = 300.0;

/// A collective while Python stacks of launches are kept: of a kind whose stack is known, and the
/// first one of its kind.
fn stacks(bench: &Bench, artifacts: &Artifacts, report: &mut Report) {
    report.section("Hook: time of a collective of a Python program that keeps stacks of launches");
    let run = |count: &str| -> Result<[f64; 2]> {
        let job = Job::new().with("LD_LIBRARY_PATH", &bench.folder.path().display().to_string());
        let job = job.with("XPU_TIMER_DUMP_STACK_COUNT", count);
        let collector = Process::spawn(job.command(artifacts.bin("xpu_timer_collector")).arg("node"));
        wait_until(PATIENCE, "the collector listens", || collector.stderr().contains("listening on"));
        let mut command = job.launch(python());
        command.args(["-c", STACKS]).arg(bench.folder.path().join("reduce.so"));
        let output = command.stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "{}: {}", python().display(), output.status);
        let text = String::from_utf8_lossy(&output.stdout);
        let figures = text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
        <[f64; 2]>::try_from(figures).map_err(|_| anyhow::anyhow!("it printed {text:?}"))
    };
    let beside = format!("-L{}", bench.folder.path().display());
    // The library calls no function of the driver, but the hook needs its events.
    let libraries = ["-Wl,--no-as-needed", "-l:libcuda.so.1", "-l:libnccl.so.2"];
    let options = [&["-O2", "-shared", "-fPIC", &beside][..], &libraries].concat();
    compile_c(bench.folder.path(), "reduce.so", REDUCE, &options);
    let ([known, new], [known_with, new_with]) = match run("0").and_then(|without| Ok((without, run("1000000000")?))) {
        Ok(figures) => figures,
        Err(error) => return report.failed("a collective of Python", &error),
    };
    let figure = |without: f64, with: f64| format!("{:+.0} ns ({without:.0} to {with:.0})", with - without);
    report.note("a kind whose stack is known", figure(known, known_with));
    let is_kept = new_with - new >= LEAST_STACK_NS;
    report.check("the first of its kind, ten frames deep", figure(new, new_with), "a stack is kept", is_kept);
}

/// A process that makes no device call.
fn start(bench: &Bench, options: &Options, report: &mut Report) {
    report.section("Hook: the start of a process that makes no device call");
    let socket = bench.folder.path().join("nobody.sock");
    let own = |name: &str| bench.folder.path().join(name);
    for (what, program, arguments) in [
        ("added to start and end, wall time: median", own("hook_start"), &[][..]),
        ("added to a program with 50 MB of symbols", own("hook_start_large"), &[]),
        ("added to `python3 -c pass`", python(), &["-c", "pass"]),
    ] {
        let wall = |hooked: bool| -> Result<Duration> {
            let mut command = Command::new(&program);
            if hooked {
                command.env("LD_PRELOAD", &bench.hook).env("XPU_TIMER_SOCKET", &socket);
            }
            let (wall, status) = time(|| command.args(arguments).status());
            ensure!(status?.success(), "{} failed", program.display());
            Ok(wall)
        };
        let pair = || -> Result<i64> {
            let alone = wall(false)?;
            Ok(wall(true)?.as_nanos() as i64 - alone.as_nanos() as i64)
        };
        match (0..options.starts).map(|_| pair()).collect::<Result<Vec<_>>>() {
            Ok(added) => {
                let middle = Duration::from_nanos(median(added).max(0) as u64);
                report.check(what, ms(middle), "below 2 ms", middle < START_LIMIT);
            }
            Err(error) => report.failed(what, &error),
        }
    }
    match bench.hooked("hook_start", &socket).arg("threads").output() {
        Ok(output) => {
            let threads = String::from_utf8_lossy(&output.stdout).trim().to_string();
            report.check("threads of such a process", threads.clone(), "1", threads == "1");
        }
        Err(error) => report.failed("threads of such a process", &error.into()),
    }
}

/// The additional memory of a rank with the hook, after launches, collectives and communicators.
fn memory(bench: &Bench, report: &mut Report) {
    report.section("Hook: memory of a rank");
    let what = "added to the resident memory, 16 threads launching, ring full";
    let socket = bench.folder.path().join("collector.sock");
    let peak = |hooked: bool| -> Result<f64> {
        let _collector = FakeCollector::listen(&socket, ReadMode::Reads);
        let mut command = if hooked {
            bench.hooked("hook_calls", &socket)
        } else {
            Command::new(bench.folder.path().join("hook_calls"))
        };
        let output = command.args(["memory", "16", "12", "512", "0"]).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim().parse().with_context(|| format!("hook_calls memory printed {text:?}"))
    };
    match (peak(false), peak(true)) {
        (Ok(alone), Ok(hooked)) => {
            let added = hooked - alone;
            report.check(what, format!("{:.1} MB", added / 1e6), "below 16 MB", added < MEMORY_LIMIT);
        }
        (Err(error), _) | (_, Err(error)) => report.failed(what, &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_time_is_hooked_less_bare() {
        let rows: String = (0..10).map(|number| format!("2.0 {}.0 full\n2.0 30.0 shared\n", 3 + number)).collect();
        let calls = Calls::parse(&format!("total 1600 22\n{rows}")).unwrap();
        assert_eq!((calls.hooked, calls.rounds, calls.added()), (1600, 22, (6.0, 10.0)));
        assert_eq!(calls.share(), "10 of 22; 10 on a shared core: 28 ns");
        for row in ["2.0", "2.0 3.0", "2.0 3.0 other"] {
            assert!(Calls::parse(&format!("total 1600 12\n{row}\n")).is_none(), "{row}");
        }
        assert!(Calls::parse("2.0 3.0 full\n").is_none());
    }

    #[test]
    fn the_programs_are_there() {
        for name in ["hook_stubs.c", "hook_calls.c", "hook_start.c", "training_loop.py"] {
            assert!(std::fs::metadata(tree().join("tests/bench/targets").join(name)).is_ok(), "{name}");
        }
    }
}
