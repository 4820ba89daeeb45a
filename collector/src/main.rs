//! `xpu_timer_collector`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;
use xpu_timer_collector::cli;
use xpu_timer_proto::{env::Source, printable::Lines};

fn main() -> ExitCode {
    let wanted = Source::process().text("XPU_TIMER_LOG").unwrap_or_default();
    let (filter, wrong) = match EnvFilter::try_new(&wanted) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new("info"), Some(error)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lines(std::io::stderr()))
        .with_ansi(false)
        // By default a line that cannot be written, on a full disk, is complained about by eprintln!, which panics then.
        .log_internal_errors(false)
        .init();
    // The message of a panic may hold anything; as a line of the log it goes through the same filter.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    if let Some(error) = wrong {
        tracing::warn!("XPU_TIMER_LOG={wanted:?} cannot be used, using \"info\" instead: {error}");
    }
    match cli::run(cli::Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::say(&format!("xpu_timer_collector: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
