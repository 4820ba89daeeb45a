//! The common parts of the simulated device's shared objects: declarations of the public ABI of the
//! driver and NCCL, the faults, and small tools for code that is called from C.
//!
//! This crate contains no state of the device; each shared object has its own copy of the crate.

#![deny(unsafe_code)]

/// Whether this is the library of CUDA 12. It is the file of CUDA 13 with another soname, which the
/// tests write into its copy wherever the name occurs (`link_sim` in `tests/src/artifacts.rs`).
#[must_use]
pub fn is_cuda_12(soname: &'static str) -> bool {
    // The compiler does not know that the copy has another name.
    std::hint::black_box(soname).ends_with(".12")
}

pub mod cuda;
pub mod fault;
pub mod ffi;
pub mod nccl;

/// Prints one line on stderr for every call when `XPU_SIM_DEBUG` is set. Otherwise the simulated
/// device prints nothing.
pub mod trace {
    use std::{fmt, io::Write, sync::LazyLock};

    static ENABLED: LazyLock<bool> =
        LazyLock::new(|| std::env::var_os("XPU_SIM_DEBUG").is_some_and(|value| !value.is_empty() && value != "0"));

    /// Traces that `function` returned `code`.
    #[inline]
    pub fn returned(function: &str, code: i32) {
        if *ENABLED {
            line(format_args!("{function} = {code}"));
        }
    }

    /// Traces a message.
    pub fn note(message: fmt::Arguments) {
        if *ENABLED {
            line(message);
        }
    }

    fn line(message: fmt::Arguments) {
        // One write per line, so that the lines of several ranks do not mix. If stderr is closed,
        // the line is lost.
        let thread = std::thread::current();
        let text = format!("sim[{}/{}] {message}\n", std::process::id(), thread.name().unwrap_or("?"));
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}
