//! Write access to the memory of loaded objects.

use std::ffi::{c_int, c_void};

use crate::runtime::linker::elf::PAGE;

/// Makes bytes of a loaded object writable while `write` runs, and then restores `access`. False
/// when the system refuses.
pub fn writing(address: usize, length: usize, access: c_int, write: impl FnOnce()) -> bool {
    let start = address / PAGE * PAGE;
    let length = (address + length).next_multiple_of(PAGE) - start;
    let change = |access| {
        // SAFETY: full pages of a loaded object, which keep their access rights.
        unsafe { libc::mprotect(start as *mut c_void, length, access) == 0 }
    };
    if !change(access | libc::PROT_WRITE) {
        return false;
    }
    write();
    change(access);
    true
}
