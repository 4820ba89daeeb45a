//! The hook's log: one line for each thing that is wrong, and no file when nothing is.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::Write,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::PathBuf,
};

use xpu_timer_proto::printable;

/// More lines than this help nobody.
const MOST_LINES: u32 = 200;

/// A longer line says nothing more.
const MOST_BYTES: usize = 4096;

/// A file that has grown to this size is left alone.
const MOST_FILE_BYTES: u64 = 2_000_000;

/// A log file that is opened when there is something to say, and closed again: a descriptor is not kept in a foreign process.
pub struct Log {
    path: PathBuf,
    mode: u32,
    lines: u32,
}

impl Log {
    /// A log at `path` of this mode.
    pub fn new(path: PathBuf, mode: u32) -> Self {
        Log { path, mode, lines: 0 }
    }

    /// Appends a line. Where the file cannot be written there is no log.
    pub fn say(&mut self, text: &str) {
        self.lines += 1;
        if self.lines > MOST_LINES {
            return;
        }
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let text = &text[..text.floor_char_boundary(MOST_BYTES)];
        let line = format!("{}.{:03} {}\n", seconds.as_secs(), seconds.subsec_millis(), printable::line(text));
        // The folder may be /tmp, where a link of somebody else's could wait under this name.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let open = |new: bool| {
            let mut options = OpenOptions::new();
            options.create_new(new).append(true).mode(self.mode).custom_flags(flags).open(&self.path)
        };
        let file = open(true).inspect(|file| {
            // The umask may have taken from it what the group is to have.
            let _ = file.set_permissions(Permissions::from_mode(self.mode));
        });
        let file = file.or_else(|_| -> std::io::Result<File> {
            let file = open(false)?;
            // What earlier processes of this id have left does not add up for ever.
            let length = file.metadata()?.len();
            if length > MOST_FILE_BYTES { Err(std::io::ErrorKind::FileTooLarge.into()) } else { Ok(file) }
        });
        if let Ok(mut file) = file {
            let _ = file.write_all(line.as_bytes());
        }
    }
}
