//! Faults and attacks as real processes, and the promise that must hold under each: `cargo xtask
//! chaos`.
//!
//! `faults/` contains the faults, in Python: one function each, with its promise. This crate gives
//! each fault its own [`Job`] (folder, ports, environment) and seed, runs it with a deadline, ends
//! everything that it started, and prints the table. `docs/faults.md` is generated from the same
//! table.
//!
//! [`Job`]: xpu_timer_tests::Job

#![forbid(unsafe_code)]

use std::{
    fmt, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use nix::sys::signal::Signal;
use serde::Deserialize;
use xpu_timer_tests::{Job, Process, artifacts, in_parallel, python, tree};

/// Deadline of a fault. It takes seconds on a quiet machine, so one that takes longer waits
/// forever.
const DEADLINE: Duration = Duration::from_secs(240);
/// Time for a fault to end its processes after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
/// Exit status of a fault that cannot be produced on this machine.
const UNABLE: i32 = 77;
/// Repetitions of a fault with random moments in a long run.
const REPEATS: u64 = 10;

/// Runs faults and attacks as real processes, and prints what must hold and what held
#[derive(Debug, Parser)]
#[command(name = "cargo xtask chaos", bin_name = "cargo xtask chaos")]
struct Options {
    /// Only faults whose name contains one of these words, or whose area is one of them
    names: Vec<String>,
    /// Lists all faults, and what goes wrong in each
    #[arg(long)]
    list: bool,
    /// Repeats the faults that draw random moments, each time with another seed
    #[arg(long)]
    long: bool,
    /// Number of faults that run at the same time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Seed of all random moments; the one of each run is printed
    #[arg(long)]
    seed: Option<u64>,
}

/// The result of a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PromiseResult {
    Kept,
    Broken,
    /// The fault cannot be produced here.
    Untested,
}

#[derive(Debug)]
struct Outcome {
    fault: Fault,
    result: PromiseResult,
    seen: String,
    wall: Duration,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xpu_timer_chaos: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the selected faults. Returns whether every promise held.
///
/// # Errors
/// The fault does not exist, or the table cannot be written.
fn run(options: &Options) -> Result<bool> {
    let chosen = |fault: &Fault| {
        let has = |word: &String| fault.name.contains(word) || fault.area == *word;
        options.names.is_empty() || options.names.iter().any(has)
    };
    let faults: Vec<Fault> = faults()?.into_iter().filter(chosen).collect();
    ensure!(!faults.is_empty(), "no fault is called {}", options.names.join(" or "));
    if options.list {
        faults.iter().for_each(|fault| say(&format!("{:44} {}", fault.name, fault.fault)));
        return Ok(true);
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seed = options.seed.unwrap_or(u64::from(now.subsec_nanos()));
    say(&format!("seed {seed}"));
    let times = |fault: &Fault| if options.long && fault.chance { REPEATS } else { 1 };
    let runs: Vec<(Fault, u64)> = faults
        .iter()
        .flat_map(|fault| (0..times(fault)).map(move |index| (fault.clone(), seed.wrapping_add(index))))
        .collect();
    let outcomes = all(&runs, options.jobs);
    let table = table(&outcomes);
    let path = output().join("table.md");
    fs::write(&path, &table).with_context(|| path.display().to_string())?;
    say(&format!("\n{table}\n{}\nthe table: {}", total(&outcomes), path.display()));
    Ok(outcomes.iter().all(|outcome| outcome.result != PromiseResult::Broken))
}

/// Prints a line. A closed pipe is not an error, because the table is also in a file.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// The folder with the table and the logs of broken promises.
fn output() -> PathBuf {
    tree().join("target/chaos")
}

fn all(runs: &[(Fault, u64)], jobs: usize) -> Vec<Outcome> {
    // The harness builds its programs once per process; this must not happen in several threads at
    // once.
    let _ = artifacts();
    // If this fails, writing the table reports why.
    let _ = fs::create_dir_all(output());
    in_parallel(runs, jobs, |(fault, seed)| {
        let outcome = one(fault, *seed);
        say(&outcome.to_string());
        outcome
    })
}

fn one(fault: &Fault, seed: u64) -> Outcome {
    let start = Instant::now();
    let job = Job::new().with("XPU_TIMER_HANG_TIMEOUT", "3").with("XPU_TIMER_SAMPLE_INTERVAL", "1");
    let mut process = Process::spawn(&mut command(&job, fault, seed));
    let Some(status) = wait(&mut process) else {
        let outcome = Outcome {
            fault: fault.clone(),
            result: PromiseResult::Broken,
            seen: format!("it has not ended within {DEADLINE:?}"),
            wall: start.elapsed(),
        };
        keep(&outcome, seed, &process.stdout(), &process.stderr(), &job);
        return outcome;
    };
    let output = process.wait(GRACE);
    let seen = output.stdout.lines().next_back().unwrap_or_default().to_owned();
    let result = match status.code() {
        Some(0) => PromiseResult::Kept,
        Some(UNABLE) => PromiseResult::Untested,
        _ => PromiseResult::Broken,
    };
    let outcome = Outcome { fault: fault.clone(), result, seen, wall: start.elapsed() };
    keep(&outcome, seed, &output.stdout, &output.stderr, &job);
    outcome
}

fn command(job: &Job, fault: &Fault, seed: u64) -> Command {
    let mut command = job.command(python());
    command.arg("-B").arg(program()).arg(&fault.name).current_dir(&job.dir);
    command.env("XPU_CHAOS_DIR", &job.dir).env("XPU_CHAOS_BIN", artifacts().bin(""));
    command.env("XPU_CHAOS_SEED", seed.to_string());
    command
}

/// Waits for a fault. One that misses its deadline gets SIGTERM, so that it ends its processes, and
/// the result is `None`.
fn wait(process: &mut Process) -> Option<ExitStatus> {
    let start = Instant::now();
    let mut late = false;
    loop {
        if let Some(status) = process.try_wait() {
            return (!late).then_some(status);
        }
        if !late && start.elapsed() > DEADLINE {
            process.signal(Signal::SIGTERM);
            late = true;
        }
        if start.elapsed() > DEADLINE + GRACE {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Stores the output and the logs of a broken promise.
fn keep(outcome: &Outcome, seed: u64, stdout: &str, stderr: &str, job: &Job) {
    if outcome.result != PromiseResult::Broken {
        return;
    }
    let name = &outcome.fault.name;
    let text =
        format!("{name}, seed {seed}: {}\n{stdout}\n{stderr}\n{}{}", outcome.seen, printed(&job.dir), job.logs());
    // The outcome is more important than its log.
    let _ = fs::write(output().join(format!("{name}.log")), text);
}

/// The output of the processes of a job.
fn printed(folder: &Path) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let named = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        ["out.", "err."].iter().any(|start| name.to_string_lossy().starts_with(start))
    };
    let small = |entry: &fs::DirEntry| entry.metadata().is_ok_and(|file| file.is_file() && file.len() < 1 << 20);
    let text = |entry: fs::DirEntry| {
        let text = fs::read(entry.path()).unwrap_or_default();
        format!("--- {}\n{}\n", entry.path().display(), String::from_utf8_lossy(&text))
    };
    entries.filter(named).filter(small).map(text).collect()
}

impl PromiseResult {
    fn word(self) -> &'static str {
        match self {
            PromiseResult::Kept => "held",
            PromiseResult::Broken => "**did not hold**",
            PromiseResult::Untested => "not tried",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:44} {}: {} ({:.1} s)", self.fault.name, self.result.word(), self.seen, self.wall.as_secs_f64())
    }
}

fn table(outcomes: &[Outcome]) -> String {
    let rows = outcomes.iter().map(|Outcome { fault, result, seen, .. }| {
        let (what, promise, seen) = (cell(&fault.fault), cell(&fault.promise), cell(seen));
        format!("| {what} (`{}`) | {promise} | {}: {seen} |\n", fault.name, result.word())
    });
    format!("| fault | what must hold | what held |\n|---|---|---|\n{}", rows.collect::<String>())
}

fn total(outcomes: &[Outcome]) -> String {
    let names = |result: PromiseResult| {
        let outcomes = outcomes.iter().filter(|outcome| outcome.result == result);
        outcomes.map(|outcome| outcome.fault.name.as_str()).collect::<Vec<_>>()
    };
    let (held, broken, unable) =
        (names(PromiseResult::Kept), names(PromiseResult::Broken), names(PromiseResult::Untested));
    let mut text = format!("{} faults: {} held", outcomes.len(), held.len());
    for (names, what) in [(broken, "did not hold"), (unable, "could not be tried here")] {
        if !names.is_empty() {
            text += &format!(", {} {what} ({})", names.len(), names.join(" "));
        }
    }
    text
}

/// A fault and its promise.
#[derive(Debug, Clone, Deserialize)]
struct Fault {
    /// Unique; words joined by `-`.
    name: String,
    /// The file in `faults/` that contains it.
    area: String,
    /// The fault, as a sentence.
    fault: String,
    /// The property that must hold.
    promise: String,
    /// It uses random moments, so a long run repeats it.
    chance: bool,
}

/// The program that lists the faults and runs them.
fn program() -> PathBuf {
    tree().join("tests/chaos/faults")
}

/// All faults, ordered by area.
///
/// # Errors
/// python3 cannot list them.
fn faults() -> Result<Vec<Fault>> {
    let mut command = Command::new(python());
    command.arg("-B").arg(program()).arg("--list");
    let output = command.output().context("python3 cannot be run")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("the list of faults")
}

/// A text as a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::*;

    #[test]
    fn a_table_says_what_did_not_hold() {
        let fault =
            Fault { name: "a-b".into(), area: "a".into(), fault: "x | y".into(), promise: "p".into(), chance: false };
        let outcome = |result| Outcome { fault: fault.clone(), result, seen: "s\nt".into(), wall: Duration::ZERO };
        let outcomes = [outcome(PromiseResult::Kept), outcome(PromiseResult::Broken), outcome(PromiseResult::Untested)];
        let table = table(&outcomes);
        assert_eq!(table.lines().count(), 5);
        assert!(table.contains("| x \\| y (`a-b`) | p | **did not hold**: s t |"), "{table}");
        assert_eq!(total(&outcomes), "3 faults: 1 held, 1 did not hold (a-b), 1 could not be tried here (a-b)");
    }

    /// The page `docs/faults.md`.
    fn page(faults: &[Fault]) -> String {
        let row = |fault: &Fault| format!("| {} | {} | `{}` |\n", cell(&fault.fault), cell(&fault.promise), fault.name);
        include_str!("../page.md").replace("{table}\n", &(faults.iter().map(row).collect::<String>() + "\n"))
    }

    #[test]
    fn the_page_is_made_from_the_table() {
        let path = tree().join("docs/faults.md");
        let page = page(&faults().unwrap());
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page, "docs/faults.md is out of date: cargo xtask bless writes it");
    }

    #[test]
    fn every_fault_has_a_name_of_its_own_and_a_promise() {
        let faults = faults().unwrap();
        let names: BTreeSet<&str> = faults.iter().map(|fault| fault.name.as_str()).collect();
        assert!(names.len() == faults.len() && faults.len() > 106, "{}", faults.len());
        assert!(faults.iter().all(|fault| !fault.fault.is_empty() && !fault.promise.is_empty()));
    }
}
