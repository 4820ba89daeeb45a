//! Selects the layout of a running interpreter by its version.

use crate::memory::snapshot::Snapshot;

use super::{
    layout::{Layout, OFFSETS},
    layouts::LAYOUTS,
};

/// Oldest minor version that can be read.
const OLDEST_MINOR: u8 = 8;
/// First bytes of `_PyRuntime` from 3.13 on, and the offset of the version after them.
const COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");
const VERSION_OFFSET: u64 = 8;
/// A larger offset shows that the table is a different one than expected.
const MAX_OFFSET: u64 = 1 << 22;

/// The minor version of an interpreter that has a table of offsets.
pub(crate) fn debug_offsets_version(memory: &mut Snapshot, runtime: u64) -> Option<u8> {
    if memory.read_u64(OFFSETS, runtime).ok()? != COOKIE {
        return None;
    }
    let version = memory.read_u64(OFFSETS, runtime.wrapping_add(VERSION_OFFSET)).ok()?;
    (version >> 24 == 3).then_some((version >> 16) as u8)
}

/// The layout of one minor version, for the interpreter whose `_PyRuntime` is at `runtime`.
pub(crate) fn layout_of(minor: u8, memory: &mut Snapshot, runtime: u64) -> Result<Layout, String> {
    let Some(layout) = LAYOUTS.iter().find(|layout| layout.minor == minor) else {
        let newest = LAYOUTS.last().map_or(0, |layout| layout.minor);
        return Err(format!("CPython 3.{minor}, and only 3.{OLDEST_MINOR} to 3.{newest} can be read"));
    };
    let Some(debug_offsets) = &layout.debug_offsets else { return Ok(layout.clone()) };
    if debug_offsets_version(memory, runtime) != Some(minor) {
        return Err(format!("CPython 3.{minor} without its table of offsets"));
    }
    if memory.read_u64(OFFSETS, runtime.wrapping_add(debug_offsets.free_threaded)).map_err(|error| error.to_string())?
        != 0
    {
        return Err(format!("CPython 3.{minor} without a global lock (free-threaded) cannot be read"));
    }
    let layout = layout.with_debug_offsets(debug_offsets, memory, runtime).map_err(|error| error.to_string())?;
    let plausible = layout.offsets().into_iter().all(|offset| offset < MAX_OFFSET);
    if plausible { Ok(layout) } else { Err(format!("CPython 3.{minor} with a table of offsets of another kind")) }
}
