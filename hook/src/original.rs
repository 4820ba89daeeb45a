//! The originals of hooked functions: one row each, and up to four originals a row, each with a wrapper of its own.
//!
//! Slot 0 belongs to the exported symbol; its original is what the caller's reference would have been bound to without the
//! hook. The other slots belong to pointers that dlsym or cuGetProcAddress gave out: a second library, or a form
//! of the function that is not the exported one, so no caller ever lands in another original than its own.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering},
};

use xpu_timer_proto::family::Library;

use crate::{
    family, filters, inline, sys,
    thread_state::{self, in_hook},
};

/// Originals a row.
pub const SLOTS: usize = 4;

const _: () = assert!(SLOTS <= align_of::<Function>(), "a slot fits into the low bits of a row's address");

/// Functions beside an original that a row may ask.
pub const COMPANIONS: usize = 2;

/// Address of a wrapper.
#[derive(Clone, Copy)]
pub struct Wrapper(pub *const ());
// SAFETY: the address of code.
unsafe impl Sync for Wrapper {}
// SAFETY: as above.
unsafe impl Send for Wrapper {}

/// One hooked function.
pub struct Function {
    /// Its C name.
    pub name: &'static CStr,
    /// Where the original is.
    pub library: Library,
    /// Its entry in the coverage table, set before anything is recorded.
    pub coverage: AtomicU32,
    reals: [AtomicPtr<c_void>; SLOTS],
    companions: [[AtomicPtr<c_void>; COMPANIONS]; SLOTS],
    has_hidden_copy: AtomicBool,
    wrappers: [Wrapper; SLOTS],
}

/// The dynamic linker's own look-up, with the hook's library as the caller.
pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

impl Function {
    /// A row of the table.
    pub const fn new(name: &'static CStr, library: Library, wrappers: [Wrapper; SLOTS]) -> Self {
        Function {
            name,
            library,
            coverage: AtomicU32::new(0),
            reals: [const { AtomicPtr::new(std::ptr::null_mut()) }; SLOTS],
            companions: [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; COMPANIONS] }; SLOTS],
            has_hidden_copy: AtomicBool::new(false),
            wrappers,
        }
    }

    /// Name as text; the rows' names are ASCII.
    pub fn text(&self) -> &'static str {
        self.name.to_str().unwrap_or("?")
    }

    /// Notes that a call comes in by a slot other than 0. One body serves all slots of a row, and its caller's arguments leave no
    /// room for the number. Row and slot are one word, so a signal handler sees both or none.
    #[inline]
    pub fn enter_by(&self, slot: usize) {
        thread_state::current().entry.set(std::ptr::from_ref(self) as usize | slot);
    }

    /// The slot by which the call came in that begins now. A signal handler may call another row between the entry and this: that
    /// row takes its own slot 0 and leaves the entry alone.
    #[inline]
    pub fn entered_by(&self) -> usize {
        let entry = &thread_state::current().entry;
        let slot = entry.get() ^ std::ptr::from_ref(self) as usize;
        if slot < SLOTS {
            entry.set(0);
            slot
        } else {
            0
        }
    }

    /// The original of a slot, or null when there is none.
    #[inline]
    pub fn real(&self, slot: usize) -> *mut c_void {
        let real = self.reals[slot].load(Ordering::Acquire);
        if real.is_null() && slot == 0 { self.resolve_for_call() } else { real }
    }

    /// A function of the very object that holds an original, because a handle of one version of a library must never meet the
    /// functions of another. Looked for once; `None` when the object does not have it.
    #[inline]
    pub fn companion(&self, slot: usize, number: usize, names: &[&CStr]) -> Option<*mut c_void> {
        let place = &self.companions[slot][number];
        let mut found = place.load(Ordering::Acquire);
        if found.is_null() {
            found = names.iter().find_map(|name| beside(self.real(slot), name)).unwrap_or(ABSENT);
            place.store(found, Ordering::Release);
        }
        (found != ABSENT).then_some(found)
    }

    /// A slot without original and its wrapper, for a function that is about to be replaced. Slot 0 is never spare.
    pub fn spare_slot(&self) -> Option<(usize, *const ())> {
        let slot = (1..SLOTS).rev().find(|slot| self.reals[*slot].load(Ordering::Relaxed).is_null())?;
        Some((slot, self.wrappers[slot].0))
    }

    /// Gives a slot its original.
    pub fn fill_slot(&self, slot: usize, real: *mut c_void) {
        self.reals[slot].store(real, Ordering::Release);
    }

    /// Takes the original of a slot away: its library is not loaded any more.
    pub fn free_slot(&self, slot: usize) {
        self.reals[slot].store(std::ptr::null_mut(), Ordering::Release);
        for companion in &self.companions[slot] {
            companion.store(std::ptr::null_mut(), Ordering::Release);
        }
    }

    /// A copy of this function was found whose callers cannot be seen.
    pub fn out_of_reach(&self) {
        self.has_hidden_copy.store(true, Ordering::Relaxed);
    }

    /// Whether there is such a copy.
    pub fn has_hidden_copy(&self) -> bool {
        self.has_hidden_copy.load(Ordering::Relaxed)
    }

    /// Whether any original is known.
    pub fn is_known(&self) -> bool {
        self.reals.iter().any(|real| !real.load(Ordering::Relaxed).is_null())
    }

    /// Looks for the exported symbol's original: the next definition in the global scope, else the one in a library of a known soname.
    #[cold]
    pub fn resolve(&self) -> *mut c_void {
        let known = self.reals[0].load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        // An errno of ours must not show in the host, and a hooked function that the loader calls must not be recorded.
        let errno = sys::errno();
        let saved = errno.get();
        let found = in_hook(|| self.search());
        sys::forget_linker_error();
        errno.set(saved);
        if !found.is_null() {
            self.reals[0].store(found, Ordering::Release);
        }
        found
    }

    fn search(&self) -> *mut c_void {
        let named = self.library_variable().and_then(sys::variable).and_then(|path| CString::new(path).ok());
        if let Some(found) = named.and_then(|path| self.find_in(loaded_from(&path)?)) {
            return found;
        }
        let next = look_up(libc::RTLD_NEXT, self.name);
        if usable(next) {
            // Who finds a function in the default scope keeps its library; here the hook stands between the two.
            object_of(next);
            return next;
        }
        let sonames = family::in_order().flat_map(|family| family.sonames(self.library));
        if let Some(found) = sonames.filter_map(|soname| loaded(soname)).find_map(|library| self.find_in(library)) {
            return found;
        }
        let host = crate::host::loaded(self.library).into_iter().map(|library| look_up(library, self.name));
        host.into_iter().find(|real| usable(*real)).unwrap_or(std::ptr::null_mut())
    }

    /// The original in a library: of a collective by the name that its profiling interface has for it, which the library does not
    /// call by itself.
    fn find_in(&self, library: *mut c_void) -> Option<*mut c_void> {
        let mut name = [0; 64];
        let profiled = (self.library == Library::Collectives).then(|| prefixed(c"p", self.name, &mut name)).flatten();
        let names = profiled.into_iter().chain([self.name]);
        names.map(|name| look_up(library, name)).find(|real| usable(*real))
    }

    /// The variable that names the library of this function, for one whose name nobody knows.
    fn library_variable(&self) -> Option<&'static CStr> {
        match self.library {
            Library::Collectives => Some(c"XPU_TIMER_NCCL_LIB_PATH"),
            Library::Blas if self.text().contains("Lt") => Some(c"XPU_TIMER_CUBLASLT_LIB_PATH"),
            Library::Blas => Some(c"XPU_TIMER_CUBLAS_LIB_PATH"),
            _ => None,
        }
    }

    /// The original for a caller who was bound to the exported symbol although no original is to be found: it is in a library of
    /// another name, opened so that only its users see it. Without the hook the call would work, so it must with it.
    #[cold]
    fn resolve_for_call(&self) -> *mut c_void {
        let found = self.resolve();
        if !found.is_null() {
            return found;
        }
        let errno = sys::errno();
        let saved = errno.get();
        let found = in_hook(|| {
            let anywhere = objects().into_iter().filter(|path| !path.is_empty()).find_map(|path| {
                let library = loaded(&path)?;
                let found = self.find_in(library);
                if found.is_none() {
                    // SAFETY: the reference that was just taken, of a library that is none of ours.
                    unsafe { libc::dlclose(library) };
                }
                found
            });
            anywhere.unwrap_or(std::ptr::null_mut())
        });
        sys::forget_linker_error();
        errno.set(saved);
        if !found.is_null() {
            self.reals[0].store(found, Ordering::Release);
        }
        found
    }

    /// The wrapper for an original that the host looked up by itself. The original as it is when it is ours already, or
    /// when all slots are taken.
    pub fn wrap(&self, real: *mut c_void) -> *mut c_void {
        if !usable(real) {
            return real;
        }
        // The exported symbol's original first, so that a function has one address whichever way it is asked for.
        if self.resolve() == real {
            return self.wrappers[0].0.cast_mut().cast();
        }
        self.wrapper_of(real).map_or(real, |wrapper| wrapper.cast_mut().cast())
    }

    /// The wrapper of a slot that has this original or now gets it; `None` when all are taken.
    pub fn wrapper_of(&self, real: *mut c_void) -> Option<*const ()> {
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

/// In the place of a companion that is not there.
const ABSENT: *mut c_void = std::ptr::dangling_mut::<u8>().cast();

/// The function `name` of the object that `address` lies in.
#[cold]
fn beside(address: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    in_hook(|| {
        let found = look_up(object_of(address)?, name);
        sys::forget_linker_error();
        usable(found).then_some(found)
    })
}

/// The object that `address` lies in, which stays loaded from now on.
fn object_of(address: *mut c_void) -> Option<*mut c_void> {
    loaded(path_of(address)?)
}

/// Path of the object that `address` lies in.
pub fn path_of<'a>(address: *mut c_void) -> Option<&'a CStr> {
    // SAFETY: an all-zero Dl_info is a valid value of that plain structure, and dladdr takes any address.
    let mut object: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    if unsafe { libc::dladdr(address, &mut object) } == 0 || object.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's own string, which stays as long as the object.
    Some(unsafe { CStr::from_ptr(object.dli_fname) })
}

fn prefixed<'a>(prefix: &CStr, name: &CStr, buffer: &'a mut [u8; 64]) -> Option<&'a CStr> {
    let (prefix, name) = (prefix.to_bytes(), name.to_bytes_with_nul());
    buffer.get_mut(..prefix.len())?.copy_from_slice(prefix);
    buffer.get_mut(prefix.len()..prefix.len() + name.len())?.copy_from_slice(name);
    CStr::from_bytes_until_nul(buffer).ok()
}

fn usable(address: *mut c_void) -> bool {
    !address.is_null() && !is_ours(address)
}

/// Whether an address is one of the hook's wrappers.
pub fn is_ours(address: *mut c_void) -> bool {
    crate::functions().any(|function| function.wrappers.iter().any(|wrapper| wrapper.0 == address.cast_const().cast()))
}

/// A library that the process has loaded, by soname. The reference that this takes keeps it loaded, on purpose: an
/// original must not vanish under its wrapper.
pub fn loaded(soname: &CStr) -> Option<*mut c_void> {
    // The linker looks into folders for what it does not know. The watcher may be under a filter that nobody has seen yet.
    let must_not_look = !filters::may_call() || thread_state::current().is_watcher.get();
    if must_not_look && !objects().iter().any(|object| file_name(object).starts_with(file_name(soname))) {
        return None;
    }
    // SAFETY: a C string; RTLD_NOLOAD loads nothing and runs no constructor.
    let handle = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    (!handle.is_null()).then_some(handle)
}

/// A loaded library by a path that the user has given. The linker opens a path that it does not know, which waits for ever where it
/// names a FIFO, so it is asked by the path under which it has the library. Only another name of a regular file is left to it.
fn loaded_from(path: &CStr) -> Option<*mut c_void> {
    let objects = objects();
    let known = objects.iter().find(|object| object.as_c_str() == path);
    let known = known.or_else(|| {
        let named = !file_name(path).is_empty();
        objects.iter().find(|object| named && file_name(object) == file_name(path))
    });
    match known {
        Some(known) => loaded(known),
        None if path.to_bytes().contains(&b'/') && !sys::is_regular(path) => None,
        None => loaded(path),
    }
}

fn file_name(path: &CStr) -> &[u8] {
    path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Paths of all loaded objects, as they were opened; empty for the program. Asked of dl_iterate_phdr: dlopen would block behind
/// another library's constructor, and /proc/self/maps shows what a soname's link points to.
pub fn objects() -> Vec<CString> {
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _: usize, paths: *mut c_void) -> c_int {
        // SAFETY: the linker's own structure and string, and the vector that was passed below.
        unsafe { (*paths.cast::<Vec<CString>>()).push(CStr::from_ptr((*info).dlpi_name).to_owned()) };
        0
    }
    let mut paths = Vec::new();
    // SAFETY: the callback gets the vector that it expects, and does not keep it.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut paths).cast()) };
    paths
}

/// The C library's dlsym, called from the hook.
pub fn look_up(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the handle is one of the linker's, the name a C string.
    unsafe { libc_dlsym()(handle, name.as_ptr()) }
}

/// The C library's own dlsym. Read from its symbol table, because every name by which the linker could be asked is interposed.
fn libc_dlsym() -> Dlsym {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    cached(&REAL, || inline::exported_by_libc(c"dlsym"))
}

/// The dlopen that a host's call would have reached without the hook.
pub fn next_dlopen() -> Dlsym {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    cached(&NEXT, || look_up(libc::RTLD_NEXT, c"dlopen"))
}

/// The same for a look-up by version.
pub fn next_dlvsym() -> Dlsym {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    cached(&NEXT, || look_up(libc::RTLD_NEXT, c"dlvsym"))
}

/// What a host's look-up would have reached without the hook: the C library's dlsym, or that of another preloaded library
/// which wraps it too and comes later.
#[inline]
pub fn next_dlsym() -> Dlsym {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    cached(&NEXT, || look_up(libc::RTLD_NEXT, c"dlsym"))
}

#[inline]
fn cached(place: &AtomicPtr<c_void>, find: impl FnOnce() -> *mut c_void) -> Dlsym {
    let mut found = place.load(Ordering::Relaxed);
    if found.is_null() {
        found = find();
        place.store(found, Ordering::Relaxed);
    }
    if found.is_null() {
        return nothing;
    }
    // SAFETY: the address of a function of this type.
    unsafe { std::mem::transmute::<*mut c_void, Dlsym>(found) }
}

/// Stands in on a system whose C library has no dlsym that we know: every look-up fails, nothing crashes.
unsafe extern "C" fn nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    std::ptr::null_mut()
}

/// Calls a collective library's function that takes a communicator and gives an int.
pub fn comm_number(function: *mut c_void, comm: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion of a function that was given this live communicator; ncclCommCount and ncclCommUserRank have this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(comm, &mut number) };
    (result == 0).then_some(number)
}

/// The version that a library of collectives says it has.
pub fn version_number(function: *mut c_void) -> Option<c_int> {
    type Getter = unsafe extern "C" fn(*mut c_int) -> c_int;
    let mut number = 0;
    // SAFETY: a companion; ncclGetVersion has this type.
    let result = unsafe { std::mem::transmute::<*mut c_void, Getter>(function)(&mut number) };
    (result == 0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Function {
        let wrappers = [1usize, 2, 3, 4].map(|address| Wrapper(address as *const ()));
        Function::new(c"ncclNothing", Library::Collectives, wrappers)
    }

    #[test]
    fn a_call_of_another_row_leaves_the_entry_alone() {
        let (row, other) = (row(), row());
        row.enter_by(2);
        assert_eq!(other.entered_by(), 0, "as in a signal handler");
        assert_eq!([row.entered_by(), row.entered_by()], [2, 0]);
    }

    #[test]
    fn every_original_gets_a_wrapper_of_its_own_until_there_is_none_left() {
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
    fn a_library_that_is_not_loaded_gives_no_original() {
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
