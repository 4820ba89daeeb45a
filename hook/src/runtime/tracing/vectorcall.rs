//! Sees the calls of chosen functions on CPython 3.8 to 3.11, which have no `sys.monitoring`. Each
//! function object has a pointer through which the interpreter calls it. The hook replaces the
//! pointer of the traced functions alone, so other functions cost nothing more, all threads are
//! seen, and neither `sys.setprofile` nor `sys.settrace` is touched.
//!
//! CPython 3.11 executes a call from Python to Python without that pointer, unless the class of the
//! callee is another one than `function`. There a traced function gets a subclass of `function`
//! that differs in nothing else.
//!
//! Nothing is touched if the interpreter says that its objects have another layout.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::runtime::tracing::{
    callbacks::{self, in_callback},
    interpreter::{API, Api, Method, Owned, Reference},
};

/// How the interpreter calls an object: the object, its arguments, their number, and the names of
/// the last ones. A thread that ends within the call unwinds through it.
pub(crate) type Vectorcall = unsafe extern "C-unwind" fn(Reference, *const Reference, usize, Reference) -> Reference;

/// Minor version of CPython, size of a function object, and offset of its pointer.
const LAYOUTS: [(u32, usize, usize); 4] = [(8, 120, 112), (9, 120, 112), (10, 128, 120), (11, 136, 120)];
/// The version that calls functions without their pointer.
const INLINES: u32 = 11;
/// Offset of the `uint32_t` by which CPython 3.11 recognizes an unchanged function.
const VERSION: usize = 128;

/// Words of an object, and of a class, `PyTypeObject`.
const REFERENCES: usize = 0;
const CLASS: usize = 1;
const NAME: usize = 3;
const SIZE: usize = 4;
const DEALLOCATE: usize = 6;
const OFFSET: usize = 7;
const CALL: usize = 16;
const FLAGS: usize = 21;
const TRAVERSE: usize = 23;
const METHODS: usize = 29;
const BASE: usize = 32;
const DICTIONARY: usize = 33;
const GET: usize = 34;
/// Their number on CPython 3.11.
const CLASS_WORDS: usize = 51;

/// Flags of a class whose instances have such a pointer, are collected, and become methods when
/// they are found in a class.
const HAS_VECTORCALL: usize = 1 << 11;
const HAS_GC: usize = 1 << 14;
const IS_METHOD: usize = 1 << 17;

/// The pointer that all functions have which nobody has changed.
static ORIGINAL: AtomicUsize = AtomicUsize::new(0);

/// The functions of this interpreter.
pub(crate) struct Functions {
    /// Offset of the pointer.
    pointer: usize,
    /// The class `function`.
    class: usize,
    /// The class that a traced function gets. The same before CPython 3.11.
    traced: usize,
    inlines: bool,
}

/// Offset of the pointer, if this is the layout of this version: the sizes of a function that its
/// class tells and has, the offset, and the flags of the class.
fn known_pointer(minor: u32, sizes: [usize; 2], offset: usize, flags: usize) -> Option<usize> {
    let known = LAYOUTS.iter().find(|layout| layout.0 == minor)?;
    (sizes == [known.1; 2] && offset == known.2 && flags & HAS_VECTORCALL != 0).then_some(offset)
}

/// The word of an object.
///
/// # Safety
/// The object has that word.
unsafe fn word(object: usize, index: usize) -> &'static AtomicUsize {
    // SAFETY: the caller's promise. Objects are aligned, and the thread holds the GIL.
    unsafe { AtomicUsize::from_ptr((object as *mut usize).add(index)) }
}

impl Functions {
    /// `sample` is a function.
    ///
    /// # Errors
    /// This interpreter is another one than the layouts describe; the end of a sentence.
    pub(crate) fn new(api: &'static Api, sample: &Owned) -> Result<Self, &'static str> {
        const OTHER: &str = "the objects of this CPython have an unexpected layout";
        let (_, minor) = api.version();
        let class = api.class_of(sample).ok_or(OTHER)?;
        let basic_size = api.number(&class, c"__basicsize__").ok_or(OTHER)?;
        let (sample, address) = (sample.0 as usize, class.0 as usize);
        // SAFETY: every version has these words of an object and a class.
        let of = |object, index| unsafe { word(object, index) }.load(Ordering::Relaxed);
        let sizes = [basic_size as usize, of(address, SIZE)];
        let pointer = known_pointer(minor, sizes, of(address, OFFSET), of(address, FLAGS)).ok_or(OTHER)?;
        if of(sample, CLASS) != address {
            return Err(OTHER);
        }
        let original = of(sample, pointer / size_of::<usize>());
        if original == 0 {
            return Err(OTHER);
        }
        ORIGINAL.store(original, Ordering::Release);
        let inlines = minor == INLINES;
        if inlines && api.has_assertions {
            return Err("this CPython 3.11 was built with assertions");
        }
        let traced = if inlines { subclass(api, &class, pointer).ok_or(OTHER)? } else { address };
        // The class lives as long as the interpreter.
        class.leak();
        Ok(Functions { pointer, class: address, traced, inlines })
    }

    /// Whether it is a function that is called in the usual way, or traced already.
    pub(crate) fn can_trace(&self, function: &Owned) -> bool {
        let function = function.0 as usize;
        // SAFETY: every object has a class.
        let class = unsafe { word(function, CLASS) }.load(Ordering::Relaxed);
        (class == self.class || class == self.traced) && {
            let called = self.called_through(function).load(Ordering::Relaxed);
            called == ORIGINAL.load(Ordering::Relaxed) || called == traced_call as Vectorcall as usize
        }
    }

    fn called_through(&self, function: usize) -> &'static AtomicUsize {
        // SAFETY: its class was checked, and so it has this word.
        unsafe { word(function, self.pointer / size_of::<usize>()) }
    }

    /// Lets the interpreter call a function through `call`, which calls [`original`]. The function
    /// must be one that can be traced. Its reference is kept forever.
    pub(crate) fn replace(&self, function: Owned, call: Vectorcall) {
        let function = function.leak() as usize;
        self.called_through(function).store(call as usize, Ordering::Release);
        if self.inlines {
            // SAFETY: the function has these words, and the instances of both classes are equal.
            unsafe {
                // Instructions that were specialized for this function look for another version.
                AtomicU32::from_ptr((function + VERSION) as *mut u32).store(0, Ordering::Release);
                word(function, CLASS).store(self.traced, Ordering::Release);
            }
        }
    }

    /// Traces a function that can be traced.
    pub(crate) fn trace(&self, function: Owned) {
        self.replace(function, traced_call);
    }
}

/// Calls a function as if nothing was replaced.
///
/// # Safety
/// The arguments are those of the interpreter.
#[inline(always)]
pub(crate) unsafe fn original(
    function: Reference,
    arguments: *const Reference,
    count: usize,
    names: Reference,
) -> Reference {
    let original = ORIGINAL.load(Ordering::Relaxed);
    // SAFETY: the pointer of a function of this interpreter, which is set before any is replaced.
    let original = unsafe { std::mem::transmute::<usize, Vectorcall>(original) };
    // SAFETY: the caller's promise.
    unsafe { original(function, arguments, count, names) }
}

/// A call of a traced function. The reference of the caller or of the hook keeps it alive. No value
/// with a destructor may live here: see [`Vectorcall`].
unsafe extern "C-unwind" fn traced_call(
    function: Reference,
    arguments: *const Reference,
    count: usize,
    names: Reference,
) -> Reference {
    in_callback(|| callbacks::began(function));
    // SAFETY: called by the interpreter.
    let result = unsafe { original(function, arguments, count, names) };
    in_callback(|| callbacks::ended(function));
    result
}

/// The methods of the subclass. `pickle` and `copy` look for the exact class `function`, and else
/// ask the object: a text means that it is the object of this name in its module.
static PICKLED: [Method; 2] = [
    Method::new(c"__reduce__", reduce),
    // The end.
    Method { name: std::ptr::null(), ..Method::new(c"", reduce) },
];

unsafe extern "C" fn reduce(function: Reference, _: *const Reference, _: isize) -> Reference {
    let mut name = std::ptr::null_mut();
    in_callback(|| {
        if let Some(api) = API.get() {
            // SAFETY: the interpreter passes the object, and gets the exception if there is one.
            name = unsafe { (api.attribute)(function, c"__qualname__".as_ptr()) };
        }
    });
    name
}

/// A subclass of `function` with the same instances. `None` if the interpreter makes another one.
fn subclass(api: &'static Api, class: &Owned, pointer: usize) -> Option<usize> {
    let own_doc = api.item(&api.attribute(class, c"__dict__")?, c"__doc__")?;
    let mut words = Box::new([0usize; CLASS_WORDS]);
    words[REFERENCES] = 1;
    words[NAME] = c"function".as_ptr() as usize;
    words[OFFSET] = pointer;
    words[FLAGS] = HAS_VECTORCALL | IS_METHOD;
    words[METHODS] = (&raw const PICKLED) as usize;
    words[BASE] = class.0 as usize;
    // A class that was made ready is never freed.
    let traced = Box::leak(words).as_mut_ptr() as usize;
    if !api.make_ready(traced as Reference) {
        return None;
    }
    // SAFETY: both are classes.
    let of = |class: usize, index| unsafe { word(class, index) }.load(Ordering::Relaxed);
    let is_equal = [SIZE, DEALLOCATE, OFFSET, CALL, TRAVERSE, GET]
        .iter()
        .all(|index| of(traced, *index) == of(class.0 as usize, *index));
    let differing = of(traced, FLAGS) ^ of(class.0 as usize, FLAGS);
    let dictionary = of(traced, DICTIONARY) as Reference;
    // The class's own docstring, and the class that an instance reports.
    let is_set = api.set_item(dictionary, c"__doc__", &own_doc) && api.set_item(dictionary, c"__class__", class);
    (is_equal && is_set && differing & (HAS_VECTORCALL | HAS_GC | IS_METHOD) == 0).then_some(traced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_layout_is_refused() {
        assert_eq!(known_pointer(8, [120; 2], 112, HAS_VECTORCALL), Some(112));
        assert_eq!(known_pointer(11, [136; 2], 120, HAS_VECTORCALL | HAS_GC), Some(120));
        for (minor, sizes, offset, flags) in [
            (12, [144; 2], 128, HAS_VECTORCALL),
            (7, [120; 2], 112, HAS_VECTORCALL),
            (10, [120; 2], 112, HAS_VECTORCALL),
            // With `--with-trace-refs`, objects begin with two more words.
            (10, [144, 0], 128, HAS_VECTORCALL),
            (11, [136, 152], 120, HAS_VECTORCALL),
            (11, [136; 2], 0, HAS_VECTORCALL),
            (11, [136; 2], 120, HAS_GC),
        ] {
            assert_eq!(known_pointer(minor, sizes, offset, flags), None, "{minor} {sizes:?} {offset} {flags:x}");
        }
    }
}
