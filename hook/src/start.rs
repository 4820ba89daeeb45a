//! The lazy start at the first device call, and the ends: fork and exit.
//!
//! Until that call the process has nothing of the hook but its code: no thread, no descriptor, no memory. A forked child is such a process again.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use xpu_timer_proto::ring::{coverage, header, offset};

use crate::{
    bell,
    cancellation::{self, shielded},
    config, cost, filters,
    hooked::guarded,
    inject,
    original::look_up,
    pace,
    recorder::Recorder,
    ring::{COVERAGE_NAME_BYTES, store_text},
    surroundings,
    sys::{self, Descriptor},
    thread_state::{self, in_hook},
    tracer, watcher,
};

/// What belongs to one process alone. The kernel empties this page in every forked child, also in one of the bare system call, which
/// runs no fork handler; a child of vfork shares it.
#[repr(C, align(4096))]
struct Own {
    recorder: AtomicPtr<Recorder>,
    stage: AtomicU32,
    retry_at_ns: AtomicU64,
    /// The process that the recorder is of.
    pid: AtomicI32,
    /// Something turns and can be waited for.
    is_watched: AtomicBool,
    /// One of `LOOK_…`.
    last_look: AtomicU32,
    /// The process is ending: no driver call from the watcher any more.
    is_ending: AtomicBool,
    quick_exit: AtomicI32,
}

static OWN: Own = Own {
    recorder: AtomicPtr::new(std::ptr::null_mut()),
    stage: AtomicU32::new(IDLE),
    retry_at_ns: AtomicU64::new(0),
    pid: AtomicI32::new(0),
    is_watched: AtomicBool::new(false),
    last_look: AtomicU32::new(LOOK_UNWANTED),
    is_ending: AtomicBool::new(false),
    quick_exit: AtomicI32::new(0),
};

/// The process that last set anything up, known also in its forked children.
static SET_UP_IN: AtomicI32 = AtomicI32::new(0);
static OFF: AtomicBool = AtomicBool::new(false);
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

const IDLE: u32 = 0;
const STARTING: u32 = 1;

const LOOK_UNWANTED: u32 = 0;
const LOOK_WANTED: u32 = 1;
const LOOKED: u32 = 2;
/// A process that ends waits no longer than this for the watcher, which normally needs a fraction of a millisecond.
const LAST_LOOK: Duration = Duration::from_millis(50);

/// After a start that failed for want of descriptors or memory, the next is tried this much later.
const RETRY_NS: u64 = 1_000_000_000;

/// The process's recorder if it has started.
#[inline]
pub fn running() -> Option<&'static Recorder> {
    let recorder = OWN.recorder.load(Ordering::Acquire);
    // SAFETY: null, or a recorder that is never freed.
    unsafe { recorder.as_ref() }
}

/// The same, unless this is a child of vfork, which has borrowed the memory, or nobody can tell under a filter. Async-signal-safe.
fn running_here() -> Option<&'static Recorder> {
    running().filter(|_| filters::may_call() && !is_borrowed())
}

/// Whether this is a child of vfork of a process that has set something up. Async-signal-safe.
pub fn is_borrowed() -> bool {
    let own = OWN.pid.load(Ordering::Relaxed);
    own != 0 && filters::may_call() && own != pid()
}

/// This process's id, for numbers that need only differ.
pub fn known_pid() -> i32 {
    OWN.pid.load(Ordering::Relaxed)
}

fn pid() -> c_int {
    // SAFETY: getpid takes nothing and cannot fail.
    unsafe { libc::getpid() }
}

/// The process's recorder, started if this is the first device call. `None` when the hook is off or could not start.
#[inline]
pub fn recorder() -> Option<&'static Recorder> {
    running().or_else(start)
}

#[cold]
fn start() -> Option<&'static Recorder> {
    if !filters::may_call() {
        return None;
    }
    let set_up_in = SET_UP_IN.load(Ordering::Relaxed);
    if set_up_in != 0 && set_up_in != pid() {
        // A child of the bare system call. Locks of the C library may be held by threads that it does not have, so nothing is set up.
        forget_parent();
        OFF.store(true, Ordering::Relaxed);
    }
    if OFF.load(Ordering::Relaxed) || sys::coarse_now_ns() < OWN.retry_at_ns.load(Ordering::Relaxed) {
        return None;
    }
    if OWN.stage.compare_exchange(IDLE, STARTING, Ordering::Acquire, Ordering::Acquire).is_err() {
        // Another thread is at it, which takes well under a millisecond. It is not waited for any longer than that.
        for _ in 0..1000 {
            std::thread::yield_now();
            if let Some(recorder) = running() {
                return Some(recorder);
            }
            if OWN.stage.load(Ordering::Acquire) != STARTING {
                break;
            }
        }
        return running();
    }
    let started = shielded(|| in_hook(|| guarded(set_up_if_allowed))).flatten();
    sys::forget_linker_error();
    if started.is_none() {
        OWN.retry_at_ns.store(sys::coarse_now_ns() + RETRY_NS, Ordering::Relaxed);
    }
    OWN.stage.store(IDLE, Ordering::Release);
    started
}

fn set_up_if_allowed() -> Option<&'static Recorder> {
    if disabled() || surroundings::forbid() {
        OFF.store(true, Ordering::Relaxed);
        return None;
    }
    running().or_else(set_up)
}

/// Beside the ring: the recorder's tables, and the watcher's stack and heap, with as much to spare again.
const ROOM_BYTES: usize = 16 << 20;

fn set_up() -> Option<&'static Recorder> {
    if !sys::may_map(offset::END + ROOM_BYTES) {
        return None;
    }
    SET_UP_IN.store(pid(), Ordering::Relaxed);
    // SAFETY: a whole page of this library's zero data, which nothing but `OWN` lies in. Kernels before 4.14 refuse.
    unsafe { libc::madvise((&raw const OWN).cast_mut().cast(), size_of::<Own>(), libc::MADV_WIPEONFORK) };
    let recorder = Recorder::boxed(&RING).ok()?;
    if sys::forbids_counter() {
        pace::stop();
    }
    cost::calibrate();
    recorder.ring.header(header::FILTERS_AT_LOAD).store(surroundings::filters_at_load().into(), Ordering::Relaxed);
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
    let recorder: &'static Recorder = Box::leak(recorder);
    watch_forks();
    watch_exits();
    OWN.pid.store(pid(), Ordering::Relaxed);
    OWN.recorder.store(std::ptr::from_ref(recorder).cast_mut(), Ordering::Release);
    set_watched(watcher::spawn(recorder, environment));
    Some(recorder)
}

/// Whether something turns and can be waited for.
pub fn set_watched(watched: bool) {
    OWN.is_watched.store(watched, Ordering::Relaxed);
}

/// As above.
pub fn is_watched() -> bool {
    OWN.is_watched.load(Ordering::Relaxed)
}

/// Has forked children told of, once.
pub fn watch_forks() {
    if !FORK_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of the right type, in a library that is never unloaded. A failure costs what they do.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    }
}

/// Has the hook told of the process's end, once.
fn watch_exits() {
    unsafe extern "C" {
        fn __cxa_at_quick_exit(handler: extern "C" fn(*mut c_void), library: *mut c_void) -> c_int;
    }
    if !EXIT_HANDLER.swap(true, Ordering::Relaxed) {
        // SAFETY: handlers of the right type, in a library that is never unloaded. A failure costs what they do.
        unsafe {
            libc::atexit(at_exit);
            __cxa_at_quick_exit(at_quick_exit, std::ptr::null_mut());
        }
    }
}

/// Turns the hook off for the rest of this process.
pub fn turn_off() {
    OFF.store(true, Ordering::Release);
    OWN.recorder.store(std::ptr::null_mut(), Ordering::Release);
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
    filters::remember();
    FORKING.fetch_add(1, Ordering::SeqCst);
    // Two system calls of the watcher, if at all; a child with a stray descriptor is better than a host that waits.
    for _ in 0..100 {
        if !OPENING.load(Ordering::SeqCst) {
            break;
        }
        sys::relax();
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
    forget_parent();
    errno.set(saved);
}

/// In a forked child: what was set up is the parent's. Async-signal-safe.
fn forget_parent() {
    if SET_UP_IN.swap(0, Ordering::Relaxed) == 0 {
        return;
    }
    // For kernels that do not empty the page.
    OWN.recorder.store(std::ptr::null_mut(), Ordering::Relaxed);
    OWN.retry_at_ns.store(0, Ordering::Relaxed);
    OWN.last_look.store(LOOK_UNWANTED, Ordering::Relaxed);
    OWN.is_watched.store(false, Ordering::Relaxed);
    OWN.is_ending.store(false, Ordering::Relaxed);
    OWN.stage.store(IDLE, Ordering::Release);
    thread_state::with(thread_state::ThreadState::after_fork);
    if filters::may_call() {
        CONNECTION.close();
        RING.close();
    }
}

/// Whether the process is ending.
pub fn is_ending() -> bool {
    OWN.is_ending.load(Ordering::SeqCst)
}

/// Whether the ending process waits for the watcher's last look.
pub fn wants_last_look() -> bool {
    OWN.last_look.load(Ordering::Acquire) == LOOK_WANTED
}

/// The watcher has looked.
pub fn looked() {
    OWN.last_look.store(LOOKED, Ordering::Release);
    bell::wake(&OWN.last_look);
}

/// Has what is complete by now written to the ring, and keeps the watcher out of a driver that is being torn down: handlers run last
/// in, first out, so the driver's own comes after this one. The connection stays, because a handler that runs later may hang.
extern "C" fn at_exit() {
    if filters::may_call() {
        if let Some(recorder) = running_here() {
            look_and_end(recorder);
        }
    } else {
        // A child of vfork runs no exit handlers. Nobody may be waited for.
        OWN.is_ending.store(true, Ordering::SeqCst);
    }
}

/// Async-signal-safe.
fn look_and_end(recorder: &Recorder) {
    if OWN.is_ending.load(Ordering::Relaxed) {
        return;
    }
    let deadline = sys::now_ns() + LAST_LOOK.as_nanos() as u64;
    let left = || Duration::from_nanos(deadline.saturating_sub(sys::now_ns()));
    if OWN.is_watched.load(Ordering::Relaxed) {
        OWN.last_look.store(LOOK_WANTED, Ordering::Release);
        bell::ring();
        while wants_last_look() && !left().is_zero() {
            bell::wait_while(&OWN.last_look, LOOK_WANTED, left());
        }
    }
    OWN.is_ending.store(true, Ordering::SeqCst);
    // The watcher is normally asleep, or microseconds inside an event query.
    while recorder.ring.header(header::WATCHER_CALL).load(Ordering::SeqCst) != 0 && !left().is_zero() {
        std::thread::yield_now();
    }
}

/// Of quick_exit(3), which runs no other handlers and says how it ends nowhere else.
extern "C" fn at_quick_exit(_: *mut c_void) {
    at_exit();
    if running().is_some() && OWN.quick_exit.load(Ordering::Relaxed) == QUICK_SUCCESS {
        say_goodbye();
    }
}

/// In [`Own::quick_exit`]: its status was 0.
const QUICK_SUCCESS: c_int = 1;

/// Tells the collector that this end is meant: in the ring, and, where that is allowed, at once.
fn say_goodbye() {
    if let Some(recorder) = running() {
        recorder.ring.header(header::GOODBYE).store(1, Ordering::Release);
    }
    if filters::may_call()
        && let Some(fd) = CONNECTION.get()
    {
        let goodbye = watcher::GOODBYE;
        // SAFETY: the descriptor is a socket of ours, checked just now; nothing waits and no signal is raised.
        unsafe {
            libc::send(fd, goodbye.as_ptr().cast(), goodbye.len(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        }
    }
}

/// The C library's functions, or another preloaded library's, looked for when nothing can be in the way yet.
static NEXT_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// As above.
static NEXT_QUICK_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

fn end(next: &AtomicPtr<c_void>, status: c_int) -> ! {
    let next = next.load(Ordering::Relaxed);
    if !next.is_null() {
        // SAFETY: a function of this type, found when the hook was loaded.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(next)(status) };
    }
    loop {
        // SAFETY: ends the process, as the C library's function does.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// Exported in place of the C library's: an end with success and without handlers (`os._exit(0)`) is no death either. Nothing here
/// but system calls, because a signal handler or a child of vfork may call it.
///
/// # Safety
/// As _exit(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    if let Some(recorder) = running_here() {
        look_and_end(recorder);
        if status == 0 {
            say_goodbye();
        }
    }
    end(&NEXT_EXIT, status)
}

/// Exported only for the status, of which its handlers are not told.
///
/// # Safety
/// As quick_exit(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn quick_exit(status: c_int) -> ! {
    if status == 0 && running().is_some() && !is_borrowed() {
        OWN.quick_exit.store(QUICK_SUCCESS, Ordering::Relaxed);
    }
    end(&NEXT_QUICK_EXIT, status)
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
    NEXT_QUICK_EXIT.store(look_up(libc::RTLD_NEXT, c"quick_exit"), Ordering::Relaxed);
    cancellation::find_next();
    tracer::find_first();
    filters::find_next();
    // Before anything else, because a filter may forbid everything else.
    if !disabled() {
        guarded(surroundings::note);
    }
    guarded(tracer::allow_from_environment);
    guarded(|| in_hook(crate::inline::start));
    sys::forget_linker_error();
    errno.set(saved);
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

/// Runs when the library is taken down, after all exit handlers: the collector is told at the last moment, because a handler of the
/// host that hangs is the end of a job like any other.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn at_end() {
    if running().is_some() && !is_borrowed() {
        say_goodbye();
    }
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_END: extern "C" fn() = at_end;
