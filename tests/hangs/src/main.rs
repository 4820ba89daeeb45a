//! Runs the hang corpus and prints how often the verdict was right: `cargo xtask hangs`.
#![forbid(unsafe_code)]

mod calibrate;
mod corpus;
mod program;
mod record;
mod run;
mod scenario;
mod score;
mod variants;
mod written;

use std::{io::Write, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, ValueEnum};
use xpu_timer_analysis::judge;
use xpu_timer_tests::end_jobs_on_signal;

use crate::scenario::Scenario;

/// Runs real jobs that hang in every known way, on the simulated device
#[derive(Parser)]
#[command(name = "xpu_timer_hangs")]
enum Command {
    /// Runs scenarios and compares their verdicts with the expected ones
    Run {
        /// Only scenarios whose name contains this
        filter: Option<String>,
        /// Only scenarios with ranks, or only those whose programs start all processes themselves
        #[arg(long)]
        kind: Option<Kind>,
        /// Only healthy and idle programs, each for eight minutes
        #[arg(long)]
        long: bool,
        /// Number of jobs that run at the same time
        #[arg(long, default_value_t = 3)]
        jobs: usize,
        /// Folder for the folders of the jobs
        #[arg(long, default_value = "target/hangs")]
        output: PathBuf,
        /// Sets XPU_TIMER_HANG_KILL=1, and checks that exactly the ranks of proven hangs end,
        /// within 10 s of the verdict
        #[arg(long)]
        kill: bool,
    },
    /// Judges the folders of an earlier run again, after a change of a rule
    Again {
        /// Only scenarios whose name contains this
        filter: Option<String>,
        /// Folder with the folders of the jobs
        #[arg(long, default_value = "target/hangs")]
        output: PathBuf,
    },
    /// Keeps the evidence of an earlier run's folders for the tests of the judge
    Record {
        /// Only scenarios whose name contains this
        filter: Option<String>,
        /// Folder with the folders of the jobs
        #[arg(long, default_value = "target/hangs")]
        output: PathBuf,
    },
    /// Judges one incident folder of any job again
    Judge {
        /// The incident folder
        folder: PathBuf,
        /// Prints JSON, as in `verdict.json`
        #[arg(long)]
        json: bool,
    },
    /// Prints how often the verdicts of first runs were right, and judges variants of all recorded
    /// evidence
    Calibrate {
        /// Adds the verdicts in this folder, which must be of the first run of its programs
        #[arg(long)]
        add: Option<PathBuf>,
        /// Judges 100,000 variants in place of 4,000
        #[arg(long)]
        long: bool,
        /// Also judges variants of the runs in this folder whose programs wrote their truths
        #[arg(long)]
        output: Option<PathBuf>,
    },
    /// Lists the names of all scenarios
    List,
}

/// How long each program of a long run is watched: 60 of them take eight hours of real time in all.
const LONG: Duration = Duration::from_secs(480);

/// How the processes of a scenario are started.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// As ranks, by a launcher of the corpus
    Ranks,
    /// By the program itself
    Programs,
}

fn main() -> ExitCode {
    match work(Command::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xpu_timer_hangs: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn work(command: Command) -> anyhow::Result<bool> {
    match command {
        Command::Run { filter, kind, long, jobs, output, kill } => {
            end_jobs_on_signal();
            let mut scenarios = corpus::runnable(filter.as_deref())?;
            let is_wanted = |scenario: &Scenario| match kind {
                Some(Kind::Ranks) => scenario.world > 0,
                Some(Kind::Programs) => scenario.world == 0,
                None => true,
            };
            scenarios.retain(is_wanted);
            if long {
                scenarios = scenarios.into_iter().filter_map(|scenario| scenario.lasting(LONG)).collect();
            }
            let results = run::all(scenarios, jobs, &output, kill)?;
            Ok(score::report(&results, &output))
        }
        Command::Again { filter, output } => {
            let results = run::judge_again(corpus::matching(filter.as_deref())?, &output)?;
            Ok(score::report(&results, &output))
        }
        Command::Record { filter, output } => {
            record::write(&corpus::runnable(filter.as_deref())?, &output)?;
            Ok(true)
        }
        Command::Judge { folder, json } => {
            let verdict = judge(&scenario::evidence(&folder)?);
            if json {
                println!("{}", serde_json::to_string_pretty(&verdict)?);
            } else {
                print!("{}", verdict.to_text());
            }
            Ok(true)
        }
        Command::Calibrate { add: Some(first_run), .. } => calibrate::add(&first_run).map(|()| true),
        Command::Calibrate { add: None, long, output } => {
            calibrate::run(if long { 100_000 } else { 4_000 }, output.as_deref())
        }
        Command::List => {
            let list: String = corpus::runnable(None)?.iter().map(|scenario| format!("{scenario}\n")).collect();
            // A closed pipe is not an error.
            let _ = std::io::stdout().write_all(list.as_bytes());
            Ok(true)
        }
    }
}
