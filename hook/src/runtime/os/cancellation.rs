//! Threads of hosts that end one another by pthread_cancel(3): a thread is never cancelled inside the hook's own code, where a lock or a
//! slot could stay behind, and whose frames nobody may unwind. It is at the next opportunity in the host's code.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
};

/// A thread has been cancelled in this process.
static USED: AtomicBool = AtomicBool::new(false);

const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// A thread is being cancelled: from now on the hook shields its code.
pub fn note_use() {
    USED.store(true, Ordering::SeqCst);
}

/// While it is up, the thread is not cancelled.
pub struct Shield {
    is_up: bool,
    /// The thread's state before.
    before: c_int,
}

impl Shield {
    /// WaitFor short code that does not panic. The call of the C library takes longer than a whole launch, so it is made only in processes
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
