//! The questions that the HTTP pages put to the event loop of either role.

use std::path::PathBuf;

use serde_json::Value;
use tokio::sync::oneshot;

use crate::{incident::records::WithoutFolder, job::key::JobKey};

/// A loop that can be asked.
pub trait Answers: Clone + Send + Sync + 'static {
    /// Passes a question on. What is not answered is dropped.
    fn ask(&self, question: Question);
}

/// Who waits for a dump by hand: the finished dump, or why there is none.
pub type DumpReply = oneshot::Sender<Result<Value, Refusal>>;

/// What the pages ask of a collector of either role.
#[derive(Debug)]
pub enum Question {
    /// `/status`.
    Status(oneshot::Sender<Value>),
    /// `/metrics`.
    Metrics(oneshot::Sender<String>),
    /// `POST /dump`.
    Dump {
        /// Name of the job; `None` when there is only one.
        job: Option<String>,
        /// Where the answer goes.
        reply: DumpReply,
    },
    /// Folders that may hold incidents.
    Folders(oneshot::Sender<Vec<PathBuf>>),
    /// Incidents of which no folder could be made.
    WithoutFolder(oneshot::Sender<Vec<WithoutFolder>>),
    /// `/slow_ranks`.
    SlowRanks(oneshot::Sender<Value>),
}

/// Why a dump by hand was not made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such job; the text says which there are.
    NoJob(String),
    /// There are several, and none was named.
    WhichJob(String),
    /// There were too many of late.
    TooMany {
        /// After so many seconds one may be asked for again.
        seconds: u64,
    },
}

impl Refusal {
    /// One may be asked for again after so long.
    #[must_use]
    pub fn too_many(wait_ns: u64) -> Self {
        Refusal::TooMany { seconds: wait_ns.div_ceil(1_000_000_000).max(1) }
    }
}

/// The job that is to be dumped by hand: the one of this name among those that are alive, or the only one.
///
/// # Errors
/// When none or several fit; the refusal says which there are.
pub fn wanted_job(alive: &[JobKey], name: Option<&str>) -> Result<JobKey, Refusal> {
    let names = || alive.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let matching: Vec<&JobKey> =
        alive.iter().filter(|job| name.is_none_or(|name| job.name == name || job.to_string() == name)).collect();
    match matching.as_slice() {
        [job] => Ok((*job).clone()),
        [] if alive.is_empty() => Err(Refusal::NoJob("no rank is registered".into())),
        [] => Err(Refusal::NoJob(format!("no such job; there are: {}", names()))),
        _ => Err(Refusal::WhichJob(format!("name one with ?job=; there are: {}", names()))),
    }
}
