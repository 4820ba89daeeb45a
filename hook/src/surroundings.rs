//! What the process is besides a training job, where that decides whether the hook may work in it at all: a program that shut itself
//! in, or one that is run under a sanitizer. Asked at the first device call; a program of which the hook keeps out runs as without it.

use std::sync::atomic::{AtomicU32, Ordering};

use xpu_timer_proto::ring;

use crate::{filters::may_call, original::look_up, sys};

/// Filters of system calls that were there when the library was loaded.
static FILTERS_AT_LOAD: AtomicU32 = AtomicU32::new(0);

/// When the library is loaded.
pub fn note() {
    FILTERS_AT_LOAD.store(filters(), Ordering::Relaxed);
}

/// How many there were.
pub fn filters_at_load() -> u32 {
    FILTERS_AT_LOAD.load(Ordering::Relaxed)
}

/// Whether the hook must keep out of this process.
pub fn forbid() -> bool {
    is_shut_in() || has_no_room_for_a_thread()
}

/// Whether the process has put a filter of system calls on itself. Such a filter often kills who calls what the program itself has no
/// need of, and what it kills for cannot be asked for. A filter that was there from the start is another matter: those of container
/// runtimes refuse with an error, and those of service managers allow what every program does.
fn is_shut_in() -> bool {
    // To ask is a system call as well, so what the hook has seen of the program's calls comes first.
    !may_call() || filters() > FILTERS_AT_LOAD.load(Ordering::Relaxed)
}

/// Whether a sanitizer is at work that takes the watcher for a thread of the program. The locks of their allocators do not survive a
/// fork beside a thread that allocates: the child waits for ever. And a child in which a thread is started, or that does not have the
/// threads whose memory it has, fails by their judgement.
fn has_no_room_for_a_thread() -> bool {
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
    fn this_process_is_neither() {
        note();
        assert!(!forbid());
    }
}
