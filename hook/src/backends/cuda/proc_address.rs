//! The two forms of cuGetProcAddress, and the replacement of the addresses that they return.

use std::ffi::{CStr, c_char, c_int, c_void};

use xpu_timer_proto::family::Library;

use crate::{
    interpose::hooked::around_lookup,
    runtime::{
        abi::DRIVER_NOT_FOUND,
        linker::function::{Function, SLOTS, Wrapper, find},
    },
};

type GetV1 = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
type GetV2 = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// The form of CUDA 11.3.
#[used]
#[unsafe(link_section = "xpu_timer_functions")]
pub static V1: Function = Function::new(c"cuGetProcAddress", Library::Driver, WRAPPERS_V1);

/// The form of CUDA 12.
#[used]
#[unsafe(link_section = "xpu_timer_functions")]
pub static V2: Function = Function::new(c"cuGetProcAddress_v2", Library::Driver, WRAPPERS_V2);

const WRAPPERS_V1: [Wrapper; SLOTS] = [
    Wrapper(cuGetProcAddress as *const ()),
    Wrapper(v1::<1> as *const ()),
    Wrapper(v1::<2> as *const ()),
    Wrapper(v1::<3> as *const ()),
];

const WRAPPERS_V2: [Wrapper; SLOTS] = [
    Wrapper(cuGetProcAddress_v2 as *const ()),
    Wrapper(v2::<1> as *const ()),
    Wrapper(v2::<2> as *const ()),
    Wrapper(v2::<3> as *const ()),
];

unsafe extern "C-unwind" fn v1<const SLOT: usize>(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    let real = V1.real(SLOT);
    if real.is_null() {
        return DRIVER_NOT_FOUND;
    }
    // SAFETY: the original of this row has this type.
    let real = unsafe { std::mem::transmute::<*mut c_void, GetV1>(real) };
    around_lookup(
        &V1,
        // SAFETY: the call succeeded, so both pointers were valid.
        || unsafe { wrap_result(symbol, out, version, flags) },
        // SAFETY: the caller's own arguments.
        || unsafe { real(symbol, out, version, flags) },
    )
}

unsafe extern "C-unwind" fn v2<const SLOT: usize>(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    let real = V2.real(SLOT);
    if real.is_null() {
        return DRIVER_NOT_FOUND;
    }
    // SAFETY: the original of this row has this type.
    let real = unsafe { std::mem::transmute::<*mut c_void, GetV2>(real) };
    around_lookup(
        &V2,
        // SAFETY: the call succeeded, so both pointers were valid.
        || unsafe { wrap_result(symbol, out, version, flags) },
        // SAFETY: the caller's own arguments.
        || unsafe { real(symbol, out, version, flags, status) },
    )
}

/// Exported.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn cuGetProcAddress(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: the caller's own arguments.
    unsafe { v1::<0>(symbol, out, version, flags) }
}

/// Exported.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: the caller's own arguments.
    unsafe { v2::<0>(symbol, out, version, flags, status) }
}

/// Replaces the address that cuGetProcAddress returned.
///
/// # Safety
/// `symbol` and `out` are the arguments of a call that succeeded.
pub unsafe fn wrap_result(symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) {
    if symbol.is_null() || out.is_null() {
        return;
    }
    // SAFETY: the caller's C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_bytes();
    if let Some(function) = by_proc_address(name, version, flags) {
        // SAFETY: the caller's place, which the call has written.
        unsafe { *out = function.wrap(*out) };
    }
}

/// The row for a name, version and flags of cuGetProcAddress, where one name denotes several
/// functions.
pub fn by_proc_address(name: &[u8], version: c_int, flags: u64) -> Option<&'static Function> {
    if name == b"cuGetProcAddress" && version >= GET_PROC_ADDRESS_V2 {
        return Some(&V2);
    }
    if flags & PER_THREAD_DEFAULT_STREAM != 0 {
        let form = crate::runtime::linker::function::functions()
            .find(|row| row.name.to_bytes().strip_suffix(b"_ptsz") == Some(name));
        if form.is_some() {
            return form;
        }
    }
    find(name)
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// From this version on, `cuGetProcAddress` denotes `cuGetProcAddress_v2`.
const GET_PROC_ADDRESS_V2: c_int = 12000;

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, version: c_int, flags: u64) -> Option<&'static str> {
        by_proc_address(name.as_bytes(), version, flags).map(Function::text)
    }

    #[test]
    fn flag_2_selects_the_ptsz_function() {
        assert_eq!(row("cuLaunchKernel", 4000, 0), Some("cuLaunchKernel"));
        assert_eq!(row("cuLaunchKernel", 7000, 2), Some("cuLaunchKernel_ptsz"));
        assert_eq!(row("cuGraphLaunch", 10000, 2), Some("cuGraphLaunch_ptsz"));
        assert_eq!(row("cuGetProcAddress", 11030, 0), Some("cuGetProcAddress"));
        assert_eq!(row("cuGetProcAddress", 12000, 2), Some("cuGetProcAddress_v2"));
        assert_eq!(row("cuMemAlloc", 3020, 0), None);
    }
}
