//! What replaces the code of a function: one small trait, so that the engine can be exchanged.
//!
//! `detour` is built in: it builds from crates.io alone and costs about a nanosecond a call. With the cargo feature `frida` it is
//! `frida-gum`, for which a devkit of Frida must be given; CONTRIBUTING.md says how.

#[cfg(not(feature = "frida"))]
mod detour;
#[cfg(feature = "frida")]
mod frida;

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

/// The engine of this build.
#[cfg(not(feature = "frida"))]
pub static ENGINE: detour::Detour = detour::Detour;
/// The engine of this build.
#[cfg(feature = "frida")]
pub static ENGINE: frida::Frida = frida::Frida;
