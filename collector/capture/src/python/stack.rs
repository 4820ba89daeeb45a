//! The Python stack of one thread.

use std::time::Instant;

use xpu_timer_proto::server::PySpyFrame;

use super::frames::RawFrame;

/// The Python frames of a thread.
#[derive(Default)]
pub(crate) struct Stack {
    pub(super) frames: Vec<PySpyFrame>,
    /// The same frames as they were read.
    pub(super) raw: Vec<RawFrame>,
    /// For each frame, whether C code entered the interpreter with it.
    pub(super) entries: Vec<bool>,
    /// The lock that it holds, and since when that is known.
    pub(super) holds: Option<(u64, Instant)>,
    /// Garbage was collected at that moment.
    pub(super) collects: bool,
    /// Why it is not whole.
    pub problem: Option<String>,
    /// Inner frames are left out because they changed while they were read.
    pub moved: bool,
}

impl Stack {
    pub(super) fn entered(&self) -> usize {
        self.entries.iter().filter(|entry| **entry).count()
    }

    /// No frames, for this reason.
    pub fn unknown(reason: &str) -> Self {
        Stack { problem: Some(reason.into()), ..Stack::default() }
    }

    /// What two looks at a running thread have in common: the frames from the root on, up to the first one that was called from
    /// another place or is another frame. `None` when one of them does not reach the root.
    pub fn common(before: &Stack, mut after: Stack) -> Option<Stack> {
        if before.problem.is_some() || after.problem.is_some() {
            return None;
        }
        let mut kept = 0;
        for (before, after) in before.raw.iter().rev().zip(after.raw.iter().rev()) {
            if (before.address, before.code) != (after.address, after.code) {
                break;
            }
            kept += 1;
            // What it calls now is not what it called then.
            if before.instruction != after.instruction {
                break;
            }
        }
        let left_out = after.frames.len() - kept;
        after.frames.drain(..left_out);
        after.raw.drain(..left_out);
        after.entries.drain(..left_out);
        after.moved = left_out > 0 || kept < before.raw.len();
        (after.holds, after.collects) = match after.holds {
            Some(_) => (after.holds, after.collects),
            None => (before.holds, before.collects),
        };
        Some(after)
    }

    /// Frames that are shown.
    pub fn length(&self) -> usize {
        self.frames.len()
    }
}
