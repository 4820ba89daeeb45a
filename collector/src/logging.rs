//! The collector's log: to stderr, or to a rotated file. A file system or a reader of stderr that
//! does not answer, a full disk, or a folder that cannot be written costs lines of the log, and
//! never blocks the collector.

use std::{
    borrow::Cow,
    collections::HashMap,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::signal::{SigSet, SigmaskHow},
    unistd::{dup2_stderr, dup2_stdout, getuid},
};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};
use xpu_timer_proto::{env::Source, file, printable};

/// Number of lines that may wait for the disk.
const MAX_QUEUED_LINES: usize = 4096;
/// Time limit for the last lines at the end of the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Destination of a program's log.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Destination<'a> {
    /// A command that a person waits for: stderr, and each line at once.
    Command,
    /// A server: stderr.
    Stderr,
    /// A server: a file.
    File(&'a Path),
}

/// Starts the log with the settings. Dropping the guard writes the last lines.
#[must_use]
pub(crate) fn start(source: &Source, destination: Destination<'_>) -> Guard {
    let wanted = source.text("XPU_TIMER_LOG").unwrap_or_default();
    let (filter, wrong) = match wanted.parse::<Targets>() {
        Ok(filter) => (filter, None),
        Err(error) => (Targets::new().with_default(LevelFilter::INFO), Some(error)),
    };
    // The HTTP client logs complete URLs at lower levels, and the URL of a webhook is a credential.
    let filter = filter.with_target("ureq", LevelFilter::ERROR);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_ansi(false)
        // By default, eprintln! reports a line that cannot be written. On a full disk it panics.
        .log_internal_errors(false);
    let mut problem = None;
    let target = match destination {
        Destination::Command => None,
        Destination::Stderr => Some(Target::Stderr),
        Destination::File(path) => Some(match open_within(path, Cap::new(source)) {
            Ok(target) => target,
            Err(error) => {
                problem = Some(format!("{}: {error}; the log goes to stderr", path.display()));
                Target::Stderr
            }
        }),
    };
    match target {
        Some(target) => {
            let queue = queue(target);
            subscriber.with_writer(move || printable::Lines(queue.clone())).finish().with(filter).init();
        }
        None => subscriber.with_writer(|| printable::Lines(io::stderr())).finish().with(filter).init(),
    }
    // The message of a panic may contain anything; as a line of the log it passes the filter.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    if let Some(error) = wrong {
        tracing::warn!("XPU_TIMER_LOG={wanted:?} cannot be used, using \"info\" instead: {error}");
    }
    if let Some(problem) = problem {
        tracing::error!("{problem}");
    }
    Guard(())
}

/// Opens the log file. If its file system does not answer, the log thread tries again.
fn open_within(path: &Path, cap: Cap) -> io::Result<Target> {
    // Signals are for the thread that waits for them.
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let owned = path.to_path_buf();
    let opened = file::within(file::PATIENCE, move || Rotating::open(&owned, cap));
    let _ = mask.map(|mask| mask.thread_set_mask());
    match opened {
        Ok(opened) => opened.map(Target::File),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(Target::Unanswered(path.into(), cap)),
        // No thread could be started.
        Err(_) => Rotating::open(path, cap).map(Target::File),
    }
}

/// Size limit, number of files and mode of a log.
#[derive(Debug, Clone, Copy)]
struct Cap {
    bytes: u64,
    files: u32,
    mode: u32,
}

impl Cap {
    fn new(source: &Source) -> Self {
        Cap { bytes: source.log_bytes(), files: source.log_files(), mode: source.file_mode() }
    }
}

enum Item {
    Line(Vec<u8>),
    Flush(SyncSender<()>),
}

/// The destination of the log thread.
enum Target {
    File(Rotating),
    /// A file that could not be opened in time.
    Unanswered(PathBuf, Cap),
    Stderr,
}

impl Target {
    /// Writes a line. On a full disk it is lost, and nothing can report that.
    fn write(&mut self, line: &[u8]) {
        match self {
            Target::File(file) => file.write(line),
            Target::Unanswered(path, cap) => {
                *self = Rotating::open(path, *cap).map_or(Target::Stderr, Target::File);
                self.write(line);
            }
            Target::Stderr => _ = io::stderr().write_all(line),
        }
    }
}

/// Accepts lines from any thread: a queue in front of the one thread that owns the file.
#[derive(Clone)]
struct Queue {
    sender: SyncSender<Item>,
    path: Option<PathBuf>,
    left_out: Arc<AtomicU64>,
    thread: Arc<OnceLock<()>>,
    work: Arc<Mutex<Option<Work>>>,
}

/// What the thread takes over when it starts.
type Work = (Target, Receiver<Item>);

impl Queue {
    /// Starts the thread with the first line: the supervisor, which has one thread, logs only when
    /// something is wrong.
    fn start(&self) {
        self.thread.get_or_init(|| {
            let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
            let left_out = Arc::clone(&self.left_out);
            // Signals are for the thread that waits for them.
            let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK);
            // Without a thread there is no log.
            let _ = work.map(|(target, items)| {
                thread::Builder::new().name("log".into()).spawn(move || write_all(target, &items, &left_out))
            });
            let _ = mask.map(|mask| mask.thread_set_mask());
        });
    }
}

/// The queue of this process, when it is a server.
static QUEUE: OnceLock<Queue> = OnceLock::new();

/// Writes the waiting lines when it is dropped.
pub(crate) struct Guard(());

impl Drop for Guard {
    fn drop(&mut self) {
        flush();
    }
}

/// The log file of this process.
#[must_use]
pub(crate) fn path() -> Option<&'static Path> {
    QUEUE.get()?.path.as_deref()
}

/// Waits until all lines are written, but not for a disk that does not answer.
pub(crate) fn flush() {
    let Some(queue) = QUEUE.get().filter(|queue| queue.thread.get().is_some()) else { return };
    let (done, wait) = mpsc::sync_channel(1);
    if queue.sender.try_send(Item::Flush(done)).is_ok() {
        // Fails on timeout.
        let _ = wait.recv_timeout(FLUSH_TIMEOUT);
    }
}

fn queue(target: Target) -> Queue {
    let (sender, items) = mpsc::sync_channel(MAX_QUEUED_LINES);
    let path = match &target {
        Target::File(Rotating { path, .. }) | Target::Unanswered(path, _) => Some(path.clone()),
        Target::Stderr => None,
    };
    let work = Arc::new(Mutex::new(Some((target, items))));
    let queue = Queue { sender, path, left_out: Arc::default(), thread: Arc::default(), work };
    QUEUE.get_or_init(|| queue).clone()
}

/// Writes all lines until the last sender is gone.
fn write_all(mut target: Target, items: &Receiver<Item>, left_out: &AtomicU64) {
    let mut repeats = Repeats::default();
    loop {
        let item = match repeats.due() {
            Some(due) => items.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => items.recv().map_err(RecvTimeoutError::from),
        };
        match item {
            Ok(Item::Line(line)) => {
                if let Some(number) = Some(left_out.swap(0, Ordering::Relaxed)).filter(|number| *number > 0) {
                    target.write(
                        format!("{number} lines were left out, because the log's disk or terminal is slow\n")
                            .as_bytes(),
                    );
                }
                repeats.admit(&line, Instant::now()).iter().for_each(|line| target.write(line));
            }
            // The requester may have stopped waiting.
            Ok(Item::Flush(done)) => _ = done.send(()),
            Err(RecvTimeoutError::Timeout) => {
                repeats.summarize(Instant::now()).iter().for_each(|line| target.write(line))
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Write for Queue {
    /// Queues one line: the subscriber formats an event before it writes it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.start();
        if let Err(TrySendError::Full(_)) = self.sender.try_send(Item::Line(line.to_vec())) {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps a flood of one message from pushing everything else out of the log. Messages that differ
/// only in their numbers count as one.
#[derive(Debug, Default)]
struct Repeats {
    since: Option<Instant>,
    seen: HashMap<Vec<u8>, Seen>,
}

/// How often a message came in this window, and how often it may be written.
#[derive(Debug)]
struct Seen {
    times: u64,
    most: u64,
}

/// How often one message may be written in its first window. A line for each node of a large
/// cluster is not a flood.
const MOST_AT_FIRST: u64 = 1000;
/// How often one message may be written in the window after one in which it exceeded its limit.
const MOST_REPEATS: u64 = 100;
/// Length of a window.
const WINDOW: Duration = Duration::from_secs(60);
/// Number of messages that are counted separately.
const MOST_MESSAGES: usize = 1024;
/// Length of the text that identifies a message.
const KEY_BYTES: usize = 120;

impl Repeats {
    /// The lines to write when a line arrives.
    fn admit<'a>(&mut self, line: &'a [u8], now: Instant) -> Vec<Cow<'a, [u8]>> {
        let mut write: Vec<Cow<'a, [u8]>> = self.summarize(now).into_iter().map(Cow::Owned).collect();
        // The text after the time.
        let text = line.iter().position(|byte| *byte == b' ').map_or(line, |space| &line[space..]);
        let key: Vec<u8> = text.iter().take(KEY_BYTES).filter(|byte| !byte.is_ascii_digit()).copied().collect();
        if self.seen.len() < MOST_MESSAGES || self.seen.contains_key(&key) {
            let seen = self.seen.entry(key).or_insert(Seen { times: 0, most: MOST_AT_FIRST });
            seen.times += 1;
            if seen.times > seen.most {
                return write;
            }
        }
        write.push(line.into());
        write
    }

    /// When to report the number of omitted lines, even if no other line arrives.
    fn due(&self) -> Option<Instant> {
        self.since.filter(|_| self.seen.values().any(|seen| seen.times > seen.most)).map(|since| since + WINDOW)
    }

    /// Reports the omitted lines of a window that is over, and starts the next one.
    fn summarize(&mut self, now: Instant) -> Vec<Vec<u8>> {
        if self.since.is_some_and(|since| now.saturating_duration_since(since) < WINDOW) {
            return Vec::new();
        }
        self.since = Some(now);
        self.seen.retain(|_, seen| seen.times > seen.most);
        let written = self.seen.iter_mut().map(|(text, seen)| {
            let text = String::from_utf8_lossy(text).trim().to_string();
            let left_out = seen.times - seen.most;
            *seen = Seen { times: 0, most: MOST_REPEATS };
            format!("{left_out} more lines like this were left out: {text}\n").into_bytes()
        });
        written.collect()
    }
}

/// A file that is renamed when it is full. Several processes may write to one file: a process that
/// finds it renamed opens the new one, and one process at a time renames.
struct Rotating {
    path: PathBuf,
    cap: Cap,
    file: File,
    // Whether the output of this process goes there too.
    takes_output: bool,
}

impl Rotating {
    fn open(path: &Path, cap: Cap) -> io::Result<Self> {
        let rotating = Rotating { path: path.into(), cap, file: open_own(path, cap.mode)?, takes_output: true };
        rotating.opened();
        Ok(rotating)
    }

    fn write(&mut self, line: &[u8]) {
        if !self.is_current() {
            // On failure the line goes to the old file.
            let _ = self.open_again();
        }
        let length = self.file.metadata().map_or(0, |status| status.len());
        let longer = length + line.len() as u64;
        let is_overdue = longer > 2 * self.cap.bytes;
        if length > 0
            && longer > self.cap.bytes
            && let Err(error) = self.rotate(is_overdue)
            && is_overdue
        {
            // This keeps the size limit without a rename.
            let _ = self.file.set_len(0);
            let _ = writeln!(self.file, "this log was truncated, because it cannot be renamed: {error}");
        }
        // On a full disk nothing can report the failure.
        let _ = self.file.write_all(line);
    }

    /// Whether the open file still has its name.
    fn is_current(&self) -> bool {
        let (Ok(named), Ok(open)) = (fs::symlink_metadata(&self.path), self.file.metadata()) else { return false };
        (named.dev(), named.ino()) == (open.dev(), open.ino())
    }

    /// Starts a new file, unless another process is doing that. Another process may delay this, but
    /// not forever.
    fn rotate(&mut self, is_overdue: bool) -> io::Result<()> {
        let whole = libc::flock { l_type: libc::F_WRLCK as _, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
        // This is not the lock that marks the file as in use. On NFS both are one lock, and this
        // call always fails.
        let locked = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&whole));
        if !is_overdue {
            locked?;
        }
        if !self.is_current() {
            return Err(io::Error::other("it was renamed, and no new log can be created"));
        }
        let begun = if self.cap.files > 1 { self.rename_all() } else { self.file.set_len(0) };
        let free = libc::flock { l_type: libc::F_UNLCK as _, ..whole };
        // Nobody wants the lock of a renamed file any more.
        let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&free));
        begun
    }

    fn rename_all(&mut self) -> io::Result<()> {
        let numbered = |number: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        for number in (1..self.cap.files - 1).rev() {
            match fs::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, numbered(1))?;
        self.open_again()
    }

    fn open_again(&mut self) -> io::Result<()> {
        self.file = open_own(&self.path, self.cap.mode)?;
        self.opened();
        Ok(())
    }

    /// Redirects the output of panics and libraries to the log.
    fn opened(&self) {
        // A launcher that starts another collector tests this lock before it empties the file.
        let _ = self.file.try_lock_shared();
        if self.takes_output {
            // They fail when there are no descriptors left; then the output stays where it is.
            let _ = dup2_stdout(&self.file);
            let _ = dup2_stderr(&self.file);
        }
    }
}

/// Opens a file in a folder that may be writable for everybody. It refuses links, files of other
/// users, and files of this user with a second name that somebody has given them there. It also
/// sets the mode of a file that existed with another one.
fn open_own(path: &Path, mode: u32) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = fs::OpenOptions::new().create(true).append(true).mode(mode).custom_flags(flags).open(path)?;
    let status = file.metadata()?;
    if !status.is_file() || status.uid() != getuid().as_raw() || status.nlink() > 1 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "not a regular file of this user"));
    }
    if status.mode() & 0o777 != mode {
        file.set_permissions(fs::Permissions::from_mode(mode))?;
    }
    Ok(file)
}

/// Number of logs to keep of hooks whose processes have ended.
const HOOK_LOGS: usize = 100;

/// Removes old hook logs from a folder: each process that had something to log has left one.
pub(crate) fn remove_hook_logs(folder: &Path) {
    let mut ended: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let pid: u32 = name.strip_prefix("xpu_timer_hook.")?.strip_suffix(".log")?.parse().ok()?;
            let status = entry.metadata().ok()?;
            let own = status.is_file() && status.uid() == getuid().as_raw();
            let alive = Path::new(&format!("/proc/{pid}")).exists();
            (own && !alive).then(|| Some((status.modified().ok()?, entry.path())))?
        })
        .collect();
    ended.sort();
    for (_, path) in ended.iter().take(ended.len().saturating_sub(HOOK_LOGS)) {
        // Another collector may have removed it first.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(folder: &Path) -> Vec<(String, u64)> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let mut sizes: Vec<(String, u64)> =
            entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())).collect();
        sizes.sort();
        sizes
    }

    /// As [`Rotating::open`], but the output of the test stays where it is.
    fn rotating(path: &Path, files: u32) -> Rotating {
        let cap = Cap { bytes: 100, files, mode: 0o600 };
        Rotating { path: path.into(), cap, file: open_own(path, cap.mode).unwrap(), takes_output: false }
    }

    #[test]
    fn a_flood_of_one_message_is_limited_and_others_are_not() {
        let mut repeats = Repeats::default();
        let begun = Instant::now();
        let flood = |repeats: &mut Repeats, now: Instant| {
            let lines = (0..2000).map(|number| format!("2026-11-23T00:00:0{}Z  WARN a: pid {number}\n", number % 10));
            lines.map(|line| repeats.admit(line.as_bytes(), now).len() as u64).sum::<u64>()
        };
        assert_eq!(flood(&mut repeats, begun), MOST_AT_FIRST);
        assert_eq!(repeats.admit(b"2026 INFO b: another\n", begun).len(), 1);
        assert_eq!(repeats.due(), Some(begun + WINDOW));
        // A flood that lasts gets a lower limit, and is reported once a window.
        assert_eq!(flood(&mut repeats, begun + WINDOW), MOST_REPEATS + 1);
        let written = repeats.admit(b"2026 INFO b: another\n", begun + WINDOW * 2);
        let text = |line: &[u8]| String::from_utf8_lossy(line).into_owned();
        assert_eq!(text(&written[0]), "1900 more lines like this were left out: WARN a: pid\n");
        assert_eq!(written.len(), 2);
        assert_eq!(repeats.due(), None);
        // After a quiet window it is not a flood any more.
        assert!(repeats.summarize(begun + WINDOW * 3).is_empty());
        assert_eq!(flood(&mut repeats, begun + WINDOW * 3), MOST_AT_FIRST);
        assert_eq!(repeats.summarize(begun + WINDOW * 4).len(), 1, "it is logged also when no other line comes");
    }

    #[test]
    fn a_full_log_is_renamed_with_several_writers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut writers = [rotating(&path, 3), rotating(&path, 3)];
        for number in 0..200 {
            for writer in &mut writers {
                writer.write(format!("line {number:03}\n").as_bytes());
            }
        }
        let sizes = sizes(folder.path());
        assert_eq!(sizes.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["log", "log.1", "log.2"]);
        assert!(sizes.iter().all(|(_, bytes)| *bytes <= 100), "{sizes:?}");
        let all: String =
            ["log.2", "log.1", "log"].map(|name| fs::read_to_string(folder.path().join(name)).unwrap()).concat();
        let lines: Vec<&str> = all.lines().collect();
        assert!(lines.len() > 20 && lines.is_sorted() && lines.ends_with(&["line 199", "line 199"]), "{lines:?}");
        fs::remove_file(&path).unwrap();
        writers[0].write(b"after it was removed\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "after it was removed\n");
    }

    #[test]
    fn a_log_that_cannot_be_renamed_does_not_grow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::create_dir(folder.path().join("log.1")).unwrap();
        let mut writer = rotating(&path, 2);
        for number in 0..100 {
            writer.write(format!("line {number:03}\n").as_bytes());
            assert!(fs::metadata(&path).unwrap().len() <= 200);
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("this log was truncated, because it cannot be renamed: ") && text.contains("line 099"),
            "{text}"
        );
        // Something else has its name, and no new file can be created.
        fs::remove_dir(folder.path().join("log.1")).unwrap();
        fs::rename(&path, folder.path().join("log.1")).unwrap();
        fs::create_dir(&path).unwrap();
        for number in 0..100 {
            writer.write(format!("line {number:03}\n").as_bytes());
            assert!(fs::metadata(folder.path().join("log.1")).unwrap().len() <= 200);
        }
    }

    #[test]
    fn a_log_that_cannot_be_locked_is_renamed_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut writer = rotating(&path, 2);
        let other = open_own(&path, 0o600).unwrap();
        let whole = libc::flock { l_type: libc::F_WRLCK as _, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
        fcntl(&other, FcntlArg::F_OFD_SETLK(&whole)).unwrap();
        for number in 0..30 {
            writer.write(format!("line {number:03}\n").as_bytes());
        }
        let first = fs::read_to_string(folder.path().join("log.1")).unwrap();
        assert!(first.starts_with("line 000\n") && (101..=200).contains(&first.len()), "{first}");
        assert!(fs::read_to_string(&path).unwrap().ends_with("line 029\n"));
    }

    #[test]
    fn one_log_file_keeps_the_newest_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut writer = rotating(&path, 1);
        for number in 0..100 {
            writer.write(format!("line {number:03}\n").as_bytes());
        }
        let sizes = sizes(folder.path());
        assert!(sizes.len() == 1 && sizes[0].1 <= 100, "{sizes:?}");
        assert!(fs::read_to_string(&path).unwrap().ends_with("line 099\n"));
    }

    #[test]
    fn an_existing_log_gets_its_mode_and_foreign_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::write(&path, "").unwrap();
        for (before, mode) in [(0o666, 0o600), (0o600, 0o640)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(before)).unwrap();
            open_own(&path, mode).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
        }
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open_own(&link, 0o600).is_err());
        if !getuid().is_root() {
            eprintln!("SKIPPED the file of another user: only root can make one");
            return;
        }
        std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
        assert!(open_own(&path, 0o600).unwrap_err().to_string().contains("of this user"));
    }

    #[test]
    fn old_hook_logs_are_removed_unless_their_process_lives() {
        let folder = tempfile::tempdir().unwrap();
        let log = |pid: u32| folder.path().join(format!("xpu_timer_hook.{pid}.log"));
        for pid in (5_000_000..5_000_000 + HOOK_LOGS as u32 + 20).chain([std::process::id()]) {
            fs::write(log(pid), "x").unwrap();
        }
        fs::write(folder.path().join("xpu_timer_hook.x.log"), "somebody's").unwrap();
        remove_hook_logs(folder.path());
        assert_eq!(sizes(folder.path()).len(), HOOK_LOGS + 2);
        assert!(log(std::process::id()).exists());
    }
}
