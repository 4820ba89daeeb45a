//! Calls that the hook makes to the collective library.

use std::ffi::{c_int, c_void};

/// Calls a function that takes a communicator and returns an int.
pub fn comm_number(function: *mut c_void, comm: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion of a function that received this communicator, which exists.
    // ncclCommCount and ncclCommUserRank have this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(comm, &mut number) };
    (result == 0).then_some(number)
}

/// The version of the collective library.
pub fn version_number(function: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion; ncclGetVersion has this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(&mut number) };
    (result == 0).then_some(number)
}
