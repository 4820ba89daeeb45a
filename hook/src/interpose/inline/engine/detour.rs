//! The engine of the crate `detour`.

use crate::interpose::inline::{engine::interface::Engine, prologue::Refusal};

/// The crate `detour`.
pub struct Detour;

impl Engine for Detour {
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal> {
        // SAFETY: the caller's promise.
        let hook = unsafe { detour::RawDetour::new(entry as *const (), wrapper) }.map_err(|_| Refusal::Engine)?;
        publish(hook.trampoline());
        // SAFETY: as above.
        let enabled = unsafe { hook.enable() };
        // Never freed, even if it is unused, because other code may hold the trampoline.
        std::mem::forget(hook);
        enabled.map_err(|_| Refusal::Engine)
    }
}
