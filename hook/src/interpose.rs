//! How calls reach the hook: exported symbols, lookups by name, inline hooks, and the path of a
//! hooked call.
//!
//! Architecture Invariant: nothing here imports `backends`.

#[allow(unsafe_code)]
pub(crate) mod dlsym;
#[allow(unsafe_code)]
pub(crate) mod exit_functions;
#[allow(unsafe_code)]
pub(crate) mod hooked;
pub(crate) mod inline;
#[allow(unsafe_code)]
pub(crate) mod load;
#[allow(unsafe_code)]
pub(crate) mod prctl;
