//! `/proc/PID/mountinfo`. Reading it accesses no file system.

use std::{ffi::OsString, fmt::Display, os::unix::ffi::OsStringExt, path::PathBuf};

use super::files::bytes;

/// One line of `/proc/PID/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    /// Id, as in `/proc/PID/fdinfo`.
    pub id: &'a str,
    /// Major and minor number of the device.
    pub device: (u32, u32),
    /// Type of the file system.
    pub file_system_type: &'a str,
    escaped_point: &'a str,
}

impl Mount<'_> {
    /// The mount point.
    #[must_use]
    pub fn point(&self) -> PathBuf {
        unescaped(self.escaped_point)
    }
}

/// The mount table of a process: a pid, or `self`. `None` if it is unreadable.
#[must_use]
pub fn mounts(process: impl Display) -> Option<String> {
    bytes(format!("/proc/{process}/mountinfo")).ok().map(|table| escaped(&table))
}

/// The table as text. Bytes that are not UTF-8 are escaped as the kernel escapes a space, so that
/// [`Mount::point`] is exact.
fn escaped(table: &[u8]) -> String {
    let mut text = String::with_capacity(table.len());
    for chunk in table.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|byte| format!("\\{byte:03o}")));
    }
    text
}

/// The mounts in a mount table, in the order in which they were mounted.
pub fn parse_mounts(table: &str) -> impl Iterator<Item = Mount<'_>> {
    table.lines().filter_map(parse)
}

/// Type of the file system with this device number, as the process sees it.
#[must_use]
pub fn file_system_type(pid: i32, device: (u32, u32)) -> Option<String> {
    let table = mounts(pid)?;
    let mount = parse_mounts(&table).find(|mount| mount.device == device)?;
    Some(mount.file_system_type.to_string())
}

/// Device number of the mount with this id, as the process sees it.
#[must_use]
pub fn device_of_mount(pid: i32, id: &str) -> Option<(u32, u32)> {
    let table = mounts(pid)?;
    parse_mounts(&table).find(|mount| mount.id == id).map(|mount| mount.device)
}

/// `ID PARENT DEVICE ROOT POINT OPTIONS … - TYPE SOURCE OPTIONS`
fn parse(line: &str) -> Option<Mount<'_>> {
    // Optional fields are between the options and the dash.
    let (mount, system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ');
    let id = fields.next()?;
    let (major, minor) = fields.nth(1)?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let escaped_point = fields.nth(1)?;
    Some(Mount { id, device, file_system_type: system.split(' ').next()?, escaped_point })
}

/// A path in the mount table, in which spaces are written as `\040`.
fn unescaped(text: &str) -> PathBuf {
    let octal = |code: &str| code.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
    let mut pieces = text.split('\\');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        match octal(piece) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&piece.as_bytes()[3..]);
            }
            None => {
                bytes.push(b'\\');
                bytes.extend_from_slice(piece.as_bytes());
            }
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::ffi::OsStrExt, path::Path};

    use super::*;

    #[test]
    fn parses_mounts() {
        let line = "36 35 0:42 /a /mnt/b\\040c\\134 rw,noatime master:1 shared:2 - nfs4 host:/a rw,vers=4.2";
        let mount = parse(line).unwrap();
        assert_eq!((mount.id, mount.device, mount.file_system_type), ("36", (0, 42), "nfs4"));
        assert_eq!(mount.point(), Path::new("/mnt/b c\\"));
        let mount = parse("36 35 254:0 / / rw - ext4 /dev/vda rw").unwrap();
        assert_eq!((mount.id, mount.device, mount.file_system_type), ("36", (254, 0), "ext4"));
        assert_eq!(mount.point(), Path::new("/"));
        assert_eq!(parse(""), None);
    }

    #[test]
    fn a_mount_point_that_is_not_utf_8_is_exact() {
        let table = escaped(b"36 35 0:42 / /mnt/a\xff\xfe\\040b rw - nfs4 host:/a rw\n37 35 0:1 / /c rw - ext4 d rw\n");
        let points: Vec<PathBuf> = parse_mounts(&table).map(|mount| mount.point()).collect();
        assert_eq!(points, [Path::new(std::ffi::OsStr::from_bytes(b"/mnt/a\xff\xfe b")), Path::new("/c")]);
    }
}
