//! Inline hooks: where no symbol can be interposed, the first instructions of the function itself are replaced.
//!
//! That is the case for a collective or BLAS library that is linked statically into the program or into another library, for one
//! that binds its symbols to itself (`-Bsymbolic`), and for gloo, which lies inside PyTorch. Everything else is reached without a
//! change of code, and is left alone: a uprobe that somebody puts on a replaced function later breaks it, because the kernel
//! runs the instruction of the file in its place. Only where the function begins with an `endbr64` does it not matter.
//!
//! Code is replaced at two moments only: when the process starts and has one thread, and when the linker has just mapped a library of
//! which nothing has run yet. It is never put back.

#[allow(unsafe_code)]
pub(crate) mod code_memory;
#[allow(unsafe_code)]
pub(crate) mod deepbind;
pub(crate) mod engine;
#[allow(unsafe_code)]
pub(crate) mod loader;
pub(crate) mod prologue;
pub(crate) mod role;
#[allow(unsafe_code)]
pub(crate) mod scan;
pub(crate) mod static_symbols;
#[allow(unsafe_code)]
pub(crate) mod weak;

use std::sync::atomic::Ordering;

use crate::{
    interpose::inline::{
        role::{LEVEL, Level},
        scan::scan_new_objects,
    },
    runtime::{lifecycle::config, linker::library_events, os::sys},
};

/// Called once when the hook is loaded, before the program runs.
pub fn start() {
    let level = match sys::variable(c"XPU_TIMER_INLINE").as_deref() {
        Some(b"off" | b"0") => Level::Off,
        Some(b"all") => Level::All,
        _ => Level::Auto,
    };
    // With a second thread somebody may be running what would be replaced.
    if level == Level::Off || config::disabled() || !sys::is_alone() {
        return;
    }
    LEVEL.store(level as u32, Ordering::Relaxed);
    scan_new_objects();
    // Under a debugger the linker's function is not empty; then what is loaded later stays as it is.
    library_events::set_listening(loader::listen());
}
