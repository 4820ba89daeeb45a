//! The engine of Frida: the interceptor of `frida-gum`, in its fast form, which jumps to the wrapper without a listener in between.
//!
//! Gum is set up when the first function is replaced, because most processes replace none.

use frida_gum::{Gum, NativePointer, interceptor::Interceptor};
use std::{ffi::c_void, sync::OnceLock};

use crate::interpose::inline::{engine::interface::Engine, prologue::Refusal};

/// The crate `frida-gum`.
pub struct Frida;

/// Gum's interceptor, kept for ever: dropping the last handle of Gum takes down what the jumps lead through.
struct Kept(Interceptor);

// SAFETY: the interceptor has a lock of its own, and the hook replaces code under its own lock only; moving the handle to another
// thread moves a counted pointer.
unsafe impl Send for Kept {}

// SAFETY: as above.
unsafe impl Sync for Kept {}

fn interceptor() -> Interceptor {
    static KEPT: OnceLock<Kept> = OnceLock::new();
    KEPT.get_or_init(|| Kept(Interceptor::obtain(&Gum::obtain()))).0.clone()
}

/// As many bytes as the shortest jump has.
fn start_of(entry: usize) -> [u8; 5] {
    // SAFETY: the caller of `replace` vouches for the function, which is not shorter than a jump.
    unsafe { (entry as *const [u8; 5]).read_volatile() }
}

impl Engine for Frida {
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal> {
        let before = start_of(entry);
        let mut interceptor = interceptor();
        // Within a transaction the jump is written at its end, so the original is known before.
        interceptor.begin_transaction();
        let function = NativePointer(entry as *mut c_void);
        let replaced = interceptor.replace_fast(function, NativePointer(wrapper.cast_mut().cast()));
        if let Ok(original) = &replaced {
            publish(original.0.cast_const().cast());
        }
        interceptor.end_transaction();
        // The end of a transaction has no answer; a system that refuses to have code changed leaves the bytes as they were.
        match replaced {
            Ok(_) if start_of(entry) != before => Ok(()),
            _ => Err(Refusal::Engine),
        }
    }
}
