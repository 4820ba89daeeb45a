//! The engine of the crate `frida-gum`. It uses the fast form of the interceptor, which jumps to
//! the wrapper without a listener.
//!
//! Gum is initialized when the first function is replaced, because most processes replace none.

use frida_gum::{Gum, NativePointer, interceptor::Interceptor};
use std::{ffi::c_void, sync::OnceLock};

use crate::interpose::inline::{engine::interface::Engine, prologue::Refusal};

/// The crate `frida-gum`.
pub struct Frida;

/// Gum's interceptor. Never dropped, because dropping the last handle of Gum removes the code that
/// the jumps use.
struct Kept(Interceptor);

// SAFETY: the interceptor has its own lock, and the hook replaces code only under a lock of its
// own. Moving the handle to another thread moves a counted pointer.
unsafe impl Send for Kept {}

// SAFETY: as above.
unsafe impl Sync for Kept {}

fn interceptor() -> Interceptor {
    static INLINE_REQUESTS: OnceLock<Kept> = OnceLock::new();
    INLINE_REQUESTS.get_or_init(|| Kept(Interceptor::obtain(&Gum::obtain()))).0.clone()
}

/// As many bytes as the shortest jump.
fn start_of(entry: usize) -> [u8; 5] {
    // SAFETY: the caller of `replace` guarantees the function, which is not shorter than a jump.
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
        // A transaction writes the jump at its end, so the original is known before.
        interceptor.begin_transaction();
        let function = NativePointer(entry as *mut c_void);
        let replaced = interceptor.replace_fast(function, NativePointer(wrapper.cast_mut().cast()));
        if let Ok(original) = &replaced {
            publish(original.0.cast_const().cast());
        }
        interceptor.end_transaction();
        // The end of a transaction reports no result. If the system refuses the change, the bytes
        // are the same as before.
        match replaced {
            Ok(_) if start_of(entry) != before => Ok(()),
            _ => Err(Refusal::Engine),
        }
    }
}
