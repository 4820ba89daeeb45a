//! The interposed dlsym and dlvsym, and what is done with the addresses that it and cuGetProcAddress give out.
//!
//! RTLD_NEXT and RTLD_DEFAULT depend on who calls, so the real dlsym is jumped to with the caller's frame untouched; and so is
//! every look-up of a name that is not in the table. What dlerror says afterwards is what the real one left.

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
            function_table::{find, is_ours},
        },
        os::thread_state,
    },
};

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

/// Exported in place of the C library's dlvsym.
///
/// # Safety
/// As dlvsym(3).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    // Three arguments on the stack align it; the place that is returned to is above them.
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "mov rdx, [rsp + 24]",
        "call {choose}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        choose = sym choose_by_version,
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
    thread_state::current().asked_for_deepbind.set(mode & libc::RTLD_DEEPBIND != 0);
    next_dlopen() as *const ()
}

/// Which function answers a look-up.
unsafe extern "C" fn choose(handle: *mut c_void, name: *const c_char) -> *const () {
    if handle == libc::RTLD_NEXT {
        return next_dlsym() as *const ();
    }
    chosen(name, answer as *const (), || next_dlsym() as *const ())
}

/// Which function answers a look-up by version from `caller`. What comes next after the program is the hook, but its exports have no
/// version and would not be found; what comes after a library is not the hook.
unsafe extern "C" fn choose_by_version(handle: *mut c_void, name: *const c_char, caller: usize) -> *const () {
    let ours = answer_by_version as *const ();
    let chosen = chosen(name, ours, || next_dlvsym() as *const ());
    // Asked for names of ours alone: a sanitizer looks its functions up before it can be called, and it would be by this.
    if chosen == ours && handle == libc::RTLD_NEXT && !crate::runtime::linker::elf::is_in_program(caller) {
        return next_dlvsym() as *const ();
    }
    chosen
}

/// `ours` for the name of a hooked function.
fn chosen(name: *const c_char, ours: *const (), real: fn() -> *const ()) -> *const () {
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

/// Answers a look-up of a hooked function by a handle or in the default scope.
unsafe extern "C" fn answer(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's arguments; neither of the handles that depend on the caller's place matters for a name of ours.
    let found = unsafe { next_dlsym()(handle, name) };
    // SAFETY: the caller's C string; `choose` has found it in the table.
    wrapped(found, unsafe { CStr::from_ptr(name) })
}

/// The same by version. The hook's own exports have none, so they are never what is found; RTLD_NEXT is asked from the hook's place,
/// which follows the program's.
unsafe extern "C" fn answer_by_version(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    // SAFETY: the address of a function of this type.
    let real = unsafe { std::mem::transmute::<*const (), Dlvsym>(next_dlvsym() as *const ()) };
    // SAFETY: the caller's arguments.
    let found = unsafe { real(handle, name, version) };
    // SAFETY: the caller's C string; `choose_by_version` has found it in the table.
    wrapped(found, unsafe { CStr::from_ptr(name) })
}

/// What the host gets for the function that a look-up has found.
fn wrapped(found: *mut c_void, name: &CStr) -> *mut c_void {
    let wrap = || {
        let Some(function) = find(name.to_bytes()) else { return prctl::before(found, name.to_bytes()) };
        if !is_ours(found) {
            return function.wrap(found);
        }
        // The hook's own export was found: without the hook the answer would be the original, or nothing at all.
        if function.resolve().is_null() { look_up(libc::RTLD_NEXT, name) } else { found }
    };
    let given = catch_unwind(AssertUnwindSafe(wrap)).unwrap_or_else(|payload| {
        std::mem::forget(payload);
        found
    });
    if !given.is_null() {
        // A look-up of ours may have failed meanwhile; after one that succeeds there is no error.
        // SAFETY: it has no arguments.
        unsafe { libc::dlerror() };
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_ups_of_other_names_are_the_real_ones() {
        let malloc = look_up(libc::RTLD_DEFAULT, c"malloc");
        // SAFETY: as dlsym(3).
        assert_eq!(unsafe { dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr()) }, malloc);
        // SAFETY: as dlsym(3).
        assert!(unsafe { dlsym(libc::RTLD_DEFAULT, c"ncclAllReduce".as_ptr()) }.is_null());
        // SAFETY: as dlvsym(3).
        let by_version = |name: &CStr| unsafe { dlvsym(libc::RTLD_DEFAULT, name.as_ptr(), c"GLIBC_2.2.5".as_ptr()) };
        assert_eq!(by_version(c"malloc"), malloc);
        assert!(by_version(c"ncclAllReduce").is_null());
    }
}
