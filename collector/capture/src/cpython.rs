//! What differs from one CPython to another: the offsets of its structures, and where an object holds them.

pub(crate) mod layout;
mod layouts;
pub(crate) mod runtime;
mod version;
