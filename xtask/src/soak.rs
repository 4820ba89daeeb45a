//! `cargo xtask soak`: runs the soak test, see `tests/soak`.

use anyhow::Result;
use xpu_timer_tests::PACKAGES;

use crate::{
    shell::{self, cargo},
    test,
};

/// Options of `soak`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Options of the soak: `--hours N`, `--rate N`; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    test::need_tools()?;
    let packages = PACKAGES.iter().flat_map(|package| ["-p", *package]);
    shell::run(cargo(&["build", "--quiet"]).args(packages))?;
    shell::run(cargo(&["run", "--quiet", "-p", "xpu_timer_soak", "--"]).args(&options.arguments))
}
