//! Access to errno.

use std::{cell::Cell, ffi::c_int};

/// The calling thread's errno. The hook restores it before the host reads it.
#[inline]
pub fn errno() -> &'static Cell<c_int> {
    // SAFETY: the location is valid while the thread lives, and only this thread uses it. The
    // reference does not leave the calling function, so it does not outlive the thread.
    unsafe { Cell::from_mut(&mut *libc::__errno_location()) }
}
