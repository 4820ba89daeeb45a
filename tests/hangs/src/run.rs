//! Runs scenarios, each as a separate job, several at a time.

use std::{
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;
use xpu_timer_analysis::judge;
use xpu_timer_proto::procfs;
use xpu_timer_tests::{Incident, Job, Output, Process, http, in_parallel, skip, tree};

use crate::{
    program::{Compiled, Need, Program, tail},
    scenario::{self, Scenario, Truth},
    score::{Outcome, Reported},
    written,
};

/// Time from the start of the processes to the end of the first incident.
const PATIENCE: Duration = Duration::from_secs(120);

/// Time from the start of a program that ends by itself to its end. A long run takes eight minutes.
const END_WITHIN: Duration = Duration::from_secs(600);

/// Time to watch an even run after its ranks have been compared. A comparison covers at most the
/// last minute.
const LONG_ENOUGH: Duration = Duration::from_secs(25);

/// Number of ranks from which a small machine needs longer than the usual timeout to start them
/// all.
const MANY: u32 = 32;

/// Time from the verdict on a hang to the end of its ranks.
const ENDED_WITHIN: Duration = Duration::from_secs(10);
/// A verdict, and one that confirms it.
const MOST_VERDICTS: usize = 2;

/// Runs all scenarios, `jobs` at a time, and prints a line for each as it ends. With `kill`, the
/// collector ends the ranks of hung jobs.
pub fn all(scenarios: Vec<Scenario>, jobs: usize, output: &Path, kill: bool) -> Result<Vec<Outcome>> {
    let scenarios: Vec<Scenario> = scenarios.into_iter().filter(can_run).collect();
    // The harness builds its programs once per process; this must not happen in several threads at
    // once.
    let _ = xpu_timer_tests::artifacts();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let programs: Vec<Program> = scenarios.iter().map(|scenario| scenario.program).collect();
    let compiled = Compiled::of(&programs, folder.path())?;
    Ok(in_parallel(&scenarios, jobs, |scenario| {
        let outcome = one(scenario, &compiled, &output.join(&scenario.name), kill);
        println!("{outcome}");
        outcome
    }))
}

/// Judges the folders of an earlier run again.
pub fn judge_again(scenarios: Vec<Scenario>, output: &Path) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for scenario in scenarios.into_iter().filter(Scenario::hangs) {
        let latest = scenario.incident(output);
        if !latest.exists() {
            continue;
        }
        let reported = Reported::of(&serde_json::to_value(judge(&scenario::evidence(&latest)?))?);
        let outcome = Outcome { scenario, reported: reported.map(Some), wall: Duration::ZERO };
        println!("{outcome}");
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// Whether the machine can run a scenario. Prints the reason if not.
fn can_run(scenario: &Scenario) -> bool {
    let missing = scenario.need.and_then(Need::missing);
    if let Some(reason) = &missing {
        skip(&format!("{}: {reason}", scenario.name));
    }
    missing.is_none()
}

fn one(scenario: &Scenario, compiled: &Compiled, folder: &Path, kill: bool) -> Outcome {
    static POLLING: Mutex<()> = Mutex::new(());
    let _alone = scenario.program.polls().then(|| POLLING.lock().unwrap_or_else(PoisonError::into_inner));
    let start = Instant::now();
    let mut scenario = scenario.clone();
    let reported = run(&mut scenario, compiled, folder, kill);
    Outcome { scenario, reported, wall: start.elapsed() }
}

/// Runs a scenario. A truth that the program has written replaces that of the scenario.
fn run(scenario: &mut Scenario, compiled: &Compiled, folder: &Path, kill: bool) -> Result<Option<Reported>> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let folder = folder.canonicalize()?;
    let examples = tree().join("tests/examples");
    let mut job = Job::at(&folder)
        .with("PYTHONPATH", &examples.display().to_string())
        .with("XPU_HANGS_LIBRARY", &compiled.vfork.display().to_string())
        .with("XPU_SIM_DEVICES", "64");
    // PyTorch loads slowly. On a busy machine it takes longer than a collector without ranks waits
    // by default.
    if matches!(scenario.program, Program::Torch(_) | Program::Elastic(_) | Program::SpawningTorch(_)) {
        job = job.with("XPU_TIMER_LINGER", "120");
    }
    if scenario.world >= MANY {
        job = job.with("XPU_TIMER_HANG_TIMEOUT", "20");
    }
    if kill {
        job = job.with("XPU_TIMER_HANG_KILL", "1");
    }
    for (name, value) in &scenario.environment {
        job = job.with(name, value);
    }
    let truth = folder.join("truth.json");
    job = job.with("XPU_HANGS_TRUTH", &truth.display().to_string());
    let mut command = scenario.program.command(&job, scenario.world, compiled);
    let mut ranks = Process::spawn(command.args(&scenario.arguments));
    match &scenario.truth {
        Truth::Hang { .. } => {
            let incident = hang(&job, &mut ranks)?;
            if kill {
                ended(&job, &incident)?;
            }
            Reported::of(&incident.verdict).map(Some)
        }
        Truth::Passes { stands_still, .. } => {
            let incident = hang(&job, &mut ranks)?;
            if kill && *stands_still {
                ended(&job, &incident)?;
            } else {
                passed(&job, ranks, &incident)?;
            }
            Reported::of(&incident.verdict).map(Some)
        }
        Truth::Slow(expected) => slow(&job, &mut ranks, scenario.world, expected),
        Truth::Healthy => healthy(&job, ranks),
        Truth::Written(expected) => {
            let expected = *expected;
            // If the run fails, this counts.
            scenario.truth = written::without_truth(expected);
            let (truth, reported) = written::watch(&job, &mut ranks, expected, &truth)?;
            scenario.truth = truth;
            Ok(reported)
        }
    }
}

/// The first verdict. One that shows no hang makes no incident, and is in a mild capture.
fn hang(job: &Job, ranks: &mut Process) -> Result<Incident> {
    let start = Instant::now();
    loop {
        let verdicts = [job.finished_incidents(), job.mild_captures()].concat();
        if let Some(incident) = verdicts.into_iter().next() {
            return Ok(incident);
        }
        if let Some(status) = ranks.try_wait()
            && job.incidents().is_empty()
            && start.elapsed() > Duration::from_secs(20)
        {
            return Err(anyhow!("the job ended ({status}) without an incident; {}", tail(&ranks.stderr())));
        }
        if start.elapsed() > PATIENCE {
            return Err(anyhow!("no incident within {PATIENCE:?}; {}", tail(&ranks.stderr())));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits until the ranks of a proven hang have been ended, and checks that those of other verdicts
/// have not.
fn ended(job: &Job, incident: &Incident) -> Result<()> {
    // A process that the kernel blocks, in a file system that does not answer or in a freezer,
    // ignores all signals.
    let ignores_kill = |rank: &Value| {
        const SIGKILL: u64 = 1 << 8;
        let status = procfs::status_text(&rank["pid"]).unwrap_or_default();
        let pending = procfs::field(&status, "ShdPnd:");
        pending.is_some_and(|mask| u64::from_str_radix(mask, 16).is_ok_and(|mask| mask & SIGKILL != 0))
    };
    let alive = || -> Vec<Value> {
        let ranks = job.status().map(|status| status["ranks"].as_array().cloned().unwrap_or_default());
        let is_alive = |rank: &Value| {
            rank["attempt"] == incident.verdict["attempt"]
                && ["present", "detached"].iter().any(|is| rank["presence"] == *is)
                && !ignores_kill(rank)
        };
        ranks.unwrap_or_default().into_iter().filter(is_alive).collect()
    };
    // A verdict with doubt is confirmed by a second one, or withdrawn by it.
    let mut verdicts = Vec::new();
    let mut since = Instant::now();
    loop {
        let newest = job.incidents().into_iter().find(|found| found.path == incident.path);
        let newest = newest.map_or_else(|| incident.verdict.clone(), |found| found.verdict);
        if verdicts.last() != Some(&newest["judged_at"]) {
            verdicts.push(newest["judged_at"].clone());
            since = Instant::now();
        }
        if newest["hang"] == "none" {
            let logs = job.logs();
            let was_ended = logs.contains("XPU_TIMER_HANG_KILL ends");
            ensure!(!was_ended, "ranks were ended without evidence of a hang: {}", tail(&logs));
            return Ok(());
        }
        let alive = alive();
        if alive.is_empty() {
            return Ok(());
        }
        ensure!(verdicts.len() <= MOST_VERDICTS, "after {} verdicts there are still {alive:?}", verdicts.len());
        ensure!(since.elapsed() < ENDED_WITHIN, "{ENDED_WITHIN:?} after the verdict there are still {alive:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits for the end of the ranks.
fn end(mut ranks: Process) -> Result<Output> {
    let start = Instant::now();
    while ranks.try_wait().is_none() {
        ensure!(start.elapsed() < END_WITHIN, "the job has not ended within {END_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(ranks.wait(PATIENCE))
}

/// Waits for the end of a job whose incident should resolve by itself.
fn passed(job: &Job, ranks: Process, incident: &Incident) -> Result<()> {
    let output = end(ranks)?;
    ensure!(output.code() == 0, "the job ended with {}; {}", output.code(), tail(&output.stderr));
    scenario::resolved(job, incident)
}

/// Waits until ranks are reported as slow, or, if none should be, until they have been compared
/// long enough.
fn slow(job: &Job, ranks: &mut Process, world: u32, expected: &[u32]) -> Result<Option<Reported>> {
    let start = Instant::now();
    let mut compared_since = None;
    loop {
        ensure!(ranks.try_wait().is_none(), "the job has ended; {}", tail(&ranks.stderr()));
        if let Some(incident) = job.incidents().into_iter().next() {
            return Reported::of(&incident.verdict).map(Some);
        }
        let named = slow_ranks(job.port);
        let foreign = named.iter().any(|rank| !expected.contains(rank));
        if foreign || !named.is_empty() && named == expected {
            return Ok(Reported::slow(named));
        }
        let (_, page) = http("GET", job.port + 1, "/metrics").unwrap_or_default();
        let compared = page.lines().filter(|line| line.starts_with("xpu_timer_rank_wait_ratio{")).count();
        if compared == world as usize {
            compared_since.get_or_insert_with(Instant::now);
        }
        if compared_since.is_some_and(|since| expected.is_empty() && since.elapsed() > LONG_ENOUGH) {
            return Ok(None);
        }
        ensure!(start.elapsed() < PATIENCE, "within {PATIENCE:?} {named:?} of {expected:?}, {compared} compared");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Ranks that the collector reports as slow, ascending.
fn slow_ranks(port: u16) -> Vec<u32> {
    let (_, body) = http("GET", port, "/slow_ranks").unwrap_or_default();
    let list: Vec<Value> = serde_json::from_str(&body).unwrap_or_default();
    let mut ranks: Vec<u32> = list.iter().filter_map(|one| u32::try_from(one["rank"].as_u64()?).ok()).collect();
    ranks.sort_unstable();
    ranks
}

fn healthy(job: &Job, ranks: Process) -> Result<Option<Reported>> {
    let output = end(ranks)?;
    if let Some(incident) = job.incidents().into_iter().next() {
        return Reported::of(&incident.verdict).map(Some);
    }
    if output.code() != 0 || !output.stderr.is_empty() {
        return Err(anyhow!("the job ended with {}; {}", output.code(), tail(&output.stderr)));
    }
    Ok(None)
}
