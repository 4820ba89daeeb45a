//! Reads one file of `/proc`: here in general, and those that are one value or a list of strings.
//!
//! `process` is a pid, or `self`: in a PID namespace without a `/proc` of its own, a process finds
//! itself only under that name.

use std::{
    fmt::{self, Display},
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

use crate::ring::BOOT_ID;

/// A file of `/proc` cannot be read.
#[derive(Debug)]
pub struct Error {
    /// Path of the file.
    pub path: PathBuf,
    /// Error of the kernel, or of the parser.
    pub source: io::Error,
}

impl Error {
    /// Whether the process or thread does not exist, or has ended.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound || self.source.raw_os_error() == Some(libc::ESRCH)
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.source)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Size of the first read of a file: most files are shorter.
const FIRST_READ_BYTES: usize = 4 << 10;

pub(super) fn bytes(path: String) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::with_capacity(FIRST_READ_BYTES);
    // `File` itself would ask for the size first, which the kernel tells for no file of `/proc`.
    match File::open(&path).and_then(|file| file.take(u64::MAX).read_to_end(&mut bytes)) {
        Ok(_) => Ok(bytes),
        Err(source) => Err(Error { path: path.into(), source }),
    }
}

pub(super) fn text(path: String) -> Result<String, Error> {
    Ok(String::from_utf8_lossy(&bytes(path)?).into_owned())
}

/// The value of the line that starts with `name`.
#[must_use]
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The entries of a folder whose names are numbers: processes, threads.
pub(super) fn numbers(path: String) -> Result<impl Iterator<Item = i32>, Error> {
    let entries = fs::read_dir(&path).map_err(|source| Error { path: path.into(), source })?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// Buffer size: room for the status of a thread in deeply nested namespaces.
const READ_BYTES: usize = 8 << 10;

/// Reads one of the files of a thread in a single read, which the kernel fills consistently. A
/// longer file is cut.
pub(super) fn read_task<T>(pid: i32, tid: i32, file: &str, parse: impl FnOnce(&str) -> T) -> Result<T, Error> {
    let path = task(pid, tid, file);
    let mut buffer = [0; READ_BYTES];
    match File::open(&path).and_then(|mut file| file.read(&mut buffer)) {
        Ok(length) => Ok(parse(&String::from_utf8_lossy(&buffer[..length]))),
        Err(source) => Err(Error { path, source }),
    }
}

pub(super) fn task(pid: i32, tid: i32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/task/{tid}/{file}"))
}

/// Bytes that read and write calls moved; 0 if unreadable.
#[must_use]
pub fn io_bytes(pid: i32) -> u64 {
    let text = text(format!("/proc/{pid}/io")).unwrap_or_default();
    let of = |name: &str| field(&text, name).and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or_default();
    of("rchar:") + of("wchar:")
}

/// The arguments, each followed by a zero byte. They may contain secrets:
/// [`secrets::cmdline`](crate::secrets::cmdline) filters and joins them.
///
/// # Errors
/// There is no such process, or it belongs to another user.
pub fn cmdline(process: impl Display) -> Result<Vec<u8>, Error> {
    bytes(format!("/proc/{process}/cmdline"))
}

/// The environment at the start of the process, as `NAME=VALUE` entries that a zero byte ends.
///
/// # Errors
/// There is no such process, or it belongs to another user.
pub fn environ(process: impl Display) -> Result<Vec<u8>, Error> {
    bytes(format!("/proc/{process}/environ"))
}

/// The first value of a variable in an [`environ`].
#[must_use]
pub fn variable<'a>(environ: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let mut entries = environ.split(|byte| *byte == 0);
    entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

/// The kernel's name for the process, which is that of its first thread; empty if unreadable.
#[must_use]
pub fn name(pid: i32) -> String {
    text(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// The user that owns the folder of a process: its effective user. `None` if there is no such
/// process.
#[must_use]
pub fn owner(pid: i32) -> Option<u32> {
    fs::metadata(format!("/proc/{pid}")).ok().map(|folder| folder.uid())
}

/// Whom Yama lets read another process, from 0 (as without Yama) to 3 (nobody). `None` without
/// Yama.
#[must_use]
pub fn ptrace_scope() -> Option<u32> {
    text("/proc/sys/kernel/yama/ptrace_scope".into()).ok()?.trim().parse().ok()
}

/// The random id of the machine's current boot; empty if unreadable.
#[must_use]
pub fn boot_id() -> String {
    fs::read_to_string(BOOT_ID).map(|id| id.trim().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_of_a_variable_counts() {
        let environ = b"RANK=3\0RANK_OF=1\0RANK=4\0EMPTY=\0";
        assert_eq!(variable(environ, "RANK"), Some(&b"3"[..]));
        assert_eq!(variable(environ, "EMPTY"), Some(&b""[..]));
        assert_eq!(variable(environ, "RAN"), None);
    }

    #[test]
    fn reads_this_process() {
        let own = std::process::id();
        assert_eq!(environ(own).unwrap(), environ("self").unwrap());
        assert_eq!(cmdline(own).unwrap().split(|byte| *byte == 0).count(), std::env::args_os().count() + 1);
        assert!(cmdline(i32::MAX).unwrap_err().to_string().starts_with("/proc/2147483647/cmdline: "));
        assert!(!name(own as i32).is_empty() && boot_id().len() == 36);
    }
}
