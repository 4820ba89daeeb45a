//! Greenlets that are switched away from. No thread has their frames on its stack, and nothing
//! lists them, so the capture searches for them among the objects of the garbage collector, newest
//! first.
//!
//! The layouts are those of the public headers. The capture assumes only one thing about the
//! private state of a greenlet: somewhere in it is a pointer to the frame of a suspended greenlet.
//! Tested with greenlet 3; the header of version 2 is equal.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::{cpython::Layout, memory::Snapshot};

use super::{
    builtins::{MIN_ADDRESS, class_name, type_name},
    frames::{self, InterpreterFrame},
};

/// Limits of the search: objects, greenlets and time.
const MAX_OBJECTS: usize = 300_000;
const MAX_FOUND: usize = 256;
const MAX_TIME: Duration = Duration::from_millis(50);
/// Number of objects after which the copied memory is dropped.
const OBJECTS_OF_A_COPY: usize = 8192;
/// Maximum number of base classes of a class.
const MAX_BASES: usize = 16;

/// Generations: the size of one, and their number.
const GENERATION: u64 = 24;
const GENERATIONS: u64 = 3;
/// PyGC_Head: the pointer to the previous object with two marks, and its size.
const PREVIOUS: u64 = 8;
const MARKS: u64 = 3;
const HEAD: u64 = 16;
/// PyGreenlet: bytes from its header to the pointer to the private state.
const STATE: u64 = 16;
/// Number of words of a state that are examined.
const STATE_WORDS: u64 = 24;
/// From 3.11 on, PyFrameObject has a pointer to the interpreter's frame; bytes from its header.
const FRAME_OF_OBJECT: u64 = 8;

const BASE_CLASS: &[u8] = b"greenlet.greenlet";
const OBJECT: &str = "an object of the garbage collector";
const GREENLET: &str = "a greenlet";

/// A suspended greenlet.
pub(super) struct Greenlet {
    /// The name of its class.
    pub class: String,
    /// Leaf first.
    pub frames: Vec<InterpreterFrame>,
}

/// The suspended greenlets of an interpreter whose garbage collector is at `collector`, newest
/// first. Ends at `deadline` with those found so far.
pub(super) fn suspended(tid: i32, layout: &Layout, collector: u64, deadline: Instant) -> Vec<Greenlet> {
    let Some(lists) = layout.gc_lists else { return Vec::new() };
    let deadline = deadline.min(Instant::now() + MAX_TIME);
    let mut memory = Snapshot::new(tid);
    let mut is_greenlet: HashMap<u64, bool> = HashMap::new();
    let mut found = Vec::new();
    let mut seen = 0;
    for generation in 0..GENERATIONS {
        let list = collector.wrapping_add(lists + generation * GENERATION);
        let mut head = list;
        while let Ok(previous) = memory.read_u64(OBJECT, head.wrapping_add(PREVIOUS)) {
            head = previous & !MARKS;
            seen += 1;
            let is_over = seen % 1024 == 0 && Instant::now() >= deadline;
            if head == list || head < MIN_ADDRESS || seen > MAX_OBJECTS || found.len() >= MAX_FOUND || is_over {
                break;
            }
            if seen % OBJECTS_OF_A_COPY == 0 {
                memory = Snapshot::new(tid);
            }
            let object = head.wrapping_add(HEAD);
            let Ok(class) = memory.read_u64(OBJECT, object.wrapping_add(layout.object_type)) else { break };
            if *is_greenlet.entry(class).or_insert_with(|| derives_from_greenlet(&mut memory, layout, class)) {
                found.extend(greenlet(&mut memory, layout, object));
            }
        }
    }
    found
}

fn derives_from_greenlet(memory: &mut Snapshot, layout: &Layout, mut class: u64) -> bool {
    for _ in 0..MAX_BASES {
        if class < MIN_ADDRESS || !class.is_multiple_of(8) {
            return false;
        }
        if type_name(memory, layout, class).is_ok_and(|name| name == BASE_CLASS) {
            return true;
        }
        class = memory.read_u64(GREENLET, class.wrapping_add(layout.type_base)).unwrap_or(0);
    }
    false
}

/// `None` for a greenlet that runs, has ended, or was never started.
fn greenlet(memory: &mut Snapshot, layout: &Layout, object: u64) -> Option<Greenlet> {
    let class = class_name(memory, layout, object)?;
    let state = memory.read_u64(GREENLET, object.wrapping_add(layout.object_size + STATE)).ok()?;
    let frame = (0..STATE_WORDS).find_map(|index| {
        let word = memory.read_u64(GREENLET, state.wrapping_add(index * 8)).ok()?;
        class_name(memory, layout, word).filter(|name| name == "frame").map(|_| word)
    })?;
    let mut address = frame;
    if layout.minor >= 11 {
        address = memory.read_u64(GREENLET, frame.wrapping_add(layout.object_size + FRAME_OF_OBJECT)).ok()?;
    }
    let frames = frames::chain_from(memory, layout, address).frames;
    let class = class.rsplit('.').next().unwrap_or_default().to_string();
    Some(Greenlet { class, frames })
}
