//! The calling thread's errno.

use std::{cell::Cell, ffi::c_int};

/// The calling thread's errno, to be put back before the host looks at it.
#[inline]
pub fn errno() -> &'static Cell<c_int> {
    // SAFETY: the location is valid for as long as the thread lives and only this thread touches it; the reference does not
    // leave the calling function, so it does not outlive the thread.
    unsafe { Cell::from_mut(&mut *libc::__errno_location()) }
}
