//! `xpu_timer_stacktrace_viewer`: one look at the stacks of all ranks.
#![forbid(unsafe_code)]

use clap::Parser;
use std::io::{self, Write};
use std::process::ExitCode;
use xpu_timer_viewer::{Args, run};

fn main() -> ExitCode {
    match run(&Args::parse(), &mut io::stdout().lock(), &mut io::stderr().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // `eprintln` would panic when nobody reads stderr any more.
            let _ = writeln!(io::stderr(), "xpu_timer_stacktrace_viewer: {error:#}");
            ExitCode::FAILURE
        }
    }
}
