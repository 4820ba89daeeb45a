//! Readers of the files of `/proc` that describe processes, threads, mounts and sockets, shared by
//! all members but the hook. They stop nothing. The capture has further readers, for what only it
//! needs.
//!
//! The capture reads five files of each of up to thousands of threads, so those readers use a
//! buffer on the stack and allocate only the fields that they return. The hook does not use this
//! module: it must not allocate.

mod children;
mod files;
mod maps;
mod mounts;
mod sockets;
mod status;
mod thread;

pub use children::{Parents, children, descendants, descendants_until, pids, program_cmdline, threads};
pub use files::{Error, boot_id, cmdline, environ, field, io_bytes, name, owner, ptrace_scope, variable};
pub use maps::{Mapping, SharedObject, mapped_files, mapped_pages, maps, shared_mappings, shared_objects};
pub use mounts::{Mount, device_of_mount, file_system_type, mounts, parse_mounts};
pub use sockets::{LISTEN, MAX_FILES, SOCKET, TcpSocket, find_tcp_socket, inode_of};
pub use status::{
    EffectiveCredentials, Stat, Status, TICK_NS, effective_credentials, pid_of_thread, seccomp_filters, stat,
    state_text, status, status_text, thread_stat, ticks_to_ns,
};
pub use thread::{Schedstat, Schedule, Syscall, kernel_stack, schedstat, syscall, wchan};
