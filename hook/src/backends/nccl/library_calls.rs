//! Calls of the collective library by the hook.

use std::ffi::{c_int, c_void};

/// Calls a collective library's function that takes a communicator and gives an int.
pub fn comm_number(function: *mut c_void, comm: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion of a function that was given this live communicator; ncclCommCount and ncclCommUserRank have this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(comm, &mut number) };
    (result == 0).then_some(number)
}

/// The version that a library of collectives says it has.
pub fn version_number(function: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion; ncclGetVersion has this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(&mut number) };
    (result == 0).then_some(number)
}
