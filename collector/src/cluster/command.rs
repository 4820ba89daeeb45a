//! Messages to the hub that do not come from a stream of a node.

use xpu_timer_analysis::stragglers::Comparison;

use crate::{
    cluster::gather::{Done, OpenIncident},
    error::Error,
    http::questions::Question,
    incident::folder::Folder,
    job::key::JobKey,
};

/// A message to the hub that is not from a node's stream.
#[derive(Debug)]
pub enum Command {
    /// A question of an HTTP page.
    Question(Question),
    /// The thread of an incident has finished a step.
    Done(String, Done),
    /// The ranks of a job in an attempt were compared.
    Compared(JobKey, u32, Comparison),
    /// Incidents that an earlier cluster collector left open, found after a delay.
    Found(Vec<OpenIncident>),
    /// The folder of an incident was made after a delay, or could not be made.
    Made(String, MadeFolder),
}

/// A folder, with the reason if it is not in its intended place.
pub type MadeFolder = Result<(Folder, Option<Error>), Error>;
