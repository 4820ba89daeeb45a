//! A copied piece of another process's memory.

use crate::{error::Error, kernel::procfs::Mapping};

use super::remote::read;

/// Below the stack pointer a function may use this much without moving it.
pub(crate) const RED_ZONE: u64 = 128;

/// A copy of a piece of the target's memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Region {
    pub start: u64,
    pub bytes: Vec<u8>,
}

impl Region {
    /// Copies as many bytes as there are in `room`, or until the mapped memory ends.
    pub fn read_into(tid: i32, start: u64, mut room: Vec<u8>) -> Result<Self, Error> {
        let read = read(tid, start, &mut room)?;
        room.truncate(read);
        Ok(Region { start, bytes: room })
    }

    /// A stack from `sp` upwards, with what a function may use below it without moving it, within its mapping if that is known.
    pub fn read_stack(tid: i32, sp: u64, mapping: Option<&Mapping>, mut room: Vec<u8>) -> Result<Self, Error> {
        let start = sp.saturating_sub(RED_ZONE);
        let Some(mapping) = mapping else { return Region::read_into(tid, start, room) };
        // The main thread's stack may have grown since its mapping was looked up; then the read ends where it has to.
        let start = start.max(mapping.start);
        room.truncate(usize::try_from(mapping.end.saturating_sub(start)).unwrap_or(usize::MAX));
        Region::read_into(tid, start, room)
    }

    pub fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub fn get(&self, address: u64, size: usize) -> Option<&[u8]> {
        let offset = usize::try_from(address.checked_sub(self.start)?).ok()?;
        self.bytes.get(offset..offset.checked_add(size)?)
    }
}
