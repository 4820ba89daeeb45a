//! Filters of system calls (seccomp) that the program puts on itself while it runs. Such a filter may end the process at a call that
//! the program itself has no need of, and nobody can ask which calls it forbids. So from then on a thread under a filter makes
//! no system call for the hook.
//!
//! The hook learns of a filter in three ways. It sees the calls of `prctl` and `syscall` that install one, also those of libseccomp and
//! those by an address that was looked up. A program that was executed under more filters than the launched command has them from the
//! one before. And the node collector, which looks at `/proc/PID/status` once a second, says in the ring which threads are under a filter: that is
//! the only way to learn of one that was installed by a bare instruction.
//!
//! Until the collector has looked, which takes up to a second, a thread under such a filter makes three calls: `futex` when it overtakes
//! the watcher by 256 operations, `gettid` at its first launch, and `clock_gettime` of its processor time while it polls MPI. A job in
//! its steady state launches from threads that have launched before, and the watcher keeps up with it. With `TSYNC` the watcher
//! makes the `futex` call that it sleeps in, for good: a bare instruction whose filter forbids that ends the process.
//!
//! The program's threads go on recording, because that is memory alone. The watcher goes on as well as long as the filter is not its
//! own. With `SECCOMP_FILTER_FLAG_TSYNC` it is: then the watcher thread ends before the filter is there, because a thread that is
//! merely asleep would make another call when it is woken.

use std::sync::atomic::{AtomicU32, Ordering};

use xpu_timer_proto::ring::{filtered, header};

use super::{process::PROCESS, thread_state, tsc};

static SEEN: SeenFilters = SeenFilters::new();

/// Bits of [`filtered`], as far as this process has seen them, and how many threads are inside a call that installs a filter: the hook
/// is quiet before the filter is there, and one call that fails must not undo what another has installed meanwhile.
struct SeenFilters(AtomicU32);

/// A call that installs a filter on its own thread.
const ONE_OWN: u32 = 1 << 8;

/// One that does so on all threads.
const ONE_TSYNC: u32 = 1 << 20;

impl SeenFilters {
    const fn new() -> Self {
        SeenFilters(AtomicU32::new(0))
    }

    /// What holds, or is about to.
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
pub fn may_call() -> bool {
    known_filters() & filtered::PROGRAM == 0
}

/// The same for the watcher.
pub fn watcher_may_call() -> bool {
    known_filters() & filtered::WATCHER == 0
}

/// Whether the calling thread may read the exact clock, which is a system call on machines whose time does not come from the
/// processor's counter, and ends the process on others when the program has forbidden itself that counter. The coarse clock is neither. Asks this process's memory alone, because the ring takes its times here.
#[inline(always)]
pub fn may_read_clock() -> bool {
    let seen = SEEN.bits();
    (seen == 0 || is_watchers_own(seen)) && !tsc::is_forbidden()
}

/// Whether only the program's threads are under these filters, and the calling thread is the watcher.
#[cold]
fn is_watchers_own(seen: u32) -> bool {
    seen & filtered::WATCHER == 0 && thread_state::current().is_watcher.get()
}

/// What this process has seen and what the collector has said, which stays true: no filter is ever taken away.
fn known_filters() -> u32 {
    let seen = SEEN.bits();
    let words = PROCESS.ring_words.load(Ordering::Acquire);
    if words.is_null() {
        return seen;
    }
    // SAFETY: the words of the ring, which are never unmapped; the header is the first of them.
    let said = SeenFilters::certain(unsafe { &*words.add(header::FILTERED) }.load(Ordering::Relaxed) as u32);
    if said & !seen != 0 {
        SEEN.add(said);
    }
    seen | said
}

/// Keeps what the collector has said for a child that is about to be forked. It has the same filters and not the ring.
pub fn remember_for_child() {
    known_filters();
}

/// The program that executed this one has put filters on itself, which it has now: no thread of this process makes a call.
pub fn set_inherited() {
    SEEN.add(filtered::PROGRAM | filtered::WATCHER);
}

/// A call begins that installs a filter, on all threads or on the calling one. The hook is quiet from now on.
pub fn begin_install(on_all_threads: bool) {
    SEEN.begin(on_all_threads);
}

/// The call has returned.
pub fn end_install(on_all_threads: bool, succeeded: bool) {
    SEEN.end(on_all_threads, succeeded);
}

/// What this process has seen, as [`header::FILTERS_SEEN`] has it.
pub fn seen() -> u64 {
    u64::from(SeenFilters::certain(SEEN.0.load(Ordering::Relaxed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_fails_undoes_nothing_that_others_have_installed() {
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
