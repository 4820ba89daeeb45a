//! Finds what the system call of a blocked thread waits for: a file, the other end of a pipe or a
//! socket, the holder of a lock. It reads only the kernel's tables in `/proc`. It never touches the
//! file itself, because the file may be on a file system that does not answer.

use std::{
    collections::HashSet,
    fs,
    io::ErrorKind,
    time::{Duration, Instant},
};

use xpu_timer_proto::{
    procfs::{self, LISTEN, MAX_FILES, SOCKET, Syscall, descendants_until, find_tcp_socket, inode_of},
    server::{Awaited, AwaitedKind, Holder},
};

/// Time limit of the search. The stacks of the process are already captured and must not be late
/// because of it.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Maximum number of holders in the result.
const MAX_HOLDERS: usize = 4;
/// Maximum number of processes that are searched for the other end of a pipe.
const MAX_PROCESSES: usize = 512;
/// Access mode in the `flags` of a descriptor.
const ACCESS_MODE: u32 = 0o3;
const READ_ONLY: u32 = 0;
const WRITE_ONLY: u32 = 1;
const READ_WRITE: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Read,
    Write,
    Lock,
    Connect,
}

/// What a thread waits for that sleeps in a system call. `None` if the call is not about exactly
/// one descriptor. The holders and the peer are missing if they are not found in time.
pub(crate) fn of_thread(pid: i32, tid: i32, deadline: Instant) -> Option<Awaited> {
    let deadline = deadline.min(Instant::now() + TIMEOUT);
    let Ok(Syscall::Blocked { number, arguments: Some(arguments), .. }) = procfs::syscall(pid, tid) else {
        return None;
    };
    let operation = operation_of(number, arguments[1])?;
    let descriptor = i32::try_from(arguments[0]).ok()?;
    // The kernel holds the names that the link is made of, so reading it involves no file system.
    let link = fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).ok()?;
    let link = link.to_string_lossy();
    if let Some(inode) = inode_of(&link, SOCKET) {
        let name = tcp_peer(pid, inode, deadline).unwrap_or_default();
        return Some(Awaited { kind: AwaitedKind::Socket.into(), name, ..Awaited::default() });
    }
    if operation == Operation::Lock {
        let position = lock_table_id(pid, descriptor)?;
        return Some(Awaited {
            kind: AwaitedKind::Lock.into(),
            name: link.into_owned(),
            holders: lock_holders(pid, &position, deadline),
        });
    }
    if inode_of(&link, "pipe:[").is_some() {
        let holders = pipe_peers(pid, &link, operation, deadline);
        // A thread that reads its standard input waits for a person, or for a program that replaces
        // one.
        let stdin = descriptor == libc::STDIN_FILENO && operation == Operation::Read;
        let (kind, name) = if stdin { (AwaitedKind::File, "/dev/stdin") } else { (AwaitedKind::Pipe, "") };
        return Some(Awaited { kind: kind.into(), name: name.into(), holders });
    }
    (link.starts_with('/')).then(|| Awaited {
        kind: AwaitedKind::File.into(),
        name: link.into_owned(),
        ..Awaited::default()
    })
}

fn operation_of(number: i64, second: u64) -> Option<Operation> {
    match number {
        libc::SYS_read | libc::SYS_readv | libc::SYS_pread64 | libc::SYS_recvfrom | libc::SYS_recvmsg => {
            Some(Operation::Read)
        }
        libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 | libc::SYS_sendto | libc::SYS_sendmsg => {
            Some(Operation::Write)
        }
        libc::SYS_fsync | libc::SYS_fdatasync => Some(Operation::Write),
        libc::SYS_connect | libc::SYS_accept | libc::SYS_accept4 => Some(Operation::Connect),
        libc::SYS_flock => Some(Operation::Lock),
        libc::SYS_fcntl => {
            let command = i32::try_from(second).unwrap_or(0);
            matches!(command, libc::F_SETLKW | libc::F_OFD_SETLKW).then_some(Operation::Lock)
        }
        _ => None,
    }
}

/// Finds the processes that have the other end of a pipe open. It searches only relatives of the
/// process, because a pipe is inherited. The process itself is the result only if all relatives
/// could be searched and none has that end: then the process waits for something that only it can
/// do.
fn pipe_peers(pid: i32, link: &str, operation: Operation, deadline: Instant) -> Vec<Holder> {
    let wanted = if operation == Operation::Read { WRITE_ONLY } else { READ_ONLY };
    let (descendants, mut complete) = descendants_until(pid, &HashSet::new(), Some(deadline));
    // The pid of a parent in another namespace is 0.
    let parent = procfs::stat(pid).map(|stat| stat.parent).ok().filter(|parent| *parent > 0);
    let siblings = parent.map(|parent| descendants_until(parent, &HashSet::from([pid]), Some(deadline)));
    let (siblings, all_siblings) = siblings.unwrap_or_default();
    complete &= all_siblings;
    let mut holders = Vec::new();
    for (count, other) in descendants.iter().copied().chain(parent).chain(siblings).enumerate() {
        if count == MAX_PROCESSES || holders.len() == MAX_HOLDERS || Instant::now() >= deadline {
            complete = false;
            break;
        }
        match has_open(other, link, wanted, deadline) {
            Some(true) => holders.push(holder(other, &descendants)),
            Some(false) => {}
            None => complete = false,
        }
    }
    if holders.is_empty() && complete && has_open(pid, link, wanted, deadline) == Some(true) {
        holders.push(holder(pid, &descendants));
    }
    holders
}

/// Whether a process has this file open with the `wanted` access. `None` if not all of its
/// descriptors could be checked.
fn has_open(pid: i32, link: &str, wanted: u32, deadline: Instant) -> Option<bool> {
    let entries = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Some(false),
        Err(_) => return None,
    };
    for (count, entry) in entries.flatten().enumerate() {
        if count == MAX_FILES || Instant::now() >= deadline {
            return None;
        }
        if fs::read_link(entry.path()).is_ok_and(|found| found.as_os_str() == link)
            && entry.file_name().to_str().and_then(|name| name.parse().ok()).is_some_and(|descriptor| {
                flags(pid, descriptor).is_some_and(|flags| [wanted, READ_WRITE].contains(&(flags & ACCESS_MODE)))
            })
        {
            return Some(true);
        }
    }
    Some(false)
}

/// The value of one line of `/proc/PID/fdinfo/N`.
fn fdinfo(pid: i32, descriptor: i32, key: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
    procfs::field(&text, key).map(str::to_owned)
}

fn flags(pid: i32, descriptor: i32) -> Option<u32> {
    u32::from_str_radix(&fdinfo(pid, descriptor, "flags:")?, 8).ok()
}

/// Device and inode of an open file, in the format of `/proc/locks`. `fdinfo` has the inode and the
/// mount; the mount has the device.
fn lock_table_id(pid: i32, descriptor: i32) -> Option<String> {
    let inode = fdinfo(pid, descriptor, "ino:")?;
    let mount = fdinfo(pid, descriptor, "mnt_id:")?;
    let (major, minor) = procfs::device_of_mount(pid, &mount)?;
    Some(format!("{major:02x}:{minor:02x}:{inode}"))
}

/// The processes that hold the lock on a file.
fn lock_holders(pid: i32, place: &str, deadline: Instant) -> Vec<Holder> {
    let text = fs::read_to_string("/proc/locks").unwrap_or_default();
    let (descendants, _) = descendants_until(pid, &HashSet::new(), Some(deadline));
    parse_holders(&text, place).into_iter().take(MAX_HOLDERS).map(|pid| holder(pid, &descendants)).collect()
}

/// The processes that hold a lock on this file. Lines with an arrow are processes that wait for it.
/// A lock of an open file description has no process (-1).
fn parse_holders(locks: &str, place: &str) -> Vec<i32> {
    let mut found: Vec<i32> = locks
        .lines()
        .filter(|line| !line.contains("->"))
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            (*fields.get(5)? == place).then(|| fields[4].parse().ok())?
        })
        .filter(|pid| *pid > 0)
        .collect();
    found.dedup();
    found
}

fn holder(pid: i32, descendants: &[i32]) -> Holder {
    Holder { pid, name: procfs::name(pid), child: descendants.contains(&pid) }
}

/// The address of the other end of a TCP socket, from the table of the process's network namespace.
fn tcp_peer(pid: i32, inode: u64, deadline: Instant) -> Option<String> {
    find_tcp_socket(pid, Some(deadline), |socket| {
        if socket.inode != inode {
            return None;
        }
        let (local, remote) = (socket.local()?, socket.remote()?);
        // A listening socket has no peer.
        Some(if socket.state == LISTEN { format!("anybody who connects to {local}") } else { remote.to_string() })
    })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
        os::fd::AsRawFd,
    };

    use super::*;

    /// Runs something that blocks forever in a thread, and waits until the kernel reports what it
    /// waits for.
    fn awaited(block: impl FnOnce() + Send + 'static) -> Awaited {
        awaited_when(|_| true, block)
    }

    /// Like [`awaited`], but waits until the result satisfies `accept`.
    fn awaited_when(accept: impl Fn(&Awaited) -> bool, block: impl FnOnce() + Send + 'static) -> Awaited {
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            sender.send(nix::unistd::gettid().as_raw()).expect("the test listens");
            block();
        });
        let tid = receiver.recv().expect("the thread has begun");
        let start = Instant::now();
        loop {
            let own = std::process::id().cast_signed();
            if let Some(late) = of_thread(own, tid, start) {
                assert!(late.holders.is_empty() || late.kind() == AwaitedKind::Lock, "there was no time to look");
            }
            let found = of_thread(own, tid, Instant::now() + Duration::from_secs(60));
            if let Some(awaited) = found.filter(&accept) {
                return awaited;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "the thread blocks in no known call");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn finds_the_child_at_the_other_end_of_a_pipe() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("sleep starts");
        let mut output = child.stdout.take().expect("a pipe");
        let found = awaited(move || drop(output.read(&mut [0])));
        let pid = child.id().cast_signed();
        child.kill().and_then(|()| child.wait()).expect("the child ends");
        assert_eq!(found.kind(), AwaitedKind::Pipe);
        let other: Vec<(i32, &str, bool)> =
            found.holders.iter().map(|holder| (holder.pid, &*holder.name, holder.child)).collect();
        assert_eq!(other, [(pid, "sleep", true)]);
    }

    #[test]
    fn process_alone_holds_both_ends_of_a_pipe() {
        let (mut output, input) = std::io::pipe().expect("a pipe");
        // Children of other tests have the pipe open for a moment, until they execute another
        // program.
        let own = std::process::id().cast_signed();
        let alone = move |found: &Awaited| found.holders.iter().map(|holder| holder.pid).eq([own]);
        let found = awaited_when(alone, move || drop(output.read(&mut [0])));
        drop(input);
        assert_eq!(found.kind(), AwaitedKind::Pipe);
    }

    #[test]
    fn finds_the_peer_of_a_socket() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = server.local_addr().expect("an address");
        let mut client = TcpStream::connect(address).expect("it connects");
        let (mut held, _) = server.accept().expect("it accepts");
        let found = awaited(move || drop(client.read(&mut [0])));
        held.write_all(b"!").expect("the thread may end");
        assert_eq!((found.kind(), &*found.name), (AwaitedKind::Socket, &*address.to_string()));
    }

    #[test]
    fn finds_the_holder_of_a_lock() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let path = file.path().to_owned();
        let held = fs::File::open(&path).expect("the file");
        held.lock().expect("nobody else has it");
        let own = std::process::id().cast_signed();
        assert!(lock_table_id(own, held.as_raw_fd()).is_some());
        let wanted = path.clone();
        let found = awaited(move || fs::File::open(wanted).expect("the file").lock().expect("it is free at last"));
        drop(held);
        assert_eq!((found.kind(), found.name), (AwaitedKind::Lock, path.display().to_string()));
        assert_eq!(found.holders.iter().map(|holder| holder.pid).collect::<Vec<_>>(), [own]);
    }

    #[test]
    fn parses_the_kernels_tables() {
        let locks = "1: FLOCK  ADVISORY  WRITE 77 fe:00:123 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 78 fe:00:123 0 EOF\n\
                     2: POSIX  ADVISORY  READ  79 fe:00:124 0 EOF\n3: OFDLCK ADVISORY  WRITE -1 fe:00:123 0 EOF\n";
        assert_eq!(parse_holders(locks, "fe:00:123"), [77]);
        assert_eq!(parse_holders(locks, "fe:00:125"), [] as [i32; 0]);
    }
}
