//! Sections of the hook in which no thread should fork, because the child would inherit what the
//! section has not finished, and sections of the watcher in which no thread should install a
//! seccomp filter, because it would wait for their locks.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering, fence},
    thread,
    time::{Duration, Instant},
};

use crate::runtime::os::{
    process::{PROCESS, SET_UP_IN, pid},
    seccomp, sys, thread_state,
};

/// Number of threads that are forking, and of threads in a section. Each side sets its mark and
/// then reads the other one, so at least one of them sees the other's mark.
static FORKING: AtomicU32 = AtomicU32::new(0);
static SECTIONS: AtomicU32 = AtomicU32::new(0);

/// Number of sections of the watcher that take locks of the C library.
static WATCHER_SECTIONS: AtomicU32 = AtomicU32::new(0);

/// How long the installation of a filter waits for them. A section takes a millisecond, unless the
/// watcher gets no processor. A delay is better than a host that its own filter ends.
const FILTER_PATIENCE: Duration = Duration::from_secs(2);

/// How often one side yields to the other, and how often it then sleeps for [`PAUSE`]: 10 ms in
/// all. Harm in a child is better than a host that waits for longer.
const YIELDS: u32 = 100;
const PAUSES: u32 = 100;
const PAUSE: Duration = Duration::from_micros(100);

/// A section, counted until it is dropped: also when it panics.
struct Section(&'static AtomicU32);

impl Section {
    fn enter(count: &'static AtomicU32) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Section(count)
    }

    /// Enters a section, unless a thread is forking.
    fn enter_outside_fork() -> Option<Self> {
        let section = Self::enter(&SECTIONS);
        (FORKING.load(Ordering::SeqCst) == 0).then_some(section)
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Opens a descriptor, unless a thread is forking. Otherwise a child could inherit a descriptor
/// that its state does not contain.
pub(crate) fn open_outside_fork<R>(open: impl FnOnce() -> R) -> Option<R> {
    let _section = Section::enter_outside_fork()?;
    Some(open())
}

/// Runs a section that holds a lock of the linker. The C library does not release each of them in a
/// forked child, which then blocks in its next call of dlopen or dl_iterate_phdr. So a thread that
/// forks waits for such sections, and they wait for it.
pub(crate) fn in_linker<R>(section: impl FnOnce() -> R) -> R {
    let _section = Section::enter_outside_fork().unwrap_or_else(|| {
        wait_until(|| FORKING.load(Ordering::SeqCst) == 0);
        Section::enter(&SECTIONS)
    });
    section()
}

/// Runs a query that holds the linker's main lock. The C library releases that lock in a forked
/// child, but not in a child of the bare system call. A thread that forks waits for such queries.
/// Only the watcher waits for the fork.
pub(crate) fn in_query<R>(query: impl FnOnce() -> R) -> R {
    if thread_state::current().is_watcher.get() {
        return in_linker(query);
    }
    let _section = Section::enter(&SECTIONS);
    query()
}

/// Runs a section of the watcher that takes locks which the program's threads need too, such as
/// that of the linker. A thread that waits for a lock makes a system call, which its filter may
/// forbid. So under a filter the watcher runs no such section.
pub(crate) fn in_watcher_unless_filtered<R>(section: impl FnOnce() -> R) -> Option<R> {
    let _section = Section::enter(&WATCHER_SECTIONS);
    fence(Ordering::SeqCst);
    seccomp::may_call().then(section)
}

/// Before a filter is installed, on the thread that installs it and which is under no filter yet.
/// The hook has been told: see [`seccomp::begin_install`]. Waits for such sections of the watcher.
pub(crate) fn wait_for_watcher() {
    fence(Ordering::SeqCst);
    let begun = Instant::now();
    while WATCHER_SECTIONS.load(Ordering::SeqCst) != 0 && begun.elapsed() < FILTER_PATIENCE {
        thread::sleep(PAUSE);
    }
}

/// Before a fork, on its thread.
pub(crate) fn begin_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    wait_until(|| SECTIONS.load(Ordering::SeqCst) == 0);
}

/// After a fork, in the parent.
pub(crate) fn end_fork() {
    FORKING.fetch_sub(1, Ordering::SeqCst);
}

/// In a forked child, in which no other thread is left.
pub(crate) fn forget_parent() {
    for count in [&FORKING, &SECTIONS, &WATCHER_SECTIONS] {
        count.store(0, Ordering::SeqCst);
    }
}

/// Set when a child of the bare system call forgets its parent; see [`is_bare_child`].
static IS_BARE_CHILD: AtomicBool = AtomicBool::new(false);

/// Whether this is a child of the bare `clone` or `fork` system call of a process that had set the
/// hook up. No fork handler has run, so locks of the C library and of the linker may be held by
/// threads that the child does not have. Makes no system call in a process that has a recorder.
pub(crate) fn is_bare_child() -> bool {
    let set_up_in = SET_UP_IN.load(Ordering::Relaxed);
    let is_cleared = || set_up_in != 0 && PROCESS.pid.load(Ordering::Relaxed) == 0;
    IS_BARE_CHILD.load(Ordering::Relaxed) || is_cleared() && seccomp::may_call() && set_up_in != pid()
}

/// Records that this is a child of the bare system call.
pub(crate) fn note_bare_child() {
    IS_BARE_CHILD.store(true, Ordering::Relaxed);
}

fn wait_until(is_over: impl Fn() -> bool) {
    for attempt in 0..YIELDS + PAUSES {
        if is_over() {
            return;
        }
        if attempt < YIELDS || !seccomp::may_call() {
            sys::relax();
        } else {
            thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Whether a fork that begins during a section of a millisecond finds it ended.
    fn waits_for_section() -> bool {
        static IS_INSIDE: AtomicBool = AtomicBool::new(false);
        let (entered, has_entered) = mpsc::channel();
        let section = thread::spawn(move || {
            in_linker(|| {
                IS_INSIDE.store(true, Ordering::SeqCst);
                entered.send(()).unwrap();
                thread::sleep(Duration::from_millis(1));
                IS_INSIDE.store(false, Ordering::SeqCst);
            });
        });
        has_entered.recv().unwrap();
        begin_fork();
        let waited = !IS_INSIDE.load(Ordering::SeqCst);
        end_fork();
        section.join().unwrap();
        waited
    }

    #[test]
    fn a_fork_and_a_section_wait_for_each_other() {
        // On a busy machine, a section may take longer than a fork waits.
        assert!((0..100).any(|_| waits_for_section()), "no fork waits for a section");
        let waits_for_fork = || {
            begin_fork();
            assert_eq!(open_outside_fork(|| ()), None);
            let section = thread::spawn(|| in_linker(|| FORKING.load(Ordering::SeqCst)));
            thread::sleep(Duration::from_millis(1));
            end_fork();
            section.join().unwrap() == 0
        };
        assert!((0..100).any(|_| waits_for_fork()), "no section waits for a fork");
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_forked_child_does_not_wait_for_sections_of_its_parent() {
        let _section = Section::enter(&WATCHER_SECTIONS);
        // SAFETY: the child has one thread, takes no lock, and ends without cleaning up.
        let child = match unsafe { libc::fork() } {
            0 => {
                forget_parent();
                let begun = Instant::now();
                wait_for_watcher();
                let has_waited = begun.elapsed() >= FILTER_PATIENCE;
                // SAFETY: it ends the child.
                unsafe { libc::_exit(i32::from(has_waited)) }
            }
            child => child,
        };
        let mut status = -1;
        // SAFETY: the status lives during the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "it has waited for a thread that only its parent has");
    }
}
