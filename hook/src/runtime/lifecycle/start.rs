//! Starts the hook at the first device call.
//!
//! Before that, the process has nothing of the hook but its code: no thread, no descriptor, no
//! memory. The same is true for a forked child.
//!
//! The hook must not work in a process that has installed a seccomp filter or runs under a
//! sanitizer. The first device call checks that; the program then runs as without the hook.

use std::sync::atomic::{AtomicU32, Ordering};

use xpu_timer_proto::ring::{self, coverage, header, offset};

use crate::runtime::{
    lifecycle::{
        config::{self, disabled},
        exit::watch_exits,
        fork::{forget_parent, watch_forks},
        panics::{self, guarded},
    },
    linker::dynamic::{self, look_up},
    os::{
        cancellation::shielded,
        clock, descriptor, environment,
        process::{IDLE, OFF, PROCESS, ProcessState, RING, SET_UP_IN, STARTING, pid, set_watched},
        seccomp::{self, tsc},
        sections::{is_bare_child, note_bare_child},
        signals, stderr_text, sys,
        thread_state::in_hook,
    },
    overhead,
    recorder::{COVERAGE_NAME_BYTES, Recorder, running, store_text},
    watcher::{
        coverage::{NOT_LOADED, publish_coverage},
        thread,
    },
};

/// Delay after a start that failed because of missing descriptors or memory.
const RETRY_NS: u64 = 1_000_000_000;

/// The process's recorder, which is started at the first device call. `None` when the hook is off
/// or could not start.
#[inline]
pub(crate) fn recorder() -> Option<&'static Recorder> {
    running().or_else(start)
}

#[cold]
fn start() -> Option<&'static Recorder> {
    if !seccomp::may_call() {
        return None;
    }
    if !OFF.load(Ordering::Relaxed) && is_bare_child() {
        note_bare_child();
        forget_parent();
        OFF.store(true, Ordering::Relaxed);
    }
    if OFF.load(Ordering::Relaxed) || clock::coarse_now_ns() < PROCESS.retry_at_ns.load(Ordering::Relaxed) {
        return None;
    }
    if PROCESS.stage.compare_exchange(IDLE, STARTING, Ordering::Acquire, Ordering::Acquire).is_err() {
        // Another thread is starting the hook, which takes well under a millisecond. Do not wait
        // longer than that.
        for _ in 0..1000 {
            std::thread::yield_now();
            if let Some(recorder) = running() {
                return Some(recorder);
            }
            if PROCESS.stage.load(Ordering::Acquire) != STARTING {
                break;
            }
        }
        return running();
    }
    let started = shielded(|| in_hook(|| guarded(set_up_if_allowed))).flatten();
    dynamic::forget_linker_error();
    if started.is_none() {
        PROCESS.retry_at_ns.store(clock::coarse_now_ns() + RETRY_NS, Ordering::Relaxed);
    }
    PROCESS.stage.store(IDLE, Ordering::Release);
    started
}

fn set_up_if_allowed() -> Option<&'static Recorder> {
    if disabled() || must_stay_out() {
        OFF.store(true, Ordering::Relaxed);
        return None;
    }
    running().or_else(set_up)
}

/// Memory beside the ring: the recorder's tables, the watcher's stack and heap, and as much again
/// in reserve.
const ROOM_BYTES: usize = 16 << 20;

fn set_up() -> Option<&'static Recorder> {
    if !descriptor::may_map(offset::END + ROOM_BYTES) {
        return None;
    }
    SET_UP_IN.store(pid(), Ordering::Relaxed);
    // SAFETY: a full page of this library's zero data that contains only `PROCESS`. Kernels before
    // 4.14 return an error.
    unsafe { libc::madvise((&raw const PROCESS).cast_mut().cast(), size_of::<ProcessState>(), libc::MADV_WIPEONFORK) };
    let recorder = Recorder::boxed(&RING).ok()?;
    if tsc::kernel_forbids() {
        tsc::forbid();
    }
    overhead::calibrate();
    recorder.ring.header(header::FILTERS_AT_LOAD).store(filters_at_load().into(), Ordering::Relaxed);
    let environment = config::snapshot();
    recorder.bracketed.set_mode(config::bracket_of(&environment));
    panics::configure(&recorder, &environment);
    for (index, function) in crate::runtime::linker::function::functions().take(coverage::SLOTS).enumerate() {
        function.coverage.store(index as u32, Ordering::Relaxed);
        let entry = recorder.ring.entry(offset::COVERAGE, index, coverage::WORDS);
        let name = crate::runtime::linker::function::display_name(function.name);
        store_text(&entry[coverage::NAME..], &name[..name.len().min(COVERAGE_NAME_BYTES)]);
        publish_coverage(&recorder, function, index, NOT_LOADED);
    }
    let recorder: &'static Recorder = Box::leak(recorder);
    watch_forks();
    watch_exits();
    PROCESS.pid.store(pid(), Ordering::Relaxed);
    PROCESS.ring_words.store(recorder.ring.words(), Ordering::Release);
    PROCESS.recorder.store(std::ptr::from_ref(recorder).cast_mut().cast(), Ordering::Release);
    stderr_text::keep_in(recorder.ring.words());
    if config::handles_signals(&environment) {
        signals::install();
    }
    set_watched(thread::spawn(recorder, environment));
    Some(recorder)
}

/// Number of seccomp filters when the library was loaded.
static FILTERS_AT_LOAD: AtomicU32 = AtomicU32::new(0);

/// Called when the library is loaded. It makes only system calls that the linker has just made to
/// load it.
pub(crate) fn record_filters_at_load() {
    let filters = filters();
    FILTERS_AT_LOAD.store(filters, Ordering::Relaxed);
    let Some(launched) = environment::at_start(c"XPU_TIMER_FILTERS").filter(|_| filters != 0) else { return };
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
pub(crate) fn filters_at_load() -> u32 {
    FILTERS_AT_LOAD.load(Ordering::Relaxed)
}

/// Whether the hook must not work in this process.
pub(crate) fn must_stay_out() -> bool {
    has_installed_filter() || runs_under_sanitizer()
}

/// Whether the program has installed a seccomp filter. Such a filter often ends the process at
/// calls that the program does not need, and the kernel does not say which calls those are. Filters
/// from before the start are harmless: those of container runtimes return an error, and those of
/// service managers permit what every program does.
fn has_installed_filter() -> bool {
    // Counting the filters is a system call too, so what the hook has seen comes first.
    !seccomp::may_call() || filters() > FILTERS_AT_LOAD.load(Ordering::Relaxed)
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
    fn this_process_is_not_excluded() {
        record_filters_at_load();
        assert!(!must_stay_out());
    }
}
