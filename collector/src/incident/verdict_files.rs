//! The files of an incident folder with its verdict and the state of the incident.

use std::path::Path;

use tracing::{info, warn};
use xpu_timer_analysis::Verdict;

use crate::{
    error::{Error, chain},
    incident::{engine::Record, folder::Folder},
    json,
};

/// Writes `verdict.json` and `verdict.txt` and logs errors. Returns whether both were written.
pub fn write_verdict(folder: &Folder, verdict: &Verdict) -> bool {
    let written = try_write_verdict(folder, verdict);
    if let Err(error) = &written {
        warn!("incident {}: {}", verdict.incident, chain(error));
    }
    written.is_ok()
}

/// Writes `verdict.txt` and then `verdict.json`.
///
/// # Errors
/// If one of them cannot be written. The other one is still attempted.
pub fn try_write_verdict(folder: &Folder, verdict: &Verdict) -> Result<(), Error> {
    let json = json::pretty(verdict);
    let text = folder.write("verdict.txt", verdict.to_text().as_bytes());
    folder.write("verdict.json", &json).and(text)
}

/// Reads the verdict of a folder, changes it, and writes it back.
///
/// # Errors
/// If it cannot be read.
pub fn change_verdict(path: &Path, change: impl FnOnce(&mut Verdict)) -> Result<(), Error> {
    let file = path.join("verdict.json");
    let bytes = std::fs::read(&file).map_err(Error::path("read", &file))?;
    let mut verdict: Verdict =
        serde_json::from_slice(&bytes).map_err(|error| Error::path("read", &file)(error.into()))?;
    change(&mut verdict);
    write_verdict(&Folder { path: path.into() }, &verdict);
    Ok(())
}

/// Name of the file with the state of an incident for the next collector process.
pub const RECORD: &str = ".collector.json";

/// Writes the record.
pub fn write_record(path: &Path, record: &Record) {
    let json = serde_json::to_vec_pretty(record).unwrap_or_default();
    if let Err(error) = (Folder { path: path.into() }).write(RECORD, &json) {
        info!("incident {}: a restarted collector will not know it: {}", record.id, chain(&error));
    }
}
