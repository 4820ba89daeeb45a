//! The node collector: checks whether one answers, starts one if not, and waits for it for a
//! limited time.

use std::{
    ffi::OsString,
    fs::{DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Seek, SeekFrom},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, getsockopt, recv, socket,
        sockopt::PeerCredentials,
    },
};
use xpu_timer_proto::{
    Message,
    socket::{self as place, MAX_PACKET_BYTES},
    v1::{NodeReply, node_reply},
};

use crate::{
    bounded_io,
    config::{Config, LOG_FILE},
    process,
};

/// Time from a collector's start to its first Welcome.
const START_DEADLINE: Duration = Duration::from_secs(5);
/// Time within which a listening collector must answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);
/// Time to wait after a collector ended at once: another launcher's collector may be starting.
const OTHER_DEADLINE: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Size of a log's tail that is searched for its last line.
const LOG_TAIL_BYTES: u64 = 1024;
/// Size of a collector's first output that is searched for errors. It may warn about every variable
/// first.
const LOG_START_BYTES: u64 = 64 << 10;

/// A node collector that answers.
#[derive(Debug)]
pub(crate) struct RunningCollector {
    /// Its process id; 0 if it is in another PID namespace.
    pub pid: i32,
    /// A limitation, if it was just started; a line.
    pub remark: Option<String>,
}

/// The job's settings for which the collector of its socket has other values, and that require
/// another collector.
pub(crate) fn differing_settings(config: &Config) -> Vec<&'static str> {
    let file = std::fs::read_to_string(place::settings_file(&config.socket)).unwrap_or_default();
    place::unlike(&config.wanted, &file)
}

/// The job's settings that have no effect because the collector of its socket keeps its own values;
/// a line.
pub(crate) fn overruled(config: &Config) -> Option<String> {
    let file = std::fs::read_to_string(place::settings_file(&config.socket)).unwrap_or_default();
    let names = place::overruled(&config.wanted, &file);
    let message = || {
        format!("the node collector keeps its own values of {}, which differ from those of this job", names.join(", "))
    };
    (!names.is_empty()).then(message)
}

/// The configuration of the job with its own collector.
///
/// # Errors
/// The path of its socket would be too long.
pub(crate) fn with_own_collector(config: &Config) -> Result<Config> {
    let socket = place::beside(&config.socket, &config.wanted);
    if socket.as_os_str().len() > place::MAX_PATH_BYTES {
        bail!("{} has more than {} bytes", socket.display(), place::MAX_PATH_BYTES);
    }
    Ok(Config { socket, ..config.clone() })
}

/// Makes sure that a node collector answers. If none does, starts one with these `changes` of the
/// environment.
///
/// # Errors
/// Why none answers, with the location of its log.
pub(crate) fn ensure(config: &Config, changes: &[(&str, OsString)]) -> Result<RunningCollector> {
    match handshake(&config.socket, ANSWER_DEADLINE) {
        Ok(pid) => return Ok(RunningCollector { pid, remark: None }),
        Err(NoAnswer::Absent) => {}
        Err(why) => bail!("{}: {why}", config.socket.display()),
    }
    let program = find(config)?;
    let (log, log_path) = open_log(config);
    let mut spoken = log.try_clone();
    let before = log.metadata().map_or(0, |metadata| metadata.len());
    let mut arguments = vec!["node", "--supervise", "--linger", &config.linger];
    if let Ok(path) = &log_path {
        arguments.extend(["--log", path]);
    }
    let log_name = log_path.as_ref().map_or_else(ToString::to_string, Clone::clone);
    let mut child = process::spawn_detached(&program, &arguments, changes, log)
        .with_context(|| format!("{} cannot be started", program.display()))?;

    let begun = Instant::now();
    let mut deadline = START_DEADLINE;
    let mut ended = false;
    loop {
        let why = match handshake(&config.socket, deadline.saturating_sub(begun.elapsed())) {
            Ok(pid) => return Ok(RunningCollector { pid, remark: spoken.ok().and_then(|log| problems(log, before)) }),
            Err(why) => why,
        };
        if !ended && child.has_ended() {
            ended = true;
            deadline = deadline.min(begun.elapsed() + OTHER_DEADLINE);
        }
        if begun.elapsed() >= deadline {
            let what = if ended { "ended at once" } else { "does not answer" };
            let last_line = spoken
                .as_mut()
                .ok()
                .filter(|_| ended)
                .and_then(last_log_line)
                .map(|line| format!(", saying \"{line}\""));
            let last_line = last_line.unwrap_or_default();
            bail!("{} {what}{last_line} ({}: {why}); its log: {log_name}", program.display(), config.socket.display());
        }
        child.wait(POLL_INTERVAL, ended);
    }
}

/// The process id of the node collector that answers.
///
/// # Errors
/// Why none answers.
pub(crate) fn answers(socket: &Path) -> Result<i32, NoAnswer> {
    handshake(socket, ANSWER_DEADLINE)
}

/// Why no collector answers.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    /// No process listens.
    Absent,
    /// A process listens, but it is not a collector that we can use.
    Other(String),
}

impl std::fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoAnswer::Absent => f.write_str("no process listens there"),
            NoAnswer::Other(why) => f.write_str(why),
        }
    }
}

impl From<Errno> for NoAnswer {
    fn from(error: Errno) -> Self {
        match error {
            Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR => NoAnswer::Absent,
            // It ended between our connect and its Welcome.
            Errno::ECONNRESET => NoAnswer::Absent,
            other => NoAnswer::Other(other.desc().into()),
        }
    }
}

/// Connects to the user's collector, and returns its process id after its Welcome.
fn handshake(path: &Path, patience: Duration) -> Result<i32, NoAnswer> {
    let begun = Instant::now();
    let address = UnixAddr::new(path)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let connection = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    loop {
        match connect(connection.as_raw_fd(), &address) {
            Ok(()) => break,
            // Its backlog is full because many ranks start at once.
            Err(Errno::EAGAIN) if begun.elapsed() < patience => std::thread::sleep(POLL_INTERVAL),
            Err(error) => return Err(error.into()),
        }
    }
    let peer = getsockopt(&connection, PeerCredentials)?;
    let owner = peer.uid();
    if owner != nix::unistd::geteuid().as_raw() && owner != 0 {
        return Err(NoAnswer::Other(format!("the socket belongs to user {owner}")));
    }
    welcome(&connection, patience.saturating_sub(begun.elapsed()))?;
    Ok(peer.pid())
}

fn welcome(connection: &OwnedFd, patience: Duration) -> Result<(), NoAnswer> {
    let mut waiting = [PollFd::new(connection.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
    if poll(&mut waiting, timeout)? == 0 {
        return Err(NoAnswer::Other("a process listens there but does not answer".into()));
    }
    let mut packet = vec![0; MAX_PACKET_BYTES];
    let length = recv(connection.as_raw_fd(), &mut packet, MsgFlags::empty())?;
    if length == 0 {
        return Err(NoAnswer::Absent);
    }
    match NodeReply::decode(&packet[..length]).map(|reply| reply.message) {
        Ok(Some(node_reply::Message::Welcome(_))) => Ok(()),
        _ => Err(NoAnswer::Other("the process that listens there is not a node collector of this version".into())),
    }
}

/// The collector's program: `XPU_TIMER_DAEMON_PATH`, else beside this program or on the PATH.
///
/// # Errors
/// It does not exist.
pub(crate) fn find(config: &Config) -> Result<PathBuf> {
    const FILE: &str = "xpu_timer_collector";
    if let Some(daemon) = &config.daemon {
        // The collector starts in the root folder, so a relative path would be wrong.
        let named = || format!("XPU_TIMER_DAEMON_PATH={}", daemon.display());
        bounded_io::answers(daemon).with_context(named)?;
        return std::path::absolute(daemon).with_context(named);
    }
    let beside = config.beside.as_ref().map(|folder| folder.join(FILE));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = beside.into_iter().chain(std::env::split_paths(&path).map(|folder| folder.join(FILE)));
    places
        .filter_map(|place| std::path::absolute(place).ok())
        .find(|place| place.is_file())
        .with_context(|| format!("{FILE} is neither beside this program nor in PATH; set XPU_TIMER_DAEMON_PATH"))
}

/// The last line of a collector's log: its error if it did not start.
fn last_log_line(log: &mut File) -> Option<String> {
    let length = log.seek(SeekFrom::End(0)).ok()?;
    log.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES))).ok()?;
    let mut end = Vec::new();
    log.take(LOG_TAIL_BYTES).read_to_end(&mut end).ok()?;
    let end = String::from_utf8_lossy(&end);
    end.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(String::from)
}

/// The errors that a collector logged before its Welcome, without the time and the place in the
/// code.
fn problems(mut log: File, before: u64) -> Option<String> {
    let mut text = Vec::new();
    let read = log.seek(SeekFrom::Start(before)).and_then(|_| log.take(LOG_START_BYTES).read_to_end(&mut text));
    let text = String::from_utf8_lossy(if read.is_ok() { &text } else { &[] }).into_owned();
    let message = |line: &str| Some(line.split_once(" ERROR ")?.1.split_once(": ")?.1.trim().to_string());
    let all: Vec<String> = text.lines().filter_map(message).collect();
    (!all.is_empty()).then(|| format!("the node collector works, but {}", all.join("; ")))
}

/// Why the collector has no log. It is shown in place of the path.
#[derive(Debug)]
struct NoLog {
    path: PathBuf,
    error: io::Error,
}

impl std::fmt::Display for NoLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "none, because {}: {}", self.path.display(), self.error)
    }
}

/// The collector's log and its name: the configured path, else a file in the user's own folder (the
/// path may belong to another user), else /dev/null and the reason.
fn open_log(config: &Config) -> (File, Result<String, NoLog>) {
    let [mode, folder_mode] = config.modes;
    let answers = bounded_io::answers(&config.log);
    if let Some(folder) = config.log.parent().filter(|_| answers.is_ok()) {
        // If this fails, opening the file reports why.
        let _ = DirBuilder::new().recursive(true).mode(folder_mode).create(folder);
    }
    let open = |path: &Path| {
        let file = open_own(path, mode)?;
        if !config.append {
            empty(&file)?;
        }
        Ok::<_, io::Error>((file, Ok(path.display().to_string())))
    };
    answers
        .and_then(|()| open(&config.log))
        .or_else(|error| own_folder(config).and_then(|folder| open(&folder.join(LOG_FILE))).map_err(|_| error))
        .unwrap_or_else(|error| {
            let null = OpenOptions::new().write(true).open("/dev/null");
            let null = null.expect("a system without /dev/null runs no shell either");
            (null, Err(NoLog { path: config.log.clone(), error }))
        })
}

/// The folder of the socket, created if needed, if no other user can have written to it.
fn own_folder(config: &Config) -> io::Result<PathBuf> {
    let folder = config.socket.parent().ok_or(io::ErrorKind::NotFound)?;
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let status = std::fs::symlink_metadata(folder)?;
    let own = status.is_dir() && status.uid() == nix::unistd::geteuid().as_raw() && status.mode() & 0o022 == 0;
    if own { Ok(folder.to_path_buf()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Empties the log of the previous run, unless the collector of another job writes to it.
fn empty(file: &File) -> io::Result<()> {
    // The lock ends with the guard. The collector inherits this open file, and would inherit the
    // lock.
    match Flock::lock(file.try_clone()?, FlockArg::LockExclusiveNonblock) {
        Ok(locked) => locked.set_len(0),
        Err(_) => Ok(()),
    }
}

/// Opens a file in a folder that may be writable by everybody. It follows no link, opens no file of
/// another user, and no file of this user to which somebody has created a hard link there. The file
/// gets its mode independent of the umask, even if it existed with another mode.
fn open_own(path: &Path, mode: u32) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().create(true).read(true).append(true).mode(mode).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != nix::unistd::geteuid().as_raw() || metadata.nlink() > 1 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "not a regular file of this user"));
    }
    if metadata.mode() & 0o777 != mode {
        file.set_permissions(Permissions::from_mode(mode))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unanswered_socket_means_no_collector_and_is_not_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("18888.sock");
        assert!(matches!(handshake(&path, ANSWER_DEADLINE), Err(NoAnswer::Absent)));
        // A socket file whose listener is gone.
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        // A stream socket belongs to another program: connecting with another type is a specific
        // error.
        assert!(handshake(&path, ANSWER_DEADLINE).is_err());
    }

    #[test]
    fn a_log_behind_a_link_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        let link = folder.path().join("xpu_timer_collector.log");
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        let socket = folder.path().join("no/folder/1.sock");
        let (_, name) = open_log(&Config { log: link, socket, append: false, ..Config::read() });
        assert!(name.unwrap_err().to_string().starts_with("none"));
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        let hard = folder.path().join("hard.log");
        std::fs::hard_link(&victim, &hard).unwrap();
        assert!(open_own(&hard, 0o600).is_err(), "a second name of a precious file");
    }

    #[test]
    fn errors_of_a_running_collector_are_passed_on_as_remarks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let old = "2026-11-22T09:00:00.1Z ERROR xpu_timer_collector::node: of the run before\n";
        let warned =
            "2026-11-22T09:50:37.1Z  WARN xpu_timer_collector::cli: XPU_TIMER_X=\"x\" cannot be used\n".repeat(60);
        let new = "2026-11-22T09:50:37.1Z ERROR xpu_timer_collector::node: there is no control endpoint: port 1 is taken\n\
                   2026-11-22T09:50:37.1Z  INFO xpu_timer_collector::node: listening on /x as pid 1\n";
        std::fs::write(&path, format!("{old}{warned}{new}")).unwrap();
        let problems = problems(File::open(&path).unwrap(), old.len() as u64);
        assert_eq!(problems.unwrap(), "the node collector works, but there is no control endpoint: port 1 is taken");
    }

    #[test]
    fn a_log_of_another_user_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("xpu_timer_collector.log");
        std::os::unix::fs::symlink("/dev/null", &log).unwrap();
        let socket = folder.path().join("xpu_timer-7/1.sock");
        let config = Config { log, socket: socket.clone(), append: false, ..Config::read() };
        assert_eq!(open_log(&config).1.unwrap(), socket.with_file_name(LOG_FILE).display().to_string());
        let everybodys = PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(socket.parent().unwrap(), everybodys).unwrap();
        assert!(open_log(&config).1.unwrap_err().to_string().starts_with("none"));
    }

    #[test]
    fn the_last_non_empty_line_of_a_log_is_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let (mut log, _) = open_log(&Config { log: path.clone(), append: false, ..Config::read() });
        assert_eq!(last_log_line(&mut log), None);
        std::fs::write(&path, format!("{}\nstarted\nport 1 is taken\n\n", "x".repeat(5000))).unwrap();
        assert_eq!(last_log_line(&mut log).as_deref(), Some("port 1 is taken"));
    }

    #[test]
    fn a_missing_log_folder_is_created() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("a/b/xpu_timer_collector.log");
        let (_, name) = open_log(&Config { log: log.clone(), append: false, ..Config::read() });
        assert_eq!(name.unwrap(), log.display().to_string());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&log), mode(log.parent().unwrap())), (0o600, 0o700));
        // A file of an earlier version.
        std::fs::set_permissions(&log, Permissions::from_mode(0o644)).unwrap();
        open_log(&Config { log: log.clone(), append: true, ..Config::read() }).1.unwrap();
        assert_eq!(mode(&log), 0o600);
    }

    #[test]
    fn the_previous_log_is_truncated_unless_it_is_kept() {
        use std::io::Write;
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let write = |append| {
            let (mut file, _) = open_log(&Config { log: log.clone(), append, ..Config::read() });
            file.write_all(b"x").unwrap();
            std::fs::read_to_string(&log).unwrap()
        };
        assert_eq!(write(false), "x");
        assert_eq!(write(true), "xx");
        assert_eq!(write(false), "x");
        // The collector of another job writes to it.
        let other = Flock::lock(File::open(&log).unwrap(), FlockArg::LockSharedNonblock).unwrap();
        assert_eq!(write(false), "xx");
        drop(other);
        assert_eq!(write(false), "x");
    }
}
