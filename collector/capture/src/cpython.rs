//! The differences between CPython versions and builds: the offsets of their structures, and where
//! an object has its interpreter.

pub(crate) mod layout;
mod layouts;
pub(crate) mod runtime;
mod version;
