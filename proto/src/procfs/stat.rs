//! `/proc/PID/stat` of processes and threads.

use std::{fmt::Display, io};

use super::files::{Error, read_task, text};

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
    parse(&text(path.clone())?).ok_or_else(|| Error { path: path.into(), source: io::ErrorKind::NotFound.into() })
}

/// Contents of `stat` of a thread. `None` if there is no such thread.
#[must_use]
pub fn thread_stat(pid: i32, tid: i32) -> Option<Stat> {
    read_task(pid, tid, "stat", parse).ok().flatten()
}

fn parse(text: &str) -> Option<Stat> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_names_with_parentheses() {
        let mut fields = vec!["0"; 50];
        (fields[0], fields[1], fields[11], fields[12]) = ("T", "42", "5", "6");
        (fields[19], fields[49]) = ("777", "9");
        let stat = parse(&format!("12 (a) b (c)) {}\n", fields.join(" "))).unwrap();
        let name = "a) b (c)".to_string();
        assert_eq!(stat, Stat { name, state: 'T', parent: 42, cpu_ticks: 11, start_time: 777, wait_status: 9 });
        assert!(stat.is_stopped() && !stat.is_dead());
        assert_eq!(parse("12 (x"), None);
    }

    #[test]
    fn an_old_kernel_reports_no_wait_status() {
        let text = format!("12 (a) S 7 {}", (3..40).map(|n| n.to_string()).collect::<Vec<_>>().join(" "));
        let stat = parse(&text).unwrap();
        assert_eq!((stat.name.as_str(), stat.state, stat.parent, stat.wait_status), ("a", 'S', 7, 0));
    }

    #[test]
    fn a_process_that_does_not_exist_is_not_found() {
        assert!(stat(i32::MAX).unwrap_err().is_gone());
        assert_eq!(stat("self").unwrap().start_time, stat(std::process::id()).unwrap().start_time);
    }
}
