//! The coroutines of an event loop that waits. The thread of such a loop has no frame of the task
//! for which it waits: the task is suspended, and its coroutines wait for each other. Like frames,
//! they change only while the thread runs.

use std::ops::RangeInclusive;

use xpu_timer_proto::server::PySpyFrame;

use crate::{cpython::Layout, memory::Snapshot};

use super::{
    builtins::{attributes, class_name, items},
    frames::InterpreterFrame,
};

/// The minor versions in which a suspended coroutine contains its frame, with the state below.
const MINORS: RangeInclusive<u8> = 11..=14;
/// Maximum number of coroutines that wait for each other.
const MAX_AWAITS: usize = 256;
/// Maximum number of objects between two coroutines, such as tasks and futures.
const MAX_BETWEEN: usize = 8;
/// Number of variables of a frame, and of words of a task, that are examined.
const VARIABLES: u64 = 6;
const TASK_WORDS: u64 = 32;
/// Maximum number of tasks of one `gather` that are examined.
const MAX_CHILDREN: u64 = 256;
/// Bytes from the state of a coroutine to its frame.
const STATE_BEFORE: u64 = 5;
/// The state of a coroutine that waits in an `await`.
const SUSPENDED: u8 = 0xff;

/// Parts of the paths of the files whose frames are on the stack of a loop that waits.
const LOOP_FILES: [&str; 4] = ["/selectors.py:", "/asyncio/base_events.py:", "/asyncio/runners.py:", "/uvloop/"];
const COROUTINE: &str = "a coroutine";

/// The frames of the coroutines that wait for each other on a thread with these frames, leaf first.
/// Empty if the thread does not wait in an event loop. Both lists are leaf first as well.
pub(super) fn awaits(
    memory: &mut Snapshot,
    layout: &Layout,
    frames: &[PySpyFrame],
    raw_frames: &[InterpreterFrame],
) -> Vec<InterpreterFrame> {
    if !MINORS.contains(&layout.minor) {
        return Vec::new();
    }
    let of_loop = |frame: &&PySpyFrame| LOOP_FILES.iter().any(|file| frame.file_name.contains(file));
    let count = frames.iter().take_while(of_loop).count();
    let mut next = raw_frames[..count].iter().find_map(|frame| main_coroutine(memory, layout, frame.address));
    let mut chain = Vec::new();
    while let Some(coroutine) = next.filter(|_| chain.len() < MAX_AWAITS) {
        let Some(frame) = suspended_frame(memory, layout, coroutine) else { break };
        chain.push(frame);
        next = awaited(memory, layout, frame.address).and_then(|object| coroutine_behind(memory, layout, object));
    }
    chain.reverse();
    chain
}

/// The coroutine that the variables of a frame of a loop refer to, directly or through its task.
fn main_coroutine(memory: &mut Snapshot, layout: &Layout, frame: u64) -> Option<u64> {
    (0..VARIABLES).find_map(|index| {
        let variable = frame.wrapping_add(layout.frame_locals + index * 8);
        let object = memory.read_u64("a frame", variable).ok()? & !7;
        let is_started = |name: &str| name == "coroutine" || is_task(name);
        class_name(memory, layout, object).filter(|name| is_started(name))?;
        coroutine_behind(memory, layout, object)
    })
}

fn is_task(name: &str) -> bool {
    name.ends_with(".Task") || name == "Task"
}

/// The frame of a coroutine that waits in an `await`.
fn suspended_frame(memory: &mut Snapshot, layout: &Layout, coroutine: u64) -> Option<InterpreterFrame> {
    let address = coroutine.wrapping_add(layout.generator_frame);
    let state = memory.read_u8(COROUTINE, address.wrapping_sub(STATE_BEFORE)).ok()?;
    let mut field = |offset: u64| memory.read_u64(COROUTINE, address.wrapping_add(offset)).ok();
    let (code, instruction) = (field(layout.frame_code)? & !7, field(layout.frame_instruction)?);
    (state == SUSPENDED).then_some(InterpreterFrame { address, code, instruction, previous: 0, entry: false })
}

/// The object that a suspended frame waits for: the top of its evaluation stack. The top follows
/// the instruction in the frame: up to 3.13 as a number of four bytes, later as a pointer.
fn awaited(memory: &mut Snapshot, layout: &Layout, frame: u64) -> Option<u64> {
    let top = frame.wrapping_add(layout.frame_instruction + 8);
    let end = if layout.minor <= 13 {
        let length = u64::from(memory.read_u32(COROUTINE, top).ok()?);
        frame.wrapping_add(layout.frame_locals).wrapping_add(length * 8)
    } else {
        memory.read_u64(COROUTINE, top).ok()?
    };
    Some(memory.read_u64(COROUTINE, end.wrapping_sub(8)).ok()? & !7)
}

/// The coroutine that runs behind an object which another coroutine waits for.
fn coroutine_behind(memory: &mut Snapshot, layout: &Layout, mut object: u64) -> Option<u64> {
    for _ in 0..MAX_BETWEEN {
        let name = class_name(memory, layout, object)?;
        let mut word = |index: u64| memory.read_u64(COROUTINE, object + layout.object_size + index * 8).ok();
        object = match name.as_str() {
            "coroutine" | "async_generator" | "generator" => return Some(object),
            "_asyncio.FutureIter" | "FutureIter" | "async_generator_asend" | "coroutine_wrapper" => word(0)?,
            "_GatheringFuture" => unfinished_child(memory, layout, object)?,
            name if is_task(name) => {
                let words: Vec<u64> = (0..TASK_WORDS).map_while(word).collect();
                let is_coroutine =
                    |word: &u64| class_name(memory, layout, *word).is_some_and(|name| name == "coroutine");
                words.into_iter().find(is_coroutine)?
            }
            _ => return None,
        };
    }
    None
}

/// The first task of a `gather` that still waits.
fn unfinished_child(memory: &mut Snapshot, layout: &Layout, gathering: u64) -> Option<u64> {
    let [children] = attributes(memory, layout, gathering, ["_children"]).ok()?;
    items(memory, layout, children?, MAX_CHILDREN).into_iter().find(|child| {
        class_name(memory, layout, *child).is_some_and(|name| is_task(&name))
            && coroutine_behind(memory, layout, *child)
                .is_some_and(|coroutine| suspended_frame(memory, layout, coroutine).is_some())
    })
}
