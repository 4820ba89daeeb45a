//! `xpu_timer_collector`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;
use xpu_timer_collector::cli;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("XPU_TIMER_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    match cli::run(cli::Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xpu_timer_collector: {error:#}");
            ExitCode::FAILURE
        }
    }
}
