//! The queue of verdicts that could not be written yet.

use std::{collections::BTreeMap, path::PathBuf};

/// The verdicts to be written, by incident.
#[derive(Debug, Default)]
pub(super) struct Unwritten {
    pub(super) waiting: BTreeMap<String, Waiting>,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) root: PathBuf,
    pub(super) due_ns: u64,
    pub(super) pause_ns: u64,
    pub(super) under_way: bool,
}
