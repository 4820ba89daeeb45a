//! The TCP sockets of this machine, read once for all processes of a capture: the bytes that a
//! process moved over its connections, and the other ends of connections.
//!
//! The sockets of the collector's network namespace are read over netlink. Those of other
//! namespaces, and all where the kernel does not answer, are read from `/proc/PID/net/tcp`, which
//! takes longer and counts no bytes.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use xpu_timer_proto::{
    procfs::{LISTEN, SOCKET, find_tcp_socket, inode_of},
    server::TcpConnection,
};

use super::{
    open_files,
    sock_diag::{
        AF_INET, AF_INET6, ExtensionFlags, IPPROTO_TCP, InetRequest, InetResponse, InetResponseHeader, Nla, Scope,
        SocketId, StateFlags, query,
    },
};

/// Time limit to read the sockets of one namespace: a busy node has a hundred thousand.
const TIMEOUT: Duration = Duration::from_millis(400);
/// Offset of `tcpi_bytes_acked` in `struct tcp_info` of linux/tcp.h (since Linux 4.1).
/// `tcpi_bytes_received` follows it.
const BYTES_ACKED: usize = 120;
/// Number of connections that are reported of one process.
const MAX_CONNECTIONS: usize = 32;

/// The TCP sockets of the network namespaces, by the link in `/proc/PID/ns/net`.
#[derive(Default)]
pub(crate) struct TcpSockets {
    tables: Mutex<HashMap<PathBuf, Arc<Table>>>,
}

/// The TCP sockets of one network namespace that a process has open.
#[derive(Default)]
pub(crate) struct Table {
    by_inode: HashMap<u64, TcpSocket>,
    /// The inodes, by own address and address of the peer.
    by_ends: OnceLock<HashMap<[SocketAddr; 2], u64>>,
    /// All sockets were read, with their bytes.
    counts_bytes: bool,
}

/// A TCP socket, and the bytes that its process has moved over it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TcpSocket {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    listens: bool,
    /// `/proc/PID/io` counts `read` and `write`, but not `recv` and `send`, which most programs
    /// use. The kernel reports the bytes of each connection.
    bytes: u64,
}

impl TcpSocket {
    /// Whether it accepts connections. Then it has no peer.
    pub(crate) fn listens(&self) -> bool {
        self.listens
    }

    /// Whether its other end is on another machine.
    fn leaves_machine(&self) -> bool {
        !self.listens && !self.remote.ip().is_loopback() && self.remote.ip() != self.local.ip()
    }
}

impl TcpSockets {
    /// The sockets of the network namespace of a process. `None` if the process is gone or belongs
    /// to another user, or after the deadline. The first search reads the table for all, so its own
    /// deadline does not cut the table short.
    pub(crate) fn of_namespace(&self, pid: i32, deadline: Instant) -> Option<Arc<Table>> {
        if Instant::now() >= deadline {
            return None;
        }
        let own = namespace("self")?;
        let wanted = namespace(&pid.to_string())?;
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let is_own = wanted == own;
        let read = || {
            let deadline = Instant::now() + TIMEOUT;
            let over_netlink = if is_own { Table::over_netlink(deadline).ok() } else { None };
            Arc::new(over_netlink.unwrap_or_else(|| Table::from_proc(pid, deadline)))
        };
        Some(Arc::clone(tables.entry(wanted).or_insert_with(read)))
    }

    /// The open connections of a process. `None` if their bytes are not known: a partial sum would
    /// look like progress in the next sample.
    pub(crate) fn of_process(&self, pid: i32, deadline: Instant) -> Option<ProcessConnections> {
        let inodes = socket_inodes(pid);
        if inodes.is_empty() {
            return Some(ProcessConnections::default());
        }
        let table = self.of_namespace(pid, deadline).filter(|table| table.counts_bytes)?;
        let open: Vec<&TcpSocket> = inodes.iter().filter_map(|inode| table.by_inode.get(inode)).collect();
        let mut remote: Vec<TcpConnection> = open
            .iter()
            .filter(|socket| socket.leaves_machine())
            .map(|socket| TcpConnection { local: socket.local.to_string(), remote: socket.remote.to_string() })
            .collect();
        remote.sort_by(|one, other| (&one.remote, &one.local).cmp(&(&other.remote, &other.local)));
        remote.truncate(MAX_CONNECTIONS);
        Some(ProcessConnections { bytes: open.iter().map(|socket| socket.bytes).sum(), remote })
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

/// The processes among `pids` that have a TCP connection to another machine.
#[must_use]
pub fn connected_to_other_machines(pids: impl IntoIterator<Item = i32>, deadline: Instant) -> Vec<i32> {
    let sockets = TcpSockets::default();
    let is_connected = |pid: &i32| sockets.of_process(*pid, deadline).is_some_and(|open| !open.remote.is_empty());
    pids.into_iter().filter(is_connected).collect()
}

impl Table {
    /// The socket with this inode.
    pub(crate) fn socket(&self, inode: u64) -> Option<&TcpSocket> {
        self.by_inode.get(&inode)
    }

    /// The inode of the other end of a connection. `None` if it is on another machine, or if the
    /// connection has not been accepted.
    pub(crate) fn other_end(&self, socket: &TcpSocket) -> Option<u64> {
        let ends = || self.by_inode.iter().map(|(inode, socket)| ([socket.local, socket.remote], *inode)).collect();
        self.by_ends.get_or_init(ends).get(&[socket.remote, socket.local]).copied()
    }

    /// The inode of a socket that listens at an address.
    pub(crate) fn listener(&self, address: SocketAddr) -> Option<u64> {
        let accepts = |socket: &TcpSocket| {
            let local = socket.local;
            let same = local.ip() == address.ip() || local.ip().is_unspecified();
            socket.listens && same && local.port() == address.port()
        };
        self.by_inode.iter().filter(|(_, socket)| accepts(socket)).map(|(inode, _)| *inode).min()
    }

    fn over_netlink(deadline: Instant) -> io::Result<Self> {
        let mut table = Table { counts_bytes: true, ..Table::default() };
        for family in [AF_INET, AF_INET6] {
            let request = InetRequest {
                family,
                protocol: IPPROTO_TCP,
                extensions: ExtensionFlags::INFO,
                states: open_states() | StateFlags::LISTEN,
                socket_id: if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() },
            };
            query(request, Scope::All, deadline, |response| {
                table.add(response.header.inode.into(), TcpSocket::of(response));
            })?;
        }
        Ok(table)
    }

    fn from_proc(pid: i32, deadline: Instant) -> Self {
        let mut table = Table::default();
        find_tcp_socket(pid, Some(deadline), |socket| {
            let (local, remote) = (socket.local()?, socket.remote()?);
            table.add(socket.inode, TcpSocket { local, remote, listens: socket.state == LISTEN, bytes: 0 });
            None::<()>
        });
        table
    }

    /// A connection that no process has accepted has no inode.
    fn add(&mut self, inode: u64, socket: TcpSocket) {
        if inode != 0 {
            self.by_inode.insert(inode, socket);
        }
    }
}

/// States of a socket that a process may have open and that is connected, or is being connected.
fn open_states() -> StateFlags {
    connected_states() | StateFlags::SYN_SENT | StateFlags::LAST_ACK | StateFlags::CLOSING
}

/// States in which the bytes of a connection count.
fn connected_states() -> StateFlags {
    StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT | StateFlags::FIN_WAIT1 | StateFlags::FIN_WAIT2
}

impl TcpSocket {
    fn of(response: &InetResponse) -> Self {
        let header = &response.header;
        let id = &header.socket_id;
        let counts = 1_u32.checked_shl(header.state.into()).is_some_and(|bit| connected_states().bits() & bit != 0);
        let bytes = |attribute| if counts { bytes_moved(header, attribute) } else { 0 };
        TcpSocket {
            local: SocketAddr::new(id.source_address.to_canonical(), id.source_port),
            remote: SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
            listens: header.state == LISTEN,
            bytes: response.nlas.iter().map(bytes).sum(),
        }
    }
}

fn namespace(process: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{process}/ns/net")).ok()
}

/// Inodes of the sockets that a process has open.
fn socket_inodes(pid: i32) -> HashSet<u64> {
    let mut inodes = HashSet::new();
    open_files::each_link(pid, |_, link| inodes.extend(inode_of(&link, SOCKET)));
    inodes
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
        os::fd::AsRawFd,
    };

    use super::*;

    fn far() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

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
            let look = || TcpSockets::default().of_process(own, far()).expect("the kernel reports them").bytes;
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
        assert!(TcpSockets::default().of_namespace(1 << 22, Instant::now()).is_none(), "no such process");
    }

    #[test]
    fn both_sources_find_the_other_end_and_the_listener() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = server.local_addr().expect("an address");
        let client = TcpStream::connect(address).expect("it connects");
        let inode = |descriptor: i32| {
            let link = fs::read_link(format!("/proc/self/fd/{descriptor}")).expect("it is open");
            inode_of(link.to_str().expect("text"), SOCKET).expect("a socket")
        };
        let own = std::process::id().cast_signed();
        let sources = || [Table::over_netlink(far()).expect("the kernel answers"), Table::from_proc(own, far())];
        for table in sources() {
            let socket = table.socket(inode(client.as_raw_fd())).expect("the client's");
            assert_eq!((socket.remote, socket.listens()), (address, false));
            assert_eq!(table.other_end(socket), None, "it is not accepted yet");
            let listener = table.listener(address).expect("a listener");
            assert_eq!(listener, inode(server.as_raw_fd()));
            assert!(table.socket(listener).is_some_and(TcpSocket::listens));
        }
        let (accepted, _) = server.accept().expect("it accepts");
        for table in sources() {
            let socket = table.socket(inode(client.as_raw_fd())).expect("the client's");
            assert_eq!(table.other_end(socket), Some(inode(accepted.as_raw_fd())));
        }
        assert!(Table::over_netlink(Instant::now()).is_err(), "there was no time");
    }
}
