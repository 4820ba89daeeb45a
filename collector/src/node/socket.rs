//! The Unix socket: one collector for each socket, only peers of this user, one message in each
//! packet. Nothing here blocks.

use std::{
    fs::{self, TryLockError},
    io::{self, Write},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, bind, getsockopt, listen, send, socket,
        sockopt::PeerCredentials,
    },
    unistd::getuid,
};
use xpu_timer_proto::{
    Message, lenient,
    socket::{MAX_PACKET_BYTES, settings_file},
    v1::{HookMessage, NodeReply, Welcome, node_reply},
};

use crate::{
    error::Error,
    os::{descriptors, safe_path::private_directory},
};

/// The listening socket. Dropping it removes the socket's file, except in a worker, whose
/// supervisor still listens.
#[derive(Debug)]
pub(crate) struct Endpoint {
    listener: OwnedFd,
    path: PathBuf,
    inode: u64,
    // Whether dropping this removes the socket's file.
    removes: bool,
    // Declared last, so that the lock is released after the socket is closed.
    lock: OwnedFd,
}

/// The other end of a new connection.
#[derive(Debug)]
pub(crate) struct Peer {
    /// The connection.
    pub fd: OwnedFd,
    /// Process that connected, in the collector's PID namespace; 0 when it is not visible there.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// A collector ends within this time after it has removed its socket.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// The result of one read of a connection.
#[derive(Debug)]
pub(super) enum Received {
    /// A message, and the descriptor that came with it.
    Message(Box<HookMessage>, Option<OwnedFd>),
    /// Nothing more for now.
    Nothing,
    /// The peer has disconnected.
    End,
    /// A packet that no hook sends.
    Bad(String),
}

impl Endpoint {
    /// Takes the socket's lock, replaces the socket of a dead collector, and listens.
    ///
    /// # Errors
    /// [`Error::Running`] when another collector holds the lock; others when the folder does not
    /// belong to this user alone, or the socket cannot be created.
    pub(crate) fn open(path: &Path) -> Result<Endpoint, Error> {
        let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) else {
            return Err(Error::Folder { path: path.into(), problem: "must be an absolute path".into() });
        };
        private_directory(directory)?;
        let lock = lock_with_retry(path)?;
        match fs::symlink_metadata(path) {
            Ok(status) if status.file_type().is_socket() => {
                fs::remove_file(path).map_err(Error::path("replace", path))?;
            }
            Ok(_) => {
                let problem = "is in the place of the socket but is not a socket; remove it".into();
                return Err(Error::Folder { path: path.into(), problem });
            }
            Err(_) => {}
        }
        let address = UnixAddr::new(path).map_err(|error| Error::path("name a socket", path)(error.into()))?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener =
            socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(Error::system("make a socket"))?;
        bind(listener.as_raw_fd(), &address).map_err(|error| Error::path("bind", path)(error.into()))?;
        let inode = fs::symlink_metadata(path).map_err(Error::path("inspect", path))?.ino();
        let endpoint = Endpoint { listener, path: path.into(), inode, removes: true, lock: lock.into() };
        endpoint.listen()?;
        Ok(endpoint)
    }

    /// An endpoint that another process has opened.
    #[must_use]
    pub(crate) fn taken_over(path: &Path, listener: OwnedFd, lock: OwnedFd, inode: u64) -> Endpoint {
        Endpoint { listener, path: path.into(), inode, removes: false, lock }
    }

    /// The parts that another process needs to take over the endpoint: listener, lock, and the
    /// inode of the socket's file.
    #[must_use]
    pub(crate) fn parts(&self) -> ([BorrowedFd<'_>; 2], u64) {
        ([self.listener.as_fd(), self.lock.as_fd()], self.inode)
    }

    /// Listens. A repeated call makes this process the one that new peers see.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn listen(&self) -> Result<(), Error> {
        let listening = Backlog::new(1024).and_then(|backlog| listen(&self.listener, backlog));
        listening.map_err(|error| Error::path("listen on", &self.path)(error.into()))
    }

    /// Sets whether dropping this removes the socket's file.
    pub(crate) fn set_removes_file(&mut self, removes: bool) {
        self.removes = removes;
    }

    /// The next pending connection, if any.
    ///
    /// # Errors
    /// For example when there are no descriptors left.
    pub(crate) fn accept(&self) -> io::Result<Option<Peer>> {
        match descriptors::accept(&self.listener) {
            Ok(fd) => {
                let peer = getsockopt(&fd, PeerCredentials)?;
                Ok(Some(Peer { pid: peer.pid(), uid: peer.uid(), fd }))
            }
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Another process may have created its own socket there, which must stay. A socket that is
        // already gone does no harm.
        if self.removes && fs::symlink_metadata(&self.path).is_ok_and(|status| status.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
            let _ = fs::remove_file(settings_file(&self.path));
        }
    }
}

/// Takes the lock. A collector that is just ending has removed its socket and holds the lock for a
/// moment longer.
fn lock_with_retry(socket: &Path) -> Result<fs::File, Error> {
    let begun = Instant::now();
    loop {
        match lock(socket) {
            Err(Error::Running { .. }) if !socket.exists() && begun.elapsed() < RELEASE_TIMEOUT => {
                thread::sleep(RELEASE_TIMEOUT / 100)
            }
            result => return result,
        }
    }
}

/// The lock file stays: after its removal two collectors could hold locks on two files of one name.
fn lock(socket: &Path) -> Result<fs::File, Error> {
    let mut name = socket.as_os_str().to_owned();
    name.push(".lock");
    let path = PathBuf::from(name);
    let mut file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&path)
        .map_err(Error::path("open", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let pid = fs::read_to_string(&path).unwrap_or_default().trim().to_string();
            return Err(Error::Running { path: socket.into(), pid });
        }
        Err(TryLockError::Error(error)) => return Err(Error::path("lock", &path)(error)),
    }
    // The pid is for people; the collector also runs on a full disk.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

/// Whether a peer may talk to this collector: only processes of its own user may.
#[must_use]
pub(super) fn is_own(peer: &Peer) -> bool {
    peer.uid == getuid().as_raw()
}

/// Reads one packet.
pub(super) fn receive(fd: &OwnedFd) -> Received {
    let mut bytes = vec![0; MAX_PACKET_BYTES + 1];
    let packet = match descriptors::receive(fd, &mut bytes) {
        Ok(packet) => packet,
        Err(Errno::EAGAIN | Errno::EINTR) => return Received::Nothing,
        Err(_) => return Received::End,
    };
    // A hook sends one; any other is closed.
    let descriptor = packet.descriptors.into_iter().next();
    if packet.bytes == 0 {
        // On a SEQPACKET socket an empty packet looks like the end; no hook sends one.
        return Received::End;
    }
    if packet.is_truncated || packet.bytes > MAX_PACKET_BYTES {
        return Received::Bad(format!("a packet of more than {MAX_PACKET_BYTES} bytes"));
    }
    match lenient::decode::<HookMessage>(&bytes[..packet.bytes]) {
        Ok(message) if message.message.is_none() => Received::Bad("a message of an unknown kind".into()),
        Ok(message) => Received::Message(Box::new(message), descriptor),
        Err(error) => Received::Bad(format!("a packet that is not a message: {error}")),
    }
}

/// Sends the welcome. A failure only concerns the peer.
pub(super) fn welcome(fd: &OwnedFd) {
    let welcome = Welcome { collector_pid: std::process::id() as i32 };
    let reply = NodeReply { message: Some(node_reply::Message::Welcome(welcome)) };
    let _ = send(fd.as_raw_fd(), &reply.encode_to_vec(), MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_second_collector_fails_and_a_stale_socket_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own/n.sock");
        let first = Endpoint::open(&path).unwrap();
        let Err(Error::Running { pid, .. }) = Endpoint::open(&path) else { panic!("two collectors on one socket") };
        assert_eq!(pid, std::process::id().to_string());
        // A killed collector leaves its socket, but not its lock.
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        Endpoint::open(&path).unwrap();
    }

    #[test]
    fn a_foreign_folder_and_an_existing_file_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own/n.sock");
        private_directory(&folder.path().join("own")).unwrap();
        fs::write(&path, "keep me").unwrap();
        assert!(Endpoint::open(&path).unwrap_err().to_string().contains("is not a socket"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "keep me");
        fs::set_permissions(folder.path().join("own"), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Endpoint::open(&path).unwrap_err().to_string().contains("mode 777"));
        assert!(Endpoint::open(Path::new("n.sock")).unwrap_err().to_string().contains("absolute path"));
    }
}
