//! The interposed pthread_cancel.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::runtime::{linker::dynamic::look_up, os::cancellation};

static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Called when the library is loaded.
pub fn find_next() {
    NEXT.store(look_up(libc::RTLD_NEXT, c"pthread_cancel"), Ordering::Relaxed);
}

/// Interposes pthread_cancel, only to see that the program uses it.
///
/// # Safety
/// See pthread_cancel(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn pthread_cancel(thread: libc::pthread_t) -> c_int {
    cancellation::note_use();
    let next = NEXT.load(Ordering::Relaxed);
    if next.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the next function of this name, and the caller's argument.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(libc::pthread_t) -> c_int>(next)(thread) }
}
