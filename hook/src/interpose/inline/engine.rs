//! What replaces the code of a function: one small trait, so that the engine can be exchanged.
//!
//! `detour` is built in: it builds from crates.io alone and costs about a nanosecond a call. With the cargo feature `frida` it is
//! `frida-gum`, for which a devkit of Frida must be given; CONTRIBUTING.md says how.

#[cfg(not(feature = "frida"))]
#[allow(unsafe_code)]
mod detour;

#[cfg(feature = "frida")]
#[allow(unsafe_code)]
mod frida;
#[allow(unsafe_code)]
pub(crate) mod interface;

/// The engine of this build.
#[cfg(not(feature = "frida"))]
pub static ENGINE: detour::Detour = detour::Detour;

/// The engine of this build.
#[cfg(feature = "frida")]
pub static ENGINE: frida::Frida = frida::Frida;
