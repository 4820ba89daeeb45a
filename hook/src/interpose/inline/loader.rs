//! Notices every library after it is mapped and before any of its code has run. At that time the
//! linker calls an empty function for debuggers; the hook makes that function jump to [`loaded`].
//!
//! The linker holds its lock during the call, so nothing here calls the linker, and nothing waits.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicI32, Ordering},
};

use crate::{
    interpose::inline::{engine::ENDBR64, symbol_binding::writing},
    runtime::{
        lifecycle::panics::guarded,
        linker::{dynamic, elf::_r_debug},
        os::{
            seccomp,
            thread_state::{self, in_hook},
        },
    },
};

/// State of `r_debug` when the list of objects is complete.
const CONSISTENT: c_int = 0;

/// Makes the linker call [`loaded`]. False when the linker's function is not empty as expected, or
/// the system forbids the change.
pub(crate) fn listen() -> bool {
    // SAFETY: the linker's own structure, which always exists.
    let call = unsafe { (&raw const _r_debug.call).read_volatile() };
    if call == 0 {
        return false;
    }
    // SAFETY: the linker's function and the padding up to the next one, which is aligned to 16
    // bytes.
    let code = unsafe { std::slice::from_raw_parts(call as *const u8, 16) };
    if !is_empty_function(code) {
        return false;
    }
    let distance = (loaded as *const () as i64).wrapping_sub(call as i64 + 5);
    let Ok(distance) = i32::try_from(distance) else { return false };
    let mut jump = [0xe9, 0, 0, 0, 0];
    jump[1..].copy_from_slice(&distance.to_le_bytes());
    // SAFETY: the process is starting and has one thread; the bytes are an empty function and its
    // padding.
    unsafe { write_code(call, &jump) }
}

/// Whether this is a function that only returns, with room for a jump in the padding after it.
fn is_empty_function(code: &[u8]) -> bool {
    let body = code.strip_prefix(&ENDBR64).unwrap_or(code);
    // A return, possibly with a prefix for old processors.
    let Some(padding) = body.strip_prefix(&[0xf3, 0xc3]).or_else(|| body.strip_prefix(&[0xc3])) else { return false };
    let mut space = code.len() - padding.len();
    let mut rest = padding;
    while space < 5 {
        let Some(length) = filler(rest) else { return false };
        space += length;
        rest = rest.get(length..).unwrap_or_default();
    }
    true
}

/// Length of the padding instruction at the start of `code`, if it is one. The instruction decoder
/// knows these too, but building its tables takes longer than the rest of the program's start.
fn filler(code: &[u8]) -> Option<usize> {
    let prefixes = code.iter().take_while(|byte| [0x66, 0x2e].contains(*byte)).count();
    match code.get(prefixes..)? {
        [0x90, ..] => Some(prefixes + 1),
        [0xcc, ..] if prefixes == 0 => Some(1),
        // nop with an operand: without displacement, or with one of one or four bytes, each also
        // with an index.
        [0x0f, 0x1f, operand, ..] => {
            let more = [(0x00, 0), (0x40, 1), (0x44, 2), (0x80, 4), (0x84, 5)];
            more.iter().find(|(form, _)| form == operand).map(|(_, more)| prefixes + 3 + more)
        }
        _ => None,
    }
}

/// # Safety
/// The bytes are code, and no thread executes them at the same time.
unsafe fn write_code(address: usize, bytes: &[u8]) -> bool {
    writing(address, bytes.len(), libc::PROT_READ | libc::PROT_EXEC, || {
        // SAFETY: `writing` has made them writable.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) }
    })
}

/// A thread is scanning. In a forked child, the mark may be that of a thread that does not exist;
/// then the hook stops listening.
static SCANNING: AtomicI32 = AtomicI32::new(0);

/// The linker calls this before and after each change of its list.
pub(crate) extern "C" fn loaded() {
    // SAFETY: the linker's own structure, which always exists.
    let state = unsafe { (&raw const _r_debug.state).read_volatile() };
    if state != CONSISTENT || dynamic::has_stopped_listening() || !seccomp::may_call() {
        return;
    }
    if SCANNING.swap(1, Ordering::Acquire) != 0 {
        dynamic::stop_listening();
        return;
    }
    let errno = thread_state::errno();
    let saved = errno.get();
    guarded(|| in_hook(crate::interpose::inline::scan::scan_new_objects));
    errno.set(saved);
    SCANNING.store(0, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::linker::elf::first;

    #[test]
    fn only_an_empty_function_with_room_is_replaced() {
        // As in glibc: ret, and eleven bytes of padding.
        let real = [0xc3, 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x0f, 0x1f, 0x40, 0];
        assert!(is_empty_function(&real));
        assert!(is_empty_function(&[0xf3, 0x0f, 0x1e, 0xfa, 0xc3, 0x90, 0x90, 0x90]));
        assert!(is_empty_function(&[0xf3, 0xc3, 0x90, 0x90, 0x90, 0x90]));
        assert!(!is_empty_function(&[0xcc, 0x90, 0x90, 0x90, 0x90, 0x90]), "a debugger's breakpoint");
        assert!(!is_empty_function(&[0x55, 0xc3, 0x90, 0x90, 0x90, 0x90]), "it does something");
        assert!(!is_empty_function(&[0xc3, 0x90, 0x55, 0x90, 0x90, 0x90]), "the next function begins too early");
    }

    #[test]
    fn the_linkers_debug_function_can_be_replaced() {
        assert!(!first().is_null());
        // SAFETY: the linker's structure and its function.
        assert!(is_empty_function(unsafe { std::slice::from_raw_parts(_r_debug.call as *const u8, 16) }));
    }
}
