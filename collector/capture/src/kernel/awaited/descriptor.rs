//! The object that a call on one descriptor waits for: a file, a pipe, an event, a message queue,
//! or a lock on a file.

use std::fs;

use xpu_timer_proto::{
    procfs::{self, SOCKET, inode_of},
    server::{Awaited, AwaitedKind},
};

use super::{
    search::{Operation, Search},
    sockets,
};
use crate::kernel::open_files::{self, Descriptor};

const EVENT: &str = "anon_inode:[eventfd]";

/// The object that an operation on a descriptor waits for.
pub(super) fn awaited(search: &Search<'_>, descriptor: Descriptor, operation: Operation) -> Option<Awaited> {
    let link = open_files::link_of(descriptor)?;
    if let Some(inode) = inode_of(&link, SOCKET) {
        return Some(sockets::peer(search, inode, operation));
    }
    if operation == Operation::Lock {
        let holders = search.holders(lock_holders(search, descriptor, &link)?);
        return Some(Awaited { kind: AwaitedKind::Lock.into(), object: link.clone(), name: link, holders });
    }
    if link == EVENT {
        let (id, holders) = event_holders(search, descriptor)?;
        let object = format!("{EVENT}{id}");
        return Some(Awaited {
            kind: AwaitedKind::Event.into(),
            object,
            holders: search.holders(holders),
            name: String::new(),
        });
    }
    // The kernel prints only the path of a named pipe. It sleeps in a function for pipes.
    let is_pipe = inode_of(&link, "pipe:[").is_some();
    if is_pipe || search.wchan.contains("pipe_") {
        let holders = search.holders(pipe_peers(search, &link, operation));
        // A thread that reads its standard input waits for a person, or for a program that replaces
        // one.
        let stdin = descriptor.number == libc::STDIN_FILENO && operation == Operation::Read;
        let (kind, name) = match (stdin, is_pipe) {
            (true, _) => (AwaitedKind::File, "/dev/stdin"),
            (false, true) => (AwaitedKind::Pipe, ""),
            (false, false) => (AwaitedKind::Pipe, &*link),
        };
        return Some(Awaited { kind: kind.into(), name: name.into(), holders, object: link });
    }
    if search.wchan.contains("mq_") || search.wchan.starts_with("wq_sleep") {
        let others = others(search, &link).0;
        let holders = search.holders(others.iter().map(|other| other.pid));
        return Some(Awaited { kind: AwaitedKind::MessageQueue.into(), name: link.clone(), object: link, holders });
    }
    (link.starts_with('/')).then(|| Awaited { kind: AwaitedKind::File.into(), name: link, ..Awaited::default() })
}

/// The descriptors of other processes with this link, and whether there can be no others.
fn others(search: &Search<'_>, link: &str) -> (Vec<Descriptor>, bool) {
    let (all, complete) = search.tables.open_files.of(link, search.deadline);
    (all.iter().copied().filter(|descriptor| descriptor.pid != search.pid).collect(), complete)
}

/// Finds the processes that have the other end of a pipe open. The process itself is the result
/// only if all processes could be searched and none has that end: then the process waits for
/// something that only it can do.
fn pipe_peers(search: &Search<'_>, link: &str, operation: Operation) -> Vec<i32> {
    let wanted = if operation == Operation::Read { libc::O_WRONLY } else { libc::O_RDONLY };
    let has_end = |descriptor: &Descriptor| {
        open_files::access_mode(*descriptor).is_some_and(|mode| [wanted, libc::O_RDWR].contains(&mode))
    };
    let (all, complete) = search.tables.open_files.of(link, search.deadline);
    let (own, others): (Vec<Descriptor>, Vec<Descriptor>) = all.iter().partition(|one| one.pid == search.pid);
    let mut pids: Vec<i32> = others.iter().filter(|other| has_end(other)).map(|other| other.pid).collect();
    pids.dedup();
    if pids.is_empty() && complete && own.iter().any(has_end) {
        pids.push(search.pid);
    }
    pids
}

/// The id of an event, and the other processes that have it.
fn event_holders(search: &Search<'_>, descriptor: Descriptor) -> Option<(String, Vec<i32>)> {
    let id = |descriptor| procfs::field(&open_files::info(descriptor), "eventfd-id:").map(str::to_owned);
    let wanted = id(descriptor)?;
    let holders = others(search, EVENT).0.into_iter().filter(|other| id(*other).as_ref() == Some(&wanted));
    Some((wanted.clone(), holders.map(|other| other.pid).collect()))
}

/// The processes that hold the lock on a file: by the kernel's table, and those that have a locked
/// descriptor open. The table names the process that took the lock, which may have ended and left
/// the descriptor to a child; it names none for a lock of an open file description.
fn lock_holders(search: &Search<'_>, descriptor: Descriptor, link: &str) -> Option<Vec<i32>> {
    let id = lock_table_id(descriptor)?;
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let mut holders = parse_holders(&locks, &id);
    let is_locked = |other: &Descriptor| {
        let info = open_files::info(*other);
        info.lines().any(|line| line.starts_with("lock:") && !line.contains("->"))
    };
    let of_others = others(search, link).0.into_iter().filter(is_locked).map(|other| other.pid);
    let of_others: Vec<i32> = of_others.collect();
    // A lock that the process itself took through another descriptor.
    holders.retain(|pid| procfs::stat(pid).is_ok() || of_others.is_empty());
    holders.extend(of_others);
    holders.sort_unstable();
    holders.dedup();
    Some(holders)
}

/// Device and inode of an open file, in the format of `/proc/locks`. `fdinfo` has the inode and the
/// mount; the mount has the device.
fn lock_table_id(descriptor: Descriptor) -> Option<String> {
    let info = open_files::info(descriptor);
    let inode = procfs::field(&info, "ino:")?;
    let (major, minor) = procfs::device_of_mount(descriptor.pid, procfs::field(&info, "mnt_id:")?)?;
    Some(format!("{major:02x}:{minor:02x}:{inode}"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_kernels_tables() {
        let locks = "1: FLOCK  ADVISORY  WRITE 77 fe:00:123 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 78 fe:00:123 0 EOF\n\
                     2: POSIX  ADVISORY  READ  79 fe:00:124 0 EOF\n3: OFDLCK ADVISORY  WRITE -1 fe:00:123 0 EOF\n";
        assert_eq!(parse_holders(locks, "fe:00:123"), [77]);
        assert_eq!(parse_holders(locks, "fe:00:125"), [] as [i32; 0]);
    }
}
