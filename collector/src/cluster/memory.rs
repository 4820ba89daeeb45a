//! The allocator of the cluster collector.
#![allow(unsafe_code)]

/// Lets all threads allocate from one arena. By default each thread has its own, and what one of them frees, another one cannot use:
/// messages are made by the threads that read streams and freed by those that merge and compare.
pub fn share() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt changes a setting of the allocator, before there is another thread.
    let set = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    #[cfg(target_env = "gnu")]
    if set == 0 {
        tracing::debug!("the allocator keeps an arena for each thread");
    }
}

/// Gives back what was freed. After an incident that is most of what was in use.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim may be called at any time; it returns free pages to the system.
    unsafe {
        libc::malloc_trim(0);
    }
}
