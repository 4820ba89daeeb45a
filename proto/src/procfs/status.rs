//! `/proc/PID/stat` and `/proc/PID/status` of processes and threads.

use std::{fmt::Display, io};

use crate::ring;

use super::files::{Error, field, read_task, text};

/// Fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stat {
    /// The kernel's name for the process or thread.
    pub name: String,
    /// One letter, as `ps` shows it.
    pub state: char,
    /// Parent.
    pub parent: i32,
    /// CPU time in ticks, in user mode and in the kernel.
    pub cpu_ticks: u64,
    /// Ticks after boot. Together with the pid, it identifies a process uniquely.
    pub start_time: u64,
    /// Wait status of a zombie, 0 otherwise. Also 0 if the kernel does not report it.
    pub wait_status: i32,
}

impl Stat {
    /// Stopped by a signal or a debugger.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// No longer running.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Reads the stat line of a process: a pid, or `self`.
///
/// # Errors
/// There is no such process.
pub fn stat(process: impl Display) -> Result<Stat, Error> {
    let path = format!("/proc/{process}/stat");
    parse_stat(&text(path.clone())?).ok_or_else(|| Error { path: path.into(), source: io::ErrorKind::NotFound.into() })
}

/// Contents of `stat` of a thread. `None` if there is no such thread.
#[must_use]
pub fn thread_stat(pid: i32, tid: i32) -> Option<Stat> {
    read_task(pid, tid, "stat", parse_stat).ok().flatten()
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The name may contain spaces and parentheses, so the last parenthesis ends it.
    let (head, tail) = text.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_string();
    let fields: Vec<&str> = tail.split_whitespace().collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some(Stat {
        name,
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        cpu_ticks: number(11)? + number(12)?,
        start_time: number(19)?,
        wait_status: fields.get(49).and_then(|field| field.parse().ok()).unwrap_or(0),
    })
}

/// Length of the clock ticks in which `/proc` reports times: 100 per second on every kernel for
/// x86-64.
pub const TICK_NS: u64 = 10_000_000;

/// The length of a number of ticks.
#[must_use]
pub fn ticks_to_ns(ticks: u64) -> u64 {
    ticks * TICK_NS
}

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
    read_task(pid, tid, "status", |text| ring::filters(text.as_bytes())).unwrap_or(0)
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

    #[test]
    fn parses_names_with_parentheses() {
        let mut fields = vec!["0"; 50];
        (fields[0], fields[1], fields[11], fields[12]) = ("T", "42", "5", "6");
        (fields[19], fields[49]) = ("777", "9");
        let stat = parse_stat(&format!("12 (a) b (c)) {}\n", fields.join(" "))).unwrap();
        let name = "a) b (c)".to_string();
        assert_eq!(stat, Stat { name, state: 'T', parent: 42, cpu_ticks: 11, start_time: 777, wait_status: 9 });
        assert!(stat.is_stopped() && !stat.is_dead());
        assert_eq!(parse_stat("12 (x"), None);
    }

    #[test]
    fn an_old_kernel_reports_no_wait_status() {
        let text = format!("12 (a) S 7 {}", (3..40).map(|n| n.to_string()).collect::<Vec<_>>().join(" "));
        let stat = parse_stat(&text).unwrap();
        assert_eq!((stat.name.as_str(), stat.state, stat.parent, stat.wait_status), ("a", 'S', 7, 0));
    }

    #[test]
    fn a_process_that_does_not_exist_is_not_found() {
        assert!(stat(i32::MAX).unwrap_err().is_gone());
        assert_eq!(stat("self").unwrap().start_time, stat(std::process::id()).unwrap().start_time);
    }
}
