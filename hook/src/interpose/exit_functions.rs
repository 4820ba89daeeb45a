//! The interposed functions that end a process or a thread: `_exit`, `_Exit`, `quick_exit` and
//! `pthread_cancel`.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::runtime::{
    lifecycle::{
        exit::{QUICK_SUCCESS, finish_watching, say_goodbye},
        fork::{is_vfork_child, running_in_own_process},
    },
    linker::dynamic::look_up,
    os::{cancellation, process::PROCESS},
    recorder::running,
};

/// The next functions of these names: the C library's, or another preloaded library's. Found when
/// the library is loaded.
pub(crate) static NEXT_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// See [`NEXT_EXIT`].
pub(crate) static NEXT_QUICK_EXIT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

pub(crate) fn end(next: &AtomicPtr<c_void>, status: c_int) -> ! {
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

/// Interposes `_exit`, so that an end with status 0 and without handlers (`os._exit(0)`) does not
/// count as a death. Makes only system calls, because a signal handler or a child of vfork may call
/// it.
///
/// # Safety
/// See _exit(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub(crate) unsafe extern "C" fn _exit(status: c_int) -> ! {
    if let Some(recorder) = running_in_own_process() {
        finish_watching(recorder);
        if status == 0 {
            say_goodbye();
        }
    }
    end(&NEXT_EXIT, status)
}

/// Interposes `quick_exit` to see the status, which its handlers do not receive.
///
/// # Safety
/// See quick_exit(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub(crate) unsafe extern "C" fn quick_exit(status: c_int) -> ! {
    if status == 0 && running().is_some() && !is_vfork_child() {
        PROCESS.quick_exit.store(QUICK_SUCCESS, Ordering::Relaxed);
    }
    end(&NEXT_QUICK_EXIT, status)
}

/// The ISO C name of [`_exit`].
///
/// # Safety
/// See _Exit(3).
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub(crate) unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the caller's argument.
    unsafe { _exit(status) }
}

static NEXT_PTHREAD_CANCEL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Called when the library is loaded.
pub(crate) fn find_next_pthread_cancel() {
    NEXT_PTHREAD_CANCEL.store(look_up(libc::RTLD_NEXT, c"pthread_cancel"), Ordering::Relaxed);
}

/// Interposes pthread_cancel, only to see that the program uses it.
///
/// # Safety
/// See pthread_cancel(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub(crate) unsafe extern "C" fn pthread_cancel(thread: libc::pthread_t) -> c_int {
    cancellation::note_use();
    let next = NEXT_PTHREAD_CANCEL.load(Ordering::Relaxed);
    if next.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the next function of this name, and the caller's argument.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(libc::pthread_t) -> c_int>(next)(thread) }
}
