//! The interface of the engines.

use crate::interpose::inline::prologue::Refusal;

/// An engine that replaces code.
pub trait Engine {
    /// Makes the function at `entry` jump to `wrapper`. Before the jump is written, `publish`
    /// receives the address of code that does what the function did. The change lasts for the rest
    /// of the process's life.
    ///
    /// # Errors
    /// When the engine or the system refuses. Nothing has changed then.
    ///
    /// # Safety
    /// No thread runs the first instructions of the function at the same time,
    /// [`check`](crate::interpose::inline::prologue::check) accepts them, and the wrapper has the
    /// type of the function.
    unsafe fn replace(
        &self,
        entry: usize,
        wrapper: *const (),
        publish: &mut dyn FnMut(*const ()),
    ) -> Result<(), Refusal>;
}
