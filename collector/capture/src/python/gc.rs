//! The garbage collector of an interpreter: its statistics, and whether it runs.

use crate::{
    cpython::layout::Layout,
    memory::snapshot::{ReadError, Snapshot},
};

use super::threads::{InterpreterState, ThreadState};

/// Garbage collections since the interpreters started. `None` if unreadable.
pub(super) fn collections(tid: i32, layout: &Layout, runtime: u64, interpreters: &[InterpreterState]) -> Option<u64> {
    let memory = &mut Snapshot::new(tid);
    match (layout.runtime_gc, layout.interpreter_gc) {
        (Some(offset), _) => of_collector(memory, layout, runtime.wrapping_add(offset)).ok(),
        (None, Some(offset)) => interpreters
            .iter()
            .map(|interpreter| of_collector(memory, layout, interpreter.address.wrapping_add(offset)).ok())
            .sum(),
        (None, None) => None,
    }
}

/// The sum over the three generations.
fn of_collector(memory: &mut Snapshot, layout: &Layout, collector: u64) -> Result<u64, ReadError> {
    const STATISTICS: &str = "the statistics of the garbage collector";
    let first = collector.wrapping_add(layout.gc_generations);
    let buffers = match (layout.gc_young_items, layout.gc_old, layout.gc_old_size, layout.gc_old_items) {
        (Some(young_items), Some(old), Some(old_size), Some(old_items)) => {
            let first = memory.read_u64(STATISTICS, first)?;
            [(first, young_items), (first + old, old_items), (first + old + old_size, old_items)]
        }
        _ => [0, 1, 2].map(|generation| (first + generation * layout.gc_generation_size, 1)),
    };
    let mut sum = 0u64;
    for (buffer, items) in buffers {
        let mut newest = 0;
        for item in 0..items {
            let at = buffer.wrapping_add(item * layout.gc_generation_size + layout.gc_collections);
            newest = newest.max(memory.read_u64(STATISTICS, at)?);
        }
        sum = sum.saturating_add(newest);
    }
    Ok(sum)
}

/// Whether the garbage collector of a thread's interpreter is running. It runs in the thread that
/// holds the GIL, or in one that has released the GIL in a finalizer.
pub(super) fn collects(memory: &mut Snapshot, layout: &Layout, runtime: u64, thread: &ThreadState) -> bool {
    const COLLECTOR: &str = "the garbage collector";
    let collector = match (layout.runtime_gc, layout.interpreter_gc) {
        (Some(offset), _) => Ok(runtime.wrapping_add(offset)),
        (None, Some(offset)) => memory
            .read_u64(COLLECTOR, thread.address.wrapping_add(layout.thread_interpreter))
            .map(|interpreter| interpreter.wrapping_add(offset)),
        (None, None) => return false,
    };
    collector.and_then(|collector| memory.read_u32(COLLECTOR, collector.wrapping_add(layout.gc_collecting))) == Ok(1)
}
