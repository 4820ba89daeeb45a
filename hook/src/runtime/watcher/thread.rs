//! The watcher's thread. It ends before the program installs a seccomp filter on all threads.

use std::{
    ffi::c_void,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use xpu_timer_proto::{WATCHER_THREAD, file};

use crate::runtime::{
    lifecycle::{config::Environment, panics::guarded},
    linker::dynamic::look_up,
    os::{clock, process, seccomp, sys, thread_state, wakeup},
    recorder::Recorder,
    watcher::watch::Watcher,
};

/// Enough for the messages and the log. The host's limits include the stack. The C library stores
/// the host's thread-local variables in it, so their size is added.
const STACK_BYTES: usize = 256 * 1024;

/// The command to the thread.
static WANTED: AtomicU32 = AtomicU32::new(TURN);

const TURN: u32 = 0;

/// Leave the watcher in [`RESTING`] and end.
const END: u32 = 1;

/// Do nothing. It was too late to end, which takes system calls.
const REST: u32 = 2;

/// How long to wait for the thread to end. A turn takes microseconds, unless the driver blocks.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

const PAUSE: Duration = Duration::from_millis(1);

/// Upper bound for the system calls of a thread that ends, where the end cannot be awaited.
const LAST_CALLS: Duration = Duration::from_millis(20);

static THREAD: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);
static RESTING: Mutex<Option<Box<Watcher>>> = Mutex::new(None);

/// A word that is never woken.
static NEVER: AtomicU32 = AtomicU32::new(0);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread and returns whether that succeeded. Without it, operations are still recorded,
/// and a heartbeat of 0 shows that they are not watched.
pub(crate) fn spawn(recorder: &'static Recorder, environment: Environment) -> bool {
    begin(move || Box::new(Watcher::new(recorder, environment)))
}

/// Blocks all signals, so that the thread receives none of the host's.
fn begin(make: impl FnOnce() -> Box<Watcher> + Send + 'static) -> bool {
    // SAFETY: both sets are written before they are read, and the mask is restored.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let taken = thread_local_bytes();
        file::TAKEN_FROM_STACKS.store(taken, Ordering::Relaxed);
        let thread =
            std::thread::Builder::new().name(WATCHER_THREAD.into()).stack_size(STACK_BYTES.saturating_add(taken));
        let spawned = thread.spawn(move || {
            let is_last = thread_state::in_hook(|| guarded(|| run(make())));
            if is_last == Some(true) {
                // The program's exit handlers run on this thread.
                // SAFETY: the mask of the thread that started this one.
                libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
            }
        });
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        let watched = spawned.is_ok();
        // In a forked child, a thread that does not exist may hold the mutex, and the mutex may
        // contain a handle.
        if let Ok(mut thread) = THREAD.try_lock() {
            std::mem::forget(std::mem::replace(&mut *thread, spawned.ok()));
        }
        watched
    }
}

/// Whether the thread must end. If so, `watcher` is stored for [`resume`].
pub(crate) fn should_end(watcher: &mut Option<Box<Watcher>>) -> bool {
    loop {
        match WANTED.load(Ordering::Acquire) {
            TURN => return false,
            END => {
                *locked(&RESTING) = watcher.take();
                return true;
            }
            // The system call that the thread makes anyway.
            _ => wakeup::futex_wait(&NEVER, 0, crate::runtime::watcher::watch::PAUSE),
        }
    }
}

/// Ends the thread and waits for that, up to a time limit.
pub(crate) fn stop() {
    if !process::is_watched() {
        return;
    }
    let Some(thread) = THREAD.try_lock().ok().and_then(|mut thread| thread.take()) else { return };
    process::set_watched(false);
    WANTED.store(END, Ordering::Release);
    let until = clock::now_ns() + STOP_TIMEOUT.as_nanos() as u64;
    // Under an earlier filter, this thread may neither wake nor sleep. The watcher wakes up by
    // itself.
    let may_call = seccomp::may_call();
    let pause = || if may_call { wakeup::futex_wait(&NEVER, 0, PAUSE) } else { std::hint::spin_loop() };
    while !thread.is_finished() && clock::now_ns() < until {
        wakeup::wake_watcher();
        pause();
    }
    if !thread.is_finished() {
        WANTED.store(REST, Ordering::Release);
        *locked(&THREAD) = Some(thread);
    } else if may_call {
        // Only the system calls of the thread's end remain.
        let _ = thread.join();
    } else {
        let until = clock::now_ns() + LAST_CALLS.as_nanos() as u64;
        while clock::now_ns() < until {
            pause();
        }
        std::mem::forget(thread);
    }
}

/// Lets the watcher continue, because the filter was not installed.
pub(crate) fn resume() {
    if WANTED.load(Ordering::Acquire) == TURN {
        return;
    }
    let resting = locked(&RESTING).take();
    let rested = WANTED.swap(TURN, Ordering::AcqRel);
    let watched = match resting {
        Some(watcher) => begin(move || watcher),
        None => rested == REST,
    };
    process::set_watched(watched);
}

/// Runs the watcher. Returns true when it ended because the program has no other thread any more.
/// Then the C library ends the process, as it does after the last thread of a program whose main
/// function called pthread_exit(3).
fn run(mut watcher: Box<Watcher>) -> bool {
    if !watcher.begin() {
        return false;
    }
    let mut own = Some(watcher);
    while let Some(watcher) = own.as_mut() {
        watcher.turn_and_wait();
        if should_end(&mut own) {
            return false;
        }
        if let Some(status) = own.as_mut().and_then(|watcher| watcher.status_if_no_other_thread()) {
            process::set_watched(false);
            thread_state::with(|thread| thread.is_watcher.set(false));
            sys::end_thread_unless_success(status);
            return true;
        }
    }
    false
}

/// The part of each new thread's stack that the C library uses: the thread-local variables of the
/// program and its libraries, which may take megabytes, and some kilobytes.
pub(crate) fn thread_local_bytes() -> usize {
    type MinStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    let function = look_up(libc::RTLD_DEFAULT, c"__pthread_get_minstack");
    if function.is_null() {
        return 0;
    }
    // SAFETY: `pthread_attr_init` writes the all-zero value before it is read.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_attr_init(&mut attributes) != 0 {
            return 0;
        }
        // SAFETY: the glibc function of this name; std calls it in the same way.
        let bytes = std::mem::transmute::<*mut c_void, MinStack>(function)(&attributes);
        libc::pthread_attr_destroy(&mut attributes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::os::descriptor::Descriptor;
    use crate::runtime::{os::sys, watcher::connection};
    use xpu_timer_proto::ring::header;

    #[test]
    fn a_stopped_watcher_has_no_thread_and_can_resume() {
        let recorder: &'static Recorder =
            Box::leak(Box::new(Recorder::create(Box::leak(Box::new(Descriptor::none()))).unwrap()));
        let turns = |more: &str| {
            let heartbeat = || recorder.ring.header(header::HEARTBEAT_NS).load(Ordering::Relaxed);
            let (before, until) = (heartbeat(), std::time::Instant::now() + Duration::from_secs(30));
            while heartbeat() == before {
                assert!(std::time::Instant::now() < until, "{more}");
                std::thread::sleep(PAUSE);
            }
        };
        let tid = || recorder.ring.header(header::WATCHER_TID).load(Ordering::Relaxed) as u32;
        let _alone = connection::ALONE.lock();
        let environment = ["XPU_TIMER_SOCKET=/nowhere", "XPU_TIMER_LOGGING_DIR=/proc/nowhere"];
        assert!(spawn(recorder, environment.map(String::from).into()));
        process::set_watched(true);
        for _ in 0..3 {
            turns("it turns");
            let watcher = tid();
            assert!(sys::is_thread(watcher));
            stop();
            // The kernel lists a thread until a moment after it has ended.
            let until = std::time::Instant::now() + Duration::from_secs(30);
            while sys::is_thread(watcher) {
                assert!(std::time::Instant::now() < until, "no thread is left that could make a call");
                std::thread::sleep(PAUSE);
            }
            resume();
        }
        turns("it goes on");
        stop();
    }
}
