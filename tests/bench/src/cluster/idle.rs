//! The node collector without an incident: CPU time and memory while it watches eight ranks and
//! records their timelines, compared with the time before they started. Each rank is a Python
//! program that launches 10,000 kernels and 1,000 collectives a second. Once the collector only
//! records; once it also samples the stacks of the ranks, and its metrics are fetched.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xpu_timer_tests::{Artifacts, Job, PATIENCE, Process, compile_c, http, idle_library};

use super::nodes::RANKS;
use crate::report::{Report, peak_bytes, processor_time};

const LAUNCHES_A_SECOND: f64 = 10_000.0;
const COLLECTIVES_A_SECOND: f64 = 1_000.0;
/// Limits of the recorder alone: of a core, and of memory.
const RECORDER_LIMIT: f64 = 0.005;
const RECORDER_MEMORY: f64 = 64e6;
/// Limit of the sampling alone.
const SAMPLING_LIMIT: f64 = 0.003;
/// Limits of the recorder, the sampling and the metrics.
const ALL_LIMIT: f64 = 0.007;
const ALL_MEMORY: f64 = 100e6;
/// How often the metrics are fetched.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(5);

/// Measures and reports.
pub fn run(artifacts: &Artifacts, time: Duration, report: &mut Report) {
    const MORE: &str = "of a core, more than without the ranks";
    report.section("Node collector, 8 busy ranks: 10,000 launches and 1,000 collectives a second each");
    let percent = |part: f64| format!("{:.2} %", part * 100.0);
    let a_second = |count: f64| format!("{count:.0} a second");
    let recorder = match measure(artifacts, time, false) {
        Ok(idle) => idle,
        Err(error) => return report.failed(MORE, &error),
    };
    let added = recorder.watching - recorder.alone;
    report.check(MORE, percent(added), "below 0.5 %", added < RECORDER_LIMIT);
    let peak = format!("{:.1} MB", recorder.peak / 1e6);
    report.check("peak memory", peak, "below 64 MB", recorder.peak < RECORDER_MEMORY);
    report.note("of a core without the ranks", percent(recorder.alone));
    report.note("launches of a rank, counted by the collector", a_second(recorder.launches));
    report.note("collectives of a rank in the timeline", a_second(recorder.recorded));
    const SAMPLED: &str = "of a core, more than without the ranks, with samples and metrics";
    let all = match measure(artifacts, time, true) {
        Ok(idle) => idle,
        Err(error) => return report.failed(SAMPLED, &error),
    };
    let with_all = all.watching - all.alone;
    report.check(SAMPLED, percent(with_all), "below 0.7 %", with_all < ALL_LIMIT);
    let sampling = with_all - added;
    report.check("of that, for samples and metrics", percent(sampling), "below 0.3 %", sampling < SAMPLING_LIMIT);
    let peak = format!("{:.1} MB", all.peak / 1e6);
    report.check("peak memory, with samples and metrics", peak, "below 100 MB", all.peak < ALL_MEMORY);
}

struct Idle {
    /// Share of a core without ranks.
    alone: f64,
    /// Share of a core with the ranks.
    watching: f64,
    launches: f64,
    /// Recorded operations of a rank a second.
    recorded: f64,
    peak: f64,
}

/// The ranks, which end when their standard input is closed.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            drop(rank.stdin.take());
            // This fails only if it has been waited for.
            let _ = rank.wait();
        }
    }
}

/// Measures without samples and metrics, or with both.
fn measure(artifacts: &Artifacts, time: Duration, all: bool) -> Result<Idle> {
    let folder = tempfile::tempdir()?;
    let job = Job::new().with("LD_LIBRARY_PATH", &folder.path().display().to_string());
    // Two samples a second are the default.
    let job = job.with("XPU_TIMER_SAMPLE_RATE", if all { "2" } else { "0" });
    compile(folder.path())?;
    let collector = Process::spawn(job.command(artifacts.bin("xpu_timer_collector")).arg("node"));
    let begun = Instant::now();
    while !collector.stderr().contains("listening on") {
        ensure!(begun.elapsed() < PATIENCE, "the collector does not listen: {}", collector.stderr());
        thread::sleep(Duration::from_millis(20));
    }
    let pid = collector.pid();
    let alone = share(pid, time)?;

    let start = |rank: u32| -> Result<Child> {
        let mut command: Command = job.launch(xpu_timer_tests::python());
        command.arg("-c").arg(RANK_SCRIPT).arg(folder.path().join("idle_rank.so"));
        let place = [("RANK", rank), ("WORLD_SIZE", RANKS), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", RANKS)];
        command.envs(place.map(|(name, value)| (name, value.to_string())));
        Ok(command.stdin(Stdio::piped()).spawn()?)
    };
    let _ranks = Ranks((0..RANKS).map(start).collect::<Result<_>>()?);
    let begun = Instant::now();
    while launched(&job)?.len() < RANKS as usize {
        ensure!(begun.elapsed() < PATIENCE, "the ranks do not register");
        thread::sleep(Duration::from_millis(50));
    }
    let (before, begun) = (launched(&job)?, Instant::now());
    let watching = if all { share_with_metrics(&job, pid, time)? } else { share(pid, time)? };
    let (after, took) = (launched(&job)?, begun.elapsed().as_secs_f64());
    let rates: Vec<f64> = before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / took).collect();
    let launches = rates.iter().copied().fold(f64::INFINITY, f64::min);
    ensure!(launches > LAUNCHES_A_SECOND * 0.95, "a rank launched {launches:.0} times a second only: {rates:.0?}");
    let peak = peak_bytes(pid)?;
    let recorded = recorded(&job, took, all)?;
    let least = COLLECTIVES_A_SECOND * 0.95;
    ensure!(recorded > least, "the timeline has {recorded:.0} collectives a second of a rank");
    Ok(Idle { alone, watching, launches, recorded, peak })
}

/// Operations of a rank a second in the timeline of the last seconds. None may be missing. There is
/// a file of samples for each rank, or there is none.
fn recorded(job: &Job, seconds: f64, is_sampled: bool) -> Result<f64> {
    let (code, body) = http("POST", job.port, &format!("/timeline?seconds={seconds}")).map_err(anyhow::Error::msg)?;
    ensure!(code == 200, "/timeline: {code} {body}");
    let written: Value = serde_json::from_str(&body)?;
    let number = |name: &str| written[name].as_u64().with_context(|| format!("{name}: {written}"));
    ensure!(number("lost")? == 0, "operations are missing: {written}");
    let files = fs::read_dir(written["path"].as_str().context("path")?)?.collect::<Result<Vec<_>, _>>()?;
    let sampled = files.iter().filter(|file| file.path().extension().is_some_and(|end| end == "samples")).count();
    let expected = if is_sampled { RANKS as usize } else { 0 };
    ensure!(sampled == expected, "{sampled} files of samples instead of {expected}");
    Ok(number("operations")? as f64 / f64::from(RANKS) / seconds)
}

/// Share of a core that a process uses during a time.
fn share(pid: i32, time: Duration) -> Result<f64> {
    let (begun, before) = (Instant::now(), processor_time(pid)?);
    thread::sleep(time);
    let used = processor_time(pid)?.saturating_sub(before);
    Ok(used.as_secs_f64() / begun.elapsed().as_secs_f64())
}

/// Like [`share`], while the metrics are fetched.
fn share_with_metrics(job: &Job, pid: i32, time: Duration) -> Result<f64> {
    let end = Instant::now() + time;
    thread::scope(|scope| {
        let fetches = scope.spawn(|| -> Result<()> {
            while Instant::now() < end {
                let (code, _) = http("GET", job.port + 1, "/metrics").map_err(anyhow::Error::msg)?;
                ensure!(code == 200, "/metrics: {code}");
                thread::sleep(SCRAPE_INTERVAL);
            }
            Ok(())
        });
        let share = share(pid, time)?;
        fetches.join().map_err(|_| anyhow::anyhow!("the thread that fetches metrics panicked"))??;
        Ok(share)
    })
}

/// Kernels of each rank, according to the collector.
fn launched(job: &Job) -> Result<Vec<u64>> {
    let status = job.status().map_err(anyhow::Error::msg)?;
    let ranks = status["ranks"].as_array().context("ranks")?;
    Ok(ranks.iter().filter_map(|rank| rank["kernels"].as_u64()).filter(|count| *count > 0).collect())
}

/// The program of a rank, whose work is in a library.
const RANK_SCRIPT: &str = "import ctypes, sys\nctypes.CDLL(sys.argv[1]).train()";

/// The library of a rank.
const IDLE_RANK: &str = r#"
/* Launches ten thousand kernels and a thousand collectives a second, some every millisecond, on a driver that does
 * nothing, until the standard input ends. */
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

typedef struct { char internal[128]; } Id;
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int ncclCommInitRank(void **, int, Id, int);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int train(void) {
    static int kernels[32], stream;
    Id id;
    void *comm = NULL;
    memset(&id, 7, sizeof id);
    ncclCommInitRank(&comm, 4, id, 0);
    const double begun = now();
    for (long launched = 0, reduced = 0;;) {
        struct pollfd input = {.fd = 0, .events = POLLIN};
        if (poll(&input, 1, 1) != 0)
            return 0;
        const double passed = now() - begun;
        for (; launched < (long)(passed * 10000); launched++)
            cuLaunchKernel(&kernels[launched & 31], 1, 1, 1, 1, 1, 1, 0, &stream, NULL, NULL);
        for (; reduced < (long)(passed * 1000); reduced++)
            ncclAllReduce(NULL, NULL, 1 << 20, 7, 0, comm, &stream);
    }
}
"#;

fn compile(folder: &Path) -> Result<()> {
    for (soname, part) in [("libcuda.so.1", "-DDRIVER"), ("libnccl.so.2", "-DCOLLECTIVES")] {
        idle_library(folder, soname, part);
    }
    let beside = format!("-L{}", folder.display());
    let options = ["-O2", "-shared", "-fPIC", &beside, "-l:libcuda.so.1", "-l:libnccl.so.2"];
    compile_c(folder, "idle_rank.so", IDLE_RANK, &options);
    Ok(())
}
