//! The links of `/proc/PID/fd`, which name the files and sockets that a process has open.

/// Maximum number of descriptors of one process to read.
pub(crate) const MAX_FILES: usize = 4096;

/// Start of the link of a socket.
pub(crate) const SOCKET: &str = "socket:[";

/// The inode in a link such as `pipe:[4242]`.
pub(crate) fn inode_of(link: &str, kind: &str) -> Option<u64> {
    link.strip_prefix(kind)?.strip_suffix(']')?.parse().ok()
}
