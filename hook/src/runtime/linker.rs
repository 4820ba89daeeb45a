//! The dynamic linker: loaded objects, hooked functions, and the original functions.

pub(crate) mod device_family;
#[allow(unsafe_code)]
pub(crate) mod dynamic;
#[allow(unsafe_code)]
pub(crate) mod elf;
#[allow(unsafe_code)]
pub(crate) mod function;
#[allow(unsafe_code)]
pub(crate) mod function_table;
pub(crate) mod library_events;
#[allow(unsafe_code)]
pub(crate) mod originals;
