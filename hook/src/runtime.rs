//! Records operations in the ring and watches them, whatever library is called.
//!
//! Architecture Invariant: nothing here imports `interpose` or `backends`.

pub(crate) mod abi;
pub(crate) mod contexts;
#[allow(unsafe_code)]
pub(crate) mod device;

/// The life of the hook in a process: configuration, lazy start, fork and exit.
pub(crate) mod lifecycle {
    #[allow(unsafe_code)]
    pub(crate) mod config;
    #[allow(unsafe_code)]
    pub(crate) mod exit;
    #[allow(unsafe_code)]
    pub(crate) mod fork;
    pub(crate) mod panics;
    #[allow(unsafe_code)]
    pub(crate) mod start;
}

/// The dynamic linker: loaded objects, hooked functions, and the original functions.
pub(crate) mod linker {
    #[allow(unsafe_code)]
    pub(crate) mod dynamic;
    #[allow(unsafe_code)]
    pub(crate) mod elf;
    #[allow(unsafe_code)]
    pub(crate) mod function;
    #[allow(unsafe_code)]
    pub(crate) mod originals;
}

/// Lock-free data structures. `tests/models` compiles these files with the atomics of loom, as its
/// public items.
#[allow(unreachable_pub)]
pub(crate) mod lock_free {
    #[allow(unsafe_code)]
    pub(crate) mod atomic;
    #[allow(unsafe_code)]
    pub(crate) mod event_pools;
    pub(crate) mod handoff;
    pub(crate) mod slot;
}

/// The process, its threads, clocks and descriptors, and which system calls the hook may make.
pub(crate) mod os {
    #[allow(unsafe_code)]
    pub(crate) mod cancellation;
    #[allow(unsafe_code)]
    pub(crate) mod clock;
    #[allow(unsafe_code)]
    pub(crate) mod descriptor;
    #[allow(unsafe_code)]
    pub(crate) mod environment;
    #[allow(unsafe_code)]
    pub(crate) mod leaked_once;
    #[allow(unsafe_code)]
    pub(crate) mod process;
    #[allow(unsafe_code)]
    pub(crate) mod ptracer;
    #[allow(unsafe_code)]
    pub(crate) mod seccomp;
    pub(crate) mod sections;
    #[allow(unsafe_code)]
    pub(crate) mod signals;
    #[allow(unsafe_code)]
    pub(crate) mod stderr_text;
    #[allow(unsafe_code)]
    pub(crate) mod sys;
    #[allow(unsafe_code)]
    pub(crate) mod thread_state;
    #[allow(unsafe_code)]
    pub(crate) mod wakeup;
}

pub(crate) mod overhead;
#[allow(unsafe_code)]
pub(crate) mod recorder;

#[allow(unsafe_code)]
pub(crate) mod tracing;

/// The watcher thread: it detects hangs, and keeps the ring and the collector up to date.
pub(crate) mod watcher {
    #[allow(unsafe_code)]
    pub(crate) mod connection;
    pub(crate) mod coverage;
    pub(crate) mod device_clock;
    pub(crate) mod driver;
    #[allow(unsafe_code)]
    pub(crate) mod log;
    #[allow(unsafe_code)]
    pub(crate) mod thread;
    pub(crate) mod tracker;
    pub(crate) mod watch;
}
