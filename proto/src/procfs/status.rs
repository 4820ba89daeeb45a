//! `/proc/PID/status` of processes and threads.

use std::fmt::Display;

use crate::ring;

use super::files::{Error, field, read_task, text};

/// Fields of `/proc/PID/task/TID/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Name of the thread, as the kernel escapes it.
    pub name: String,
    /// State as the kernel prints it, such as `S (sleeping)`.
    pub state: String,
    /// The thread that traces it, or 0.
    pub tracer: i32,
    /// Real uid.
    pub uid: u32,
    /// The thread id in the innermost PID namespace.
    pub namespaced_tid: i32,
    /// Sum of voluntary and involuntary context switches.
    pub switches: u64,
}

impl Status {
    /// The first letter of the state.
    #[must_use]
    pub fn letter(&self) -> u8 {
        self.state.bytes().next().unwrap_or(b'X')
    }
}

/// The state text of `/proc/PID/status` for a state letter: `S (sleeping)` for `S`.
#[must_use]
pub fn state_text(letter: char) -> String {
    let word = match letter {
        'R' => "running",
        'S' => "sleeping",
        'D' => "disk sleep",
        'T' => "stopped",
        't' => "tracing stop",
        'Z' => "zombie",
        'X' => "dead",
        'I' => "idle",
        'P' => "parked",
        _ => "unknown",
    };
    format!("{letter} ({word})")
}

/// Reads the status of a thread.
///
/// # Errors
/// There is no such thread.
pub fn status(pid: i32, tid: i32) -> Result<Status, Error> {
    read_task(pid, tid, "status", parse_status)
}

fn parse_status(text: &str) -> Status {
    let mut status = Status::default();
    for line in text.lines() {
        // The file has some sixty lines and is read for every thread, so skip most of them early.
        if !line.starts_with(['N', 'S', 'T', 'U', 'v', 'n']) {
            continue;
        }
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        match key {
            "Name" => status.name = value.to_string(),
            "State" => status.state = value.to_string(),
            "TracerPid" => status.tracer = value.parse().unwrap_or(0),
            "Uid" => status.uid = value.split_whitespace().next().and_then(|uid| uid.parse().ok()).unwrap_or(0),
            "NSpid" => {
                status.namespaced_tid = value.split_whitespace().last().and_then(|tid| tid.parse().ok()).unwrap_or(0);
            }
            "voluntary_ctxt_switches" | "nonvoluntary_ctxt_switches" => {
                status.switches += value.parse::<u64>().unwrap_or(0);
            }
            _ => {}
        }
    }
    status
}

/// The whole file of a process or thread: an id, or `self`. [`field`] finds a line in it.
///
/// # Errors
/// There is no such process or thread.
pub fn status_text(process: impl Display) -> Result<String, Error> {
    text(format!("/proc/{process}/status"))
}

/// The number of seccomp filters of a thread; 0 if there is no such thread.
#[must_use]
pub fn seccomp_filters(pid: i32, tid: i32) -> u32 {
    ring::filters(text(format!("/proc/{pid}/task/{tid}/status")).unwrap_or_default().as_bytes())
}

/// The pid of the process that a thread belongs to.
#[must_use]
pub fn pid_of_thread(tid: i32) -> Option<i32> {
    let text = status_text(tid).ok()?;
    field(&text, "Tgid:")?.parse().ok()
}

/// The effective uid and the effective capabilities of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EffectiveCredentials {
    /// Effective uid.
    pub uid: u32,
    /// Bits of the effective capabilities.
    pub capabilities: u64,
}

/// Reads the effective credentials of a process.
///
/// # Errors
/// There is no such process.
pub fn effective_credentials(pid: i32) -> Result<EffectiveCredentials, Error> {
    let text = status_text(pid)?;
    let field = |name: &str| field(&text, name).unwrap_or_default();
    let uid = field("Uid:").split_whitespace().nth(1).and_then(|uid| uid.parse().ok()).unwrap_or(0);
    let capabilities = u64::from_str_radix(field("CapEff:"), 16).unwrap_or(0);
    Ok(EffectiveCredentials { uid, capabilities })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_this_process() {
        use std::os::unix::fs::MetadataExt;
        let pid = std::process::id() as i32;
        let status = status(pid, pid).unwrap();
        assert!(status.switches > 0 && status.namespaced_tid == pid);
        let tid = std::fs::read_link("/proc/thread-self").unwrap();
        assert_eq!(pid_of_thread(tid.file_name().unwrap().to_str().unwrap().parse().unwrap()), Some(pid));
        let uid = std::fs::metadata("/proc/self").unwrap().uid();
        assert_eq!(effective_credentials(pid).unwrap().uid, uid);
        assert_eq!(seccomp_filters(pid, pid), ring::filters(status_text("self").unwrap().as_bytes()));
    }
}
