//! Queries the kernel about TCP sockets of this network namespace, over netlink; see sock_diag(7).

use std::{io, time::Instant};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
pub use netlink_packet_sock_diag::{
    constants::{AF_INET, AF_INET6, IPPROTO_TCP},
    inet::{ExtensionFlags, InetRequest, InetResponse, InetResponseHeader, SocketId, StateFlags, nlas::Nla},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};

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
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    each(&response);
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

fn message(request: InetRequest, scope: Scope) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = match scope {
        Scope::One => NLM_F_REQUEST,
        Scope::All => NLM_F_REQUEST | NLM_F_DUMP,
    };
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}
