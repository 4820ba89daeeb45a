//! `cargo xtask`: the commands of this repository. CI runs the same commands.
#![forbid(unsafe_code)]

mod bench;
mod demo;
mod frameworks;
mod fuzz;
mod lint;
mod shell;
mod source;
mod test;

use std::{
    fs,
    process::{self, ExitCode},
};

use anyhow::{Context, Result};
use clap::Parser;
use xpu_timer_tests::{PACKAGES, copy_stripped, tree, write_wheel};

use shell::{cargo, need};

/// The commands of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Command {
    /// Runs four ranks under xpu_timer_launch, makes one of them hang, and prints the verdict
    Demo(demo::Options),
    /// Runs every test; with CI=true a skipped test is a failure
    Test(test::Options),
    /// Fuzzes the parsers of outside bytes, guided by coverage; `test` runs a fixed number of
    /// inputs
    Fuzz(fuzz::Options),
    /// Runs the hang corpus: real jobs that hang in every known way; prints how many verdicts are
    /// right. `--calibrate` runs nothing: it prints what the probability of a verdict is worth, and
    /// judges 4,000 variants of recorded evidence, 100,000 with `--long`
    Hangs {
        /// Part of the names of the scenarios to run, and options such as `--jobs 4`; or
        /// `--calibrate`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Runs real frameworks of PyPI, each healthy and with a hang; installs each when it first runs
    Frameworks(frameworks::Options),
    /// Injects faults and attacks with real processes, and prints each promise and whether it held;
    /// exit status 1 if one did not hold
    Chaos {
        /// Part of the names of the faults to run, and options: `--list`, `--long`, `--jobs N`,
        /// `--seed N`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Runs a busy mixed node for hours and fails if our processes grow; `--hours 0.2` is twelve
    /// minutes
    Soak {
        /// Options of the soak: `--hours N`, `--rate N`; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Checks the hook's lock-free parts in every interleaving of their threads; `test` allows two
    /// preemptions
    Model,
    /// Checks layout, format, clippy, documentation and licences
    Lint(lint::Options),
    /// Prints random functions of the workspace: file:line, name, lines of the body
    Sample(source::Options),
    /// Runs a benchmark, and prints ratios of two measurements of the same run
    Bench(bench::Options),
    /// Builds everything that a node needs, as one archive and as a wheel, in target/dist
    Dist,
    /// Regenerates code, schemas, pages and goldens
    Bless,
}

fn hangs(arguments: &[String]) -> Result<()> {
    let run = |command: &str, arguments: &[&String]| {
        shell::run(cargo(&["run", "--quiet", "-p", "xpu_timer_hangs", "--", command]).args(arguments))
    };
    let others: Vec<&String> = arguments.iter().filter(|argument| *argument != "--calibrate").collect();
    if others.len() < arguments.len() {
        return run("calibrate", &others);
    }
    test::need_tools()?;
    run("run", &others)
}

fn chaos(arguments: &[String]) -> Result<()> {
    need(&["gcc", "libc6-dev", "python3", "python3-torch", "util-linux", "iproute2", "sudo"])?;
    shell::run(cargo(&["run", "--quiet", "-p", "xpu_timer_chaos", "--"]).args(arguments))
}

fn soak(arguments: &[String]) -> Result<()> {
    test::need_tools()?;
    let packages = PACKAGES.iter().flat_map(|package| ["-p", *package]);
    shell::run(cargo(&["build", "--quiet"]).args(packages))?;
    shell::run(cargo(&["run", "--quiet", "-p", "xpu_timer_chaos", "--bin", "xpu_timer_soak", "--"]).args(arguments))
}

fn model() -> Result<()> {
    let arguments = ["test", "--release", "-p", "xpu_timer_models", "--", "--nocapture"];
    shell::run(cargo(&arguments).env("XPU_TIMER_MODELS", "exhaustive"))
}

/// The packages of the installed files.
const INSTALLED_PACKAGES: [&str; 6] = ["hook", "launch", "capture", "collector", "timeline", "viewer"];

/// Packs the installed files of a node into an archive and a Python wheel.
fn dist() -> Result<()> {
    need(&["binutils"])?;
    let packages = INSTALLED_PACKAGES.iter().flat_map(|name| ["-p".to_string(), format!("xpu_timer_{name}")]);
    let target = tree().join("target");
    shell::run(cargo(&["build", "--release", "--target-dir"]).arg(&target).args(packages))?;

    let dist = target.join("dist");
    // `deploy/` expects this folder below `/opt`, where `tar -C /opt` unpacks it.
    let folder = dist.join("xpu_timer");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    copy_stripped(&target.join("release"), &folder)?;
    let wheel = write_wheel(&folder, &dist)?;
    for file in ["README.md", "LICENSE"] {
        fs::copy(tree().join(file), folder.join(file)).with_context(|| format!("cannot copy {file}"))?;
    }
    let archive = dist.join(format!("xpu_timer-{}-x86_64-linux.tar.gz", env!("CARGO_PKG_VERSION")));
    let mut tar = process::Command::new("tar");
    tar.args(["--owner=0", "--group=0", "-C"]).arg(&dist).arg("-czf").arg(&archive).arg("xpu_timer");
    shell::run(&mut tar)?;
    println!("{}\n{}", archive.display(), wheel.display());
    Ok(())
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Hangs { arguments } => hangs(&arguments),
        Command::Frameworks(options) => frameworks::run(&options),
        Command::Chaos { arguments } => chaos(&arguments),
        Command::Soak { arguments } => soak(&arguments),
        Command::Model => model(),
        Command::Lint(options) => lint::run(&options),
        Command::Sample(options) => source::sample(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Dist => dist(),
        Command::Bless => test::bless(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
