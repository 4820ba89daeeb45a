//! Messages from other threads (HTTP, dumps, signals) to the node's event loop, which alone owns
//! the state.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{Arc, mpsc},
};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::{
    error::Error,
    http::questions::{Question, QuestionSender},
    incident::records,
    node::{cluster_member, folder_writer::WrittenTimelines, plan::Outcome},
};

/// A message to the loop.
#[derive(Debug)]
pub(super) enum Command {
    /// A question of an HTTP page.
    Question(Question),
    /// A dump has finished. Its timelines may still have to be written.
    Finished(Box<Outcome>),
    /// The timelines of a dump are written.
    TimelinesWritten(WrittenTimelines),
    /// The result of another attempt to write a verdict: its folder, or the error.
    Written(String, Result<PathBuf, Error>),
    /// Open incidents of an earlier collector in a root. Each waits this many nanoseconds for a
    /// signal of its ranks.
    IncidentsFound {
        /// The root.
        root: PathBuf,
        /// The incidents.
        found: Vec<records::OpenIncident>,
        /// How long each waits.
        wait_ns: u64,
    },
    /// Parts of an earlier collector in a root, by incident.
    PartsFound {
        /// The number of the search.
        search: u64,
        /// The root.
        root: PathBuf,
        /// The folders that contain the parts.
        found: BTreeMap<String, PathBuf>,
    },
    /// An event of the stream to the cluster collector.
    Uplink(cluster_member::UplinkEvent),
    /// SIGTERM or SIGINT.
    Stop,
}

/// The sending side; cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Inbox {
    sender: mpsc::Sender<Command>,
    wake: Arc<EventFd>,
}

impl Inbox {
    /// An inbox and its receiver.
    ///
    /// # Errors
    /// When there are no descriptors.
    pub(super) fn new() -> Result<(Inbox, mpsc::Receiver<Command>), Error> {
        let (sender, receiver) = mpsc::channel();
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(Error::system("make an eventfd"))?;
        Ok((Inbox { sender, wake: Arc::new(wake) }, receiver))
    }

    /// Sends a message and wakes the loop. The message is lost when the loop has ended.
    pub(super) fn post(&self, command: Command) {
        let _ = self.sender.send(command);
        self.wake();
    }

    /// Wakes the loop.
    pub(super) fn wake(&self) {
        // This only fails when the counter is full; then the loop is awake anyway.
        let _ = self.wake.write(1);
    }

    /// For poll: readable when there is a message.
    #[must_use]
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Consumes all wake-ups so far.
    pub(super) fn clear(&self) {
        // This only fails when there are none.
        let _ = self.wake.read();
    }
}

impl QuestionSender for Inbox {
    fn ask(&self, question: Question) {
        self.post(Command::Question(question));
    }
}
