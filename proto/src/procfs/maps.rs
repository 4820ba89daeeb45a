//! `/proc/PID/maps`.

use std::{collections::BTreeSet, ffi::OsStr, os::unix::ffi::OsStrExt, path::PathBuf};

use super::files::{Error, bytes};

/// One line of a maps file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address behind the last one.
    pub end: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Whether it may be executed.
    pub executable: bool,
    /// Whether it may be read.
    pub readable: bool,
    /// Major and minor number of the file system's device. The major number is 0 if no disk of this
    /// machine is behind the file system.
    pub device: (u32, u32),
    /// Inode of the file, or 0.
    pub inode: u64,
    /// As the kernel prints it: a path, `[stack]`, or empty.
    pub path: String,
}

impl Mapping {
    /// The file or the object in memory, which other processes may map too.
    #[must_use]
    pub fn object(&self) -> SharedObject {
        (self.device.0, self.device.1, self.inode)
    }

    /// Whether the mapping has no file that outlives the process.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        const KINDS: [&str; 6] = ["[heap]", "[stack", "[anon", "/memfd:", "/dev/zero", "/SYSV"];
        self.path.is_empty() || KINDS.iter().any(|kind| self.path.starts_with(kind))
    }
}

/// All mappings of a process, through one of its live threads.
///
/// # Errors
/// There is no such thread, or it belongs to another user.
pub fn maps(pid: i32, tid: i32) -> Result<Vec<Mapping>, Error> {
    Ok(bytes(format!("/proc/{pid}/task/{tid}/maps"))?.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// The paths of the files that a process has mapped, sorted, each once. They are exact, and lead to
/// the files also when they are not UTF-8.
///
/// # Errors
/// There is no such process, or it belongs to another user.
pub fn mapped_files(pid: i32) -> Result<Vec<PathBuf>, Error> {
    let maps = bytes(format!("/proc/{pid}/maps"))?;
    let paths = maps.split(|byte| *byte == b'\n').filter_map(Line::split).map(|line| line.path);
    let files = paths.filter(|path| path.starts_with(b"/"));
    let mut files: Vec<PathBuf> = files.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect();
    files.sort();
    files.dedup();
    Ok(files)
}

/// A file or an object in memory that several processes can map: its device and its inode.
pub type SharedObject = (u32, u32, u64);

/// Size of the address space of a process in pages. It changes when memory is mapped, and costs the
/// kernel less than a list of the mappings.
#[must_use]
pub fn mapped_pages(pid: i32) -> Option<u64> {
    let statm = bytes(format!("/proc/{pid}/statm")).ok()?;
    std::str::from_utf8(&statm).ok()?.split(' ').next()?.parse().ok()
}

/// The objects that a process has mapped writable and shared, without devices such as a GPU.
///
/// # Errors
/// There is no such process, or it belongs to another user.
pub fn shared_objects(pid: i32) -> Result<BTreeSet<SharedObject>, Error> {
    Ok(shared_mappings(pid)?.iter().map(Mapping::object).collect())
}

/// The writable and shared mappings of a process, without those of devices.
///
/// # Errors
/// There is no such process, or it belongs to another user.
pub fn shared_mappings(pid: i32) -> Result<Vec<Mapping>, Error> {
    const IN_MEMORY: [&str; 2] = ["/dev/shm/", "/dev/zero"];
    let is_device = |path: &str| path.starts_with("/dev/") && !IN_MEMORY.iter().any(|start| path.starts_with(start));
    let shared = |line: &[u8]| {
        // The permissions come first: few of hundreds of mappings are shared.
        let permissions = line.split(|byte| *byte == b' ').nth(1)?;
        let is_shared = permissions.get(1) == Some(&b'w') && permissions.get(3) == Some(&b's');
        if !is_shared {
            return None;
        }
        parse(line).filter(|mapping| mapping.inode != 0 && !is_device(&mapping.path))
    };
    let maps = bytes(format!("/proc/{pid}/maps"))?;
    Ok(maps.split(|byte| *byte == b'\n').filter_map(shared).collect())
}

/// The words of a line of a maps file: `START-END PERMISSIONS OFFSET DEVICE INODE PATH`.
struct Line<'a> {
    words: [&'a str; 5],
    path: &'a [u8],
}

impl<'a> Line<'a> {
    fn split(line: &'a [u8]) -> Option<Self> {
        let mut words = [""; 5];
        let mut rest = line;
        for word in &mut words {
            rest = rest.trim_ascii_start();
            let (text, tail) = rest.split_at(rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len()));
            (*word, rest) = (std::str::from_utf8(text).ok()?, tail);
        }
        Some(Line { words, path: rest.trim_ascii_start() })
    }
}

fn parse(line: &[u8]) -> Option<Mapping> {
    let Line { words: [range, permissions, offset, device, inode], path } = Line::split(line)?;
    let (start, end) = range.split_once('-')?;
    let permissions = permissions.as_bytes();
    let (major, minor) = device.split_once(':')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(Mapping {
        start: number(start)?,
        end: number(end)?,
        offset: number(offset)?,
        readable: permissions.first() == Some(&b'r'),
        executable: permissions.get(2) == Some(&b'x'),
        device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
        inode: inode.parse().ok()?,
        path: String::from_utf8_lossy(path).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_with_odd_paths() {
        let line = b"7f00-7f10 r-xp 00001000 08:1f 42                 /a b/c (deleted)";
        let mapping = parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.offset, mapping.inode), (0x7f00, 0x7f10, 0x1000, 42));
        assert!(mapping.executable && mapping.readable);
        assert_eq!(mapping.device, (8, 31));
        assert_eq!(mapping.path, "/a b/c (deleted)");
        assert_eq!(parse(b"7f00-7f10 ---p 00000000 00:00 0 ").unwrap().path, "");
    }

    #[test]
    fn reads_this_process() {
        let pid = std::process::id() as i32;
        let all = maps(pid, pid).unwrap();
        assert!(all.iter().any(|mapping| mapping.path == "[vdso]"));
        let own = std::env::current_exe().unwrap();
        let files = mapped_files(pid).unwrap();
        assert!(files.contains(&own) && files.iter().all(|file| file.is_absolute()), "{files:?}");
        assert!(parse(b"").is_none() && Line::split(b"").is_some_and(|line| line.path.is_empty()));
    }
}
