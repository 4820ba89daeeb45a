//! Removes old incident folders, by number and by age. Open incidents stay. Hangs, dumps by hand
//! and promoted captures are counted separately, so that the others never push out the record of a
//! hang. Also removes mild captures, and timelines that users have requested.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use tracing::{info, warn};
use xpu_timer_analysis::Status;
use xpu_timer_proto::timeline;

use crate::{
    config::RetentionLimits,
    error::{Error, chain},
    incident::{
        folder::{Folder, id, incident_of, is_own_folder, own_folders},
        mild::root_of,
        records,
        verdict_files::{RECORD, change_verdict, finish_leftovers, is_writer_gone},
    },
    os::safe_path::create_directories,
    timeline::folder::{PREFIX, UNFINISHED},
};

/// Cleans up some roots on a thread of its own: a network file system may be slow.
pub(crate) fn start(roots: Vec<PathBuf>, keep: RetentionLimits, open: BTreeSet<String>) {
    let work = move || {
        for root in roots {
            retire(&root, keep, &open, SystemTime::now());
            retire_timelines(&root, keep, SystemTime::now());
            trim_captures(&root, keep.age, SystemTime::now());
        }
    };
    if let Err(error) = thread::Builder::new().name("retention".into()).spawn(work) {
        warn!("old incidents are not removed, because no thread can be started: {error}");
    }
}

/// Removes expired incidents in one root.
fn retire(root: &Path, keep: RetentionLimits, open: &BTreeSet<String>, now: SystemTime) {
    finish_removals(root);
    // Sorted by name, oldest first. Only folders that a collector has made count: a user's own
    // folders are never removed. Folders of other users are ignored, because they would push out
    // ours.
    let ours: Vec<PathBuf> = own_folders(root).into_iter().filter(|folder| is_incident_folder(folder)).collect();
    // The parts of one incident are removed together: a file system that many nodes share has many
    // of them.
    let mut incidents: BTreeMap<String, Kind> = BTreeMap::new();
    // The verdicts are read only if there may be too many folders.
    let may_be_surplus = keep.count != 0 && ours.len() > keep.count;
    for folder in ours.iter().filter(|_| may_be_surplus) {
        let kind = kind_of(folder);
        incidents.entry(incident_of(folder)).and_modify(|known| *known = kind.min(*known)).or_insert(kind);
    }
    let surplus: BTreeSet<&String> = [Kind::Hang, Kind::ByHand, Kind::Promoted]
        .into_iter()
        .flat_map(|wanted| {
            let of_kind: Vec<&String> =
                incidents.iter().filter(|(_, kind)| **kind == wanted).map(|(incident, _)| incident).collect();
            let count = of_kind.len().saturating_sub(keep.count);
            of_kind.into_iter().take(count)
        })
        .collect();
    for folder in &ours {
        let old = is_older(&folder.join(VERDICT), keep.age, now);
        let name = id(folder);
        let is_surplus = surplus.contains(&incident_of(folder));
        if (!is_surplus && !old) || open.iter().any(|id| name.starts_with(id.as_str())) {
            continue;
        }
        remove(root, folder, if old { "it is old" } else { "there are newer ones" });
    }
}

/// The kinds of incident, each with a limit of its own. An incident whose parts differ counts as
/// the first kind that fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Hang,
    ByHand,
    Promoted,
}

fn kind_of(folder: &Path) -> Kind {
    if records::was_requested_by_hand(folder) {
        Kind::ByHand
    } else if records::verdict(folder).is_some_and(|verdict| verdict.timing.status == Status::Mild) {
        Kind::Promoted
    } else {
        Kind::Hang
    }
}

/// The file whose age is that of its incident.
const VERDICT: &str = "verdict.json";
/// A folder that is still unfinished after this time belongs to a collector that was killed.
const UNFINISHED_AGE: Duration = Duration::from_secs(3600);

/// Removes expired timelines in one root, and those that a killed collector left unfinished.
fn retire_timelines(root: &Path, keep: RetentionLimits, now: SystemTime) {
    let entries = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut ours: Vec<PathBuf> = entries.filter(|path| is_own_folder(path)).collect();
    ours.sort();
    let starts = |path: &Path, prefix: &str| id(path).starts_with(prefix);
    for path in ours.iter().filter(|path| starts(path, UNFINISHED) && is_older(path, UNFINISHED_AGE, now)) {
        remove(root, path, "its collector was killed");
    }
    // A user's own folders are never removed.
    let has_timeline = |path: &&PathBuf| {
        let mut names = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        names.any(|name| timeline::rank_of_file(&name).is_some())
    };
    let ours: Vec<&PathBuf> = ours.iter().filter(|path| starts(path, PREFIX)).filter(has_timeline).collect();
    let surplus = if keep.count == 0 { 0 } else { ours.len().saturating_sub(keep.count) };
    for (index, path) in ours.into_iter().enumerate() {
        let old = is_older(path, keep.age, now);
        if index < surplus || old {
            remove(root, path, if old { "it is old" } else { "there are newer ones" });
        }
    }
}

/// Whether a file or folder is older than `age`; zero means no limit.
fn is_older(path: &Path, age: Duration, now: SystemTime) -> bool {
    let written = fs::metadata(path).and_then(|status| status.modified());
    let passed = written.ok().and_then(|written| now.duration_since(written).ok()).unwrap_or_default();
    !age.is_zero() && passed > age
}

/// Removes a folder of `root`, and logs why.
fn remove(root: &Path, folder: &Path, why: &str) {
    // Renamed first, so that nobody sees a half-removed folder.
    let renamed = root.join(format!("{REMOVED_PREFIX}{}", id(folder)));
    match fs::rename(folder, &renamed).and_then(|()| fs::remove_dir_all(&renamed)) {
        Ok(()) => info!("{} is removed: {why}", folder.display()),
        // Another collector removed it first.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => warn!("{} cannot be removed: {error}", folder.display()),
    }
}

/// Prefix of a folder that is being removed.
const REMOVED_PREFIX: &str = ".removed-incident-";

/// Continues removals that were interrupted by a killed collector or a failing disk.
fn finish_removals(root: &Path) {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let is_grave = |entry: &fs::DirEntry| {
        entry.file_name().to_string_lossy().starts_with(REMOVED_PREFIX)
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    for entry in entries.filter(is_grave) {
        // Another collector may be removing it; the next cleanup handles the rest.
        let _ = fs::remove_dir_all(entry.path());
    }
}

/// Whether a collector wrote an incident into this folder.
fn is_incident_folder(folder: &Path) -> bool {
    // A full disk may have had no space for the evidence.
    folder.join(VERDICT).is_file() && (folder.join("evidence.bin").is_file() || folder.join(RECORD).is_file())
}

/// Number of mild captures that are kept of a job.
const OF_A_JOB: usize = 3;
/// Number of mild captures that are kept of all jobs.
const OF_ALL_JOBS: usize = 30;
/// Size of all mild captures together. The oldest ones are removed first.
const MAX_BYTES: u64 = 256 * 1024 * 1024;

/// Removes the mild captures beside the incidents in `root` that are beyond the limits, and those
/// that a killed collector left unfinished. `age` is the age after which incidents are removed;
/// zero means no limit.
pub(crate) fn trim_captures(root: &Path, age: Duration, now: SystemTime) {
    let root = root_of(root);
    if !root.is_dir() {
        return;
    }
    finish_removals(&root);
    finish_leftovers(&root);
    let mut bytes = 0;
    // The parts of nodes that share a file system are one capture.
    let mut kept: BTreeSet<String> = BTreeSet::new();
    let mut of_jobs: BTreeMap<(String, String, String), BTreeSet<String>> = BTreeMap::new();
    // The newest come first.
    for folder in own_folders(&root).iter().rev() {
        let Some(record) = records::record(folder) else { continue };
        let is_being_written = !record.writer.is_empty();
        if is_being_written && !is_writer_gone(&record.writer) {
            continue;
        }
        let of_job = of_jobs.entry((record.job, record.instance, record.boot)).or_default();
        let (size, capture) = (bytes_in(folder), incident_of(folder));
        let is_full = |of: &BTreeSet<String>, limit| of.len() >= limit && !of.contains(&capture);
        let why = if is_being_written {
            "its collector was killed"
        } else if is_full(of_job, OF_A_JOB) {
            "there are newer ones of its job"
        } else if is_full(&kept, OF_ALL_JOBS) || bytes + size > MAX_BYTES {
            "there are newer ones"
        } else if is_older(&folder.join(VERDICT), age, now) {
            "it is old"
        } else {
            of_job.insert(capture.clone());
            kept.insert(capture);
            bytes += size;
            continue;
        };
        remove(&root, folder, why);
    }
}

/// Makes the folder of an incident, whose verdict shows no problem, a mild capture. Logs errors.
pub(crate) fn keep_capture(folder: &Path) {
    if let Err(error) = try_keep_capture(folder) {
        warn!("capture {}: {}", id(folder), chain(&error));
    }
}

fn try_keep_capture(folder: &Path) -> Result<(), Error> {
    let (Some(root), Some(name)) = (folder.parent(), folder.file_name()) else { return Ok(()) };
    change_verdict(folder, |verdict| verdict.timing.status = Status::Mild)?;
    let captures = root_of(root);
    create_directories(&captures)?;
    let kept = captures.join(name);
    fs::rename(folder, &kept).map_err(Error::path("move the capture to", &kept))?;
    Folder { path: kept }.timelines_came();
    trim_captures(root, Duration::ZERO, SystemTime::now());
    Ok(())
}

/// Removes a mild capture.
pub(crate) fn discard_capture(folder: &Path) {
    if let Some(root) = folder.parent() {
        remove(root, folder, "its job is captured again");
    }
}

fn bytes_in(folder: &Path) -> u64 {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|status| status.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::incident::{
        engine::Record,
        folder::own_stamp,
        mild::tests::{capture, names as mild_names},
        verdict_files::write_record,
    };

    fn names(root: &Path) -> Vec<String> {
        let entries = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.collect();
        names.sort();
        names
    }

    fn folder(root: &Path, name: &str, files: &[&str]) {
        fs::create_dir(root.join(name)).unwrap();
        for file in files {
            fs::write(root.join(name).join(file), "x").unwrap();
        }
    }

    #[test]
    fn newest_open_and_foreign_folders_stay() {
        let root = tempfile::tempdir().unwrap();
        for number in 1..=5 {
            folder(root.path(), &format!("incident-{number}"), &["verdict.json", "evidence.bin", "x"]);
        }
        folder(root.path(), "incident-0-of-a-person", &["verdict.json"]);
        let keep = RetentionLimits { count: 2, age: Duration::ZERO };
        retire(root.path(), keep, &BTreeSet::from(["1".to_string()]), SystemTime::now());
        assert_eq!(names(root.path()), ["incident-0-of-a-person", "incident-1", "incident-4", "incident-5"]);
        retire(root.path(), RetentionLimits { count: 0, ..keep }, &BTreeSet::new(), SystemTime::now());
        assert_eq!(names(root.path()).len(), 4, "zero means no limit");
    }

    #[test]
    fn an_interrupted_removal_is_finished() {
        let root = tempfile::tempdir().unwrap();
        folder(root.path(), ".removed-incident-20261121T000000Z-00000001", &["00000-00001.stacktrace"]);
        folder(root.path(), ".removed-by-a-person", &["verdict.json"]);
        let linked = tempfile::tempdir().unwrap();
        folder(linked.path(), "folder", &["precious"]);
        std::os::unix::fs::symlink(linked.path().join("folder"), root.path().join(".removed-incident-2")).unwrap();
        retire(root.path(), RetentionLimits { count: 0, age: Duration::ZERO }, &BTreeSet::new(), SystemTime::now());
        assert_eq!(names(root.path()), [".removed-by-a-person", ".removed-incident-2"]);
        assert!(linked.path().join("folder/precious").exists());
    }

    #[test]
    fn the_parts_of_an_incident_count_once() {
        let root = tempfile::tempdir().unwrap();
        for number in 1..=3 {
            for node in ["", "-node-a", "-node-b", "-node-c"] {
                let name = format!("incident-2026112{number}T000000Z-00000001{node}");
                folder(root.path(), &name, &["verdict.json", "evidence.bin"]);
            }
        }
        retire(root.path(), RetentionLimits { count: 2, age: Duration::ZERO }, &BTreeSet::new(), SystemTime::now());
        let left = names(root.path());
        assert!(left.len() == 8 && left.iter().all(|name| !name.contains("20261121")), "{left:?}");
    }

    #[test]
    fn manual_dumps_never_displace_a_hang() {
        let root = tempfile::tempdir().unwrap();
        let mut verdict = xpu_timer_analysis::judge(&xpu_timer_proto::v1::Evidence::default());
        for number in 1..=9 {
            let name = format!("incident-2026112{number}T000000Z-00000001");
            folder(root.path(), &name, &["evidence.bin"]);
            verdict.trigger.kind = if number == 1 { "operation" } else { "manual" }.into();
            fs::write(root.path().join(&name).join("verdict.json"), serde_json::to_vec(&verdict).unwrap()).unwrap();
            // A dump by hand that then turned out to be a hang.
            let seen = if number == 2 { r#"{"kind":"manual"},{"kind":"idle"}"# } else { r#"{"kind":"manual"}"# };
            let record = format!(
                r#"{{"id":"{name}","boot":"","job":"","instance":"","attempt":0,"opened_unix_ns":0,"opened_mono_ns":0,
                "dumped_mono_ns":0,"seen":[{seen}]}}"#
            );
            if number != 1 {
                fs::write(root.path().join(&name).join(".collector.json"), record).unwrap();
            }
        }
        retire(root.path(), RetentionLimits { count: 2, age: Duration::ZERO }, &BTreeSet::new(), SystemTime::now());
        let left: Vec<String> = names(root.path()).iter().map(|name| name[16..17].to_string()).collect();
        assert_eq!(left, ["1", "2", "8", "9"]);
    }

    #[test]
    fn expired_and_unfinished_timelines_are_removed() {
        let root = tempfile::tempdir().unwrap();
        for number in 1..=4 {
            folder(root.path(), &format!("timeline-2026112{number}T000000Z-00000001"), &["00000-00001.ops"]);
        }
        folder(root.path(), "timeline-20261120-of-a-person", &["notes"]);
        folder(root.path(), ".new-timeline-20261121T000000Z-00000001", &["00000-00001.ops"]);
        let keep = RetentionLimits { count: 2, age: Duration::from_secs(7200) };
        retire_timelines(root.path(), keep, SystemTime::now());
        let left = names(root.path());
        assert_eq!(left.len(), 4, "{left:?}");
        assert!(left[1..].iter().any(|name| name.contains("of-a-person")) && left[3].contains("20261124"), "{left:?}");
        retire_timelines(root.path(), keep, SystemTime::now() + Duration::from_secs(3700));
        assert_eq!(names(root.path()).len(), 3, "the unfinished one is gone");
        retire_timelines(root.path(), keep, SystemTime::now() + Duration::from_secs(7300));
        assert_eq!(names(root.path()), ["timeline-20261120-of-a-person"]);
    }

    #[test]
    fn expired_folders_are_removed() {
        let root = tempfile::tempdir().unwrap();
        folder(root.path(), "incident-1", &["verdict.json", "evidence.bin"]);
        let keep = RetentionLimits { count: 10, age: Duration::from_secs(3600) };
        retire(root.path(), keep, &BTreeSet::new(), SystemTime::now() + Duration::from_secs(3500));
        assert_eq!(names(root.path()).len(), 1);
        retire(root.path(), keep, &BTreeSet::new(), SystemTime::now() + Duration::from_secs(3700));
        assert_eq!(names(root.path()).len(), 0);
    }

    #[test]
    fn the_last_captures_of_each_job_are_kept() {
        let root = tempfile::tempdir().unwrap();
        for number in 1..=5 {
            capture(root.path(), number, "a", 1);
        }
        capture(root.path(), 6, "b", 1);
        trim_captures(root.path(), Duration::ZERO, SystemTime::now());
        assert_eq!(mild_names(&root_of(root.path())), ["3", "4", "5", "6"]);
        trim_captures(root.path(), Duration::from_secs(3600), SystemTime::now() + Duration::from_secs(3700));
        assert_eq!(mild_names(&root_of(root.path())), [""; 0]);
    }

    #[test]
    fn an_idle_job_of_several_nodes_has_one_capture() {
        let root = tempfile::tempdir().unwrap();
        for number in 1..=5 {
            capture(root.path(), number, "a", 1);
            let captured = own_folders(&root_of(root.path())).pop().unwrap();
            // The nodes share this file system.
            for node in ["", "-node-1", "-node-2"] {
                let part = root.path().join(format!("{}{node}", captured.file_name().unwrap().display()));
                fs::create_dir(&part).unwrap();
                for file in fs::read_dir(&captured).unwrap().flatten() {
                    fs::copy(file.path(), part.join(file.file_name())).unwrap();
                }
            }
            fs::remove_dir_all(captured).unwrap();
        }
        own_folders(root.path()).iter().for_each(|folder| keep_capture(folder));
        assert_eq!(own_folders(root.path()).len(), 0);
        assert_eq!(mild_names(&root_of(root.path())), ["3", "3", "3", "4", "4", "4", "5", "5", "5"]);
        let kept = own_folders(&root_of(root.path()));
        assert!(kept.iter().all(|folder| records::verdict(folder).unwrap().timing.status == Status::Mild));
        keep_capture(&root.path().join("incident-that-is-gone"));
    }

    #[test]
    fn captures_of_many_jobs_are_bounded_in_number_and_bytes() {
        let root = tempfile::tempdir().unwrap();
        for number in 1..=OF_ALL_JOBS as u64 + 5 {
            capture(root.path(), number, &number.to_string(), 1);
        }
        trim_captures(root.path(), Duration::ZERO, SystemTime::now());
        assert_eq!(mild_names(&root_of(root.path())).len(), OF_ALL_JOBS);
        assert_eq!(mild_names(&root_of(root.path()))[0], "6");
        for (number, bytes) in [(50, 20), (51, 0), (52, MAX_BYTES - 10_000)] {
            let path = root_of(root.path()).join(format!("incident-20261121T{number:06}Z-00000001"));
            capture(root.path(), number, &number.to_string(), 1);
            fs::File::create(path.join("large")).unwrap().set_len(bytes).unwrap();
        }
        trim_captures(root.path(), Duration::ZERO, SystemTime::now());
        let left = mild_names(&root_of(root.path()));
        assert!(left.len() > 2 && left.len() < 10, "{left:?}");
        assert_eq!(left[left.len() - 3..], ["50", "51", "52"]);
    }

    #[test]
    fn a_capture_of_a_killed_collector_is_removed_and_one_in_progress_stays() {
        let root = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let gone = format!("{} {}:1", own_stamp().rsplit_once(' ').unwrap().0, child.id());
        for (number, writer) in [(1, own_stamp().to_string()), (2, gone)] {
            capture(root.path(), number, "a", 1);
            let folder = root_of(root.path()).join(format!("incident-20261121T{number:06}Z-00000001"));
            write_record(&folder, &Record { writer, ..records::record(&folder).unwrap() });
        }
        trim_captures(root.path(), Duration::ZERO, SystemTime::now());
        assert_eq!(mild_names(&root_of(root.path())), ["1"]);
    }
}
