//! Parsers of the files of `/proc` that describe processes and threads. They only read and stop
//! nothing.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::PathBuf,
    time::Instant,
};

use xpu_timer_proto::secrets;

use crate::error::Error;

/// One line of a maps file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    pub executable: bool,
    pub readable: bool,
    /// Major and minor number of the file system's device. The major number is 0 if no disk of this
    /// machine is behind the file system.
    pub device: (u32, u32),
    pub inode: u64,
    /// As the kernel prints it: a path, `[stack]`, or empty.
    pub path: String,
}

impl Mapping {
    /// Whether the mapping has no file that outlives the process.
    pub fn is_memory(&self) -> bool {
        const KINDS: [&str; 6] = ["[heap]", "[stack", "[anon", "/memfd:", "/dev/zero", "/SYSV"];
        self.path.is_empty() || KINDS.iter().any(|kind| self.path.starts_with(kind))
    }
}

/// Fields of `/proc/PID/task/TID/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    pub name: String,
    /// State as the kernel prints it, such as `S (sleeping)`.
    pub state: String,
    pub tracer: i32,
    pub uid: u32,
    /// The thread id in the innermost PID namespace.
    pub namespaced_tid: i32,
    /// Sum of voluntary and involuntary context switches.
    pub switches: u64,
}

impl Status {
    pub fn letter(&self) -> u8 {
        self.state.bytes().next().unwrap_or(b'X')
    }
}

/// The state text of `/proc/PID/status` for a state letter: `S (sleeping)` for `S`.
pub(crate) fn state_text(letter: char) -> String {
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

/// Contents of `/proc/PID/task/TID/syscall`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syscall {
    /// The thread is on a CPU or waits for one.
    Running,
    /// The thread sleeps. The number is -1 if it is not in a system call (a page fault, a stop).
    Blocked { number: i64, arguments: Option<[u64; 6]>, sp: u64, pc: u64 },
}

/// Fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Stat {
    pub name: String,
    pub state: char,
    pub parent: i32,
    pub cpu_ticks: u64,
    /// Ticks after boot. Together with the pid, it identifies a process uniquely.
    pub start_time: u64,
}

/// The pids of all processes, in no order.
pub(crate) fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn read(path: PathBuf) -> Result<String, Error> {
    match fs::read(&path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(source) => Err(Error::Procfs { path, source }),
    }
}

/// The value of the line that starts with `name`.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Buffer size: room for the status of a thread in deeply nested namespaces.
const READ_BYTES: usize = 8 << 10;

/// Reads one of the files of a thread in a single read, which the kernel fills consistently. A
/// longer file is cut.
fn read_task<T>(pid: i32, tid: i32, file: &str, parse: impl FnOnce(&str) -> T) -> Result<T, Error> {
    let path = task(pid, tid, file);
    let mut buffer = [0; READ_BYTES];
    match File::open(&path).and_then(|mut file| file.read(&mut buffer)) {
        Ok(length) => Ok(parse(&String::from_utf8_lossy(&buffer[..length]))),
        Err(source) => Err(Error::Procfs { path, source }),
    }
}

fn task(pid: i32, tid: i32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/task/{tid}/{file}"))
}

/// Thread ids of a process, ascending.
pub(crate) fn threads(pid: i32) -> Result<Vec<i32>, Error> {
    let path = PathBuf::from(format!("/proc/{pid}/task"));
    let entries = fs::read_dir(&path).map_err(|source| Error::Procfs { path, source })?;
    let mut tids: Vec<i32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    tids.sort_unstable();
    Ok(tids)
}

pub(crate) fn status(pid: i32, tid: i32) -> Result<Status, Error> {
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

pub(crate) fn syscall(pid: i32, tid: i32) -> Result<Syscall, Error> {
    read_task(pid, tid, "syscall", |text| {
        parse_syscall(text).ok_or_else(|| Error::Procfs {
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
pub(crate) fn wchan(pid: i32, tid: i32) -> String {
    let name = |text: &str| if text == "0" { String::new() } else { text.trim().to_string() };
    read_task(pid, tid, "wchan", name).unwrap_or_default()
}

/// Names of the kernel functions on the thread's kernel stack, leaf first. Empty without the
/// privilege to read them.
pub(crate) fn kernel_stack(pid: i32, tid: i32) -> Vec<String> {
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
pub(crate) struct Schedule {
    file: Option<File>,
    /// Time on a CPU.
    pub cpu_ns: u64,
    /// How often the thread was put on a CPU; 0 if the kernel does not count this.
    pub runs: u64,
}

impl Schedule {
    /// Reads the schedule of one thread.
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
    pub fn is_unchanged(&self) -> Option<bool> {
        let now = self.file.as_ref().and_then(read_schedstat);
        now.filter(|_| self.runs > 0).map(|now| now.runs == self.runs)
    }
}

/// What the scheduler counts for a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Schedstat {
    /// Time on a CPU.
    pub cpu_ns: u64,
    /// Time waiting for a CPU.
    pub waited_ns: u64,
    /// How often the thread was put on a CPU.
    pub runs: u64,
}

/// Contents of `schedstat` of a thread. `None` if the kernel has no such file.
pub(crate) fn schedstat(pid: i32, tid: i32) -> Option<Schedstat> {
    read_schedstat(&File::open(task(pid, tid, "schedstat")).ok()?)
}

fn read_schedstat(file: &File) -> Option<Schedstat> {
    let mut buffer = [0; 128];
    let length = file.read_at(&mut buffer, 0).ok()?;
    let mut numbers = std::str::from_utf8(buffer.get(..length)?).ok()?.split_whitespace();
    let mut number = || numbers.next()?.parse().ok();
    Some(Schedstat { cpu_ns: number()?, waited_ns: number()?, runs: number()? })
}

pub(crate) fn stat(pid: i32) -> Result<Stat, Error> {
    let path = PathBuf::from(format!("/proc/{pid}/stat"));
    parse_stat(&read(path)?).ok_or(Error::Gone(pid))
}

/// Contents of `stat` of a thread.
pub(crate) fn thread_stat(pid: i32, tid: i32) -> Option<Stat> {
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
    })
}

pub(crate) fn ticks_to_ns(ticks: u64) -> u64 {
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    ticks * 1_000_000_000 / per_second.max(1) as u64
}

/// Bytes that read and write calls moved; 0 if unreadable.
pub(crate) fn io_bytes(pid: i32) -> u64 {
    let text = read(PathBuf::from(format!("/proc/{pid}/io"))).unwrap_or_default();
    let of = |name: &str| field(&text, name).and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or_default();
    of("rchar:") + of("wchar:")
}

/// argv without its secrets, joined by spaces, at most 4,096 bytes. For a process without argv, the
/// kernel's name for it in brackets.
pub(crate) fn command(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut command = secrets::cmdline(&bytes).trim().to_string();
    if command.is_empty() {
        return stat(pid).map(|stat| format!("[{}]", stat.name)).unwrap_or_default();
    }
    while command.len() > 4096 {
        command.pop();
    }
    command
}

/// The pid of the process that a thread belongs to.
pub(crate) fn pid_of_thread(tid: i32) -> Option<i32> {
    let text = read(PathBuf::from(format!("/proc/{tid}/status"))).ok()?;
    field(&text, "Tgid:")?.parse().ok()
}

/// The effective uid and the effective capabilities of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct EffectiveCredentials {
    pub uid: u32,
    pub capabilities: u64,
}

pub(crate) fn effective_credentials(pid: i32) -> Result<EffectiveCredentials, Error> {
    let text = read(PathBuf::from(format!("/proc/{pid}/status")))?;
    let field = |name: &str| field(&text, name).unwrap_or_default();
    let uid = field("Uid:").split_whitespace().nth(1).and_then(|uid| uid.parse().ok()).unwrap_or(0);
    let capabilities = u64::from_str_radix(field("CapEff:"), 16).unwrap_or(0);
    Ok(EffectiveCredentials { uid, capabilities })
}

/// Type of the file system with this device number, as the process sees it. This involves no file
/// system.
pub(crate) fn file_system_type(pid: i32, device: (u32, u32)) -> Option<String> {
    let text = mounts(pid)?;
    let mount = text.lines().filter_map(parse_mount).find(|mount| mount.device == device)?;
    Some(mount.file_system_type.to_string())
}

/// Device number of the mount with this id, as the process sees it.
pub(crate) fn device_of_mount(pid: i32, id: &str) -> Option<(u32, u32)> {
    let text = mounts(pid)?;
    text.lines().filter_map(parse_mount).find(|mount| mount.id == id).map(|mount| mount.device)
}

fn mounts(pid: i32) -> Option<String> {
    read(PathBuf::from(format!("/proc/{pid}/mountinfo"))).ok()
}

/// One line of `/proc/PID/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    id: &'a str,
    device: (u32, u32),
    file_system_type: &'a str,
}

fn parse_mount(line: &str) -> Option<Mount<'_>> {
    // Optional fields are between the mount point and the dash.
    let (mount, system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ');
    let id = fields.next()?;
    let (major, minor) = fields.nth(1)?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    Some(Mount { id, device, file_system_type: system.split(' ').next()? })
}

pub(crate) fn maps(pid: i32, tid: i32) -> Result<Vec<Mapping>, Error> {
    Ok(read(task(pid, tid, "maps"))?.lines().filter_map(parse_mapping).collect())
}

fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        rest = rest.trim_start();
        let end = rest.find(' ').unwrap_or(rest.len());
        let (word, tail) = rest.split_at(end);
        rest = tail;
        word
    };
    let (start, end) = field().split_once('-')?;
    let permissions = field().as_bytes();
    let offset = u64::from_str_radix(field(), 16).ok()?;
    let (major, minor) = field().split_once(':')?;
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = field().parse().ok()?;
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        offset,
        readable: permissions.first() == Some(&b'r'),
        executable: permissions.get(2) == Some(&b'x'),
        device,
        inode,
        path: rest.trim_start().to_string(),
    })
}

/// Maximum number of descriptors of one process to read.
pub(crate) const MAX_FILES: usize = 4096;

/// Start of the link of a socket in `/proc/PID/fd`.
pub(crate) const SOCKET: &str = "socket:[";

/// The inode in a link of `/proc/PID/fd` such as `pipe:[4242]`.
pub(crate) fn inode_of(link: &str, kind: &str) -> Option<u64> {
    link.strip_prefix(kind)?.strip_suffix(']')?.parse().ok()
}

/// Maximum number of descendants of one process.
const MAX_DESCENDANTS: usize = 1024;

/// All descendants of `pid`, parents first. Processes in `skip` and their descendants are left out,
/// because they are captured on their own.
pub(crate) fn descendants(pid: i32, skip: &HashSet<i32>) -> Vec<i32> {
    descendants_until(pid, skip, None).0
}

/// The descendants that are found before the deadline, and whether these are all.
pub(crate) fn descendants_until(pid: i32, skip: &HashSet<i32>, deadline: Option<Instant>) -> (Vec<i32>, bool) {
    let mut found = vec![pid];
    let mut parents: Option<HashMap<i32, Vec<i32>>> = None;
    let mut next = 0;
    let in_time = || deadline.is_none_or(|deadline| Instant::now() < deadline);
    while next < found.len() && found.len() <= MAX_DESCENDANTS && in_time() {
        let parent = found[next];
        next += 1;
        let children = children(parent, usize::MAX).unwrap_or_else(|| {
            // A kernel without CONFIG_PROC_CHILDREN: read the parent of every process instead.
            parents.get_or_insert_with(children_by_parent).get(&parent).cloned().unwrap_or_default()
        });
        for child in children {
            if child != std::process::id() as i32 && !skip.contains(&child) && !found.contains(&child) {
                found.push(child);
            }
        }
    }
    let all = next == found.len();
    (found.split_off(1), all)
}

/// Pids of the children of a process, ascending: those that its first `most_threads` threads
/// started. `None` if the kernel does not list them.
#[must_use]
pub fn children(pid: i32, most_threads: usize) -> Option<Vec<i32>> {
    let mut children = Vec::new();
    for tid in threads(pid).unwrap_or_default().into_iter().take(most_threads) {
        match fs::read_to_string(format!("/proc/{pid}/task/{tid}/children")) {
            Ok(text) => children.extend(text.split_whitespace().filter_map(|child| child.parse::<i32>().ok())),
            // The folder of a thread that has just ended is gone. On a kernel that does not list
            // children, the folder exists.
            Err(_) if std::path::Path::new(&format!("/proc/{pid}/task/{tid}")).exists() => return None,
            Err(_) => {}
        }
    }
    children.sort_unstable();
    Some(children)
}

fn children_by_parent() -> HashMap<i32, Vec<i32>> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for pid in pids() {
        if let Ok(stat) = stat(pid) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    children
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn mappings_with_odd_paths() {
        let line = "7f00-7f10 r-xp 00001000 08:1f 42                 /a b/c (deleted)";
        let mapping = parse_mapping(line).unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.offset, mapping.inode), (0x7f00, 0x7f10, 0x1000, 42));
        assert!(mapping.executable && mapping.readable);
        assert_eq!(mapping.device, (8, 31));
        assert_eq!(mapping.path, "/a b/c (deleted)");
        assert_eq!(parse_mapping("7f00-7f10 ---p 00000000 00:00 0 ").unwrap().path, "");
    }

    #[test]
    fn parses_mounts() {
        let line = "36 35 0:42 /a /mnt/b rw,noatime master:1 shared:2 - nfs4 host:/a rw,vers=4.2";
        let parsed = |line| parse_mount(line).map(|mount| (mount.device, mount.file_system_type));
        assert_eq!(parsed(line), Some(((0, 42), "nfs4")));
        let line = "36 35 254:0 / / rw - ext4 /dev/vda rw";
        assert_eq!(parse_mount(line), Some(Mount { id: "36", device: (254, 0), file_system_type: "ext4" }));
        assert_eq!(parse_mount(""), None);
    }

    #[test]
    fn parses_names_with_parentheses() {
        let text = format!("12 (a) b) S 7 {}", (3..52).map(|n| n.to_string()).collect::<Vec<_>>().join(" "));
        let stat = parse_stat(&text).unwrap();
        assert_eq!((stat.name.as_str(), stat.state, stat.parent), ("a) b", 'S', 7));
    }

    #[test]
    fn reads_this_process() {
        let pid = std::process::id() as i32;
        let status = status(pid, pid).unwrap();
        assert!(status.switches > 0 && status.namespaced_tid == pid);
        assert_eq!(pid_of_thread(nix::unistd::gettid().as_raw()), Some(pid));
        assert_eq!(effective_credentials(pid).unwrap().uid, nix::unistd::geteuid().as_raw());
        assert!(maps(pid, pid).unwrap().iter().any(|mapping| mapping.path == "[vdso]"));
        assert!(threads(pid).unwrap().contains(&pid));
        assert!(stat(i32::MAX).unwrap_err().is_gone());
    }

    #[test]
    fn schedule_shows_that_a_thread_ran() {
        let (pid, tid) = (std::process::id() as i32, nix::unistd::gettid().as_raw());
        let (wake, sleep) = std::sync::mpsc::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        let sleeper = std::thread::spawn(move || {
            sender.send(nix::unistd::gettid().as_raw()).unwrap();
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

    #[test]
    fn parses_kernel_stacks() {
        let text = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] do_futex+0x1/0x2\n";
        assert_eq!(parse_kernel_stack(text), ["futex_wait_queue", "do_futex"]);
    }
}
