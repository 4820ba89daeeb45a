//! The processor's time stamp counter, and whether the program has forbidden itself to read it.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicU64, Ordering},
};

/// Nanoseconds of 2^32 ticks of the counter; 0 as long as it is not known, and [`FORBIDDEN`].
pub static RATE: AtomicU64 = AtomicU64::new(0);

/// In place of a pace: the program has forbidden itself to read the counter, which ends who reads it.
pub const FORBIDDEN: u64 = u64::MAX;

/// From now on nobody reads the counter. The exact clock is the counter, too.
#[cold]
pub fn forbid() {
    RATE.store(FORBIDDEN, Ordering::Relaxed);
}

/// Whether the counter must not be read.
#[inline]
pub fn is_forbidden() -> bool {
    RATE.load(Ordering::Relaxed) == FORBIDDEN
}

/// The processor's counter, which goes on at an even pace that nobody says; several times cheaper than a clock.
#[inline]
pub fn counter() -> u64 {
    // SAFETY: every x86-64 processor has it, and Linux lets programs read it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Whether reading it ends the calling thread's process, because the program that has executed this one wanted that.
pub fn kernel_forbids() -> bool {
    const GET_TSC: c_int = 25;
    const TSC_SIGSEGV: c_int = 2;
    let mut mode: c_int = 0;
    // SAFETY: a valid place.
    let known = unsafe { libc::prctl(GET_TSC, &raw mut mode) } == 0;
    known && mode == TSC_SIGSEGV
}
