//! Prints the stacks of processes: Python over C, all threads, without stopping them when that can be avoided.
use std::process::ExitCode;

use clap::Parser;
use xpu_timer_proto::printable;

fn main() -> ExitCode {
    match xpu_timer_capture::dump::run(&xpu_timer_capture::dump::Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xpu_timer_dump: {}", printable::line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
