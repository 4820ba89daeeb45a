//! `xpu_timer_dump_timeline`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use xpu_timer_collector::{cli, client::dump_timeline};

fn main() -> ExitCode {
    match dump_timeline::run(&dump_timeline::Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::say(&format!("xpu_timer_dump_timeline: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
