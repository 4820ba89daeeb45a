//! Lists all incidents of a timeline folder with time, cause and verdict.

use crate::folder::{incidents, name_of};
use crate::summary::{Terminal, wrapped};
use serde::Serialize;
use std::fmt::Write as _;
use std::io;
use std::path::Path;
use xpu_timer_proto::printable;

/// Indentation of the lines below an incident.
const INDENT: &str = "    ";

/// One incident.
#[derive(Debug, Serialize)]
struct Incident {
    /// Name of its folder.
    name: String,
    /// Its time, from its name: `2026-11-21T10:15:00Z`.
    time: Option<String>,
    /// Cause and sentence of the verdict; absent without one.
    cause: Option<String>,
    sentence: Option<String>,
}

/// The incidents of a folder, oldest first, as text or as JSON.
pub fn list(path: &Path, json: bool, terminal: Terminal) -> io::Result<String> {
    let incidents: Vec<Incident> = incidents(path)?.iter().map(|path| incident(path)).collect();
    if json {
        return Ok(printable::json(&serde_json::to_string_pretty(&incidents)?).into_owned() + "\n");
    }
    let mut text = String::new();
    for incident in &incidents {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}  {}", incident.time.as_deref().unwrap_or("unknown time"), incident.name);
        let about = match (&incident.cause, &incident.sentence) {
            (Some(cause), Some(sentence)) => format!("{cause}: {sentence}"),
            (_, Some(sentence)) => sentence.clone(),
            _ => "no verdict".to_owned(),
        };
        let about = wrapped(&about, terminal.width.map(|width| width.saturating_sub(INDENT.len())));
        about.lines().for_each(|line| _ = writeln!(text, "{INDENT}{line}"));
    }
    Ok(text)
}

fn incident(path: &Path) -> Incident {
    let name = name_of(path);
    let verdict = crate::report::read_verdict(path).ok().flatten();
    let cause =
        verdict.as_ref().and_then(|verdict| Some(serde_json::to_value(verdict.cause).ok()?.as_str()?.to_owned()));
    Incident { time: time_of(&name), cause, sentence: crate::summary::verdict_sentence(path), name }
}

/// The time in `incident-20261121T101500Z-3`.
fn time_of(name: &str) -> Option<String> {
    let stamp = name.strip_prefix("incident-")?.split('-').next()?;
    let (date, time) = stamp.split_once('T')?;
    let time = time.strip_suffix('Z')?;
    let digits = |text: &str, length| text.len() == length && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(date, 8) || !digits(time, 6) {
        return None;
    }
    let (year, month, day) = (&date[..4], &date[4..6], &date[6..]);
    Some(format!("{year}-{month}-{day}T{}:{}:{}Z", &time[..2], &time[2..4], &time[4..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn incidents_are_listed_oldest_first() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["incident-20261121T101800Z-4", "incident-20261121T101500Z-3", "other", "incident-odd"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let sentence = "Rank 2 stands\nin its loader.\n\nMore\n";
        fs::write(dir.path().join("incident-20261121T101500Z-3/verdict.txt"), sentence).unwrap();
        assert_eq!(
            list(dir.path(), false, Terminal::default()).unwrap(),
            "2026-11-21T10:15:00Z  incident-20261121T101500Z-3\n    Rank 2 stands in its loader.\n\
             2026-11-21T10:18:00Z  incident-20261121T101800Z-4\n    no verdict\n\
             unknown time  incident-odd\n    no verdict\n"
        );
        let json: serde_json::Value =
            serde_json::from_str(&list(dir.path(), true, Terminal::default()).unwrap()).unwrap();
        assert_eq!(json[0]["sentence"], "Rank 2 stands in its loader.");
        assert_eq!(json[2]["time"], serde_json::Value::Null);
    }
}
