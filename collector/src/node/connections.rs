//! Connections of hooks and launchers: accepts a limited number, reads them fairly, closes those
//! that misbehave.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use tracing::warn;
use xpu_timer_proto::v1::HookMessage;

use crate::{
    job::ConnectionId,
    node::socket::{self, Endpoint, Peer, Received},
    os::process::Handle,
};

/// A connected peer.
#[derive(Debug)]
pub(super) struct Connection {
    /// The socket.
    pub fd: OwnedFd,
    /// The process at the other end.
    pub pid: i32,
    /// Handle of that process; `None` when it had already ended.
    pub process: Option<Arc<Handle>>,
    accepted: Instant,
    has_sent: bool,
}

/// An event on a connection.
#[derive(Debug)]
pub(super) enum Event {
    /// A message, and the descriptor that came with it.
    Message(Box<HookMessage>, Option<OwnedFd>),
    /// The connection ended.
    End,
}

/// All connections of a node.
#[derive(Debug, Default)]
pub(super) struct Connections {
    open: BTreeMap<ConnectionId, Connection>,
    next: ConnectionId,
    paused_until: Option<Instant>,
    limiter: Limiter,
}

/// A node has about eight to sixteen ranks with a few helpers each. More connections than this are
/// a mistake or an attack.
const MAX_CONNECTIONS: usize = 1024;
/// A hook sends hello at once and a launcher disconnects at once. A longer silence is an error.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Packets that are read from one connection before the others get their turn.
const PACKETS_A_TURN: usize = 64;

impl Connections {
    /// All connections with their ids.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ConnectionId, &Connection)> {
        self.open.iter().map(|(id, connection)| (*id, connection))
    }

    /// Whether any peer is connected.
    #[must_use]
    pub(super) fn are_used(&self) -> bool {
        !self.open.is_empty()
    }

    /// The pid at the other end.
    #[must_use]
    pub(super) fn pid(&self, id: ConnectionId) -> i32 {
        self.open.get(&id).map_or(0, |connection| connection.pid)
    }

    /// The process at the other end, as it was found when it connected.
    #[must_use]
    pub(super) fn process(&self, id: ConnectionId) -> Option<Arc<Handle>> {
        self.open.get(&id)?.process.clone()
    }

    /// Whether new connections are accepted now. Accepting pauses for a moment after the
    /// descriptors ran out.
    #[must_use]
    pub(super) fn accepts(&self) -> bool {
        self.paused_until.is_none_or(|until| Instant::now() >= until)
    }

    /// Accepts the pending connections.
    pub(super) fn accept(&mut self, endpoint: &Endpoint) {
        for _ in 0..PACKETS_A_TURN {
            match endpoint.accept() {
                Ok(Some(peer)) => self.take(peer),
                Ok(None) => return,
                Err(error) => {
                    // Most likely there are no descriptors left. They may be back in a second;
                    // until then poll must not spin.
                    self.limiter.warn(&format!("a connection cannot be accepted: {error}"));
                    self.paused_until = Some(Instant::now() + Duration::from_secs(1));
                    return;
                }
            }
        }
    }

    fn take(&mut self, peer: Peer) {
        if !socket::is_own(&peer) {
            self.limiter.warn(&format!("pid {} is refused: it belongs to another user ({})", peer.pid, peer.uid));
            return;
        }
        if self.open.len() >= MAX_CONNECTIONS {
            self.limiter.warn(&format!("pid {} is refused: there are {MAX_CONNECTIONS} connections already", peer.pid));
            return;
        }
        let process = Handle::of_peer(peer.pid)
            .inspect_err(|error| {
                self.limiter.warn(&format!("pid {} connects but cannot be inspected: {error}", peer.pid));
            })
            .ok()
            .map(Arc::new);
        socket::welcome(&peer.fd);
        self.next += 1;
        let connection = Connection { fd: peer.fd, pid: peer.pid, process, accepted: Instant::now(), has_sent: false };
        self.open.insert(self.next, connection);
    }

    /// Reads one connection. A packet that no hook sends ends it.
    pub(super) fn read(&mut self, id: ConnectionId) -> Vec<Event> {
        let Some(connection) = self.open.get_mut(&id) else { return Vec::new() };
        let mut events = Vec::new();
        while events.len() < PACKETS_A_TURN {
            match socket::receive(&connection.fd) {
                Received::Message(message, descriptor) => {
                    connection.has_sent = true;
                    events.push(Event::Message(message, descriptor));
                }
                Received::Nothing => return events,
                Received::End => {
                    events.push(Event::End);
                    return events;
                }
                Received::Bad(problem) => {
                    self.limiter.warn(&format!("pid {} sent {problem}; its connection is closed", connection.pid));
                    events.push(Event::End);
                    return events;
                }
            }
        }
        events
    }

    /// Closes a connection. A peer that disconnects without a message is a launcher; its process,
    /// which is returned, has become the command.
    pub(super) fn close(&mut self, id: ConnectionId) -> Option<Arc<Handle>> {
        let connection = self.open.remove(&id)?;
        connection.process.filter(|_| !connection.has_sent)
    }

    /// Closes a connection that sent something wrong.
    pub(super) fn refuse(&mut self, id: ConnectionId, problem: &str) {
        self.limiter.warn(&format!("pid {} {problem}; its connection is closed", self.pid(id)));
        self.open.remove(&id);
    }

    /// Closes all connections. Hooks connect again within a moment.
    pub(super) fn close_all(&mut self) -> Vec<ConnectionId> {
        let all = std::mem::take(&mut self.open);
        all.into_keys().collect()
    }

    /// Closes connections that have never sent a message.
    pub(super) fn close_mute(&mut self) {
        let is_mute = |connection: &Connection| !connection.has_sent && connection.accepted.elapsed() > HELLO_TIMEOUT;
        let (limiter, open) = (&mut self.limiter, &mut self.open);
        open.retain(|_, connection| {
            if is_mute(connection) {
                limiter.warn(&format!("pid {} connected but sent nothing; its connection is closed", connection.pid));
            }
            !is_mute(connection)
        });
    }
}

/// Keeps a flood of bad peers from filling the disk with log lines.
#[derive(Debug, Default)]
struct Limiter {
    window: Option<Instant>,
    lines: u32,
}

const LINES_A_MINUTE: u32 = 30;

impl Limiter {
    fn warn(&mut self, text: &str) {
        if self.allows() {
            warn!("{text}");
        }
    }

    fn allows(&mut self) -> bool {
        let fresh = self.window.is_none_or(|since| since.elapsed() > Duration::from_secs(60));
        if fresh {
            if self.lines > LINES_A_MINUTE {
                warn!("{} more lines about connections were left out", self.lines - LINES_A_MINUTE);
            }
            self.window = Some(Instant::now());
            self.lines = 0;
        }
        self.lines += 1;
        self.lines <= LINES_A_MINUTE
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_that_sends_nothing_is_a_launcher() {
        let mut connections = Connections::default();
        let process = Handle::of_peer(std::process::id() as i32).ok().map(Arc::new);
        for (id, has_sent) in [(1, false), (2, true)] {
            let (fd, _other) = UnixStream::pair().expect("a pair of sockets");
            let connection =
                Connection { fd: fd.into(), pid: 0, process: process.clone(), accepted: Instant::now(), has_sent };
            connections.open.insert(id, connection);
        }
        assert!(connections.close(1).is_some() && connections.close(2).is_none() && !connections.are_used());
    }

    #[test]
    fn log_lines_are_limited() {
        let mut limiter = Limiter::default();
        let allowed = (0..1000).filter(|_| limiter.allows()).count();
        assert_eq!(allowed, LINES_A_MINUTE as usize);
    }
}
