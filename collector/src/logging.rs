//! The collector's log: to stderr, or to a file that is rotated. A file system that does not answer, a full disk or a folder that
//! cannot be written costs lines of the log, and never holds up the collector.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, SyncSender, TrySendError},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::signal::{SigSet, SigmaskHow},
};
use rustix::{
    fs::{FlockOperation, flock},
    process::getuid,
};
use tracing_subscriber::EnvFilter;
use xpu_timer_proto::{env::Source, printable};

/// Queue that may wait for the disk.
const WAITING: usize = 4096;
/// For the last lines at the end of the process.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Begins to log: to `path`, as the settings say, or to stderr without one. The log ends when the guard is dropped.
#[must_use]
pub fn start(source: &Source, path: Option<&Path>) -> Guard {
    let wanted = source.text("XPU_TIMER_LOG").unwrap_or_default();
    let (filter, wrong) = match EnvFilter::try_new(&wanted) {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new("info"), Some(error)),
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        // By default a line that cannot be written, on a full disk, is complained about by eprintln!, which panics then.
        .log_internal_errors(false);
    let file = path.map(|path| Rotating::open(path, Cap::new(source)));
    let problem = match file {
        Some(Ok(file)) => {
            let queue = queue(file);
            subscriber.with_writer(move || printable::Lines(queue.clone())).init();
            None
        }
        other => {
            subscriber.with_writer(|| printable::Lines(io::stderr())).init();
            other.and_then(Result::err)
        }
    };
    // The message of a panic may hold anything; as a line of the log it goes through the same filter.
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    if let Some(error) = wrong {
        tracing::warn!("XPU_TIMER_LOG={wanted:?} cannot be used, using \"info\" instead: {error}");
    }
    if let Some((error, path)) = problem.zip(path) {
        tracing::error!("{}: {error}; the log goes to stderr", path.display());
    }
    Guard(())
}

/// How much a log may hold.
#[derive(Debug, Clone, Copy)]
struct Cap {
    bytes: u64,
    files: u32,
}

impl Cap {
    fn new(source: &Source) -> Self {
        Cap { bytes: source.log_bytes(), files: source.log_files() }
    }
}

enum Item {
    Line(Vec<u8>),
    Flush(SyncSender<()>),
}

/// Where lines are written from any thread: a queue in front of one thread that owns the file.
#[derive(Clone)]
struct Queue {
    sender: SyncSender<Item>,
    path: PathBuf,
    left_out: Arc<AtomicU64>,
}

/// The lines of this process, when they go to a file.
static QUEUE: OnceLock<Queue> = OnceLock::new();

/// Writes what still waits when it is dropped.
pub struct Guard(());

impl Drop for Guard {
    fn drop(&mut self) {
        flush();
    }
}

/// The file that this process logs to.
#[must_use]
pub fn path() -> Option<&'static Path> {
    QUEUE.get().map(|queue| queue.path.as_path())
}

/// Waits until all lines are written, and not for a disk that does not answer.
pub fn flush() {
    let Some(queue) = QUEUE.get() else { return };
    let (done, wait) = mpsc::sync_channel(1);
    if queue.sender.try_send(Item::Flush(done)).is_ok() {
        // It fails when that takes too long.
        let _ = wait.recv_timeout(LAST_LINES);
    }
}

fn queue(mut file: Rotating) -> Queue {
    let (sender, items) = mpsc::sync_channel(WAITING);
    let queue = Queue { sender, path: file.path.clone(), left_out: Arc::default() };
    let left_out = Arc::clone(&queue.left_out);
    let work = move || {
        let mut repeats = Repeats::default();
        for item in items {
            match item {
                Item::Line(line) => {
                    if let Some(number) = Some(left_out.swap(0, Ordering::Relaxed)).filter(|number| *number > 0) {
                        file.write(format!("{number} lines were left out: the disk of this log is slow\n").as_bytes());
                    }
                    repeats.look(&line, Instant::now()).iter().for_each(|line| file.write(line));
                }
                Item::Flush(done) => {
                    // Whoever asked may have stopped waiting.
                    let _ = done.send(());
                }
            }
        }
    };
    // Signals are for the thread that waits for them.
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK);
    // Without a thread there is no log.
    let _ = thread::Builder::new().name("log".into()).spawn(work);
    let _ = mask.map(|mask| mask.thread_set_mask());
    QUEUE.get_or_init(|| queue).clone()
}

impl Write for Queue {
    /// One line: the subscriber formats an event before it writes it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Err(TrySendError::Full(_)) = self.sender.try_send(Item::Line(line.to_vec())) {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps a flood of one message from pushing everything else out of the log. Messages that differ in their numbers count as one.
#[derive(Debug, Default)]
struct Repeats {
    since: Option<Instant>,
    seen: HashMap<Vec<u8>, u64>,
}

/// So often is one message written …
const MOST_REPEATS: u64 = 100;
/// … in so long.
const WINDOW: Duration = Duration::from_secs(60);
/// Messages that are told apart.
const MOST_MESSAGES: usize = 1024;
/// By so much of its text.
const KEY_BYTES: usize = 120;

impl Repeats {
    /// What is to be written when a line comes.
    fn look<'a>(&mut self, line: &'a [u8], now: Instant) -> Vec<std::borrow::Cow<'a, [u8]>> {
        let mut write = Vec::new();
        if self.since.is_none_or(|since| now.saturating_duration_since(since) > WINDOW) {
            self.since = Some(now);
            write.extend(self.rest().into_iter().map(Into::into));
        }
        // Behind the time.
        let text = line.iter().position(|byte| *byte == b' ').map_or(line, |space| &line[space..]);
        let key: Vec<u8> = text.iter().take(KEY_BYTES).filter(|byte| !byte.is_ascii_digit()).copied().collect();
        if self.seen.len() < MOST_MESSAGES || self.seen.contains_key(&key) {
            let count = self.seen.entry(key).or_default();
            *count += 1;
            if *count > MOST_REPEATS {
                return write;
            }
        }
        write.push(line.into());
        write
    }

    /// How many lines were left out.
    fn rest(&mut self) -> Vec<Vec<u8>> {
        let told = self.seen.drain().filter(|(_, count)| *count > MOST_REPEATS).map(|(text, count)| {
            let text = String::from_utf8_lossy(&text).trim().to_string();
            format!("{} more lines like this were left out: {text}\n", count - MOST_REPEATS).into_bytes()
        });
        told.collect()
    }
}

/// A file that is renamed when it is full. Several processes may write to one: who finds it renamed opens the new one, and one at a
/// time renames.
struct Rotating {
    path: PathBuf,
    cap: Cap,
    file: File,
}

impl Rotating {
    fn open(path: &Path, cap: Cap) -> io::Result<Self> {
        let rotating = Rotating { path: path.into(), cap, file: open_own(path)? };
        rotating.take_output();
        Ok(rotating)
    }

    fn write(&mut self, line: &[u8]) {
        if !self.is_current()
            && let Ok(file) = open_own(&self.path)
        {
            self.file = file;
            self.take_output();
        }
        let length = self.file.metadata().map_or(0, |status| status.len());
        if length > 0 && length + line.len() as u64 > self.cap.bytes {
            self.rotate();
        }
        // A full disk, and nobody can be told.
        let _ = self.file.write_all(line);
    }

    /// Whether the file still has its name.
    fn is_current(&self) -> bool {
        let (Ok(named), Ok(open)) = (fs::symlink_metadata(&self.path), self.file.metadata()) else { return false };
        (named.dev(), named.ino()) == (open.dev(), open.ino())
    }

    fn rotate(&mut self) {
        // Of this file alone, and not the lock that says that it is written to.
        let whole = libc::flock { l_type: libc::F_WRLCK as _, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
        if fcntl(&self.file, FcntlArg::F_OFD_SETLK(&whole)).is_err() || !self.is_current() {
            // Somebody else does it just now; the next line finds the new file.
            return;
        }
        if let Err(error) = self.rename_all() {
            // It keeps its size nevertheless.
            let _ = self.file.set_len(0);
            let _ = writeln!(self.file, "this log was cut, because it cannot be renamed: {error}");
            let free = libc::flock { l_type: libc::F_UNLCK as _, ..whole };
            let _ = fcntl(&self.file, FcntlArg::F_OFD_SETLK(&free));
        }
    }

    fn rename_all(&mut self) -> io::Result<()> {
        if self.cap.files <= 1 {
            return Err(io::Error::other("only one file is to be kept"));
        }
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
        self.file = open_own(&self.path)?;
        self.take_output();
        Ok(())
    }

    /// What panics and libraries print goes to the log too.
    fn take_output(&self) {
        // A launcher that starts another collector asks by this lock whether it may empty the file.
        let _ = flock(&self.file, FlockOperation::NonBlockingLockShared);
        // They fail when there are no descriptors; then the output stays where it is.
        let _ = rustix::stdio::dup2_stdout(&self.file);
        let _ = rustix::stdio::dup2_stderr(&self.file);
    }
}

/// Opens a file that may lie in a folder which everybody can write to: no link and no other user's file.
fn open_own(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = fs::OpenOptions::new().create(true).append(true).custom_flags(flags).open(path)?;
    let status = file.metadata()?;
    if !status.is_file() || status.uid() != getuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "not a regular file of this user"));
    }
    Ok(file)
}

/// Logs of hooks whose processes have ended that are kept.
const HOOK_LOGS: usize = 100;

/// Removes old logs of hooks from a folder: each process that had something to say has left one.
pub fn remove_hook_logs(folder: &Path) {
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
        // Another collector may have been quicker.
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

    /// As [`Rotating::open`], and the output of the test stays where it is.
    fn rotating(path: &Path, files: u32) -> Rotating {
        Rotating { path: path.into(), cap: Cap { bytes: 100, files }, file: open_own(path).unwrap() }
    }

    #[test]
    fn a_flood_of_one_message_is_limited_and_others_are_not() {
        let mut repeats = Repeats::default();
        let begun = Instant::now();
        let mut written = Vec::new();
        for number in 0..1000 {
            let line = format!("2026-11-23T00:00:0{}Z  WARN a: pid {number} sent junk\n", number % 10);
            written.extend(repeats.look(line.as_bytes(), begun).into_iter().map(|line| line.into_owned()));
        }
        assert_eq!(written.len() as u64, MOST_REPEATS);
        assert_eq!(repeats.look(b"2026 INFO b: another\n", begun).len(), 1);
        let later = begun + WINDOW * 2;
        let told = repeats.look(b"2026 INFO b: another\n", later);
        assert_eq!(told.len(), 2);
        assert!(String::from_utf8_lossy(&told[0]).starts_with("900 more lines like this were left out: WARN a: pid"));
    }

    #[test]
    fn a_log_that_is_full_is_renamed_also_when_several_write_to_it() {
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
    fn a_log_that_cannot_be_renamed_does_not_grow_either() {
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
            text.starts_with("this log was cut, because it cannot be renamed: ") && text.contains("line 099"),
            "{text}"
        );
    }

    #[test]
    fn old_logs_of_hooks_go_and_those_of_processes_that_live_stay() {
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
