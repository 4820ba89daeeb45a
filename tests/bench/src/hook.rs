//! What the hook costs the host: nanoseconds a call, the time of a training loop, the start of a process, and memory; each against
//! the same thing without the hook, in turn, in one run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use xpu_timer_proto::v1::FlightRecord;
use xpu_timer_tests::{Artifacts, Ears, FakeCollector, Job, tree};

use crate::{
    report::Report,
    timing::{median, ms, time},
};

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Repetitions of each measurement
    #[arg(long, default_value = "40")]
    repetitions: usize,
    /// Runs of the training loop with and without the hook
    #[arg(long, default_value = "12")]
    loops: usize,
    /// Write the table into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// Threads that call at once.
const THREADS: [usize; 3] = [1, 4, 16];
const LAUNCH_LIMIT_NS: f64 = 25.0;
const COLLECTIVE_LIMIT_NS: f64 = 150.0;
const LOOP_LIMIT: f64 = 0.005;
const START_LIMIT: Duration = Duration::from_millis(2);
const MEMORY_LIMIT: f64 = 16e6;

/// Runs it; whether all limits hold.
pub fn run(options: &Options) -> Result<bool> {
    let artifacts = Artifacts::beside_this_executable()?;
    artifacts.link_sim()?;
    let bench = Bench::set_up(&artifacts)?;
    let mut report = Report::new();
    calls(&bench, options, &mut report);
    training(&bench, options, &mut report);
    start(&bench, options, &mut report);
    memory(&bench, &mut report);
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
        let stubs = "hook_stubs.c";
        bench.compile(stubs, "libcuda.so.1", &["-DDRIVER", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"])?;
        bench.compile(stubs, "libnccl.so.2", &["-DCOLLECTIVES", "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2"])?;
        let link = ["-L.", "-l:libcuda.so.1", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN", "-pthread"];
        bench.compile("hook_calls.c", "hook_calls", &link)?;
        bench.compile("hook_start.c", "hook_start", &[])?;
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

    /// A program of this folder under the hook, whose collector listens at `socket`.
    fn hooked(&self, program: &str, socket: &Path) -> Command {
        let mut command = Command::new(self.folder.path().join(program));
        command.env("LD_PRELOAD", &self.hook).env("XPU_TIMER_SOCKET", socket);
        command.env("XPU_TIMER_LOGGING_DIR", self.folder.path());
        command
    }

    /// Runs `hook_calls` under the hook: nanoseconds a call, bare and hooked, of each thread and round; and the flight record
    /// that it left, which is empty when it made no hooked call.
    fn calls(&self, what: &str, threads: usize, rounds: usize, calls: usize) -> Result<(Vec<[f64; 2]>, FlightRecord)> {
        let socket = self.folder.path().join("collector.sock");
        let collector = FakeCollector::listen(&socket, Ears::Open);
        let mut command = self.hooked("hook_calls", &socket);
        command.arg(what).args([threads, rounds, calls].map(|number| number.to_string()));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let pid = child.id() as i32;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "hook_calls {what}: {}", output.status);
        let pair = |line: &str| -> Option<[f64; 2]> {
            let (bare, hooked) = line.split_once(' ')?;
            Some([bare.parse().ok()?, hooked.parse().ok()?])
        };
        let pairs: Option<Vec<[f64; 2]>> = String::from_utf8_lossy(&output.stdout).lines().map(pair).collect();
        let pairs =
            pairs.filter(|pairs| pairs.len() == threads * rounds).context("hook_calls printed something else")?;
        let spoke = collector.hellos().iter().any(|(speaker, _)| *speaker == pid);
        Ok((pairs, if spoke { collector.ring(pid) } else { FlightRecord::default() }))
    }
}

/// The middle of what the hook adds, and the 90th percentile.
fn added(pairs: &[[f64; 2]]) -> (f64, f64) {
    let mut added: Vec<f64> = pairs.iter().map(|[bare, hooked]| hooked - bare).collect();
    added.sort_by(f64::total_cmp);
    (added[added.len() / 2], added[added.len() * 9 / 10])
}

fn calls(bench: &Bench, options: &Options, report: &mut Report) {
    const CALLS: usize = 20_000;
    report.section("Hook: added to a call, against the bare call in the same thread and round (CPU time)");
    for threads in THREADS {
        let what = format!("launch without events, {threads} threads: median (p90)");
        let measured = bench.calls("launch", threads, options.repetitions, CALLS).and_then(|(pairs, flight)| {
            // Three rounds come before the ones that are measured.
            let launched = (threads * (options.repetitions + 3) * CALLS) as u64;
            ensure!(
                flight.kernels_launched == launched,
                "{} of {launched} launches were counted",
                flight.kernels_launched
            );
            Ok((added(&pairs), flight))
        });
        match measured {
            Ok(((median, p90), _)) => {
                report.check(&what, format!("{median:.1} ns ({p90:.1})"), "at most 25 ns", median <= LAUNCH_LIMIT_NS);
            }
            Err(error) => report.failed(&what, &error),
        }
    }
    let record = match bench.calls("record", 1, options.repetitions, CALLS) {
        Ok((pairs, _)) => added(&pairs).0,
        Err(error) => return report.failed("two event records", &error),
    };
    for threads in THREADS {
        let what = format!("collective without its two event records, {threads} threads: median (p90)");
        // The ring has room for all operations of a round, so that none takes the short way of one that finds no slot.
        let measured =
            bench.calls("collective", threads, options.repetitions, 2048 / threads).and_then(|(pairs, flight)| {
                let dropped = flight.health.as_ref().map_or(u64::MAX, |health| health.dropped);
                ensure!(dropped == 0, "{dropped} operations found no slot");
                Ok((added(&pairs), flight))
            });
        match measured {
            Ok(((median, p90), flight)) => {
                let (median, p90) = (median - 2.0 * record, p90 - 2.0 * record);
                report.check(
                    &what,
                    format!("{median:.0} ns ({p90:.0})"),
                    "at most 150 ns",
                    median <= COLLECTIVE_LIMIT_NS,
                );
                if threads == 1 {
                    let health = flight.health.unwrap_or_default();
                    let own = health.collective_cost_ns as f64 / health.collective_samples.max(1) as f64;
                    let samples = health.collective_samples;
                    report.note(
                        "  the same by the hook's own report, records included",
                        format!("{own:.0} ns ({samples})"),
                    );
                }
            }
            Err(error) => report.failed(&what, &error),
        }
    }
}

/// Four ranks that launch, reduce and compute, on the simulated device. Runs with and without the hook take turns; what counts is
/// the ratio of each pair of neighbours, whose median has a confidence interval by order statistics.
fn training(bench: &Bench, options: &Options, report: &mut Report) {
    report.section(
        "Hook: a loop of 4 ranks on the simulated device: 400 kernels, 4 all-reduces and 40 ms on the host a step",
    );
    let what = "added time: median of the pairs (95 % interval)";
    let mut ratios = Vec::new();
    let mut processor = Vec::new();
    let mut bare = Vec::new();
    for pair in 0..options.loops {
        // Each goes first as often as the other.
        let both = |first: bool| -> Result<[[f64; 2]; 2]> {
            let one = steps(bench, first)?;
            let other = steps(bench, !first)?;
            Ok(if first { [one, other] } else { [other, one] })
        };
        match both(pair % 2 == 0) {
            Ok([hooked, alone]) => {
                ratios.push(hooked[0] / alone[0] - 1.0);
                processor.push(hooked[1] / alone[1] - 1.0);
                bare.push(alone[0]);
            }
            Err(error) => return report.failed(what, &error),
        }
    }
    bare.sort_by(f64::total_cmp);
    report.note("one step without the hook", format!("{:.2} ms", bare[bare.len() / 2]));
    report.note("load average of the machine", fs::read_to_string("/proc/loadavg").unwrap_or_default().trim());
    let (figure, middle, low) = percent(ratios);
    // Within noise: the interval holds no change at all.
    let holds = middle < LOOP_LIMIT || low <= 0.0;
    report.check(what, figure, "below 0.5 %, or noise", holds);
    report.note("added processor time of rank 0, its simulated device included", percent(processor).0);
}

/// A median with its interval for people, the median, and the lower end.
fn percent(mut ratios: Vec<f64>) -> (String, f64, f64) {
    ratios.sort_by(f64::total_cmp);
    let (low, high) = interval(&ratios);
    let middle = ratios[ratios.len() / 2];
    (format!("{:+.2} % ({:+.2} to {:+.2})", middle * 100.0, low * 100.0, high * 100.0), middle, low)
}

/// The order statistics between which the median lies with 95 %: by the normal approximation of the binomial distribution.
fn interval(sorted: &[f64]) -> (f64, f64) {
    let count = sorted.len() as f64;
    let margin = 1.96 * count.sqrt() / 2.0;
    let low = (count / 2.0 - margin).floor().max(0.0) as usize;
    let high = ((count / 2.0 + margin).ceil() as usize).min(sorted.len() - 1);
    (sorted[low], sorted[high])
}

/// Milliseconds of a step of rank 0, with or without the hook: wall time and processor time.
fn steps(bench: &Bench, hooked: bool) -> Result<[f64; 2]> {
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "600");
    let loop_of_ranks = tree().join("tests/bench/targets/hook_loop.py");
    let ranks = tree().join("tests/examples/run_ranks.py");
    let mut command =
        if hooked { job.launch(xpu_timer_tests::python()) } else { job.command(xpu_timer_tests::python()) };
    command.arg(ranks).arg("--nproc=4").arg(loop_of_ranks);
    command.env("PYTHONPATH", tree().join("tests/examples")).env("XPU_TIMER_HOOK_PATH", &bench.hook);
    let output = command.stderr(Stdio::piped()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("ms a step "));
    let times = line.and_then(|line| line.split_once(' '));
    let Some(ms) = times.and_then(|(wall, used)| Some([wall.parse().ok()?, used.trim().parse().ok()?])) else {
        bail!("the loop ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
    };
    if hooked {
        let counted = job.status().map_err(anyhow::Error::msg)?;
        ensure!(
            counted["ranks"].as_array().is_some_and(|ranks| ranks.len() == 4),
            "the ranks were not hooked: {counted}"
        );
    }
    Ok(ms)
}

/// A process that makes no device call.
fn start(bench: &Bench, options: &Options, report: &mut Report) {
    report.section("Hook: the start of a process that makes no device call");
    let socket = bench.folder.path().join("nobody.sock");
    let program = bench.folder.path().join("hook_start");
    let wall = |hooked: bool| -> Result<Duration> {
        let mut command = if hooked { bench.hooked("hook_start", &socket) } else { Command::new(&program) };
        let (wall, status) = time(|| command.status());
        ensure!(status?.success(), "hook_start failed");
        Ok(wall)
    };
    let mut added = Vec::new();
    for _ in 0..options.repetitions * 5 {
        match (wall(false), wall(true)) {
            (Ok(alone), Ok(hooked)) => added.push((hooked.as_nanos() as i64) - (alone.as_nanos() as i64)),
            (Err(error), _) | (_, Err(error)) => return report.failed("added to start and end", &error),
        }
    }
    let middle = Duration::from_nanos(median(added).max(0) as u64);
    report.check("added to start and end, wall time: median", ms(middle), "below 2 ms", middle < START_LIMIT);
    match bench.hooked("hook_start", &socket).arg("threads").output() {
        Ok(output) => {
            let threads = String::from_utf8_lossy(&output.stdout).trim().to_string();
            report.check("threads of such a process", threads.clone(), "1", threads == "1");
        }
        Err(error) => report.failed("threads of such a process", &error.into()),
    }
}

/// Memory that a rank has more than without the hook, after launches, collectives and communicators.
fn memory(bench: &Bench, report: &mut Report) {
    report.section("Hook: memory of a rank");
    let what = "added to the resident memory, 16 threads launching, ring full";
    let socket = bench.folder.path().join("collector.sock");
    let peak = |hooked: bool| -> Result<f64> {
        let _collector = FakeCollector::listen(&socket, Ears::Open);
        let mut command = if hooked {
            bench.hooked("hook_calls", &socket)
        } else {
            Command::new(bench.folder.path().join("hook_calls"))
        };
        let output = command.args(["memory", "16", "12", "512"]).output()?;
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
    fn the_interval_of_a_median_lies_around_it() {
        let sorted: Vec<f64> = (0..12).map(f64::from).collect();
        let (low, high) = interval(&sorted);
        assert!(low <= 5.0 && high >= 6.0 && low > 0.0 && high < 11.0, "{low} {high}");
        assert_eq!(interval(&[1.0]), (1.0, 1.0));
    }

    #[test]
    fn added_time_is_hooked_less_bare() {
        let pairs: Vec<[f64; 2]> = (0..10).map(|number| [2.0, 3.0 + f64::from(number)]).collect();
        assert_eq!(added(&pairs), (6.0, 10.0));
    }

    #[test]
    fn the_programs_are_there() {
        for name in ["hook_stubs.c", "hook_calls.c", "hook_start.c", "hook_loop.py"] {
            assert!(fs::metadata(tree().join("tests/bench/targets").join(name)).is_ok(), "{name}");
        }
    }
}
