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
