//! Keeps the exceptions that nobody catches: type, text and frames go into the ring, as Python
//! would print them. A program that logs them elsewhere leaves no other trace of them.
//!
//! A native function takes the place of `sys.excepthook`, and another one that of
//! `threading.excepthook`. Each calls what was there before with what it got, and returns what that
//! returns. A program that sets its own later replaces ours. `sys.excepthook` stays the same object
//! as `sys.__excepthook__` if it was, because tools check that the program has not set its own.

use std::{
    ffi::CStr,
    fmt::{self, Write},
};

use xpu_timer_proto::ring::stderr;

use crate::runtime::{
    os::{stderr_text, thread_state::in_hook},
    tracing::{
        callbacks::in_callback,
        interpreter::{API, Api, Method, Owned, Reference},
    },
};

static OF_INTERPRETER: Method = Method::passes_on(c"excepthook", uncaught);
static OF_THREADING: Method = Method::passes_on(c"_excepthook", uncaught_in_thread);

/// The functions that are replaced so far.
pub(crate) struct Listener {
    interpreter: bool,
    threading: bool,
}

impl Listener {
    pub(crate) const fn new() -> Self {
        Listener { interpreter: false, threading: false }
    }

    /// Replaces what is there and was not replaced yet: `threading` may be imported late.
    pub(crate) fn listen(&mut self, api: &'static Api) {
        if !std::mem::replace(&mut self.interpreter, true) {
            let set = |name: &CStr, new: &Owned| api.set_system(name, new);
            replace(api, &OF_INTERPRETER, |name| api.system(name), set);
        }
        if !self.threading
            && let Some(module) = api.loaded_module(c"threading")
        {
            let set = |name: &CStr, new: &Owned| api.set_attribute(&module, name, new);
            // A module that is still being loaded has none yet.
            self.threading = replace(api, &OF_THREADING, |name| api.attribute(&module, name), set).is_some();
        }
    }
}

/// Puts a function in the place of `excepthook`, and in that of its original if both are the same.
/// `None` if there is none.
fn replace(
    api: &'static Api,
    method: &'static Method,
    get: impl Fn(&CStr) -> Option<Owned>,
    set: impl Fn(&CStr, &Owned) -> bool,
) -> Option<()> {
    const CURRENT: &CStr = c"excepthook";
    const ORIGINAL: &CStr = c"__excepthook__";
    let before = get(CURRENT)?;
    let module = api.attribute(&before, c"__module__").or_else(|| api.of_text(c"sys"))?;
    let ours = api.of_native_with(method, &before, &module)?;
    let is_original = get(ORIGINAL).is_some_and(|original| original.0 == before.0);
    if set(CURRENT, &ours) && is_original {
        set(ORIGINAL, &ours);
    }
    Some(())
}

/// `sys.excepthook(type, value, traceback)`.
unsafe extern "C" fn uncaught(before: Reference, arguments: Reference, names: Reference) -> Reference {
    keep(|api| {
        let arguments = api.kept(arguments)?;
        let mut parts = api.items(&arguments);
        Some(Uncaught { class: parts.next()?, value: parts.next()?, trace: parts.next()?, thread: None })
    });
    // SAFETY: called by the interpreter.
    unsafe { pass_on(before, arguments, names) }
}

/// `threading.excepthook(arguments)`. A thread may end by SystemExit, which is not a failure.
unsafe extern "C" fn uncaught_in_thread(before: Reference, arguments: Reference, names: Reference) -> Reference {
    keep(|api| {
        let arguments = api.kept(arguments)?;
        let about = api.items(&arguments).next()?;
        let part = |name| api.attribute(&about, name);
        let thread = part(c"thread").and_then(|thread| api.attribute(&thread, c"_name"));
        let (class, value, trace) = (part(c"exc_type")?, part(c"exc_value")?, part(c"exc_traceback")?);
        (!api.is_of_class(&value, "SystemExit")).then_some(Uncaught { class, value, trace, thread })
    });
    // SAFETY: called by the interpreter.
    unsafe { pass_on(before, arguments, names) }
}

/// Calls what was there before, with the same arguments.
///
/// # Safety
/// The arguments are those of the interpreter.
unsafe fn pass_on(before: Reference, arguments: Reference, names: Reference) -> Reference {
    match API.get() {
        // SAFETY: the caller's promise.
        Some(api) => unsafe { (api.pass_on)(before, arguments, names) },
        // It was there when the function was replaced.
        None => std::ptr::null_mut(),
    }
}

fn keep(find: impl FnOnce(&'static Api) -> Option<Uncaught>) {
    in_callback(|| {
        in_hook(|| {
            let Some(api) = API.get().filter(|api| !api.has_exception()) else { return };
            if let Some(uncaught) = find(api) {
                uncaught.keep(api);
            }
        });
    });
}

/// An exception that nobody caught.
struct Uncaught {
    class: Owned,
    value: Owned,
    trace: Owned,
    /// The name of its thread, if `threading` has started it.
    thread: Option<Owned>,
}

/// So many of the innermost frames are kept, fewer if they need too much room.
const FRAMES: [usize; 3] = [64, 32, 12];
/// Bytes of a path, of a name and of the text that are kept. The text of an exception of another
/// process has the traceback of that process.
const MOST_PATH: usize = 200;
const MOST_NAME: usize = 100;
const MOST_TEXT: usize = 3000;

impl Uncaught {
    fn keep(&self, api: &'static Api) {
        let message = api.to_text(&self.value);
        let message = message.as_ref().and_then(|text| api.text_of(text.0)).unwrap_or_default();
        let depth = self.entries(api).count();
        for frames in FRAMES {
            let mut text = Text { bytes: [0; stderr::TEXT_BYTES], length: 0 };
            if self.write(api, &mut text, message, depth.saturating_sub(frames)).is_ok() {
                return stderr_text::note_uncaught(&text.bytes[..text.length]);
            }
        }
    }

    /// The entries of the traceback, outermost first.
    fn entries(&self, api: &'static Api) -> impl Iterator<Item = Owned> {
        let is_entry = |entry: &Owned| api.is_of_class(entry, "traceback");
        let mut next = api.kept(self.trace.0).filter(is_entry);
        std::iter::from_fn(move || {
            let entry = next.take()?;
            next = api.attribute(&entry, c"tb_next").filter(is_entry);
            Some(entry)
        })
    }

    /// Writes the exception as Python prints it, without lines of code. If the text is too long,
    /// only the first line is kept.
    fn write(&self, api: &'static Api, out: &mut Text, message: &str, skipped: usize) -> fmt::Result {
        let text = |object: &Option<Owned>| object.as_ref().and_then(|object| api.text_of(object.0));
        if let Some(thread) = text(&self.thread) {
            writeln!(out, "Exception in thread {}:", cut(thread, MOST_NAME))?;
        }
        writeln!(out, "Traceback (most recent call last):")?;
        for entry in self.entries(api).skip(skipped) {
            let code = api.attribute(&entry, c"tb_frame").and_then(|frame| api.attribute(&frame, c"f_code"));
            let Some(code) = code else { continue };
            let (path, name) = (api.attribute(&code, c"co_filename"), api.attribute(&code, c"co_name"));
            let (path, name) = (text(&path).unwrap_or("?"), text(&name).unwrap_or("?"));
            let line = api.number(&entry, c"tb_lineno").unwrap_or(0);
            writeln!(out, "  File \"{}\", line {line}, in {}", end_of(path, MOST_PATH), cut(name, MOST_NAME))?;
        }
        let (module, class) = (api.attribute(&self.class, c"__module__"), api.attribute(&self.class, c"__qualname__"));
        if let Some(module) = text(&module).filter(|module| !matches!(*module, "builtins" | "__main__")) {
            write!(out, "{}.", cut(module, MOST_NAME))?;
        }
        write!(out, "{}", cut(text(&class).unwrap_or("Exception"), MOST_NAME))?;
        let first_line = message.trim_start().lines().next().unwrap_or_default();
        match (message, message.len() > MOST_TEXT) {
            ("", _) => writeln!(out),
            (_, false) => writeln!(out, ": {message}"),
            (_, true) => writeln!(out, ": {}", cut(first_line, MOST_TEXT)),
        }
    }
}

/// The begin of a text.
fn cut(text: &str, most: usize) -> &str {
    &text[..text.floor_char_boundary(most)]
}

/// The end of a text.
fn end_of(text: &str, most: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(most))..]
}

/// A text in memory that is already there: the program may have no other left.
struct Text {
    bytes: [u8; stderr::TEXT_BYTES],
    length: usize,
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.length..self.length + text.len()).ok_or(fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.length += text.len();
        Ok(())
    }
}
