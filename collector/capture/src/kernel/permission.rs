//! What is missing when the kernel does not let us look into a process, and how to get it.

use std::{fs, os::unix::fs::MetadataExt};

use crate::error::Error;

use super::procfs;

/// Bit of the capability that lets one look into all processes.
const CAP_SYS_PTRACE: u64 = 1 << 19;

/// What the kernel checks, as far as anybody can see it from outside.
#[derive(Debug, Clone, Copy, Default)]
struct Facts {
    own_uid: u32,
    uid: u32,
    /// Whether we have CAP_SYS_PTRACE, which counts within our own user namespace only.
    capable: bool,
    /// Whether the process has said that nobody may look into it, or was started from a file with privileges of its own.
    undumpable: bool,
    /// `/proc/sys/kernel/yama/ptrace_scope`; 0 without Yama.
    scope: u32,
}

/// The error for a process of `uid` that the kernel does not let us look into, with what to do about it.
pub(crate) fn denied(pid: i32, uid: u32) -> Error {
    Error::Permission { pid, uid, remedy: remedy(pid, uid) }
}

fn remedy(pid: i32, uid: u32) -> String {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    let own = procfs::effective(std::process::id() as i32).unwrap_or_default();
    // The kernel gives the files of such a process to root, but not their folder.
    let owner = fs::metadata(format!("/proc/{pid}/maps")).map_or(uid, |metadata| metadata.uid());
    explain(&Facts {
        own_uid: own.uid,
        uid,
        capable: own.capabilities & CAP_SYS_PTRACE != 0,
        undumpable: owner != uid,
        scope: scope.and_then(|text| text.trim().parse().ok()).unwrap_or(0),
    })
}

fn explain(facts: &Facts) -> String {
    const GRANT: &str = "CAP_SYS_PTRACE (root has it; docker run --cap-add SYS_PTRACE; in Kubernetes \
                         securityContext.capabilities.add: [SYS_PTRACE])";
    let Facts { own_uid, uid, .. } = facts;
    if facts.capable {
        return "CAP_SYS_PTRACE is there and yet not enough: the process is in another user namespace, or a security \
                module (SELinux, AppArmor, seccomp) forbids it"
            .into();
    }
    if own_uid != uid {
        return format!("this is uid {own_uid}; run as uid {uid}, or with {GRANT}");
    }
    if facts.undumpable {
        return format!("it has made itself undumpable, or has privileges of its own; run with {GRANT}");
    }
    match facts.scope {
        0 => format!("it has privileges that this process has not; run with {GRANT}"),
        1 => format!(
            "/proc/sys/kernel/yama/ptrace_scope is 1, so only parents may; start the job with xpu_timer_launch, which \
             lets its collector in, or run with {GRANT}, or set ptrace_scope to 0"
        ),
        2 => format!("/proc/sys/kernel/yama/ptrace_scope is 2; run with {GRANT}"),
        _ => "/proc/sys/kernel/yama/ptrace_scope is 3, which forbids it to everybody until the next boot".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_obstacle_has_its_remedy() {
        let same = Facts { own_uid: 7, uid: 7, ..Facts::default() };
        let other = explain(&Facts { uid: 8, scope: 1, ..same });
        assert!(other.contains("this is uid 7; run as uid 8, or with CAP_SYS_PTRACE"), "{other}");
        for (facts, words) in [
            (Facts { undumpable: true, ..same }, "undumpable"),
            (Facts { scope: 1, ..same }, "ptrace_scope is 1, so only parents may; start the job with xpu_timer_launch"),
            (Facts { scope: 2, ..same }, "ptrace_scope is 2; run with CAP_SYS_PTRACE"),
            (Facts { scope: 3, ..same }, "forbids it to everybody"),
            (Facts { capable: true, uid: 8, ..same }, "another user namespace"),
            (same, "privileges that this process has not"),
        ] {
            let text = explain(&facts);
            assert!(text.contains(words), "{facts:?}: {text}");
        }
    }
}
