//! A node collector that only listens: it sends Welcome and stores the messages of the hooks. It
//! can stop reading, disappear and come back.

use std::{
    fs::{self, File},
    io::IoSliceMut,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use nix::{
    cmsg_space,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, getsockopt,
        listen, recvmsg, send, socket, sockopt::PeerCredentials,
    },
};
use xpu_timer_proto::{
    Message as _, ring,
    socket::MAX_PACKET_BYTES,
    v1::{
        FlightRecord, HangSignal, Hello, HookMessage, NodeReply, Operation, Welcome, hook_message::Message, node_reply,
    },
};

use crate::tools::{PATIENCE, wait_until};

/// The collector. Its connections end with it, as those of a killed collector do.
pub struct FakeCollector {
    /// Its socket.
    pub path: PathBuf,
    log: Arc<Mutex<MessageLog>>,
    /// Number of polls of all connections that found nothing to read.
    quiet: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// All received messages.
#[derive(Default)]
struct MessageLog {
    messages: Vec<(i32, Message)>,
    rings: Vec<(i32, File)>,
    ended: Vec<i32>,
}

/// Whether a collector reads its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadMode {
    /// It reads them.
    Reads,
    /// It sends Welcome and never reads.
    Ignores,
}

impl FakeCollector {
    /// Listens at `path` and replaces an existing socket.
    ///
    /// # Panics
    /// It cannot listen there.
    #[must_use]
    pub fn listen(path: &Path, mode: ReadMode) -> Self {
        let _ = fs::remove_file(path);
        let flags = SockFlag::SOCK_CLOEXEC;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).expect("a socket");
        bind(listener.as_raw_fd(), &UnixAddr::new(path).expect("a short path")).expect("the path is free");
        listen(&listener, Backlog::new(64).expect("a valid backlog")).expect("a bound socket listens");
        let log = Arc::new(Mutex::new(MessageLog::default()));
        let (quiet, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (log, quiet, stop) = (Arc::clone(&log), Arc::clone(&quiet), Arc::clone(&stop));
            std::thread::spawn(move || serve(&listener, mode, &log, &quiet, &stop))
        };
        FakeCollector { path: path.into(), log, quiet, stop, thread: Some(thread) }
    }

    fn pick<T>(&self, pick: impl Fn(&(i32, Message)) -> Option<T>) -> Vec<T> {
        self.log.lock().expect("the listening thread does not panic").messages.iter().filter_map(pick).collect()
    }

    /// Every Hello, with the process that sent it.
    #[must_use]
    pub fn hellos(&self) -> Vec<(i32, Hello)> {
        self.pick(|(pid, message)| match message {
            Message::Hello(hello) => Some((*pid, hello.clone())),
            _ => None,
        })
    }

    /// Every hang signal.
    #[must_use]
    pub fn hangs(&self) -> Vec<(i32, HangSignal)> {
        self.pick(|(pid, message)| match message {
            Message::Hang(hang) => Some((*pid, hang.clone())),
            _ => None,
        })
    }

    /// Tickets of resolved operations.
    #[must_use]
    pub fn resolved(&self) -> Vec<(i32, u64)> {
        self.pick(|(pid, message)| match message {
            Message::Resolved(resolved) => Some((*pid, resolved.ticket)),
            _ => None,
        })
    }

    /// Ranks that became known after Hello.
    #[must_use]
    pub fn ranks(&self) -> Vec<(i32, xpu_timer_proto::v1::RankInfo)> {
        self.pick(|(pid, message)| match message {
            Message::Rank(rank) => Some((*pid, rank.clone())),
            _ => None,
        })
    }

    /// Processes that sent Goodbye.
    #[must_use]
    pub fn goodbyes(&self) -> Vec<i32> {
        self.pick(|(pid, message)| matches!(message, Message::Goodbye(_)).then_some(*pid))
    }

    /// Processes whose connection ended.
    #[must_use]
    pub fn ended(&self) -> Vec<i32> {
        self.log.lock().expect("the listening thread does not panic").ended.clone()
    }

    /// The flight record of a process, from the descriptor of its last Hello.
    ///
    /// # Panics
    /// It sent none, or one that is not a ring.
    #[must_use]
    pub fn ring(&self, pid: i32) -> FlightRecord {
        let read = |file: &File| ring::read(|at, buffer| file.read_exact_at(buffer, at), Default::default(), 0);
        self.with_ring(pid, read).expect("a ring of this version")
    }

    /// All operations in a ring. A flight record contains only the last ones.
    ///
    /// # Panics
    /// See [`FakeCollector::ring`].
    #[must_use]
    pub fn operations(&self, pid: i32) -> Vec<Operation> {
        self.with_ring(pid, |file| {
            let read_at = |at, buffer: &mut [u8]| file.read_exact_at(buffer, at);
            let names = ring::read_names(read_at)?;
            let mut slots = Vec::new();
            ring::read_slots(read_at, 0, ring::op::SLOTS, &mut slots)?;
            slots.retain(|words| words[ring::op::TICKET] != 0);
            let name = |words: &[u64; ring::op::WORDS]| names.get(&words[ring::op::FUNCTION]).cloned();
            Ok::<_, std::io::Error>(
                slots.iter().map(|words| ring::operation(words, name(words).unwrap_or_default())).collect(),
            )
        })
        .expect("its operations")
    }

    /// The counters of a process: launches, copies, allocations.
    ///
    /// # Panics
    /// See [`FakeCollector::ring`].
    #[must_use]
    pub fn totals(&self, pid: i32) -> ring::lane::Totals {
        self.with_ring(pid, |file| ring::lane::totals(&|at, buffer: &mut [u8]| file.read_exact_at(buffer, at)))
            .expect("its lanes")
    }

    /// The header of a process's ring.
    ///
    /// # Panics
    /// See [`FakeCollector::ring`].
    #[must_use]
    pub fn header(&self, pid: i32) -> [u64; ring::header::WORDS] {
        self.with_ring(pid, |file| ring::read_header(|at, buffer| file.read_exact_at(buffer, at))).expect("its header")
    }

    /// Writes a word of the header, as the collector does.
    ///
    /// # Panics
    /// See [`FakeCollector::ring`].
    pub fn write_header(&self, pid: i32, word: usize, value: u64) {
        let write = |file: &File| file.write_all_at(&value.to_le_bytes(), word as u64 * 8);
        self.with_ring(pid, write).expect("a ring that can be written");
    }

    fn with_ring<R>(&self, pid: i32, read: impl FnOnce(&File) -> R) -> R {
        let log = self.log.lock().expect("the listening thread does not panic");
        let found = log.rings.iter().rev().find(|(owner, _)| *owner == pid);
        let (_, file) = found.expect("the process has sent its ring");
        read(file)
    }

    /// Waits until everything sent before this call has been received.
    ///
    /// # Panics
    /// The hooks never stop sending.
    pub fn hear_all(&self) {
        // The current poll may have begun before this call; the next one has not.
        let seen = self.quiet.load(Ordering::SeqCst);
        wait_until(PATIENCE, "all messages are received", || self.quiet.load(Ordering::SeqCst) > seen + 1);
    }

    /// Waits for the first Hello and returns its process.
    ///
    /// # Panics
    /// None arrives.
    pub fn wait_hello(&self) -> i32 {
        wait_until(PATIENCE, "a Hello", || !self.hellos().is_empty());
        self.hellos()[0].0
    }
}

impl Drop for FakeCollector {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &OwnedFd, mode: ReadMode, log: &Mutex<MessageLog>, quiet: &AtomicU64, stop: &AtomicBool) {
    let mut connections: Vec<(OwnedFd, i32)> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let sockets = std::iter::once(listener.as_fd()).chain(connections.iter().map(|(socket, _)| socket.as_fd()));
        let mut waiting: Vec<PollFd> = sockets.map(|socket| PollFd::new(socket, PollFlags::POLLIN)).collect();
        if mode == ReadMode::Ignores {
            waiting.truncate(1);
        }
        let _ = poll(&mut waiting, PollTimeout::from(20u16));
        let ready: Vec<bool> = waiting.iter().map(|socket| socket.any().unwrap_or(false)).collect();
        if !ready.contains(&true) {
            quiet.fetch_add(1, Ordering::SeqCst);
        }
        let mut index = 0;
        connections.retain(|(socket, pid)| {
            index += 1;
            !ready.get(index).copied().unwrap_or(false) || receive(socket, *pid, log)
        });
        if ready[0] {
            connections.extend(welcome(listener));
        }
    }
}

fn welcome(listener: &OwnedFd) -> Option<(OwnedFd, i32)> {
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC).ok()?;
    let socket = owned(fd);
    let pid = getsockopt(&socket, PeerCredentials).ok()?.pid();
    let welcome = Welcome { collector_pid: std::process::id() as i32 };
    let reply = NodeReply { message: Some(node_reply::Message::Welcome(welcome)) };
    // Reading from the connection detects a peer that is gone.
    let _ = send(socket.as_raw_fd(), &reply.encode_to_vec(), MsgFlags::MSG_NOSIGNAL);
    Some((socket, pid))
}

/// Receives one packet. Returns false if the connection has ended.
fn receive(socket: &OwnedFd, pid: i32, log: &Mutex<MessageLog>) -> bool {
    let mut packet = vec![0; MAX_PACKET_BYTES];
    let mut parts = [IoSliceMut::new(&mut packet)];
    let mut control = cmsg_space!([i32; 4]);
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC);
    let mut descriptors = Vec::new();
    let length = received.map_or(0, |message| {
        for control in message.cmsgs().into_iter().flatten() {
            if let ControlMessageOwned::ScmRights(rights) = control {
                descriptors.extend(rights.into_iter().map(owned));
            }
        }
        message.bytes
    });
    let mut log = log.lock().expect("no thread panics while it holds the lock");
    if length == 0 {
        log.ended.push(pid);
        return false;
    }
    log.rings.extend(descriptors.into_iter().map(|ring| (pid, File::from(ring))));
    if let Some(message) = HookMessage::decode(&packet[..length]).ok().and_then(|message| message.message) {
        log.messages.push((pid, message));
    }
    true
}

#[allow(unsafe_code)]
fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel has just created the descriptor for this process.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Time within which a hook must notice that a collector is back: its longest pause between two
/// attempts, plus a margin.
pub const RECONNECT: Duration = Duration::from_secs(20);
