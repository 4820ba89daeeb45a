//! What replaces the code of a function: one small trait, so that the engine can be exchanged.
//!
//! `detour` builds from crates.io alone and costs about a nanosecond a call.

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

/// The engine that is built in.
pub static ENGINE: Detour = Detour;

/// The crate `detour`.
pub struct Detour;

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
