//! Libraries that the host loads with `RTLD_DEEPBIND`. They search their own dependencies before
//! everything preloaded.
//!
//! Before the linker binds such a library, its imported symbols that are hooked become definitions
//! of the library itself, with the address of a wrapper. The wrapper's original is the function
//! that the library would have been bound to. No code is changed.

use std::ffi::{CStr, c_void};

use crate::{
    interpose::{dlsym, inline::code_memory, prctl},
    runtime::{
        linker::{
            elf::{self, LinkMap, Object},
            function_table,
        },
        os::thread_state,
    },
};

/// Binds the imports of a new object if the host used this flag.
///
/// # Safety
/// `map` is in the linker's list and not bound yet.
pub unsafe fn bind(map: *const LinkMap) {
    if !thread_state::current().asked_for_deepbind.get() {
        return;
    }
    // SAFETY: the caller's promise.
    let Some(object) = (unsafe { Object::of(map) }) else { return };
    let dependencies = dependencies(&object);
    for (name, symbol) in object.imported() {
        let wrapper = match name.to_bytes() {
            b"dlsym" => Some(dlsym::dlsym as *const ()),
            b"dlvsym" => Some(dlsym::dlvsym as *const ()),
            b"dlopen" => Some(dlsym::dlopen as *const ()),
            b"prctl" => Some(prctl::prctl as *const ()),
            b"syscall" => Some(prctl::syscall as *const ()),
            text => function_table::find(text).and_then(|function| {
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
    let mut loaded = Vec::new();
    let mut map = elf::first();
    while !map.is_null() {
        // SAFETY: the linker's list, which does not change now.
        unsafe {
            loaded.extend(Object::of(map));
            map = (*map).next;
        }
    }
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
pub unsafe fn define_locally(object: &Object, symbol: *mut libc::Elf64_Sym, address: usize) {
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
    code_memory::writing(symbol as usize, size_of::<libc::Elf64_Sym>(), access, write);
}
