//! Where the node collector's Unix socket lies, and how large its packets are.
//!
//! The launcher, the hook and the collector must agree on this without talking to each other.

use std::path::{Path, PathBuf};

use crate::env::Source;

/// Largest packet on the socket, in bytes: the largest message is a Hello with a command of 4,096 bytes.
pub const MAX_PACKET_BYTES: usize = 16 * 1024;

/// Folder of the sockets of one user: `<temporary directory>/xpu_timer-<uid>`. Its owner must be that user, and nobody else may write to it.
#[must_use]
pub fn directory(temporary: &Path, uid: u32) -> PathBuf {
    temporary.join(format!("xpu_timer-{uid}"))
}

/// Socket that a process with these settings uses: `XPU_TIMER_SOCKET`, else the one of its control port in its `TMPDIR`.
#[must_use]
pub fn of(source: &Source, uid: u32) -> PathBuf {
    source.path("XPU_TIMER_SOCKET").unwrap_or_else(|| path(&temporary(source), uid, source.control_port()))
}

/// `TMPDIR`, or `/tmp`.
#[must_use]
pub fn temporary(source: &Source) -> PathBuf {
    source.path("TMPDIR").unwrap_or_else(|| "/tmp".into())
}

/// Socket of the node collector that listens on `control_port`.
#[must_use]
pub fn path(temporary: &Path, uid: u32, control_port: u16) -> PathBuf {
    directory(temporary, uid).join(format!("{control_port}.sock"))
}
