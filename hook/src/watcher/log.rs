//! The hook's log: one line for each thing that is wrong, and no file when nothing is.

use std::{fs::OpenOptions, io::Write, os::unix::fs::OpenOptionsExt, path::PathBuf};

use xpu_timer_proto::{file, printable};

/// More lines than this help nobody.
const MOST_LINES: u32 = 200;

/// A log file that is opened when there is something to say, and closed again: a descriptor is not kept in a foreign process.
pub struct Log {
    path: PathBuf,
    lines: u32,
    /// Its file system has left a line waiting. Another thread must not wait there, too.
    hangs: bool,
}

impl Log {
    /// A log at `path`.
    pub fn new(path: PathBuf) -> Self {
        Log { path, lines: 0, hangs: false }
    }

    /// Appends a line. Where the file cannot be written there is no log. A file system that does not answer keeps one thread, which
    /// is not the watcher.
    pub fn say(&mut self, text: &str) {
        self.lines += 1;
        if self.lines > MOST_LINES || self.hangs {
            return;
        }
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let line = format!("{}.{:03} {}\n", seconds.as_secs(), seconds.subsec_millis(), printable::line(text));
        let path = self.path.clone();
        let written = file::within(file::PATIENCE, move || {
            // The folder may be /tmp, where a link of somebody else's could wait under this name.
            let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
            if let Ok(mut file) = OpenOptions::new().create(true).append(true).custom_flags(flags).open(path) {
                let _ = file.write_all(line.as_bytes());
            }
        });
        self.hangs = written.is_err();
    }
}
