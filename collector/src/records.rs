//! Incidents on disk: those that an earlier collector left open, and the list of all.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use xpu_timer_analysis::{Status, Verdict};

use crate::{dump::RECORD, incident::Record};

/// Only the newest folders are looked at: an open incident is not older than its job.
const NEWEST: usize = 200;
/// No verdict is larger; a file that is was not written by a collector.
const MAX_JSON_BYTES: u64 = 64 * 1024 * 1024;

/// Incidents of this boot whose verdict still says `open`, with their folders.
#[must_use]
pub fn open_in(root: &Path, boot: &str) -> Vec<(PathBuf, Record)> {
    let mut folders = folders(root);
    folders.reverse();
    let of = |folder: PathBuf| {
        let record: Record = serde_json::from_slice(&read(&folder.join(RECORD))?).ok()?;
        let open = verdict(&folder)?.timing.status == Status::Open;
        (open && record.boot == boot).then_some((folder, record))
    };
    folders.into_iter().take(NEWEST).filter_map(of).collect()
}

/// All incidents below some folders, oldest first, as `/incidents` shows them.
#[must_use]
pub fn list(roots: &[PathBuf]) -> Vec<Value> {
    let mut all: Vec<(String, Value)> = Vec::new();
    for folder in roots.iter().flat_map(|root| folders(root)) {
        let Some(verdict) = verdict(&folder) else { continue };
        let line = json!({
            "incident": verdict.incident,
            "path": folder,
            "job": verdict.job,
            "status": verdict.timing.status,
            "opened_at": verdict.timing.opened_at,
            "cause": verdict.cause,
            "culprits": verdict.culprits,
            "sentence": verdict.sentence,
        });
        all.push((id(&folder), line));
    }
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all.into_iter().map(|(_, line)| line).collect()
}

/// The `verdict.json` of one incident. An id from outside is compared with names that are there, never used as a path.
#[must_use]
pub fn verdict_json(roots: &[PathBuf], wanted: &str) -> Option<Vec<u8>> {
    read(&find(roots, wanted)?.join("verdict.json"))
}

/// Names and sizes of the files of one incident that are for people; `None` when there is no such incident.
#[must_use]
pub fn files(roots: &[PathBuf], wanted: &str) -> Option<Vec<Value>> {
    let folder = find(roots, wanted)?;
    let mut files: Vec<(String, u64)> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            Some((entry.file_name().into_string().ok()?, entry.metadata().ok().filter(|m| m.is_file())?.len()))
        })
        .filter(|(name, _)| !name.starts_with('.'))
        .collect();
    files.sort();
    Some(files.into_iter().map(|(name, bytes)| json!({ "name": name, "bytes": bytes })).collect())
}

/// One file of an incident. Both names come from outside and are compared with what is there, never used as a path.
#[must_use]
pub fn file(roots: &[PathBuf], wanted: &str, name: &str) -> Option<Vec<u8>> {
    let folder = find(roots, wanted)?;
    let entry = fs::read_dir(folder).ok()?.flatten().find(|entry| entry.file_name().to_str() == Some(name))?;
    let visible = !name.starts_with('.') && entry.file_type().is_ok_and(|kind| kind.is_file());
    if visible { fs::read(entry.path()).ok() } else { None }
}

/// The folder of an incident. That of a node's part has the name of the node behind the incident's.
fn find(roots: &[PathBuf], wanted: &str) -> Option<PathBuf> {
    let all: Vec<PathBuf> = roots.iter().flat_map(|root| folders(root)).collect();
    let part = |folder: &&PathBuf| id(folder).strip_prefix(wanted).is_some_and(|rest| rest.starts_with('-'));
    all.iter().find(|folder| id(folder) == wanted).or_else(|| all.iter().find(part)).cloned()
}

/// What follows `incident-` in the name of a folder.
#[must_use]
pub fn id(folder: &Path) -> String {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.strip_prefix("incident-").unwrap_or(&name).to_string()
}

/// Incident folders in one folder, oldest first.
#[must_use]
pub fn folders(root: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("incident-"))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    folders.sort();
    folders
}

/// The verdict in a folder.
#[must_use]
pub fn verdict(folder: &Path) -> Option<Verdict> {
    serde_json::from_slice(&read(&folder.join("verdict.json"))?).ok()
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let status = fs::symlink_metadata(path).ok()?;
    if !status.is_file() || status.len() > MAX_JSON_BYTES {
        return None;
    }
    fs::read(path).ok()
}
