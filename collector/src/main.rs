//! `xpu_timer_collector`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use xpu_timer_collector::cli;

fn main() -> ExitCode {
    match cli::run(cli::Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::say(&format!("xpu_timer_collector: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
