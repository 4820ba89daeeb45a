//! Finds the user behind a TCP connection of this machine: the owner of the socket at the other
//! end.
//!
//! The kernel answers over netlink ([`sock_diag`]) without a scan of all sockets. Where this fails,
//! `/proc/net/tcp` has equal data. The peer may close its socket at any moment. The kernel reports
//! uid 0 for a socket without an owner, so an entry counts only while it has an inode: a peer that
//! connects and closes at once is unknown, not root.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use xpu_timer_capture::sock_diag::{
    self, AF_INET, AF_INET6, ExtensionFlags, IPPROTO_TCP, InetRequest, InetResponse, InetResponseHeader, Scope,
    SocketId, StateFlags,
};
use xpu_timer_proto::procfs::{self, LISTEN, TcpSocket};

/// Looks up owners of sockets in this network namespace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owners {
    // Whether the kernel answers over netlink.
    netlink: bool,
    // The uid of users without a mapping in this user namespace; `None` if every user has one.
    unmapped: Option<u32>,
}

/// One end of a connection or a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    state: u8,
    uid: u32,
    inode: u64,
}

const ESTABLISHED: u8 = 1;
/// States of a socket whose process may have sent a request: established or half closed.
const CONNECTED: [u8; 4] = [ESTABLISHED, 4, 5, 8];

impl Owners {
    /// `listener` is an address on which this process listens; it is used to test netlink.
    #[must_use]
    pub(crate) fn new(listener: SocketAddr) -> Self {
        let any = SocketAddr::new(if listener.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() }, 0);
        Owners { netlink: by_netlink(listener, any).is_some(), unmapped: unmapped() }
    }

    /// The uid behind `peer`, which is connected to `local`; `None` if unknown.
    #[must_use]
    pub(crate) fn of_peer(&self, peer: SocketAddr, local: SocketAddr) -> Option<u32> {
        let [peer, local] = [peer, local].map(|address| SocketAddr::new(address.ip().to_canonical(), address.port()));
        let entry = if self.netlink { by_netlink(peer, local) } else { by_proc(peer, local) };
        self.owner(entry, &CONNECTED)
    }

    /// The uid that listens on `address`; `None` if nobody listens or the uid is unknown.
    #[must_use]
    pub(crate) fn of_listener(address: SocketAddr) -> Option<u32> {
        let any = SocketAddr::new(if address.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() }, 0);
        let entry = by_netlink(address, any).or_else(|| by_proc(address, any));
        Owners { netlink: true, unmapped: unmapped() }.owner(entry, &[LISTEN])
    }

    fn owner(&self, entry: Option<Entry>, states: &[u8]) -> Option<u32> {
        let entry = entry.filter(|entry| entry.inode != 0 && states.contains(&entry.state))?;
        (Some(entry.uid) != self.unmapped).then_some(entry.uid)
    }
}

/// All unmapped users have this uid here, so it proves nothing.
fn unmapped() -> Option<u32> {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let is_identity_map = map.split_whitespace().eq(["0", "0", "4294967295"]);
    let overflow = || std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim().parse().ok();
    if is_identity_map { None } else { Some(overflow().unwrap_or(65534)) }
}

/// Timeout of a netlink query. Normally the kernel has answered by the time the query is sent.
const PATIENCE: Duration = Duration::from_secs(1);

/// Finds the socket with these local and remote addresses.
fn by_netlink(local: SocketAddr, remote: SocketAddr) -> Option<Entry> {
    let request = InetRequest {
        family: if local.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::all(),
        socket_id: SocketId {
            source_port: local.port(),
            destination_port: remote.port(),
            source_address: local.ip(),
            destination_address: remote.ip(),
            interface_id: 0,
            cookie: ANY_COOKIE,
        },
    };
    let mut found = None;
    let each = |response: &InetResponse| found = entry(&response.header, local, remote);
    sock_diag::query(request, Scope::One, Instant::now() + PATIENCE, each).ok()?;
    found
}

/// `INET_DIAG_NOCOOKIE` of linux/inet_diag.h.
const ANY_COOKIE: [u8; 8] = [0xff; 8];

/// The kernel falls back to a listener of the port, so the addresses are compared. A listener on
/// all addresses answers for each of them. An IPv6 socket that carries IPv4 is reported with mapped
/// addresses.
fn entry(found: &InetResponseHeader, local: SocketAddr, remote: SocketAddr) -> Option<Entry> {
    let id = &found.socket_id;
    let ends = [(id.source_address, id.source_port, local), (id.destination_address, id.destination_port, remote)];
    let same = ends.iter().all(|(address, port, wanted)| {
        *port == wanted.port() && (found.state == LISTEN || address.to_canonical() == wanted.ip())
    });
    same.then_some(Entry { state: found.state, uid: found.uid, inode: found.inode.into() })
}

/// As [`by_netlink`], from `/proc/net/tcp`.
fn by_proc(local: SocketAddr, remote: SocketAddr) -> Option<Entry> {
    procfs::find_tcp_socket("self", None, |socket| entry_of(socket, local, remote))
}

fn entry_of(socket: &TcpSocket<'_>, local: SocketAddr, remote: SocketAddr) -> Option<Entry> {
    let found = [socket.local()?, socket.remote()?];
    let listens = socket.state == LISTEN && found[0].port() == local.port() && found[1].port() == remote.port();
    let TcpSocket { state, uid, inode, .. } = *socket;
    (found == [local, remote] || listens).then_some(Entry { state, uid, inode })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn connected(address: &str) -> (TcpListener, TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        (listener, client, server)
    }

    #[test]
    fn the_owner_of_a_connection_is_known_until_it_closes() {
        let own = nix::unistd::getuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            if TcpListener::bind(address).is_err() {
                // The machine has no IPv6.
                continue;
            }
            let (listener, client, server) = connected(address);
            let tried = Owners::new(listener.local_addr().unwrap());
            for netlink in [tried.netlink, false] {
                let owners = Owners { netlink, ..tried };
                let (listener, client, server) = connected(address);
                let (peer, local) = (server.peer_addr().unwrap(), server.local_addr().unwrap());
                assert_eq!(owners.of_peer(peer, local), Some(own), "{address} {netlink}");
                // A half-closed socket still has an owner.
                client.shutdown(std::net::Shutdown::Write).unwrap();
                assert_eq!(owners.of_peer(peer, local), Some(own), "{address} {netlink}");
                // The kernel reports a closed socket with uid 0, and returns a listener in place of
                // a socket that is gone.
                drop(client);
                assert_eq!(owners.of_peer(peer, local), None, "{address} {netlink}");
                assert_eq!(owners.of_peer(listener.local_addr().unwrap(), local), None);
            }
            assert_eq!(Owners::of_listener(listener.local_addr().unwrap()), Some(own));
            drop((client, server));
        }
    }

    #[test]
    fn a_closed_socket_and_its_listener_have_no_owner() {
        let [local, remote] = ["127.0.0.1:50000", "127.0.0.1:18888"].map(|text| text.parse().unwrap());
        let owners = Owners { netlink: false, unmapped: Some(65534) };
        let of = |line: &str| {
            owners.owner(TcpSocket::parse(line).and_then(|socket| entry_of(&socket, local, remote)), &CONNECTED)
        };
        let line = |state: &str, uid: u32, inode: u32| {
            format!(
                "1: 0100007F:C350 0100007F:49C8 {state} 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1 0 20"
            )
        };
        assert_eq!(of(&line("01", 1000, 7)), Some(1000));
        assert_eq!(of(&line("05", 0, 0)), None, "closed by its process");
        assert_eq!(of(&line("06", 0, 0)), None, "in TIME_WAIT");
        assert_eq!(of(&line("0A", 0, 9)), None, "a listener");
        assert_eq!(of(&line("01", 65534, 7)), None, "a user without a uid here");
        assert_eq!(of("sl local_address rem_address st"), None);
        let mapped =
            "1: 0000000000000000FFFF00000100007F:C350 0000000000000000FFFF00000100007F:49C8 01 0:0 0:0 0 1000 0 7 1";
        assert_eq!(of(mapped), Some(1000), "a socket of IPv6 that speaks IPv4");
    }
}
