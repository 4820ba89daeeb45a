//! The interposed dlsym, dlvsym and dlopen.
//!
//! The result of RTLD_NEXT and RTLD_DEFAULT depends on the caller. So these functions jump to the
//! real dlsym with the caller's frame intact, and do the same for every name that is not in the
//! table. dlerror then returns what the real dlsym left.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    interpose::prctl,
    runtime::{
        lifecycle::config,
        linker::{
            dynamic::{look_up, next_dlopen, next_dlsym, next_dlvsym},
            function::{find, is_wrapper},
        },
        os::thread_state,
    },
};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("dlsym has to be tail-called; write the few instructions of `dlsym` for this architecture");

/// Interposes dlsym.
///
/// # Safety
/// See dlsym(3).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // The stack preserves both arguments across the call, which also aligns it. Afterwards it is
    // the caller's stack again.
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {select_dlsym}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        select_dlsym = sym select_dlsym,
    )
}

/// Interposes dlvsym.
///
/// # Safety
/// See dlvsym(3).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    // The three arguments align the stack. The return address is above them.
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rdx, [rsp + 24]",
        "call {select_dlsym}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        select_dlsym = sym select_dlvsym,
    )
}

/// Interposes dlopen, only to see its mode. The linker uses the caller's address to find its
/// RUNPATH, so this jumps to the real dlopen with the caller's frame intact.
///
/// # Safety
/// See dlopen(3).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void {
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

/// Records the mode, and returns the function that opens the library.
unsafe extern "C" fn opening(_: *const c_char, mode: c_int) -> *const () {
    thread_state::current().asked_for_deepbind.set(mode & libc::RTLD_DEEPBIND != 0);
    next_dlopen() as *const ()
}

/// Returns the function that performs a lookup.
unsafe extern "C" fn select_dlsym(handle: *mut c_void, name: *const c_char) -> *const () {
    if handle == libc::RTLD_NEXT {
        return next_dlsym() as *const ();
    }
    select(name, dlsym_of_hooked as *const (), || next_dlsym() as *const ())
}

/// Returns the function that performs a lookup by version from `caller`. After the program, the
/// next object is the hook, but its exports have no version and would not be found. After a
/// library, the next object is not the hook.
unsafe extern "C" fn select_dlvsym(handle: *mut c_void, name: *const c_char, caller: usize) -> *const () {
    let ours = dlvsym_of_hooked as *const ();
    let select = select(name, ours, || next_dlvsym() as *const ());
    // Checked only for the hook's names: a sanitizer looks up its functions before it can be
    // called, and this code would call it.
    if select == ours && handle == libc::RTLD_NEXT && !crate::runtime::linker::elf::is_in_program(caller) {
        return next_dlvsym() as *const ();
    }
    select
}

/// Returns `ours` for the name of a hooked function.
fn select(name: *const c_char, ours: *const (), real: fn() -> *const ()) -> *const () {
    if name.is_null() {
        return real();
    }
    let is_hooked = catch_unwind(|| {
        // SAFETY: the caller's C string.
        let name = unsafe { CStr::from_ptr(name) };
        let name = name.to_bytes();
        (name == b"prctl" || name == b"syscall" || find(name).is_some()) && !config::disabled()
    });
    match is_hooked {
        Ok(true) => ours,
        Ok(false) => real(),
        Err(payload) => {
            std::mem::forget(payload);
            real()
        }
    }
}

/// Looks up a hooked function by a handle or in the default scope.
unsafe extern "C" fn dlsym_of_hooked(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's arguments are valid for dlsym. Handles that depend on the caller are not
    // used for these names.
    let found = unsafe { next_dlsym()(handle, name) };
    // SAFETY: the caller's C string; `select_dlsym` has found it in the table.
    wrapped(found, unsafe { CStr::from_ptr(name) })
}

/// Looks up a hooked function by version. The result is never an export of the hook, because those
/// have no version. RTLD_NEXT is resolved from the hook's position, which follows that of the
/// program.
unsafe extern "C" fn dlvsym_of_hooked(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    // SAFETY: the address of a function of this type.
    let real = unsafe { std::mem::transmute::<*const (), Dlvsym>(next_dlvsym() as *const ()) };
    // SAFETY: the caller's arguments, which are valid for dlvsym, go unchanged to the original.
    let found = unsafe { real(handle, name, version) };
    // SAFETY: the caller's C string; `select_dlvsym` has found it in the table.
    wrapped(found, unsafe { CStr::from_ptr(name) })
}

/// Replaces the function that a lookup has found.
fn wrapped(found: *mut c_void, name: &CStr) -> *mut c_void {
    let wrap = || {
        let Some(function) = find(name.to_bytes()) else { return prctl::before(found, name.to_bytes()) };
        if !is_wrapper(found) {
            return function.wrap(found);
        }
        // The lookup found the hook's own export. Without the hook it would have found the original
        // or nothing.
        if function.resolve().is_null() { look_up(libc::RTLD_NEXT, name) } else { found }
    };
    let given = catch_unwind(AssertUnwindSafe(wrap)).unwrap_or_else(|payload| {
        std::mem::forget(payload);
        found
    });
    if !given.is_null() {
        // A lookup of the hook may have failed meanwhile. After a successful lookup there must be
        // no error.
        // SAFETY: it takes no arguments.
        unsafe { libc::dlerror() };
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_of_other_names_are_passed_on() {
        let malloc = look_up(libc::RTLD_DEFAULT, c"malloc");
        // SAFETY: dlsym takes any of its special handles, and a C string.
        assert_eq!(unsafe { dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr()) }, malloc);
        // SAFETY: dlsym takes any of its special handles, and a C string.
        assert!(unsafe { dlsym(libc::RTLD_DEFAULT, c"ncclAllReduce".as_ptr()) }.is_null());
        // SAFETY: dlvsym takes any of its special handles, and two C strings.
        let by_version = |name: &CStr| unsafe { dlvsym(libc::RTLD_DEFAULT, name.as_ptr(), c"GLIBC_2.2.5".as_ptr()) };
        assert_eq!(by_version(c"malloc"), malloc);
        assert!(by_version(c"ncclAllReduce").is_null());
    }
}
