//! Reads the kernel's reports about processes, threads and sockets: files that
//! [`procfs`](xpu_timer_proto::procfs) does not read, and netlink.

pub(crate) mod awaited;
pub(crate) mod mappings;
pub(crate) mod open_files;
pub mod sock_diag;
pub(crate) mod tcp_sockets;

use std::{sync::Arc, thread, time::Instant};

use xpu_timer_proto::procfs::Parents;

/// The tables of the kernel that are read at most once for all processes of a capture.
#[derive(Default)]
pub(crate) struct Tables {
    pub open_files: open_files::OpenFiles,
    pub tcp_sockets: tcp_sockets::TcpSockets,
    pub parents: Parents,
    pub shared_memory: mappings::SharedMemory,
}

impl Tables {
    /// Begins to read the table of open files on a thread of its own, while the stacks are read:
    /// nearly every process has a thread that waits for a descriptor.
    pub(crate) fn read_ahead(self: &Arc<Self>, deadline: Instant) {
        let tables = Arc::clone(self);
        let read = move || tables.open_files.read(deadline);
        // Without the thread, the table is read when it is needed.
        let _ = thread::Builder::new().name("xpu_open_files".into()).spawn(read);
    }
}
