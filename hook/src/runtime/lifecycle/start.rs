//! Starts the hook at the first device call.
//!
//! Before that, the process has nothing of the hook but its code: no thread, no descriptor, no
//! memory. The same is true for a forked child.

use std::sync::atomic::Ordering;

use xpu_timer_proto::ring::{coverage, header, offset};

use crate::runtime::{
    lifecycle::{
        config::{self, disabled},
        exit::watch_exits,
        fork::{forget_parent, watch_forks},
        guard::guarded,
        host_process, panic_injection,
    },
    linker::dynamic,
    os::{
        cancellation::shielded,
        clock, descriptor,
        process::{IDLE, OFF, PROCESS, ProcessState, RING, SET_UP_IN, STARTING, pid, set_watched},
        seccomp,
        thread_state::in_hook,
        tsc,
    },
    overhead,
    recorder::{
        Recorder,
        ring::{COVERAGE_NAME_BYTES, store_text},
        running,
    },
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
pub fn recorder() -> Option<&'static Recorder> {
    running().or_else(start)
}

#[cold]
fn start() -> Option<&'static Recorder> {
    if !seccomp::may_call() {
        return None;
    }
    let set_up_in = SET_UP_IN.load(Ordering::Relaxed);
    if set_up_in != 0 && set_up_in != pid() {
        // A child of the bare system call. Locks of the C library may be held by threads that the
        // child does not have, so the hook stays off.
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
    if disabled() || host_process::must_stay_out() {
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
    recorder.ring.header(header::FILTERS_AT_LOAD).store(host_process::filters_at_load().into(), Ordering::Relaxed);
    let environment = config::snapshot();
    recorder.bracket.store(config::bracket_of(&environment) as u32, Ordering::Relaxed);
    panic_injection::configure(&recorder, &environment);
    for (index, function) in crate::runtime::linker::function_table::functions().take(coverage::SLOTS).enumerate() {
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
    set_watched(thread::spawn(recorder, environment));
    Some(recorder)
}
