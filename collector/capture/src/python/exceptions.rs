//! The exceptions that a thread is handling: those of the `except` and `finally` blocks that it is
//! in. Like frames, they change only while the thread runs.

use xpu_timer_proto::server::{PyException, PySpyFrame};

use crate::{cpython::Layout, memory::Snapshot};

use super::{
    builtins::{MIN_ADDRESS, class_name, items_from, read_integer, string},
    code::CodeCache,
    threads::ThreadState,
};

/// Maximum number of exceptions that are handled within each other.
const MAX_EXCEPTIONS: usize = 4;
/// Maximum number of generators and blocks without an exception between them.
const MAX_ITEMS: usize = 64;
/// Maximum number of frames of a traceback.
const MAX_FRAMES: usize = 128;
/// Maximum numbers of arguments of an exception, and of characters of their text.
const MAX_ARGUMENTS: u64 = 4;
const MAX_TEXT: usize = 500;

const EXCEPTION: &str = "an exception";

/// Offsets that only the search for exceptions needs; from `Include/cpython/pyerrors.h`,
/// `traceback.h` and `Include/internal/pycore_frame.h` of each version. Those of objects count from
/// their header.
struct Offsets {
    /// _PyErr_StackItem.
    value: u64,
    previous: u64,
    /// PyBaseExceptionObject.
    arguments: u64,
    traceback: u64,
    /// PyFrameObject: the code, or from 3.11 on the pointer to the interpreter's frame.
    frame: u64,
}

/// PyTracebackObject, from its header on, in all versions.
const NEXT: u64 = 0;
const FRAME: u64 = 8;
const INSTRUCTION: u64 = 16;

impl Offsets {
    fn of(layout: &Layout) -> Self {
        let mut offsets = match layout.minor {
            0..=10 => Offsets { value: 8, previous: 24, arguments: 8, traceback: 16, frame: 16 },
            _ => Offsets { value: 0, previous: 8, arguments: 8, traceback: 24, frame: 8 },
        };
        for of_object in [&mut offsets.arguments, &mut offsets.traceback, &mut offsets.frame] {
            *of_object += layout.object_size;
        }
        offsets
    }
}

/// The exceptions that a thread is handling, innermost first.
pub(super) fn handled(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    thread: &ThreadState,
) -> Vec<PyException> {
    let offsets = Offsets::of(layout);
    let mut found = Vec::new();
    let mut next = memory.read_u64(EXCEPTION, thread.address.wrapping_add(layout.thread_exceptions)).ok();
    for _ in 0..MAX_ITEMS {
        let Some(item) = next.filter(|item| *item >= MIN_ADDRESS) else { break };
        let value = memory.read_u64(EXCEPTION, item.wrapping_add(offsets.value)).unwrap_or(0);
        found.extend(exception(memory, layout, codes, &offsets, value));
        if found.len() == MAX_EXCEPTIONS {
            break;
        }
        next = memory.read_u64(EXCEPTION, item.wrapping_add(offsets.previous)).ok();
    }
    found
}

/// Reads one exception. `None` if there is none at the address.
fn exception(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    offsets: &Offsets,
    value: u64,
) -> Option<PyException> {
    let name = class_name(memory, layout, value).filter(|name| name != "NoneType")?;
    let mut word = |offset: u64| memory.read_u64(EXCEPTION, value.wrapping_add(offset)).ok();
    let (arguments, traceback) = (word(offsets.arguments)?, word(offsets.traceback)?);
    class_name(memory, layout, arguments).filter(|name| name == "tuple")?;
    let message = text(memory, layout, arguments);
    Some(PyException { r#type: name, message, frames: frames(memory, layout, codes, offsets, traceback) })
}

/// The arguments of an exception as text, about as Python prints it.
fn text(memory: &mut Snapshot, layout: &Layout, arguments: u64) -> String {
    let values = items_from(memory, layout, arguments, arguments.wrapping_add(layout.tuple_items), MAX_ARGUMENTS);
    let mut texts: Vec<String> = Vec::new();
    let mut numbers = Vec::new();
    for value in values {
        let class = class_name(memory, layout, value).unwrap_or_default();
        let number = if class == "int" { read_integer(memory, layout, value) } else { None };
        let shown = match class.as_str() {
            "str" => string(memory, layout, value).ok().map(|text| text.chars().take(MAX_TEXT).collect()),
            _ => number.map(|number| number.to_string()),
        };
        numbers.push(number.is_some());
        texts.push(shown.unwrap_or_else(|| format!("<{class}>")));
    }
    match (texts.as_slice(), numbers.as_slice()) {
        ([number, text], [true, false]) => format!("[Errno {number}] {text}"),
        ([only], _) => only.clone(),
        ([], _) => String::new(),
        _ => format!("({})", texts.join(", ")),
    }
}

/// The frames of a traceback, leaf first.
fn frames(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    offsets: &Offsets,
    mut traceback: u64,
) -> Vec<PySpyFrame> {
    let mut found = Vec::new();
    for _ in 0..MAX_FRAMES {
        if class_name(memory, layout, traceback).is_none_or(|name| name != "traceback") {
            break;
        }
        found.extend(frame(memory, layout, codes, offsets, traceback));
        let Ok(next) = memory.read_u64(EXCEPTION, traceback.wrapping_add(layout.object_size + NEXT)) else { break };
        traceback = next;
    }
    found.reverse();
    found
}

fn frame(
    memory: &mut Snapshot,
    layout: &Layout,
    codes: &mut CodeCache,
    offsets: &Offsets,
    traceback: u64,
) -> Option<PySpyFrame> {
    let fields = traceback.wrapping_add(layout.object_size);
    let object = memory.read_u64(EXCEPTION, fields.wrapping_add(FRAME)).ok()?;
    let bytes = u64::from(memory.read_u32(EXCEPTION, fields.wrapping_add(INSTRUCTION)).ok()?);
    let inside = memory.read_u64(EXCEPTION, object.wrapping_add(offsets.frame)).ok()?;
    let code = match layout.code_bytes {
        // The bits below the address of an object are marks.
        Some(_) => memory.read_u64(EXCEPTION, inside.wrapping_add(layout.frame_code)).ok()? & !7,
        None => inside,
    };
    // In the form in which a frame has its last instruction.
    let instruction = match layout.code_bytes {
        Some(first) => code.wrapping_add(first).wrapping_add(bytes),
        None if layout.minor >= 10 => bytes / 2,
        None => bytes,
    };
    codes.frame(memory, layout, (code, instruction)).ok()?
}
