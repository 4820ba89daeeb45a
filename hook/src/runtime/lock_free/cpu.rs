//! Hints to the processor.

/// Asks the processor for the cache line of a word that is written soon. A word of the ring was last written by the watcher, often
/// on another core.
#[inline(always)]
pub fn prefetch<T>(word: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint without effect but on the cache; a processor that does not know it takes it for no operation. The compiler's
    // own function emits the instruction for words that are only read, because the first processors of this kind lacked this one.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) std::ptr::from_ref(word), options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}
