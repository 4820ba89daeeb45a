//! A copied range of another process's memory.

use crate::{error::Error, kernel::procfs::Mapping};

use super::remote::read;

/// Bytes below the stack pointer that a function may use without moving the stack pointer.
pub(crate) const RED_ZONE: u64 = 128;

/// A copy of a range of the target's memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Region {
    pub start: u64,
    pub bytes: Vec<u8>,
}

impl Region {
    /// Copies as many bytes as `buffer` has, or fewer if the mapped memory ends before.
    pub fn read_into(tid: i32, start: u64, mut buffer: Vec<u8>) -> Result<Self, Error> {
        let read = read(tid, start, &mut buffer)?;
        buffer.truncate(read);
        Ok(Region { start, bytes: buffer })
    }

    /// Copies a stack from `sp` upwards, including the red zone below `sp`. The copy stays within
    /// the mapping of the stack, if that is known.
    pub fn read_stack(tid: i32, sp: u64, mapping: Option<&Mapping>, mut buffer: Vec<u8>) -> Result<Self, Error> {
        let start = sp.saturating_sub(RED_ZONE);
        let Some(mapping) = mapping else { return Region::read_into(tid, start, buffer) };
        // The main thread's stack may have grown since its mapping was looked up. Then the kernel
        // ends the read.
        let start = start.max(mapping.start);
        buffer.truncate(usize::try_from(mapping.end.saturating_sub(start)).unwrap_or(usize::MAX));
        Region::read_into(tid, start, buffer)
    }

    pub fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub fn get(&self, address: u64, size: usize) -> Option<&[u8]> {
        let offset = usize::try_from(address.checked_sub(self.start)?).ok()?;
        self.bytes.get(offset..offset.checked_add(size)?)
    }
}
