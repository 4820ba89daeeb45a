//! The result of a capture: a compact form that keeps what many frames have in common once, and the
//! expanded form that is written to files.
//!
//! [`merge`] makes one stack of Python and C frames: each native frame of the interpreter's loop is
//! replaced by the Python frames that it ran.

use std::{fmt::Write, sync::Arc};

use xpu_timer_proto::server::{ProcessSample, PstackFrame, PySpyFrame};

/// The stacks of one process, or the reason why there are none.
#[derive(Debug, Clone, Default)]
pub struct ProcessCapture {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent; 0 if unknown.
    pub parent_pid: i32,
    /// argv joined by spaces. For a process without argv, the kernel's name for it in brackets.
    pub command: String,
    /// The stacks, the state of the process, and the errors of the capture.
    pub sample: ProcessSample,
    /// For each thread in `sample.py_stacktrace` and each of its frames: whether C code entered the
    /// interpreter with this frame. [`merge`] needs it to insert Python frames into
    /// the native stack.
    pub python_entries: Vec<Vec<bool>>,
    /// All descendants, flattened, parents before their children. Empty unless `Options::children`
    /// is set.
    pub children: Vec<ProcessCapture>,
}

/// A captured process whose native frames are indices into a list of places.
#[derive(Debug, Clone, Default)]
pub struct Stacks {
    /// Process id.
    pub pid: i32,
    /// Process id of its parent; 0 if unknown.
    pub parent_pid: i32,
    /// argv joined by spaces. For a process without argv, the kernel's name for it in brackets.
    pub command: String,
    /// As in [`ProcessCapture`], except that its native threads have no frames.
    pub sample: ProcessSample,
    /// As in [`ProcessCapture`].
    pub python_entries: Vec<Vec<bool>>,
    /// The places that `frames` refers to.
    pub places: Vec<CodeLocation>,
    /// For each thread in `sample.stacktrace`, the indices of its frames' places, leaf first.
    pub frames: Vec<Vec<u32>>,
    /// All descendants, flattened, parents before their children. Empty unless `Options::children`
    /// is set.
    pub children: Vec<Stacks>,
}

/// A place in the code of one process.
#[derive(Debug, Clone)]
pub struct CodeLocation {
    /// Program counter in the process.
    pub pc: u64,
    /// Path of the object that contains the place; `[jit]` for code generated at run time; empty if
    /// nothing is mapped there.
    pub module: Arc<str>,
    /// Program counter as an address of the object; 0 without an object.
    pub module_address: u64,
    /// The functions of a frame at this place: the inlined ones, leaf first, then the function that
    /// they were inlined into.
    pub functions: Vec<Function>,
}

/// A function at a place.
#[derive(Debug, Clone)]
pub struct Function {
    /// Name of the function, or `??`.
    pub name: Arc<str>,
    /// `path:line`, if known.
    pub line: Option<Arc<str>>,
}

impl CodeLocation {
    /// `path:line` of one of the functions, or the object's path if the line is unknown.
    #[must_use]
    pub fn file_name<'a>(&'a self, function: &'a Function) -> &'a str {
        match &function.line {
            Some(line) => line,
            None if self.module.is_empty() => "??",
            None => &self.module,
        }
    }

    /// The functions, each with whether it was inlined.
    pub fn functions(&self) -> impl Iterator<Item = (&Function, bool)> {
        let outermost = self.functions.len().saturating_sub(1);
        self.functions.iter().enumerate().map(move |(index, function)| (function, index < outermost))
    }

    /// Expands one frame at this place. The `origin` of each result lacks the frame number at its
    /// start.
    fn expand(&self) -> Vec<PstackFrame> {
        let expand = |(function, inlined): (&Function, bool)| {
            let name = &function.name;
            let place = match &function.line {
                Some(line) => format!(" at {line}"),
                None if self.module.is_empty() => String::new(),
                None => format!(" from {}", self.module),
            };
            PstackFrame {
                func_name: name.to_string(),
                file_name: self.file_name(function).to_string(),
                origin: if inlined {
                    format!("{name} (){place}")
                } else {
                    format!("{:#018x} in {name} (){place}", self.pc)
                },
                pc: self.pc,
                module: self.module.to_string(),
                module_address: self.module_address,
                inlined,
            }
        };
        self.functions().map(expand).collect()
    }
}

/// Expands the frames of the threads of one process.
pub(crate) struct FrameExpander {
    // A thousand frames share a few dozen places.
    places: Vec<Vec<PstackFrame>>,
    // Frames whose memory can be used again.
    spare: Vec<PstackFrame>,
}

impl FrameExpander {
    pub(crate) fn new(places: &[CodeLocation]) -> Self {
        FrameExpander { places: places.iter().map(CodeLocation::expand).collect(), spare: Vec::new() }
    }

    /// Appends the frames with these indices to those of a thread.
    pub(crate) fn expand(&mut self, indices: &[u32], frames: &mut Vec<PstackFrame>) {
        for place in indices.iter().filter_map(|index| self.places.get(*index as usize)).flatten() {
            let mut frame = self.spare.pop().unwrap_or_default();
            frame.func_name.clone_from(&place.func_name);
            frame.file_name.clone_from(&place.file_name);
            frame.module.clone_from(&place.module);
            frame.origin.clear();
            // A write to a string cannot fail.
            let _ = write!(frame.origin, "#{:<3} {}", frames.len(), place.origin);
            let PstackFrame { func_name, file_name, module, origin, .. } = frame;
            frames.push(PstackFrame { func_name, file_name, module, origin, ..*place });
        }
    }

    /// Takes frames that are no longer needed, so that the next thread uses their memory.
    pub(crate) fn recycle(&mut self, frames: Vec<PstackFrame>) {
        self.spare.extend(frames);
    }
}

impl From<Stacks> for ProcessCapture {
    /// Expands every frame.
    fn from(stacks: Stacks) -> Self {
        let Stacks { pid, parent_pid, command, mut sample, python_entries, places, frames, children } = stacks;
        let mut expander = FrameExpander::new(&places);
        for (thread, indices) in sample.stacktrace.iter_mut().zip(frames) {
            expander.expand(&indices, &mut thread.frames);
        }
        let children = children.into_iter().map(ProcessCapture::from).collect();
        ProcessCapture { pid, parent_pid, command, sample, python_entries, children }
    }
}

/// A frame of a merged stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Frame<'a> {
    /// A frame of C, C++, Rust and so on.
    Native(&'a PstackFrame),
    /// A Python frame.
    Python(&'a PySpyFrame),
}

/// The two stacks of a thread do not match. This happens if the interpreter's loop has no name, if
/// C code switches stacks, as greenlets do, or if one of the stacks is incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the native stack has {loops} frames of the interpreter's loop, but C code entered Python {entries} times")]
pub struct Mismatch {
    /// Frames of the loop in the native stack.
    pub loops: usize,
    /// Python frames with which C code entered the interpreter.
    pub entries: usize,
}

/// Checks that a native stack with this many frames of the interpreter's loop matches a Python
/// stack.
///
/// # Errors
/// The two do not match.
pub fn check_match(loops: usize, entries: &[bool]) -> Result<(), Mismatch> {
    let entered = entries.iter().filter(|entry| **entry).count();
    // C code enters the root frame of a complete stack.
    let is_complete = entries.last().is_none_or(|entry| *entry);
    if loops == entered && is_complete { Ok(()) } else { Err(Mismatch { loops, entries: entered }) }
}

/// Merges the two stacks of one thread, both leaf first. `entries` holds, for each Python frame,
/// whether C code entered the interpreter with it.
///
/// # Errors
/// The two stacks do not match.
pub fn merge<'a>(
    native: &'a [PstackFrame],
    python: &'a [PySpyFrame],
    entries: &[bool],
) -> Result<Vec<Frame<'a>>, Mismatch> {
    check_match(native.iter().filter(|frame| is_eval_loop(frame)).count(), entries)?;
    let mut merged = Vec::with_capacity(native.len() + python.len());
    let mut rest = python.iter().zip(entries);
    for frame in native {
        if is_eval_loop(frame) {
            for (python, entry) in rest.by_ref() {
                merged.push(Frame::Python(python));
                if *entry {
                    break;
                }
            }
        } else if !is_instruction(frame) {
            merged.push(Frame::Native(frame));
        }
    }
    Ok(merged)
}

/// Whether this is the name of the interpreter's loop, for a function that was not inlined.
pub(crate) fn is_loop_name(name: &str) -> bool {
    name.starts_with("_PyEval_EvalFrameDefault")
}

/// Compilers split the loop into parts such as `_PyEval_EvalFrameDefault.cold`.
fn is_eval_loop(frame: &PstackFrame) -> bool {
    !frame.inlined && is_loop_name(&frame.func_name)
}

/// From 3.14 on, interpreters built with clang have a function for each instruction. The last one
/// that ran is above the loop on the stack.
fn is_instruction(frame: &PstackFrame) -> bool {
    frame.func_name.starts_with("_TAIL_CALL_")
}

/// The stacks to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Native,
    Python,
    Merged,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn native(names: &[&str]) -> Vec<PstackFrame> {
        names.iter().map(|name| PstackFrame { func_name: (*name).into(), ..PstackFrame::default() }).collect()
    }

    fn python(names: &[&str]) -> Vec<PySpyFrame> {
        names.iter().map(|name| PySpyFrame { func_name: (*name).into(), ..PySpyFrame::default() }).collect()
    }

    fn names(frames: &[Frame<'_>]) -> Vec<String> {
        let name = |frame: &Frame<'_>| match frame {
            Frame::Native(frame) => frame.func_name.clone(),
            Frame::Python(frame) => format!("py {}", frame.func_name),
        };
        frames.iter().map(name).collect()
    }

    #[test]
    fn one_frame_of_the_loop_runs_a_group_of_python_frames() {
        let native =
            native(&["poll", "_PyEval_EvalFrameDefault.cold", "slot_init", "_PyEval_EvalFrameDefault", "main"]);
        let python = python(&["c", "b", "a"]);
        let merged = merge(&native, &python, &[false, true, true]).unwrap();
        assert_eq!(names(&merged), ["poll", "py c", "py b", "slot_init", "py a", "main"]);
    }

    #[test]
    fn functions_of_single_instructions_are_part_of_the_loop() {
        let native = native(&["poll", "_TAIL_CALL_CALL", "_PyEval_EvalFrameDefault", "main"]);
        let python = python(&["b", "a"]);
        let merged = merge(&native, &python, &[false, true]).unwrap();
        assert_eq!(names(&merged), ["poll", "py b", "py a", "main"]);
    }

    #[test]
    fn mismatching_stacks_are_not_merged() {
        let one = native(&["poll", "_PyEval_EvalFrameDefault", "main"]);
        let fails =
            |native: &[PstackFrame], names: &[&str], entries: &[bool]| merge(native, &python(names), entries).err();
        assert_eq!(
            fails(&one, &["b", "a"], &[true, true]),
            Some(Mismatch { loops: 1, entries: 2 }),
            "a Python frame is left over"
        );
        assert_eq!(fails(&one, &["a"], &[false]), Some(Mismatch { loops: 1, entries: 0 }), "the group has no end");
        assert_eq!(fails(&one, &["b", "a"], &[true, false]), Some(Mismatch { loops: 1, entries: 1 }), "no root");
        assert!(fails(&one, &[], &[]).is_some(), "a frame of the loop without Python frames");
        assert!(merge(&native(&["poll"]), &[], &[]).is_ok(), "a thread that is not in Python");
    }
}
