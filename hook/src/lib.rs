//! `libxpu_timer_hook.so`, preloaded into the training process. It records launches and
//! collectives, and signals a hang.
//!
//! Architecture Invariant: a hooked call never fails, waits or returns a different result because
//! of this library. A process that makes no device call gets no thread, no socket and no memory.
//!
//! Calls enter through [`interpose::hooked`] and write to [`runtime::recorder`].
//! [`runtime::watcher`] does the rest on a thread of its own. The tables of hooked functions are in
//! [`backends`].
#![deny(unsafe_code)]
#![warn(unreachable_pub)]

mod backends;
mod runtime;

/// How calls reach the hook: exported symbols, lookups by name, inline hooks, and the path of a
/// hooked call.
///
/// Architecture Invariant: nothing here imports `backends`.
mod interpose {
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
    #[allow(unsafe_code)]
    pub(crate) mod write;
}
