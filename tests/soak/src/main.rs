//! The program behind `cargo xtask soak`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match xpu_timer_soak::run(&xpu_timer_soak::Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xpu_timer_soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}
