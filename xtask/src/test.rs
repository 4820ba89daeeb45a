//! `cargo xtask test` and `bless`.

use std::{env, fs};

use anyhow::{Result, bail};
use xpu_timer_tests::{Artifacts, PypiTorch};

use crate::shell::{self, cargo};
use crate::{fuzz, suite};

/// Options of `test`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only tests whose name contains this
    filter: Option<String>,

    /// Only the tests on real PyTorch; sets up PyPI's build under target first (2.4 GB)
    #[arg(long)]
    torch: bool,
}

/// Installs or names the tools that the tests need and this machine lacks.
pub(crate) fn need_tools() -> Result<()> {
    shell::need(&[])
}

pub(crate) fn run(options: &Options) -> Result<()> {
    need_tools()?;
    shell::need_disk()?;
    build(options)?;
    let skipped = xpu_timer_tests::tree().join("target/skipped-tests.txt");
    // It does not exist if no test was skipped last time.
    let _ = fs::remove_file(&skipped);
    let filter = options.filter.as_deref().or(options.torch.then_some("torch"));
    let which = if options.torch { ["-p", "xpu_timer_tests", "--test", "it"].as_slice() } else { &["--workspace"] };
    if options.torch {
        // Here a failure is an error with its reason; in a test it is a reason to skip.
        PypiTorch::set_up()?;
    }
    let test = || {
        let mut command = cargo(&["test", "--no-fail-fast"]);
        command.args(which).env("XPU_TIMER_ARTIFACTS", "ready").env("XPU_TIMER_SKIP_LOG", &skipped);
        command
    };
    suite::run(test, filter)?;
    if filter.is_none() {
        fuzz::run(&fuzz::Options::short())?;
    }
    let skipped = fs::read_to_string(&skipped).unwrap_or_default();
    if !skipped.is_empty() {
        eprintln!("skipped tests:\n{skipped}");
        if env::var("CI").is_ok_and(|value| value == "true") {
            bail!("with CI=true every test has to run");
        }
    }
    Ok(())
}

/// Builds what the tests run, and the tests. Cargo chooses the features of a dependency by what is
/// built together, so building only the programs first would compile many dependencies twice.
fn build(options: &Options) -> Result<()> {
    if options.torch {
        return Artifacts::beside_this_executable()?.build(false);
    }
    shell::run(&mut cargo(&["build", "--workspace", "--all-targets"]))
}

pub(crate) fn bless() -> Result<()> {
    let packages = ["-p", "xpu_timer_proto_codegen", "-p", "xpu_timer_analysis", "-p", "xpu_timer_chaos"];
    shell::run(cargo(&["test", "--quiet"]).args(packages).env("BLESS", "1"))?;
    let calibration = ["-p", "xpu_timer_hangs", "the_table_of_the_judge"];
    shell::run(cargo(&["test", "--quiet"]).args(calibration).env("BLESS", "1"))?;
    let layouts = ["-p", "xpu_timer_tests", "--test", "it", "layouts_are_those_of_the_headers"];
    shell::run(cargo(&["test", "--quiet"]).args(layouts).env("BLESS", "1"))
}
