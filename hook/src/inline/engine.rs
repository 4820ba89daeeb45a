//! What replaces the code of a function: one small trait, so that the engine can be exchanged.
//!
//! `detour` builds from crates.io alone and costs about a nanosecond a call; `frida-gum` moves a few more kinds of code and needs a
//! devkit that is not on crates.io, so it is behind the feature `frida`.

use super::prologue::Refusal;

/// An engine.
pub trait Engine {
    /// Makes the function at `entry` jump to `wrapper`. The address of code that does what the function did goes to `publish`
    /// before the jump is there. It stays so for the rest of the process's life.
    ///
    /// # Errors
    /// When the engine or the system refuses; then nothing has changed.
    ///
    /// # Safety
    /// Nobody runs the first instructions of the function meanwhile, [`super::prologue::check`] has found them movable, and the
    /// wrapper is a function of the same type.
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal>;
}

/// The engine that was built in.
#[cfg(not(feature = "frida"))]
pub static ENGINE: Detour = Detour;
/// The engine that was built in.
#[cfg(feature = "frida")]
pub static ENGINE: Frida = Frida;

/// The crate `detour`.
#[cfg(not(feature = "frida"))]
pub struct Detour;

#[cfg(not(feature = "frida"))]
impl Engine for Detour {
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal> {
        // SAFETY: the caller's word.
        let hook = unsafe { detour::RawDetour::new(entry as *const (), wrapper) }.map_err(|_| Refusal::Engine)?;
        publish(hook.trampoline());
        // SAFETY: as above.
        let enabled = unsafe { hook.enable() };
        // Whoever has the trampoline keeps it, so it is never freed, also when it is of no use.
        std::mem::forget(hook);
        enabled.map_err(|_| Refusal::Engine)
    }
}

/// The crate `frida-gum`.
#[cfg(feature = "frida")]
pub struct Frida;

#[cfg(feature = "frida")]
impl Engine for Frida {
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal> {
        use frida_gum::{Gum, NativePointer, interceptor::Interceptor};
        use std::sync::LazyLock;
        // Dropping the last handle ends the process, so it is kept.
        static GUM: LazyLock<Gum> = LazyLock::new(Gum::obtain);
        let pointer = |address: usize| NativePointer(address as *mut std::ffi::c_void);
        let mut interceptor = Interceptor::obtain(&GUM);
        // Without a transaction the function would jump before its original is published.
        interceptor.begin_transaction();
        let original = interceptor.replace_fast(pointer(entry), pointer(wrapper as usize));
        if let Ok(original) = &original {
            publish(original.0.cast_const().cast());
        }
        interceptor.end_transaction();
        original.map(drop).map_err(|_| Refusal::Engine)
    }
}
