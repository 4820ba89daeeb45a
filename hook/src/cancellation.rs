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

/// While it is up, the thread is not cancelled.
pub struct Shield {
    is_up: bool,
    /// The thread's state before.
    before: c_int,
}

impl Shield {
    /// For short code that does not panic. The call of the C library takes longer than a whole launch, so it is made only in processes
    /// that cancel threads.
    #[inline(always)]
    pub fn raised() -> Self {
        if USED.load(Ordering::Relaxed) { Shield::raised_always() } else { Shield { is_up: false, before: 0 } }
    }

    #[cold]
    fn raised_always() -> Self {
        let mut before = 0;
        // SAFETY: changes the calling thread's own state, and puts it back.
        unsafe { pthread_setcancelstate(DISABLE, &mut before) };
        Shield { is_up: true, before }
    }

    /// Puts the thread's state back.
    #[inline(always)]
    pub fn lower(&mut self) {
        if std::mem::take(&mut self.is_up) {
            self.lower_always();
        }
    }

    #[cold]
    fn lower_always(&self) {
        // SAFETY: the calling thread's own state.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Runs code that takes long, during which the thread is not cancelled. It does not panic.
pub fn shielded<R>(code: impl FnOnce() -> R) -> R {
    let mut shield = Shield::raised_always();
    let result = code();
    shield.lower();
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
