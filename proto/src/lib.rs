//! The wire and file formats of xpu_timer.
//!
//! Everything that crosses a process boundary is defined only here: the `.stacktrace` file, the
//! flight record, the hook's shared ring, the messages between hook, node and cluster, and the
//! environment variables. [`procfs`] reads what the kernel reports about processes, for all
//! members. This crate depends on no other member and contains no unsafe code. Its only I/O is
//! [`mod@file`], [`procfs`] and the checks of [`socket`], which all programs share.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

#[cfg(feature = "grpc")]
pub mod codec;
pub mod env;
pub mod family;
pub mod file;
pub mod kernels;
pub mod lenient;
pub mod printable;
pub mod procfs;
pub mod ring;
pub mod samples;
pub mod secrets;
pub mod socket;
pub mod timeline;

/// The `.stacktrace` file format, shared with the original tool.
#[allow(missing_docs, clippy::all, unused_qualifications)]
pub mod server {
    include!("generated/xpu_timer.server.rs");
}

/// The `.timeline` file format of the original tool.
#[allow(missing_docs, clippy::all, unused_qualifications)]
pub mod hook {
    include!("generated/xpu_timer.hook.rs");
}

/// Messages of this project: flight records, hook, evidence and cluster.
#[allow(missing_docs, clippy::all, unused_qualifications)]
pub mod v1 {
    include!("generated/xpu_timer.v1.rs");
}

impl server::PySuspendedKind {
    /// The word for what waits: `task` or `greenlet`.
    #[must_use]
    pub fn noun(self) -> &'static str {
        match self {
            Self::Greenlet => "greenlet",
            Self::Task | Self::Unspecified => "task",
        }
    }
}

impl server::PySpyFrame {
    /// The file of the code. The place of a frame is `path:line`.
    #[must_use]
    pub fn path(&self) -> &str {
        self.file_name.rsplit_once(':').map_or(&self.file_name, |(path, _)| path)
    }
}

mod shapes {
    include!("generated/shapes.rs");
}

pub use prost::{
    DecodeError, Message, encode_length_delimiter,
    encoding::{decode_varint, encode_varint},
};

/// Start of the name of an awaited socket on which a process listens. The address follows. The
/// capture writes it, and the judge reads it.
pub const LISTENS: &str = "anybody who connects";

/// Maximum number of tasks of a thread that the capture shows. If a capture has this number, the
/// judge assumes that there may be more.
pub const MAX_SUSPENDED: usize = 256;

/// Start of the name of an awaited datagram socket from which a process expects a reply. The path
/// follows.
pub const REPLIES: &str = "a reply from";

/// The object that an asyncio task awaits if it is not another task. The capture writes it, and the
/// judge reads it.
pub const FUTURE: &str = "a future";

/// The object that a trio task awaits if it is not another task: nothing shows what wakes it.
pub const WAKEUP: &str = "a wakeup";

/// Name of the hook's thread in a rank. It waits for the device and for the collector.
pub const WATCHER_THREAD: &str = "xpu_timer_watch";

/// Version of the messages between hook, node and cluster. A peer with another version is rejected
/// with a clear error.
pub const PROTOCOL_VERSION: u32 = 1;
