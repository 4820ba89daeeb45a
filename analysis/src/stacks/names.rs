//! Helpers for the function names and file paths of frames.

use xpu_timer_proto::server::{PstackFrame, PySpyFrame};

use super::patterns;

pub(super) fn is_named(function: &str) -> bool {
    !function.is_empty() && function != "??"
}

pub(super) fn contains_any(text: &str, parts: &[&str]) -> bool {
    parts.iter().any(|part| text.contains(part))
}

/// Maximum length of a stored command line, in characters.
const MAX_COMMAND: usize = 120;

/// A command line as it is stored.
pub(super) fn stored_command(command: &str) -> String {
    command.chars().take(MAX_COMMAND).collect()
}

/// A command line with at most 60 characters.
pub(crate) fn shortened(command: &str) -> String {
    const SHOWN: usize = 60;
    let shown: String = command.chars().take(SHOWN).collect();
    let rest = if command.chars().nth(SHOWN).is_some() { "…" } else { "" };
    shown + rest
}

/// The last component of a path, with its line number.
pub(crate) fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// A Python function without its class or outer function: `__next__` of `DataLoader.__next__`.
pub(super) fn unqualified(function: &str) -> &str {
    function.rsplit('.').next().unwrap_or(function)
}

/// A function of the C library without the affixes of its variants: `__libc_read` is `read`,
/// `__GI___clock_nanosleep` is `clock_nanosleep`, `read@plt` is `read`.
pub(super) fn strip_variant(function: &str) -> &str {
    let name = function.split(['@', '(']).next().unwrap_or(function);
    let name = name.trim_start_matches("__GI_").trim_start_matches('_');
    let name = name.strip_prefix("libc_").unwrap_or(name);
    name.strip_suffix("_nocancel").unwrap_or(name)
}

/// A C++ function without namespaces, class, template arguments and parameters.
pub(super) fn unqualified_native(function: &str) -> &str {
    let name = function.rsplit("::").next().unwrap_or(function);
    name.split(['(', '<']).next().unwrap_or(name)
}

pub(super) fn is_library(path: &str) -> bool {
    path.starts_with('<') || contains_any(path, patterns::LIBRARY_PATHS)
}

/// The file of a frame. The place of a frame is `path:line`.
pub(super) fn file(frame: &PySpyFrame) -> Option<&str> {
    frame.file_name.rsplit_once(':').map(|(file, _)| file)
}

/// A Python frame as text: `function (file:line)`.
pub(super) fn frame_label(frame: &PySpyFrame) -> String {
    format!("{} ({})", frame.func_name, base_name(&frame.file_name))
}

/// The innermost frame of the user's own code. If all frames belong to libraries, the outermost
/// frame that does not only start a script or a thread.
pub(super) fn own_frame(frames: &[PySpyFrame]) -> Option<&PySpyFrame> {
    frames
        .iter()
        .find(|frame| !is_library(&frame.file_name))
        .or_else(|| frames.iter().rev().find(|frame| !contains_any(&frame.file_name, patterns::STARTERS)))
}

pub(super) fn in_c_library(frame: &PstackFrame) -> bool {
    contains_any(&frame.module, patterns::C_LIBRARY)
}
