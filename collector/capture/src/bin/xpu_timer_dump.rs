//! Prints the stacks of processes: Python over C, all threads. Only `--force-ptrace` stops them.
use std::process::ExitCode;

use clap::Parser;
use xpu_timer_proto::{env::Source, printable};

fn main() -> ExitCode {
    // Stacks are private, whatever the user's umask permits for other files.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(Source::process().umask()));
    match xpu_timer_capture::dump::run(&xpu_timer_capture::dump::Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xpu_timer_dump: {}", printable::line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
