//! One line on stderr for every call, when `XPU_SIM_DEBUG` is set; otherwise the simulated device prints nothing.

use std::{fmt, io::Write, sync::LazyLock};

static ENABLED: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("XPU_SIM_DEBUG").is_some_and(|value| !value.is_empty() && value != "0"));

/// Notes that `function` returned `code`.
#[inline]
pub fn returned(function: &str, code: i32) {
    if *ENABLED {
        line(format_args!("{function} = {code}"));
    }
}

/// Notes anything else.
pub fn note(message: fmt::Arguments) {
    if *ENABLED {
        line(message);
    }
}

fn line(message: fmt::Arguments) {
    // One write a line, so that the lines of several ranks do not mix. Nobody can be told when stderr is closed.
    let thread = std::thread::current();
    let text = format!("sim[{}/{}] {message}\n", std::process::id(), thread.name().unwrap_or("?"));
    let _ = std::io::stderr().write_all(text.as_bytes());
}
