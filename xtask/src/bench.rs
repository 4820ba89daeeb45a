//! `cargo xtask bench`: runs the benchmarks. Each is a program of the crate that it measures, built
//! in the release profile.

use std::process::Command;

use anyhow::{Result, bail};
use xpu_timer_tests::{PACKAGES, tree};

use crate::shell::{self, cargo};

/// Options of `bench`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    what: Bench,
}

#[derive(clap::Subcommand)]
enum Bench {
    /// Stack capture, against gdb, eu-stack and py-spy; fails when a limit does not hold
    Capture {
        /// Arguments of the benchmark; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Captures a program that waits in every kind of system call, 10,000 times; fails if a capture
    /// changes a result
    Eintr {
        /// Arguments of the benchmark; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// The hook: calls, a training loop and a process, with and without it; fails when a limit does
    /// not hold
    Hook {
        /// Arguments of the benchmark; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// The collectors: 12,500 nodes of 8 ranks deliver to one cluster collector, and a node
    /// collector watches 8 busy ranks; fails when a limit does not hold
    Cluster {
        /// Arguments of the benchmark; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// The trace of 1,024 ranks for a minute, compared with copying it; fails when a limit does not
    /// hold
    Timeline {
        /// Arguments of the benchmark; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// The viewer on 1,016 and 4,064 ranks, compared with reading the same files, and the merge of
    /// the trees of many nodes; fails when a limit does not hold
    Viewer,
}

/// The benchmarks of `bench viewer`: a name, and the arguments of the example `bench_viewer`.
const VIEWER: &[(&str, &[&str])] = &[
    ("folded files and pictures, 1,016 ranks", &["files", "--files", "1016", "--max-memory", "64"]),
    ("folded files and pictures, 4,064 ranks", &["files", "--files", "4064", "--max-memory", "128"]),
    ("all that the viewer writes, 1,016 ranks", &["files", "--files", "1016", "--html", "--max-memory", "64"]),
    ("all that the viewer writes, 4,064 ranks", &["files", "--files", "4064", "--html", "--max-memory", "128"]),
    // All of these frames must be drawn, so most of the time goes into writing 44 MB of pictures.
    (
        "folded files and pictures, 1,016 ranks, 20,320 stacks that are all different",
        &["files", "--files", "1016", "--unique", "20", "--max-ratio", "50", "--max-memory", "128"],
    ),
    ("trees of 12,500 nodes", &["trees"]),
];

pub(crate) fn run(options: &Options) -> Result<()> {
    match &options.what {
        Bench::Capture { arguments } => run_program("capture", arguments),
        Bench::Eintr { arguments } => run_program("eintr", arguments),
        Bench::Hook { arguments } => run_program("hook", arguments),
        Bench::Cluster { arguments } => run_program("cluster", arguments),
        Bench::Timeline { arguments } => run_program("timeline", arguments),
        Bench::Viewer => {
            // Check every limit, even if an earlier one does not hold.
            let mut failed = Vec::new();
            for (name, arguments) in VIEWER {
                println!("== {name}");
                let mut command =
                    cargo(&["run", "--quiet", "--release", "-p", "xpu_timer_viewer", "--example", "bench_viewer"]);
                if let Err(error) = shell::run(command.arg("--").args(*arguments)) {
                    println!("{error:#}");
                    failed.push(*name);
                }
            }
            if !failed.is_empty() {
                bail!("a limit does not hold: {}", failed.join("; "));
            }
            Ok(())
        }
    }
}

/// Builds `xpu_timer_bench` and all that it measures, and runs it. `cargo run` would select the
/// features of their dependencies for it alone, and build most of them again.
fn run_program(benchmark: &str, arguments: &[String]) -> Result<()> {
    let target = tree().join("target");
    let packages = PACKAGES.into_iter().chain(["xpu_timer_bench"]).flat_map(|package| ["-p", package]);
    shell::run(cargo(&["build", "--release", "--target-dir"]).arg(&target).args(packages))?;
    let mut program = Command::new(target.join("release/xpu_timer_bench"));
    shell::run(program.arg(benchmark).args(arguments).current_dir(tree()).env("XPU_TIMER_ARTIFACTS", "ready"))
}
