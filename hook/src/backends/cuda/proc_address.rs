//! The two forms of cuGetProcAddress, and the replacement of the addresses that they return.

use std::ffi::{CStr, c_char, c_int, c_void};

use xpu_timer_proto::family::Library;

use crate::{
    interpose::hooked::around_lookup,
    runtime::{
        abi::{DRIVER_NOT_FOUND, SUCCESS},
        linker::function::{Function, SLOTS, Wrapper, find},
    },
};

type GetV1 = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
type GetV2 = unsafe extern "C-unwind" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// The form of CUDA 11.3.
#[used]
#[unsafe(link_section = "xpu_timer_functions")]
pub(crate) static V1: Function = Function::new(c"cuGetProcAddress", Library::Driver, WRAPPERS_V1);

/// The form of CUDA 12.
#[used]
#[unsafe(link_section = "xpu_timer_functions")]
pub(crate) static V2: Function = Function::new(c"cuGetProcAddress_v2", Library::Driver, WRAPPERS_V2);

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
        || {
            let newest_known = || {
                let mut address = std::ptr::null_mut();
                // SAFETY: the caller's own string, and a place of this function.
                let result = unsafe { real(symbol, &raw mut address, NEWEST_KNOWN, flags) };
                (result == SUCCESS).then_some(address)
            };
            // SAFETY: the call succeeded, so both pointers were valid.
            unsafe { wrap_result(symbol, out, version, flags, newest_known) };
        },
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
        || {
            let newest_known = || {
                let mut address = std::ptr::null_mut();
                // SAFETY: the caller's own string, and a place of this function.
                let result = unsafe { real(symbol, &raw mut address, NEWEST_KNOWN, flags, std::ptr::null_mut()) };
                (result == SUCCESS).then_some(address)
            };
            // SAFETY: the call succeeded, so both pointers were valid.
            unsafe { wrap_result(symbol, out, version, flags, newest_known) };
        },
        // SAFETY: the caller's own arguments.
        || unsafe { real(symbol, out, version, flags, status) },
    )
}

/// Exported.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C-unwind" fn cuGetProcAddress(
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
pub(crate) unsafe extern "C-unwind" fn cuGetProcAddress_v2(
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
/// A CUDA version that is newer than the hook may give a function other arguments under its old
/// name. So an address for such a version is only replaced if it is also the one that
/// `newest_known` returns: the driver's address for [`NEWEST_KNOWN`].
///
/// # Safety
/// `symbol` and `out` are the arguments of a call that succeeded.
unsafe fn wrap_result(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    newest_known: impl FnOnce() -> Option<*mut c_void>,
) {
    if symbol.is_null() || out.is_null() {
        return;
    }
    // SAFETY: the caller's C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_bytes();
    let Some(function) = by_proc_address(name, version, flags) else { return };
    // SAFETY: the caller's place, which the call has written.
    let address = unsafe { *out };
    if version <= NEWEST_KNOWN || newest_known() == Some(address) {
        // SAFETY: the caller's place, which the call has written, so it is writable.
        unsafe { *out = function.wrap(address) };
    }
}

/// The row for a name, version and flags of cuGetProcAddress, where one name denotes several
/// functions.
fn by_proc_address(name: &[u8], version: c_int, flags: u64) -> Option<&'static Function> {
    let newer = NEWER_FORMS.iter().find(|form| form.name == name && version >= form.since);
    let symbol = newer.map_or(name, |form| form.symbol);
    if flags & PER_THREAD_DEFAULT_STREAM != 0 {
        let form = crate::runtime::linker::function::functions()
            .find(|row| row.name.to_bytes().strip_suffix(b"_ptsz") == Some(symbol));
        if form.is_some() {
            return form;
        }
    }
    find(symbol)
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// A name that denotes another function from a CUDA version on.
struct NewerForm {
    name: &'static [u8],
    since: c_int,
    symbol: &'static [u8],
}

const fn newer(name: &'static [u8], since: c_int, symbol: &'static [u8]) -> NewerForm {
    NewerForm { name, since, symbol }
}

/// The hooked names whose newer form has more arguments than the older one, or arguments of other
/// types that the hook reads. All other forms of a hooked name agree in the registers of their
/// arguments, or have fewer, so that one row serves them. A test in
/// `tests/tests/it/coverage/rows.rs` compares this with cudaTypedefs.h.
const NEWER_FORMS: [NewerForm; 9] = [
    newer(b"cuGetProcAddress", 12000, b"cuGetProcAddress_v2"),
    newer(b"cuCtxSynchronize", 13000, b"cuCtxSynchronize_v2"),
    newer(b"cuMemAlloc", 3020, b"cuMemAlloc_v2"),
    newer(b"cuMemFree", 3020, b"cuMemFree_v2"),
    newer(b"cuMemcpy2D", 3020, b"cuMemcpy2D_v2"),
    newer(b"cuMemcpy2DUnaligned", 3020, b"cuMemcpy2DUnaligned_v2"),
    newer(b"cuMemcpy2DAsync", 3020, b"cuMemcpy2DAsync_v2"),
    newer(b"cuMemcpy3D", 3020, b"cuMemcpy3D_v2"),
    newer(b"cuMemcpy3DAsync", 3020, b"cuMemcpy3DAsync_v2"),
];

/// The newest CUDA version whose headers were compared with the rows.
const NEWEST_KNOWN: c_int = 13050;

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
        assert_eq!(row("cuMemcpy2DAsync", 7000, 2), Some("cuMemcpy2DAsync_v2_ptsz"));
        assert_eq!(row("cuMemAllocManaged", 6000, 0), None);
    }

    #[test]
    fn the_version_selects_the_form_with_its_arguments() {
        assert_eq!(row("cuCtxSynchronize", 2000, 0), Some("cuCtxSynchronize"));
        assert_eq!(row("cuCtxSynchronize", 12090, 2), Some("cuCtxSynchronize"));
        assert_eq!(row("cuCtxSynchronize", 13000, 2), Some("cuCtxSynchronize_v2"));
        assert_eq!(row("cuMemAlloc", 2000, 0), None);
        assert_eq!(row("cuMemAlloc", 3020, 0), Some("cuMemAlloc_v2"));
        assert_eq!(
            (row("cuMemcpy2D", 3010, 0), row("cuMemcpy2D", 3020, 0)),
            (Some("cuMemcpy2D"), Some("cuMemcpy2D_v2"))
        );
    }

    #[test]
    fn a_form_that_is_newer_than_the_hook_is_left_alone() {
        let after = |version: c_int, known: Option<usize>| {
            let mut address = 0x1000 as *mut c_void;
            let known = known.map(|known| known as *mut c_void);
            // SAFETY: a C string, and a place of this test.
            unsafe { wrap_result(c"cuCtxSynchronize".as_ptr(), &raw mut address, version, 0, || known) };
            address as usize
        };
        assert_eq!(after(14000, Some(0x2000)), 0x1000, "another function");
        assert_eq!(after(14000, None), 0x1000, "a function that older versions do not have");
        assert_ne!(after(14000, Some(0x1000)), 0x1000, "the form of the newest known version");
        assert_ne!(after(NEWEST_KNOWN, None), 0x1000);
    }
}
