//! Reads one file of `/proc`.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read},
    path::PathBuf,
};

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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.source)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

pub(super) fn bytes(path: String) -> Result<Vec<u8>, Error> {
    fs::read(&path).map_err(|source| Error { path: path.into(), source })
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
