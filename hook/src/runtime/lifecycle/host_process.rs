//! Decides whether the hook may work in this process. It must not when the program has installed a
//! seccomp filter or runs under a sanitizer. The check is made at the first device call; the
//! program then runs as without the hook.

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

/// Number of seccomp filters when the library was loaded.
static FILTERS_AT_LOAD: AtomicU32 = AtomicU32::new(0);

/// Called when the library is loaded. It makes only system calls that the linker has just made to
/// load it.
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

/// Whether the process has more filters than the launched command had. If so, a program of the job
/// installed them and executed this one. On another machine the variable does not count: a daemon
/// that passes the environment on has filters of its own.
fn has_more(filters: u32, launched: &[u8], boot: &[u8]) -> bool {
    let mut parts = launched.split(|byte| *byte == b':');
    let count = parts.next().and_then(|count| std::str::from_utf8(count).ok()?.parse::<u32>().ok());
    count.is_some_and(|count| filters > count) && parts.next() == Some(boot.trim_ascii())
}

/// The number of filters when the library was loaded.
pub fn filters_at_load() -> u32 {
    FILTERS_AT_LOAD.load(Ordering::Relaxed)
}

/// Whether the hook must not work in this process.
pub fn must_stay_out() -> bool {
    has_installed_filter() || runs_under_sanitizer()
}

/// Whether the program has installed a seccomp filter. Such a filter often ends the process at
/// calls that the program does not need, and the kernel does not say which calls those are. Filters
/// from before the start are harmless: those of container runtimes return an error, and those of
/// service managers permit what every program does.
fn has_installed_filter() -> bool {
    // Counting the filters is a system call too, so what the hook has seen comes first.
    !may_call() || filters() > FILTERS_AT_LOAD.load(Ordering::Relaxed)
}

/// Whether the process runs under a sanitizer, which treats the watcher as a thread of the program.
/// The locks of sanitizers' allocators do not survive a fork while another thread allocates: the
/// child deadlocks. Sanitizers also report an error in a child that starts a thread, or that lacks
/// threads whose memory it has.
fn runs_under_sanitizer() -> bool {
    let marks = [c"__asan_init", c"__hwasan_init", c"__lsan_do_leak_check", c"__msan_init", c"__tsan_init"];
    marks.iter().any(|mark| !look_up(libc::RTLD_DEFAULT, mark).is_null())
}

/// Number of filters of the calling thread. Opening and reading a file are calls that every program
/// makes. Kernels before 3.17 have only the file of the process, which describes its first thread.
fn filters() -> u32 {
    // The list of the user's groups comes first. Directory services may define thousands.
    let mut text = vec![0; 64 << 10];
    let paths = [c"/proc/thread-self/status", c"/proc/self/status"];
    let length = paths.iter().map(|path| sys::read_file(path, &mut text)).find(|length| *length != 0).unwrap_or(0);
    ring::filters(&text[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_the_job_are_distinguished_from_those_at_launch() {
        assert!(has_more(1, b"0:4b1d", b"4b1d\n"));
        assert!(!has_more(1, b"1:4b1d", b"4b1d\n") && !has_more(1, b"2:4b1d", b"4b1d\n"));
        assert!(!has_more(1, b"0:4b1d", b"77aa\n"), "another machine");
        assert!(!has_more(1, b"0", b"") && !has_more(1, b"", b"") && !has_more(1, b"x:4b1d", b"4b1d"));
    }

    #[test]
    fn this_process_needs_no_exception() {
        record_filters_at_load();
        assert!(!must_stay_out());
    }
}
