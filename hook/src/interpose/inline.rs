//! Inline hooks: where no symbol can be interposed, the first instructions of the function itself
//! are replaced.
//!
//! This is needed for a collective or BLAS library that is linked statically into the program or
//! another library, for one that binds its symbols to itself (`-Bsymbolic`), and for gloo inside
//! PyTorch. All other code stays unchanged, because a uprobe that is set later on a replaced
//! function breaks it: the kernel executes the instruction of the file instead. Only functions that
//! begin with `endbr64` do not have this problem.
//!
//! Code is replaced only when the process starts and has one thread, and when the linker has just
//! mapped a library that has not run yet. It is never restored.

#[allow(unsafe_code)]
pub(crate) mod engine;
#[allow(unsafe_code)]
pub(crate) mod loader;
#[allow(unsafe_code)]
pub(crate) mod scan;
#[allow(unsafe_code)]
pub(crate) mod symbol_binding;

use std::sync::atomic::Ordering;

use crate::{
    interpose::inline::scan::{LEVEL, Level, scan_new_objects},
    runtime::{
        lifecycle::config,
        linker::dynamic,
        os::{environment, sys},
    },
};

/// Called when the hook is loaded, before the program runs.
pub(crate) fn start() {
    let level = match environment::at_start(c"XPU_TIMER_INLINE") {
        Some(b"off" | b"0") => Level::Off,
        Some(b"all") => Level::All,
        _ => Level::Auto,
    };
    // A second thread might be executing the code that would be replaced.
    if level == Level::Off || config::disabled() || !sys::is_alone() {
        return;
    }
    LEVEL.store(level as u32, Ordering::Relaxed);
    scan_new_objects();
    // Under a debugger the linker's function is not empty. Then libraries that are loaded later
    // stay unchanged.
    dynamic::set_listening_for_libraries(loader::listen());
}
