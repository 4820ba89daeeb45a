//! Errors of a single thread or process. None of them ends a capture. If the kernel does not let
//! the capture inspect a process, the error says which permission is missing, and how to get it.

use std::{fs, io, os::unix::fs::MetadataExt, path::PathBuf};

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
    /// The error for a process of `uid` that the capture may not inspect, with what to do about it.
    pub(crate) fn denied(pid: i32, uid: u32) -> Self {
        Error::Permission { pid, uid, remedy: remedy(pid, uid) }
    }

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

/// Bit of the capability to inspect all processes.
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// The facts that the kernel checks, as far as they are visible from outside.
#[derive(Debug, Clone, Copy, Default)]
struct AccessFacts {
    own_uid: u32,
    uid: u32,
    /// Whether we have CAP_SYS_PTRACE. It counts only within our own user namespace.
    has_cap_sys_ptrace: bool,
    /// Whether the process has forbidden inspection, or was started from a file with privileges of
    /// its own.
    is_undumpable: bool,
    /// `/proc/sys/kernel/yama/ptrace_scope`; 0 without Yama.
    ptrace_scope: u32,
}

fn remedy(pid: i32, uid: u32) -> String {
    let own = procfs::effective_credentials(std::process::id() as i32).unwrap_or_default();
    // The kernel makes root the owner of the files of such a process, but not of their folder.
    let owner = fs::metadata(format!("/proc/{pid}/maps")).map_or(uid, |metadata| metadata.uid());
    explain(&AccessFacts {
        own_uid: own.uid,
        uid,
        has_cap_sys_ptrace: own.capabilities & CAP_SYS_PTRACE != 0,
        is_undumpable: owner != uid,
        ptrace_scope: procfs::ptrace_scope().unwrap_or(0),
    })
}

fn explain(facts: &AccessFacts) -> String {
    const GRANT: &str = "CAP_SYS_PTRACE (root has it; docker run --cap-add SYS_PTRACE; in Kubernetes \
                         securityContext.capabilities.add: [SYS_PTRACE])";
    let AccessFacts { own_uid, uid, .. } = facts;
    if facts.has_cap_sys_ptrace {
        return "CAP_SYS_PTRACE is there and yet not enough: the process is in another user namespace, or a security \
                module (SELinux, AppArmor, seccomp) forbids it"
            .into();
    }
    if own_uid != uid {
        return format!("this is uid {own_uid}; run as uid {uid}, or with {GRANT}");
    }
    if facts.is_undumpable {
        return format!("it is not dumpable or has additional privileges; run with {GRANT}");
    }
    match facts.ptrace_scope {
        0 => format!("it has privileges that this process lacks; run with {GRANT}"),
        1 => format!(
            "/proc/sys/kernel/yama/ptrace_scope is 1, so only parents may; start the job with xpu_timer_launch, which \
             lets its collector in, or run with {GRANT}, or set ptrace_scope to 0"
        ),
        2 => format!("/proc/sys/kernel/yama/ptrace_scope is 2; run with {GRANT}"),
        _ => "/proc/sys/kernel/yama/ptrace_scope is 3, which forbids it for all processes until the next boot".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_has_its_remedy() {
        let same = AccessFacts { own_uid: 7, uid: 7, ..AccessFacts::default() };
        let other = explain(&AccessFacts { uid: 8, ptrace_scope: 1, ..same });
        assert!(other.contains("this is uid 7; run as uid 8, or with CAP_SYS_PTRACE"), "{other}");
        for (facts, words) in [
            (AccessFacts { is_undumpable: true, ..same }, "not dumpable"),
            (
                AccessFacts { ptrace_scope: 1, ..same },
                "ptrace_scope is 1, so only parents may; start the job with xpu_timer_launch",
            ),
            (AccessFacts { ptrace_scope: 2, ..same }, "ptrace_scope is 2; run with CAP_SYS_PTRACE"),
            (AccessFacts { ptrace_scope: 3, ..same }, "forbids it for all processes"),
            (AccessFacts { has_cap_sys_ptrace: true, uid: 8, ..same }, "another user namespace"),
            (same, "privileges that this process lacks"),
        ] {
            let text = explain(&facts);
            assert!(text.contains(words), "{facts:?}: {text}");
        }
    }
}
