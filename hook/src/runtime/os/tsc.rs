//! The processor's time stamp counter. A program can forbid itself to read it.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU64, Ordering},
};

/// Nanoseconds per 2^32 ticks of the counter. 0 while it is unknown, or [`FORBIDDEN`].
pub static RATE: AtomicU64 = AtomicU64::new(0);

/// Value of [`RATE`] when the program has forbidden itself to read the counter. A read would end
/// the process.
pub const FORBIDDEN: u64 = u64::MAX;

/// From now on nothing reads the counter or the exact clock, which reads it too.
#[cold]
pub fn forbid() {
    RATE.store(FORBIDDEN, Ordering::Relaxed);
}

/// Whether the counter must not be read.
#[inline]
pub fn is_forbidden() -> bool {
    RATE.load(Ordering::Relaxed) == FORBIDDEN
}

/// The counter. It advances at a constant but unknown rate, and is several times cheaper to read
/// than a clock.
#[inline]
pub fn counter() -> u64 {
    // SAFETY: every x86-64 processor has it, and Linux lets programs read it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Whether a read of the counter ends the process because the program that executed this one
/// forbade it.
pub fn kernel_forbids() -> bool {
    const GET_TSC: c_int = 25;
    const TSC_SIGSEGV: c_int = 2;
    let mut mode: c_int = 0;
    // SAFETY: a valid place for an int.
    let known = unsafe { libc::prctl(GET_TSC, &raw mut mode) } == 0;
    known && mode == TSC_SIGSEGV
}
