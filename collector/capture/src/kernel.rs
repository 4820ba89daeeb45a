//! What the kernel reports about processes, threads and sockets: what
//! [`procfs`](xpu_timer_proto::procfs) does not read, and netlink.

pub(crate) mod awaited;
pub(crate) mod mappings;
pub(crate) mod open_files;
pub(crate) mod permission;
pub mod sock_diag;
pub mod tcp_sockets;

use xpu_timer_proto::procfs::Parents;

/// The tables of the kernel that are read at most once for all processes of a capture.
#[derive(Default)]
pub(crate) struct Tables {
    pub open_files: open_files::OpenFiles,
    pub tcp_sockets: tcp_sockets::TcpSockets,
    pub parents: Parents,
}
