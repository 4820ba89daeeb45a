//! Measures the cost of the hook and the collectors, and compares the stack capture with common
//! tools, on the same targets in one run. Absolute times depend on the machine, so the results are
//! ratios of medians of alternating repetitions, and agreement with the other tools.
#![forbid(unsafe_code)]

mod agreement;
mod capture;
mod churn;
mod cluster;
mod hook;
mod other_tools;
mod report;
mod stops;
mod targets;
mod timeline;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::Parser;

/// The benchmark to run.
#[derive(Parser)]
#[command(name = "xpu_timer_bench")]
enum Command {
    /// Runs the whole benchmark of the stack capture and prints a table; fails when a limit does
    /// not hold
    Capture(capture::Options),
    /// Measures the overhead of the hook and prints a table; fails when a limit does not hold
    Hook(hook::Options),
    /// Measures both roles of the collector and prints a table; fails when a limit does not hold
    Cluster(cluster::Options),
    /// Turns synthetic timelines into a trace and prints a table; fails when a limit does not hold
    Timeline(timeline::Options),
    /// Captures a program that waits in every kind of system call, and fails if a capture changes a
    /// result
    Eintr(stops::EintrOptions),
    /// Runs a command alone and prints the peak of its resident memory in bytes
    #[command(hide = true)]
    Peak {
        /// The program
        program: PathBuf,
        /// Its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(&Command::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xpu_timer_bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a command.
///
/// # Errors
/// A measurement could not be made at all.
fn run(command: &Command) -> Result<bool> {
    match command {
        Command::Capture(options) => capture::run(options),
        Command::Hook(options) => hook::run(options),
        Command::Cluster(options) => cluster::run(options),
        Command::Timeline(options) => timeline::run(options),
        Command::Eintr(options) => stops::eintr(options),
        Command::Peak { program, arguments } => stops::peak(program, arguments).map(|()| true),
    }
}
