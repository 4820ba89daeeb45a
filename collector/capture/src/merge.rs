//! One stack of Python and C frames: each native frame of the interpreter's loop is replaced by the
//! Python frames that it ran.

use xpu_timer_proto::server::{PstackFrame, PySpyFrame};

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
/// # Errors The two do not match.
pub fn check_match(loops: usize, entries: &[bool]) -> Result<(), Mismatch> {
    let entered = entries.iter().filter(|entry| **entry).count();
    // C code enters the root frame of a complete stack.
    let whole = entries.last().is_none_or(|entry| *entry);
    if loops == entered && whole { Ok(()) } else { Err(Mismatch { loops, entries: entered }) }
}

/// Merges the two stacks of one thread, both leaf first. `entries` holds, for each Python frame,
/// whether C code entered the interpreter with it.
///
/// # Errors The two stacks do not match.
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

/// Which stacks to print.
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
