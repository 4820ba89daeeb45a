//! What the kernel reports about processes, threads and sockets: what
//! [`procfs`](xpu_timer_proto::procfs) does not read, and netlink.

pub(crate) mod awaited;
pub(crate) mod mappings;
pub(crate) mod open_files;
pub(crate) mod permission;
pub mod sock_diag;
