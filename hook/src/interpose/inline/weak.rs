//! Weak references: a host that refers weakly to a function asks whether its library has it, as mpi4py does for the functions of
//! MPI 4. The hook exports the names of all versions of a library, so such a reference would never be null, and the call would go to
//! a wrapper without an original.
//!
//! Before the linker binds a new object, its weak references to functions that nobody has but the hook are made null. No code is
//! changed. What the program is started with is bound before the hook can look at it, and since 2.41 glibc tells of a new object only
//! when it is bound: there the address of the hook's function is taken out again, before anything of the object has run, or, at the
//! start, before the program has. A reference that is only ever called is left alone: who does not ask has made sure otherwise, and its
//! library may come before the first call.

use std::ffi::CStr;

use crate::{
    interpose::inline::{code_memory, deepbind::define_locally},
    runtime::linker::{
        elf::{self, LinkMap, Object, own_base},
        function_table::{self, is_ours},
    },
};

/// Makes the weak references of a new object null that would be so without the hook.
///
/// # Safety
/// `map` is in the linker's list and nothing of it runs, or the process is being started.
pub unsafe fn unbind(map: *const LinkMap) {
    const WEAK: u8 = 2;
    // SAFETY: the caller's word.
    let Some(object) = (unsafe { Object::of(map) }) else { return };
    for (name, symbol) in object.imported() {
        // SAFETY: a symbol of the object's table.
        let binding = unsafe { (*symbol).st_info } >> 4;
        if binding != WEAK || function_table::find(name.to_bytes()).is_none() || is_anywhere(name) {
            continue;
        }
        // SAFETY: the place of a relocation in the object, which is mapped.
        let held = |place: *const u64| unsafe { place.read_unaligned() };
        if object.places_of(symbol).any(|place| held(place) == 0) {
            // SAFETY: a symbol of an object that is not bound yet, because the hook would be what it is bound to.
            unsafe { define_locally(&object, symbol.cast_mut(), 0) };
        }
        for place in object.places_of(symbol).filter(|place| is_ours(held(*place) as *mut _)) {
            // SAFETY: the caller's word.
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

/// Writes another address into such a place of an object that is bound.
///
/// # Safety
/// Nobody reads it meanwhile.
unsafe fn rebind(object: &Object, place: *const u64, address: u64) {
    let sealed = object.is_sealed(place as usize).then_some(libc::PROT_READ);
    let Some(access) = sealed.or_else(|| object.access_of(place as usize)) else { return };
    code_memory::writing(place as usize, size_of::<u64>(), access, || {
        // SAFETY: writable meanwhile.
        unsafe { place.cast_mut().write_unaligned(address) }
    });
}
