//! `cargo xtask bench`: each benchmark is a program of the crate that it measures, built in the release profile.

use anyhow::Result;

use crate::shell::{self, cargo};

/// Options of `bench`.
#[derive(clap::Args)]
pub struct Options {
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
    /// Folded stacks and pictures of 1,016 ranks, against reading the same files; and the merge of the trees of many nodes
    Viewer,
}

pub fn run(options: &Options) -> Result<()> {
    match &options.what {
        Bench::Capture { arguments } => {
            let packages = ["-p", "xpu_timer_bench", "-p", "xpu_timer_capture"];
            shell::run(cargo(&["build", "--release"]).args(packages))?;
            let benchmark = ["run", "--quiet", "--release", "-p", "xpu_timer_bench", "--", "capture"];
            shell::run(cargo(&benchmark).args(arguments))
        }
        Bench::Viewer => {
            for example in ["bench_viewer", "bench_trees"] {
                shell::run(cargo(&["run", "--release", "-p", "xpu_timer_viewer", "--example"]).arg(example))?;
            }
            Ok(())
        }
    }
}
