//! The Python stack of one thread.

use std::time::Instant;

use xpu_timer_proto::server::PySpyFrame;

use super::frames::InterpreterFrame;

/// The Python frames of a thread.
#[derive(Default)]
pub(crate) struct Stack {
    pub(super) frames: Vec<PySpyFrame>,
    /// The same frames as they were read from memory.
    pub(super) raw_frames: Vec<InterpreterFrame>,
    /// For each frame, whether C code entered the interpreter with it.
    pub(super) entries: Vec<bool>,
    /// The GIL that the thread holds, and when this was read.
    pub(super) held_gil: Option<(u64, Instant)>,
    /// Whether the garbage collector was running at that time.
    pub(super) collects: bool,
    /// Why the stack is incomplete.
    pub problem: Option<String>,
    /// Whether inner frames are missing because they changed during the read.
    pub is_cut: bool,
}

impl Stack {
    pub(super) fn entered(&self) -> usize {
        self.entries.iter().filter(|entry| **entry).count()
    }

    /// An empty stack, for this reason.
    pub fn unknown(reason: &str) -> Self {
        Stack { problem: Some(reason.into()), ..Stack::default() }
    }

    /// The frames that two reads of a running thread agree on: from the root on, up to the first
    /// frame that differs or has a different current instruction. `None` if one of the reads does
    /// not reach the root.
    pub fn common_frames(before: &Stack, mut after: Stack) -> Option<Stack> {
        if before.problem.is_some() || after.problem.is_some() {
            return None;
        }
        let mut kept = 0;
        for (before, after) in before.raw_frames.iter().rev().zip(after.raw_frames.iter().rev()) {
            if (before.address, before.code) != (after.address, after.code) {
                break;
            }
            kept += 1;
            // The frame now makes another call than before.
            if before.instruction != after.instruction {
                break;
            }
        }
        let left_out = after.frames.len() - kept;
        after.frames.drain(..left_out);
        after.raw_frames.drain(..left_out);
        after.entries.drain(..left_out);
        after.is_cut = left_out > 0 || kept < before.raw_frames.len();
        (after.held_gil, after.collects) = match after.held_gil {
            Some(_) => (after.held_gil, after.collects),
            None => (before.held_gil, before.collects),
        };
        Some(after)
    }

    /// Number of reported frames.
    pub fn frame_count(&self) -> usize {
        self.frames.len()
    }
}
