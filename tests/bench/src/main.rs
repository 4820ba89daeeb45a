//! The program behind `cargo xtask bench`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match xpu_timer_bench::run(&xpu_timer_bench::Command::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xpu_timer_bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
