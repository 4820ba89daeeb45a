//! `xpu_timer_collector`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;
use xpu_timer_collector::cli;
use xpu_timer_proto::env::Source;

fn main() -> ExitCode {
    let filter = Source::process().text("XPU_TIMER_LOG").unwrap_or_default();
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    match cli::run(cli::Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xpu_timer_collector: {error:#}");
            ExitCode::FAILURE
        }
    }
}
