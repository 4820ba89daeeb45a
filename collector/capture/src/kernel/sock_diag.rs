//! Queries the kernel about the sockets of this network namespace, over netlink; see sock_diag(7).

use std::{io, time::Instant};

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
/// # Errors
/// The kernel does not answer over netlink, has no such socket, or the deadline passes.
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
