//! Programs that start all their processes themselves and write the truth about themselves into a
//! file. Their culprits are processes: pids in place of ranks.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use xpu_timer_analysis::Cause;
use xpu_timer_tests::{Incident, Job, Process, artifacts, http, tree};

use crate::{
    program::{Program, tail},
    scenario::{Expected, Scenario, Truth, job, resolved},
    score::Reported,
};

/// The programs with their prefixes.
const PROGRAMS: &[(&str, Program)] = &[
    ("actors", Program::Spawning("actors.py")),
    ("crews", Program::Spawning("crews.py")),
    ("engines", Program::Spawning("engines.py")),
    ("idle", Program::Spawning("idle.py")),
    ("servers", Program::Spawning("servers.py")),
    ("troupe", Program::Spawning("troupe.py")),
    ("waits", Program::Spawning("waits.py")),
    ("waits-gloo", Program::SpawningTorch("waits_gloo.py")),
];

/// A program must have written the truth after this time.
const TRUTH_WITHIN: Duration = Duration::from_secs(60);
/// The verdict on a hang comes within this time after the truth: the longer timeout of ten seconds,
/// the sample interval, and time for a busy machine.
const VERDICT_WITHIN: Duration = Duration::from_secs(25);

/// The truth that a program writes before its trouble begins.
#[derive(Debug, Clone, Deserialize)]
pub struct Written {
    hang: bool,
    /// Pids, ascending.
    #[serde(default)]
    pub culprits: Vec<u32>,
    /// Accepted causes.
    #[serde(default)]
    pub causes: Vec<Cause>,
}

/// All scenarios of these programs, as the programs list them.
///
/// # Errors
/// When a program cannot list its scenarios.
pub fn scenarios() -> Result<Vec<Scenario>> {
    let mut scenarios = Vec::new();
    for (prefix, program) in PROGRAMS {
        let output = Command::new(program.python())
            .env("PYTHONPATH", tree().join("tests/examples"))
            .env("LD_LIBRARY_PATH", artifacts().sim())
            .arg(program.path())
            .arg("--list")
            .output()?;
        ensure!(output.status.success(), "{program} --list: {}", String::from_utf8_lossy(&output.stderr));
        for line in String::from_utf8(output.stdout)?.lines() {
            let [name, kind, seconds] = line.split_whitespace().collect::<Vec<_>>()[..] else {
                bail!("{program} --list: {line:?} is not a name, a kind and a number of seconds");
            };
            let time = Duration::from_secs(seconds.parse().with_context(|| format!("{program} --list: {line:?}"))?);
            let expected = match kind {
                "hang" => Expected::Hang,
                "passes" => Expected::Passes(time),
                "overdue" => Expected::Overdue(time),
                "idle" | "healthy" => Expected::Quiet(time),
                _ => bail!("{program} --list: {line:?} has an unknown kind"),
            };
            let full = format!("{prefix}-{}", name.replace('_', "-"));
            scenarios.push(Scenario { truth: Truth::Written(expected), ..job(&full, *program, 0, &[name]) });
        }
    }
    Ok(scenarios)
}

/// The truth about a program that has written none.
pub fn without_truth(expected: Expected) -> Truth {
    match expected {
        Expected::Hang => Truth::Hang { causes: &[], culprits: Vec::new() },
        Expected::Overdue(_) => Truth::Passes { causes: &[], culprits: Vec::new(), stands_still: false },
        Expected::Quiet(_) | Expected::Passes(_) => Truth::Healthy,
    }
}

/// Watches a running program, and returns the truth and what was reported.
///
/// # Errors
/// When the program fails, or there is no verdict where one is expected.
pub fn watch(job: &Job, ranks: &mut Process, expected: Expected, truth: &Path) -> Result<(Truth, Option<Reported>)> {
    match expected {
        Expected::Quiet(time) => {
            quiet(job, ranks, time)?;
            Ok((Truth::Healthy, named(&job.finished_incidents(), &[])?))
        }
        Expected::Hang => {
            let written = read(truth, ranks)?;
            ensure!(written.hang, "{} says that nothing hangs", truth.display());
            let truth = Truth::Hang { causes: names(&written.causes), culprits: written.culprits.clone() };
            let start = Instant::now();
            loop {
                let reported = named(&job.finished_incidents(), &written.culprits)?;
                let is_right = reported.as_ref().is_some_and(|reported| reported.culprits == written.culprits);
                if is_right || start.elapsed() > VERDICT_WITHIN {
                    return Ok((truth, reported));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Expected::Overdue(time) => {
            until(ranks, time, || Ok(()))?;
            let written = read(truth, ranks)?;
            let found = [job.finished_incidents(), job.mild_captures()].concat();
            found.iter().try_for_each(|incident| resolved(job, incident))?;
            let reported = named(&found, &written.culprits)?;
            let (causes, culprits) = (names(&written.causes), written.culprits);
            Ok((Truth::Passes { causes, culprits, stands_still: false }, reported))
        }
        Expected::Passes(time) => {
            quiet(job, ranks, time)?;
            // The program may have replaced an earlier truth.
            let written = read(truth, ranks)?;
            let reported = named(&job.finished_incidents(), &written.culprits)?;
            // A program that names nobody says only that nothing hangs. A verdict with doubt may
            // name the slow process.
            let is_mild = |reported: &Reported| written.causes.is_empty() && reported.confidence != "high";
            match reported.filter(|reported| !is_mild(reported)) {
                None => Ok((Truth::Healthy, None)),
                found => {
                    let (causes, culprits) = (names(&written.causes), written.culprits);
                    Ok((Truth::Passes { causes, culprits, stands_still: false }, found))
                }
            }
        }
    }
}

/// The program of a scenario, by its prefix.
pub fn program_of(scenario: &str) -> &str {
    let is_prefix = |prefix: &&str| scenario.strip_prefix(*prefix).is_some_and(|rest| rest.starts_with('-'));
    let prefixes = PROGRAMS.iter().map(|(prefix, _)| *prefix).filter(is_prefix);
    prefixes.max_by_key(|prefix| prefix.len()).unwrap_or(scenario)
}

/// The pids that a program has written as its truth, ascending; none if nothing hangs.
///
/// # Errors
/// When the file cannot be read.
pub fn pids(truth: &Path) -> Result<Vec<u32>> {
    let truth_of = parse(&fs::read(truth)?).with_context(|| truth.display().to_string())?;
    Ok(truth_of.culprits)
}

/// Parses the truth that a program has written.
///
/// # Errors
/// When it has another format.
pub fn parse(text: &[u8]) -> Result<Written> {
    let mut written: Written = serde_json::from_slice(text)?;
    written.culprits.sort_unstable();
    Ok(written)
}

fn names(causes: &[Cause]) -> &'static [&'static str] {
    // A few names for each scenario of a run.
    Box::leak(causes.iter().map(|cause| cause.name()).collect())
}

fn read(path: &Path, ranks: &mut Process) -> Result<Written> {
    let start = Instant::now();
    loop {
        if let Ok(text) = fs::read(path) {
            return parse(&text).with_context(|| path.display().to_string());
        }
        if let Some(status) = ranks.try_wait() {
            bail!("the program ended ({status}) before it wrote the truth; {}", tail(&ranks.stderr()));
        }
        ensure!(start.elapsed() < TRUTH_WITHIN, "no truth within {TRUTH_WITHIN:?}; {}", tail(&ranks.stderr()));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Watches a program that should give no alarm, until its time is over or it ends.
fn quiet(job: &Job, ranks: &mut Process, time: Duration) -> Result<()> {
    until(ranks, time, || {
        let (_, page) = http("GET", job.port + 1, "/metrics").unwrap_or_default();
        let alarm = page.lines().find(|line| line.starts_with("XPU_TIMER_COMMON_HANG") && line.ends_with(" 1"));
        alarm.map_or(Ok(()), |alarm| Err(anyhow!("an alarm: {alarm}")))
    })
}

/// Waits until the time of a program is over, or until it ends without an error. Meanwhile calls
/// `check` again and again.
fn until(ranks: &mut Process, time: Duration, check: impl Fn() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        if let Some(status) = ranks.try_wait() {
            ensure!(status.success(), "the program ended with {status}; {}", tail(&ranks.stderr()));
            break;
        }
        check()?;
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// The report that counts among all incidents of a program, which may have several jobs.
fn named(incidents: &[Incident], culprits: &[u32]) -> Result<Option<Reported>> {
    let all: Vec<Reported> =
        incidents.iter().map(|incident| Reported::of_processes(&incident.verdict)).collect::<Result<_>>()?;
    Ok(decisive(&all, culprits).map(|(index, culprits)| {
        let mut found = all[index].clone();
        found.culprits = culprits;
        found
    }))
}

/// The incident of a finished run whose verdict counts.
pub struct Decisive {
    /// Its folder.
    pub folder: PathBuf,
    /// Its `verdict.json`.
    pub verdict: Value,
    /// The pids that count as its culprits, ascending.
    pub culprits: Vec<u32>,
}

/// The incident whose verdict counts in the folder of a run, whose program wrote `culprits` as its
/// truth. `None` without an incident.
///
/// # Errors
/// When a file cannot be read.
pub fn decisive_incident(run: &Path, culprits: &[u32]) -> Result<Option<Decisive>> {
    let mut folders: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(run.join("timeline"))? {
        let path = entry?.path();
        if !path.is_symlink() && path.join("verdict.json").exists() {
            folders.push(path);
        }
    }
    folders.sort();
    let read = |folder: &PathBuf| Ok(serde_json::from_slice(&fs::read(folder.join("verdict.json"))?)?);
    let mut verdicts: Vec<Value> = folders.iter().map(read).collect::<Result<_>>()?;
    let reported: Vec<Reported> = verdicts.iter().map(Reported::of_processes).collect::<Result<_>>()?;
    Ok(decisive(&reported, culprits).map(|(index, culprits)| Decisive {
        folder: folders.swap_remove(index),
        verdict: verdicts.swap_remove(index),
        culprits,
    }))
}

/// Selects the verdict that counts, and its culprits. A wrong accusation with high confidence
/// counts first, then the verdict with the right culprits, then the first one that names any. The
/// culprits of the last are those of all verdicts, because each job has an incident of its own.
fn decisive(all: &[Reported], culprits: &[u32]) -> Option<(usize, Vec<u32>)> {
    let is_mistake = |reported: &Reported| {
        reported.confidence == "high" && reported.culprits.iter().any(|pid| !culprits.contains(pid))
    };
    let is_right = |reported: &Reported| reported.culprits == culprits;
    if let Some(index) = all.iter().position(is_mistake).or_else(|| all.iter().position(is_right)) {
        return Some((index, all[index].culprits.clone()));
    }
    let of_all: BTreeSet<u32> = all.iter().flat_map(|reported| reported.culprits.iter().copied()).collect();
    let first = all.iter().position(|reported| !reported.culprits.is_empty());
    (!all.is_empty()).then(|| (first.unwrap_or(0), of_all.into_iter().collect()))
}
