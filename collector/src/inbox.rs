//! What other threads (HTTP, dumps, signals) tell the node's loop, which alone owns the state.

use std::{
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, mpsc},
};

use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;
use tokio::sync::oneshot;

use crate::{
    dump::Outcome,
    error::Error,
    records::{self, WithoutFolder},
    registry::JobKey,
    routes::Answers,
    uplink,
};

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

/// A message to the loop.
#[derive(Debug)]
pub enum Command {
    /// What a page asks.
    Question(Question),
    /// A dump is finished.
    Finished(Box<Outcome>),
    /// What came of another try to write a verdict: its folder and when it was dumped, or why not.
    Written(String, Result<PathBuf, Error>),
    /// Incidents that an earlier collector left open were found late; each waits for a signal of its ranks for so many nanoseconds.
    Found(Vec<records::Left>, u64),
    /// The stream to the cluster collector.
    Uplink(uplink::Event),
    /// SIGTERM or SIGINT.
    Stop,
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

/// The sending side; cheap to clone.
#[derive(Debug, Clone)]
pub struct Inbox {
    sender: mpsc::Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    /// An inbox and its receiver.
    ///
    /// # Errors
    /// When there are no descriptors.
    pub fn new() -> Result<(Inbox, mpsc::Receiver<Command>), Error> {
        let (sender, receiver) = mpsc::channel();
        let wake =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("make an eventfd"))?;
        Ok((Inbox { sender, wake: Arc::new(wake) }, receiver))
    }

    /// Sends a message and wakes the loop. Nobody is there to hear it when the loop has ended.
    pub fn post(&self, command: Command) {
        let _ = self.sender.send(command);
        self.wake();
    }

    /// Lets the loop turn.
    pub fn wake(&self) {
        // It only fails when the counter is full: then the loop is awake anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// For poll: readable when there is a message.
    #[must_use]
    pub fn fd(&self) -> &OwnedFd {
        &self.wake
    }

    /// Takes the wake-ups that have come so far.
    pub fn clear(&self) {
        // It only fails when there are none.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

impl Answers for Inbox {
    fn ask(&self, question: Question) {
        self.post(Command::Question(question));
    }
}
