//! Checks whether the Python and the native stack of a thread were taken at the same moment.

use std::collections::HashMap;

use crate::native::{address_space::AddressSpace, frame::RawFrame, thread::Thread};

use super::reader::{PythonReader, PythonThread};

/// Minimum size in bytes of a part of the interpreter's loop. The loop is larger than almost all
/// other functions.
const MIN_LOOP_BYTES: u64 = 8 << 10;

/// Whether the Python and the native stack of a thread match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agreement {
    Yes,
    No,
    /// Unknown, because the native stack is incomplete or the code of the loop is unknown.
    Unknown,
    /// The thread was about to publish a frame.
    Between,
}

/// Compares the Python stack of a thread with its native frames, which were taken at the same time.
pub(crate) fn agreement(
    python: &PythonReader,
    thread: &PythonThread,
    native: &Thread,
    space: &AddressSpace<'_>,
) -> Agreement {
    let runtime = &python.location.runtime;
    let within = |frame: &RawFrame| address(python, frame, space);
    if native.frames.first().and_then(within).is_some_and(|address| runtime.is_publishing_frame(address)) {
        return Agreement::Between;
    }
    if !native.incomplete.is_empty() || !runtime.has_eval_loop() {
        return Agreement::Unknown;
    }
    let run = native.frames.iter().filter_map(within).filter(|address| runtime.is_eval_loop(*address)).count();
    if run == thread.stack.entered() { Agreement::Yes } else { Agreement::No }
}

/// The address of a frame in the file of the interpreter. `None` for a frame of another object.
fn address(python: &PythonReader, frame: &RawFrame, space: &AddressSpace<'_>) -> Option<u64> {
    let object = space.object_at(frame.lookup())?;
    (object.image.id == python.location.object.image.id).then(|| frame.lookup().wrapping_sub(object.bias))
}

/// Finds a part of the loop without a name. Compilers move parts of the loop elsewhere, and
/// distributions strip their names. If exactly one unnamed function, counted as part of the loop,
/// makes the two stacks of all these threads match, it is such a part.
pub(crate) fn find_unnamed_part<'a>(
    python: &PythonReader,
    stacks: impl Iterator<Item = (&'a PythonThread, &'a [RawFrame])>,
    space: &AddressSpace<'_>,
) {
    let runtime = &python.location.runtime;
    if runtime.has_unnamed_part() || !runtime.has_eval_loop() {
        return;
    }
    let image = &*python.location.object.image;
    let stacks: Vec<(&PythonThread, Vec<u64>)> = stacks
        .map(|(thread, native)| {
            let addresses = native.iter().filter_map(|frame| address(python, frame, space));
            (thread, addresses.collect())
        })
        .collect();
    let missing_frames: Vec<Option<usize>> = stacks
        .iter()
        .map(|(thread, addresses)| {
            let run = addresses.iter().filter(|address| runtime.is_eval_loop(**address)).count();
            thread.stack.entered().checked_sub(run)
        })
        .collect();
    // Usually nothing is missing, and looking up functions takes longer than counting.
    if missing_frames.iter().all(|missing| *missing == Some(0)) {
        return;
    }
    let mut counts: HashMap<(u64, u64), HashMap<usize, usize>> = HashMap::new();
    for (index, (_, addresses)) in stacks.iter().enumerate() {
        for address in addresses.iter().filter(|address| !runtime.is_eval_loop(**address)) {
            if let Some(function) = image.function(*address).filter(|range| range.end - range.start >= MIN_LOOP_BYTES) {
                *counts.entry((function.start, function.end)).or_default().entry(index).or_default() += 1;
            }
        }
    }
    let fits = |counts: &HashMap<usize, usize>| {
        missing_frames
            .iter()
            .enumerate()
            .all(|(index, missing)| *missing == Some(counts.get(&index).copied().unwrap_or(0)))
    };
    let mut found = counts.iter().filter(|(_, counts)| fits(counts)).map(|((start, end), _)| *start..*end);
    if let (Some(part), None) = (found.next(), found.next())
        && image.symbol(part.start).is_none()
    {
        runtime.set_unnamed_part(part);
    }
}
