//! The C functions of the interpreter in this process, found at run time: the hook links no
//! libpython, and one library serves all versions.

use std::{
    ffi::{CStr, c_char, c_int, c_long, c_void},
    sync::atomic::{AtomicU32, Ordering},
};

use crate::runtime::{
    lifecycle::panics::guarded,
    linker::elf::{self, Object},
    os::{leaked_once::LeakedOnce, sections::in_linker},
};

/// An object of the interpreter.
#[repr(C)]
pub(crate) struct PyObject {
    _private: [u8; 0],
}

/// A borrowed or new reference; null for none.
pub(crate) type Reference = *mut PyObject;

/// A native function as the interpreter calls it: itself, its arguments and their number.
pub(crate) type Native = unsafe extern "C" fn(Reference, *const Reference, isize) -> Reference;

/// A native function whose arguments are passed on: an object that it was made with, the tuple of
/// the arguments, and the dictionary of those with names, which may be null.
pub(crate) type PassesOn = unsafe extern "C" fn(Reference, Reference, Reference) -> Reference;

/// `PyMethodDef`, whose layout is part of the stable ABI.
#[repr(C)]
pub(crate) struct Method {
    pub name: *const c_char,
    pub function: Native,
    pub flags: c_int,
    pub doc: *const c_char,
}

// SAFETY: it is constant, and its strings are static.
unsafe impl Sync for Method {}

impl Method {
    /// A function that takes no names of arguments.
    pub(crate) const fn new(name: &'static CStr, function: Native) -> Self {
        Method { name: name.as_ptr(), function, flags: FASTCALL, doc: std::ptr::null() }
    }

    /// A function that takes any arguments.
    pub(crate) const fn passes_on(name: &'static CStr, function: PassesOn) -> Self {
        // SAFETY: the flags tell the interpreter which type the function has.
        let function = unsafe { std::mem::transmute::<PassesOn, Native>(function) };
        Method { flags: VARARGS | KEYWORDS, ..Method::new(name, function) }
    }
}

/// `METH_FASTCALL`: a vector of arguments without keywords.
const FASTCALL: c_int = 0x80;
/// `METH_VARARGS` and `METH_KEYWORDS`.
const VARARGS: c_int = 1;
const KEYWORDS: c_int = 2;
/// `Py_TPFLAGS_TYPE_SUBCLASS`.
const IS_TYPE: std::ffi::c_ulong = 1 << 31;
/// Offset of `ceval.pending.finishing` in the `_PyRuntime` of CPython 3.8.
const FINISHING: usize = 600;

/// The interpreter of this process, once it was found.
pub(crate) static API: LeakedOnce<Api> = LeakedOnce::new();

macro_rules! api {
    ($($(#[$attribute:meta])* $field:ident = $name:literal: $type:ty;)*) => {
        /// The functions.
        pub(crate) struct Api {
            $($(#[$attribute])* pub(crate) $field: $type,)*
            /// Its code checks assertions.
            pub(crate) has_assertions: bool,
            /// Address of its variables, if it exports them.
            runtime: Option<usize>,
        }

        impl Api {
            /// The functions of the interpreter that `object` exports. `None` if one is missing.
            fn of(object: &Object) -> Option<Self> {
                Some(Api {
                    $($field: {
                        let found = object.exported($name)?;
                        // SAFETY: the function of this name has had this type since Python 3.8.
                        unsafe { std::mem::transmute::<*mut c_void, $type>(found.address as *mut c_void) }
                    },)*
                    has_assertions: object.imported().any(|(name, _)| name == c"__assert_fail"),
                    runtime: object.variable(c"_PyRuntime").map(|found| found.address),
                })
            }
        }
    };
}

api! {
    version = c"Py_GetVersion": unsafe extern "C" fn() -> *const c_char;
    is_initialized = c"Py_IsInitialized": unsafe extern "C" fn() -> c_int;
    add_pending = c"Py_AddPendingCall": unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
    system = c"PySys_GetObject": unsafe extern "C" fn(*const c_char) -> Reference;
    import = c"PyImport_ImportModule": unsafe extern "C" fn(*const c_char) -> Reference;
    modules = c"PyImport_GetModuleDict": unsafe extern "C" fn() -> Reference;
    attribute = c"PyObject_GetAttrString": unsafe extern "C" fn(Reference, *const c_char) -> Reference;
    item = c"PyMapping_GetItemString": unsafe extern "C" fn(Reference, *const c_char) -> Reference;
    type_of = c"PyObject_Type": unsafe extern "C" fn(Reference) -> Reference;
    type_flags = c"PyType_GetFlags": unsafe extern "C" fn(Reference) -> std::ffi::c_ulong;
    tuple_size = c"PyTuple_Size": unsafe extern "C" fn(Reference) -> isize;
    tuple_item = c"PyTuple_GetItem": unsafe extern "C" fn(Reference, isize) -> Reference;
    text = c"PyUnicode_AsUTF8": unsafe extern "C" fn(Reference) -> *const c_char;
    to_long = c"PyLong_AsLong": unsafe extern "C" fn(Reference) -> c_long;
    from_long = c"PyLong_FromLong": unsafe extern "C" fn(c_long) -> Reference;
    from_text = c"PyUnicode_FromString": unsafe extern "C" fn(*const c_char) -> Reference;
    set_system = c"PySys_SetObject": unsafe extern "C" fn(*const c_char, Reference) -> c_int;
    set_attribute = c"PyObject_SetAttrString": unsafe extern "C" fn(Reference, *const c_char, Reference) -> c_int;
    to_text = c"PyObject_Str": unsafe extern "C" fn(Reference) -> Reference;
    pass_on = c"PyObject_Call": unsafe extern "C" fn(Reference, Reference, Reference) -> Reference;
    call = c"PyObject_CallFunctionObjArgs": unsafe extern "C" fn(Reference, ...) -> Reference;
    build = c"Py_BuildValue": unsafe extern "C" fn(*const c_char, ...) -> Reference;
    native = c"PyCFunction_NewEx": unsafe extern "C" fn(*const Method, Reference, Reference) -> Reference;
    release = c"Py_DecRef": unsafe extern "C" fn(Reference);
    keep = c"Py_IncRef": unsafe extern "C" fn(Reference);
    occurred = c"PyErr_Occurred": unsafe extern "C" fn() -> Reference;
    clear = c"PyErr_Clear": unsafe extern "C" fn();
    make_ready = c"PyType_Ready": unsafe extern "C" fn(Reference) -> c_int;
    set_item = c"PyDict_SetItemString": unsafe extern "C" fn(Reference, *const c_char, Reference) -> c_int;
}

/// A reference that is owned, and not null.
pub(crate) struct Owned(pub Reference, &'static Api);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: owned, and the thread holds the GIL, as everywhere in this file.
        unsafe { (self.1.release)(self.0) }
    }
}

impl Owned {
    /// Gives the reference away: it is never released.
    pub(crate) fn leak(self) -> Reference {
        let reference = self.0;
        std::mem::forget(self);
        reference
    }
}

/// The interpreter of this process, if an object exports its functions. An interpreter whose
/// symbols are local to its library is found too.
pub(crate) fn find() -> Option<Api> {
    unsafe extern "C" fn search(_: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
        // SAFETY: the place that was passed below.
        unsafe { *found.cast::<Option<Api>>() = guarded(find_in_list).flatten() };
        1
    }
    let mut found = None;
    // No library is unloaded during the callback. The program is always there, so it is called.
    // SAFETY: the callback gets the place that it expects, and does not keep it.
    in_linker(|| unsafe { libc::dl_iterate_phdr(Some(search), (&raw mut found).cast()) });
    found
}

fn find_in_list() -> Option<Api> {
    // SAFETY: nothing is unloaded meanwhile.
    let mut pythons = unsafe { elf::objects() }.filter(|object| object.exported(c"Py_AddPendingCall").is_some());
    pythons.find_map(|object| Api::of(&object))
}

/// The functions below need the GIL. They leave no exception behind, and return `None` instead.
impl Api {
    /// Its version: `(3, 12)`.
    pub(crate) fn version(&self) -> (u32, u32) {
        // SAFETY: a static string, which needs no GIL.
        let text = unsafe { CStr::from_ptr((self.version)()) }.to_string_lossy();
        let mut parts = text.split(|letter: char| !letter.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }

    /// Whether the interpreter runs and accepts pending calls. Needs no GIL. CPython 3.8 accepts
    /// none once its end has begun, before it calls the exit handlers, and prints an error.
    pub(crate) fn accepts_calls(&self) -> bool {
        let is_finishing = || {
            let address = self.runtime.filter(|_| self.version() == (3, 8))? + FINISHING;
            // SAFETY: an `int` among the variables of this version.
            Some(unsafe { AtomicU32::from_ptr(address as *mut u32) }.load(Ordering::SeqCst) == 1)
        };
        // SAFETY: may be called at any time.
        unsafe { (self.is_initialized)() != 0 && is_finishing() != Some(true) }
    }

    fn owned(&'static self, reference: Reference) -> Option<Owned> {
        if reference.is_null() {
            // SAFETY: the thread holds the GIL.
            unsafe { (self.clear)() };
            return None;
        }
        Some(Owned(reference, self))
    }

    /// A borrowed reference as an owned one.
    pub(crate) fn kept(&'static self, reference: Reference) -> Option<Owned> {
        if !reference.is_null() {
            // SAFETY: a valid reference.
            unsafe { (self.keep)(reference) };
        }
        self.owned(reference)
    }

    /// An attribute.
    pub(crate) fn attribute(&'static self, of: &Owned, name: &CStr) -> Option<Owned> {
        // SAFETY: a valid reference and a C string.
        self.owned(unsafe { (self.attribute)(of.0, name.as_ptr()) })
    }

    /// The value of a key of a dictionary or a mapping.
    pub(crate) fn item(&'static self, of: &Owned, key: &CStr) -> Option<Owned> {
        // SAFETY: a valid reference and a C string.
        self.owned(unsafe { (self.item)(of.0, key.as_ptr()) })
    }

    /// An attribute that is a number.
    pub(crate) fn number(&'static self, of: &Owned, name: &CStr) -> Option<c_long> {
        self.to_number(&self.attribute(of, name)?)
    }

    /// A number.
    pub(crate) fn to_number(&'static self, value: &Owned) -> Option<c_long> {
        // SAFETY: a valid reference.
        let number = unsafe { (self.to_long)(value.0) };
        (number != -1 || !self.failed()).then_some(number)
    }

    /// The number of a key of a dictionary that is a borrowed argument.
    pub(crate) fn number_in(&'static self, dictionary: Reference, key: &CStr) -> Option<c_long> {
        let value = self.item(&self.kept(dictionary)?, key)?;
        self.to_number(&value)
    }

    fn failed(&self) -> bool {
        // SAFETY: the thread holds the GIL.
        let failed = unsafe { !(self.occurred)().is_null() };
        if failed {
            // SAFETY: the thread holds the GIL.
            unsafe { (self.clear)() };
        }
        failed
    }

    /// Whether the thread handles an exception, which must not be disturbed.
    pub(crate) fn has_exception(&self) -> bool {
        // SAFETY: the thread holds the GIL.
        unsafe { !(self.occurred)().is_null() }
    }

    /// A text that is a borrowed argument.
    pub(crate) fn text_of(&'static self, value: Reference) -> Option<&'static str> {
        // SAFETY: a valid reference. The text lives as long as the object, which the caller of the
        // caller owns.
        let text = unsafe { (self.text)(value) };
        if text.is_null() {
            self.failed();
            return None;
        }
        // SAFETY: a C string of the object, not null.
        unsafe { CStr::from_ptr(text) }.to_str().ok()
    }

    /// A loaded module. Nothing is imported.
    pub(crate) fn loaded_module(&'static self, name: &CStr) -> Option<Owned> {
        // SAFETY: the thread holds the GIL.
        let modules = self.kept(unsafe { (self.modules)() })?;
        self.item(&modules, name)
    }

    /// A module of the interpreter itself.
    pub(crate) fn builtin_module(&'static self, name: &CStr) -> Option<Owned> {
        // SAFETY: the thread holds the GIL, and the name is a C string.
        self.owned(unsafe { (self.import)(name.as_ptr()) })
    }

    /// An object of `sys`.
    pub(crate) fn system(&'static self, name: &CStr) -> Option<Owned> {
        // SAFETY: the thread holds the GIL, and the name is a C string.
        self.kept(unsafe { (self.system)(name.as_ptr()) })
    }

    /// A reference to `None`, which is immortal from Python 3.12 on.
    pub(crate) fn none(&self) -> Reference {
        // SAFETY: the thread holds the GIL, and an empty format takes no arguments.
        unsafe { (self.build)(c"".as_ptr()) }
    }

    /// A number as an object.
    pub(crate) fn of_number(&'static self, value: c_long) -> Option<Owned> {
        // SAFETY: the thread holds the GIL.
        self.owned(unsafe { (self.from_long)(value) })
    }

    /// A text as an object.
    pub(crate) fn of_text(&'static self, value: &CStr) -> Option<Owned> {
        // SAFETY: the thread holds the GIL, and the value is a C string.
        self.owned(unsafe { (self.from_text)(value.as_ptr()) })
    }

    /// A native function as an object. `method` is used as long as the interpreter runs.
    pub(crate) fn of_native(&'static self, method: &'static Method) -> Option<Owned> {
        // SAFETY: the definition is static, and the function neither has a self nor a module.
        self.owned(unsafe { (self.native)(method, std::ptr::null_mut(), std::ptr::null_mut()) })
    }

    /// A native function that is made with an object, and says that it is of a module. `method` is
    /// used as long as the interpreter runs.
    pub(crate) fn of_native_with(
        &'static self,
        method: &'static Method,
        with: &Owned,
        module: &Owned,
    ) -> Option<Owned> {
        // SAFETY: the definition is static, and both references are valid.
        self.owned(unsafe { (self.native)(method, with.0, module.0) })
    }

    /// Sets an object of `sys`. Returns whether it is set.
    pub(crate) fn set_system(&self, name: &CStr, value: &Owned) -> bool {
        // SAFETY: a C string and a valid reference.
        let is_set = unsafe { (self.set_system)(name.as_ptr(), value.0) == 0 };
        is_set || {
            self.failed();
            false
        }
    }

    /// Sets an attribute. Returns whether it is set.
    pub(crate) fn set_attribute(&self, of: &Owned, name: &CStr, value: &Owned) -> bool {
        // SAFETY: valid references and a C string.
        let is_set = unsafe { (self.set_attribute)(of.0, name.as_ptr(), value.0) == 0 };
        is_set || {
            self.failed();
            false
        }
    }

    /// `str(value)`.
    pub(crate) fn to_text(&'static self, value: &Owned) -> Option<Owned> {
        // SAFETY: a valid reference.
        self.owned(unsafe { (self.to_text)(value.0) })
    }

    /// Calls a method with up to three arguments.
    pub(crate) fn call(&'static self, of: &Owned, name: &CStr, arguments: &[&Owned]) -> Option<Owned> {
        let method = self.attribute(of, name)?;
        let argument = |index: usize| arguments.get(index).map_or(std::ptr::null_mut(), |argument| argument.0);
        let end: Reference = std::ptr::null_mut();
        // SAFETY: the list of arguments ends with a null pointer.
        self.owned(unsafe { (self.call)(method.0, argument(0), argument(1), argument(2), end) })
    }

    /// The class of an object.
    pub(crate) fn class_of(&'static self, value: &Owned) -> Option<Owned> {
        // SAFETY: a valid reference.
        self.owned(unsafe { (self.type_of)(value.0) })
    }

    /// Makes a class in static memory ready for use. Returns whether it is.
    pub(crate) fn make_ready(&self, class: Reference) -> bool {
        // SAFETY: a class whose words are set, and the thread holds the GIL.
        let is_ready = unsafe { (self.make_ready)(class) == 0 };
        is_ready || {
            self.failed();
            false
        }
    }

    /// Sets an item of a dictionary. Returns whether it is set.
    pub(crate) fn set_item(&self, dictionary: Reference, key: &CStr, value: &Owned) -> bool {
        // SAFETY: valid references and a C string.
        let is_set = unsafe { (self.set_item)(dictionary, key.as_ptr(), value.0) == 0 };
        is_set || {
            self.failed();
            false
        }
    }

    /// Whether it is a class.
    pub(crate) fn is_class(&'static self, value: &Owned) -> bool {
        // SAFETY: a valid reference.
        self.class_of(value).is_some_and(|class| unsafe { (self.type_flags)(class.0) } & IS_TYPE != 0)
    }

    /// Whether the class of an object has this name.
    pub(crate) fn is_of_class(&'static self, value: &Owned, wanted: &str) -> bool {
        let name = self.class_of(value).and_then(|class| self.attribute(&class, c"__name__"));
        name.is_some_and(|name| self.text_of(name.0) == Some(wanted))
    }

    /// Name of the class of an object.
    pub(crate) fn class_name(&'static self, value: &Owned) -> Option<String> {
        let name = self.attribute(&self.class_of(value)?, c"__name__")?;
        self.text_of(name.0).map(str::to_string)
    }

    /// The items of a tuple.
    pub(crate) fn items(&'static self, tuple: &Owned) -> impl Iterator<Item = Owned> {
        // SAFETY: a valid reference; -1 if it is not a tuple.
        let count = unsafe { (self.tuple_size)(tuple.0) };
        self.failed();
        let tuple = tuple.0;
        // SAFETY: a tuple that the caller owns, and an index of it.
        (0..count).filter_map(move |index| self.kept(unsafe { (self.tuple_item)(tuple, index) }))
    }
}
