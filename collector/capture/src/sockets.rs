//! Bytes that went over the TCP sockets of a process. `/proc/PID/io` counts `read` and `write`, but not `recv` and `send`, by which
//! programs mostly use a socket. The kernel tells them of each socket over netlink; see sock_diag(7).

use std::{
    collections::HashSet,
    fs,
    time::{Duration, Instant},
};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP},
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags, nlas::Nla},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};

/// So long the sockets are searched, of each family: a busy node has a hundred thousand.
const PATIENCE: Duration = Duration::from_millis(50);
/// So many descriptors of a process are looked at.
const MOST_FILES: usize = 4096;
/// Bytes that the kernel is asked for at once.
const AT_ONCE: usize = 1 << 16;
/// Where `tcpi_bytes_acked` and, behind it, `tcpi_bytes_received` are in `struct tcp_info` of linux/tcp.h (since Linux 4.1).
const BYTES_ACKED: usize = 120;

/// Bytes that the process received and that its peers have acknowledged, over the connections that it has open. 0 when it has none, is in
/// another network namespace, or the kernel does not tell in time.
pub(crate) fn tcp_bytes(pid: i32, deadline: Instant) -> u64 {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let own = namespace("self");
    if own.is_none() || own != namespace(&pid.to_string()) {
        return 0;
    }
    let inodes = inodes(pid);
    if inodes.is_empty() {
        return 0;
    }
    [AF_INET, AF_INET6].into_iter().filter_map(|family| of_family(family, &inodes, deadline).ok()).sum()
}

/// Numbers of the sockets that a process has open.
fn inodes(pid: i32) -> HashSet<u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten().take(MOST_FILES);
    let socket = |entry: fs::DirEntry| {
        let link = fs::read_link(entry.path()).ok()?;
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    entries.filter_map(socket).collect()
}

fn of_family(family: u8, inodes: &HashSet<u32>, deadline: Instant) -> std::io::Result<u64> {
    let deadline = deadline.min(Instant::now() + PATIENCE);
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&question(family), 0)?;
    let mut total = 0;
    let mut buffer = Vec::with_capacity(AT_ONCE);
    while Instant::now() < deadline {
        buffer.clear();
        // The kernel has its answer ready, or makes it while it is asked for.
        let received = socket.recv(&mut buffer, libc::MSG_DONTWAIT)?;
        let mut rest = &buffer[..received.min(buffer.len())];
        while !rest.is_empty() {
            let Ok(message) = NetlinkMessage::<SockDiagMessage>::deserialize(rest) else { return Ok(total) };
            match message.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    if inodes.contains(&response.header.inode) {
                        total += response.nlas.iter().map(bytes).sum::<u64>();
                    }
                }
                _ => return Ok(total),
            }
            // Messages begin at multiples of four bytes.
            let length = (message.header.length as usize).next_multiple_of(4);
            rest = rest.get(length.max(1)..).unwrap_or_default();
        }
    }
    Ok(total)
}

/// All connections of a family, with what the kernel knows of each.
fn question(family: u8) -> Vec<u8> {
    let request = InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::INFO,
        states: StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT | StateFlags::FIN_WAIT1 | StateFlags::FIN_WAIT2,
        socket_id: if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() },
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn bytes(attribute: &Nla) -> u64 {
    let Nla::TcpInfo(info) = attribute else { return 0 };
    let word = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    word(BYTES_ACKED).zip(word(BYTES_ACKED + 8)).map_or(0, |(acked, received)| acked.saturating_add(received))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn what_was_sent_and_received_is_counted() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(server) = TcpListener::bind(host) else {
                assert_eq!(host, "[::1]:0", "a machine without IPv6");
                continue;
            };
            let own = std::process::id().cast_signed();
            let mut client = TcpStream::connect(server.local_addr().expect("an address")).expect("it connects");
            let (mut held, _) = server.accept().expect("it accepts");
            let look = || tcp_bytes(own, Instant::now() + Duration::from_secs(60));
            let before = look();
            const SENT: usize = 1 << 20;
            let sender = std::thread::spawn(move || client.write_all(&[7; SENT]).map(|()| client));
            held.read_exact(&mut [0; SENT]).expect("all of it");
            let client = sender.join().expect("no panic").expect("it is sent");
            // Other tests of this process have sockets too. The last acknowledgement may be on its way.
            assert!(look() - before >= SENT as u64, "{before} {}", look());
            drop((client, held));
        }
        assert_eq!(tcp_bytes(1 << 22, Instant::now()), 0, "no such process");
    }
}
