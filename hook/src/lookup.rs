//! The interposed dlsym, and what is done with the addresses that it and cuGetProcAddress give out.
//!
//! RTLD_NEXT and RTLD_DEFAULT depend on who calls, so the real dlsym is jumped to with the caller's frame untouched; and so is
//! every look-up of a name that is not in the table.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    driver::get_proc_address,
    original::{Function, is_ours, look_up, next_dlopen, next_dlsym},
    start,
};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD_DEFAULT_STREAM: u64 = 2;
/// From this version on, asking for `cuGetProcAddress` gives `cuGetProcAddress_v2`.
const GET_PROC_ADDRESS_V2: c_int = 12000;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("dlsym has to be tail-called; write the few instructions of `dlsym` for this architecture");

/// Exported in place of the C library's dlsym.
///
/// # Safety
/// As dlsym(3).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // Both arguments are kept on the stack over the call, which also aligns it; then the stack is the caller's again.
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {choose}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        choose = sym choose,
    )
}

/// Exported in place of the C library's dlopen, only to see how it is asked. The linker looks at the caller's place for its
/// RUNPATH, so the real one is jumped to with the caller's frame untouched.
///
/// # Safety
/// As dlopen(3).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {note}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        note = sym opening,
    )
}

/// Notes the mode; which function opens.
unsafe extern "C" fn opening(_: *const c_char, mode: c_int) -> *const () {
    crate::inline::deepbind::opening(mode);
    next_dlopen() as *const ()
}

/// Which function answers a look-up.
unsafe extern "C" fn choose(handle: *mut c_void, name: *const c_char) -> *const () {
    let real = next_dlsym() as *const ();
    if handle == libc::RTLD_NEXT || name.is_null() {
        return real;
    }
    let ours = catch_unwind(|| {
        // SAFETY: the caller's C string.
        let name = unsafe { CStr::from_ptr(name) };
        find(name.to_bytes()).is_some() && !start::disabled()
    });
    match ours {
        Ok(true) => answer as *const (),
        Ok(false) => real,
        Err(payload) => {
            std::mem::forget(payload);
            real
        }
    }
}

/// Answers a look-up of a hooked function by a handle or in the default scope.
unsafe extern "C" fn answer(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's C string; `choose` has found it in the table.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: the caller's arguments; neither of the handles that depend on the caller's place matters for a name of ours.
    let found = unsafe { next_dlsym()(handle, name.as_ptr()) };
    let answer = catch_unwind(AssertUnwindSafe(|| {
        let Some(function) = find(name.to_bytes()) else { return found };
        if !is_ours(found) {
            return function.wrap(found);
        }
        // The hook's own export was found: without the hook the answer would be the original, or nothing at all.
        if function.resolve().is_null() { look_up(libc::RTLD_NEXT, name) } else { found }
    }));
    answer.unwrap_or_else(|payload| {
        std::mem::forget(payload);
        found
    })
}

/// Replaces what cuGetProcAddress gave out.
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
        // SAFETY: the caller's place, which the call has just written.
        unsafe { *out = function.wrap(*out) };
    }
}

/// The row for a name, a version and flags of cuGetProcAddress: one name stands for several functions there.
fn by_proc_address(name: &[u8], version: c_int, flags: u64) -> Option<&'static Function> {
    if name == b"cuGetProcAddress" && version >= GET_PROC_ADDRESS_V2 {
        return Some(&get_proc_address::V2);
    }
    if flags & PER_THREAD_DEFAULT_STREAM != 0 {
        let form = crate::functions().find(|row| row.name.to_bytes().strip_suffix(b"_ptsz") == Some(name));
        if form.is_some() {
            return form;
        }
    }
    find(name)
}

/// The row of a name.
pub fn find(name: &[u8]) -> Option<&'static Function> {
    // Nearly all look-ups of a process end at the first letters.
    if ![&b"nccl"[..], b"cu", b"__cu", b"hip", b"mc", b"MPI_", b"Hccl", b"cncl", b"PMPI_", b"MPIX_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
    {
        return None;
    }
    crate::functions().find(|row| row.name.to_bytes() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, version: c_int, flags: u64) -> Option<&'static str> {
        by_proc_address(name.as_bytes(), version, flags).map(Function::text)
    }

    #[test]
    fn flag_2_is_a_function_of_its_own() {
        assert_eq!(row("cuLaunchKernel", 4000, 0), Some("cuLaunchKernel"));
        assert_eq!(row("cuLaunchKernel", 7000, 2), Some("cuLaunchKernel_ptsz"));
        assert_eq!(row("cuGraphLaunch", 10000, 2), Some("cuGraphLaunch_ptsz"));
        assert_eq!(row("cuGetProcAddress", 11030, 0), Some("cuGetProcAddress"));
        assert_eq!(row("cuGetProcAddress", 12000, 2), Some("cuGetProcAddress_v2"));
        assert_eq!(row("cuMemAlloc", 3020, 0), None);
    }

    #[test]
    fn look_ups_of_other_names_are_the_real_ones() {
        let malloc = look_up(libc::RTLD_DEFAULT, c"malloc");
        // SAFETY: as dlsym(3).
        assert_eq!(unsafe { dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr()) }, malloc);
        // SAFETY: as dlsym(3).
        assert!(unsafe { dlsym(libc::RTLD_DEFAULT, c"ncclAllReduce".as_ptr()) }.is_null());
    }
}
