//! The connection to the node collector. Nothing here blocks: an absent, slow or ended collector
//! costs a retry.

use std::{
    collections::VecDeque,
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use xpu_timer_proto::{
    Message as _,
    socket::MAX_PACKET_BYTES,
    v1::{Hello, HookMessage, NodeReply, hook_message::Message, node_reply},
};

use crate::runtime::{
    os::{descriptor::Descriptor, process::CONNECTION, ptracer, sections::open_outside_fork, wakeup},
    watcher::log::Log,
};

/// First and longest pause between two attempts to connect.
const FIRST_RETRY: Duration = Duration::from_millis(100);

const LAST_RETRY: Duration = Duration::from_secs(5);

/// Time limit for the collector's Welcome.
const WELCOME_DEADLINE: Duration = Duration::from_secs(10);

/// Length of a pause in which no wakeup can be received.
const GREETING_PAUSE: Duration = Duration::from_millis(20);

/// Messages that are queued while the socket is full.
const MAX_WAITING: usize = 64;

/// The connection in any state.
pub(crate) struct Connection {
    path: PathBuf,
    stage: Stage,
    retry: Duration,
    waiting: VecDeque<Vec<u8>>,
    is_reported: bool,
}

enum Stage {
    Disconnected { next: Instant },
    Greeting { since: Instant },
    Connected,
}

impl Connection {
    /// Not connected yet.
    pub(crate) fn new(path: PathBuf) -> Self {
        Connection {
            path,
            stage: Stage::Disconnected { next: Instant::now() },
            retry: FIRST_RETRY,
            waiting: VecDeque::new(),
            is_reported: false,
        }
    }

    /// Queues a message. It is dropped when the connection ends, because the next Hello repeats the
    /// information.
    pub(crate) fn send(&mut self, message: Message) {
        if !matches!(self.stage, Stage::Connected) || self.waiting.len() == MAX_WAITING {
            return;
        }
        self.waiting.push_back(HookMessage { message: Some(message) }.encode_to_vec());
    }

    /// Connects, exchanges greetings, and sends queued messages. Returns true when Hello has just
    /// been sent. If the collector is known to be alive (`is_there`), nothing is received from the
    /// socket.
    pub(crate) fn turn(&mut self, hello: &Hello, ring: &Descriptor, log: &mut Log, is_there: bool) -> bool {
        let mut greeted = false;
        let result = match self.stage {
            Stage::Disconnected { next } if Instant::now() < next => Ok(()),
            Stage::Disconnected { .. } => self.connect(),
            Stage::Greeting { .. } | Stage::Connected => Ok(()),
        };
        let result = result.and_then(|()| match self.stage {
            Stage::Disconnected { .. } => Ok(()),
            Stage::Greeting { since } => {
                greeted = self.greet(since, hello, ring)?;
                Ok(())
            }
            Stage::Connected if is_there => Ok(()),
            Stage::Connected => self.listen(),
        });
        let result = result.and_then(|()| self.flush());
        if let Err(error) = result {
            self.disconnect(&error, log);
            greeted = false;
        }
        greeted
    }

    /// Sleeps until a wakeup, at most for `pause`. Before Welcome, a packet of the collector ends
    /// the sleep too.
    pub(crate) fn wait(&mut self, pause: Duration) {
        let greeting = matches!(self.stage, Stage::Greeting { .. });
        let Some(fd) = greeting.then(|| CONNECTION.get()).flatten() else { return wakeup::wait(pause) };
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        if unsafe { libc::poll(&mut poll, 1, GREETING_PAUSE.min(pause).as_millis() as i32) } < 0 {
            wakeup::wait(pause);
        }
    }

    fn connect(&mut self) -> io::Result<()> {
        let address = address(&self.path)?;
        let Some(opened) = open_outside_fork(|| open().and_then(|fd| CONNECTION.set(fd))) else { return Ok(()) };
        opened?;
        let fd = CONNECTION.get().ok_or(io::ErrorKind::NotConnected)?;
        // SAFETY: a valid address of that size.
        let connected = unsafe {
            libc::connect(fd, (&raw const address).cast(), size_of::<libc::sockaddr_un>() as libc::socklen_t)
        };
        if connected != 0 {
            return Err(io::Error::last_os_error());
        }
        trusted(fd)?;
        self.stage = Stage::Greeting { since: Instant::now() };
        Ok(())
    }

    /// Receives Welcome and answers with Hello. True once Hello is sent.
    fn greet(&mut self, since: Instant, hello: &Hello, ring: &Descriptor) -> io::Result<bool> {
        let fd = CONNECTION.get().ok_or(io::ErrorKind::NotConnected)?;
        let mut packet = [0; MAX_PACKET_BYTES];
        let Some(bytes) = receive(fd, &mut packet)? else {
            return match since.elapsed() > WELCOME_DEADLINE {
                true => Err(io::Error::new(io::ErrorKind::TimedOut, "the collector sent no Welcome")),
                false => Ok(false),
            };
        };
        let reply = NodeReply::decode(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let Some(node_reply::Message::Welcome(_)) = reply.message else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the first packet is not Welcome"));
        };
        // The peer's pid from the kernel is also correct across PID namespaces.
        ptracer::allow(peer(fd)?.pid);
        let ring = ring.get().ok_or_else(|| io::Error::other("the host closed the ring's descriptor"))?;
        let message = HookMessage { message: Some(Message::Hello(hello.clone())) }.encode_to_vec();
        if !send_with_descriptor(fd, &message, ring)? {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "no room for Hello"));
        }
        self.stage = Stage::Connected;
        self.retry = FIRST_RETRY;
        self.is_reported = false;
        self.waiting.clear();
        Ok(true)
    }

    /// Reads the socket to notice the end of the collector, which does not send further packets
    /// yet.
    fn listen(&mut self) -> io::Result<()> {
        let fd = CONNECTION.get().ok_or(io::ErrorKind::NotConnected)?;
        let mut packet = [0; MAX_PACKET_BYTES];
        while receive(fd, &mut packet)?.is_some() {}
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !matches!(self.stage, Stage::Connected) {
            return Ok(());
        }
        while let Some(message) = self.waiting.front() {
            let fd = CONNECTION.get().ok_or(io::ErrorKind::NotConnected)?;
            // SAFETY: a socket of the hook and a valid buffer.
            let sent = unsafe {
                libc::send(fd, message.as_ptr().cast(), message.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
            if sent < 0 {
                let error = io::Error::last_os_error();
                return if error.kind() == io::ErrorKind::WouldBlock { Ok(()) } else { Err(error) };
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    fn disconnect(&mut self, error: &io::Error, log: &mut Log) {
        CONNECTION.close();
        self.waiting.clear();
        if !self.is_reported {
            log.write_line(&format!("no node collector at {}: {error}; retrying", self.path.display()));
            self.is_reported = true;
        }
        self.stage = Stage::Disconnected { next: Instant::now() + self.retry };
        self.retry = (self.retry * 2).min(LAST_RETRY);
    }
}

/// The address of a socket.
fn address(path: &Path) -> io::Result<libc::sockaddr_un> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: an all-zero sockaddr_un is a valid value of that plain structure.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path of the socket is too long"));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (place, byte) in address.sun_path.iter_mut().zip(bytes) {
        *place = *byte as libc::c_char;
    }
    Ok(address)
}

fn open() -> io::Result<i32> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the arguments are integers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

/// Checks that the collector belongs to this user or to root. Others must not get the ring.
fn trusted(fd: i32) -> io::Result<()> {
    // SAFETY: geteuid takes nothing and cannot fail.
    let me = unsafe { libc::geteuid() };
    let them = peer(fd)?.uid;
    if them == me || them == 0 {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("the socket belongs to user {them}")))
    }
}

fn peer(fd: i32) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: a place of that size.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut credentials).cast(), &mut bytes) };
    if result == 0 { Ok(credentials) } else { Err(io::Error::last_os_error()) }
}

/// Receives one packet. `None` when there is none yet.
///
/// # Errors
/// When the collector has ended.
fn receive(fd: i32, packet: &mut [u8]) -> io::Result<Option<&[u8]>> {
    // SAFETY: a valid buffer.
    let read = unsafe { libc::recv(fd, packet.as_mut_ptr().cast(), packet.len(), libc::MSG_DONTWAIT) };
    match read {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the collector closed the connection")),
        read if read > 0 => Ok(Some(&packet[..read as usize])),
        _ => {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) }
        }
    }
}

/// Sends a packet with a descriptor. False when the socket is full.
fn send_with_descriptor(fd: i32, message: &[u8], descriptor: i32) -> io::Result<bool> {
    // Room for one header and one descriptor, with the alignment of a header.
    let mut control = [0u64; 4];
    let mut part = libc::iovec { iov_base: message.as_ptr().cast_mut().cast(), iov_len: message.len() };
    // SAFETY: an all-zero msghdr is a valid value of that plain structure.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    // SAFETY: the macros only compute. The first header lies in `control`, which is large enough
    // for one descriptor.
    let sent = unsafe {
        header.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as usize;
        let first = libc::CMSG_FIRSTHDR(&header);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
        libc::CMSG_DATA(first).cast::<i32>().write_unaligned(descriptor);
        libc::sendmsg(fd, &header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    };
    if sent >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) }
}

/// The process has only one connection, so tests that use it must not run in parallel.
#[cfg(test)]
pub(crate) static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::lifecycle::exit::GOODBYE;
    use xpu_timer_proto::v1::Goodbye;

    #[test]
    fn goodbye_matches_the_schema() {
        assert_eq!(HookMessage { message: Some(Message::Goodbye(Goodbye {})) }.encode_to_vec(), GOODBYE);
    }

    #[test]
    fn a_path_that_is_too_long_is_an_error() {
        let long = PathBuf::from(format!("/{}", "x".repeat(200)));
        assert_eq!(address(&long).map(|_| ()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn messages_are_queued_while_the_socket_is_full() {
        let _alone = ALONE.lock();
        let mut pair = [0; 2];
        // SAFETY: a place for two descriptors.
        assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, pair.as_mut_ptr()) }, 0);
        let [ours, theirs] = pair;
        CONNECTION.set(ours).unwrap();
        let mut connection = Connection::new(PathBuf::new());
        connection.stage = Stage::Connected;
        let mut log = Log::new("/proc/nowhere".into(), "/proc/nowhere".into(), 0o600);
        let resolved = |ticket| Message::Resolved(xpu_timer_proto::v1::HangResolved { ticket });
        let mut sent = 0;
        while connection.waiting.len() < MAX_WAITING {
            connection.send(resolved(sent));
            connection.turn(&Hello::default(), &Descriptor::none(), &mut log, false);
            assert!(matches!(connection.stage, Stage::Connected));
            sent += 1;
            assert!(sent < 1_000_000, "the socket never fills");
        }
        connection.send(resolved(sent));
        assert_eq!(connection.waiting.len(), MAX_WAITING, "bounded");
        // The collector wakes up: everything arrives in order.
        let mut packet = [0; 64];
        for ticket in 0..sent {
            connection.turn(&Hello::default(), &Descriptor::none(), &mut log, false);
            let bytes = receive(theirs, &mut packet).unwrap().expect("a packet");
            assert_eq!(HookMessage::decode(bytes).unwrap().message, Some(resolved(ticket)));
        }
        crate::runtime::os::descriptor::close(theirs);
        connection.wait(Duration::ZERO);
        connection.turn(&Hello::default(), &Descriptor::none(), &mut log, false);
        assert!(matches!(connection.stage, Stage::Disconnected { .. }));
    }
}
