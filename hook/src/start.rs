//! The lazy start at the first device call, and the ends: fork and exit.
//!
//! Until that call the process has nothing of the hook but its code: no thread, no descriptor, no memory. A forked child is such a process again.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use xpu_timer_proto::ring::{coverage, header, offset};

use crate::{
    config, cost, inject,
    original::look_up,
    recorder::Recorder,
    ring::{COVERAGE_NAME_BYTES, store_text},
    surroundings,
    sys::{self, Descriptor},
    thread_state::{self, in_hook},
    tracer, watcher,
};

static RECORDER: AtomicPtr<Recorder> = AtomicPtr::new(std::ptr::null_mut());
static STAGE: AtomicU32 = AtomicU32::new(IDLE);
static RETRY_AT_NS: AtomicU64 = AtomicU64::new(0);
static DISABLED: AtomicU32 = AtomicU32::new(0);
static FORK_HANDLER: AtomicBool = AtomicBool::new(false);
static EXIT_HANDLER: AtomicBool = AtomicBool::new(false);

/// Threads that are forking, and whether the watcher is just opening a descriptor.
static FORKING: AtomicU32 = AtomicU32::new(0);
static OPENING: AtomicBool = AtomicBool::new(false);

/// The ring's memfd.
static RING: Descriptor = Descriptor::none();
/// The connection to the node collector, kept by the watcher.
pub static CONNECTION: Descriptor = Descriptor::none();
/// The process is ending: no driver call from the watcher any more.
pub static ENDING: AtomicBool = AtomicBool::new(false);

const IDLE: u32 = 0;
const STARTING: u32 = 1;
const OFF: u32 = 2;

/// After a start that failed for want of descriptors or memory, the next is tried this much later.
const RETRY_NS: u64 = 1_000_000_000;

/// The process's recorder if it has started.
#[inline]
pub fn running() -> Option<&'static Recorder> {
    let recorder = RECORDER.load(Ordering::Acquire);
    // SAFETY: null, or a recorder that is never freed.
    unsafe { recorder.as_ref() }
}

/// The process's recorder, started if this is the first device call. `None` when the hook is off or could not start.
#[inline]
pub fn recorder() -> Option<&'static Recorder> {
    running().or_else(start)
}

#[cold]
fn start() -> Option<&'static Recorder> {
    if STAGE.load(Ordering::Relaxed) == OFF || sys::coarse_now_ns() < RETRY_AT_NS.load(Ordering::Relaxed) {
        return None;
    }
    match STAGE.compare_exchange(IDLE, STARTING, Ordering::Acquire, Ordering::Acquire) {
        Ok(_) => {}
        Err(STARTING) => {
            // Another thread is at it, which takes well under a millisecond. It is not waited for any longer than that.
            for _ in 0..1000 {
                std::thread::yield_now();
                if let Some(recorder) = running() {
                    return Some(recorder);
                }
                if STAGE.load(Ordering::Acquire) != STARTING {
                    break;
                }
            }
            return running();
        }
        Err(_) => return running(),
    }
    if disabled() || in_hook(surroundings::forbid) {
        STAGE.store(OFF, Ordering::Release);
        return None;
    }
    let started = in_hook(set_up);
    if started.is_none() {
        RETRY_AT_NS.store(sys::coarse_now_ns() + RETRY_NS, Ordering::Relaxed);
    }
    STAGE.store(IDLE, Ordering::Release);
    started
}

fn set_up() -> Option<&'static Recorder> {
    let recorder = Recorder::create(&RING).ok()?;
    cost::calibrate();
    let environment = config::snapshot();
    recorder.bracket.store(config::bracket_of(&environment) as u32, Ordering::Relaxed);
    inject::configure(&recorder, &environment);
    for (index, function) in crate::functions().take(coverage::SLOTS).enumerate() {
        function.coverage.store(index as u32, Ordering::Relaxed);
        let entry = recorder.ring.entry(offset::COVERAGE, index, coverage::WORDS);
        let name = crate::host::shown(function.name);
        store_text(&entry[coverage::NAME..], &name[..name.len().min(COVERAGE_NAME_BYTES)]);
        watcher::publish_coverage(&recorder, function, index, watcher::NOT_LOADED);
    }
    let recorder: &'static Recorder = Box::leak(Box::new(recorder));
    watch_forks();
    if !EXIT_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: a handler of the right type, in a library that is never unloaded. A failure costs what it does.
        unsafe { libc::atexit(at_exit) };
    }
    OWNER.store(std::process::id() as c_int, Ordering::Relaxed);
    RECORDER.store(std::ptr::from_ref(recorder).cast_mut(), Ordering::Release);
    watcher::spawn(recorder, environment);
    Some(recorder)
}

/// Has forked children told of, once.
pub fn watch_forks() {
    if !FORK_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of the right type, in a library that is never unloaded. A failure costs what they do.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    }
}

/// Turns the hook off for the rest of this process.
pub fn turn_off() {
    STAGE.store(OFF, Ordering::Release);
    RECORDER.store(std::ptr::null_mut(), Ordering::Release);
    CONNECTION.close();
    RING.close();
}

/// `XPU_TIMER_DISABLE`, read once.
pub fn disabled() -> bool {
    match DISABLED.load(Ordering::Relaxed) {
        0 => {
            let value = sys::variable(c"XPU_TIMER_DISABLE");
            let text = value.map(|value| String::from_utf8_lossy(&value).into_owned());
            let source = xpu_timer_proto::env::Source::new(move |_| text.clone(), "");
            let disabled = source.flag("XPU_TIMER_DISABLE");
            DISABLED.store(1 + u32::from(disabled), Ordering::Relaxed);
            disabled
        }
        known => known == 2,
    }
}

/// Opens a descriptor so that no forked child ends up with one that its books do not know; `None` while somebody forks.
pub fn open_outside_fork<R>(open: impl FnOnce() -> R) -> Option<R> {
    // The forking thread sets its mark and then looks at this one; here it is the other way round. One sees the other.
    OPENING.store(true, Ordering::SeqCst);
    let opened = (FORKING.load(Ordering::SeqCst) == 0).then(open);
    OPENING.store(false, Ordering::SeqCst);
    opened
}

extern "C" fn before_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    // Two system calls of the watcher, if at all; a child with a stray descriptor is better than a host that waits.
    for _ in 0..100 {
        if !OPENING.load(Ordering::SeqCst) {
            break;
        }
        std::thread::yield_now();
    }
}

extern "C" fn after_fork() {
    FORKING.fetch_sub(1, Ordering::SeqCst);
}

/// Runs in the only thread of a forked child, where only async-signal-safe functions are allowed.
extern "C" fn after_fork_in_child() {
    FORKING.store(0, Ordering::SeqCst);
    OPENING.store(false, Ordering::SeqCst);
    let errno = sys::errno();
    let saved = errno.get();
    // The child's stacks are part of a dump.
    tracer::allow_in_child();
    errno.set(saved);
    if RECORDER.swap(std::ptr::null_mut(), Ordering::AcqRel).is_null() && STAGE.load(Ordering::Relaxed) == OFF {
        return;
    }
    STAGE.store(IDLE, Ordering::Release);
    thread_state::with(thread_state::ThreadState::after_fork);
    CONNECTION.close();
    RING.close();
    errno.set(saved);
}

/// Says goodbye, and keeps the watcher out of a driver that is being torn down: handlers run last in, first out, so the
/// driver's own comes after this one.
extern "C" fn at_exit() {
    let Some(recorder) = running() else { return };
    ENDING.store(true, Ordering::SeqCst);
    say_goodbye();
    // The watcher is normally asleep, or microseconds inside an event query.
    let deadline = sys::now_ns() + 50_000_000;
    while recorder.ring.header(header::WATCHER_CALL).load(Ordering::SeqCst) != 0 && sys::now_ns() < deadline {
        std::thread::yield_now();
    }
}

/// Tells the collector that this end is meant.
fn say_goodbye() {
    if let Some(fd) = CONNECTION.get() {
        let goodbye = watcher::GOODBYE;
        // SAFETY: the descriptor is a socket of ours, checked just now; nothing waits and no signal is raised.
        unsafe {
            libc::send(fd, goodbye.as_ptr().cast(), goodbye.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        }
    }
}

/// The C library's function, or another preloaded library's, looked for when nothing can be in its way yet.
static NEXT_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The process whose recorder this is: a child of vfork shares its memory and its socket.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Exported in place of the C library's: an end with success and without handlers (`os._exit(0)`) is no death either. Nothing here
/// but system calls, because a signal handler or a child of vfork may call it.
///
/// # Safety
/// As _exit(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    // SAFETY: getpid takes nothing and cannot fail.
    if status == 0 && running().is_some() && OWNER.load(Ordering::Relaxed) == unsafe { libc::getpid() } {
        say_goodbye();
    }
    let next = NEXT_EXIT.load(Ordering::Relaxed);
    if !next.is_null() {
        // SAFETY: the next function of this name, found when the hook was loaded.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(next)(status) };
    }
    loop {
        // SAFETY: ends the process, as the C library's function does.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// As [`_exit`], by the name of ISO C.
///
/// # Safety
/// As _Exit(3).
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the caller's own argument.
    unsafe { _exit(status) }
}

/// Runs when the library is loaded: only what must be there before anything can go wrong.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn on_load() {
    // This standard library is the hook's own copy; the host's panics, if it is a Rust program, are not touched.
    std::panic::set_hook(Box::new(|_| {}));
    let errno = sys::errno();
    let saved = errno.get();
    NEXT_EXIT.store(look_up(libc::RTLD_NEXT, c"_exit"), Ordering::Relaxed);
    crate::hooked::guarded(tracer::allow_from_environment);
    if !disabled() {
        surroundings::note();
    }
    crate::hooked::guarded(|| in_hook(crate::inline::start));
    errno.set(saved);
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;
