//! `xpu_timer_diff`: compares the timelines of two or more runs, see the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use xpu_timer_timeline::cli;

fn main() -> ExitCode {
    let args = cli::DiffArgs::parse();
    cli::finish("xpu_timer_diff", |out, err| cli::diff(&args, out, err))
}
