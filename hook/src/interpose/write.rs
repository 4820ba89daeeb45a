//! The interposed `write`: it keeps the last text that the program writes to its standard error;
//! see [`stderr_text`]. The C library itself does not call it, so the text of `assert` and of
//! `std::terminate` is not kept.

use std::{
    ffi::{c_int, c_long, c_void},
    sync::atomic::{AtomicPtr, Ordering},
};

use xpu_timer_proto::ring::stderr;

use crate::{
    interpose::prctl::raw_syscall,
    runtime::{
        linker::dynamic::look_up,
        os::{stderr_text, sys, thread_state::errno},
    },
};

/// The next function of this name: the C library's, or another preloaded library's.
static NEXT_WRITE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Called when the library is loaded.
pub(crate) fn find_next() {
    NEXT_WRITE.store(look_up(libc::RTLD_NEXT, c"write"), Ordering::Relaxed);
}

/// Interposes `write`. For every descriptor but that of standard error it jumps to the next
/// function.
///
/// # Safety
/// See write(2).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[cfg_attr(test, allow(dead_code))]
pub(crate) unsafe extern "C-unwind" fn write(descriptor: c_int, text: *const c_void, bytes: usize) -> isize {
    core::arch::naked_asm!(
        "cmp edi, {stderr}",
        "je {kept_write}",
        "mov rax, qword ptr [rip + {next}]",
        "test rax, rax",
        "je {raw_write}",
        "jmp rax",
        stderr = const libc::STDERR_FILENO,
        kept_write = sym kept_write,
        next = sym NEXT_WRITE,
        raw_write = sym raw_write,
    )
}

type Write = unsafe extern "C-unwind" fn(c_int, *const c_void, usize) -> isize;

/// A write to standard error. The thread may be cancelled inside the call, which unwinds this
/// frame, so nothing here has a destructor.
unsafe extern "C-unwind" fn kept_write(descriptor: c_int, text: *const c_void, bytes: usize) -> isize {
    let next = NEXT_WRITE.load(Ordering::Relaxed);
    // SAFETY: the next function of this name.
    let next = if next.is_null() { raw_write } else { unsafe { std::mem::transmute::<*mut c_void, Write>(next) } };
    // SAFETY: the caller's arguments go unchanged to the next write(2).
    let written = unsafe { next(descriptor, text, bytes) };
    if let Ok(length @ 1..) = usize::try_from(written)
        && length <= bytes
    {
        let kept = length.min(stderr::TEXT_BYTES);
        keep(text as usize + (length - kept), kept);
    }
    written
}

/// Size of the copies of a text. A signal handler may write on a small stack.
const COPIED_BYTES: usize = 512;

/// Keeps a text that was written, if there is a ring. The kernel has read it, except for devices
/// such as `/dev/null`, which accept any address. So a system call copies it where that is allowed.
fn keep(text: usize, length: usize) {
    if !stderr_text::is_kept() {
        return;
    }
    let (errno, mut copy) = (errno(), [0; COPIED_BYTES]);
    let saved = errno.get();
    for start in (0..length).step_by(COPIED_BYTES) {
        let part = &mut copy[..COPIED_BYTES.min(length - start)];
        match sys::read_memory(text + start, part) {
            Ok(()) => stderr_text::note(part),
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => break,
            // SAFETY: the kernel has just read these bytes, unless the device is one of those.
            Err(_) => stderr_text::note(unsafe { std::slice::from_raw_parts((text + start) as *const u8, part.len()) }),
        }
    }
    errno.set(saved);
}

/// Makes the system call, for calls before the next function is known.
unsafe extern "C-unwind" fn raw_write(descriptor: c_int, text: *const c_void, bytes: usize) -> isize {
    // SAFETY: the caller's arguments go unchanged to the kernel, which checks the addresses.
    unsafe { raw_syscall(libc::SYS_write, descriptor as u64, text as u64, bytes as u64, 0, 0, 0) as c_long as isize }
}
