//! Interpreters with their garbage collectors, and the states and names of their threads.
//!
//! Threads start and end during the read. The lists are doubly linked, and new threads are inserted
//! at the front. So a list in which every thread agrees with its neighbours contains all threads
//! that lived all the time. It may also contain one that has just ended.
//!
//! Up to 3.11, the state of a thread that is about to start has the ids of the thread that starts
//! it. The latter has an older state in the same interpreter, so the older state counts.

use std::collections::HashMap;

use crate::{
    cpython::Layout,
    memory::{self, ReadError, Snapshot},
};

use super::builtins::{attributes, item, pairs, read_integer, string};

/// Maximum number of interpreters and of threads. A longer list has a cycle.
const MAX_ENTRIES: usize = 1 << 16;
/// How often to read a list that changes during the read.
const ATTEMPTS: usize = 50;
/// Offset of the kernel's thread id in what `pthread_self` points to, for glibc on x86-64.
const TID_IN_PTHREAD: u64 = 0x2d0;

/// One interpreter of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InterpreterState {
    pub address: u64,
    /// Address of its GIL; 0 if it has none yet.
    pub gil: u64,
    pub threads: Vec<ThreadState>,
}

/// The state of one thread in an interpreter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ThreadState {
    pub address: u64,
    /// The result of `pthread_self` in the thread.
    pub pthread: u64,
    /// The kernel's thread id in the PID namespace of the process; 0 if unknown.
    pub tid: i32,
}

/// All interpreters in the list of `runtime`, newest first.
pub(super) fn interpreters(tid: i32, layout: &Layout, runtime: u64) -> Result<Vec<InterpreterState>, ReadError> {
    let mut last = ReadError { what: "the list of interpreters", address: runtime };
    for _ in 0..ATTEMPTS {
        match read(tid, layout, runtime) {
            // glibc may reuse the memory of an ended thread for another one. The second read shows
            // that the listed threads have not ended.
            Ok(found) if layout.thread_native_id.is_some() || read(tid, layout, runtime).as_ref() == Ok(&found) => {
                return Ok(found);
            }
            Ok(_) => {}
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn read_u64(tid: i32, what: &'static str, address: u64) -> Result<u64, ReadError> {
    let mut bytes = [0; 8];
    match memory::read(tid, address, &mut bytes) {
        Ok(8) => Ok(u64::from_le_bytes(bytes)),
        _ => Err(ReadError { what, address }),
    }
}

fn read(tid: i32, layout: &Layout, runtime: u64) -> Result<Vec<InterpreterState>, ReadError> {
    const INTERPRETER: &str = "an interpreter";
    let mut found = Vec::new();
    let mut address = read_u64(tid, INTERPRETER, runtime.wrapping_add(layout.runtime_interpreters))?;
    while address != 0 {
        if found.len() >= MAX_ENTRIES {
            return Err(ReadError { what: "the end of the list of interpreters", address });
        }
        let gil = match (layout.runtime_gil, layout.interpreter_gil) {
            (Some(offset), _) => runtime.wrapping_add(offset),
            (None, Some(offset)) => read_u64(tid, INTERPRETER, address.wrapping_add(offset))?,
            (None, None) => 0,
        };
        found.push(InterpreterState { address, gil, threads: threads(tid, layout, address)? });
        address = read_u64(tid, INTERPRETER, address.wrapping_add(layout.interpreter_next))?;
    }
    Ok(found)
}

fn threads(tid: i32, layout: &Layout, interpreter: u64) -> Result<Vec<ThreadState>, ReadError> {
    const THREAD: &str = "the state of a thread";
    const LIST: &str = "the list of threads";
    let mut found = Vec::new();
    let (mut before, mut seen) = (0, 0);
    let mut bytes = vec![0; layout.thread_size as usize];
    let mut address = read_u64(tid, LIST, interpreter.wrapping_add(layout.interpreter_threads))?;
    while address != 0 {
        if !matches!(memory::read(tid, address, &mut bytes), Ok(read) if read == bytes.len()) {
            return Err(ReadError { what: THREAD, address });
        }
        let field = |offset: u64| {
            let bytes = bytes.get(offset as usize..offset as usize + 8);
            u64::from_le_bytes(bytes.and_then(|bytes| bytes.try_into().ok()).unwrap_or_default())
        };
        let neighbours = field(layout.thread_previous) == before && field(layout.thread_interpreter) == interpreter;
        seen += 1;
        if !neighbours || seen > MAX_ENTRIES {
            return Err(ReadError { what: LIST, address });
        }
        let pthread = field(layout.thread_id);
        let kernel = match layout.thread_native_id {
            Some(offset) => field(offset) as i32,
            None => tid_of_pthread(tid, pthread),
        };
        // The state may not belong to a thread yet.
        if pthread != 0 {
            found.retain(|newer: &ThreadState| newer.pthread != pthread);
            found.push(ThreadState { address, pthread, tid: kernel });
        }
        before = address;
        address = field(layout.thread_next);
    }
    Ok(found)
}

/// Up to 3.10, the interpreter has no kernel thread ids, but glibc has them.
fn tid_of_pthread(tid: i32, pthread: u64) -> i32 {
    let mut bytes = [0; 4];
    match memory::read(tid, pthread.wrapping_add(TID_IN_PTHREAD), &mut bytes) {
        Ok(4) => i32::from_le_bytes(bytes),
        _ => 0,
    }
}

/// Whether a thread holds the GIL of its interpreter.
pub(super) fn holds(memory: &mut Snapshot, layout: &Layout, gil: u64, thread: &ThreadState) -> bool {
    const GIL: &str = "the lock of an interpreter";
    gil != 0
        && memory.read_u32(GIL, gil.wrapping_add(layout.gil_locked)) == Ok(1)
        && memory.read_u64(GIL, gil.wrapping_add(layout.gil_holder)) == Ok(thread.address)
}

/// Garbage collections since the interpreters started. `None` if unreadable.
pub(super) fn collections(tid: i32, layout: &Layout, runtime: u64, interpreters: &[InterpreterState]) -> Option<u64> {
    let memory = &mut Snapshot::new(tid);
    match (layout.runtime_gc, layout.interpreter_gc) {
        (Some(offset), _) => collections_of(memory, layout, runtime.wrapping_add(offset)).ok(),
        (None, Some(offset)) => interpreters
            .iter()
            .map(|interpreter| collections_of(memory, layout, interpreter.address.wrapping_add(offset)).ok())
            .sum(),
        (None, None) => None,
    }
}

/// The sum over the three generations.
fn collections_of(memory: &mut Snapshot, layout: &Layout, collector: u64) -> Result<u64, ReadError> {
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
    collector_of(memory, layout, runtime, thread)
        .is_some_and(|collector| memory.read_u32(COLLECTOR, collector.wrapping_add(layout.gc_collecting)) == Ok(1))
}

const COLLECTOR: &str = "the garbage collector";

/// The address of the garbage collector of a thread's interpreter.
pub(super) fn collector_of(memory: &mut Snapshot, layout: &Layout, runtime: u64, thread: &ThreadState) -> Option<u64> {
    if let Some(offset) = layout.runtime_gc {
        return Some(runtime.wrapping_add(offset));
    }
    let interpreter = memory.read_u64(COLLECTOR, thread.address.wrapping_add(layout.thread_interpreter)).ok()?;
    Some(interpreter.wrapping_add(layout.interpreter_gc?))
}

/// How often to read the dictionaries if they seem to change during the read.
const NAME_ATTEMPTS: usize = 3;

/// Names of threads by their results of `pthread_self`, from `threading._active`. The program runs
/// during the read, so a name counts only if the thread object has the id of the thread. If a name
/// cannot be read, only this name is lost.
pub(super) fn thread_names(tid: i32, layout: &Layout, interpreter: &InterpreterState) -> HashMap<u64, String> {
    let mut names = HashMap::new();
    for _ in 0..NAME_ATTEMPTS {
        if read_names(&mut Snapshot::new(tid), layout, interpreter, &mut names) == Ok(true) {
            break;
        }
    }
    names
}

/// Returns whether all entries are consistent.
fn read_names(
    memory: &mut Snapshot,
    layout: &Layout,
    interpreter: &InterpreterState,
    names: &mut HashMap<u64, String>,
) -> Result<bool, ReadError> {
    let modules = memory.read_u64("sys.modules", interpreter.address.wrapping_add(layout.interpreter_modules))?;
    let Some(threading) = item(memory, layout, modules, "threading")? else { return Ok(true) };
    let [active] = attributes(memory, layout, threading, ["_active"])?;
    let Some(active) = active else { return Ok(true) };
    let pairs = pairs(memory, layout, active)?;
    memory.fetch(pairs.iter().flat_map(|(key, thread)| [(*key, 32), (*thread, 64)]));
    let mut complete = true;
    for (key, thread) in pairs {
        match name_entry(memory, layout, key, thread) {
            Some((pthread, name)) => drop(names.insert(pthread, name)),
            None => complete = false,
        }
    }
    Ok(complete)
}

fn name_entry(memory: &mut Snapshot, layout: &Layout, key: u64, thread: u64) -> Option<(u64, String)> {
    let pthread = read_integer(memory, layout, key)?;
    let [name, ident] = attributes(memory, layout, thread, ["_name", "_ident"]).ok()?;
    let agrees = read_integer(memory, layout, ident?)? == pthread;
    let name = string(memory, layout, name?).ok()?;
    agrees.then_some((pthread, name))
}
