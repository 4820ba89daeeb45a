//! Protects the hook's code from pthread_cancel(3). A thread that is cancelled inside the hook
//! would leave a lock or a slot behind, and unwind frames that must not be unwound. The
//! cancellation takes effect at the next cancellation point in the host's code.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
};

/// The process has called pthread_cancel.
static USED: AtomicBool = AtomicBool::new(false);

const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Records that the process cancels threads. From now on, hooked calls disable cancellation.
pub(crate) fn note_use() {
    USED.store(true, Ordering::SeqCst);
}

/// While it is up, the thread cannot be cancelled.
pub(crate) struct CancellationGuard {
    is_up: bool,
    /// The cancel state to restore.
    before: c_int,
}

impl CancellationGuard {
    /// For short code that does not panic. pthread_setcancelstate takes longer than a launch, so it
    /// is called only in processes that cancel threads.
    #[inline(always)]
    pub(crate) fn raised() -> Self {
        if USED.load(Ordering::Relaxed) {
            CancellationGuard::raised_always()
        } else {
            CancellationGuard { is_up: false, before: 0 }
        }
    }

    #[cold]
    fn raised_always() -> Self {
        let mut before = 0;
        // SAFETY: changes the state of the calling thread, which is restored later.
        unsafe { pthread_setcancelstate(DISABLE, &mut before) };
        CancellationGuard { is_up: true, before }
    }

    /// Restores the thread's cancel state.
    #[inline(always)]
    pub(crate) fn lower(&mut self) {
        if std::mem::take(&mut self.is_up) {
            self.lower_always();
        }
    }

    #[cold]
    fn lower_always(&self) {
        // SAFETY: changes the state of the calling thread only.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

/// Runs longer code while the thread cannot be cancelled. The code must not panic.
pub(crate) fn shielded<R>(code: impl FnOnce() -> R) -> R {
    let mut shield = CancellationGuard::raised_always();
    let result = code();
    shield.lower();
    result
}
