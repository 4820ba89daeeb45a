//! Hints to the processor.

/// Prefetches the cache line of a word that is written soon. The watcher wrote the words of the
/// ring last, often on another core.
#[inline(always)]
pub fn prefetch<T>(word: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: this hint only affects the cache; a processor without the instruction executes it as
    // a no-op. The compiler's intrinsic emits the prefetch for reading, because the first x86-64
    // processors lacked this one.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) std::ptr::from_ref(word), options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}
