//! The operating system: processes, clocks, disks, memory.

pub mod clock;
pub(crate) mod descriptors;
pub(crate) mod disk;
pub(crate) mod process;
pub(crate) mod ring_file;
pub(crate) mod safe_path;

/// Descriptors and memory of this process.
pub(crate) mod resources {
    use std::io;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use tracing::warn;

    /// Raises the soft limit of open files to the hard limit and returns it. Each rank needs three
    /// descriptors; the usual soft limit of 1,024 exists for programs that use `select`.
    pub(crate) fn raise_descriptor_limit() -> u64 {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("each process has this limit");
        if let Err(errno) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            warn!("the limit of open files stays at {soft}: {}", io::Error::from(errno));
            return soft;
        }
        hard
    }

    /// Lets all threads allocate from so many arenas. By default the allocator makes up to eight
    /// arenas per core, and a thread cannot reuse memory that was freed in another one. Each would
    /// grow to the size of the largest incident.
    pub(crate) fn limit_arenas(arenas: i32) {
        #[cfg(target_env = "gnu")]
        set_allocator(libc::M_ARENA_MAX, arenas);
    }

    /// Prepares the allocator for hundreds of megabytes in small pieces. Freed pieces are joined at
    /// once, and the heap grows in large steps.
    pub(crate) fn expect_large_heap() {
        #[cfg(target_env = "gnu")]
        {
            const STEP_BYTES: libc::c_int = 64 << 20;
            set_allocator(libc::M_MXFAST, 0);
            set_allocator(libc::M_TOP_PAD, STEP_BYTES);
        }
    }

    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code, reason = "mallopt is a function of C")]
    fn set_allocator(parameter: libc::c_int, value: libc::c_int) {
        // SAFETY: mallopt only changes a setting of the allocator.
        if unsafe { libc::mallopt(parameter, value) } == 0 {
            tracing::debug!("the allocator refuses {value} for parameter {parameter}");
        }
    }

    /// Returns freed memory to the system. After an incident, this is most of the memory in use.
    #[allow(unsafe_code, reason = "malloc_trim is a function of C")]
    pub(crate) fn trim_heap() {
        #[cfg(target_env = "gnu")]
        // SAFETY: malloc_trim may be called at any time; it returns free pages to the system.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
