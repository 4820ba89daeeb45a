//! The report as text.

use std::fmt::Write;

use xpu_timer_proto::{
    env::{Origin, Setting},
    printable::line,
};

use super::report::{Hooked, HookedLibrary, Report};

/// Number of a library's functions that are shown by name; the others are counted.
const SHOWN: usize = 4;

/// The complete text.
pub fn of(report: &Report) -> String {
    let mut text = String::new();
    // Writing into a String cannot fail.
    let _ = writeln!(text, "xpu_timer {}\n\nParts", env!("CARGO_PKG_VERSION"));
    for part in &report.parts {
        let place = part.place.as_ref().map_or_else(|why| format!("MISSING: {why}"), |path| path.display().to_string());
        let _ = writeln!(text, "  {:<16} {}", part.name, line(&place));
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
        let _ = writeln!(text, "\nWrong");
        for problem in &report.problems {
            let _ = writeln!(text, "  {}", line(problem));
        }
    }
    text
}

fn settings(text: &mut String, report: &Report) {
    let ini = report.ini.as_ref().map_or(String::new(), |ini| format!(", INI file {ini}"));
    let _ = writeln!(text, "\nSettings of {}{}; * marks what is set", report.whose, line(&ini));
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
        Some(problem) => format!("NOT {:?} of the {origin}, which cannot be used", problem.value),
        None => {
            format!("from the {origin}; default {}", if setting.default.is_empty() { "none" } else { setting.default })
        }
    }
}

fn hooked(text: &mut String, target: &Hooked) {
    let _ = writeln!(text, "\nHooks in {}\n  {}", line(&target.title), line(&target.words));
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
        Err(why) => format!("cannot be read: {why}"),
        Ok(names) if names.is_empty() => "none of its functions by name".into(),
        Ok(names) => {
            let first = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
            let more = names.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{} functions: {first}{more}", names.len())
        }
    }
}
