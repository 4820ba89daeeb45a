//! The allocator of the collector.
#![allow(unsafe_code)]

/// Lets all threads allocate from one arena. By default the allocator makes up to eight arenas per
/// core, and a thread cannot reuse memory that was freed in another arena. Each arena would grow to
/// the size of the largest incident.
pub fn share_one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only changes a setting of the allocator.
    let set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    #[cfg(target_env = "gnu")]
    if set == 0 {
        tracing::debug!("the allocator keeps an arena for each thread");
    }
}

/// Returns freed memory to the system. After an incident, this is most of the memory in use.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim may be called at any time; it returns free pages to the system.
    unsafe {
        libc::malloc_trim(0);
    }
}
