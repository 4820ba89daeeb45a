//! What can go wrong with a single thread or process. None of it ends a capture.

use std::{io, path::PathBuf};

/// Why something could not be captured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process does not exist, or ended while it was looked at.
    #[error("process {0} is gone")]
    Gone(i32),
    /// A file of `/proc` cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Procfs {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Memory of the target cannot be read.
    #[error("memory of process {pid} at {address:#x}: {source}")]
    Memory {
        /// Process or thread id.
        pid: i32,
        /// First address asked for.
        address: u64,
        /// Why.
        source: io::Error,
    },
    /// The caller may not look into this process.
    #[error("no permission to look into process {pid} of uid {uid}: {remedy}")]
    Permission {
        /// Process id.
        pid: i32,
        /// Owner of the process.
        uid: u32,
        /// What is missing, and how to get it.
        remedy: String,
    },
    /// Another program traces the thread.
    #[error("thread {tid} is already traced by process {tracer} ({name})")]
    Traced {
        /// Thread id.
        tid: i32,
        /// Process id of the tracer.
        tracer: i32,
        /// Its name.
        name: String,
    },
    /// ptrace refused.
    #[error("ptrace of thread {tid}: {source}")]
    Ptrace {
        /// Thread id.
        tid: i32,
        /// Why.
        source: io::Error,
    },
    /// The thread did not come to a stop in time.
    #[error("thread {tid} did not stop within {waited_us} us")]
    NoStop {
        /// Thread id.
        tid: i32,
        /// How long it was waited for.
        waited_us: u64,
    },
    /// The kernel does not sample the running threads of a process.
    #[error("the running threads of process {pid} have no native stacks: {reason}")]
    Sampling {
        /// Process id.
        pid: i32,
        /// Why.
        reason: String,
    },
    /// An ELF file or image cannot be used.
    #[error("{path}: {reason}", path = path.display())]
    Image {
        /// Which file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The interpreter of a process cannot be read.
    #[error("Python stacks of process {pid}: {reason}")]
    Python {
        /// Process id.
        pid: i32,
        /// Why.
        reason: String,
    },
}

impl Error {
    /// Whether the process or thread has ended.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Error::Gone(_) => true,
            Error::Procfs { source, .. } | Error::Memory { source, .. } => {
                source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(libc::ESRCH)
            }
            // ECHILD: there is no such thread to wait for, although it was traced before.
            Error::Ptrace { source, .. } => matches!(source.raw_os_error(), Some(libc::ESRCH | libc::ECHILD)),
            _ => false,
        }
    }

    /// Whether the kernel refused for lack of permission.
    pub(crate) fn is_denied(&self) -> bool {
        match self {
            Error::Procfs { source, .. } | Error::Ptrace { source, .. } | Error::Memory { source, .. } => {
                source.kind() == io::ErrorKind::PermissionDenied
            }
            _ => false,
        }
    }
}
