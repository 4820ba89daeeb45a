//! The node collector without an incident: CPU time and memory while it watches eight ranks and
//! records their timelines, compared with the time before they started. Each rank launches 10,000
//! kernels and 1,000 collectives a second.

use std::{
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
const PROCESSOR_LIMIT: f64 = 0.005;
const MEMORY_LIMIT: f64 = 64e6;

/// Measures and reports.
pub fn run(artifacts: &Artifacts, time: Duration, report: &mut Report) {
    report.section("Node collector, 8 busy ranks: 10,000 launches and 1,000 collectives a second each");
    match measure(artifacts, time) {
        Ok(idle) => {
            let percent = |part: f64| format!("{:.2} %", part * 100.0);
            let added = idle.watching - idle.alone;
            report.check(
                "of a core, more than without the ranks",
                percent(added),
                "below 0.5 %",
                added < PROCESSOR_LIMIT,
            );
            let peak = format!("{:.1} MB", idle.peak / 1e6);
            report.check("peak memory", peak, "below 64 MB", idle.peak < MEMORY_LIMIT);
            report.note("of a core without the ranks", percent(idle.alone));
            let a_second = |count: f64| format!("{count:.0} a second");
            report.note("launches of a rank, counted by the collector", a_second(idle.launches));
            report.note("collectives of a rank in the timeline", a_second(idle.recorded));
        }
        Err(error) => report.failed("of a core, more than without the ranks", &error),
    }
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

fn measure(artifacts: &Artifacts, time: Duration) -> Result<Idle> {
    let folder = tempfile::tempdir()?;
    let job = Job::new().with("LD_LIBRARY_PATH", &folder.path().display().to_string());
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
        let mut command: Command = job.launch(folder.path().join("idle_rank"));
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
    let watching = share(pid, time)?;
    let (after, took) = (launched(&job)?, begun.elapsed().as_secs_f64());
    let rates: Vec<f64> = before.iter().zip(&after).map(|(before, after)| (after - before) as f64 / took).collect();
    let launches = rates.iter().copied().fold(f64::INFINITY, f64::min);
    ensure!(launches > LAUNCHES_A_SECOND * 0.95, "a rank launched {launches:.0} times a second only: {rates:.0?}");
    let peak = peak_bytes(pid)?;
    let recorded = recorded(&job, took)?;
    let least = COLLECTIVES_A_SECOND * 0.95;
    ensure!(recorded > least, "the timeline has {recorded:.0} collectives a second of a rank");
    Ok(Idle { alone, watching, launches, recorded, peak })
}

/// Operations of a rank a second in the timeline of the last seconds, none of which may be missing.
fn recorded(job: &Job, seconds: f64) -> Result<f64> {
    let (code, body) = http("POST", job.port, &format!("/timeline?seconds={seconds}")).map_err(anyhow::Error::msg)?;
    ensure!(code == 200, "/timeline: {code} {body}");
    let written: Value = serde_json::from_str(&body)?;
    let number = |name: &str| written[name].as_u64().with_context(|| format!("{name}: {written}"));
    ensure!(number("lost")? == 0, "operations are missing: {written}");
    Ok(number("operations")? as f64 / f64::from(RANKS) / seconds)
}

/// Share of a core that a process uses during a time.
fn share(pid: i32, time: Duration) -> Result<f64> {
    let (begun, before) = (Instant::now(), processor_time(pid)?);
    thread::sleep(time);
    let used = processor_time(pid)?.saturating_sub(before);
    Ok(used.as_secs_f64() / begun.elapsed().as_secs_f64())
}

/// Kernels of each rank, according to the collector.
fn launched(job: &Job) -> Result<Vec<u64>> {
    let status = job.status().map_err(anyhow::Error::msg)?;
    let ranks = status["ranks"].as_array().context("ranks")?;
    Ok(ranks.iter().filter_map(|rank| rank["kernels"].as_u64()).filter(|count| *count > 0).collect())
}

/// The program of a rank.
const IDLE_RANK: &str = r#"
/* A rank that launches ten thousand kernels and a thousand collectives a second, some every millisecond, on a driver that does nothing,
 * until its standard input ends. */
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

int main(void) {
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
    compile_c(folder, "idle_rank", IDLE_RANK, &["-O2", &beside, "-l:libcuda.so.1", "-l:libnccl.so.2"]);
    Ok(())
}
