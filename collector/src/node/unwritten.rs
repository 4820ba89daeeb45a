//! Verdicts without a folder, because the disk was full, read-only or unavailable. They are served
//! from memory and written as soon as possible.

use std::path::{Path, PathBuf};

use tracing::{info, warn};

use crate::{
    error::{Error, chain},
    incident::{
        folder::{Folder, folder_name},
        leftovers,
        verdict_files::try_write_verdict,
    },
    node::{inbox::Command, state::NodeState, status, unwritten_verdicts::Waiting},
    os::clock::{self, Now},
};

/// Pause before the second attempt.
const FIRST_PAUSE_NS: u64 = 2_000_000_000;
const LAST_PAUSE_NS: u64 = 60_000_000_000;
/// Number of verdicts to keep, newest first; a verdict has some kilobytes.
const MAX_KEPT: usize = 64;

impl NodeState {
    /// Keeps a verdict that could not be written to its place.
    pub(super) fn keep_unwritten(&mut self, id: &str, root: PathBuf, now: Now) {
        let due_ns = now.mono_ns + FIRST_PAUSE_NS;
        let waiting = Waiting { root, due_ns, pause_ns: FIRST_PAUSE_NS, under_way: false };
        self.unwritten.waiting.insert(id.into(), waiting);
        while self.unwritten.waiting.len() > MAX_KEPT
            && let Some((oldest, _)) = self.unwritten.waiting.pop_first()
        {
            warn!("incident {oldest}: its verdict is given up: {MAX_KEPT} newer ones cannot be written either");
            if let Some(report) = self.reports.get_mut(&oldest) {
                report.verdict = None;
            }
        }
    }

    /// Runs once a second: repeats the writes that are due.
    pub(super) fn tick_unwritten(&mut self, now: Now) {
        let reports = &self.reports;
        // The verdict of a second look may have been written.
        self.unwritten.waiting.retain(|id, _| reports.get(id).is_some_and(|report| report.verdict.is_some()));
        for (id, waiting) in &mut self.unwritten.waiting {
            let verdict = self.reports.get(id).and_then(|report| report.verdict.clone());
            let (Some(mut verdict), Some(incident)) = (verdict, self.engine.get(id)) else { continue };
            if waiting.under_way || waiting.due_ns > now.mono_ns {
                continue;
            }
            waiting.under_way = true;
            verdict.timing.status = status::status_of(incident.state);
            verdict.timing.resolved_at = incident.closed.map(|closed| clock::rfc3339(closed.unix_ns));
            let path = self.reports.get(id).and_then(|report| report.path.clone());
            let (root, fallback) = (waiting.root.clone(), self.settings.fallback_path.clone());
            let (name, inbox) = (id.clone(), self.inbox.clone());
            self.disk.give(&waiting.root, move || {
                let result = write(path.as_deref(), &root, &fallback, &name, &verdict);
                inbox.post(Command::Written(name, result));
            });
        }
    }

    pub(super) fn written(&mut self, id: &str, result: Result<PathBuf, Error>, now: Now) {
        match result {
            Ok(path) => {
                info!("incident {id}: its verdict is written now: {}", path.display());
                self.unwritten.waiting.remove(id);
                if let Some(report) = self.reports.get_mut(id) {
                    (report.verdict, report.path) = (None, Some(path.clone()));
                }
                self.note_on_disk(id, path);
            }
            Err(error) => {
                let Some(waiting) = self.unwritten.waiting.get_mut(id) else { return };
                waiting.pause_ns = (waiting.pause_ns * 2).min(LAST_PAUSE_NS);
                (waiting.due_ns, waiting.under_way) = (now.mono_ns + waiting.pause_ns, false);
                let seconds = clock::seconds(waiting.pause_ns);
                warn!("incident {id}: its verdict cannot be written ({}); next try in {seconds} s", chain(&error));
            }
        }
    }
}

/// Writes a verdict into the folder of its incident if that still exists, else into a new one.
fn write(
    path: Option<&Path>,
    root: &Path,
    fallback: &Path,
    id: &str,
    verdict: &xpu_timer_analysis::Verdict,
) -> Result<PathBuf, Error> {
    if let Some(path) = path.filter(|path| path.is_dir()) {
        let folder = Folder { path: path.into() };
        try_write_verdict(&folder, verdict).and_then(|()| folder.link_latest())?;
        return Ok(folder.path);
    }
    leftovers::write_late(root, fallback, &folder_name(id, None), verdict).map(|folder| folder.path)
}
