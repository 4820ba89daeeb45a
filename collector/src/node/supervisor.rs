//! The small parent of a node collector. It has one thread (the log's thread starts with its first
//! line) and no state but the listening socket and its lock. The worker, a child that runs the same
//! program, does everything else. When the worker dies, the supervisor starts another one; when the
//! supervisor dies, the worker starts another supervisor. The pair survives `kill -9` of either
//! one, but not of both at once.
//!
//! The supervisor holds the listening socket. Connections wait in its backlog while no worker runs,
//! and its pid, which hooks give to Yama, stays the same: Yama lets a worker read every process
//! that has named the worker's parent.

use std::{
    io::{self, IoSlice},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::bail;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        prctl,
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
        socket::{AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair},
    },
    unistd::dup2_stdin,
};
use tracing::{info, warn};

use crate::{
    config::Settings,
    error::Error,
    logging,
    node::socket::Endpoint,
    os::{descriptors, process},
};

/// One end of the socket between a supervisor and its worker. It shows either process at once that
/// the other has ended.
#[derive(Debug)]
pub(crate) struct ProcessLink(OwnedFd);

/// The messages between both sides, one byte each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkMessage {
    /// Worker: it serves.
    Up = b'u' as isize,
    /// Worker: it ends, on request or because nobody needs it.
    Ends = b'e' as isize,
    /// Supervisor: the worker must end.
    Stop = b's' as isize,
    /// Either: carries the listener and its lock.
    Endpoint = b'l' as isize,
}

/// The result of a read.
#[derive(Debug)]
pub(crate) enum ReadResult {
    /// A message, its payload, and its descriptors.
    Message(LinkMessage, Vec<u8>, Vec<OwnedFd>),
    /// Nothing for now.
    Nothing,
    /// The other process has ended.
    Gone,
}

/// A worker that has lived for this long works.
const STABLE_AFTER: Duration = Duration::from_secs(60);
/// Pause before the second of several restarts. It doubles with each further restart.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between restarts.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// How long a new process waits for the endpoint.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_MESSAGE_BYTES: usize = 64;

impl ProcessLink {
    /// Creates both ends.
    fn pair() -> io::Result<(ProcessLink, ProcessLink)> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (one, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Ok((ProcessLink(one), ProcessLink(other)))
    }

    /// Takes the end that this process got as its standard input, and replaces standard input with
    /// /dev/null.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub(crate) fn inherited() -> io::Result<ProcessLink> {
        let link = io::stdin().as_fd().try_clone_to_owned()?;
        dup2_stdin(std::fs::File::open("/dev/null")?)?;
        Ok(ProcessLink(link))
    }

    /// Sends a message. The next read shows if the other process has ended.
    pub(crate) fn send_message(&self, message: LinkMessage) {
        let _ = self.send(&[message as u8], &[]);
    }

    /// Hands the endpoint over.
    fn hand_over(&self, endpoint: &Endpoint) -> io::Result<()> {
        let (fds, inode) = endpoint.parts();
        self.send(&[&[LinkMessage::Endpoint as u8][..], &inode.to_ne_bytes()].concat(), &fds)
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let numbers: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = (!fds.is_empty()).then_some(ControlMessage::ScmRights(&numbers));
        let parts = [IoSlice::new(bytes)];
        sendmsg::<()>(self.0.as_raw_fd(), &parts, rights.as_slice(), MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }

    /// Reads the next message.
    pub(crate) fn receive(&self) -> ReadResult {
        let mut bytes = [0; MAX_MESSAGE_BYTES];
        let (got, fds) = match descriptors::receive(&self.0, &mut bytes) {
            Ok(packet) => (packet.bytes, packet.descriptors),
            Err(Errno::EAGAIN | Errno::EINTR) => return ReadResult::Nothing,
            Err(_) => return ReadResult::Gone,
        };
        let messages = [LinkMessage::Up, LinkMessage::Ends, LinkMessage::Stop, LinkMessage::Endpoint];
        match messages.into_iter().find(|message| got > 0 && *message as u8 == bytes[0]) {
            Some(message) => ReadResult::Message(message, bytes[1..got].to_vec(), fds),
            None if got > 0 => ReadResult::Nothing,
            None => ReadResult::Gone,
        }
    }

    /// Receives the endpoint, which is the first message on an inherited socket.
    ///
    /// # Errors
    /// When it does not arrive.
    pub(crate) fn take_endpoint(&self, settings: &Settings) -> Result<Endpoint, Error> {
        wait(&[self.as_fd()], Some(HANDOVER_TIMEOUT));
        let wrong = || Error::system("take over the socket")(io::Error::from(io::ErrorKind::InvalidData));
        let ReadResult::Message(LinkMessage::Endpoint, inode, fds) = self.receive() else { return Err(wrong()) };
        let inode = u64::from_ne_bytes(inode.try_into().map_err(|_| wrong())?);
        let [listener, lock]: [OwnedFd; 2] = fds.try_into().map_err(|_| wrong())?;
        Ok(Endpoint::taken_over(&settings.socket, listener, lock, inode))
    }
}

impl AsFd for ProcessLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Starts this program again, as a worker or as a supervisor, with one end of a new socket and with
/// the endpoint.
fn start(settings: &Settings, endpoint: &Endpoint, role: &[&str]) -> io::Result<(Child, ProcessLink)> {
    let (link, theirs) = ProcessLink::pair()?;
    link.hand_over(endpoint)?;
    // This path works even after the program's file has been replaced or removed.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("xpu_timer_collector").arg("node").args(role);
    if let Some(path) = logging::path() {
        command.arg("--log").arg(path);
    }
    if let Some(linger) = settings.linger {
        command.arg("--linger").arg(linger.as_secs_f64().to_string());
    }
    let child = command.stdin(Stdio::from(theirs.0)).spawn()?;
    Ok((child, link))
}

/// Names this process after the program's file: a process that was started through `/proc/self/exe`
/// has another name.
fn set_process_name() {
    // The process works without the name, too.
    let _ = prctl::set_name(c"xpu_timer_colle");
}

/// Waits until a descriptor is readable or the time is up. Returns false when the poll failed.
fn wait(fds: &[BorrowedFd<'_>], patience: Option<Duration>) -> bool {
    let mut fds: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    !matches!(ppoll(&mut fds, patience.map(Into::into), None), Err(errno) if errno != Errno::EINTR)
}

/// Schedules the restarts of a worker that died.
#[derive(Debug, Default)]
struct Restarts {
    // Consecutive failures, where no worker lived long.
    failures: u32,
    failing_since: Option<Instant>,
}

impl Restarts {
    /// The pause before the next start; `None` when workers have failed for so long that nobody can
    /// need one any more.
    fn pause(&mut self, lived: Duration, linger: Option<Duration>, now: Instant) -> Option<Duration> {
        if lived >= STABLE_AFTER {
            *self = Self::default();
        }
        let since = *self.failing_since.get_or_insert(now);
        if linger.is_some_and(|linger| now - since > linger.max(STABLE_AFTER)) {
            return None;
        }
        let doublings = self.failures.checked_sub(1);
        self.failures += 1;
        Some(doublings.map_or(Duration::ZERO, |doublings| {
            FIRST_PAUSE.checked_mul(1 << doublings.min(16)).unwrap_or(LAST_PAUSE).min(LAST_PAUSE)
        }))
    }
}

/// A worker that runs, or has just ended.
struct Worker {
    // `None` when it is not a child of this process, which has replaced a killed supervisor.
    child: Option<Child>,
    link: ProcessLink,
    started: Instant,
    up: bool,
    ends: bool,
}

/// Runs the supervisor until its worker ends in order. With `tied` it takes over a running worker.
///
/// # Errors
/// When another collector holds this socket, the socket cannot be opened, or the first worker does
/// not start.
pub(crate) fn run(settings: &Settings, tied: bool) -> anyhow::Result<()> {
    set_process_name();
    let asked = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    asked.thread_block()?;
    let signals = SignalFd::with_flags(&asked, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let now = Instant::now();
    let (mut endpoint, mut worker) = if tied {
        let link = ProcessLink::inherited()?;
        let endpoint = link.take_endpoint(settings)?;
        (endpoint, Some(Worker { child: None, link, started: now, up: true, ends: false }))
    } else {
        (Endpoint::open(&settings.socket)?, None)
    };
    endpoint.set_removes_file(true);
    let mut was_up = tied;
    let mut restarts = Restarts::default();
    let mut due = now;
    let mut stopping = false;
    loop {
        if worker.is_none() && Instant::now() >= due {
            // Hooks see the pid of the process that called listen last.
            endpoint.listen()?;
            match start(settings, &endpoint, &["--tied"]) {
                Ok((child, link)) => {
                    worker = Some(Worker { child: Some(child), link, started: Instant::now(), up: false, ends: false });
                }
                Err(error) if !was_up => return Err(error.into()),
                Err(error) => {
                    warn!("the collector cannot be started: {error}");
                    let Some(pause) = restarts.pause(Duration::ZERO, settings.linger, Instant::now()) else {
                        bail!("the collector has not started for {:?}", settings.linger);
                    };
                    due = Instant::now() + pause.max(FIRST_PAUSE);
                }
            }
        }
        let patience = worker.is_none().then(|| due.saturating_duration_since(Instant::now()));
        let fds = std::iter::once(signals.as_fd()).chain(worker.as_ref().map(|worker| worker.link.as_fd()));
        if !wait(&fds.collect::<Vec<_>>(), patience) {
            std::thread::sleep(FIRST_PAUSE);
        }
        while let Ok(Some(_)) = signals.read_signal() {
            stopping = true;
            match &worker {
                Some(worker) => worker.link.send_message(LinkMessage::Stop),
                None => return Ok(()),
            }
        }
        let Some(one) = &mut worker else { continue };
        match one.link.receive() {
            ReadResult::Message(LinkMessage::Up, ..) => (one.up, was_up) = (true, true),
            ReadResult::Message(LinkMessage::Ends, ..) => one.ends = true,
            ReadResult::Message(..) | ReadResult::Nothing => {}
            ReadResult::Gone => {
                let lived = one.started.elapsed();
                let (ends, status) = (one.ends || stopping, one.child.as_mut().and_then(|child| child.wait().ok()));
                worker = None;
                if ends {
                    return Ok(());
                }
                let how = status.map_or("ended".into(), describe);
                if !was_up && status.is_some_and(|status| status.signal().is_none()) {
                    bail!("the collector did not start: {how}");
                }
                let Some(pause) = restarts.pause(lived, settings.linger, Instant::now()) else {
                    bail!("the collector died repeatedly and is not restarted: {how}");
                };
                warn!("the collector {how}; it restarts in {pause:.1?}");
                due = Instant::now() + pause;
            }
        }
    }
}

fn describe(status: ExitStatus) -> String {
    process::describe(status.into_raw())
}

/// The worker's side of the connection to its supervisor.
#[derive(Debug)]
pub(crate) struct SupervisorLink {
    link: ProcessLink,
    // Set when this process started the supervisor.
    child: Option<Child>,
    gone: bool,
    tries: Restarts,
    next: Instant,
}

/// What a worker learned from its supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SupervisorEvent {
    /// The worker must end.
    Stop,
    /// The supervisor has ended; another one has been started, or will be.
    Alone,
}

impl SupervisorLink {
    /// Begins as a worker that a supervisor has started: takes its end of the socket, and the
    /// endpoint.
    ///
    /// # Errors
    /// When the endpoint does not arrive.
    pub(crate) fn begin(settings: &Settings) -> Result<(SupervisorLink, Endpoint), Error> {
        set_process_name();
        // The supervisor has blocked the signals that it reads, and its children inherit that.
        let _ = SigSet::all().thread_unblock();
        let link = ProcessLink::inherited().map_err(Error::system("have the supervisor's socket"))?;
        let endpoint = link.take_endpoint(settings)?;
        let supervised =
            SupervisorLink { link, child: None, gone: false, tries: Restarts::default(), next: Instant::now() };
        Ok((supervised, endpoint))
    }

    /// For poll: readable when there is a message; `None` while no supervisor lives.
    #[must_use]
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        (!self.gone).then(|| self.link.as_fd())
    }

    /// Pid of the supervisor, when it lives.
    #[must_use]
    pub(crate) fn pid(&self) -> Option<u32> {
        let pid = || self.child.as_ref().map_or_else(std::os::unix::process::parent_id, Child::id);
        (!self.gone).then(pid)
    }

    /// Reports that this worker serves.
    pub(crate) fn up(&self) {
        self.link.send_message(LinkMessage::Up);
    }

    /// Reports that this worker ends in order. Returns true when a supervisor lives, which removes
    /// the socket.
    pub(crate) fn announce_end(&self) -> bool {
        self.link.send_message(LinkMessage::Ends);
        !self.gone
    }

    /// Handles messages of the supervisor, and starts another one when it has ended.
    pub(crate) fn turn(&mut self, settings: &Settings, endpoint: &Endpoint) -> Option<SupervisorEvent> {
        if self.gone {
            self.start(settings, endpoint);
            return None;
        }
        match self.link.receive() {
            ReadResult::Message(LinkMessage::Stop, ..) => Some(SupervisorEvent::Stop),
            ReadResult::Message(..) | ReadResult::Nothing => None,
            ReadResult::Gone => {
                warn!("the supervisor has ended; starting another one");
                // It is dead, so this does not block.
                let _ = self.child.take().map(|mut child| child.wait());
                self.gone = true;
                // New peers now see this process, which is not a child of the next supervisor.
                if let Err(error) = endpoint.listen() {
                    warn!("{error}");
                }
                self.start(settings, endpoint);
                Some(SupervisorEvent::Alone)
            }
        }
    }

    fn start(&mut self, settings: &Settings, endpoint: &Endpoint) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        // There is no limit: it is worth another attempt for as long as this process lives.
        self.next = now + self.tries.pause(Duration::ZERO, None, now).unwrap_or(LAST_PAUSE);
        match start(settings, endpoint, &["--supervise", "--tied"]) {
            Ok((child, link)) => {
                info!("supervised by pid {}", child.id());
                (self.child, self.link, self.gone) = (Some(child), link, false);
            }
            Err(error) => warn!("no supervisor can be started: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_pauses_grow_until_the_reason_is_gone() {
        let begun = Instant::now();
        let linger = Some(Duration::from_secs(600));
        let mut restarts = Restarts::default();
        let mut at = |seconds: u64, lived: u64| {
            let (lived, now) = (Duration::from_secs(lived), begun + Duration::from_secs(seconds));
            restarts.pause(lived, linger, now).map(|pause| pause.as_millis())
        };
        assert_eq!([at(0, 0), at(0, 0), at(0, 0), at(0, 0)], [Some(0), Some(100), Some(200), Some(400)]);
        assert_eq!(at(1, 60), Some(0), "it had worked");
        for _ in 0..20 {
            assert!(at(2, 1).is_some_and(|pause| pause <= 30_000));
        }
        assert_eq!(at(300, 1), Some(30_000));
        assert_eq!(at(602, 1), None, "no client for the time after which an unused collector exits");
        assert_eq!(at(603, 61), Some(0));
    }

    #[test]
    fn a_link_hands_over_the_endpoint_and_reports_a_closed_side() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own/n.sock");
        let source = xpu_timer_proto::env::Source::new(|_| None, "");
        let settings = Settings { socket: path.clone(), ..Settings::new(&source, None, 0) };
        let (one, other) = ProcessLink::pair().unwrap();
        let first = Endpoint::open(&path).unwrap();
        one.hand_over(&first).unwrap();
        let taken = other.take_endpoint(&settings).unwrap();
        assert!(taken.accept().unwrap().is_none());
        one.send_message(LinkMessage::Up);
        assert!(matches!(other.receive(), ReadResult::Message(LinkMessage::Up, ..)));
        assert!(matches!(other.receive(), ReadResult::Nothing));
        drop(one);
        assert!(matches!(other.receive(), ReadResult::Gone));
        drop(taken);
        assert!(path.exists(), "a worker that dies leaves the socket to its supervisor");
        drop(first);
        assert!(!path.exists());
    }
}
