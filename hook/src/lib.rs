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

mod backends;
mod interpose;
mod runtime;
