//! Finds the original behind a slot of a hooked function.

use std::{
    ffi::{CStr, CString, c_void},
    sync::atomic::Ordering,
};

use xpu_timer_proto::family::Library;

use crate::runtime::{
    linker::{
        dynamic::{self, file_name, loaded, loaded_from, look_up, object_of, objects},
        elf,
        function::{Function, is_wrapper},
    },
    os::{
        environment,
        leaked_once::LeakedOnce,
        sections::is_bare_child,
        thread_state::{self, in_hook},
    },
};

/// The variables in which a user names libraries with unknown names.
const LIBRARY_VARIABLES: [&CStr; 3] =
    [c"XPU_TIMER_NCCL_LIB_PATH", c"XPU_TIMER_CUBLASLT_LIB_PATH", c"XPU_TIMER_CUBLAS_LIB_PATH"];

/// Their values when the process was started.
static NAMED_LIBRARIES: [LeakedOnce<CString>; 3] = [const { LeakedOnce::new() }; 3];

/// Called when the hook is loaded.
pub(crate) fn note_named_libraries() {
    for (variable, named) in LIBRARY_VARIABLES.iter().zip(&NAMED_LIBRARIES) {
        if let Some(path) = environment::at_start(variable).and_then(|path| CString::new(path).ok()) {
            named.get_or_init(|| path);
        }
    }
}

impl Function {
    /// The original of a slot. Null if there is none.
    #[inline]
    pub(crate) fn real(&self, slot: usize) -> *mut c_void {
        let real = self.reals[slot].load(Ordering::Acquire);
        if real.is_null() && slot == 0 { self.resolve_for_call() } else { real }
    }

    /// A function of the object that holds an original. A handle of one version of a library must
    /// never reach the functions of another version. The lookup is cached. `None` if the object
    /// does not have the function.
    #[inline]
    pub(crate) fn companion(&self, slot: usize, number: usize, names: &[&CStr]) -> Option<*mut c_void> {
        let place = &self.companions[slot][number];
        let mut found = place.load(Ordering::Acquire);
        if found.is_null() {
            found = names.iter().find_map(|name| in_same_object(self.real(slot), name)).unwrap_or(ABSENT);
            place.store(found, Ordering::Release);
        }
        (found != ABSENT).then_some(found)
    }

    /// Finds the original of the exported symbol: the next definition in the global scope, else the
    /// one in a library with a known soname.
    #[cold]
    pub(crate) fn resolve(&self) -> *mut c_void {
        let known = self.reals[0].load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        // The host must not see the hook's errno, and a hooked function that the loader calls must
        // not be recorded.
        let errno = thread_state::errno();
        let saved = errno.get();
        let found = in_hook(|| self.search());
        dynamic::forget_linker_error();
        errno.set(saved);
        if !found.is_null() {
            self.reals[0].store(found, Ordering::Release);
        }
        found
    }

    fn search(&self) -> *mut c_void {
        if is_bare_child() {
            return self.search_without_linker();
        }
        if let Some(found) = self.named_library().and_then(|path| self.find_in(loaded_from(path)?)) {
            return found;
        }
        let next = look_up(libc::RTLD_NEXT, self.name);
        if is_original(next) {
            // A program that finds a function in the default scope depends on its library, which
            // keeps that loaded. Here the hook is in between, so it keeps the library loaded.
            object_of(next);
            return next;
        }
        let sonames = dynamic::candidate_families().flat_map(|family| family.sonames(self.library));
        if let Some(found) = sonames.filter_map(|soname| loaded(soname)).find_map(|library| self.find_in(library)) {
            return found;
        }
        let host = host_libraries(self.library).into_iter().map(|library| look_up(library, self.name));
        host.into_iter().find(|real| is_original(*real)).unwrap_or(std::ptr::null_mut())
    }

    /// Finds the original in the linker's list. A thread of the parent may have held the linker's
    /// lock when it made this child, where nobody releases it. The child has one thread, so the
    /// list does not change during the search.
    fn search_without_linker(&self) -> *mut c_void {
        // SAFETY: there is no other thread that could unload an object.
        let objects = || unsafe { elf::objects() };
        let path = self.named_library();
        let named = objects().filter(|object| path.is_some_and(|path| file_name(path) == file_name(object.path())));
        let next = objects().skip_while(|object| object.base != elf::own_base()).skip(1);
        let found = named.chain(next).find_map(|object| object.exported(self.name));
        found.map_or(std::ptr::null_mut(), |symbol| symbol.address as *mut c_void)
    }

    /// The original in a library. For a collective it is the name of the profiling interface, which
    /// the library does not call itself.
    fn find_in(&self, library: *mut c_void) -> Option<*mut c_void> {
        let mut name = [0; 64];
        let profiled = (self.library == Library::Collectives).then(|| prefixed(c"p", self.name, &mut name)).flatten();
        let names = profiled.into_iter().chain([self.name]);
        names.map(|name| look_up(library, name)).find(|real| is_original(*real))
    }

    /// The library of this function, if it has an unknown name and the user has named it.
    fn named_library(&self) -> Option<&'static CStr> {
        let named = match self.library {
            Library::Collectives => &NAMED_LIBRARIES[0],
            Library::Blas if self.text().contains("Lt") => &NAMED_LIBRARIES[1],
            Library::Blas => &NAMED_LIBRARIES[2],
            _ => return None,
        };
        named.get().map(CString::as_c_str)
    }

    /// The original for a caller that was bound to the exported symbol when no original could be
    /// found. It is in a library with another name that was opened with local scope. Without the
    /// hook the call would work, so it must work with it.
    #[cold]
    fn resolve_for_call(&self) -> *mut c_void {
        let found = self.resolve();
        if !found.is_null() || is_bare_child() {
            return found;
        }
        let errno = thread_state::errno();
        let saved = errno.get();
        let found = in_hook(|| {
            let anywhere = objects().into_iter().filter(|path| !path.is_empty()).find_map(|path| {
                let library = loaded(&path)?;
                let found = self.find_in(library);
                if found.is_none() {
                    dynamic::release(library);
                }
                found
            });
            anywhere.unwrap_or(std::ptr::null_mut())
        });
        dynamic::forget_linker_error();
        errno.set(saved);
        if !found.is_null() {
            self.reals[0].store(found, Ordering::Release);
        }
        found
    }

    /// The wrapper of an original that the host looked up. Returns `real` when it is a wrapper
    /// already, or when all slots are used.
    pub(crate) fn wrap(&self, real: *mut c_void) -> *mut c_void {
        if !is_original(real) {
            return real;
        }
        // Check the exported symbol's original first, so that a function has one address however it
        // is looked up.
        if self.resolve() == real {
            return self.wrappers[0].0.cast_mut().cast();
        }
        self.wrapper_of(real).map_or(real, |wrapper| wrapper.cast_mut().cast())
    }

    /// The wrapper of the slot that has this original, or of a free slot that gets it. `None` when
    /// all slots are used.
    pub(crate) fn wrapper_of(&self, real: *mut c_void) -> Option<*const ()> {
        for (slot, wrapper) in self.reals.iter().zip(&self.wrappers).skip(1) {
            let empty = std::ptr::null_mut();
            let known = match slot.compare_exchange(empty, real, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => real,
                Err(known) => known,
            };
            if known == real {
                return Some(wrapper.0);
            }
        }
        None
    }
}

/// Marks a companion that does not exist.
const ABSENT: *mut c_void = std::ptr::dangling_mut::<u8>().cast();

/// The function `name` of the object that contains `address`.
#[cold]
pub(crate) fn in_same_object(address: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    in_hook(|| {
        let found = look_up(object_of(address)?, name);
        dynamic::forget_linker_error();
        is_original(found).then_some(found)
    })
}

fn prefixed<'a>(prefix: &CStr, name: &CStr, buffer: &'a mut [u8; 64]) -> Option<&'a CStr> {
    let (prefix, name) = (prefix.to_bytes(), name.to_bytes_with_nul());
    buffer.get_mut(..prefix.len())?.copy_from_slice(prefix);
    buffer.get_mut(prefix.len()..prefix.len() + name.len())?.copy_from_slice(name);
    CStr::from_bytes_until_nul(buffer).ok()
}

fn is_original(address: *mut c_void) -> bool {
    !address.is_null() && !is_wrapper(address)
}

/// The loaded libraries of a kind that belongs to no device family.
pub(crate) fn host_libraries(library: Library) -> Vec<*mut c_void> {
    let files = library.host_files();
    if files.is_empty() {
        return Vec::new();
    }
    let of_kind =
        |path: &String| path.rsplit('/').next().is_some_and(|name| files.iter().any(|file| name.starts_with(file)));
    let paths = dynamic::libraries().into_iter().filter(of_kind);
    paths.filter_map(|path| loaded(&CString::new(path).ok()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::linker::function::Wrapper;

    fn row() -> Function {
        let wrappers = [1usize, 2, 3, 4].map(|address| Wrapper(address as *const ()));
        Function::new(c"ncclNothing", Library::Collectives, wrappers)
    }

    #[test]
    fn a_call_of_another_row_does_not_take_the_entry() {
        let (row, other) = (row(), row());
        row.set_entry_slot(2);
        assert_eq!(other.take_entry_slot(), 0, "as in a signal handler");
        assert_eq!([row.take_entry_slot(), row.take_entry_slot()], [2, 0]);
    }

    #[test]
    fn each_original_gets_its_own_wrapper_while_any_is_left() {
        let row = row();
        let wrap = |real: usize| row.wrap(real as *mut c_void) as usize;
        assert_eq!(wrap(0x1000), 2);
        assert_eq!(wrap(0x2000), 3);
        assert_eq!(wrap(0x1000), 2);
        assert_eq!(wrap(0x3000), 4);
        assert_eq!(wrap(0x4000), 0x4000);
        assert_eq!(wrap(0), 0);
        assert_eq!(row.real(2) as usize, 0x2000);
    }

    #[test]
    fn without_a_library_there_is_no_original() {
        let row = row();
        assert!(row.resolve().is_null());
        assert!(!row.is_known());
    }

    #[test]
    fn the_real_dlsym_finds_libc_from_here() {
        assert!(!look_up(libc::RTLD_DEFAULT, c"malloc").is_null());
        assert!(look_up(libc::RTLD_DEFAULT, c"xpu_timer_no_such_function").is_null());
    }
}
