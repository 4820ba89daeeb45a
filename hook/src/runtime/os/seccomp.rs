//! Seccomp filters that the program installs while it runs. A filter may end the process at a
//! system call that the program itself never makes, and the kernel does not say which calls it
//! forbids. So from then on, a thread under a filter makes no system call for the hook.
//!
//! The hook learns of a filter in three ways:
//!
//! - It sees the calls of `prctl` and `syscall` that install one, also those of libseccomp and
//!   those through a looked-up address.
//! - A program that was executed under more filters than the launched command inherited them from
//!   the program that executed it.
//! - The node collector reads `/proc/PID/status` once a second, and reports in the ring which
//!   threads are under a filter. This is the only way to learn of a filter that a bare instruction
//!   installs.
//!
//! Until the collector has looked, a thread under such a filter makes six calls: `futex` when it is
//! 256 operations ahead of the watcher, `gettid` at its first launch, `getpid` and
//! `process_vm_readv` after a write to standard error, and, while it polls MPI, `clock_gettime` for
//! its CPU time and `getrusage` for its context switches. In its steady state, a job launches from
//! threads that have launched before, and the watcher keeps up. With `TSYNC` the watcher still
//! makes the `futex` call in which it sleeps. If the collector has not looked for 2.5 s, it also
//! examines the socket, and if the program has launched nothing for a second, it looks for other
//! threads (`stat`, `openat`). A bare instruction whose filter forbids one of these calls may end
//! the process.
//!
//! The program's threads continue to record, because that only writes memory. The watcher continues
//! as long as the filter does not apply to it, but takes no lock of the C library that another
//! thread would wait for (see [`sections`](super::sections)). With
//! `SECCOMP_FILTER_FLAG_TSYNC` the filter applies to it; then the watcher thread ends before the
//! filter is installed, because a sleeping thread would make another call when it wakes up.
use std::sync::atomic::{AtomicU32, Ordering};

use xpu_timer_proto::ring::{filtered, header};

use super::{process::PROCESS, thread_state};

static SEEN: SeenFilters = SeenFilters::new();

/// Bits of [`filtered`] that this process has seen, and the number of threads that are inside a
/// call that installs a filter. The count keeps the hook quiet before the filter takes effect, and
/// a call that fails does not undo what another call has installed meanwhile.
struct SeenFilters(AtomicU32);

/// One call that installs a filter on its own thread.
const ONE_OWN: u32 = 1 << 8;

/// One call that installs a filter on all threads.
const ONE_TSYNC: u32 = 1 << 20;

impl SeenFilters {
    const fn new() -> Self {
        SeenFilters(AtomicU32::new(0))
    }

    /// The bits that hold or are about to hold.
    fn bits(&self) -> u32 {
        let word = self.0.load(Ordering::Relaxed);
        let about_to = if word >= ONE_OWN { filtered::PROGRAM } else { 0 };
        Self::certain(word) | about_to | if word >= ONE_TSYNC { filtered::WATCHER } else { 0 }
    }

    fn certain(word: u32) -> u32 {
        word & (filtered::PROGRAM | filtered::WATCHER)
    }

    fn add(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::Relaxed);
    }

    fn begin(&self, on_all_threads: bool) {
        self.0.fetch_add(Self::one(on_all_threads), Ordering::Relaxed);
    }

    fn end(&self, on_all_threads: bool, succeeded: bool) {
        if succeeded {
            self.add(filtered::PROGRAM | if on_all_threads { filtered::WATCHER } else { 0 });
        }
        self.0.fetch_sub(Self::one(on_all_threads), Ordering::Relaxed);
    }

    fn one(on_all_threads: bool) -> u32 {
        if on_all_threads { ONE_TSYNC } else { ONE_OWN }
    }
}

/// Whether a thread of the program may make a system call for the hook.
#[inline]
pub(crate) fn may_call() -> bool {
    known_filters() & filtered::PROGRAM == 0
}

/// Whether the watcher may make a system call.
pub(crate) fn watcher_may_call() -> bool {
    known_filters() & filtered::WATCHER == 0
}

/// Whether the calling thread may read the exact clock. Where the clock is not based on the
/// processor's counter, a reading is a system call. Where it is, a reading ends the process if the
/// program has forbidden itself the counter. Neither holds for the coarse clock. This function
/// reads process memory only, because it is on the hot path.
#[inline(always)]
pub(crate) fn may_read_clock() -> bool {
    let seen = SEEN.bits();
    (seen == 0 || is_watchers_own(seen)) && !tsc::is_forbidden()
}

/// Whether only the program's threads are under these filters, and the calling thread is the
/// watcher.
#[cold]
fn is_watchers_own(seen: u32) -> bool {
    seen & filtered::WATCHER == 0 && thread_state::current().is_watcher.get()
}

/// The filters that this process has seen and those that the collector has reported. Bits are never
/// cleared, because a filter cannot be removed.
fn known_filters() -> u32 {
    let seen = SEEN.bits();
    let words = PROCESS.ring_words.load(Ordering::Acquire);
    if words.is_null() {
        return seen;
    }
    // SAFETY: the words of the ring, which is never unmapped; the header comes first.
    let reported = SeenFilters::certain(unsafe { &*words.add(header::FILTERED) }.load(Ordering::Relaxed) as u32);
    if reported & !seen != 0 {
        SEEN.add(reported);
    }
    seen | reported
}

/// Stores the collector's report for a child that is about to be forked. The child inherits the
/// filters but not the ring.
pub(crate) fn remember_for_child() {
    known_filters();
}

/// The program that executed this one has installed filters, which this process inherits. No thread
/// makes a system call from now on.
pub(crate) fn set_inherited() {
    SEEN.add(filtered::PROGRAM | filtered::WATCHER);
}

/// A call begins that installs a filter on all threads or on the calling one. The hook makes no
/// system calls from now on.
pub(crate) fn begin_install(on_all_threads: bool) {
    SEEN.begin(on_all_threads);
}

/// The call has returned.
pub(crate) fn end_install(on_all_threads: bool, succeeded: bool) {
    SEEN.end(on_all_threads, succeeded);
}

/// The filters that this process has seen, in the form of [`header::FILTERS_SEEN`].
pub(crate) fn seen() -> u64 {
    u64::from(SeenFilters::certain(SEEN.0.load(Ordering::Relaxed)))
}

/// The processor's time stamp counter. A program can forbid itself to read it.
pub(crate) mod tsc {
    use std::{
        ffi::c_int,
        sync::atomic::{AtomicU64, Ordering},
    };

    /// Nanoseconds per 2^32 ticks of the counter. 0 while it is unknown, or [`FORBIDDEN`].
    pub(crate) static RATE: AtomicU64 = AtomicU64::new(0);

    /// Value of [`RATE`] when the program has forbidden itself to read the counter. A read would
    /// end the process.
    pub(crate) const FORBIDDEN: u64 = u64::MAX;

    /// From now on nothing reads the counter or the exact clock, which reads it too.
    #[cold]
    pub(crate) fn forbid() {
        RATE.store(FORBIDDEN, Ordering::Relaxed);
    }

    /// Whether the counter must not be read.
    #[inline]
    pub(crate) fn is_forbidden() -> bool {
        RATE.load(Ordering::Relaxed) == FORBIDDEN
    }

    /// The counter. It advances at a constant but unknown rate, and is several times cheaper to
    /// read than a clock.
    #[inline]
    pub(crate) fn counter() -> u64 {
        // SAFETY: every x86-64 processor has it, and Linux lets programs read it.
        unsafe { core::arch::x86_64::_rdtsc() }
    }

    /// Whether a read of the counter ends the process because the program that executed this one
    /// forbade it.
    pub(crate) fn kernel_forbids() -> bool {
        const GET_TSC: c_int = 25;
        const TSC_SIGSEGV: c_int = 2;
        let mut mode: c_int = 0;
        // SAFETY: a valid place for an int.
        let known = unsafe { libc::prctl(GET_TSC, &raw mut mode) } == 0;
        known && mode == TSC_SIGSEGV
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_install_does_not_undo_other_installs() {
        let (own, all) = (false, true);
        let both = filtered::PROGRAM | filtered::WATCHER;
        let seen = SeenFilters::new();
        seen.begin(all);
        assert_eq!(seen.bits(), both, "the hook is quiet before the filter is there");
        seen.begin(own);
        seen.end(own, true);
        seen.end(all, false);
        assert_eq!(seen.bits(), filtered::PROGRAM);
        seen.begin(own);
        seen.end(own, false);
        assert_eq!(seen.bits(), filtered::PROGRAM);
        let seen = SeenFilters::new();
        seen.begin(own);
        seen.begin(own);
        seen.end(own, false);
        assert_eq!(seen.bits(), filtered::PROGRAM, "the other is still inside its call");
        seen.end(own, false);
        assert_eq!(seen.bits(), 0);
    }
}
