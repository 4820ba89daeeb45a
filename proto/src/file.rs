//! Reads files that an environment variable names. The name may be wrong: a FIFO, a device, a
//! directory, a file of gigabytes, or a file on a file system that does not answer. None of them
//! may block the program or fill its memory.
//!
//! [`open`] and [`read`] accept regular files only. [`read_within`] also limits the time: it reads
//! on another thread, which it abandons at the deadline. A process that is about to call `exec`
//! must not leave a thread behind, because `exec` waits for it. The launcher therefore reads in
//! another process (`hook/launch/src/bounded_io.rs`).

use std::{
    fs::{File, Metadata, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

/// Maximum size of a file: a configuration, a token, certificates.
pub const MOST_BYTES: u64 = 1 << 20;
/// Time within which a file system must answer.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Stack size of the reading thread. It counts against the limits of a process that hosts the hook,
/// so it is small.
const STACK_BYTES: usize = 128 << 10;

/// Bytes that the C library takes from the stack of each thread for the program's thread-local
/// variables. It is set only in a foreign program, where they may be large.
pub static TAKEN_FROM_STACKS: AtomicUsize = AtomicUsize::new(0);

/// Opens a regular file for reading. Other files are never opened, because opening some devices has
/// side effects.
///
/// # Errors
/// The system's error, or that it is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    regular(&path.metadata()?)?;
    // The file may have been replaced in the meantime.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

fn regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")) }
}

/// Reads a regular file of at most [`MOST_BYTES`].
///
/// # Errors
/// The errors of [`open`], or that it is too large.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {MOST_BYTES} bytes"));
    if file.metadata()?.len() > MOST_BYTES {
        return Err(too_large());
    }
    // Some file systems report a length of 0.
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES { Err(too_large()) } else { Ok(bytes) }
}

/// Like [`read`], within [`PATIENCE`].
///
/// # Errors
/// The errors of [`read`], or that the file system does not answer.
pub fn read_within(path: &Path) -> io::Result<Vec<u8>> {
    let owned = path.to_path_buf();
    within(PATIENCE, move || read(&owned))?
}

/// Runs some work on another thread and waits for it. After `patience` the thread is abandoned; it
/// ends when the kernel lets it.
///
/// # Errors
/// There is no result in time, or no thread can be started.
pub fn within<T: Send + 'static>(patience: Duration, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let stack = STACK_BYTES.saturating_add(TAKEN_FROM_STACKS.load(Ordering::Relaxed));
    let thread = std::thread::Builder::new().name("xpu_timer_file".into()).stack_size(stack);
    thread.spawn(move || {
        // The receiver is gone after the deadline.
        let _ = sender.send(work());
    })?;
    receiver.recv_timeout(patience).map_err(|_| unanswered())
}

/// The error of a file system that does not answer.
#[must_use]
pub fn unanswered() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "its file system does not answer")
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::{fs::symlink, net::UnixListener},
        path::PathBuf,
        time::Instant,
    };

    use super::*;

    #[test]
    fn only_a_regular_file_of_bounded_size_is_read() {
        let folder = std::env::temp_dir().join(format!("xpu_timer_file.{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name);
        fs::write(path("good"), "text").unwrap();
        symlink("good", path("link")).unwrap();
        assert_eq!(
            (read(&path("good")).unwrap(), read_within(&path("link")).unwrap()),
            (b"text".into(), b"text".into())
        );
        assert!(!read(Path::new("/proc/self/status")).unwrap().is_empty(), "a file without a length");

        File::create(path("large")).unwrap().set_len(1 << 40).unwrap();
        File::create(path("limit")).unwrap().set_len(MOST_BYTES).unwrap();
        assert_eq!(read(&path("limit")).unwrap().len() as u64, MOST_BYTES);
        symlink("loop", path("loop")).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        let begun = Instant::now();
        let refused: [(PathBuf, &str); 8] = [
            (path("large"), "larger than 1048576 bytes"),
            (path("fifo"), "not a regular file"),
            (path("socket"), "not a regular file"),
            (folder.clone(), "not a regular file"),
            ("/dev/zero".into(), "not a regular file"),
            ("/dev/tty".into(), "not a regular file"),
            (path("loop"), "Too many levels of symbolic links"),
            (path("none"), "No such file or directory"),
        ];
        for (path, why) in refused {
            for result in [read(&path), read_within(&path)] {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(why), "{}: {error}", path.display());
            }
        }
        assert!(begun.elapsed() < PATIENCE, "the open did not wait");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn blocked_work_is_abandoned_at_the_deadline() {
        let (hold, held) = mpsc::channel::<()>();
        let error = within(Duration::from_millis(20), move || held.recv().is_ok()).unwrap_err();
        assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::TimedOut, unanswered().to_string()));
        drop(hold);
        assert_eq!(within(PATIENCE, || 7).unwrap(), 7);
    }
}
