//! Messages to the hub that do not come from a stream of a node.

use xpu_timer_analysis::stragglers::Comparison;

use crate::{
    cluster::gather::{Done, Left},
    error::Error,
    http::questions::Question,
    incident::folder::Folder,
    job::key::JobKey,
};

/// A message to the hub that is not from a node's stream.
#[derive(Debug)]
pub enum Command {
    /// What a page asks.
    Question(Question),
    /// The thread of an incident is done with something.
    Done(String, Done),
    /// The ranks of a job in an attempt were compared.
    Compared(JobKey, u32, Comparison),
    /// Incidents that an earlier cluster collector left open were found late.
    Found(Vec<Left>),
    /// The folder of an incident was made late, or could not be.
    Made(String, MadeFolder),
}

/// A folder, and why it is not where it should be.
pub type MadeFolder = Result<(Folder, Option<Error>), Error>;
