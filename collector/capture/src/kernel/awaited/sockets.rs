//! The other end of a socket: of a TCP connection, by its addresses, and of a Unix socket, by the
//! inode that the kernel reports over netlink.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use xpu_timer_proto::{
    LISTENS, REPLIES,
    server::{Awaited, AwaitedKind, Holder},
};

use super::search::{Operation, Search, absolute};
use crate::{
    kernel::sock_diag::{self, UnixSocket},
    memory,
};

/// Number of sockets that the name of an expected reply contains.
const MAX_PATHS: usize = 2;

/// The object that a call on a connected or a listening socket waits for.
pub(super) fn peer(search: &Search<'_>, inode: u64, operation: Operation) -> Awaited {
    let tcp = search.tcp_sockets().and_then(|table| Some((table, table.socket(inode)?)));
    let Some((table, own)) = tcp else {
        // The kernel finds a Unix socket by its inode. It looks at all of them.
        let unix = u32::try_from(inode).ok().and_then(|inode| sock_diag::unix_socket(inode, search.deadline));
        let found = |found| unix_peer(search, inode, &found, operation);
        return unix.map_or_else(|| socket(String::new(), Vec::new()), found);
    };
    if own.listens() {
        return socket(format!("{LISTENS} to {}", own.local), Vec::new());
    }
    // A peer that has not accepted the connection has no descriptor for it yet.
    let owner = table.other_end(own).map(|inode| owners(search, inode)).filter(|owners| !owners.is_empty());
    let is_here = own.remote.ip().is_loopback() || own.remote.ip() == own.local.ip();
    let waiting = || if is_here { listeners(search, own.remote) } else { Vec::new() };
    socket(own.remote.to_string(), owner.unwrap_or_else(waiting))
}

/// The object that a call waits for when it connects a socket to the address at `address`, or sends
/// to it.
pub(super) fn connection(search: &Search<'_>, address: u64, length: u64) -> Option<Awaited> {
    let length = usize::try_from(length).ok()?.min(size_of::<libc::sockaddr_un>());
    let bytes = memory::read_exact(search.pid, address, length).ok()?;
    let family = i32::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
    if family == libc::AF_UNIX {
        let path: Vec<u8> = bytes[2..].iter().copied().take_while(|byte| *byte != 0).collect();
        let path = String::from_utf8_lossy(&path).into_owned();
        // The kernel lists the path that the receiver gave, which may be relative as well.
        let receiver = unix_receiver(search, &path);
        let path = if path.is_empty() { path } else { absolute(search.pid, libc::AT_FDCWD, path) };
        let receiver = receiver.or_else(|| unix_receiver(search, &path));
        return Some(socket(path, receiver.map_or_else(Vec::new, |inode| owners(search, inode))));
    }
    let remote = ip_address(family, &bytes)?;
    Some(socket(remote.to_string(), listeners(search, remote)))
}

fn socket(name: String, holders: Vec<Holder>) -> Awaited {
    Awaited { kind: AwaitedKind::Socket.into(), object: String::new(), name, holders }
}

/// The processes that have a socket open.
fn owners(search: &Search<'_>, inode: u64) -> Vec<Holder> {
    search.holders(owner_pids(search, inode))
}

fn owner_pids(search: &Search<'_>, inode: u64) -> impl Iterator<Item = i32> {
    let (owners, _) = search.tables.open_files.of(&format!("socket:[{inode}]"), search.deadline);
    owners.iter().map(|owner| owner.pid)
}

/// The processes of this machine that listen at an address.
fn listeners(search: &Search<'_>, address: SocketAddr) -> Vec<Holder> {
    let listener = search.tcp_sockets().and_then(|table| table.listener(address));
    listener.map_or_else(Vec::new, |inode| owners(search, inode))
}

fn ip_address(family: i32, bytes: &[u8]) -> Option<SocketAddr> {
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    match family {
        libc::AF_INET => {
            let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(SocketAddr::new(Ipv4Addr::from(ip).into(), port))
        }
        libc::AF_INET6 => {
            let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            Some(SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), port))
        }
        _ => None,
    }
}

/// The other end of a Unix socket.
fn unix_peer(search: &Search<'_>, inode: u64, found: &UnixSocket, operation: Operation) -> Awaited {
    match found.peer {
        Some(peer) => {
            let mut holders = owners(search, peer.into());
            let (own, _) = search.tables.open_files.of(&format!("socket:[{inode}]"), search.deadline);
            for holder in &mut holders {
                holder.both_ends = own.iter().any(|descriptor| descriptor.pid == holder.pid);
            }
            // The process may have both ends, and may have left one of them to a child.
            if holders.iter().any(|holder| holder.pid != search.pid) {
                holders.retain(|holder| holder.pid != search.pid);
            }
            socket(name(found, search), holders)
        }
        None if !found.path.is_empty() => {
            let replies = (operation == Operation::Receive).then(|| reply(search, inode)).flatten();
            replies.unwrap_or_else(|| socket(format!("{LISTENS} to {}", found.path), Vec::new()))
        }
        None => socket(String::new(), Vec::new()),
    }
}

/// The path of the other end of a Unix socket, or of this one; empty if neither has one.
fn name(socket: &UnixSocket, search: &Search<'_>) -> String {
    let of_peer = socket.peer.and_then(|peer| sock_diag::unix_socket(peer, search.deadline)).map(|peer| peer.path);
    of_peer.filter(|path| !path.is_empty()).unwrap_or_else(|| socket.path.clone())
}

/// The object that a process waits for when it receives on an unconnected datagram socket and does
/// not ask for the sender: a reply. The kernel does not know the sender, so every relative counts
/// that also receives datagrams at a path. `None` if there is none.
fn reply(search: &Search<'_>, inode: u64) -> Option<Awaited> {
    let family: Vec<i32> = search.family().collect();
    let is_other = |(receiver, _): &(u64, String)| *receiver != inode;
    let (mut paths, mut pids) = (Vec::new(), Vec::new());
    for (receiver, path) in datagram_receivers(search).into_iter().filter(is_other) {
        let known = pids.len();
        pids.extend(owner_pids(search, receiver).filter(|pid| family.contains(pid)));
        paths.extend((pids.len() > known).then_some(path));
    }
    paths.truncate(MAX_PATHS);
    (!pids.is_empty()).then(|| socket(format!("{REPLIES} {}", paths.join(" or ")), search.holders(pids)))
}

/// The unconnected datagram sockets that have a path, with their inodes.
fn datagram_receivers(search: &Search<'_>) -> Vec<(u64, String)> {
    unix_table(search.pid, |fields| {
        let [_, _, _, _, DATAGRAM, UNCONNECTED, inode, path] = fields else { return None };
        Some((inode.parse().ok()?, (*path).to_owned()))
    })
}

/// Type and state of a socket in `/proc/net/unix`.
const DATAGRAM: &str = "0002";
const UNCONNECTED: &str = "01";

/// Selects lines of `/proc/net/unix`: Num RefCount Protocol Flags Type St Inode Path.
fn unix_table<T>(pid: i32, select: impl Fn(&[&str]) -> Option<T>) -> Vec<T> {
    let table = fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap_or_default();
    table.lines().filter_map(|line| select(&line.split_whitespace().collect::<Vec<_>>())).collect()
}

/// The inode of the socket that listens or receives datagrams at a path.
fn unix_receiver(search: &Search<'_>, path: &str) -> Option<u64> {
    // A listening socket has the flag 0x10000.
    let found = unix_table(search.pid, |fields| {
        let receives = fields.get(3) == Some(&"00010000") || fields.get(4) == Some(&DATAGRAM);
        (receives && fields.get(7) == Some(&path)).then(|| fields[6].parse().ok())?
    });
    found.into_iter().next()
}
