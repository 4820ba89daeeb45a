//! What the kernel reports about processes, threads and sockets: `/proc` and netlink.

pub(crate) mod awaited;
pub(crate) mod mappings;
pub(crate) mod permission;
pub(crate) mod procfs;
pub mod sock_diag;
