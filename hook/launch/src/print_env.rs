//! `xpu_timer_print_env`: prints the effective settings, the parts of xpu_timer, and the hooked
//! libraries of a process or program.
//!
//! It starts nothing but the dynamic loader, which lists the libraries of a program without running
//! it. Exit codes: 0 no problem; 1 a problem, which is printed; 2 wrong usage.

mod report;
mod target;

use std::{ffi::OsString, fmt::Write as _, io::Write as _, path::Path, process::ExitCode};

use xpu_timer_proto::{
    env::{Origin, Setting},
    printable::{self, line},
};

use crate::cli::{self, PrintEnvRequest as Request};
use report::{Hooked, HookedLibrary, Report};
use target::Target;

/// Name of the program in its messages.
const NAME: &str = "xpu_timer_print_env";

/// Runs with the arguments after the program's name.
#[must_use]
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    let (json, target) = match cli::parse_print_env(arguments) {
        Request::Help => return print(cli::PRINT_ENV_HELP),
        Request::Version => return print(&format!("{NAME} {}\n", env!("CARGO_PKG_VERSION"))),
        Request::Wrong(why) => {
            say(&why);
            let _ = std::io::stderr().write_all(format!("{}\n", cli::PRINT_ENV_USAGE).as_bytes());
            return ExitCode::from(cli::WRONG_USAGE);
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
    print(&if json { json_of(&report.json()) } else { text_of(&report) });
    if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compares a library with the hook. Functions that are not hooked are not a failure: the user
/// asked for them.
fn compare(file: &Path, json: bool) -> ExitCode {
    match target::Compared::with_hook(file) {
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

/// Prints to stdout. A reader that is gone is not an error.
fn print(text: &str) -> ExitCode {
    let _ = std::io::stdout().write_all(printable::text(text).as_bytes());
    ExitCode::SUCCESS
}

fn say(text: &str) {
    // If stderr is closed, the message is lost.
    let _ = std::io::stderr().write_all(format!("{NAME}: {}\n", line(text)).as_bytes());
}

/// Number of a library's functions that are shown by name; the others are counted.
const SHOWN_FUNCTIONS: usize = 4;

/// The report as text.
fn text_of(report: &Report) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = writeln!(text, "xpu_timer {}\n\nParts", env!("CARGO_PKG_VERSION"));
    for part in &report.parts {
        let place =
            part.place.as_ref().map_or_else(|why| format!("MISSING: {why:#}"), |path| path.display().to_string());
        let _ = writeln!(text, "  {:<16} {}", part.name, line(&place));
    }
    for plugin in &report.plugins {
        let path = plugin.path.display();
        let found = plugin.functions.as_ref();
        let functions = found
            .map_or_else(|why| format!("{path}: UNUSABLE: {why:#}"), |found| format!("{path}: {}", found.join(", ")));
        let _ = writeln!(text, "  {:<16} {}", "exit plugin", line(&functions));
    }
    let answers = match &report.collector {
        Ok(pid) => format!("answers as process {pid}"),
        Err(why) => format!("does not run ({why}); xpu_timer_launch starts it"),
    };
    let _ = writeln!(text, "  {:<16} {}", "node collector", line(&answers));
    let _ = writeln!(text, "  {:<16} {}", "its socket", line(&report.socket.to_string_lossy()));
    let metrics =
        report.port.checked_add(1).map_or("none".to_string(), |port| format!("http://127.0.0.1:{port}/metrics"));
    let _ = writeln!(text, "  {:<16} http://127.0.0.1:{}, metrics {metrics}", "its ports", report.port);
    settings(&mut text, report);
    if let Some(target) = &report.target {
        hooked(&mut text, target);
    }
    if !report.problems.is_empty() {
        let _ = writeln!(text, "\nProblems");
        for problem in &report.problems {
            let _ = writeln!(text, "  {}", line(problem));
        }
    }
    text
}

fn settings(text: &mut String, report: &Report) {
    let ini = report.ini.as_ref().map_or(String::new(), |ini| format!(", INI file {ini}"));
    let _ = writeln!(text, "\nSettings of {}{}; * marks the variables that are set", report.whose, line(&ini));
    let width =
        report.settings.iter().map(|setting| setting.value.len()).filter(|width| *width <= 32).max().unwrap_or(0);
    for setting in &report.settings {
        let mark = if setting.origin == Origin::Default { ' ' } else { '*' };
        let value = if setting.value.is_empty() { "-" } else { &setting.value };
        let (value, remark) = (line(value), remark(setting));
        let _ = writeln!(text, "{mark} {:<36} {value:<width$}  {}", setting.name, line(&remark));
    }
    for remark in &report.without_effect {
        let _ = writeln!(text, "* {}", line(remark));
    }
}

fn remark(setting: &Setting) -> String {
    let origin = match setting.origin {
        Origin::Default => return setting.meaning.to_string(),
        Origin::Environment => "environment",
        Origin::Ini => "INI file",
    };
    match &setting.problem {
        Some(problem) => format!("{:?} from the {origin} cannot be used", problem.value),
        None => {
            format!("from the {origin}; default {}", if setting.default.is_empty() { "none" } else { setting.default })
        }
    }
}

fn hooked(text: &mut String, target: &Hooked) {
    let _ = writeln!(text, "\nHooks in {}\n  {}", line(&target.title), line(&target.summary));
    if let Some(family) = target.family {
        let _ = writeln!(text, "  family {}", family.name);
    }
    for library in &target.libraries {
        let (name, functions) = (line(&library.library.name), functions(library));
        let _ = writeln!(text, "  {:<10} {name}: {}", library.layer, line(&functions));
    }
    for note in &target.notes {
        let _ = writeln!(text, "  {}", line(note));
    }
}

fn functions(library: &HookedLibrary) -> String {
    match &library.functions {
        Err(why) => format!("cannot be read: {why:#}"),
        Ok(names) if names.is_empty() => "none of its functions is hooked by name".into(),
        Ok(names) => {
            let first = names.iter().take(SHOWN_FUNCTIONS).cloned().collect::<Vec<_>>().join(", ");
            let more = names.len().saturating_sub(SHOWN_FUNCTIONS);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{} functions: {first}{more}", names.len())
        }
    }
}
