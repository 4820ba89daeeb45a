//! A search for what one thread waits for.

use std::{cell::OnceCell, collections::HashSet, fs, sync::Arc, time::Instant};

use xpu_timer_proto::{
    procfs::{self, descendants_until},
    server::Holder,
};

use crate::kernel::{Tables, tcp_sockets::Table};

/// Maximum number of holders in a result.
pub(super) const MAX_HOLDERS: usize = 8;

/// The operation of a call on a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    /// A read of a message from a socket that does not ask who sent it: the process knows that, or
    /// the socket is connected.
    Receive,
    Write,
    Lock,
    Accept,
}

/// The thread whose call is examined, and what is shared by all searches of a capture.
pub(super) struct Search<'a> {
    pub pid: i32,
    /// The kernel function that the thread sleeps in; may be empty.
    pub wchan: &'a str,
    pub tables: &'a Tables,
    pub deadline: Instant,
    /// The TCP sockets, which a call may need for each of its descriptors.
    tcp_sockets: OnceCell<Option<Arc<Table>>>,
}

impl<'a> Search<'a> {
    pub(super) fn new(pid: i32, wchan: &'a str, tables: &'a Tables, deadline: Instant) -> Self {
        Search { pid, wchan, tables, deadline, tcp_sockets: OnceCell::new() }
    }

    /// The TCP sockets of the network namespace of the process.
    pub(super) fn tcp_sockets(&self) -> Option<&Table> {
        let find = || self.tables.tcp_sockets.of_namespace(self.pid, self.deadline);
        self.tcp_sockets.get_or_init(find).as_deref()
    }

    /// The parent, and the descendants of the parent; without a parent, those of the process.
    pub(super) fn family(&self) -> impl Iterator<Item = i32> + use<> {
        let parent = self.tables.parents.of(self.pid).filter(|parent| *parent > 1);
        let root = parent.unwrap_or(self.pid);
        let (descendants, _) = descendants_until(root, &HashSet::new(), Some(self.deadline));
        let own = self.pid;
        std::iter::once(root).chain(descendants).filter(move |pid| *pid != own)
    }

    /// Describes processes: children first, then the parent, then others.
    pub(super) fn holders(&self, pids: impl IntoIterator<Item = i32>) -> Vec<Holder> {
        let parent = self.tables.parents.of(self.pid);
        let is_child = |pid: i32| self.tables.parents.is_descendant(pid, self.pid, self.deadline);
        let mut pids: Vec<i32> = pids.into_iter().collect();
        pids.sort_by_cached_key(|pid| (!is_child(*pid), Some(*pid) != parent, *pid));
        pids.dedup();
        let holder = |pid: i32| Holder { pid, name: procfs::name(pid), child: is_child(pid), ..Holder::default() };
        pids.into_iter().take(MAX_HOLDERS).map(holder).collect()
    }
}

/// A path that a process passes to the kernel. If it is relative, it begins at the folder `from`.
/// It stays as it is if the folder is not known.
pub(super) fn absolute(pid: i32, from: i32, path: String) -> String {
    if path.starts_with('/') {
        return path;
    }
    let link = if from == libc::AT_FDCWD { format!("/proc/{pid}/cwd") } else { format!("/proc/{pid}/fd/{from}") };
    // The kernel knows the path of a folder, so reading the link involves no file system.
    fs::read_link(link).map_or(path.clone(), |folder| folder.join(path).to_string_lossy().into_owned())
}
