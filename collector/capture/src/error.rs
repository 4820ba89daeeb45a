//! Errors of a single thread or process. None of them ends a capture.

use std::{io, path::PathBuf};

use xpu_timer_proto::procfs;

/// Why something could not be captured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process does not exist, or ended during the capture.
    #[error("process {0} is gone")]
    Gone(i32),
    /// A file of `/proc` cannot be read.
    #[error(transparent)]
    Procfs(#[from] procfs::Error),
    /// Memory of the target cannot be read.
    #[error("memory of process {pid} at {address:#x}: {source}")]
    Memory {
        /// Process or thread id.
        pid: i32,
        /// First address of the read.
        address: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The caller may not inspect this process.
    #[error("no permission to inspect process {pid} of uid {uid}: {remedy}")]
    Permission {
        /// Process id.
        pid: i32,
        /// Owner of the process.
        uid: u32,
        /// The missing permission, and how to get it.
        remedy: String,
    },
    /// Another program traces the thread.
    #[error("thread {tid} is already traced by process {tracer} ({name})")]
    Traced {
        /// Thread id.
        tid: i32,
        /// Process id of the tracer.
        tracer: i32,
        /// Name of the tracer.
        name: String,
    },
    /// The kernel refused a ptrace request.
    #[error("ptrace of thread {tid}: {source}")]
    Ptrace {
        /// Thread id.
        tid: i32,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The thread did not stop in time.
    #[error("thread {tid} did not stop within {waited_us} us")]
    NoStop {
        /// Thread id.
        tid: i32,
        /// How long the capture waited for it.
        waited_us: u64,
    },
    /// The kernel does not sample the running threads of a process.
    #[error("the running threads of process {pid} have no native stacks: {reason}")]
    Sampling {
        /// Process id.
        pid: i32,
        /// Why not.
        reason: String,
    },
    /// An ELF file or image cannot be used.
    #[error("{path}: {reason}", path = path.display())]
    Image {
        /// Path of the file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The interpreter of a process cannot be read.
    #[error("Python stacks of process {pid}: {reason}")]
    Python {
        /// Process id.
        pid: i32,
        /// Why not.
        reason: String,
    },
}

impl Error {
    /// Whether the process or thread has ended.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Error::Gone(_) => true,
            Error::Procfs(error) => error.is_gone(),
            Error::Memory { source, .. } => {
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
            Error::Procfs(procfs::Error { source, .. })
            | Error::Ptrace { source, .. }
            | Error::Memory { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }
}
