//! The cost of the hook in a loop of four data-parallel ranks on the simulated device: one loop
//! that calls the device directly, and one of PyTorch.
//!
//! Two such jobs run at the same time, one with the hook and one without. They take turns, block by
//! block, and the waiting one sleeps. The result is the ratio of the two blocks of a pair, half a
//! second apart, so that other load on the machine affects both equally. Two equal jobs differ by
//! the placement of their memory and threads, and keep that difference until they end. The jobs are
//! therefore restarted after some pairs: the median of these pairs is one value, and values are
//! added until the 95 % interval of their median (order statistics, without an assumption about the
//! distribution) is narrow enough for the limit. If the time runs out before, the figure counts as
//! not measured, so its limit does not hold.

use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use xpu_timer_tests::{Job, PypiTorch, python, tree};

use crate::report::Report;

/// The program of the ranks.
struct Loop {
    what: &'static str,
    python: PathBuf,
    /// The argument of `training_loop.py`.
    steps: &'static str,
    /// Folder of the device libraries, if it differs from that of other test jobs.
    library_path: Option<OsString>,
}

impl Loop {
    fn plain() -> Self {
        let what = "400 kernels and 4 all-reduces a step";
        Loop { what, python: python(), steps: "kernels", library_path: None }
    }

    /// On PyPI's PyTorch, which is set up first.
    fn torch() -> Result<Self> {
        let torch = PypiTorch::set_up()?;
        let what = "PyTorch DistributedDataParallel";
        let library_path = Some(torch.library_path()?);
        Ok(Loop { what, python: torch.python(), steps: "torch", library_path })
    }
}

/// Options of this part.
#[derive(clap::Args)]
#[group(id = "loops")]
pub struct Options {
    /// Maximum time for the training loop, in seconds
    #[arg(long, default_value = "600")]
    loop_seconds: u64,
    /// Slow each step of the hooked job by this share, to check that the benchmark detects it
    #[arg(long, default_value = "0")]
    handicap: f64,
    /// Run both jobs without the hook, to see by how much two equal jobs differ
    #[arg(long)]
    equal: bool,
    /// Also measure a loop on PyPI's PyTorch, which is set up under target first (2.4 GB)
    #[arg(long)]
    torch: bool,
}

const RANKS: usize = 4;
const STEPS: usize = 2;
const LIMIT: f64 = 0.005;
/// Maximum distance of the interval's ends from the median.
const HALF_WIDTH: f64 = 0.005;
/// Pairs of blocks of the same two jobs.
const PAIRS: usize = 40;
const FEWEST_STARTS: usize = 8;
/// Timeout for the start of the ranks, and for a block.
const PATIENCE: Duration = Duration::from_secs(120);

/// A job of four ranks, which runs a block on request.
struct Team {
    job: Job,
    launched: Child,
    ranks: Vec<BufReader<UnixStream>>,
}

impl Team {
    fn start(hook: &Path, training: &Loop, hooked: bool) -> Result<Self> {
        let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "600");
        let path = job.dir.join("loop.sock");
        let listener = UnixListener::bind(&path).with_context(|| format!("{}", path.display()))?;
        listener.set_nonblocking(true)?;
        let mut command = if hooked { job.launch(&training.python) } else { job.command(&training.python) };
        if let Some(library_path) = &training.library_path {
            command.env("LD_LIBRARY_PATH", library_path);
        }
        command.arg(tree().join("tests/examples/run_ranks.py")).arg(format!("--nproc={RANKS}"));
        command.arg(tree().join("tests/bench/targets/training_loop.py")).arg(training.steps).env("LOOP_CONTROL", &path);
        command.env("PYTHONPATH", tree().join("tests/examples")).env("XPU_TIMER_HOOK_PATH", hook);
        let launched = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn()?;
        let mut team = Team { job, launched, ranks: Vec::new() };
        let deadline = Instant::now() + PATIENCE;
        while team.ranks.len() < RANKS {
            match listener.accept() {
                Ok((rank, _)) => {
                    rank.set_nonblocking(false)?;
                    rank.set_read_timeout(Some(PATIENCE))?;
                    team.ranks.push(BufReader::new(rank));
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if let Some(status) = team.launched.try_wait()? {
                        bail!("the loop ended at its start: {status}");
                    }
                    ensure!(Instant::now() < deadline, "only {} ranks of the loop started", team.ranks.len());
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(team)
    }

    /// Milliseconds of a step, the mean of the ranks: wall time and processor time.
    fn block(&mut self, burden_us: u64) -> Result<[f64; 2]> {
        for rank in &mut self.ranks {
            writeln!(rank.get_mut(), "{STEPS} {burden_us}")?;
        }
        let mut sums = [0.0, 0.0];
        for rank in &mut self.ranks {
            let mut line = String::new();
            rank.read_line(&mut line).context("a rank of the loop does not answer")?;
            let (wall, processor) = line.trim().split_once(' ').context("a rank of the loop is gone")?;
            let (wall, processor): (f64, f64) = (wall.parse()?, processor.parse()?);
            sums = [sums[0] + wall, sums[1] + processor];
        }
        Ok(sums.map(|sum| sum / RANKS as f64))
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // The ranks end when the connection is closed.
        self.ranks.clear();
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if !matches!(self.launched.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // The job ends the remaining processes.
        let _ = self.launched.kill();
        let _ = self.launched.wait();
    }
}

/// The added time, one value for each pair of jobs, and the figures without the hook.
#[derive(Default)]
struct Added {
    wall: Vec<f64>,
    processor: Vec<f64>,
    alone: [Vec<f64>; 2],
}

/// Measures the loops, and adds their figures to the report.
pub fn training(hook: &Path, options: &Options, report: &mut Report) {
    measure_loop(hook, &Loop::plain(), options, report);
    if options.torch {
        match Loop::torch() {
            Ok(training) => measure_loop(hook, &training, options, report),
            Err(error) => report.failed("a loop of PyPI's PyTorch", &error),
        }
    }
}

/// Measures one loop, and adds its figures to the report.
fn measure_loop(hook: &Path, training: &Loop, options: &Options, report: &mut Report) {
    report.section(&format!("Hook: time added to a training loop of {RANKS} ranks: {}", training.what));
    let what = "added time: median (95 % interval)";
    match measure_pairs(hook, training, options) {
        Ok(added) => {
            let (wall, processor) = (Median::of(&added.wall), Median::of(&added.processor));
            let starts = added.wall.len();
            report.note("pairs of jobs, of blocks", format!("{starts}, {}", starts * PAIRS));
            let [step, used] = added.alone.each_ref().map(|alone| Median::of(alone).middle);
            report.note("one step without the hook: wall, processor", format!("{step:.2} ms, {used:.2} ms"));
            report.note("load average of the machine", fs::read_to_string("/proc/loadavg").unwrap_or_default().trim());
            if starts < FEWEST_STARTS || wall.half_width() > HALF_WIDTH {
                let figure = format!("{}: too noisy after {starts} pairs of jobs", wall.percent());
                report.check(what, figure, "below 0.5 %, or noise", false);
            } else {
                report.check(what, wall.percent(), "below 0.5 %, or noise", wall.holds());
            }
            let values: Vec<_> = added.wall.iter().map(|value| format!("{:+.2}", value * 100.0)).collect();
            report.note("  of each pair of jobs, in %", values.join(" "));
            report.note("added processor time of the ranks, their simulated device included", processor.percent());
        }
        Err(error) => report.failed(what, &error),
    }
}

/// Measures pairs of jobs until the figure is precise enough, or the time runs out.
fn measure_pairs(hook: &Path, training: &Loop, options: &Options) -> Result<Added> {
    let mut added = Added::default();
    let deadline = Instant::now() + Duration::from_secs(options.loop_seconds);
    while Instant::now() < deadline
        && (added.wall.len() < FEWEST_STARTS || Median::of(&added.wall).half_width() > HALF_WIDTH)
    {
        two_jobs(hook, training, options, &mut added)?;
    }
    ensure!(!added.wall.is_empty(), "no time for a single pair of jobs");
    Ok(added)
}

/// Starts a job with the hook and one without, which take turns.
fn two_jobs(hook: &Path, training: &Loop, options: &Options, added: &mut Added) -> Result<()> {
    // Each is started first equally often.
    let (mut hooked, mut alone);
    if added.wall.len().is_multiple_of(2) {
        hooked = Team::start(hook, training, !options.equal)?;
        alone = Team::start(hook, training, false)?;
    } else {
        alone = Team::start(hook, training, false)?;
        hooked = Team::start(hook, training, !options.equal)?;
    }
    if !options.equal {
        let status = hooked.job.status().map_err(anyhow::Error::msg)?;
        ensure!(
            status["ranks"].as_array().is_some_and(|ranks| ranks.len() == RANKS),
            "the ranks were not hooked: {status}"
        );
    }
    let step_ms = alone.block(0)?[0];
    hooked.block(0)?;
    let burden_us = (step_ms * 1000.0 * options.handicap) as u64;
    let (mut wall, mut processor) = (Vec::new(), Vec::new());
    for pair in 0..PAIRS {
        // Each goes first equally often.
        let (with, without) = if pair.is_multiple_of(2) {
            let with = hooked.block(burden_us)?;
            (with, alone.block(0)?)
        } else {
            let without = alone.block(0)?;
            (hooked.block(burden_us)?, without)
        };
        wall.push(with[0] / without[0] - 1.0);
        processor.push(with[1] / without[1] - 1.0);
        added.alone.iter_mut().zip(without).for_each(|(alone, figure)| alone.push(figure));
    }
    // For an even number, the mean of the two middle values, so that neither order is preferred.
    let middle = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        f64::midpoint(values[(PAIRS - 1) / 2], values[PAIRS / 2])
    };
    added.wall.push(middle(wall));
    added.processor.push(middle(processor));
    Ok(())
}

/// A median, with the order statistics that enclose it with 95 %, by the normal approximation of
/// the binomial distribution.
struct Median {
    low: f64,
    middle: f64,
    high: f64,
}

impl Median {
    fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len() as f64;
        let margin = 1.96 * count.sqrt() / 2.0;
        let low = (count / 2.0 - margin).floor().max(0.0) as usize;
        let high = ((count / 2.0 + margin).ceil() as usize).min(sorted.len() - 1);
        Median { low: sorted[low], middle: sorted[sorted.len() / 2], high: sorted[high] }
    }

    /// Distance from the median to the farther end of the interval.
    fn half_width(&self) -> f64 {
        (self.middle - self.low).max(self.high - self.middle)
    }

    /// Whether the median is below the limit, or not distinguishable from zero by an interval that
    /// is narrower than the limit.
    fn holds(&self) -> bool {
        self.half_width() <= HALF_WIDTH && (self.middle < LIMIT || self.low <= 0.0)
    }

    fn percent(&self) -> String {
        let percent = |value: f64| format!("{:+.2}", value * 100.0);
        format!("{} % ({} to {})", percent(self.middle), percent(self.low), percent(self.high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_of_a_median_lies_around_it() {
        let values: Vec<f64> = (0..12).rev().map(f64::from).collect();
        let median = Median::of(&values);
        assert!(median.low > 0.0 && median.low <= 5.0 && median.high >= 6.0 && median.high < 11.0);
        let one = Median::of(&[1.0]);
        assert_eq!((one.low, one.middle, one.high), (1.0, 1.0, 1.0));
    }

    #[test]
    fn one_percent_more_does_not_hold_and_neither_does_what_nobody_can_tell() {
        let around = |middle: f64, spread: f64| -> Vec<f64> {
            (0..100).map(|number| middle + spread * (f64::from(number) - 49.5) / 50.0).collect()
        };
        assert!(Median::of(&around(0.001, 0.01)).holds());
        assert!(!Median::of(&around(0.01, 0.01)).holds());
        assert!(!Median::of(&around(0.01, 0.02)).holds());
        assert!(!Median::of(&around(0.0, 0.1)).holds(), "an interval of two percent says nothing");
    }
}
