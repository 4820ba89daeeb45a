//! Weak references. A host uses one to check whether its library has a function; mpi4py does so for
//! the functions of MPI 4. The hook exports the names of all library versions, so such a reference
//! would never be null, and the call would reach a wrapper without an original.
//!
//! Before the linker binds a new object, its weak references to functions that only the hook
//! defines become null. No code is changed. Two kinds of objects are bound before the hook sees
//! them: those with which the program starts, and, since glibc 2.41, all others. There the address
//! of the hook's function is removed from the bound reference, before any code of the object or the
//! program has run. References that are only called stay unchanged: the program must have checked
//! in another way, and the library may be loaded before the first call.

use std::ffi::CStr;

use crate::{
    interpose::inline::{code_memory, deepbind::define_locally},
    runtime::linker::{
        elf::{self, LinkMap, Object, own_base},
        function_table::{self, is_wrapper},
    },
};

/// Makes those weak references of a new object null that would be null without the hook.
///
/// # Safety
/// `map` is in the linker's list and none of its code runs, or the process is starting.
pub unsafe fn unbind(map: *const LinkMap) {
    const WEAK: u8 = 2;
    // SAFETY: the caller's promise.
    let Some(object) = (unsafe { Object::of(map) }) else { return };
    for (name, symbol) in object.imported() {
        // SAFETY: a symbol of the object's table.
        let binding = unsafe { (*symbol).st_info } >> 4;
        if binding != WEAK || function_table::find(name.to_bytes()).is_none() || is_anywhere(name) {
            continue;
        }
        // SAFETY: a relocated place in the object, which is mapped.
        let held = |place: *const u64| unsafe { place.read_unaligned() };
        if object.places_of(symbol).any(|place| held(place) == 0) {
            // SAFETY: a symbol of an object that is not bound yet; otherwise it would be bound to
            // the hook.
            unsafe { define_locally(&object, symbol.cast_mut(), 0) };
        }
        for place in object.places_of(symbol).filter(|place| is_wrapper(held(*place) as *mut _)) {
            // SAFETY: the caller's promise.
            unsafe { rebind(&object, place, 0) };
        }
    }
}

/// Whether a loaded object other than the hook exports a function of this name.
fn is_anywhere(name: &CStr) -> bool {
    let mut map = elf::first();
    while !map.is_null() {
        // SAFETY: the linker's list, which does not change now.
        let object = unsafe { Object::of(map) };
        if object.is_some_and(|object| object.base != own_base() && object.exported(name).is_some()) {
            return true;
        }
        // SAFETY: as above.
        map = unsafe { (*map).next };
    }
    false
}

/// Writes an address to a relocated place of an object that is bound.
///
/// # Safety
/// No thread reads the place at the same time.
unsafe fn rebind(object: &Object, place: *const u64, address: u64) {
    let sealed = object.is_sealed(place as usize).then_some(libc::PROT_READ);
    let Some(access) = sealed.or_else(|| object.access_of(place as usize)) else { return };
    code_memory::writing(place as usize, size_of::<u64>(), access, || {
        // SAFETY: `writing` has made it writable.
        unsafe { place.cast_mut().write_unaligned(address) }
    });
}
