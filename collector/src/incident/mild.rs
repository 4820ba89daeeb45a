//! Mild captures: dumps whose verdict shows no hang, of jobs that nobody asked to dump. They are
//! not incidents. The last of each job are kept in a folder of their own beside the incidents. When
//! the job hangs or dies, they become incidents: they show how the job looked before.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use tracing::{info, warn};
use xpu_timer_analysis::{Cause, HangEvidence, Verdict};

use crate::{
    error::chain,
    incident::{
        engine::Record,
        folder::{id, own_folders},
        records,
        verdict_files::change_verdict,
        viewer,
    },
};

/// Time limit to draw the pictures of a promoted capture.
const VIEW: Duration = Duration::from_secs(60);

/// The folder of the mild captures beside the incidents in `root`.
#[must_use]
pub(crate) fn root_of(root: &Path) -> PathBuf {
    root.join("mild")
}

/// Whether a verdict shows no problem. The death of a rank is one, even if no rank waits for it.
#[must_use]
pub(crate) fn is_mild(verdict: &Verdict) -> bool {
    verdict.hang == HangEvidence::None && verdict.cause != Cause::ProcessDead
}

/// A job whose captures are promoted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OfJob {
    /// [`Record::job`].
    pub job: String,
    /// [`Record::instance`].
    pub instance: String,
    /// [`Record::boot`].
    pub boot: String,
    /// When the first of its processes was started, CLOCK_MONOTONIC: an earlier job may have had
    /// its name.
    pub started_ns: u64,
}

impl OfJob {
    fn has(&self, record: &Record) -> bool {
        (&self.job, &self.instance, &self.boot) == (&record.job, &record.instance, &record.boot)
            && record.dumped_mono_ns >= self.started_ns
            && record.writer.is_empty()
    }
}

/// Makes the captures of a job incidents, and returns their names, oldest first. `reason` completes
/// "it is kept because".
#[must_use]
pub(crate) fn promote(root: &Path, of: &OfJob, reason: &str) -> Vec<String> {
    let mut promoted = Vec::new();
    for folder in own_folders(&root_of(root)) {
        if !records::record(&folder).is_some_and(|record| of.has(&record)) {
            continue;
        }
        let name = id(&folder);
        let path = root.join(format!("incident-{name}"));
        if path.exists() {
            continue;
        }
        let changed = change_verdict(&folder, |verdict| verdict.timing.promoted = Some(reason.into()));
        if let Err(error) = changed {
            warn!("capture {name}: {}", chain(&error));
        } else if let Err(error) = fs::rename(&folder, &path) {
            warn!("capture {name} cannot be made an incident: {error}");
        } else {
            info!("capture {name} is now an incident, because {reason}");
            promoted.push(name);
        }
    }
    promoted
}

/// Draws the pictures of promoted captures on a thread of their own.
pub(crate) fn draw(root: &Path, promoted: &[String]) {
    if promoted.is_empty() {
        return;
    }
    let folders: Vec<PathBuf> = promoted.iter().map(|name| root.join(format!("incident-{name}"))).collect();
    let work = move || {
        for folder in folders {
            if let Err(error) = viewer::run(&folder, true, VIEW) {
                warn!("{}: {}", folder.display(), chain(&error));
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("promoted".into()).spawn(work) {
        warn!("promoted captures get no pictures, because no thread can be started: {error}");
    }
}

#[cfg(test)]
pub(super) mod tests {
    use xpu_timer_analysis::Status;
    use xpu_timer_proto::v1::Evidence;

    use super::*;
    use crate::incident::{
        folder::Folder,
        verdict_files::{try_write_verdict, write_record},
    };

    /// A capture of a job that began at `number`.
    pub(crate) fn capture(root: &Path, number: u64, job: &str, bytes: usize) {
        let name = format!("20261121T{number:06}Z-00000001");
        let (folder, _) = Folder::create(&root_of(root), root, &name).unwrap();
        folder.release_reserve();
        let mut verdict = xpu_timer_analysis::judge(&Evidence { incident: name.clone(), ..Default::default() });
        verdict.timing.status = Status::Mild;
        try_write_verdict(&folder, &verdict).unwrap();
        folder.write("evidence.bin", &vec![0; bytes]).unwrap();
        let record =
            Record { id: name, job: job.into(), boot: "b".into(), dumped_mono_ns: number, ..Record::default() };
        write_record(&folder.path, &record);
    }

    pub(crate) fn names(root: &Path) -> Vec<String> {
        own_folders(root).iter().map(|folder| id(folder)[9..15].trim_start_matches('0').to_string()).collect()
    }

    #[test]
    fn the_captures_of_one_job_become_incidents() {
        let root = tempfile::tempdir().unwrap();
        // The first one is of an earlier job of this name.
        for (number, job) in [(1, "a"), (2, "a"), (3, "b"), (4, "a")] {
            capture(root.path(), number, job, 1);
        }
        let of = OfJob { job: "a".into(), instance: String::new(), boot: "b".into(), started_ns: 2 };
        let promoted = promote(root.path(), &of, "the job hung later (incident 5)");
        assert_eq!(promoted, ["20261121T000002Z-00000001", "20261121T000004Z-00000001"]);
        assert_eq!(
            (names(root.path()), names(&root_of(root.path()))),
            (vec!["2".into(), "4".into()], vec!["1".into(), "3".into()])
        );
        let verdict = records::verdict(&own_folders(root.path())[0]).unwrap();
        assert_eq!(
            (verdict.timing.status, verdict.timing.promoted.as_deref()),
            (Status::Mild, Some("the job hung later (incident 5)"))
        );
        let text = fs::read_to_string(own_folders(root.path())[0].join("verdict.txt")).unwrap();
        assert!(text.contains("It is kept because the job hung later (incident 5)."), "{text}");
        assert_eq!(promote(root.path(), &of, "again"), [""; 0]);
    }
}
