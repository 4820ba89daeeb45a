//! `/proc/PID/net/tcp` and the links of `/proc/PID/fd`.

use std::{
    fmt::Display,
    fs::File,
    io::{BufRead, BufReader},
    net::{IpAddr, SocketAddr},
    time::Instant,
};

/// Maximum number of descriptors of one process to read.
pub const MAX_FILES: usize = 4096;

/// Start of the link of a socket in `/proc/PID/fd`.
pub const SOCKET: &str = "socket:[";

/// The inode in a link of `/proc/PID/fd` such as `pipe:[4242]`.
#[must_use]
pub fn inode_of(link: &str, kind: &str) -> Option<u64> {
    link.strip_prefix(kind)?.strip_suffix(']')?.parse().ok()
}

/// The [`TcpSocket::state`] of a listening socket.
pub const LISTEN: u8 = 10;

/// Bytes of a table per read. A busy node has a hundred thousand sockets.
const BUFFER_BYTES: usize = 1 << 16;

/// One line of the tables of TCP sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpSocket<'a> {
    /// State as in `linux/tcp_states.h`.
    pub state: u8,
    /// Owner; 0 if the socket is closed.
    pub uid: u32,
    /// Inode; 0 if the socket is closed.
    pub inode: u64,
    /// Own end and peer, as the kernel prints them. They are parsed on demand, because a search
    /// skips most lines.
    ends: [&'a str; 2],
}

impl<'a> TcpSocket<'a> {
    /// `sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …`
    #[must_use]
    pub fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split_whitespace().skip(1);
        let ends = [fields.next()?, fields.next()?];
        let state = u8::from_str_radix(fields.next()?, 16).ok()?;
        let uid = fields.nth(3)?.parse().ok()?;
        let inode = fields.nth(1)?.parse().ok()?;
        Some(TcpSocket { state, uid, inode, ends })
    }

    /// Own address. An IPv6 socket that carries IPv4 has an IPv4 address.
    #[must_use]
    pub fn local(&self) -> Option<SocketAddr> {
        address(self.ends[0])
    }

    /// Address of the peer.
    #[must_use]
    pub fn remote(&self) -> Option<SocketAddr> {
        address(self.ends[1])
    }
}

/// Parses `0100007F:1F90`, which is 127.0.0.1:8080: words of four bytes in the byte order of this
/// machine.
fn address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let mut bytes = [0; 16];
    for (place, word) in bytes.chunks_exact_mut(4).zip(host.as_bytes().chunks(8)) {
        let word = u32::from_str_radix(std::str::from_utf8(word).ok()?, 16).ok()?;
        place.copy_from_slice(&word.to_ne_bytes());
    }
    let ip = match host.len() {
        8 => IpAddr::from(<[u8; 4]>::try_from(&bytes[..4]).ok()?),
        32 => IpAddr::from(bytes),
        _ => return None,
    };
    Some(SocketAddr::new(ip.to_canonical(), u16::from_str_radix(port, 16).ok()?))
}

/// Searches the TCP sockets of the network namespace of a process: a pid, or `self`. The search
/// ends at the deadline, if there is one.
pub fn find_tcp_socket<T>(
    process: impl Display,
    deadline: Option<Instant>,
    mut find: impl FnMut(&TcpSocket<'_>) -> Option<T>,
) -> Option<T> {
    ["tcp", "tcp6"].iter().find_map(|table| {
        let table = File::open(format!("/proc/{process}/net/{table}")).ok()?;
        let lines = BufReader::with_capacity(BUFFER_BYTES, table).lines().map_while(Result::ok);
        let mut in_time = lines.take_while(|_| deadline.is_none_or(|deadline| Instant::now() < deadline));
        in_time.find_map(|line| find(&TcpSocket::parse(&line)?))
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn parses_lines_of_both_tables() {
        let line = "1: 0100007F:C350 0100007F:49C8 05 00000000:00000000 00:00000000 00000000 1000 0 7 1 0 20";
        let socket = TcpSocket::parse(line).unwrap();
        assert_eq!((socket.state, socket.uid, socket.inode), (5, 1000, 7));
        assert_eq!(socket.local(), "127.0.0.1:50000".parse().ok());
        assert_eq!(socket.remote(), "127.0.0.1:18888".parse().ok());
        assert_eq!(TcpSocket::parse("sl local_address rem_address st tx_queue rx_queue tr tm->when"), None);
    }

    #[test]
    fn parses_addresses() {
        let text = |text| address(text).map(|address| address.to_string());
        assert_eq!(text("0100007F:1F90").as_deref(), Some("127.0.0.1:8080"));
        assert_eq!(text("0000000000000000FFFF00000100007F:0050").as_deref(), Some("127.0.0.1:80"));
        assert_eq!(text("00000000000000000000000001000000:0050").as_deref(), Some("[::1]:80"));
        for wrong in ["x", "0100007F", "0100007F00:1F90", "010000é:1F90"] {
            assert_eq!(address(wrong), None, "{wrong}");
        }
        assert_eq!(inode_of("pipe:[42]", "pipe:["), Some(42));
    }

    #[test]
    fn finds_a_listener_of_this_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap();
        let state = |socket: &TcpSocket<'_>| (socket.local() == Some(own)).then_some(socket.state);
        assert_eq!(find_tcp_socket("self", None, state), Some(LISTEN));
        assert_eq!(find_tcp_socket("self", Some(Instant::now()), state), None);
    }
}
