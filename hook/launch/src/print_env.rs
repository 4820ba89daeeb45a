//! What is in force, and what would be hooked: settings, parts, and the libraries of a process or a program.
//!
//! Only looks: nothing is started but the dynamic loader, which lists the libraries of a program without running it. Exit codes: 0
//! all is well; 1 something is wrong, which is said; 2 wrong usage.

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

/// Runs with the arguments behind the program's name.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let (json, target) = match cli::parse(arguments) {
        Request::Help => return print(cli::HELP),
        Request::Version => return print(&format!("{NAME} {}\n", env!("CARGO_PKG_VERSION"))),
        Request::Wrong(why) => {
            say(&why);
            let _ = std::io::stderr().write_all(format!("{}\n", cli::USAGE).as_bytes());
            return ExitCode::from(crate::USAGE);
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

/// A library against the hook. That it has functions which are not hooked is no failure: it is what was asked for.
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

/// The product, on stdout; a reader that went away is content.
fn print(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(printable::text(text).as_bytes());
    ExitCode::SUCCESS
}

fn say(text: &str) {
    // Nobody can be told when stderr is closed.
    let _ = std::io::stderr().write_all(format!("{NAME}: {}\n", printable::line(text)).as_bytes());
}
