//! Queries the kernel about TCP sockets of this network namespace, over netlink; see sock_diag(7).
//! With them, it counts the bytes that a process moved over its TCP connections.

use std::{
    collections::{HashMap, HashSet},
    fs, io, net,
    sync::OnceLock,
    time::{Duration, Instant},
};

use xpu_timer_proto::{
    procfs::{MAX_FILES, SOCKET, inode_of},
    server::TcpConnection,
};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    unix::{self, UnixRequest, nlas::UnixDiagName},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};

pub use netlink_packet_sock_diag::{
    constants::{AF_INET, AF_INET6, IPPROTO_TCP},
    inet::{ExtensionFlags, InetRequest, InetResponse, InetResponseHeader, SocketId, StateFlags, nlas::Nla},
};

/// Buffer size of one read.
const BUFFER_BYTES: usize = 1 << 16;

/// How many sockets to query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The socket with the addresses of the request, in any state.
    One,
    /// All sockets that the request selects.
    All,
}

/// Passes each socket that the kernel reports to `each`.
///
/// # Errors The kernel does not answer over netlink, has no such socket, or the deadline passes.
/// `each` may have received some sockets before the error.
pub fn query(
    request: InetRequest,
    scope: Scope,
    deadline: Instant,
    mut each: impl FnMut(&InetResponse),
) -> io::Result<()> {
    exchange(SockDiagMessage::InetRequest(request), scope, deadline, |message| match message {
        SockDiagMessage::InetResponse(response) => {
            each(&response);
            true
        }
        _ => false,
    })
}

/// Sends a request, and passes each answer to `each`, which returns whether it is of the right
/// kind.
fn exchange(
    request: SockDiagMessage,
    scope: Scope,
    deadline: Instant,
    mut each: impl FnMut(SockDiagMessage) -> bool,
) -> io::Result<()> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&message(request, scope), 0)?;
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    while Instant::now() < deadline {
        buffer.clear();
        // The kernel produces each part of its answer during a send or a receive on the socket, so
        // there is nothing to wait for.
        let received = socket.recv(&mut buffer, libc::MSG_DONTWAIT)?;
        let mut rest = &buffer[..received.min(buffer.len())];
        while !rest.is_empty() {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
            match message.payload {
                NetlinkPayload::InnerMessage(answer) => {
                    if !each(answer) {
                        return Err(io::Error::other("an answer to another question"));
                    }
                    if scope == Scope::One {
                        return Ok(());
                    }
                }
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                other => return Err(io::Error::other(format!("{other:?}"))),
            }
            // Messages are aligned to four bytes.
            let length = (message.header.length as usize).next_multiple_of(4);
            rest = rest.get(length.max(1)..).unwrap_or_default();
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn message(request: SockDiagMessage, scope: Scope) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = match scope {
        Scope::One => NLM_F_REQUEST,
        Scope::All => NLM_F_REQUEST | NLM_F_DUMP,
    };
    let mut message = NetlinkMessage::new(header, request.into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// A Unix socket.
#[derive(Debug, Default)]
pub(crate) struct UnixSocket {
    /// Inode of its other end, if it is connected. A connection that the listener has not accepted
    /// has no inode of its own, so this is the listener.
    pub peer: Option<u32>,
    /// The path that it was bound to; empty if there is none.
    pub path: String,
}

/// The Unix socket with this inode, in this network namespace.
pub(crate) fn unix_socket(inode: u32, deadline: Instant) -> Option<UnixSocket> {
    let request = UnixRequest {
        state_flags: unix::StateFlags::all(),
        inode,
        show_flags: unix::ShowFlags::PEER | unix::ShowFlags::NAME,
        cookie: [0xff; 8],
    };
    let mut found = None;
    let answer = |message| {
        let SockDiagMessage::UnixResponse(response) = message else { return false };
        let path = match response.name() {
            Some(UnixDiagName::Pathname(path)) => path.to_string_lossy().into_owned(),
            _ => String::new(),
        };
        found = Some(UnixSocket { peer: response.peer(), path });
        true
    };
    exchange(SockDiagMessage::UnixRequest(request), Scope::One, deadline, answer).ok()?;
    let mut found = found?;
    if found.peer == Some(0) {
        found.peer = listener_of(inode, deadline);
    }
    Some(found)
}

/// The listening Unix socket that has this connection in its queue.
fn listener_of(connection: u32, deadline: Instant) -> Option<u32> {
    let request = UnixRequest {
        state_flags: unix::StateFlags::LISTEN,
        inode: 0,
        show_flags: unix::ShowFlags::ICONS,
        cookie: [0xff; 8],
    };
    let mut found = None;
    let answer = |message| {
        let SockDiagMessage::UnixResponse(response) = message else { return false };
        if response.pending_connections().is_some_and(|pending| pending.contains(&connection)) {
            found = Some(response.header.inode);
        }
        true
    };
    exchange(SockDiagMessage::UnixRequest(request), Scope::All, deadline, answer).ok()?;
    found
}

/// Time limit to read the connections of one address family: a busy node has a hundred thousand.
const TIMEOUT: Duration = Duration::from_millis(200);
/// Offset of `tcpi_bytes_acked` in `struct tcp_info` of linux/tcp.h (since Linux 4.1).
/// `tcpi_bytes_received` follows it.
const BYTES_ACKED: usize = 120;

/// All TCP connections of the collector's network namespace, read once for all processes of a
/// capture. `/proc/PID/io` counts `read` and `write`, but not `recv` and `send`, which most
/// programs use. The kernel reports the bytes of each connection.
#[derive(Default)]
pub(crate) struct TcpConnections {
    // By the inode of the socket. `None` if not all connections could be read.
    by_inode: OnceLock<Option<HashMap<u32, Connection>>>,
}

/// A TCP connection, and the bytes that its process has moved.
struct Connection {
    local: net::SocketAddr,
    remote: net::SocketAddr,
    bytes: u64,
}

impl Connection {
    fn of(response: &InetResponse) -> Self {
        let id = &response.header.socket_id;
        Connection {
            local: net::SocketAddr::new(id.source_address.to_canonical(), id.source_port),
            remote: net::SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
            bytes: response.nlas.iter().map(|attribute| bytes_moved(&response.header, attribute)).sum(),
        }
    }

    /// Whether its other end is on another machine.
    fn leaves_machine(&self) -> bool {
        !self.remote.ip().is_loopback() && self.remote.ip() != self.local.ip()
    }
}

/// Number of connections that are reported of one process.
const MAX_CONNECTIONS: usize = 32;

impl TcpConnections {
    /// The open connections of a process. `None` if the process is in another network namespace, or
    /// if not all connections could be read: a partial sum would look like progress in the next
    /// sample.
    pub fn of(&self, pid: i32, deadline: Instant) -> Option<ProcessConnections> {
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        if namespace("self")? != namespace(&pid.to_string())? {
            return None;
        }
        let socket_inodes = socket_inodes(pid);
        if socket_inodes.is_empty() {
            return Some(ProcessConnections::default());
        }
        let by_inode = self.by_inode.get_or_init(|| read(deadline).ok()).as_ref()?;
        let open: Vec<&Connection> = socket_inodes.iter().filter_map(|inode| by_inode.get(inode)).collect();
        let bytes = open.iter().map(|connection| connection.bytes).sum();
        let mut remote: Vec<TcpConnection> = open
            .into_iter()
            .filter(|connection| connection.leaves_machine())
            .map(|connection| TcpConnection {
                local: connection.local.to_string(),
                remote: connection.remote.to_string(),
            })
            .collect();
        remote.sort_by(|one, other| (&one.remote, &one.local).cmp(&(&other.remote, &other.local)));
        remote.truncate(MAX_CONNECTIONS);
        Some(ProcessConnections { bytes, remote })
    }
}

/// The open TCP connections of a process.
#[derive(Debug, Default)]
pub(crate) struct ProcessConnections {
    /// Bytes that it has read from and written to them. Bytes that the kernel has received but the
    /// process has not read do not count, because a peer may send to a process that makes no
    /// progress.
    pub bytes: u64,
    /// Those to other machines.
    pub remote: Vec<TcpConnection>,
}

/// Those of some processes that have a TCP connection to another machine.
#[must_use]
pub fn connected_to_other_machines(pids: impl IntoIterator<Item = i32>, deadline: Instant) -> Vec<i32> {
    let connections = TcpConnections::default();
    let is_connected = |pid: &i32| connections.of(*pid, deadline).is_some_and(|open| !open.remote.is_empty());
    pids.into_iter().filter(is_connected).collect()
}

/// Inodes of the sockets that a process has open.
fn socket_inodes(pid: i32) -> HashSet<u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten().take(MAX_FILES);
    let socket = |entry: fs::DirEntry| inode_of(fs::read_link(entry.path()).ok()?.to_str()?, SOCKET)?.try_into().ok();
    entries.filter_map(socket).collect()
}

fn read(deadline: Instant) -> io::Result<HashMap<u32, Connection>> {
    let mut by_inode = HashMap::new();
    for family in [AF_INET, AF_INET6] {
        read_family(family, deadline, &mut by_inode)?;
    }
    Ok(by_inode)
}

fn read_family(family: u8, deadline: Instant, by_inode: &mut HashMap<u32, Connection>) -> io::Result<()> {
    let deadline = deadline.min(Instant::now() + TIMEOUT);
    let request = InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::INFO,
        states: StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT | StateFlags::FIN_WAIT1 | StateFlags::FIN_WAIT2,
        socket_id: if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() },
    };
    query(request, Scope::All, deadline, |response| {
        by_inode.insert(response.header.inode, Connection::of(response));
    })
}

/// Bytes that the process has written, acknowledged or still queued, and the received bytes that it
/// has read.
fn bytes_moved(connection: &InetResponseHeader, attribute: &Nla) -> u64 {
    let Nla::TcpInfo(info) = attribute else { return 0 };
    let word = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    let Some((acked, received)) = word(BYTES_ACKED).zip(word(BYTES_ACKED + 8)) else { return 0 };
    let written = acked.saturating_add(connection.send_queue.into());
    written.saturating_add(received.saturating_sub(connection.recv_queue.into()))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn bytes_count_when_the_process_has_read_or_written_them() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(server) = TcpListener::bind(host) else {
                assert_eq!(host, "[::1]:0", "a machine without IPv6");
                continue;
            };
            let own = std::process::id().cast_signed();
            let mut client = TcpStream::connect(server.local_addr().expect("an address")).expect("it connects");
            let (mut held, _) = server.accept().expect("it accepts");
            let look = || {
                TcpConnections::default()
                    .of(own, Instant::now() + Duration::from_secs(60))
                    .expect("the kernel reports them")
                    .bytes
            };
            const SENT: u64 = 10_000;
            let before = look();
            client.write_all(&[7; SENT as usize]).expect("the kernel queues them");
            let written = look() - before;
            held.read_exact(&mut [0; SENT as usize]).expect("all of them");
            let read = look() - before;
            // Other tests of this process open and close connections too, with less traffic.
            let about = |bytes: u64, wanted: u64| bytes.abs_diff(wanted) < SENT / 10;
            assert!(about(written, SENT), "{written} bytes when all were written and none was read");
            assert!(about(read, 2 * SENT), "{read} bytes when all were read");
        }
        assert!(TcpConnections::default().of(1 << 22, Instant::now()).is_none(), "no such process");
    }
}
