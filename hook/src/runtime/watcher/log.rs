//! The hook's log: one line per problem, and no file if there is none.
//!
//! The log never opens a file on a network file system. If such a file system does not answer, the
//! process cannot end, not even by SIGKILL, because the kernel waits for the thread that is inside
//! it.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::PathBuf,
};

use xpu_timer_proto::{file, printable, socket::is_remote};

/// Maximum number of lines.
const MAX_LINES: u32 = 200;

/// Maximum length of a line.
const MAX_BYTES: usize = 4096;

/// A file that has reached this size is not extended.
const MAX_FILE_BYTES: u64 = 2_000_000;

/// A log file that is opened for each line and closed again, so that no descriptor stays open in
/// the host process.
pub(crate) struct Log {
    place: LogFile,
    /// Used when the configured folder is on a network file system.
    local: PathBuf,
    lines: u32,
    /// A line is stuck in its file system. No further thread must block there.
    hangs: bool,
}

/// Path, mode and owner of the log file.
#[derive(Clone)]
struct LogFile {
    path: PathBuf,
    mode: u32,
    owner: u32,
}

impl Log {
    /// A log at `path` with this mode, or at `local` when `path` is on a network file system.
    pub(crate) fn new(path: PathBuf, local: PathBuf, mode: u32) -> Self {
        // SAFETY: geteuid takes nothing and cannot fail.
        let owner = unsafe { libc::geteuid() };
        Log { place: LogFile { path, mode, owner }, local, lines: 0, hangs: false }
    }

    /// Appends a line. Does nothing if the file cannot be written. A file system that does not
    /// answer blocks one thread, which is not the watcher.
    pub(crate) fn write_line(&mut self, text: &str) {
        self.lines += 1;
        if self.lines > MAX_LINES || self.hangs {
            return;
        }
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let text = &text[..text.floor_char_boundary(MAX_BYTES)];
        let line = format!("{}.{:03} {}\n", seconds.as_secs(), seconds.subsec_millis(), printable::line(text));
        let mut place = self.place.clone();
        // Checked for each line, because another file system may have been mounted.
        if is_remote(&place.path) {
            place.path.clone_from(&self.local);
        }
        let written = file::within(file::PATIENCE, move || {
            if let Ok(mut file) = place.open() {
                let _ = file.write_all(line.as_bytes());
            }
        });
        self.hangs = written.is_err();
    }
}

impl LogFile {
    /// Opens the file if it belongs to this user and has not reached the size limit; earlier
    /// processes with this pid may have written to it.
    fn open(&self) -> io::Result<File> {
        // In a folder such as /tmp, this name may be a link, a file of another user, or a second
        // name of a file of this user.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().create(true).append(true).mode(self.mode).custom_flags(flags).open(&self.path)?;
        let status = file.metadata()?;
        if !status.is_file() || status.uid() != self.owner || status.nlink() > 1 || status.len() > MAX_FILE_BYTES {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if status.mode() & 0o777 != self.mode {
            // The umask may have removed the group's access, or the file existed with another mode.
            file.set_permissions(Permissions::from_mode(self.mode))?;
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::chown, path::Path};

    use super::*;

    fn log(path: &Path, mode: u32) -> Log {
        Log::new(path.into(), "/nowhere/at/all".into(), mode)
    }

    #[test]
    fn a_hard_link_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let (precious, path) = (folder.path().join("precious"), folder.path().join("log"));
        fs::write(&precious, "precious").unwrap();
        fs::hard_link(&precious, &path).unwrap();
        log(&path, 0o600).write_line("something");
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn the_log_has_its_mode_and_a_size_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        for mode in [0o600, 0o644, 0o640] {
            log(&path, mode).write_line("something");
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
        }
        let mut talkative = log(&path, 0o600);
        let long = "\u{e4}".repeat(MAX_BYTES);
        (0..2 * MAX_LINES).for_each(|_| talkative.write_line(&long));
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 3 + MAX_LINES as usize);
        assert!(text.lines().all(|line| line.len() < MAX_BYTES + 50));
        // Written by earlier processes with this pid.
        File::options().write(true).open(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        log(&path, 0o600).write_line("one more");
        assert_eq!(fs::metadata(&path).unwrap().len(), MAX_FILE_BYTES + 1);
    }

    #[test]
    fn foreign_files_are_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("log"), folder.path().join("link"));
        fs::write(&path, "precious").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        log(&link, 0o600).write_line("something");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        // SAFETY: geteuid takes nothing and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("SKIPPED the file of another user: only root can make one");
            return;
        }
        chown(&path, Some(12345), None).unwrap();
        log(&path, 0o600).write_line("something");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
