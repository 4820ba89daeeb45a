//! `xpu_timer_print_env`: prints the effective settings, the parts of xpu_timer, and the hooked
//! libraries of a process or program.
//!
//! It starts nothing but the dynamic loader, which lists the libraries of a program without running
//! it. Exit codes: 0 no problem; 1 a problem, which is printed; 2 wrong usage.

mod cli;
mod library;
mod loaded;
mod parts;
mod report;
mod symbols;
mod target;
mod text;

use std::{ffi::OsString, io::Write, path::Path, process::ExitCode};

use cli::Request;
use report::Report;
use target::Target;
use xpu_timer_proto::printable;

/// Name of the program in its messages.
const NAME: &str = "xpu_timer_print_env";

/// Runs with the arguments after the program's name.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let (json, target) = match cli::parse(arguments) {
        Request::Help => return print(cli::HELP),
        Request::Version => return print(&format!("{NAME} {}\n", env!("CARGO_PKG_VERSION"))),
        Request::Wrong(why) => {
            say(&why);
            let _ = std::io::stderr().write_all(format!("{}\n", cli::USAGE).as_bytes());
            return ExitCode::from(crate::exit_codes::USAGE);
        }
        Request::Library { json, file } => return compare(&file, json),
        Request::Show { json, target } => (json, target),
    };
    let report = match Target::open(target).and_then(|target| Report::of(&target)) {
        Ok(report) => report,
        Err(error) => {
            say(&format!("{error:#}"));
            return ExitCode::FAILURE;
        }
    };
    print(&if json { json_of(&report.json()) } else { text::of(&report) });
    if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compares a library with the hook. Functions that are not hooked are not a failure: the user
/// asked for them.
fn compare(file: &Path, json: bool) -> ExitCode {
    match library::Compared::with_hook(file) {
        Ok(compared) => print(&if json { json_of(&compared.json()) } else { compared.text() }),
        Err(error) => {
            say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn json_of(value: &serde_json::Value) -> String {
    printable::json(&format!("{value:#}\n")).into_owned()
}

/// Prints to stdout. It is no error if the reader is gone.
fn print(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(printable::text(text).as_bytes());
    ExitCode::SUCCESS
}

fn say(text: &str) {
    // If stderr is closed, the message is lost.
    let _ = std::io::stderr().write_all(format!("{NAME}: {}\n", printable::line(text)).as_bytes());
}
