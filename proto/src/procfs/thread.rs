//! Reads the kernel's report about a single thread: its system call, its place in the kernel, and
//! how often the scheduler ran it.

use std::{fs::File, io, os::unix::fs::FileExt};

use super::{
    files::{Error, read_task, task},
    status::{thread_stat, ticks_to_ns},
};

/// Contents of `/proc/PID/task/TID/syscall`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syscall {
    /// The thread is on a CPU or waits for one.
    Running,
    /// The thread sleeps. The number is -1 if it is not in a system call (a page fault, a stop).
    Blocked {
        /// Number of the system call.
        number: i64,
        /// Its arguments.
        arguments: Option<[u64; 6]>,
        /// Stack pointer.
        sp: u64,
        /// Program counter.
        pc: u64,
    },
}

/// Reads what a thread does in the kernel.
///
/// # Errors
/// There is no such thread, it belongs to another user, or the kernel reports something unknown.
pub fn syscall(pid: i32, tid: i32) -> Result<Syscall, Error> {
    read_task(pid, tid, "syscall", |text| {
        parse_syscall(text).ok_or_else(|| Error {
            path: task(pid, tid, "syscall"),
            source: io::Error::new(io::ErrorKind::InvalidData, format!("unknown form {:?}", text.trim())),
        })
    })?
}

fn parse_syscall(text: &str) -> Option<Syscall> {
    let mut fields = text.split_whitespace();
    let first = fields.next()?;
    if first == "running" {
        return Some(Syscall::Running);
    }
    let number = first.parse().ok()?;
    let values: Option<Vec<u64>> =
        fields.map(|field| u64::from_str_radix(field.strip_prefix("0x")?, 16).ok()).collect();
    match values?.as_slice() {
        [sp, pc] => Some(Syscall::Blocked { number, arguments: None, sp: *sp, pc: *pc }),
        [arguments @ .., sp, pc] if arguments.len() == 6 => {
            let arguments = arguments.try_into().ok();
            Some(Syscall::Blocked { number, arguments, sp: *sp, pc: *pc })
        }
        _ => None,
    }
}

/// The kernel function that the thread sleeps in. Empty if the thread runs or the kernel hides it.
#[must_use]
pub fn wchan(pid: i32, tid: i32) -> String {
    let name = |text: &str| if text == "0" { String::new() } else { text.trim().to_string() };
    read_task(pid, tid, "wchan", name).unwrap_or_default()
}

/// Names of the kernel functions on the thread's kernel stack, leaf first. Empty without the
/// privilege to read them.
#[must_use]
pub fn kernel_stack(pid: i32, tid: i32) -> Vec<String> {
    read_task(pid, tid, "stack", parse_kernel_stack).unwrap_or_default()
}

fn parse_kernel_stack(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.split_once("] ").map(|(_, function)| function))
        .map(|function| function.split('+').next().unwrap_or(function).to_string())
        .collect()
}

/// Contents of `/proc/PID/task/TID/schedstat`. The file stays open, so that reading it again is
/// cheap.
#[derive(Debug)]
pub struct Schedule {
    file: Option<File>,
    /// Time on a CPU.
    pub cpu_ns: u64,
    /// How often the thread was put on a CPU; 0 if the kernel does not count this.
    pub runs: u64,
}

impl Schedule {
    /// Reads the schedule of one thread.
    #[must_use]
    pub fn of(pid: i32, tid: i32) -> Self {
        let file = File::open(task(pid, tid, "schedstat")).ok();
        let Schedstat { cpu_ns, runs, .. } = file.as_ref().and_then(read_schedstat).unwrap_or_else(|| {
            // A kernel without this file still counts ticks.
            let stat = thread_stat(pid, tid);
            Schedstat { cpu_ns: stat.map_or(0, |stat| ticks_to_ns(stat.cpu_ticks)), ..Schedstat::default() }
        });
        Schedule { file, cpu_ns, runs }
    }

    /// Whether the thread has not been put on a CPU since. `None` if the kernel does not count
    /// this.
    #[must_use]
    pub fn is_unchanged(&self) -> Option<bool> {
        let now = self.file.as_ref().and_then(read_schedstat);
        now.filter(|_| self.runs > 0).map(|now| now.runs == self.runs)
    }
}

/// The scheduler's counters for a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Schedstat {
    /// Time on a CPU.
    pub cpu_ns: u64,
    /// Time waiting for a CPU.
    pub waited_ns: u64,
    /// How often the thread was put on a CPU.
    pub runs: u64,
}

/// Contents of `schedstat` of a thread. `None` if the kernel has no such file.
#[must_use]
pub fn schedstat(pid: i32, tid: i32) -> Option<Schedstat> {
    read_schedstat(&File::open(task(pid, tid, "schedstat")).ok()?)
}

fn read_schedstat(file: &File) -> Option<Schedstat> {
    let mut buffer = [0; 128];
    let length = file.read_at(&mut buffer, 0).ok()?;
    let mut numbers = std::str::from_utf8(buffer.get(..length)?).ok()?.split_whitespace();
    let mut number = || numbers.next()?.parse().ok();
    Some(Schedstat { cpu_ns: number()?, waited_ns: number()?, runs: number()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_tid() -> i32 {
        let link = std::fs::read_link("/proc/thread-self").unwrap();
        link.file_name().unwrap().to_str().unwrap().parse().unwrap()
    }

    #[test]
    fn parses_syscall_lines() {
        assert_eq!(parse_syscall("running\n"), Some(Syscall::Running));
        let blocked = parse_syscall("-1 0x7ffe 0x401000\n");
        assert_eq!(blocked, Some(Syscall::Blocked { number: -1, arguments: None, sp: 0x7ffe, pc: 0x401000 }));
        let futex = parse_syscall("202 0x1 0x2 0x3 0x4 0x5 0x6 0x7f00 0x7f01\n");
        let arguments = Some([1, 2, 3, 4, 5, 6]);
        assert_eq!(futex, Some(Syscall::Blocked { number: 202, arguments, sp: 0x7f00, pc: 0x7f01 }));
        assert_eq!(parse_syscall(""), None);
        assert_eq!(parse_syscall("1 0x2"), None);
    }

    #[test]
    fn parses_kernel_stacks() {
        let text = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] do_futex+0x1/0x2\n";
        assert_eq!(parse_kernel_stack(text), ["futex_wait_queue", "do_futex"]);
    }

    #[test]
    fn schedule_shows_that_a_thread_ran() {
        let (pid, tid) = (std::process::id() as i32, own_tid());
        let (wake, sleep) = std::sync::mpsc::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        let sleeper = std::thread::spawn(move || {
            sender.send(own_tid()).unwrap();
            while sleep.recv().is_ok() {
                sender.send(0).unwrap();
            }
        });
        let sleeper_tid = receiver.recv().unwrap();
        let asleep = || matches!(syscall(pid, sleeper_tid), Ok(Syscall::Blocked { .. }));
        while !asleep() {
            std::thread::yield_now();
        }
        let schedule = Schedule::of(pid, sleeper_tid);
        if schedule.is_unchanged().is_none() {
            eprintln!("this kernel does not count");
            return;
        }
        assert_eq!(schedule.is_unchanged(), Some(true));
        wake.send(()).unwrap();
        receiver.recv().unwrap();
        assert_eq!(schedule.is_unchanged(), Some(false), "it has run, whatever it does now");
        assert!(Schedule::of(pid, tid).cpu_ns > 0);
        drop(wake);
        sleeper.join().unwrap();
    }
}
