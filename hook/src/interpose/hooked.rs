//! The entry into the hook: the macro that turns a row of a table into a hooked function with its
//! wrappers and its exported symbol, and the path that every hooked call takes.
//!
//! A row supplies code that runs before the real function, and returns a token for the code that
//! runs after it. Even if that code fails, the real function is called with the caller's arguments,
//! and the caller gets its result and errno.

use std::{
    ffi::{CStr, c_int, c_void},
    sync::atomic::Ordering,
};

use crate::runtime::{
    lifecycle::{config, panics::guarded, start},
    linker::function::Function,
    os::{
        cancellation::CancellationGuard,
        thread_state::{self, IN_HOOK, ThreadState},
    },
    overhead::OverheadTimer,
    recorder::{self, Recorder},
};

/// Where a call entered.
#[derive(Clone, Copy)]
pub(crate) struct Site {
    /// The row.
    pub function: &'static Function,
    /// The slot of the original that will be called.
    pub slot: usize,
    /// The `IN_*` bits of the thread before the call.
    pub inside: u8,
}

impl Site {
    /// A function of the original's library: the first of `names` that the library has; see
    /// [`Function::companion`].
    #[inline]
    pub(crate) fn companion(&self, number: usize, names: &'static [&'static CStr]) -> Option<*mut c_void> {
        self.function.companion(self.slot, number, names)
    }
}

/// The code of a row that runs after the real function has returned.
pub(crate) trait AfterCall {
    /// `result` is the value that the real function returned.
    fn after(self, recorder: &'static Recorder, result: c_int);

    /// Whether there is anything to do. For most launches there is not.
    #[inline]
    fn has_work(&self) -> bool {
        true
    }
}

impl AfterCall for () {
    fn after(self, _: &'static Recorder, _: c_int) {}

    #[inline]
    fn has_work(&self) -> bool {
        false
    }
}

/// The state of a hooked call. Each row compiles its own copy of [`around`], so code that does not
/// depend on the row is here.
struct HookedCall {
    thread: &'static ThreadState,
    /// The thread's marks before the call.
    inside: u8,
    /// The mark of the layer.
    bit: u8,
    /// The caller's errno, later that of the real function.
    errno: c_int,
    cost: OverheadTimer,
    shield: CancellationGuard,
}

impl HookedCall {
    #[inline(always)]
    fn enter(thread: &'static ThreadState, bit: u8) -> Self {
        let inside = thread.inside.replace(thread.inside.get() | bit | IN_HOOK);
        let errno = thread.errno().get();
        let cost = OverheadTimer::begin(thread, bit);
        HookedCall { thread, inside, bit, errno, cost, shield: CancellationGuard::raised() }
    }

    #[inline(always)]
    fn before_the_real_call(&mut self) {
        self.shield.lower();
        self.thread.inside.set(self.inside | self.bit);
        self.thread.errno().set(self.errno);
        self.cost.pause();
    }

    #[inline(always)]
    fn after_the_real_call<T: AfterCall>(&mut self, token: Option<(&'static Recorder, T)>, result: c_int) {
        self.cost.resume();
        if let Some((recorder, token)) = token
            && (token.has_work() || self.cost.is_measured())
        {
            self.end(recorder, token, result);
        }
    }

    #[inline]
    fn end<T: AfterCall>(&mut self, recorder: &'static Recorder, token: T, result: c_int) {
        self.errno = self.thread.errno().get();
        self.thread.inside.set(self.inside | self.bit | IN_HOOK);
        self.shield = CancellationGuard::raised();
        guarded(|| {
            // In a child that was forked inside the real call, the operation belongs to the parent.
            if recorder::running().is_some_and(|now| std::ptr::eq(now, recorder)) {
                token.after(recorder, result);
                self.cost.end(self.thread, recorder, self.bit);
            }
        });
        self.shield.lower();
        self.thread.errno().set(self.errno);
    }
}

/// Restores the thread's marks, even if the host cancels the thread inside the real call and
/// unwinds through this frame.
impl Drop for HookedCall {
    #[inline]
    fn drop(&mut self) {
        self.thread.inside.set(self.inside);
    }
}

/// The path of a hooked call. `bit` marks the layer. A thread that is inside a layer of `bypass`
/// goes straight to the real function.
#[inline(always)]
pub(crate) fn around<T: AfterCall>(
    (function, slot): (&'static Function, usize),
    (bit, bypass): (u8, u8),
    before: impl FnOnce(&'static Recorder, Site) -> T,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let thread = thread_state::current();
    if thread.inside.get() & bypass != 0 {
        return real();
    }
    let mut passage = HookedCall::enter(thread, bit);
    let inside = passage.inside;
    let token = guarded(|| {
        let recorder = start::recorder()?;
        count_call(recorder, thread, function);
        Some((recorder, before(recorder, Site { function, slot, inside })))
    })
    .flatten();
    passage.before_the_real_call();
    let result = real();
    passage.after_the_real_call(token, result);
    result
}

/// The path of a lookup such as cuGetProcAddress, which does not start the hook.
pub(crate) fn around_lookup(function: &'static Function, after: impl FnOnce(), real: impl FnOnce() -> c_int) -> c_int {
    let result = real();
    if result == 0 && !config::disabled() {
        let errno = thread_state::errno();
        let saved = errno.get();
        guarded(|| {
            if let Some(recorder) = recorder::running() {
                count_call(recorder, thread_state::current(), function);
            }
            after();
        });
        errno.set(saved);
    }
    result
}

#[inline(always)]
fn count_call(recorder: &'static Recorder, thread: &ThreadState, function: &'static Function) {
    recorder.called(thread, function.coverage.load(Ordering::Relaxed) as usize);
    if recorder.injects_panics.load(Ordering::Relaxed) {
        crate::runtime::lifecycle::panics::maybe_panic(function);
    }
}

/// Defines hooked functions from rows:
///
/// `name | name of another family(argument: type, …) => |recorder, site| code that runs before;`
///
/// The names of a row are functions with the same type and meaning. `missing` is the result when
/// there is no original. The expression after `=>` returns an [`AfterCall`]. Each row is a static
/// in the section that [`crate::runtime::linker::function::functions`] reads.
macro_rules! hooked {
    (library $library:ident, mark $bit:expr, bypass $bypass:expr, missing $missing:expr;
     $($name:ident $(| $other:ident)* ($($arguments:tt)*) => $before:expr;)*) => {
        $(
            $crate::interpose::hooked::hooked!(@names $library, $bit, $bypass, $missing, [$name $($other)*], ($($arguments)*), $before);
        )*
    };
    (@names $library:ident, $bit:expr, $bypass:expr, $missing:expr, [$($name:ident)*], $arguments:tt, $before:expr) => {
        $($crate::interpose::hooked::hooked!(@row $library, $bit, $bypass, $missing, $name, $arguments, $before);)*
    };
    (@row $library:ident, $bit:expr, $bypass:expr, $missing:expr, $name:ident, ($($arg:ident: $type:ty),* $(,)?),
     $before:expr) => {
            #[allow(non_snake_case, missing_docs)]
            pub(crate) mod $name {
                use super::*;

                #[used]
                #[unsafe(link_section = "xpu_timer_functions")]
                pub(crate) static FUNCTION: $crate::runtime::linker::function::Function = $crate::runtime::linker::function::Function::new(
                    match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => unreachable!(),
                    },
                    xpu_timer_proto::family::Library::$library,
                    [
                        $crate::runtime::linker::function::Wrapper($name as *const ()),
                        $crate::runtime::linker::function::Wrapper(from_slot::<1> as *const ()),
                        $crate::runtime::linker::function::Wrapper(from_slot::<2> as *const ()),
                        $crate::runtime::linker::function::Wrapper(from_slot::<3> as *const ()),
                    ],
                );

                type Real = unsafe extern "C-unwind" fn($($type),*) -> std::ffi::c_int;

                #[cfg_attr(not(test), unsafe(no_mangle))]
                pub(crate) unsafe extern "C-unwind" fn $name($($arg: $type),*) -> std::ffi::c_int {
                    // SAFETY: the caller's arguments go unchanged to a function of the same type.
                    unsafe { wrapper($($arg),*) }
                }

                unsafe extern "C-unwind" fn from_slot<const SLOT: usize>($($arg: $type),*) -> std::ffi::c_int {
                    FUNCTION.set_entry_slot(SLOT);
                    // SAFETY: the caller's arguments go unchanged to a function of the same type.
                    unsafe { wrapper($($arg),*) }
                }

                // One function for all slots, because there are more than a thousand rows. A
                // capture shows its frame under the name of the hooked function, so it keeps the
                // name `wrapper`: see `hooked` in `capture/src/symbols/names.rs`.
                #[inline(never)]
                unsafe extern "C-unwind" fn wrapper($($arg: $type),*) -> std::ffi::c_int {
                    let slot = FUNCTION.take_entry_slot();
                    let real = FUNCTION.real(slot);
                    if real.is_null() {
                        return $missing;
                    }
                    // SAFETY: the address of this row's original, whose type is the library's
                    // public ABI.
                    let real = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Real>(real) };
                    let call = || {
                        // SAFETY: the original gets the arguments that its caller gave.
                        unsafe { real($($arg),*) }
                    };
                    $crate::interpose::hooked::around((&FUNCTION, slot), ($bit, $bypass), $before, call)
                }
            }
    };
}
pub(crate) use hooked;
