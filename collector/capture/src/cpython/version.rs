//! The layout of the structures of a running interpreter, by its version.

use crate::memory::snapshot::Snapshot;

use super::{
    layout::{Layout, OFFSETS},
    layouts::LAYOUTS,
};

/// Versions that can be read.
const OLDEST: u8 = 8;
/// What `_PyRuntime` begins with from 3.13 on, and where the version stands behind it.
const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");
const TOLD_VERSION: u64 = 8;
/// An offset that is greater belongs to another structure than is thought.
const GREATEST: u64 = 1 << 22;

/// The minor version of an interpreter that tells its offsets.
pub(crate) fn told_version(memory: &mut Snapshot, runtime: u64) -> Option<u8> {
    if memory.word(OFFSETS, runtime).ok()? != COOKIE {
        return None;
    }
    let version = memory.word(OFFSETS, runtime.wrapping_add(TOLD_VERSION)).ok()?;
    (version >> 24 == 3).then_some((version >> 16) as u8)
}

/// The layout of one minor version, for the interpreter whose `_PyRuntime` is at an address of a process.
pub(crate) fn layout_of(minor: u8, memory: &mut Snapshot, runtime: u64) -> Result<Layout, String> {
    let Some(layout) = LAYOUTS.iter().find(|layout| layout.minor == minor) else {
        let newest = LAYOUTS.last().map_or(0, |layout| layout.minor);
        return Err(format!("CPython 3.{minor}, and only 3.{OLDEST} to 3.{newest} can be read"));
    };
    let Some(told) = &layout.debug_offsets else { return Ok(layout.clone()) };
    if told_version(memory, runtime) != Some(minor) {
        return Err(format!("CPython 3.{minor} without its table of offsets"));
    }
    if memory.word(OFFSETS, runtime.wrapping_add(told.free_threaded)).map_err(|torn| torn.to_string())? != 0 {
        return Err(format!("CPython 3.{minor} without a global lock (free-threaded) cannot be read"));
    }
    let layout = layout.corrected(told, memory, runtime).map_err(|torn| torn.to_string())?;
    let plausible = layout.offsets().into_iter().all(|offset| offset < GREATEST);
    if plausible { Ok(layout) } else { Err(format!("CPython 3.{minor} with a table of offsets of another kind")) }
}
