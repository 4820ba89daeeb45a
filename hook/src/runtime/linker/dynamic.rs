//! Queries of the dynamic linker: loaded objects, the device family that they belong to, and
//! lookups that bypass the hook's own exports.

use std::{
    ffi::{CStr, CString, OsStr, c_char, c_int, c_void},
    os::unix::ffi::OsStrExt,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
};

use libloading::os::unix::Library;
use xpu_timer_proto::family::{FAMILIES, Family};

use crate::runtime::{
    linker::elf,
    os::{
        seccomp,
        sections::{in_linker, in_query},
        sys, thread_state,
    },
};

/// dlsym, with the hook's library as the caller.
pub(crate) type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The object that contains `address`. It stays loaded from now on.
pub(crate) fn object_of(address: *mut c_void) -> Option<*mut c_void> {
    loaded(path_of(address)?)
}

/// Path of the object that contains `address`.
pub(crate) fn path_of<'a>(address: *mut c_void) -> Option<&'a CStr> {
    // SAFETY: an all-zero Dl_info is a valid value of that plain structure, and dladdr takes any
    // address.
    let mut object: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr takes any address, and writes to a valid place.
    if in_query(|| unsafe { libc::dladdr(address, &mut object) }) == 0 || object.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's string, which lives as long as the object.
    Some(unsafe { CStr::from_ptr(object.dli_fname) })
}

/// A loaded library by soname. The reference keeps it loaded on purpose: an original must not
/// vanish while its wrapper exists.
pub(crate) fn loaded(soname: &CStr) -> Option<*mut c_void> {
    // For an unknown name, the linker searches directories. The watcher may be under a filter that
    // is not known yet.
    let must_not_look = !seccomp::may_call() || thread_state::current().is_watcher.get();
    if must_not_look && !objects().iter().any(|object| file_name(object).starts_with(file_name(soname))) {
        return None;
    }
    let name = OsStr::from_bytes(soname.to_bytes_with_nul());
    // SAFETY: RTLD_NOLOAD loads nothing and runs no constructor.
    let library = in_query(|| unsafe { Library::open(Some(name), libc::RTLD_NOLOAD | libc::RTLD_LAZY) });
    library.ok().map(Library::into_raw)
}

/// Gives back a reference that [`loaded`] took.
pub(crate) fn release(library: *mut c_void) {
    // SAFETY: the handle of a reference that nothing else uses.
    drop(unsafe { Library::from_raw(library) });
}

/// A loaded library by a path that the user has given. The linker opens a path that it does not
/// know, and blocks if that is a FIFO. So it gets the path under which the library is loaded. Only
/// another name of a regular file is left to it.
pub(crate) fn loaded_from(path: &CStr) -> Option<*mut c_void> {
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

/// The part of a path after the last slash.
pub(crate) fn file_name(path: &CStr) -> &[u8] {
    path.to_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Paths of all loaded objects, as they were opened. The program's path is empty. dl_iterate_phdr
/// is used because dlopen would block behind another library's constructor, and /proc/self/maps
/// shows the target of a soname's link.
pub(crate) fn objects() -> Vec<CString> {
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _: usize, paths: *mut c_void) -> c_int {
        // SAFETY: the linker's own structure and string, and the vector that was passed below.
        unsafe { (*paths.cast::<Vec<CString>>()).push(CStr::from_ptr((*info).dlpi_name).to_owned()) };
        0
    }
    let mut paths = Vec::new();
    // SAFETY: the callback receives the vector that it expects, and does not keep it.
    in_linker(|| unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut paths).cast()) });
    paths
}

/// Calls the C library's dlsym. `Library::get` would call the one that the hook exports.
pub(crate) fn look_up(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let dlsym = libc_dlsym();
    // SAFETY: the handle comes from the linker, and the name is a C string.
    in_query(|| unsafe { dlsym(handle, name.as_ptr()) })
}

/// The C library's own dlsym. It is read from the symbol table, because every name by which the
/// linker could be asked is interposed.
fn libc_dlsym() -> Dlsym {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    cached(&REAL, || exported_by_libc(c"dlsym"))
}

/// The dlopen that the host's call would have reached without the hook.
pub(crate) fn next_dlopen() -> Dlsym {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    cached(&NEXT, || look_up(libc::RTLD_NEXT, c"dlopen"))
}

/// The dlvsym that the host's call would have reached without the hook.
pub(crate) fn next_dlvsym() -> Dlsym {
    static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    cached(&NEXT, || look_up(libc::RTLD_NEXT, c"dlvsym"))
}

/// The dlsym that the host's call would have reached without the hook: the C library's, or that of
/// another preloaded library that comes later.
#[inline]
pub(crate) fn next_dlsym() -> Dlsym {
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

/// Replaces dlsym on a system whose C library has none that is known. Every lookup fails.
unsafe extern "C" fn nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    std::ptr::null_mut()
}

/// Discards the error message that a failed lookup of the hook would leave for the host. No code of
/// the host runs on the watcher, and the C library may read the environment to translate a message.
pub(crate) fn forget_linker_error() {
    if !thread_state::current().is_watcher.get() {
        // SAFETY: it takes no arguments; the returned string is not used.
        unsafe { libc::dlerror() };
    }
}

/// A function of the C library, or of libdl, which was separate until glibc 2.34. Null if there is
/// none.
pub(crate) fn exported_by_libc(name: &CStr) -> *mut c_void {
    let in_file = |file: &[u8]| {
        // SAFETY: both libraries are at the beginning of the linker's list, which does not change.
        let mut objects = unsafe { elf::objects() }.filter(|object| object.soname() == file);
        objects.find_map(|object| object.exported(name))
    };
    let found = in_file(b"libc.so.6").or_else(|| in_file(b"libdl.so.2"));
    found.map_or(std::ptr::null_mut(), |symbol| symbol.address as *mut c_void)
}

/// Paths of all loaded objects.
pub(crate) fn libraries() -> Vec<String> {
    objects().iter().map(|path| path.to_string_lossy().into_owned()).collect()
}

/// Index of the family plus one, 0 while no runtime is loaded.
static DEVICE_FAMILY: AtomicUsize = AtomicUsize::new(0);

/// The device family whose runtime is loaded. Determined once, because a name such as
/// `mcclAllReduce` must not change its meaning.
pub(crate) fn device_family() -> Option<&'static Family> {
    if DEVICE_FAMILY.load(Ordering::Relaxed) == 0 {
        let found = FAMILIES.iter().position(|family| family.is_loaded(|soname| loaded(soname).is_some()))?;
        DEVICE_FAMILY.store(found + 1, Ordering::Relaxed);
    }
    FAMILIES.get(DEVICE_FAMILY.load(Ordering::Relaxed) - 1)
}

/// The process's device family, or all families while no runtime is loaded.
pub(crate) fn candidate_families() -> impl Iterator<Item = &'static Family> {
    let current = device_family();
    FAMILIES.iter().filter(move |family| current.is_none_or(|current| std::ptr::eq(current, *family)))
}

static LISTENS_FOR_LIBRARIES: AtomicBool = AtomicBool::new(false);

/// Whether the hook learns of libraries that are loaded later. It does not when that is turned off,
/// when the system forbids a change of code, under a debugger, and in some forked children.
pub(crate) fn listens_for_libraries() -> bool {
    LISTENS_FOR_LIBRARIES.load(Ordering::Relaxed) && !has_stopped_listening()
}

/// Sets whether the hook learns of them.
pub(crate) fn set_listening_for_libraries(listens: bool) {
    LISTENS_FOR_LIBRARIES.store(listens, Ordering::Relaxed);
}

static DEAF: AtomicBool = AtomicBool::new(false);

/// Whether it has stopped for good.
pub(crate) fn has_stopped_listening() -> bool {
    DEAF.load(Ordering::Relaxed)
}

/// Stops it for good.
pub(crate) fn stop_listening() {
    DEAF.store(true, Ordering::Relaxed);
}
