//! `cargo xtask chaos`: runs faults and prints which promises held.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use xpu_timer_chaos::{Options, run};

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xpu_timer_chaos: {error:#}");
            ExitCode::FAILURE
        }
    }
}
