//! The engine that replaces a function's code.
//!
//! `detour` is the default. It builds from crates.io alone and costs about a nanosecond per call.
//! The cargo feature `frida` selects `frida-gum`, which needs a Frida devkit; see CONTRIBUTING.md.

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
