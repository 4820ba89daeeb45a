//! The one way into the hook: a macro that makes a row of the function table, its wrappers and its exported symbol, and the
//! path that every hooked call takes.
//!
//! What a row adds is called before the real function and its answer after it. Whatever happens there, the real function is
//! called with the caller's arguments, and its result and errno are what the caller gets.

use std::{
    ffi::{CStr, c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::Ordering,
};

use xpu_timer_proto::ring::header;

use crate::{
    cancellation::shielded,
    cost::Cost,
    original::Function,
    recorder::Recorder,
    start, sys,
    thread_state::{self, IN_HOOK, ThreadState},
};

/// Where a call came in.
#[derive(Clone, Copy)]
pub struct Site {
    /// The row.
    pub function: &'static Function,
    /// The slot of its original that is about to be called.
    pub slot: usize,
    /// The `IN_*` bits of the thread before the call.
    pub inside: u8,
}

impl Site {
    /// A function of the library that the original is in, by the first of `names` that it has; see [`Function::companion`].
    #[inline]
    pub fn companion(&self, number: usize, names: &'static [&'static CStr]) -> Option<*mut c_void> {
        self.function.companion(self.slot, number, names)
    }
}

/// What a row does when the real function has returned.
pub trait After {
    /// `result` is what the real function answered.
    fn after(self, recorder: &'static Recorder, result: c_int);

    /// Whether there is anything to do. Most launches have nothing.
    #[inline]
    fn matters(&self) -> bool {
        true
    }
}

impl After for () {
    fn after(self, _: &'static Recorder, _: c_int) {}

    #[inline]
    fn matters(&self) -> bool {
        false
    }
}

/// Restores the thread's marks also when the host's thread is cancelled inside the real call and unwinds through here.
struct Leave(u8);

impl Drop for Leave {
    #[inline]
    fn drop(&mut self) {
        thread_state::current().inside.set(self.0);
    }
}

/// Runs a part of the hook; a panic in it is counted and ends there.
#[inline]
pub fn guarded<R>(part: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(part)).map_err(panicked).ok()
}

#[cold]
fn panicked(payload: Box<dyn std::any::Any + Send>) {
    // Dropping a payload can panic again.
    std::mem::forget(payload);
    if let Some(recorder) = start::running() {
        recorder.count(header::PANICS);
    }
}

/// The path of a hooked call. `bit` marks the layer; a thread that is inside one of the layers in `bypass` goes straight through.
#[inline(always)]
pub fn around<T: After>(
    (function, slot): (&'static Function, usize),
    (bit, bypass): (u8, u8),
    before: impl FnOnce(&'static Recorder, Site) -> T,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let thread = thread_state::current();
    let inside = thread.inside.get();
    if inside & bypass != 0 {
        return real();
    }
    let errno = thread.errno();
    let saved = errno.get();
    thread.inside.set(inside | bit | IN_HOOK);
    let leave = Leave(inside);
    let mut cost = Cost::begin(thread, bit);
    let token = shielded(|| {
        guarded(|| {
            let recorder = start::recorder()?;
            called(recorder, thread, function);
            Some((recorder, before(recorder, Site { function, slot, inside })))
        })
    })
    .flatten();
    thread.inside.set(inside | bit);
    errno.set(saved);
    cost.pause();
    let result = real();
    cost.resume();
    if let Some((recorder, token)) = token
        && (token.matters() || cost.is_measured())
    {
        let saved = errno.get();
        thread.inside.set(inside | bit | IN_HOOK);
        shielded(|| {
            guarded(|| {
                // In a child that was forked inside the real call, what was begun belongs to the parent.
                if start::running().is_some_and(|now| std::ptr::eq(now, recorder)) {
                    token.after(recorder, result);
                    cost.end(thread, recorder, bit);
                }
            })
        });
        errno.set(saved);
    }
    drop(leave);
    result
}

/// The path of a look-up such as cuGetProcAddress, which starts nothing.
pub fn around_lookup(function: &'static Function, after: impl FnOnce(), real: impl FnOnce() -> c_int) -> c_int {
    let result = real();
    if result == 0 && !start::disabled() {
        let errno = sys::errno();
        let saved = errno.get();
        guarded(|| {
            if let Some(recorder) = start::running() {
                called(recorder, thread_state::current(), function);
            }
            after();
        });
        errno.set(saved);
    }
    result
}

#[inline(always)]
fn called(recorder: &'static Recorder, thread: &ThreadState, function: &'static Function) {
    recorder.called(thread, function.coverage.load(Ordering::Relaxed) as usize);
    if recorder.inject.load(Ordering::Relaxed) {
        crate::inject::maybe_panic(function);
    }
}

/// Makes hooked functions from rows:
///
/// `name | name of another family(argument: type, …) => |recorder, site| what to do before;`
///
/// Names in one row are functions of the same type that mean the same. `missing` is what a caller gets when the original is not
/// there. The expression after `=>` answers an [`After`]. `FUNCTIONS` lists all names.
macro_rules! hooked {
    (library $library:ident, mark $bit:expr, bypass $bypass:expr, missing $missing:expr;
     $($name:ident $(| $other:ident)* ($($arguments:tt)*) => $before:expr;)*) => {
        $(
            $crate::hooked::hooked!(@names $library, $bit, $bypass, $missing, [$name $($other)*], ($($arguments)*), $before);
        )*

        /// The rows of this table.
        pub static FUNCTIONS: &[&$crate::original::Function] = &[$(&$name::FUNCTION, $(&$other::FUNCTION,)*)*];
    };
    (@names $library:ident, $bit:expr, $bypass:expr, $missing:expr, [$($name:ident)*], $arguments:tt, $before:expr) => {
        $($crate::hooked::hooked!(@row $library, $bit, $bypass, $missing, $name, $arguments, $before);)*
    };
    (@row $library:ident, $bit:expr, $bypass:expr, $missing:expr, $name:ident, ($($arg:ident: $type:ty),* $(,)?),
     $before:expr) => {
            #[allow(non_snake_case, missing_docs)]
            pub mod $name {
                use super::*;

                pub static FUNCTION: $crate::original::Function = $crate::original::Function::new(
                    match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => unreachable!(),
                    },
                    xpu_timer_proto::family::Library::$library,
                    [
                        $crate::original::Wrapper($name as *const ()),
                        $crate::original::Wrapper(wrapper::<1> as *const ()),
                        $crate::original::Wrapper(wrapper::<2> as *const ()),
                        $crate::original::Wrapper(wrapper::<3> as *const ()),
                    ],
                );

                type Real = unsafe extern "C-unwind" fn($($type),*) -> std::ffi::c_int;

                #[inline]
                unsafe extern "C-unwind" fn wrapper<const SLOT: usize>($($arg: $type),*) -> std::ffi::c_int {
                    let real = FUNCTION.real(SLOT);
                    if real.is_null() {
                        return $missing;
                    }
                    // SAFETY: the address of the original of this row, whose type is the library's public ABI.
                    let real = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Real>(real) };
                    let call = || {
                        // SAFETY: the caller's own arguments.
                        unsafe { real($($arg),*) }
                    };
                    $crate::hooked::around((&FUNCTION, SLOT), ($bit, $bypass), $before, call)
                }

                #[cfg_attr(not(test), unsafe(no_mangle))]
                pub unsafe extern "C-unwind" fn $name($($arg: $type),*) -> std::ffi::c_int {
                    // SAFETY: the caller's own arguments.
                    unsafe { wrapper::<0>($($arg),*) }
                }
            }
    };
}
pub(crate) use hooked;
