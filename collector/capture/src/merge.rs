//! One stack of Python and C frames: each native frame of the interpreter's loop is replaced by the Python frames that it ran.

use xpu_timer_proto::server::{PstackFrame, PySpyFrame};

/// A frame of a merged stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Frame<'a> {
    /// C, C++, Rust and so on.
    Native(&'a PstackFrame),
    /// Python.
    Python(&'a PySpyFrame),
}

/// Merges the two stacks of one thread, both leaf first. `entries` tells for each Python frame whether C code entered the
/// interpreter with it. `None` when the two do not fit together, as when the interpreter has no symbols.
#[must_use]
pub fn merge<'a>(native: &'a [PstackFrame], python: &'a [PySpyFrame], entries: &[bool]) -> Option<Vec<Frame<'a>>> {
    if python.len() != entries.len() {
        return None;
    }
    let mut merged = Vec::with_capacity(native.len() + python.len());
    let mut rest = python.iter().zip(entries);
    for frame in native {
        if !is_eval_loop(frame) {
            if !is_instruction(frame) {
                merged.push(Frame::Native(frame));
            }
            continue;
        }
        loop {
            let (python, entry) = rest.next()?;
            merged.push(Frame::Python(python));
            if *entry {
                break;
            }
        }
    }
    rest.next().is_none().then_some(merged)
}

/// Compilers split the loop into parts such as `_PyEval_EvalFrameDefault.cold`.
fn is_eval_loop(frame: &PstackFrame) -> bool {
    !frame.inlined && frame.func_name.starts_with("_PyEval_EvalFrameDefault")
}

/// Interpreters that clang has built from 3.14 on have a function for each instruction, the last of which stands above the loop.
fn is_instruction(frame: &PstackFrame) -> bool {
    frame.func_name.starts_with("_TAIL_CALL_")
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
    fn stacks_that_do_not_fit_are_not_merged() {
        let one = native(&["poll", "_PyEval_EvalFrameDefault", "main"]);
        assert!(merge(&one, &python(&["b", "a"]), &[true, true]).is_none(), "a Python frame is left over");
        assert!(merge(&one, &python(&["a"]), &[false]).is_none(), "the group has no end");
        assert!(merge(&one, &[], &[]).is_none(), "a frame of the loop without Python frames");
        assert!(merge(&native(&["poll"]), &[], &[]).is_some(), "a thread that is not in Python");
    }
}
