//! The hook's log: one line for each thing that is wrong, and no file when nothing is.
//!
//! No file of the network is opened. While such a file system is gone, a process with a thread in it cannot end: the kernel waits for that
//! thread, even after SIGKILL.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::PathBuf,
};

use xpu_timer_proto::{file, printable, socket::is_remote};

/// More lines than this help nobody.
const MOST_LINES: u32 = 200;

/// A longer line says nothing more.
const MOST_BYTES: usize = 4096;

/// A file that has grown to this size is left alone.
const MOST_FILE_BYTES: u64 = 2_000_000;

/// A log file that is opened when there is something to say, and closed again: a descriptor is not kept in a foreign process.
pub struct Log {
    place: Place,
    /// Where it goes when the wanted folder is on a file system of the network.
    local: PathBuf,
    lines: u32,
    /// Its file system has left a line waiting. Another thread must not wait there, too.
    hangs: bool,
}

/// Where the log is, and whose it has to be.
#[derive(Clone)]
struct Place {
    path: PathBuf,
    mode: u32,
    owner: u32,
}

impl Log {
    /// A log at `path` of this mode, or at `local` when `path` is on a file system of the network.
    pub fn new(path: PathBuf, local: PathBuf, mode: u32) -> Self {
        // SAFETY: geteuid takes nothing and cannot fail.
        let owner = unsafe { libc::geteuid() };
        Log { place: Place { path, mode, owner }, local, lines: 0, hangs: false }
    }

    /// Appends a line. Where the file cannot be written there is no log. A file system that does not answer keeps one thread, which
    /// is not the watcher.
    pub fn write_line(&mut self, text: &str) {
        self.lines += 1;
        if self.lines > MOST_LINES || self.hangs {
            return;
        }
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let text = &text[..text.floor_char_boundary(MOST_BYTES)];
        let line = format!("{}.{:03} {}\n", seconds.as_secs(), seconds.subsec_millis(), printable::line(text));
        let mut place = self.place.clone();
        // Looked at each time: another file system may have been mounted.
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

impl Place {
    /// The file, when it is this user's own and not as long already as what earlier processes of this id may have left.
    fn open(&self) -> io::Result<File> {
        // The folder may be /tmp, where a link, a file of somebody else's, or a second name of a file of this user could wait under this name.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().create(true).append(true).mode(self.mode).custom_flags(flags).open(&self.path)?;
        let status = file.metadata()?;
        if !status.is_file() || status.uid() != self.owner || status.nlink() > 1 || status.len() > MOST_FILE_BYTES {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if status.mode() & 0o777 != self.mode {
            // The umask has taken from it what the group is to have, or it was there with another mode.
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
    fn a_second_name_of_another_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (precious, path) = (folder.path().join("precious"), folder.path().join("log"));
        fs::write(&precious, "precious").unwrap();
        fs::hard_link(&precious, &path).unwrap();
        log(&path, 0o600).write_line("something");
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn it_has_its_mode_and_ends_somewhere() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        for mode in [0o600, 0o644, 0o640] {
            log(&path, mode).write_line("something");
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
        }
        let mut talkative = log(&path, 0o600);
        let long = "\u{e4}".repeat(MOST_BYTES);
        (0..2 * MOST_LINES).for_each(|_| talkative.write_line(&long));
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 3 + MOST_LINES as usize);
        assert!(text.lines().all(|line| line.len() < MOST_BYTES + 50));
        // Earlier processes of this id.
        File::options().write(true).open(&path).unwrap().set_len(MOST_FILE_BYTES + 1).unwrap();
        log(&path, 0o600).write_line("one more");
        assert_eq!(fs::metadata(&path).unwrap().len(), MOST_FILE_BYTES + 1);
    }

    #[test]
    fn what_others_have_put_there_is_left_alone() {
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
