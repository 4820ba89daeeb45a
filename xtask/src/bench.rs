//! `cargo xtask bench`: runs the benchmarks. Each is a program of the crate that it measures, built
//! in the release profile.

use anyhow::{Result, bail};
use xpu_timer_tests::PACKAGES;

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
        Bench::Capture { arguments } => {
            let packages = ["-p", "xpu_timer_bench", "-p", "xpu_timer_capture"];
            shell::run(cargo(&["build", "--release"]).args(packages))?;
            let benchmark = ["run", "--quiet", "--release", "-p", "xpu_timer_bench", "--", "capture"];
            shell::run(cargo(&benchmark).args(arguments))
        }
        Bench::Eintr { arguments } => {
            let benchmark = ["run", "--quiet", "--release", "-p", "xpu_timer_bench", "--", "eintr"];
            shell::run(cargo(&benchmark).args(arguments))
        }
        Bench::Hook { arguments } => {
            // The programs that its ranks run, above all the hook, are built in the same profile.
            let packages = PACKAGES.into_iter().chain(["xpu_timer_bench"]).flat_map(|package| ["-p", package]);
            shell::run(cargo(&["build", "--release"]).args(packages))?;
            let benchmark = ["run", "--quiet", "--release", "-p", "xpu_timer_bench", "--", "hook"];
            shell::run(cargo(&benchmark).args(arguments).env("XPU_TIMER_ARTIFACTS", "ready"))
        }
        Bench::Cluster { arguments } => {
            let packages = ["collector", "viewer", "launch", "hook", "bench"].map(|name| format!("xpu_timer_{name}"));
            let packages = packages.iter().flat_map(|package| ["-p", package]);
            shell::run(cargo(&["build", "--release"]).args(packages))?;
            let benchmark = ["run", "--quiet", "--release", "-p", "xpu_timer_bench", "--", "cluster"];
            shell::run(cargo(&benchmark).args(arguments).env("XPU_TIMER_ARTIFACTS", "ready"))
        }
        Bench::Timeline { arguments } => {
            let packages = ["-p", "xpu_timer_bench", "-p", "xpu_timer_timeline"];
            shell::run(cargo(&["build", "--release"]).args(packages))?;
            let benchmark = ["run", "--quiet", "--release", "-p", "xpu_timer_bench", "--", "timeline"];
            shell::run(cargo(&benchmark).args(arguments))
        }
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
