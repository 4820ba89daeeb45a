//! Names of threads, from `threading._active`. The program runs during the read, so a name counts
//! only if the thread object has the id of the thread. If a name cannot be read, only this name is
//! lost.

use std::collections::HashMap;

use crate::{
    cpython::layout::Layout,
    memory::snapshot::{ReadError, Snapshot},
};

use super::{
    builtins::{attributes, item, pairs, read_integer, string},
    threads::InterpreterState,
};

/// How often to read the dictionaries if they seem to change during the read.
const ATTEMPTS: usize = 3;

/// Names by the result of `pthread_self` in the thread.
pub(super) fn names(tid: i32, layout: &Layout, interpreter: &InterpreterState) -> HashMap<u64, String> {
    let mut names = HashMap::new();
    for _ in 0..ATTEMPTS {
        if read(&mut Snapshot::new(tid), layout, interpreter, &mut names) == Ok(true) {
            break;
        }
    }
    names
}

/// Returns whether all entries are consistent.
fn read(
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
    let mut whole = true;
    for (key, thread) in pairs {
        match entry(memory, layout, key, thread) {
            Some((pthread, name)) => drop(names.insert(pthread, name)),
            None => whole = false,
        }
    }
    Ok(whole)
}

fn entry(memory: &mut Snapshot, layout: &Layout, key: u64, thread: u64) -> Option<(u64, String)> {
    let pthread = read_integer(memory, layout, key)?;
    let [name, ident] = attributes(memory, layout, thread, ["_name", "_ident"]).ok()?;
    let agrees = read_integer(memory, layout, ident?)? == pthread;
    let name = string(memory, layout, name?).ok()?;
    agrees.then_some((pthread, name))
}
