//! Where the node collector's Unix socket lies, and how large its packets are.
//!
//! The launcher, the hook and the collector must agree on this without talking to each other.

use std::path::{Path, PathBuf};

/// Largest packet on the socket, in bytes: the largest message is a Hello with a command of 4,096 bytes.
pub const MAX_PACKET_BYTES: usize = 16 * 1024;

/// Folder of the sockets of one user: `<temporary directory>/xpu_timer-<uid>`. Its owner must be that user, its mode 0700.
#[must_use]
pub fn directory(temporary: &Path, uid: u32) -> PathBuf {
    temporary.join(format!("xpu_timer-{uid}"))
}

/// Socket of the node collector that listens on `control_port`.
#[must_use]
pub fn path(temporary: &Path, uid: u32, control_port: u16) -> PathBuf {
    directory(temporary, uid).join(format!("{control_port}.sock"))
}
