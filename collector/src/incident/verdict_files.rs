//! The verdict and the record in an incident folder: writes them, changes the status of an
//! incident, and finishes what an earlier collector or an earlier attempt left unfinished on disk.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    io::{self, BufRead, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, PoisonError},
};

use tracing::{info, warn};
use xpu_timer_analysis::{HangEvidence, Status, Verdict};
use xpu_timer_proto::{Message, procfs, timeline, v1::Evidence};

use crate::{
    error::{Error, chain},
    incident::{
        engine::Record,
        folder::{Folder, RESERVE, incident_of, own_folders, own_stamp},
        judging,
    },
    json,
    os::clock::{Now, rfc3339},
};

/// Writes `verdict.json` and `verdict.txt` and logs errors. Returns whether both were written.
pub(crate) fn write_verdict(folder: &Folder, verdict: &Verdict) -> bool {
    let written = try_write_verdict(folder, verdict);
    if let Err(error) = &written {
        warn!("incident {}: {}", verdict.incident, chain(error));
    }
    written.is_ok()
}

/// Writes `verdict.txt` and then `verdict.json`, after a change that is under way.
///
/// # Errors
/// If one of them cannot be written. The other one is still attempted.
pub(crate) fn try_write_verdict(folder: &Folder, verdict: &Verdict) -> Result<(), Error> {
    let _turn = Turn::wait(&folder.path);
    write_both(folder, verdict)
}

fn write_both(folder: &Folder, verdict: &Verdict) -> Result<(), Error> {
    let json = json::pretty(verdict);
    let text = folder.write("verdict.txt", verdict.to_text().as_bytes());
    folder.write("verdict.json", &json).and(text)
}

/// Makes `latest` point to a finished folder, unless it points to one that counts more: a hang
/// counts more than a dump by hand that shows none, and then the incident that was opened last,
/// which may be finished first.
///
/// # Errors
/// If the link cannot be made.
pub(crate) fn link_latest(folder: &Folder, verdict: &Verdict) -> Result<(), Error> {
    let Some(root) = folder.path.parent() else { return Ok(()) };
    let latest = || -> Option<_> {
        let path = fs::canonicalize(root.join("latest")).ok()?;
        let verdict: Verdict = serde_json::from_slice(&fs::read(path.join("verdict.json")).ok()?).ok()?;
        // Opened in the future: the clock was set back since.
        let opened = verdict.timing.opened_at.clone().filter(|opened| *opened <= rfc3339(Now::get().unix_ns));
        Some((verdict, opened, path.file_name()?.to_owned()))
    };
    let is_hang = |verdict: &Verdict| verdict.hang != HangEvidence::None || verdict.trigger.kind != "manual";
    let name = folder.path.file_name().unwrap_or_default();
    let counts_more = |(other, opened, other_name): (Verdict, Option<String>, OsString)| {
        (is_hang(&other), &opened, &*other_name) > (is_hang(verdict), &verdict.timing.opened_at, name)
    };
    if latest().is_some_and(counts_more) { Ok(()) } else { folder.link_latest() }
}

/// The right to write the verdict of a folder: the threads of this process have it one after the
/// other. It is of one folder, so that a disk that does not answer stops no verdict on another one.
struct Turn(PathBuf);

/// The folders whose verdict a thread writes.
static WRITTEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
/// Wakes those that wait for a folder.
static FREED: Condvar = Condvar::new();

impl Turn {
    /// Waits until no other thread has the right for this folder.
    fn wait(folder: &Path) -> Turn {
        let written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        let is_taken = |written: &mut BTreeSet<PathBuf>| written.contains(folder);
        let mut written = FREED.wait_while(written, is_taken).unwrap_or_else(PoisonError::into_inner);
        written.insert(folder.into());
        Turn(folder.into())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        WRITTEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
        FREED.notify_all();
    }
}

/// Reads the verdict of a folder, changes it, and writes it back. A verdict that another thread
/// writes meanwhile, for a second dump, comes after the change, and is not lost.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn change_verdict(path: &Path, change: impl FnOnce(&mut Verdict)) -> Result<(), Error> {
    let _turn = Turn::wait(path);
    let file = path.join("verdict.json");
    let bytes = fs::read(&file).map_err(Error::path("read", &file))?;
    let mut verdict: Verdict =
        serde_json::from_slice(&bytes).map_err(|error| Error::path("read", &file)(error.into()))?;
    change(&mut verdict);
    if let Err(error) = write_both(&Folder { path: path.into() }, &verdict) {
        warn!("incident {}: {}", verdict.incident, chain(&error));
    }
    Ok(())
}

/// Writes the status of an incident, and when it was closed, into the verdict of its folder. Logs
/// errors.
pub(crate) fn set_status(incident: &str, folder: &Path, status: Status, closed_unix_ns: Option<u64>) {
    let changed = change_verdict(folder, |verdict| {
        verdict.timing.status = status;
        verdict.timing.resolved_at = closed_unix_ns.map(rfc3339);
    });
    if let Err(error) = changed {
        warn!("incident {incident}: {}", chain(&error));
    }
}

/// Writes the names of the other incidents with the same culprit into the verdict of a folder. Logs
/// errors.
pub(crate) fn name_others(folder: &Path, others: Vec<String>) {
    if let Err(error) = change_verdict(folder, |verdict| verdict.timing.same_culprit = others) {
        warn!("{}: {}", folder.display(), chain(&error));
    }
}

/// Adds a problem to the verdict of a folder. Logs errors.
pub(crate) fn note_problem(folder: &Path, problem: String) {
    if let Err(error) = change_verdict(folder, |verdict| verdict.timing.errors.push(problem)) {
        warn!("{}: {}", folder.display(), chain(&error));
    }
}

/// Name of the file with the state of an incident for the next collector of the node.
pub(crate) const RECORD: &str = ".collector.json";
/// Name of the file with the state of an incident for the next cluster collector.
pub(crate) const CLUSTER_RECORD: &str = ".cluster.json";

/// Writes the record of a node collector. Logs an error.
pub(crate) fn write_record(path: &Path, record: &Record) {
    if let Err(error) = try_write_record(path, RECORD, record) {
        info!("incident {}: a restarted collector will not know this incident: {}", record.id, chain(&error));
    }
}

/// Writes the record into the file with this name.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn try_write_record(path: &Path, name: &str, record: &Record) -> Result<(), Error> {
    Folder { path: path.into() }.write(name, &serde_json::to_vec_pretty(record).unwrap_or_default())
}

/// Upper limit for the beginning of a file that names its writer, up to the end of that line.
const MAX_STAMP_BYTES: u64 = 512;

/// Finishes the folders that a killed collector of this machine was writing. Written stacks are
/// useful; a folder without stacks contains no information.
pub(crate) fn finish_leftovers(root: &Path) {
    let without_record = |path: &PathBuf| is_leftover(path) && !path.join(RECORD).exists();
    own_folders(root).into_iter().filter(without_record).for_each(finish_leftover_folder);
    forget_timelines(root);
}

/// The timelines that a killed collector of this machine was writing or fetching do not come any
/// more.
pub(crate) fn forget_timelines(root: &Path) {
    let is_abandoned =
        |path: &PathBuf| writer(&path.join(timeline::PENDING)).is_some_and(|stamp| is_writer_gone(&stamp));
    for path in own_folders(root).into_iter().filter(is_abandoned) {
        info!("{}: a killed collector has left its timelines incomplete", path.display());
        Folder { path }.timelines_came();
    }
}

/// Finishes one folder that a killed collector was writing.
pub(crate) fn finish_leftover_folder(path: PathBuf) {
    let folder = Folder { path };
    folder.release_reserve();
    let has = |end: &str| {
        let names = fs::read_dir(&folder.path).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.into_iter().any(|name| name.to_string_lossy().ends_with(end))
    };
    let done = if has("verdict.json") {
        change_verdict(&folder.path, |verdict| verdict.timing.status = Status::Ended)
    } else if has(".stacktrace") {
        let incident = incident_of(&folder.path);
        let evidence = Evidence { incident, ..Default::default() };
        let sentence =
            "The collector was killed before it could judge. This folder has the stacks that it had captured.";
        let mut verdict = judging::unknown(&evidence, sentence.into());
        verdict.timing.status = Status::Ended;
        folder.write("evidence.bin", &evidence.encode_to_vec()).and(try_write_verdict(&folder, &verdict))
    } else {
        fs::remove_dir_all(&folder.path).map_err(Error::path("remove", &folder.path))
    };
    match done {
        Ok(()) => info!("{} was left by a collector that was killed", folder.path.display()),
        Err(error) => warn!("{}", chain(&error)),
    }
}

/// Whether a folder was being written by a process of this machine that is gone.
fn is_leftover(folder: &Path) -> bool {
    writer(&folder.join(RESERVE)).is_some_and(|stamp| is_writer_gone(&stamp))
}

/// The stamp of the process that wrote a file: its first line that is not a sentence.
fn writer(path: &Path) -> Option<String> {
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path).ok()?;
    let mut lines = io::BufReader::new(file).take(MAX_STAMP_BYTES).lines();
    lines.find_map(|line| line.ok().filter(|line| !line.ends_with('.')))
}

/// Whether a stamp is of a process of this machine that is gone.
pub(crate) fn is_writer_gone(stamp: &str) -> bool {
    let Some((place, process)) = stamp.rsplit_once(' ') else { return false };
    let lives = || {
        let (pid, start) = process.split_once(':')?;
        Some(procfs::stat(pid.parse::<i32>().ok()?).ok()?.start_time == start.parse::<u64>().ok()?)
    };
    own_stamp().rsplit_once(' ').is_some_and(|(here, _)| here == place) && lives() != Some(true)
}

/// Makes the folder of an incident again if it could not be made, or was removed before its verdict
/// was written, and writes the verdict.
///
/// # Errors
/// If that is still not possible.
pub(crate) fn recreate_folder(root: &Path, fallback: &Path, name: &str, verdict: &Verdict) -> Result<Folder, Error> {
    let (folder, _) = Folder::create(root, fallback, name)?;
    folder.release_reserve();
    let written = try_write_verdict(&folder, verdict).and_then(|()| link_latest(&folder, verdict));
    if let Err(error) = written {
        // Removes it only if it is empty.
        let _ = fs::remove_dir(&folder.path);
        return Err(error);
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::*;

    #[test]
    fn latest_points_to_the_hang_that_was_opened_last() {
        let temporary = tempfile::tempdir().unwrap();
        let finish = |name: &str, opened: &str, trigger: &str| {
            let (folder, _) = Folder::create(temporary.path(), temporary.path(), name).unwrap();
            let mut verdict = judging::judge(&Evidence::default());
            verdict.timing.opened_at = Some(opened.into());
            verdict.trigger.kind = trigger.into();
            assert!(write_verdict(&folder, &verdict));
            link_latest(&folder, &verdict).unwrap();
            let link = fs::read_link(temporary.path().join("latest")).unwrap();
            link.to_string_lossy().trim_start_matches("incident-").to_owned()
        };
        assert_eq!(finish("future", "9999-01-01T00:00:00.000Z", "hang"), "future");
        assert_eq!(finish("by-hand", "2026-01-01T00:00:01.000Z", "manual"), "future", "a hang counts more");
        assert_eq!(finish("2", "2026-01-01T00:00:01.000Z", "hang"), "2", "the clock was set back");
        assert_eq!(finish("1", "2026-01-01T00:00:00.000Z", "hang"), "2", "it was opened earlier");
        assert_eq!(finish("2-2", "2026-01-01T00:00:01.000Z", "hang"), "2-2", "in the same millisecond");
        assert_eq!(finish("2", "2026-01-01T00:00:01.000Z", "hang"), "2-2");
        assert_eq!(finish("by-hand-2", "2026-01-01T00:00:02.000Z", "manual"), "2-2");
        assert_eq!(finish("3", "2026-01-01T00:00:02.000Z", "hang"), "3");
    }

    fn verdict(sentence: &str) -> Verdict {
        judging::unknown(&Evidence::default(), sentence.into())
    }

    fn read(folder: &Folder) -> Verdict {
        serde_json::from_slice(&fs::read(folder.path.join("verdict.json")).unwrap()).unwrap()
    }

    #[test]
    fn a_late_problem_does_not_bring_back_the_verdict_of_an_earlier_dump() {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder { path: root.path().into() };
        try_write_verdict(&folder, &verdict("first")).unwrap();
        let (under_way, begun) = mpsc::channel();
        let (done, written) = mpsc::channel();
        thread::scope(|scope| {
            let folder = &folder;
            scope.spawn(move || {
                begun.recv().unwrap();
                try_write_verdict(folder, &verdict("second")).unwrap();
                // The receiver has given up waiting if the write came after the change.
                let _ = done.send(());
            });
            change_verdict(&folder.path, |verdict| {
                under_way.send(()).unwrap();
                let _ = written.recv_timeout(Duration::from_millis(300));
                verdict.timing.errors.push("late".into());
            })
            .unwrap();
        });
        assert_eq!(read(&folder).sentence, "second");
    }

    #[test]
    fn no_problem_is_lost_when_several_threads_note_one() {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder { path: root.path().into() };
        try_write_verdict(&folder, &verdict("first")).unwrap();
        thread::scope(|scope| {
            for thread in 0..8 {
                let path = &folder.path;
                scope.spawn(move || (0..8).for_each(|time| note_problem(path, format!("{thread} {time}"))));
            }
        });
        assert_eq!(read(&folder).timing.errors.len(), 64);
    }
}
