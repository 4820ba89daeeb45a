//! Changes of the symbols of a new object before the linker binds it. No code is changed.
//!
//! Libraries that the host loads with `RTLD_DEEPBIND` search their own dependencies before
//! everything preloaded. Before the linker binds such a library, its imported symbols that are
//! hooked become definitions of the library itself, with the address of a wrapper. The wrapper's
//! original is the function that the library would have been bound to.
//!
//! A host uses a weak reference to check whether its library has a function; mpi4py does so for the
//! functions of MPI 4. The hook exports the names of all library versions, so such a reference
//! would never be null, and the call would reach a wrapper without an original. Before the linker
//! binds a new object, its weak references to functions that only the hook defines become null.
//! Two kinds of objects are bound before the hook sees them: those with which the program starts,
//! and, since glibc 2.41, all others. There the address of the hook's function is removed from the
//! bound reference, before any code of the object or the program has run. References that are only
//! called stay unchanged: the program must have checked in another way, and the library may be
//! loaded before the first call.

use std::ffi::{CStr, c_int, c_void};

use crate::{
    interpose::{dlsym, prctl},
    runtime::{
        linker::{
            elf::{self, LinkMap, Object, PAGE, own_base},
            function::{self, is_wrapper},
        },
        os::thread_state,
    },
};

/// Binds the imports of a new object if the host used this flag.
///
/// # Safety
/// `map` is in the linker's list and not bound yet.
pub(crate) unsafe fn bind_deepbind_imports(map: *const LinkMap) {
    if !thread_state::current().asked_for_deepbind.get() {
        return;
    }
    // SAFETY: by the contract of this function, `map` is in the linker's list.
    let Some(object) = (unsafe { Object::of(map) }) else { return };
    let dependencies = dependencies(&object);
    for (name, symbol) in object.imported() {
        let wrapper = match name.to_bytes() {
            b"dlsym" => Some(dlsym::dlsym as *const ()),
            b"dlvsym" => Some(dlsym::dlvsym as *const ()),
            b"dlopen" => Some(dlsym::dlopen as *const ()),
            b"prctl" => Some(prctl::prctl as *const ()),
            b"syscall" => Some(prctl::syscall as *const ()),
            text => function::find(text).and_then(|function| {
                let found = dependencies.iter().find_map(|object| object.exported(name))?;
                function.wrapper_of(found.address as *mut c_void)
            }),
        };
        if let Some(wrapper) = wrapper {
            // SAFETY: a symbol of an object that is not bound yet.
            unsafe { define_locally(&object, symbol.cast_mut(), wrapper as usize) };
        }
    }
}

/// All dependencies of an object, in the order in which the linker searches them.
fn dependencies(object: &Object) -> Vec<Object> {
    // SAFETY: the linker's list does not change now.
    let mut loaded: Vec<Object> = unsafe { elf::objects() }.collect();
    let mut wanted: Vec<Vec<u8>> = object.needed().map(|name| name.to_bytes().to_vec()).collect();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(soname) = wanted.get(at) {
        if let Some(index) = loaded.iter().position(|object| object.soname() == soname) {
            let object = loaded.swap_remove(index);
            let further = object.needed().map(CStr::to_bytes).filter(|name| !wanted.iter().any(|known| known == name));
            let further: Vec<Vec<u8>> = further.map(<[u8]>::to_vec).collect();
            wanted.extend(further);
            found.push(object);
        }
        at += 1;
    }
    found
}

/// Turns an imported symbol into a definition at `address`, so that the linker does not search for
/// it.
///
/// # Safety
/// The symbol is in the object's table, and no thread reads it at the same time.
unsafe fn define_locally(object: &Object, symbol: *mut libc::Elf64_Sym, address: usize) {
    const LOCAL_FUNCTION: u8 = 2;
    const HIDDEN: u8 = 2;
    const SOME_SECTION: u16 = 1;
    let Some(access) = object.access_of(symbol as usize) else { return };
    let write = || {
        // SAFETY: `writing` has made it writable.
        unsafe {
            (*symbol).st_info = LOCAL_FUNCTION;
            (*symbol).st_other = HIDDEN;
            (*symbol).st_shndx = SOME_SECTION;
            (*symbol).st_value = address.wrapping_sub(object.base) as u64;
        }
    };
    writing(symbol as usize, size_of::<libc::Elf64_Sym>(), access, write);
}

/// Makes those weak references of a new object null that would be null without the hook.
///
/// # Safety
/// `map` is in the linker's list and none of its code runs, or the process is starting.
pub(crate) unsafe fn unbind_weak_references(map: *const LinkMap) {
    const WEAK: u8 = 2;
    // SAFETY: by the contract of this function, `map` is in the linker's list.
    let Some(object) = (unsafe { Object::of(map) }) else { return };
    for (name, symbol) in object.imported() {
        // SAFETY: a symbol of the object's table.
        let binding = unsafe { (*symbol).st_info } >> 4;
        if binding != WEAK || function::find(name.to_bytes()).is_none() || is_exported_elsewhere(name) {
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
            // SAFETY: by the contract of this function, no code uses the reference yet.
            unsafe { rebind(&object, place, 0) };
        }
    }
}

/// Whether a loaded object other than the hook exports a function of this name.
fn is_exported_elsewhere(name: &CStr) -> bool {
    let mut map = elf::first();
    while !map.is_null() {
        // SAFETY: the linker's list, which does not change now.
        let object = unsafe { Object::of(map) };
        if object.is_some_and(|object| object.base != own_base() && object.exported(name).is_some()) {
            return true;
        }
        // SAFETY: an object of the linker's list, which does not change now.
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
    writing(place as usize, size_of::<u64>(), access, || {
        // SAFETY: `writing` has made it writable.
        unsafe { place.cast_mut().write_unaligned(address) }
    });
}

/// Makes bytes of a loaded object writable while `write` runs, and then restores `access`. False
/// when the system refuses.
pub(crate) fn writing(address: usize, length: usize, access: c_int, write: impl FnOnce()) -> bool {
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
