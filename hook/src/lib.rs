//! `libxpu_timer_hook.so`, preloaded into the training process: records launches and collectives, signals a hang.
//!
//! Architecture Invariant: nothing here can make a hooked call fail, wait, or return something else than the original; a process that
//! makes no device call gets no thread, no socket and no memory. The way in is [`hooked`]; the data goes to [`recorder`];
//! [`watcher`] does the rest on a thread of its own. A hooked function is a row in [`nccl`], [`driver`] or [`runtime`].
#![deny(unsafe_code)]

mod backends;
mod interpose;
mod runtime;
