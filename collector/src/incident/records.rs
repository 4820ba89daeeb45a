//! Incidents on disk: those that an earlier collector left open, and the list of all.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use xpu_timer_analysis::{Status, Verdict};

use crate::{
    incident::{
        engine::{Cause, Record},
        folder::{folders, id, own_folders},
        verdict_files::{self, CLUSTER_RECORD, RECORD},
    },
    job::JobKey,
    json::pretty,
    os::clock::{self, Now},
};

/// Number of folders that are searched, newest first: an open incident is not older than its job.
const NEWEST: usize = 500;
/// The number for a cluster collector.
const NEWEST_OF_CLUSTER: usize = 200;
/// Upper limit for a verdict; a larger file was not written by a collector.
const MAX_JSON_BYTES: u64 = 64 * 1024 * 1024;

/// An incident that an earlier collector left open.
#[derive(Debug)]
pub struct OpenIncident {
    /// Its folder.
    pub folder: PathBuf,
    /// The state that the earlier collector recorded.
    pub record: Record,
    /// Its verdict; `None` if its folder is unfinished.
    pub verdict: Option<Verdict>,
}

/// Returns the incidents of this boot whose verdict still has the status `open`, and those whose
/// folder a killed collector has left unfinished. Finishes such folders without a record.
#[must_use]
pub(crate) fn open_in(root: &Path, boot: &str) -> Vec<OpenIncident> {
    verdict_files::finish_leftovers(root);
    let of = |(folder, record): (PathBuf, Record)| {
        if record.boot != boot {
            return None;
        }
        if !record.writer.is_empty() {
            return verdict_files::is_writer_gone(&record.writer).then_some(OpenIncident {
                folder,
                record,
                verdict: None,
            });
        }
        let verdict = verdict(&folder)?;
        (verdict.timing.status == Status::Open).then_some(OpenIncident { folder, record, verdict: Some(verdict) })
    };
    recorded(root, RECORD, NEWEST).filter_map(of).collect()
}

/// The incidents that an earlier cluster collector left open. The nodes keep their part in them, so
/// they outlast a boot of this machine.
#[must_use]
pub(crate) fn open_in_cluster(root: &Path) -> Vec<OpenIncident> {
    verdict_files::forget_timelines(root);
    let of = |(folder, record): (PathBuf, Record)| {
        let verdict = verdict(&folder);
        let open = verdict.as_ref().is_none_or(|verdict| verdict.timing.status == Status::Open);
        open.then_some(OpenIncident { folder, record, verdict })
    };
    recorded(root, CLUSTER_RECORD, NEWEST_OF_CLUSTER).filter_map(of).collect()
}

/// The newest folders with a record of this name, newest first.
fn recorded(root: &Path, name: &str, newest: usize) -> impl Iterator<Item = (PathBuf, Record)> {
    own_folders(root).into_iter().rev().take(newest).filter_map(move |folder| {
        let record = serde_json::from_slice(&read(&folder.join(name))?).ok()?;
        Some((folder, record))
    })
}

/// All incidents below some roots, oldest first, as `/incidents` shows them. On a file system that
/// the nodes of a job share, the folder of the job represents the folders of the nodes.
#[must_use]
pub(crate) fn list(roots: &[PathBuf]) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::new();
    let mut seen: BTreeSet<String> = BTreeSet::new();
    // A name sorts before longer names that begin with it.
    let mut folders: Vec<PathBuf> = roots.iter().flat_map(|root| folders(root)).collect();
    folders.sort_by_key(|folder| id(folder));
    for folder in folders {
        let Some(verdict) = verdict(&folder) else { continue };
        if !seen.insert(verdict.incident.clone()) {
            continue;
        }
        all.push(line(&verdict, Some(&folder)));
    }
    all
}

fn line(verdict: &Verdict, folder: Option<&Path>) -> Value {
    json!({
        "incident": verdict.incident,
        "path": folder,
        "job": verdict.job,
        "status": verdict.timing.status,
        "opened_at": verdict.timing.opened_at,
        "cause": verdict.cause,
        "confidence": verdict.confidence,
        "probability": verdict.probability,
        "culprits": verdict.culprits,
        "culprit_processes": verdict.culprit_processes,
        "sentence": verdict.sentence,
    })
}

/// An incident without a folder, because none could be made. It is shown as if it had one.
#[derive(Debug)]
pub struct WithoutFolder {
    /// Its entry in [`list`]; `path` is null.
    pub line: Value,
    verdict: Option<Verdict>,
}

impl WithoutFolder {
    /// `closed_unix_ns` is when it was closed. Without a verdict, none has been made yet.
    #[must_use]
    pub fn new(
        id: &str,
        job: &JobKey,
        status: Status,
        opened: Now,
        closed_unix_ns: Option<u64>,
        verdict: Option<&Verdict>,
    ) -> Self {
        let mut verdict = verdict.cloned();
        if let Some(verdict) = &mut verdict {
            verdict.timing.status = status;
            verdict.timing.resolved_at = closed_unix_ns.map(clock::rfc3339);
        }
        let unjudged = || {
            json!({
                "incident": id,
                "path": null,
                "job": job.name,
                "status": status,
                "opened_at": clock::rfc3339(opened.unix_ns),
                "cause": null,
                "confidence": null,
                "probability": null,
                "culprits": [],
                "culprit_processes": [],
                "sentence": null,
            })
        };
        WithoutFolder { line: verdict.as_ref().map_or_else(unjudged, |verdict| line(verdict, None)), verdict }
    }

    /// Whether it has this id.
    #[must_use]
    pub fn is(&self, id: &str) -> bool {
        self.line["incident"] == id
    }

    /// The verdict files that its folder would contain, by name.
    #[must_use]
    pub fn files(&self) -> [(&'static str, Vec<u8>); 2] {
        let (text, json) = match &self.verdict {
            Some(verdict) => (verdict.to_text(), pretty(verdict)),
            None => ("no verdict yet\n".into(), pretty(&self.line)),
        };
        [("verdict.json", json), ("verdict.txt", text.into_bytes())]
    }
}

/// The `verdict.json` of one incident. An id from outside is compared with existing names and never
/// used as a path.
#[must_use]
pub(crate) fn verdict_json(roots: &[PathBuf], wanted: &str) -> Option<Vec<u8>> {
    read(&find(roots, wanted)?.join("verdict.json"))
}

/// Names and sizes of the user-facing files of an incident; `None` if there is no such incident.
#[must_use]
pub(crate) fn files(roots: &[PathBuf], wanted: &str) -> Option<Vec<Value>> {
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

/// One file of an incident and its size. Both names come from outside; they are compared with
/// existing names and never used as a path.
#[must_use]
pub(crate) fn file(roots: &[PathBuf], wanted: &str, name: &str) -> Option<(File, u64)> {
    let folder = find(roots, wanted)?;
    let entry = fs::read_dir(folder).ok()?.flatten().find(|entry| entry.file_name().to_str() == Some(name))?;
    if name.starts_with('.') {
        return None;
    }
    // Do not follow a link or wait for a pipe that was put there in the meantime.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(entry.path()).ok()?;
    let status = file.metadata().ok().filter(fs::Metadata::is_file)?;
    Some((file, status.len()))
}

/// The folder of an incident. The folder of a node's part has the name of the node after that of
/// the incident.
fn find(roots: &[PathBuf], wanted: &str) -> Option<PathBuf> {
    // Reports link each other by the names of the folders.
    let wanted = wanted.strip_prefix("incident-").unwrap_or(wanted);
    let all: Vec<PathBuf> = roots.iter().flat_map(|root| folders(root)).collect();
    let part = |folder: &&PathBuf| id(folder).strip_prefix(wanted).is_some_and(|rest| rest.starts_with('-'));
    all.iter().find(|folder| id(folder) == wanted).or_else(|| all.iter().find(part)).cloned()
}

/// Whether the incident of a folder was requested by hand and had no problem. False if in doubt.
#[must_use]
pub(crate) fn was_requested_by_hand(folder: &Path) -> bool {
    let record = record(folder);
    verdict(folder).is_some_and(|verdict| {
        let was_asked_for = verdict.trigger.kind == "manual";
        // The cluster collector does not record causes: there, the verdict shows whether the job
        // hung.
        let hung =
            record.map_or(!verdict.culprits.is_empty(), |record| record.seen.iter().any(|one| *one != Cause::Manual));
        was_asked_for && !hung
    })
}

/// The record of a collector in a folder.
#[must_use]
pub(crate) fn record(folder: &Path) -> Option<Record> {
    let bytes = [RECORD, CLUSTER_RECORD].iter().find_map(|name| read(&folder.join(name)))?;
    serde_json::from_slice(&bytes).ok()
}

/// The verdict in a folder.
#[must_use]
pub(crate) fn verdict(folder: &Path) -> Option<Verdict> {
    serde_json::from_slice(&read(&folder.join("verdict.json"))?).ok()
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let status = fs::symlink_metadata(path).ok()?;
    if !status.is_file() || status.len() > MAX_JSON_BYTES {
        return None;
    }
    fs::read(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::incident::folder::{self, incident_of};

    #[test]
    fn the_parts_of_a_job_are_one_incident() {
        let root = tempfile::tempdir().unwrap();
        let mut verdict = xpu_timer_analysis::judge(&xpu_timer_proto::v1::Evidence::default());
        let mut write = |name: &str, incident: &str, sentence: &str| {
            (verdict.incident, verdict.sentence) = (incident.into(), sentence.into());
            let folder = root.path().join(format!("incident-{name}"));
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("verdict.json"), serde_json::to_vec(&verdict).unwrap()).unwrap();
        };
        write("20261121T000000Z-00000001-node-b", "20261121T000000Z-00000001", "b");
        write("20261121T000000Z-00000001", "20261121T000000Z-00000001", "all");
        write("20261122T000000Z-00000002-node-b", "20261122T000000Z-00000002", "b alone");
        let list = list(&[root.path().to_path_buf()]);
        let sentences: Vec<&str> = list.iter().filter_map(|one| one["sentence"].as_str()).collect();
        assert_eq!(sentences, ["all", "b alone"]);
        let of: Vec<String> = folders(root.path()).iter().map(|folder| incident_of(folder)).collect();
        assert_eq!(of, ["20261121T000000Z-00000001", "20261121T000000Z-00000001", "20261122T000000Z-00000002"]);
    }

    #[test]
    fn folders_of_other_users_are_not_incidents() {
        let root = tempfile::tempdir().unwrap();
        let verdict = xpu_timer_analysis::judge(&xpu_timer_proto::v1::Evidence::default());
        let make = |name: &str| {
            let folder = root.path().join(format!("incident-20261121T000000Z-{name}"));
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("verdict.json"), serde_json::to_vec(&verdict).unwrap()).unwrap();
            folder
        };
        let (own, theirs) = (make("00000001"), make("00000002"));
        if !nix::unistd::getuid().is_root() {
            eprintln!("SKIPPED only root can play another user");
            return;
        }
        std::os::unix::fs::chown(&theirs, Some(12345), None).unwrap();
        assert_eq!(folders(root.path()), [own.clone(), theirs.clone()], "nobody else could have put it there");
        assert_eq!(own_folders(root.path()), std::slice::from_ref(&own));
        fs::set_permissions(root.path(), std::os::unix::fs::PermissionsExt::from_mode(0o1777)).unwrap();
        let roots = [root.path().to_path_buf()];
        assert_eq!((folders(root.path()), list(&roots).len()), (vec![own], 1));
        assert!(verdict_json(&roots, "20261121T000000Z-00000001").is_some());
        assert!(verdict_json(&roots, "20261121T000000Z-00000002").is_none());
    }

    #[test]
    fn an_unfinished_folder_of_a_killed_collector_is_finished_when_its_job_ends() {
        let root = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let place = folder::own_stamp().rsplit_once(' ').unwrap().0;
        let make = |id: &str, writer: &str, file: &str| {
            let (folder, _) = folder::Folder::create(root.path(), root.path(), id).unwrap();
            let record =
                Record { id: id.into(), boot: "b".into(), job: "j".into(), writer: writer.into(), ..Record::default() };
            verdict_files::write_record(&folder.path, &record);
            if !file.is_empty() {
                folder.write(file, b"").unwrap();
            }
            folder.path
        };
        let gone = format!("{place} {}:1", child.id());
        let stacks = make("1-stacks", &gone, "00000-00001.stacktrace");
        let empty = make("2-empty", &gone, "");
        let other = make("3-other", folder::own_stamp(), "");
        let mut left: Vec<OpenIncident> = open_in(root.path(), "b");
        left.sort_by(|one, other| one.folder.cmp(&other.folder));
        assert_eq!(left.iter().map(|one| &one.folder).collect::<Vec<_>>(), [&stacks, &empty]);
        assert!(left.iter().all(|one| one.verdict.is_none()));
        assert!(open_in(root.path(), "another boot").is_empty() && other.exists());

        verdict_files::finish_leftover_folder(stacks.clone());
        verdict_files::finish_leftover_folder(empty.clone());
        assert_eq!(verdict(&stacks).unwrap().timing.status, Status::Ended);
        assert!(!empty.exists(), "a folder without stacks says nothing");
    }
}
