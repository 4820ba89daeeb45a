//! Helpers for the function names and file paths of frames.

use std::borrow::Cow;

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

/// Whether a function waits for any of several descriptors.
pub(super) fn is_poll(function: &str) -> bool {
    patterns::POLL_NATIVE.contains(&strip_variant(function))
}

/// A function of the C library without the affixes of its variants: `__libc_read` is `read`,
/// `__GI___clock_nanosleep` is `clock_nanosleep`, `read@plt` is `read`.
pub(super) fn strip_variant(function: &str) -> &str {
    let name = function.split(['@', '(']).next().unwrap_or(function);
    let name = name.trim_start_matches("__GI_").trim_start_matches('_');
    let name = name.strip_prefix("libc_").unwrap_or(name);
    name.strip_suffix("_nocancel").unwrap_or(name)
}

/// The name by which programs know a function: without the suffix of a part that the compiler split
/// off, and for an internal function of the C library that of the function around it. `sem_wait` of
/// `__new_sem_wait_slow64.constprop.0`. A long name has no parameters and template arguments.
pub(crate) fn plain(function: &str) -> Cow<'_, str> {
    const PARTS: [&str; 6] = [" [clone", ".constprop.", ".isra.", ".part.", ".cold", ".lto_priv."];
    /// Length in bytes.
    const LONG: usize = 60;
    let end = PARTS.iter().filter_map(|part| function.find(part)).min().unwrap_or(function.len());
    let name = &function[..end];
    let internal = patterns::INTERNAL_NATIVE.iter().find(|(part, _)| name.starts_with("__") && name.contains(part));
    let large_file = name.strip_suffix("64").filter(|plain| patterns::LARGE_FILE_NATIVE.contains(plain));
    let plain = match internal {
        _ if name.starts_with(patterns::SHARED_LOCK_NATIVE) => patterns::SHARED_LOCK,
        Some((_, plain)) => plain,
        None if large_file.is_some() => large_file.unwrap_or(name),
        None if name.starts_with("__GI_") => strip_variant(name),
        None if name.len() > LONG => return Cow::Owned(without_arguments(name)),
        None => name,
    };
    Cow::Borrowed(plain)
}

/// A C++ name without parameters and template arguments: `cub::sort<…>` of
/// `cub::sort<float, 256>(float const*, int)`. In the name of a Python function, `.<locals>` and
/// the file after a space stay.
fn without_arguments(name: &str) -> String {
    const KEPT: [&str; 2] = ["(anonymous namespace)", "operator()"];
    const OPERATOR: &str = "operator";
    let mut text = String::new();
    let mut rest = name;
    while let Some(first) = rest.chars().next() {
        let begins_word = !text.ends_with(|before: char| before.is_alphanumeric() || before == '_');
        let symbol = rest.strip_prefix(OPERATOR).filter(|_| begins_word).map_or(0, |after| {
            OPERATOR.len() + after.find(|other: char| !"<>=-!".contains(other)).unwrap_or(after.len())
        });
        let kept = KEPT.iter().find(|kept| rest.starts_with(**kept)).map_or(symbol, |kept| kept.len());
        let length = if kept > 0 {
            text.push_str(&rest[..kept]);
            kept
        } else if first == '<' && !text.ends_with('.') || first == '(' && !text.ends_with(' ') {
            let lambda = rest.starts_with("<lambda");
            text.push_str(if lambda {
                "<lambda>"
            } else if first == '<' {
                "<…>"
            } else {
                ""
            });
            length_in_brackets(rest)
        } else {
            text.push(first);
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    text
}

/// The number of bytes up to the bracket that closes the first one. All if none does.
fn length_in_brackets(text: &str) -> usize {
    let mut depth = 0;
    let mut previous = ' ';
    for (at, character) in text.char_indices() {
        match character {
            '<' | '(' => depth += 1,
            '>' if previous == '-' => {}
            '>' | ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + character.len_utf8();
        }
        previous = character;
    }
    text.len()
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

/// The innermost frame of the user's own code. If all frames belong to libraries, the innermost
/// frame of the package that the program entered first; else the outermost frame that does not only
/// start a script or a thread. The frames are leaf first.
#[must_use]
pub fn own_frame(frames: &[PySpyFrame]) -> Option<&PySpyFrame> {
    let own = (0..frames.len()).find(|index| !is_library(&frames[*index].file_name) && !is_entry_point(frames, *index));
    own.map(|index| &frames[index])
        .or_else(|| {
            let entered = frames.iter().rev().find_map(|frame| package(&frame.file_name))?;
            frames.iter().find(|frame| package(&frame.file_name) == Some(entered))
        })
        .or_else(|| frames.iter().rev().find(|frame| !contains_any(&frame.file_name, patterns::STARTERS)))
}

/// The place of the innermost frame of the user's own code, else of the innermost frame:
/// `train.py:33 in step`. The frames are leaf first.
#[must_use]
pub fn own_place(frames: &[PySpyFrame]) -> Option<String> {
    let frame = own_frame(frames).or(frames.first())?;
    Some(format!("{} in {}", base_name(&frame.file_name), frame.func_name))
}

/// The innermost function of a native stack that is not part of raising a signal or a C++
/// exception. The frames are leaf first, and may begin in a handler of the signal.
#[must_use]
pub fn native_place(frames: &[PstackFrame]) -> Option<String> {
    let handler = frames.iter().rposition(|frame| frame.func_name == patterns::SIGNAL_FRAME);
    let interrupted = &frames[handler.map_or(0, |handler| handler + 1)..];
    let raises = |frame: &&PstackFrame| patterns::RAISING_NATIVE.iter().any(|name| frame.func_name.starts_with(name));
    let frame = interrupted.iter().find(|frame| is_named(&frame.func_name) && !raises(frame)).or(interrupted.first())?;
    Some(unqualified_arguments(&frame.func_name).into())
}

/// A native function without its arguments: `at::add` of `at::add(at::Tensor const&)`.
fn unqualified_arguments(function: &str) -> &str {
    const CALL: &str = "operator()";
    let name = function.rfind(CALL).map_or(0, |at| at + CALL.len());
    function[name..].find('(').map_or(function, |arguments| &function[..name + arguments]).trim_end()
}

/// The folder of an installed package: `vllm` of
/// `/opt/venv/lib/python3.11/site-packages/vllm/x.py:3`.
fn package(path: &str) -> Option<&str> {
    let (_, inside) = patterns::PACKAGE_PATHS.iter().find_map(|folder| path.split_once(folder))?;
    inside.split(['/', ':']).next()
}

/// Whether a frame is the script that pip made for the entry point of a package: `bin/vllm`.
fn is_entry_point(frames: &[PySpyFrame], index: usize) -> bool {
    let path = file(&frames[index]).unwrap_or_default();
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    let called = index.checked_sub(1).map(|inner| &frames[inner]);
    frames[index].func_name == "<module>"
        && folder.ends_with("/bin")
        && !name.contains('.')
        && called.is_some_and(|frame| package(&frame.file_name).is_some())
}

pub(super) fn in_c_library(frame: &PstackFrame) -> bool {
    contains_any(&frame.module, patterns::C_LIBRARY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_names_have_plain_ones() {
        for (internal, name) in [
            ("open64", "open"),
            ("fcntl64", "fcntl"),
            ("base64", "base64"),
            ("_multiprocessing_SemLock_acquire_impl", "SemLock.acquire"),
            ("__new_sem_wait_slow64.constprop.0", "sem_wait"),
        ] {
            assert_eq!(plain(internal), name);
        }
    }

    #[test]
    fn a_place_has_no_arguments() {
        for (function, name) in [
            ("at::add(at::Tensor const&)", "at::add"),
            ("step()::{lambda(int)#1}::operator()(int) const", "step()::{lambda(int)#1}::operator()"),
            ("operator()", "operator()"),
            ("main", "main"),
        ] {
            assert_eq!(unqualified_arguments(function), name);
        }
    }

    #[test]
    fn internal_functions_have_plain_names() {
        for (function, name) in [
            ("__new_sem_wait_slow64.constprop.0", "sem_wait"),
            ("__futex_abstimed_wait_common64", "futex_wait"),
            ("__pthread_clockjoin_ex", "pthread_join"),
            ("__GI___libc_read", "read"),
            ("Optimizer::step(int) [clone .isra.0]", "Optimizer::step(int)"),
            ("load_shard.part.0", "load_shard"),
            ("pthread_cond_wait", "pthread_cond_wait"),
            ("__libc_start_main", "__libc_start_main"),
            ("_PyEval_EvalFrameDefault", "_PyEval_EvalFrameDefault"),
        ] {
            assert_eq!(plain(function), name);
        }
    }

    #[test]
    fn a_long_name_has_no_arguments() {
        for (function, name) in [
            (
                "shm_cc_loop<c10::BFloat16, (anonymous namespace)::all_reduce<c10::BFloat16, 2>((anonymous \
                 namespace)::Context*)::<lambda(Context*, int64_t)> >",
                "shm_cc_loop<…>",
            ),
            (
                "void (anonymous namespace)::sum_of_all<float>(float const*, unsigned long)::{lambda(int)#1}::operator()(int) const",
                "void (anonymous namespace)::sum_of_all<…>::{lambda#1}::operator() const",
            ),
            (
                "reduce<c10::BFloat16, 2>(Context*, c10::BFloat16*, unsigned long)::<lambda(int, bool)>",
                "reduce<…>::<lambda>",
            ),
            (
                "std::ostream& std::operator<< <std::char_traits<char> >(std::ostream&, char const*)",
                "std::ostream& std::operator<< <…>",
            ),
            (
                "custom_operator<float, std::vector<std::string>, std::allocator<std::string>>(int)",
                "custom_operator<…>",
            ),
            ("void run<std::function<auto (int) -> decltype(f(0))>, Queue, Worker, Task>(int)", "void run<…>"),
            (
                "a_name_whose_bracket_never_ends_because_something_has_cut_it<int, std::vector<fl",
                "a_name_whose_bracket_never_ends_because_something_has_cut_it<…>",
            ),
        ] {
            assert_eq!(plain(function), name);
        }
        assert_eq!(plain("Queue<int>::push(int)"), "Queue<int>::push(int)");
        let python = "CompiledFunctionWithAVeryLongName.<locals>.inner_wrapper (compile_functions.py)";
        assert_eq!(plain(python), python);
    }

    #[test]
    fn a_program_that_pip_installed_is_located_in_the_package_of_its_entry_point() {
        let frames = |files: &[(&str, &str)]| -> Vec<PySpyFrame> {
            let frame = |(function, file): &(&str, &str)| PySpyFrame {
                func_name: (*function).into(),
                file_name: (*file).into(),
                ..Default::default()
            };
            files.iter().map(frame).collect()
        };
        let packages = "/opt/venv/lib/python3.11/site-packages";
        let wait = format!("{packages}/torch/cuda/streams.py:9");
        let step = format!("{packages}/vllm/engine/core.py:70");
        let main = format!("{packages}/vllm/cli.py:3");
        let all =
            frames(&[("synchronize", &wait), ("step", &step), ("main", &main), ("<module>", "/opt/venv/bin/vllm:8")]);
        assert_eq!(own_frame(&all).map(|frame| frame.func_name.as_str()), Some("step"));
        let script = frames(&[
            ("synchronize", &wait),
            ("train", "/home/you/bin/train.py:3"),
            ("<module>", "/home/you/bin/train.py:9"),
        ]);
        assert_eq!(own_frame(&script).map(|frame| frame.func_name.as_str()), Some("train"));
        let thread =
            frames(&[("wait", "/usr/lib/python3.11/threading.py:3"), ("run", "/usr/lib/python3.11/sched.py:1")]);
        assert_eq!(own_frame(&thread).map(|frame| frame.func_name.as_str()), Some("run"));
    }
}
