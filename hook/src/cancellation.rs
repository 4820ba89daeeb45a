//! Threads of hosts that end one another by pthread_cancel(3): a thread is never cancelled inside the hook's own code, where a lock or a
//! slot could stay behind, and whose frames nobody may unwind. It is at the next opportunity in the host's code.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
};

use crate::original::look_up;

/// A thread has been cancelled in this process.
static USED: AtomicBool = AtomicBool::new(false);
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Runs code that a thread must not be cancelled in, and that does not panic. Short code: to tell the system takes longer than a whole
/// launch, so it is told only where threads are cancelled at all.
#[inline(always)]
pub fn shielded<R>(code: impl FnOnce() -> R) -> R {
    if USED.load(Ordering::Relaxed) { shielded_always(code) } else { code() }
}

/// The same for code that takes long.
#[inline(never)]
pub fn shielded_always<R>(code: impl FnOnce() -> R) -> R {
    let mut before = 0;
    // SAFETY: changes the calling thread's own state, and puts it back.
    unsafe { pthread_setcancelstate(DISABLE, &mut before) };
    let result = code();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
    result
}

/// When the library is loaded.
pub fn find_next() {
    NEXT.store(look_up(libc::RTLD_NEXT, c"pthread_cancel"), Ordering::Relaxed);
}

/// Exported in place of the C library's, only to see that it is used.
///
/// # Safety
/// As pthread_cancel(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub unsafe extern "C" fn pthread_cancel(thread: libc::pthread_t) -> c_int {
    USED.store(true, Ordering::SeqCst);
    let next = NEXT.load(Ordering::Relaxed);
    if next.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the next function of this name, found when the hook was loaded, and the caller's own argument.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(libc::pthread_t) -> c_int>(next)(thread) }
}
