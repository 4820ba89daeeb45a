//! Benchmark of the collectors. Cluster role: simulated nodes of eight ranks join one real cluster
//! collector over loopback gRPC, with one connection each. One rank hangs; every node is asked and
//! delivers its trees and flight records. The collector's process is measured, first with few
//! nodes, then with many. Node role: its cost without an incident, while it watches eight busy
//! ranks and records their timelines.

mod idle;
mod nodes;

use std::{
    fs::{self, Permissions},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use tokio::sync::mpsc;
use xpu_timer_analysis::{Verdict, judge};
use xpu_timer_collector::incident::part::ALL_FILES;
use xpu_timer_proto::{
    Message as _,
    timeline::{self, PENDING},
    v1::Evidence,
};
use xpu_timer_tests::{Artifacts, tree};

use self::nodes::{
    OPERATIONS, PATIENCE, RANKS, SLOW, Shared, TIMELINE_SECONDS, TOKEN, alarm, culprit, culprit_group, play,
};
use crate::report::{Report, peak_bytes, processor_time, time};

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Options {
    /// Nodes of the small run
    #[arg(long, default_value = "1000")]
    few: u32,
    /// Nodes of the large run
    #[arg(long, default_value = "12500")]
    many: u32,
    /// Seconds of each measurement of the node collector; 0 leaves it out
    #[arg(long, default_value = "40")]
    idle_seconds: u64,
    /// Path of another collector to measure
    #[arg(long)]
    collector: Option<PathBuf>,
    /// Write the table into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// Limit of the time from the alarm to the report.
const TOTAL_LIMIT: Duration = Duration::from_secs(6);
const REPORT_LIMIT: Duration = Duration::from_secs(15);
const VERDICT_LIMIT: Duration = Duration::from_secs(2);
const MEMORY_LIMIT: f64 = 1e9;
const TOKEN_FILE: &str = "XPU_TIMER_COLLECTOR_TOKEN_FILE";
/// Descriptors of this process besides those of the connections.
const SPARE_DESCRIPTORS: u64 = 1024;
const TIMELINES_LIMIT: Duration = Duration::from_secs(10);
/// The maximum number of culprits and groups whose timelines an incident of a large job keeps.
const MOST_TIMELINES: usize = 32;

/// Runs the benchmark. Returns whether all limits hold.
pub fn run(options: &Options) -> Result<bool> {
    let artifacts = Artifacts::beside_this_executable()?;
    let collector = options.collector.clone().unwrap_or_else(|| artifacts.bin("xpu_timer_collector"));
    let mut report = Report::of_this_machine()?;
    allow_descriptors(options.few.max(options.many))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let few = section(&mut report, options.few, runtime.block_on(measure(&collector, options.few)), false);
    let many = section(&mut report, options.many, runtime.block_on(measure(&collector, options.many)), true);
    if let (Some(few), Some(many)) = (few, many) {
        let growth = many.total.as_secs_f64() / few.total.as_secs_f64();
        let nodes = f64::from(options.many) / f64::from(options.few);
        let what = format!("{nodes:.1} times the nodes: from the alarm to the report");
        report.check(&what, format!("{growth:.1} times as long"), "no more times", growth <= nodes);
    }
    if options.idle_seconds > 0 {
        idle::run(&artifacts, Duration::from_secs(options.idle_seconds), &mut report);
    }
    if options.write {
        report.write(&tree().join("docs/benchmarks.md"), "## The collectors")?;
    }
    Ok(report.all_hold())
}

/// Allows this process and the collector, each by itself, to have a connection with each node. A
/// collector keeps a quarter of its descriptors for other things.
fn allow_descriptors(nodes: u32) -> Result<()> {
    let wanted = (u64::from(nodes) + SPARE_DESCRIPTORS) * 4 / 3;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let limit = hard.max(wanted);
    setrlimit(Resource::RLIMIT_NOFILE, limit, limit)
        .with_context(|| format!("{nodes} nodes need {wanted} open files: run as root, or after `ulimit -Hn {wanted}`"))
}

fn section(report: &mut Report, nodes: u32, measured: Result<Measured>, limits: bool) -> Option<Measured> {
    report.section(&format!("Cluster collector: {nodes} nodes, {} ranks", nodes * RANKS));
    let run = match measured {
        Ok(run) => run,
        Err(error) => {
            report.failed("a job-wide incident", &error);
            return None;
        }
    };
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    let mut check = |what: &str, figure: String, limit: &str, holds: bool| {
        if limits { report.check(what, figure, limit, holds) } else { report.note(what, figure) }
    };
    check("from the alarm to the report", seconds(run.total), "at most 6 s", run.total <= TOTAL_LIMIT);
    let (after, verdict) = (run.report, run.verdict);
    check("report complete, after the last delivery's start", seconds(after), "at most 15 s", after <= REPORT_LIMIT);
    check("verdict over the ranks", seconds(verdict), "below 2 s", verdict < VERDICT_LIMIT);
    let megabytes = |bytes: f64| format!("{:.0} MB", bytes / 1e6);
    check("peak memory", megabytes(run.peak), "below 1 GB", run.peak < MEMORY_LIMIT);
    let what = format!("timelines of {} ranks for {TIMELINE_SECONDS} s fetched", culprit_group(nodes).len());
    check(&what, seconds(run.timelines), "below 10 s", run.timelines < TIMELINES_LIMIT);
    check("peak memory after that", megabytes(run.timelines_peak), "below 1 GB", run.timelines_peak < MEMORY_LIMIT);
    report.note("memory when all nodes have joined", megabytes(run.joined_bytes));
    report.note("time to join", seconds(run.joining));
    report.note("a slow rank named, after the last node's news", seconds(run.slow));
    report.note("from the alarm to the report with timelines", seconds(run.complete));
    report.note("delivered by a node", format!("{:.0} KB", run.node_bytes / 1e3));
    report.note("processor time from the alarm to the report", seconds(run.processors));
    Some(run)
}

struct Measured {
    joining: Duration,
    joined_bytes: f64,
    /// Time from the last node's message to the report of the slow rank.
    slow: Duration,
    /// Time from the alarm to the report without timelines.
    total: Duration,
    /// Time from the alarm to the report with timelines.
    complete: Duration,
    /// Time from the start of the last delivery.
    report: Duration,
    /// Time to compute the verdict again here, from the same evidence.
    verdict: Duration,
    peak: f64,
    node_bytes: f64,
    processors: Duration,
    /// Time to fetch the timelines of a group.
    timelines: Duration,
    /// Peak memory after that.
    timelines_peak: f64,
}

/// The process under test; ended on drop.
struct Collector(Child);

impl Collector {
    fn peak(&self) -> Result<f64> {
        peak_bytes(self.0.id() as i32)
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn measure(collector: &Path, nodes: u32) -> Result<Measured> {
    let folder = tempfile::tempdir()?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = Command::new(collector);
    command.args(["cluster", "--listen", &format!("127.0.0.1:{port}")]);
    command.env("XPU_TIMER_TIMELINE_PATH", folder.path()).env("XPU_TIMER_LOG", "error").env("TMPDIR", folder.path());
    let token = folder.path().join("token");
    fs::write(&token, TOKEN)?;
    fs::set_permissions(&token, Permissions::from_mode(0o600))?;
    command.env(TOKEN_FILE, &token);
    let child = Collector(command.stdin(Stdio::null()).stderr(Stdio::inherit()).spawn().context("the collector")?);
    let pid = child.0.id() as i32;

    let shared = Arc::new(Shared::new(nodes)?);
    let joined = || shared.joined.load(Ordering::Relaxed);
    let mut first = None;
    for node in 0..nodes {
        let (sender, receiver) = mpsc::channel(64);
        if node == 0 {
            first = Some(sender.clone());
        }
        tokio::spawn(play(Arc::clone(&shared), node, port, sender, receiver));
        // Nodes start no faster than they join: the backlog of a listening socket is not part of
        // this benchmark.
        while node - joined().min(node) > 200 {
            ensure!(shared.begun.elapsed() < PATIENCE, "the nodes do not join");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    while joined() < nodes {
        ensure!(shared.begun.elapsed() < PATIENCE, "only {} nodes joined", joined());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let joining = shared.begun.elapsed();
    let url = format!("http://127.0.0.1:{port}");
    let client = || {
        let mut client = Command::new(collector);
        client.env(TOKEN_FILE, &token).env("XPU_TIMER_COLLECTOR", &url);
        client
    };
    let slow = wait_slow(client).await?;
    let joined_bytes = child.peak()?;

    let (cpu, start) = (processor_time(pid)?, Instant::now());
    first.context("a node")?.send(alarm("20261121T030000Z-00000001")).await.ok().context("node 0 is gone")?;
    let latest = folder.path().join("latest");
    while !latest.exists() {
        ensure!(start.elapsed() < PATIENCE, "no report; {} nodes delivered", shared.delivered.load(Ordering::Relaxed));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let total = start.elapsed();
    let last_start = Duration::from_nanos(shared.last_start_ns.load(Ordering::Relaxed));
    let report = shared.begun.elapsed().saturating_sub(last_start);
    let (peak, processors) = (child.peak()?, processor_time(pid)?.saturating_sub(cpu));
    while latest.join(PENDING).exists() {
        ensure!(start.elapsed() < PATIENCE, "the timelines do not come");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let complete = start.elapsed();
    let mut fetch = client();
    fetch.args(["timeline", "--output"]).arg(folder.path().join("fetched"));
    let timelines = tokio::task::spawn_blocking(move || fetch_timelines(fetch, nodes)).await??;
    let timelines_peak = child.peak()?;
    drop(child);
    let verdict = look(&latest, nodes)?;
    let node_bytes = shared.bytes.load(Ordering::Relaxed) as f64 / f64::from(nodes);
    Ok(Measured {
        joining,
        joined_bytes,
        slow,
        total,
        complete,
        report,
        verdict,
        peak,
        node_bytes,
        processors,
        timelines,
        timelines_peak,
    })
}

/// Fetches the timelines of the culprit's group, as a user does. Returns how long it takes.
fn fetch_timelines(mut command: Command, nodes: u32) -> Result<Duration> {
    let ranks = culprit_group(nodes);
    command.args(["--job", "bench", "--rank", &ranks.to_string(), "--seconds", &TIMELINE_SECONDS.to_string()]);
    let (took, output) = time(|| command.output());
    let output = output?;
    let (stdout, problems) = (String::from_utf8(output.stdout)?, String::from_utf8_lossy(&output.stderr).into_owned());
    ensure!(output.status.success(), "{command:?}: {problems}");
    let files = fs::read_dir(stdout.trim())?.count() as u64;
    let operations = format!("{} operations of {} ranks", ranks.len() * u64::from(OPERATIONS), ranks.len());
    ensure!(files == ranks.len() && problems.trim() == operations, "{files} files of ranks {ranks}: {problems}");
    Ok(took)
}

/// Waits until the slow rank, and no other, is reported.
async fn wait_slow(client: impl Fn() -> Command) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let mut ask = client();
        ask.args(["incidents", "--json", "slow"]);
        let answer = tokio::task::spawn_blocking(move || ask.output()).await??;
        ensure!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        let list: Value = serde_json::from_slice(&answer.stdout)?;
        match list.as_array().map(Vec::as_slice) {
            Some([one]) if one["rank"] == SLOW => return Ok(start.elapsed()),
            Some([]) => {}
            _ => anyhow::bail!("expected rank {SLOW} to be slow, found: {list}"),
        }
        ensure!(start.elapsed() < PATIENCE, "no rank is reported as slow");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Checks the verdict in the folder, and measures how long computing it takes.
fn look(folder: &Path, nodes: u32) -> Result<Duration> {
    let (culprit, world) = (culprit(nodes), nodes * RANKS);
    let written: Verdict = serde_json::from_slice(&fs::read(folder.join("verdict.json"))?)?;
    ensure!(written.culprits == [culprit], "rank {culprit} is to blame: {}", written.sentence);
    ensure!(written.world_size == world && written.timing.errors.is_empty(), "{:?}", written.timing.errors);
    let folded = fs::read_to_string(folder.join("py_stack"))?;
    ensure!(folded.contains(&format!("@0-{}|", world - 1)), "a frame that all ranks share");
    let evidence = Evidence::decode(&fs::read(folder.join("evidence.bin"))?[..])?;
    ensure!(evidence.ranks.len() == world as usize, "{} ranks in the evidence", evidence.ranks.len());
    // In a large job, only the culprits and one rank of each group keep their timelines.
    let timelines: Vec<u32> = fs::read_dir(folder)?
        .filter_map(|entry| timeline::rank_of_file(&entry.ok()?.path()).map(|(rank, _)| rank))
        .collect();
    let is_bounded = world as usize <= ALL_FILES || (2..=MOST_TIMELINES).contains(&timelines.len());
    ensure!(timelines.contains(&culprit) && is_bounded, "timelines of ranks {timelines:?}");
    let start = Instant::now();
    let verdict = judge(&evidence);
    let took = start.elapsed();
    ensure!(verdict.sentence == written.sentence, "{}", verdict.sentence);
    Ok(took)
}
