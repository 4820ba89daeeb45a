//! The links of `/proc/PID/fd`, which name what a process has open.

/// So many files of one process.
pub(crate) const MOST_FILES: usize = 4096;

/// How the link of a socket begins.
pub(crate) const SOCKET: &str = "socket:[";

/// The number in `pipe:[4242]`.
pub(crate) fn inode_of(link: &str, kind: &str) -> Option<u64> {
    link.strip_prefix(kind)?.strip_suffix(']')?.parse().ok()
}
