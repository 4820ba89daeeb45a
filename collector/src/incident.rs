//! Incidents: their lifecycle, verdict, folder and retention.

pub(crate) mod engine;
pub(crate) mod folder;
pub(crate) mod judging;
pub mod part;
pub(crate) mod records;
pub(crate) mod retention;
pub(crate) mod throttle;
pub(crate) mod verdict_files;
pub(crate) mod viewer;

use serde::Serialize;
use xpu_timer_analysis::Status;

/// The lifecycle of an incident, on a node and at the cluster collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Its dump is in progress. At the cluster collector: it waits for the parts of the nodes.
    Open,
    /// Its verdict is made; the hang lasts.
    Dumped,
    /// The problem is over.
    Resolved,
    /// The job ended, or a dump by hand is finished.
    Ended,
    /// A node collector found it on disk after a restart. Whether the hang lasts is not known yet.
    Adopted,
}

impl State {
    /// Whether its dump is in progress or its hang lasts.
    #[must_use]
    pub fn is_open(self) -> bool {
        matches!(self, State::Open | State::Dumped)
    }

    /// The status of the incident in its verdict.
    #[must_use]
    pub fn status(self) -> Status {
        match self {
            State::Resolved => Status::Resolved,
            State::Ended => Status::Ended,
            State::Open | State::Dumped | State::Adopted => Status::Open,
        }
    }
}
