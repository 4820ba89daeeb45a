//! What an engine does.

use crate::interpose::inline::prologue::Refusal;

/// An engine.
pub trait Engine {
    /// Makes the function at `entry` jump to `wrapper`. The address of code that does what the function did goes to `publish`
    /// before the jump is there. It stays so for the rest of the process's life.
    ///
    /// # Errors
    /// When the engine or the system refuses; then nothing has changed.
    ///
    /// # Safety
    /// Nobody runs the first instructions of the function meanwhile, [`crate::interpose::inline::prologue::check`] has found them movable, and the
    /// wrapper is a function of the same type.
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal>;
}
