//! `xpu_timer_stacktrace_viewer`: merges the stacks of all ranks, see the library.
#![forbid(unsafe_code)]

use clap::Parser;
use nix::sys::stat::{Mode, umask};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use terminal_size::{Width, terminal_size_of};
use xpu_timer_proto::{env::Source, printable};
use xpu_timer_viewer::{Args, Terminal, run};

fn main() -> ExitCode {
    let mut args = Args::parse();
    // Stacks may be confidential, so the mode of the files does not depend on the user's umask.
    umask(Mode::from_bits_truncate(Source::process().umask()));
    args.terminal = terminal();
    match run(&args, &mut io::stdout().lock(), &mut io::stderr().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // `eprintln` panics when stderr is closed.
            let _ = writeln!(io::stderr(), "xpu_timer_stacktrace_viewer: {}", printable::line(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

/// The capabilities of stdout: plain text unless it is a terminal.
fn terminal() -> Terminal {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return Terminal::default();
    }
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let colour = set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb");
    let width = terminal_size_of(&stdout).map(|(Width(width), _)| usize::from(width));
    Terminal { width, colour }
}
