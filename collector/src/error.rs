//! The errors of the collector, each with its path, port, pid or rank.

use std::{io, path::PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A folder that must belong to this user alone does not.
    #[error("folder {} {problem}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A file or folder could not be read or written.
    #[error("cannot {action} {}", path.display())]
    Path {
        /// `create`, `write` and the like.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another collector holds the lock of this socket.
    #[error("a collector is already running for {} (pid {pid})", path.display())]
    Running {
        /// The socket.
        path: PathBuf,
        /// Its pid, as the lock file names it.
        pid: String,
    },
    /// A descriptor that a hook handed over is not a ring.
    #[error("the descriptor that pid {pid} sent is not a ring: {problem}")]
    Ring {
        /// The peer.
        pid: i32,
        /// The problem.
        problem: String,
    },
    /// Nothing could be captured.
    #[error("capture: {0}")]
    Capture(String),
    /// The cluster role cannot listen.
    #[error("cannot listen on {address}; choose another address with --listen or XPU_TIMER_CLUSTER_LISTEN")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The operating system refused something that the collector needs.
    #[error("cannot {action}")]
    System {
        /// The failed action.
        action: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: an error about a path.
    pub fn path(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Path { action, path, source }
    }

    /// For `map_err`: an error of the system.
    pub fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { action, source: source.into() }
    }

    /// Whether the disk is full or a quota is used up.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let Error::Path { source, .. } = self else { return false };
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Whether a file of that name already exists.
    #[must_use]
    pub fn is_already_exists(&self) -> bool {
        matches!(self, Error::Path { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

/// An error and its sources in one line.
#[must_use]
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
