//! `xpu_timer_gen_trace_timeline`: turns the timelines of all ranks into a trace, see the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use xpu_timer_timeline::cli;

fn main() -> ExitCode {
    let args = cli::GenArgs::parse();
    cli::finish("xpu_timer_gen_trace_timeline", |out, err| cli::gen_trace(&args, out, err))
}
