//! What the process is besides a training job, where that decides whether the hook may work in it at all: a program that shut itself
//! in, or one that is run under a sanitizer. Asked at the first device call; a program of which the hook keeps out runs as without it.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicU32, Ordering},
};

use xpu_timer_proto::ring;

use crate::runtime::{
    linker::dynamic::look_up,
    os::{
        seccomp::{self, may_call},
        sys,
    },
};

/// Filters of system calls that were there when the library was loaded.
static FILTERS_AT_LOAD: AtomicU32 = AtomicU32::new(0);

/// When the library is loaded, by calls that the linker has just made to load it.
pub fn record_filters_at_load() {
    let filters = filters();
    FILTERS_AT_LOAD.store(filters, Ordering::Relaxed);
    // SAFETY: a C string; while libraries are loaded no thread changes the environment.
    let launched = unsafe { libc::getenv(c"XPU_TIMER_FILTERS".as_ptr()) };
    if filters == 0 || launched.is_null() {
        return;
    }
    // SAFETY: getenv's string is terminated.
    let launched = unsafe { CStr::from_ptr(launched) }.to_bytes();
    let mut boot = [0; 64];
    let length = sys::read_file(c"/proc/sys/kernel/random/boot_id", &mut boot);
    if has_more(filters, launched, &boot[..length]) {
        seccomp::set_inherited();
    }
}

/// Whether the process is under more filters than the launched command was. Then a program of the job has put them on itself and has
/// executed this one. On another machine the variable says nothing: a daemon that passes the environment on has filters of its own.
fn has_more(filters: u32, launched: &[u8], boot: &[u8]) -> bool {
    let mut parts = launched.split(|byte| *byte == b':');
    let count = parts.next().and_then(|count| std::str::from_utf8(count).ok()?.parse::<u32>().ok());
    count.is_some_and(|count| filters > count) && parts.next() == Some(boot.trim_ascii())
}

/// How many there were.
pub fn filters_at_load() -> u32 {
    FILTERS_AT_LOAD.load(Ordering::Relaxed)
}

/// Whether the hook must keep out of this process.
pub fn must_stay_out() -> bool {
    has_installed_filter() || runs_under_sanitizer()
}

/// Whether the process has put a filter of system calls on itself. Such a filter often kills who calls what the program itself has no
/// need of, and what it kills for cannot be asked for. A filter that was there from the start is another matter: those of container
/// runtimes refuse with an error, and those of service managers allow what every program does.
fn has_installed_filter() -> bool {
    // To ask is a system call as well, so what the hook has seen of the program's calls comes first.
    !may_call() || filters() > FILTERS_AT_LOAD.load(Ordering::Relaxed)
}

/// Whether a sanitizer is at work that takes the watcher for a thread of the program. The locks of their allocators do not survive a
/// fork beside a thread that allocates: the child waits for ever. And a child in which a thread is started, or that does not have the
/// threads whose memory it has, fails by their judgement.
fn runs_under_sanitizer() -> bool {
    let marks = [c"__asan_init", c"__hwasan_init", c"__lsan_do_leak_check", c"__msan_init", c"__tsan_init"];
    marks.iter().any(|mark| !look_up(libc::RTLD_DEFAULT, mark).is_null())
}

/// Filters of system calls that are in force for the calling thread, by a call that every program makes: it opens and reads a file.
/// The one of the process is that of its first thread; kernels before 3.17 have no other.
fn filters() -> u32 {
    // Before them stands the list of the user's groups, of which a directory service gives thousands.
    let mut text = vec![0; 64 << 10];
    let paths = [c"/proc/thread-self/status", c"/proc/self/status"];
    let length = paths.iter().map(|path| sys::read_file(path, &mut text)).find(|length| *length != 0).unwrap_or(0);
    ring::filters(&text[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_that_the_job_has_added_are_told_from_those_it_was_launched_under() {
        assert!(has_more(1, b"0:4b1d", b"4b1d\n"));
        assert!(!has_more(1, b"1:4b1d", b"4b1d\n") && !has_more(1, b"2:4b1d", b"4b1d\n"));
        assert!(!has_more(1, b"0:4b1d", b"77aa\n"), "another machine");
        assert!(!has_more(1, b"0", b"") && !has_more(1, b"", b"") && !has_more(1, b"x:4b1d", b"4b1d"));
    }

    #[test]
    fn this_process_is_neither() {
        record_filters_at_load();
        assert!(!must_stay_out());
    }
}
